"""A small client for Turnstile locks, on redis-py. One file: copy it.

    lock = Lock(redis.Redis(), "table:12", lease=10.0, wait=5.0)
    with lock as hold:                                # or NotAcquired
        for page in pages:
            hold.check()                              # raises Lost when somebody else may hold it
            hold.run("RPUSH", "table:12:log", page)   # written only while we hold it, or Fenced
            store.write(page, token=hold.token)       # a store of your own refuses lower tokens

A thread renews the lease at every third of it, until the block ends, however it ends. What can go
wrong has a class each, below; connection errors and time-outs are redis-py's own. In a cluster give
the client of the node that has the key, and ask the cluster client for it again at Moved.

Works with redis-py 4.3 (Debian 12: python3-redis) and newer. turnstile_asyncio.py is the same for
asyncio.
"""

import math
import secrets
import threading
import time

import redis
from redis.exceptions import AskError, ClusterDownError, MovedError, TryAgainError


class LockError(Exception):
    """Everything that a lock can answer instead of what was asked for."""


class NotAcquired(LockError):
    """Others hold the lock, and the time to wait for it is over."""


class Lost(LockError):
    """The hold is over, or nobody can be sure that it is not: stop working."""


class Fenced(LockError):
    """A guarded write came too late. Nothing was written."""


class Deadlock(LockError):
    """Waiting would close a circle of holders that wait for each other. Release what you hold."""


class Superseded(LockError):
    """The wait was ended: a newer call of the same owner, CLIENT UNBLOCK, or a failover."""


class WaitLimit(LockError):
    """So many clients wait on this server that it takes no more."""


class NotPrimary(LockError):
    """This server is a replica. Find the primary and ask there."""


class Moved(LockError):
    """Another node of the cluster has the key, or none just now. Ask the cluster client again."""


ERRORS = {
    "FENCED": Fenced,
    "DEADLOCK": Deadlock,
    "UNBLOCKED": Superseded,
    "WAITLIMIT": WaitLimit,
    "READONLY": NotPrimary,
    "MOVED": Moved,
    "ASK": Moved,
    "TRYAGAIN": Moved,
    "CLUSTERDOWN": Moved,
    # redis-py takes the first word away where it has a class for it.
    redis.ReadOnlyError: NotPrimary,
    MovedError: Moved,
    AskError: Moved,
    TryAgainError: Moved,
    ClusterDownError: Moved,
}


def explained(error):
    """The server's error as one of the classes above, or as it is if it is none of them."""
    kind = ERRORS.get(type(error)) or ERRORS.get(str(error).partition(" ")[0])
    return kind(str(error)) if kind else error


NO_ANSWER = (redis.ConnectionError, redis.TimeoutError)
ANSWERED = (LockError, redis.ResponseError)
NOT_OURS = "the server says that it is not ours any more"
PAUSE = 0.05  # between tries to reach the server
HELD = set()  # the holds whose owner the caller chose: other calls may use the same owner


class LockTerms:
    """What is asked for: a name and options. The part of Lock that does not talk to the server."""

    def __init__(
        self,
        client,
        key,
        lease=10.0,  # seconds, as all times here
        wait=5.0,  # 0: one try
        *,
        owner=None,  # None: a new random one for each hold. A worker that takes one lock while it
        # holds another gives both the same owner: only so can the server see a deadlock. On the
        # same key the same owner is one holder: without reentrant the inner release ends the outer.
        # But an acquire() that fails leaves another hold of this process as it is. So an upgrade
        # that is interrupted keeps the shared hold; if it was granted in the same moment, that hold
        # is exclusive and has a new token
        shared=False,
        limit=None,
        reentrant=False,  # needs an owner. After a lost reply the server may count one too many:
        # then the lease ends the hold
        session=False,
        linger=0.0,
        also=(),  # more keys, taken together with this one or not at all
        renew=True,
        max_hold=None,  # renew no longer than this, and tell the work when it is over
        reply_timeout=2.0,  # how long an answer may take, on top of the wait
    ):
        if reentrant and (session or owner is None):
            # A new owner would wait for itself; a session would end with the inner hold.
            raise ValueError("reentrant needs an owner, and does not go with session")
        self.client = client
        self.key = key
        self.lease = lease
        self.wait = wait
        self.owner = owner
        self.reentrant = reentrant
        self.session = session
        self.renew = renew
        self.max_hold = math.inf if max_hold is None else max_hold
        self.reply_timeout = reply_timeout
        self.keys = 1 + len(also)
        self.names = {key, *also}
        self.entered = {}  # the holds of the `with` blocks that a thread or task is in
        self.also = ["ALSO", len(also), *also] if also else []
        self.options = ["SHARED"] if shared else []
        self.options += ["LIMIT", limit] if limit is not None else []
        self.options += ["REENTRANT"] if reentrant else []
        self.options += ["SESSION"] if session else []
        self.options += ["LINGER", milliseconds(linger)] if linger else []
        self.options += self.also

    def connection(self):
        """A connection like those of the client, but of our own.

        A renewal must not wait until the client's pool has one to spare, and a hold with SESSION
        ends with the connection that acquired it. Time-outs and retries are decided here.
        """
        pool = self.client.connection_pool
        no_retry = {"retry": None, "retry_on_error": [], "retry_on_timeout": False}
        options = {**pool.connection_kwargs, **no_retry, "health_check_interval": 0}
        return pool.connection_class(**options)

    def acquire_command(self, owner, wait):
        lease = milliseconds(self.lease)
        command = ["LOCK.ACQUIRE", self.key, owner, "PX", lease, "WAIT", milliseconds(wait)]
        return command + self.options

    def touch_command(self, owner, lease):
        return ["LOCK.TOUCH", self.key, owner, "PX", milliseconds(lease), *self.also]

    def release_command(self, owner):
        return ["LOCK.RELEASE", self.key, owner, *self.also]

    def held_elsewhere(self):
        """Whether another call has got one of these locks for the same owner, and holds it."""
        others = list(HELD) if self.owner else []  # other threads may change HELD meanwhile
        return any(h.owner == self.owner and h.names & self.names for h in others)

    def may_retry(self, error, deadline):
        if isinstance(error, redis.AuthenticationError):  # a ConnectionError too
            return False
        return isinstance(error, NO_ANSWER) and time.monotonic() < deadline

    def push(self, who, hold):
        self.entered.setdefault(who, []).append(hold)
        return hold

    def pop(self, who):
        holds = self.entered[who]
        hold = holds.pop()
        if not holds:
            del self.entered[who]
        return hold


class HoldState:
    """What is known of a hold. The part of Hold that does not talk to the server."""

    def __init__(self, terms, owner, token, start, lost):
        self.key = terms.key
        self.owner = owner
        self.token = token
        self.lease = terms.lease
        self.lost = lost  # an event: set when the work has to stop
        self._why = None  # it was lost
        self._terms = terms
        self._trouble = "nobody renewed it"  # or the last error of a renewal
        self._released = None  # what release() answered
        self._max_end = start + terms.max_hold
        self._lease_starts(start)
        self.names = terms.names
        if terms.owner:
            HELD.add(self)

    def _lease_starts(self, start):
        """`start` is when we asked. The server's lease began later, so it lasts beyond `until`."""
        self.until = start + self.lease  # on time.monotonic()
        self._due = start + self.lease / 3 if self._terms.renew else math.inf

    def _lease_may_start(self, start, lease):
        """The same while the answer is not known: what counts is the lease that ends first."""
        self.until = min(self.until, start + lease)
        if self._terms.renew:
            self._due = min(self._due, start + lease / 3)

    def _patience(self):
        """For the answer to a TOUCH. Then a new connection is tried; a session has only the one."""
        left = self.until - time.monotonic()
        return left if self._terms.session else min(self.lease / 3, left)

    def _over(self):
        """Why the work has to stop, or None. Asks only the clock."""
        now = time.monotonic()
        if self._why:
            return self._why
        if now >= self.until:
            return f"the lease ran out: {self._trouble}"
        if now >= self._max_end:
            return f"max_hold is over, {self._terms.max_hold} s"
        return None

    def _lose(self, why):
        self._why = self._why or why  # the first reason is the one that counts
        HELD.discard(self)
        self.lost.set()

    def check(self):
        """Raises Lost unless the hold is good. Asks nobody: it knows the end of the lease."""
        why = "it was released" if self._released is not None else self._over()
        if why:
            raise Lost(f"{self.key!r}: {why}")

    def _time_to_next_step(self):
        return max(0.0, min(self._due, self.until, self._max_end) - time.monotonic())

    def _touched(self, answer, lease, start):
        if answer < self._terms.keys:
            self._lose(NOT_OURS)
            self.check()
        self.lease = lease
        self._lease_starts(start)

    def _touch_failed(self, error):
        """That is no loss yet: while the lease lasts it is tried again."""
        if isinstance(error, Lost):
            return
        self._trouble = error
        self._due = time.monotonic() + min(1.0, self.lease / 20)
        if self._terms.session and isinstance(error, NO_ANSWER):
            self._lose(f"its connection was closed: {error}")

    def _fence_command(self, command):
        return ["LOCK.FENCE", self.key, self.token, "THEN", *command]

    def _fence_error(self, error):
        error = explained(error)
        if isinstance(error, Fenced):
            self._lose(str(error))
        return error


def milliseconds(seconds):
    return max(0, math.ceil(seconds * 1000))


# What follows talks to the server. turnstile_asyncio.py has it once more, with await.


class Lock(LockTerms):
    """A lock's name and the terms to hold it. May be used many times and by many threads."""

    def acquire(self, wait=None):
        """A Hold, which renews itself; or an error, and then nothing is held."""
        deadline = time.monotonic() + (self.wait if wait is None else wait)
        owner = self.owner or secrets.token_hex(16)
        link = Link(self.connection())
        unsure = False  # whether a request was sent whose answer we do not know
        while True:
            try:
                if unsure:
                    time.sleep(PAUSE)
                return self._ask(link, owner, deadline)
            except BaseException as error:
                unsure = unsure or not isinstance(error, ANSWERED)
                # Perhaps it was granted. The same owner may ask again: it gets the same token.
                if self.may_retry(error, deadline):
                    continue
                # A newer call of the same owner may have taken our place: not ours to give up.
                newer = self.owner and isinstance(error, Superseded)
                try:
                    if unsure and not newer:
                        self._leave_nothing(link, owner)
                finally:
                    link.close()
                raise

    def _ask(self, link, owner, deadline):
        start = time.monotonic()
        wait = max(0.0, deadline - start)
        # The server does the waiting, and we have to be more patient than it is.
        command = self.acquire_command(owner, wait)
        token = link.ask(wait + self.reply_timeout, command, stay=True)
        if token is None:
            raise NotAcquired(f"{self.key!r} is taken")
        link.brought = token
        if time.monotonic() >= start + self.lease / 3:
            # It waited in line, and only the server knows when the lease began: let it begin anew.
            start = time.monotonic()
            try:
                touched = link.ask(self.reply_timeout, self.touch_command(owner, self.lease))
            except ANSWERED:  # with an error, so we do not get what was granted
                self._leave_nothing(link, owner)
                raise
            if touched < self.keys:
                link.ask(self.reply_timeout, self.release_command(owner))
                raise NotAcquired(f"{self.key!r} was granted, and lost at once")
        return Hold(self, owner, token, start, link)

    def _leave_nothing(self, link, owner):
        """Ends the wait and gives back what may have been granted, if the server can be reached.

        Closing the connection is not enough: the server may hand us the lock before it notices.
        """
        deadline = time.monotonic() + self.reply_timeout
        command = self.release_command(owner)
        other = Link(self.connection())
        try:
            if not self.held_elsewhere():
                # The release behind the question gives up what the question brought. The other one
                # ends the wait; it does nothing if it overtakes the question, hence the loop.
                link.send_behind(command)
                while True:
                    other.ask(self.reply_timeout, command)
                    if link.read_on(PAUSE) or time.monotonic() >= deadline:
                        break
            elif self.reentrant and link.read_on(self.reply_timeout) and link.brought:
                # The owner held it already, so this was counted at once.
                other.ask(self.reply_timeout, command)
            # Else it is an upgrade. A release would give up the older hold too, so the wait ends
            # with its connection.
        except (redis.RedisError, LockError):
            pass
        finally:
            other.close()

    def try_acquire(self):
        """A Hold, or None if it cannot be had at once."""
        try:
            return self.acquire(wait=0)
        except NotAcquired:
            return None

    def __enter__(self):
        return self.push(threading.get_ident(), self.acquire())

    def __exit__(self, *error):
        return self.pop(threading.get_ident()).__exit__(*error)


class Hold(HoldState):
    """A lock that is held. Work until `lost` is set; give `token` to whatever you write to."""

    def __init__(self, lock, owner, token, start, link):
        super().__init__(lock, owner, token, start, threading.Event())
        self._link = link
        self._busy = threading.Lock()  # one question at a time
        self._wake = threading.Event()
        self._stop = False
        self._keeper = threading.Thread(target=self._keep, name="turnstile", daemon=True)
        self._keeper.start()

    def run(self, *command):
        """Runs the command if and only if we still hold the lock, in one step of the server.

        Where the client tries again after a reconnect, it may run twice: let twice be the same as
        once (SET, not INCR). With `also` only the first lock is asked for.
        """
        try:
            return self._terms.client.execute_command(*self._fence_command(command))
        except redis.ResponseError as error:
            raise self._fence_error(error) from None

    def touch(self, lease=None):
        """Lets the lease begin anew; a lease given here is that of later renewals too."""
        with self._busy:
            self.check()
            lease = lease or self.lease
            start = time.monotonic()
            self._lease_may_start(start, lease)
            try:
                command = self._terms.touch_command(self.owner, lease)
                self._touched(self._link.ask(self._patience(), command), lease, start)
            finally:
                self._wake.set()

    def _keep(self):
        """The thread: renews when it is due, and tells the work when the hold is over."""
        while not self._stop:
            why = self._over()
            if why:
                self._lose(why)
                return
            if self._wake.wait(self._time_to_next_step()):
                self._wake.clear()
            elif time.monotonic() >= self._due and not self._over():
                try:
                    self.touch()
                except Exception as error:  # whatever it is, the work must be told in the end
                    self._touch_failed(error)

    def release(self):
        """Gives the lock up and stops the renewal. False: it had been lost before.

        If the server cannot be reached: redis-py's error. The lease will end the hold.
        """
        self._stop = True
        self._wake.set()
        self._keeper.join()  # a renewal that is on its way comes to its end
        with self._busy:
            try:
                if self._released is None:
                    self._released = self._give_up()
            finally:
                self._link.close()
                HELD.discard(self)
        return self._released

    def _give_up(self):
        command, keys = self._terms.release_command(self.owner), self._terms.keys
        patience = self._terms.reply_timeout
        try:
            released = self._link.ask(patience, command) == keys
        except NO_ANSWER as error:
            if self._terms.session or self._over():
                self._lose(f"its connection was closed: {error}")
                return False
            if self._terms.reentrant:  # if it was done, another one would end the outer hold
                self._released = False
                raise
            # Again, over a new connection. 0 means that the first try did it: the lease lasts yet.
            released = self._link.ask(patience, command) == keys or not self._over()
        if not released:
            self._lose(NOT_OURS)
        return released

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        try:
            released = self.release()
        except (redis.RedisError, LockError):
            if error is None:
                raise
            return  # the error of the work is the one to tell
        if not released and error is None:
            raise Lost(f"{self.key!r}: {self._why}")


class Link:
    """A connection, with a time-out for each question."""

    def __init__(self, connection):
        self._connection = connection
        self._owed = 0  # answers that are still to come
        self.brought = None  # the token, also if it came when nobody waited for it any more

    def ask(self, timeout, command, stay=False):
        """The answer. Connects if need be; after an error the next question does.

        With `stay` the connection stays open if there is no answer in time, or if we are
        interrupted: see read_on().
        """
        connection = self._connection
        if self._owed:
            self.close()
        deadline = time.monotonic() + timeout
        connection.socket_timeout = connection.socket_connect_timeout = max(timeout, 0.001)
        try:
            connection.connect()
            self._owed = 1
            connection.send_command(*command)
            if not connection.can_read(max(deadline - time.monotonic(), 0.001)):
                raise redis.TimeoutError(f"no answer in {timeout:.3f} s")
            answer = connection.read_response()
            self._owed = 0
            return answer
        except redis.ResponseError as error:
            self._owed = 0
            raise explained(error) from None
        except BaseException as error:
            # Closed, or a late answer would be taken for that of the next question.
            broken = isinstance(error, redis.ConnectionError) or not connection._sock
            if broken or not stay:
                self.close()
            raise

    def send_behind(self, command):
        """Sends one more command, if the answer to a question is still to come."""
        if self._owed:
            self._owed += 1
            self._connection.send_command(*command)

    def read_on(self, timeout):
        """Reads the answers that are still to come. Whether that was all of them."""
        while self._owed and self._connection.can_read(timeout):
            try:
                answer = self._connection.read_response()
                self.brought = self.brought or answer
            except redis.ResponseError:
                pass
            self._owed -= 1
        return not self._owed

    def close(self):
        self._owed = 0
        self._connection.disconnect()

"""The client of turnstile.py for asyncio: the same names, with await. Copy both files.

    lock = Lock(redis.asyncio.Redis(), "table:12", lease=10.0, wait=5.0)
    async with lock as hold:                              # or NotAcquired
        await hold.run("SET", "table:12:guest", "alice")  # written only while we hold it, or Fenced
        await long_work(token=hold.token)                 # cancelled when the lock is lost

A task renews the lease at every third of it. When the hold is lost, the block is cancelled where it
awaits, and `async with` raises Lost. A cancellation that comes from elsewhere stays one. Needs
Python 3.11, for Task.uncancel().
"""

import asyncio
import secrets
import time

import redis

from turnstile import ANSWERED, HELD, NO_ANSWER, NOT_OURS, PAUSE, HoldState, LockTerms, explained
from turnstile import Deadlock, Fenced, LockError, Lost, Moved, NotAcquired, NotPrimary
from turnstile import Superseded, WaitLimit

__all__ = ["Lock", "Hold", "LockError", "NotAcquired", "Lost", "Fenced", "Deadlock", "Superseded"]
__all__ += ["WaitLimit", "NotPrimary", "Moved"]


class Lock(LockTerms):
    """A lock's name and the terms to hold it. May be used many times and by many tasks."""

    async def acquire(self, wait=None):
        """A Hold, which renews itself; or an error, and then nothing is held."""
        deadline = time.monotonic() + (self.wait if wait is None else wait)
        owner = self.owner or secrets.token_hex(16)
        link = Link(self.connection())
        unsure = False  # whether a request was sent whose answer we do not know
        while True:
            try:
                if unsure:
                    await asyncio.sleep(PAUSE)
                return await self._ask(link, owner, deadline)
            except BaseException as error:  # a cancellation too
                unsure = unsure or not isinstance(error, ANSWERED)
                # Perhaps it was granted. The same owner may ask again: it gets the same token.
                if self.may_retry(error, deadline):
                    continue
                # A newer call of the same owner may have taken our place: not ours to give up.
                newer = self.owner and isinstance(error, Superseded)
                try:
                    if unsure and not newer:
                        await self._leave_nothing(link, owner)
                finally:
                    await link.close()
                raise

    async def _ask(self, link, owner, deadline):
        start = time.monotonic()
        wait = max(0.0, deadline - start)
        # The server does the waiting, and we have to be more patient than it is.
        command = self.acquire_command(owner, wait)
        token = await link.ask(wait + self.reply_timeout, command, stay=True)
        if token is None:
            raise NotAcquired(f"{self.key!r} is taken")
        link.brought = token
        if time.monotonic() >= start + self.lease / 3:
            # It waited in line, and only the server knows when the lease began: let it begin anew.
            start = time.monotonic()
            try:
                touched = await link.ask(self.reply_timeout, self.touch_command(owner, self.lease))
            except ANSWERED:  # with an error, so we do not get what was granted
                await self._leave_nothing(link, owner)
                raise
            if touched < self.keys:
                await link.ask(self.reply_timeout, self.release_command(owner))
                raise NotAcquired(f"{self.key!r} was granted, and lost at once")
        return Hold(self, owner, token, start, link)

    async def _leave_nothing(self, link, owner):
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
                await link.send_behind(command)
                while True:
                    await other.ask(self.reply_timeout, command)
                    if await link.read_on(PAUSE) or time.monotonic() >= deadline:
                        break
            elif self.reentrant and await link.read_on(self.reply_timeout) and link.brought:
                # The owner held it already, so this was counted at once.
                await other.ask(self.reply_timeout, command)
            # Else it is an upgrade. A release would give up the older hold too, so the wait ends
            # with its connection.
        except (redis.RedisError, LockError):
            pass
        finally:
            await other.close()

    async def try_acquire(self):
        """A Hold, or None if it cannot be had at once."""
        try:
            return await self.acquire(wait=0)
        except NotAcquired:
            return None

    async def __aenter__(self):
        hold = await self.acquire()
        return await self.push(asyncio.current_task(), hold).__aenter__()

    async def __aexit__(self, *error):
        return await self.pop(asyncio.current_task()).__aexit__(*error)


class Hold(HoldState):
    """A lock that is held. Give `token` to whatever you write to.

    Without an `async with` block nothing is cancelled: then work until `lost` is set.
    """

    def __init__(self, lock, owner, token, start, link):
        super().__init__(lock, owner, token, start, asyncio.Event())
        self._link = link
        self._busy = asyncio.Lock()  # one question at a time
        self._wake = asyncio.Event()
        self._body = None  # the task in our `async with` block
        self._cut_off = False  # whether we have cancelled it
        self._keeper = asyncio.create_task(self._keep(), name="turnstile")

    async def run(self, *command):
        """Runs the command if and only if we still hold the lock, in one step of the server.

        Where the client tries again after a reconnect, it may run twice: let twice be the same as
        once (SET, not INCR). With `also` only the first lock is asked for.
        """
        try:
            return await self._terms.client.execute_command(*self._fence_command(command))
        except redis.ResponseError as error:
            raise self._fence_error(error) from None

    async def touch(self, lease=None):
        """Lets the lease begin anew; a lease given here is that of later renewals too."""
        async with self._busy:
            self.check()
            lease = lease or self.lease
            start = time.monotonic()
            self._lease_may_start(start, lease)
            try:
                command = self._terms.touch_command(self.owner, lease)
                self._touched(await self._link.ask(self._patience(), command), lease, start)
            finally:
                self._wake.set()

    def _lose(self, why):
        super()._lose(why)
        self._wake.set()

    async def _keep(self):
        """The task: renews when it is due, and stops the work when the hold is over."""
        while not (why := self._over()):
            try:
                async with asyncio.timeout(self._time_to_next_step()):
                    await self._wake.wait()
                self._wake.clear()
            except TimeoutError:
                if time.monotonic() >= self._due and not self._over():
                    try:
                        await self.touch()
                    except Exception as error:  # whatever it is, the work must be told in the end
                        self._touch_failed(error)
        self._lose(why)
        if self._body:
            # Counted here and not at the beginning, because redis-py 4.3 leaves counts behind.
            self._others = self._body.cancelling()
            self._cut_off = self._body.cancel()

    async def release(self):
        """Gives the lock up and stops the renewal. False: it had been lost before.

        If the server cannot be reached: redis-py's error. The lease will end the hold.
        """
        try:
            async with self._busy:  # so that no renewal is cut off in the middle
                self._keeper.cancel()
                await asyncio.wait([self._keeper])
                if self._released is None:
                    self._released = await self._give_up()
        finally:
            self._keeper.cancel()  # also if we are cancelled here, or it would renew for ever
            HELD.discard(self)
            await self._link.close()
        return self._released

    async def _give_up(self):
        command, keys = self._terms.release_command(self.owner), self._terms.keys
        patience = self._terms.reply_timeout
        try:
            released = await self._link.ask(patience, command) == keys
        except NO_ANSWER as error:
            if self._terms.session or self._over():
                self._lose(f"its connection was closed: {error}")
                return False
            if self._terms.reentrant:  # if it was done, another one would end the outer hold
                self._released = False
                raise
            # Again, over a new connection. 0 means that the first try did it: the lease lasts yet.
            released = await self._link.ask(patience, command) == keys or not self._over()
        if not released:
            self._lose(NOT_OURS)
        return released

    async def __aenter__(self):
        if self._keeper.done():  # lost before the block began: nobody would cancel it
            await self.release()
            raise Lost(f"{self.key!r}: {self._why}")
        self._body = asyncio.current_task()
        return self

    async def __aexit__(self, kind, error, trace):
        body, self._body = self._body, None
        # If somebody else has cancelled it after us, it is not for us to turn that into Lost.
        ours = self._cut_off and body.uncancel() <= self._others
        cut_off = ours and kind in (asyncio.CancelledError, None)
        try:
            released = await self.release()
        except (redis.RedisError, LockError):
            if error is None:
                raise
            released = False
        if cut_off or (not released and error is None):
            raise Lost(f"{self.key!r}: {self._why}") from error


class Link:
    """A connection, with a time-out for each question."""

    def __init__(self, connection):
        self._connection = connection
        self._talks = []  # tasks: a question and its answer, perhaps also what was sent behind it
        self._sent = False  # whether the question may have reached the server
        self.brought = None  # the token, also if it came when nobody waited for it any more
        connection.socket_timeout = connection.socket_connect_timeout = None  # see ask()

    async def ask(self, timeout, command, stay=False):
        """The answer. Connects if need be; after an error the next question does.

        With `stay` the connection stays open if there is no answer in time, or if we are
        cancelled: see read_on().
        """
        if self._owed():
            await self.close()
        talk = asyncio.create_task(self._talk(command))
        self._talks = [talk]
        try:
            if not (await asyncio.wait([talk], timeout=timeout))[0]:
                raise redis.TimeoutError(f"no answer in {timeout:.3f} s")
            return talk.result()
        except redis.ResponseError as error:
            raise explained(error) from None
        except BaseException:
            # Closed, or a late answer would be taken for that of the next question.
            if not (stay and self._sent):
                await self.close()
            raise

    async def _talk(self, command):
        self._sent = False
        await self._connection.connect()
        self._sent = True
        await self._connection.send_command(*command)
        return await self._connection.read_response()

    def _owed(self):
        return [talk for talk in self._talks if not talk.done()]

    async def send_behind(self, command):
        """Sends one more command, if the answer to a question is still to come."""
        if self._owed():
            self._talks.append(asyncio.create_task(self._talk_behind(*self._talks, command)))

    async def _talk_behind(self, first, command):
        await self._connection.send_command(*command)
        await asyncio.wait([first])
        if first.exception() is None or isinstance(first.exception(), redis.ResponseError):
            await self._connection.read_response()

    async def read_on(self, timeout):
        """Reads the answers that are still to come. Whether that was all of them."""
        if self._owed() and (await asyncio.wait(self._owed(), timeout=timeout))[1]:
            return False
        for answer in await asyncio.gather(*self._talks[:1], return_exceptions=True):
            if not isinstance(answer, BaseException):
                self.brought = self.brought or answer
        return True

    async def close(self):
        """Closes it at once. redis-py alone would wait for the peer, with TLS up to 30 s."""
        # Closed before it is cancelled, because redis-py then takes leave itself.
        self._abort()
        for talk in self._owed():
            talk.cancel()
        await asyncio.gather(*self._talks, return_exceptions=True)
        self._abort()
        await self._connection.disconnect()

    def _abort(self):
        writer = self._connection._writer  # None: not connected
        if writer:
            writer.transport.abort()

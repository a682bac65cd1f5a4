# SPDX-License-Identifier: BSD-3-Clause
# Copyright (c) 2026 The Turnstile authors
"""The client of turnstile_lock.py for asyncio: the same names, with await. Copy both files.

    lock = Lock(redis.asyncio.Redis(), "table:12", lease=10.0, wait=5.0)
    async with lock as hold:                          # or NotAcquired
        await hold.run("SET", "table:12", "alice")    # written only while we hold it, or Fenced

When the hold is lost the block is cancelled, and the `async with` raises Lost. A cancellation from
outside stays one; the lock is released either way. Waits share one task and one connection, and
the loop's timer renews the leases of all holds. Needs Python 3.11.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
import weakref
from typing import Any, Coroutine, List, Optional, Sequence, Set, Tuple

import redis
import redis.asyncio

from turnstile_lock import CLOSED, IDLE, PAUSE, PENDING, PING_EVERY, Grant, HoldState, Key
from turnstile_lock import LockTerms, Node, Place, Request, ServerCore, Steps, SubscriberCore
from turnstile_lock import Survey, own_connection, shortest, words_of
from turnstile_lock import Deadlock, Fenced, LockError, Lost, Moved, NotAcquired, NotPrimary
from turnstile_lock import Superseded, Unsupported, WaitLimit

__all__ = ["Deadlock", "Fenced", "Grant", "Hold", "Lock", "LockError", "Lost", "Moved"]
__all__ += ["NotAcquired", "NotPrimary", "Server", "Superseded", "Unsupported", "WaitLimit"]

logger = logging.getLogger(__name__)
TASKS: Set[asyncio.Future] = set()  # the loop itself would forget them


def spawn(work: Coroutine) -> asyncio.Task:
    task = asyncio.create_task(work, name="turnstile")
    TASKS.add(task)
    task.add_done_callback(TASKS.discard)
    return task


async def done(task: asyncio.Task, timeout: Optional[float]) -> None:
    """asyncio.wait() for one task, which is what most of the time is spent with."""
    waiter = asyncio.get_running_loop().create_future()

    def wake(*_: Any) -> None:
        if not waiter.done():
            waiter.set_result(None)

    task.add_done_callback(wake)
    timer = None if timeout is None else waiter.get_loop().call_later(timeout, wake)
    try:
        await waiter
    finally:
        task.remove_done_callback(wake)
        if timer:
            timer.cancel()


async def within(timeout: float, work: Coroutine) -> Any:
    """What comes of it, or None. Not asyncio.timeout(), which a task of redis-py 4.3 confuses."""
    task = spawn(work)
    try:
        await asyncio.wait([task], timeout=timeout)
        return task.result() if task.done() else None
    finally:
        task.cancel()


class Keeper:
    """A timer of the loop that renews the leases of all holds, and tells when one is over."""

    def __init__(self) -> None:
        self.holds: Set["Hold"] = set()
        self._loop = asyncio.get_running_loop()
        self._busy: Set[Tuple] = set()
        self._then = math.inf
        self._timer: Optional[asyncio.TimerHandle] = None

    def look_at(self, moment: float) -> None:
        if moment < self._then:  # else it looks in time anyway
            if self._timer:
                self._timer.cancel()
            self._then = moment
            self._timer = self._loop.call_at(moment, self._look)  # also time.monotonic()

    def _look(self) -> None:
        self._then, self._timer = math.inf, None
        try:
            survey = Survey(self.holds.copy(), self._busy)
            for hold, why in survey.over:
                hold.ended()
                hold.lose(why)
            for group, holds in survey.due.items():
                self._busy.add(group)
                spawn(self._renew(group, holds))
            self.look_at(survey.then)
        except Exception:  # renewal must go on
            logger.exception("Leases were not renewed")
            self.look_at(time.monotonic() + PAUSE)

    async def _renew(self, group: Tuple, holds: List["Hold"]) -> None:
        locked: List["Hold"] = []
        try:
            for hold in holds:
                if not hold._busy.locked():
                    await hold._busy.acquire()
                    locked.append(hold)
            wanted = [hold for hold in locked if hold.wants_renewal()]
            if wanted:
                await group[0].drive(group[0].renewing(wanted))
        except Exception as error:  # tried again, until the lease is over
            logger.exception("Leases were not renewed")
            for hold in locked:
                hold.renewed(error, 0)
        finally:
            for hold in locked:
                hold._busy.release()
            self._busy.discard(group)
            self.look_at(0)


KEEPERS: "weakref.WeakKeyDictionary[Any, Keeper]" = weakref.WeakKeyDictionary()


def keeper() -> Keeper:
    loop = asyncio.get_running_loop()
    if loop not in KEEPERS:
        KEEPERS[loop] = Keeper()
    return KEEPERS[loop]


class Subscriber(SubscriberCore):
    """A connection that hears what becomes of all the waits of this process, and its task."""

    def __init__(self, pool: Any, sharded: bool) -> None:
        super().__init__(sharded)
        self._pool = weakref.ref(pool)
        self._changed = asyncio.Event()
        self._connection: Any = None
        self._task: Optional[asyncio.Task] = None

    async def join(self, place: Place, channel: str, timeout: float) -> None:
        """Returns when we are subscribed, and messages for this place will be heard."""
        self.add(place, channel)
        if channel not in self.channels:
            self.channels[channel] = None
            if self._connection:
                await self._subscribe(channel)
        if not self._task:
            self._task = spawn(self._run())
        await within(timeout, self._settled(channel))
        self.outcome(channel)

    async def _settled(self, channel: str) -> None:
        while self.channels.get(channel) is None:
            await self._changed.wait()

    async def _subscribe(self, channel: str) -> None:
        self.asked.append(channel)
        try:
            await self._connection.send_command(self.verb, channel)
        except (redis.RedisError, OSError):
            pass  # the task will notice

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _run(self) -> None:
        connection: Any = None
        while True:
            try:
                connection = own_connection(self._pool())
                await connection.connect()
                connection.socket_timeout = None  # it may hear nothing for long
                self._connection = connection
                for channel in list(self.channels):
                    await self._subscribe(channel)
                await self._listen(connection)
            except Exception as error:  # whatever it is, those who wait must not wait for ever
                self._connection = None
                self.broken(error)
                self._tell()
                if self.closed or not self.places or not self._pool():
                    self.channels.clear()
                    self._task = None
                    return
            finally:
                self._connection = None
                if connection:
                    await hang_up(connection)
            await asyncio.sleep(PAUSE)

    async def _listen(self, connection: Any) -> None:
        quiet = 0
        reading = spawn(self._read(connection))
        try:
            while not (self.closed or reading.done()) and quiet < 2 and self._pool():
                self._quiet = True
                await asyncio.wait([reading], timeout=PING_EVERY)
                quiet = quiet + 1 if self._quiet else 0
                if quiet == 1:
                    await connection.send_command("PING")
        finally:
            abort(connection)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        if not reading.cancelled():
            raise reading.exception()
        raise redis.ConnectionError("the subscriber hears nothing")

    async def _read(self, connection: Any) -> None:
        while True:
            try:
                reply = await connection.read_response(disable_decoding=True)
            except redis.ResponseError as error:
                reply = error
            self._quiet = False
            self.heard(reply)
            self._tell()

    async def close(self) -> None:
        self.closed = True
        if self._connection:
            abort(self._connection)
        if self._task:
            await asyncio.wait([self._task])


class Server(ServerCore):
    """What talks to the server, or cluster, of one client. Drop-ins build upon it.

    The same as turnstile_lock.Server, see there.
    """

    def __init__(self, client: Any, plain: bool = False) -> None:
        super().__init__(client, plain)
        self._loop = asyncio.get_running_loop()
        self._mutex = asyncio.Lock()

    def outlived(self) -> bool:
        return self._loop is not asyncio.get_running_loop()

    def holds(self) -> Set["Hold"]:
        return keeper().holds

    async def close(self) -> None:
        subscribers, self._subscribers = self._subscribers, {}
        idle, self._idle = self._idle, {}
        for subscriber in subscribers.values():
            await subscriber.close()
        for connection in itertools.chain(*idle.values()):
            await hang_up(connection)
        for node in self._strangers.values():
            await node.pool.node.disconnect()
        for hold in self.holds().copy():  # at last, for it may cancel our own task
            if hold._server is self:
                hold.ended()
                hold.lose(CLOSED)
                if hold._grant.session:
                    abort(hold._grant.session)

    async def drive(self, steps: Steps) -> Any:
        step, argument = steps.send, None
        while True:
            try:
                name, *arguments = step(argument)
                step, argument = steps.send, await getattr(self, name)(*arguments)
            except StopIteration as end:
                return end.value
            except BaseException as error:
                if steps.gi_frame is None:
                    raise
                step, argument = steps.throw, error

    # The steps.

    async def _ask(
        self,
        node: Node,
        commands: List[Sequence],
        patience: Optional[float],
        request: Optional[Request] = None,
        alone: bool = False,
    ) -> List[Any]:
        """The replies, errors among them. `alone`: not on a connection that others may want."""
        if not alone:
            patience = shortest(patience, node.pool.connection_kwargs.get("socket_timeout"))
        link = Link(len(commands))
        talk = self._loop.create_task(self._talk(link, node, commands, request, alone))
        try:
            await done(talk, patience)
            if not talk.done():
                raise redis.TimeoutError(f"no answer in {patience:.3f} s")
            return talk.result()
        except BaseException:
            await asyncio.shield(spawn(self._clean_up(talk, link, node, request, alone)))
            raise

    async def _talk(
        self,
        link: "Link",
        node: Node,
        commands: List[Sequence],
        request: Optional[Request],
        alone: bool,
    ) -> List[Any]:
        """A task of its own, so that it can go on when whoever asked is cancelled."""
        pool = node.pool
        connection = await (self._own(node) if alone else pool.get_connection(*words_of(pool)))
        limit = connection.socket_timeout
        set_time_out(connection, None)  # at its own redis-py would close the connection
        replies: List[Any] = []
        try:
            if link.owed == 0:  # redis-py 4.3 sometimes loses a cancellation
                raise asyncio.CancelledError
            link.connection = connection
            await connection.send_packed_command(connection.pack_commands(commands))
            link.listens = True
            while len(replies) < link.owed:
                try:
                    replies.append(await connection.read_response())
                except redis.ResponseError as error:
                    replies.append(error)
            return replies[: len(commands)]
        except BaseException:
            await hang_up(connection)
            raise
        finally:
            link.listens = False
            set_time_out(connection, limit)
            await self._put_back(node, connection, request, alone)

    async def _clean_up(
        self,
        talk: asyncio.Task,
        link: "Link",
        node: Node,
        request: Optional[Request],
        alone: bool,
    ) -> None:
        """Sends a release behind the request whose answer nobody waits for any more.

        See turnstile_lock.Server._take_back.
        """
        try:
            if request and link.connection and (request.reentrant or not request.guest):
                release = self.release_command(request.keys, request.owner, certain=True)
                limit = node.pool.connection_kwargs.get("socket_timeout")
                patience = shortest(request.patience, limit)
                end = time.monotonic() + patience
                behind = link.listens and not request.guest
                if behind:
                    link.owed += 1
                    await link.connection.send_command(*release, check_health=False)
                while not talk.done() and time.monotonic() < end:
                    await asyncio.wait([talk], timeout=PAUSE)
                    if alone and behind and not talk.done():
                        await self._ask(node, [release], patience)
                if talk.done() and not talk.exception():
                    if request.guest and isinstance(talk.result()[-1], int):
                        await self._ask(node, [release], patience)
                    request.unsure = not behind
        except (redis.RedisError, OSError):
            pass
        finally:
            if link.connection and not talk.done():
                abort(link.connection)
            link.owed = 0
            talk.cancel()
            await asyncio.gather(talk, return_exceptions=True)

    async def _park(self, request: Request, node: Node, command: List, moment: float) -> Any:
        link = Link(1)
        talk = self._loop.create_task(self._talk(link, node, [command], None, True))
        request.parked = node, link, talk
        await done(talk, moment)
        return await self._unpark(request, False) if talk.done() else PENDING

    async def _unpark(self, request: Request, abort: bool) -> Any:
        node, link, talk = request.parked
        if abort:
            request.parked = None
            return await asyncio.shield(spawn(self._clean_up(talk, link, node, request, True)))
        await done(talk, request.patience)
        if not talk.done():
            raise redis.TimeoutError(f"no answer in {request.patience:.3f} s")
        request.parked = None
        return talk.result()[0]

    async def _own(self, node: Node) -> Any:
        idle = self._idle.setdefault(node.name, [])
        while idle:
            connection = idle.pop()
            reader = connection._reader
            if connection.is_connected and not (reader.at_eof() or reader._buffer):
                return connection
            await hang_up(connection)  # the server has closed it, or says what nobody asked for
        connection = own_connection(node.pool)
        await connection.connect()
        return connection

    async def _put_back(
        self, node: Node, connection: Any, request: Optional[Request], alone: bool
    ) -> None:
        if not alone:
            await node.pool.release(connection)
        elif connection.is_connected and request and request.session:
            request.connection = connection
        elif connection.is_connected and len(self._idle.setdefault(node.name, [])) < IDLE:
            self._idle[node.name].append(connection)
        else:
            await hang_up(connection)

    async def _join(self, place: Place, node: Node, channel: str, timeout: float) -> None:
        subscriber = self._subscribers.get(node.name)
        if subscriber is None or subscriber.closed:
            subscriber = self._subscribers[node.name] = Subscriber(node.pool, self.cluster)
        await subscriber.join(place, channel, timeout)

    async def _message(self, place: Place, timeout: float) -> Tuple[str, str]:
        return await within(timeout, place.box.get()) or ("", "")

    def _box(self) -> Any:
        return asyncio.Queue()

    async def _sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def _finish(self, steps: Steps) -> None:
        await asyncio.shield(spawn(self.drive(steps)))

    async def _drop(self, connection: Any) -> None:
        await hang_up(connection)

    async def _refresh(self) -> None:
        async with self._mutex:
            try:
                if self.client._initialize:
                    await self.client.initialize()
                else:
                    await self.client.nodes_manager.initialize()
            except Exception:
                pass  # none of the nodes it knows answers, for now

    def _cluster_node(self, node: Any) -> Node:
        known = self._nodes.get(node.name)
        if known is None or known.pool.node is not node:
            known = self._nodes[node.name] = Node(node.name, NodePool(node))
        return known

    def _node_at(self, host: str, port: int) -> Node:
        """The node at this address, of which the client may never have heard."""
        known = self.client.get_node(host=host, port=port)
        if known:
            return self._cluster_node(known)
        name = f"{host}:{port}"
        if name not in self._strangers:
            options = self.client.nodes_manager.connection_kwargs
            node = redis.asyncio.cluster.ClusterNode(host, port, **options)
            self._nodes[name] = self._strangers[name] = Node(name, NodePool(node))
        return self._strangers[name]

    def forked(self) -> None:
        pass  # a loop does not survive a fork


def set_time_out(connection: Any, limit: Optional[float]) -> None:
    """redis-py 4.3 has copies of it in the parser."""
    parser = getattr(connection, "_parser", None)
    connection.socket_timeout = limit
    if hasattr(parser, "_socket_timeout"):
        parser._socket_timeout = limit
    if hasattr(getattr(parser, "_buffer", None), "socket_timeout"):
        parser._buffer.socket_timeout = limit


class Link:
    """What is known of an exchange: its connection, when it has one, and how many answers are due."""

    def __init__(self, owed: int) -> None:
        self.owed = owed
        self.listens = False
        self.connection: Any = None


class NodePool:
    """The connections of a node of a cluster, which has no pool."""

    def __init__(self, node: Any) -> None:
        self.node = node
        self.connection_class = node.connection_class
        self.connection_kwargs = node.connection_kwargs

    async def get_connection(self) -> Any:
        connection = self.node.acquire_connection()
        try:
            await connection.connect()
        except BaseException:
            await self.release(connection)
            raise
        return connection

    async def release(self, connection: Any) -> None:
        release = getattr(self.node, "release", self.node._free.append)
        release(connection)


def abort(connection: Any) -> None:
    """Closes it at once. redis-py alone would wait for the peer, with TLS up to 30 s."""
    writer = connection._writer  # None: not connected
    if writer:
        writer.transport.abort()


async def hang_up(connection: Any) -> None:
    abort(connection)
    await connection.disconnect()


class Lock(LockTerms):
    """A lock's name and the terms to hold it. May be used many times and by many tasks."""

    async def acquire(self, wait: Optional[float] = None, owner: Optional[Key] = None) -> "Hold":
        """A Hold, which renews itself; or an error, and then nothing is held.

        An owner that holds the lock already, in this process or another, gets the same token.
        """
        server = self.server_of(Server)
        return await server.drive(self.insisting(server, owner, wait))

    async def try_acquire(self) -> Optional["Hold"]:
        """A Hold, or None if it cannot be had at once."""
        server = self.server_of(Server)
        return await server.drive(self.acquiring(server, None, 0))

    async def adopt(self, owner: Key, token: Optional[int] = None) -> "Hold":
        """A Hold of what this owner holds (under this token), whoever acquired it; or Lost."""
        server = self.server_of(Server)
        return await server.drive(self.adopting(server, owner, token))

    async def locked(self) -> bool:
        """Whether anybody holds it."""
        return await self.server_of(Server).ask(self.key, "EXISTS", self.key) == 1

    async def __aenter__(self) -> "Hold":
        hold = await (await self.acquire()).__aenter__()
        return self.push(asyncio.current_task(), hold)

    async def __aexit__(self, *error: Any) -> None:
        return await self.pop(asyncio.current_task()).__aexit__(*error)

    def is_gone(self, who: asyncio.Task) -> bool:
        return who.done()


class Hold(HoldState):
    """A lock that is held. Give `token` to whatever you write to.

    Without an `async with` block nothing is cancelled: then work until `lost` is set.
    """

    _event = asyncio.Event

    def __init__(
        self, lock: Lock, server: Server, owner: Key, grant: Grant, max_end: float = math.inf
    ) -> None:
        self._body: Optional[asyncio.Task] = None  # the task in our `async with` block
        self._cut_off = False  # whether we have cancelled it
        super().__init__(lock, server, owner, grant, keeper(), asyncio.Lock(), max_end)

    def lose(self, why: str) -> None:
        super().lose(why)
        if self._body and not self._cut_off:
            # Counted here and not at the beginning, because redis-py 4.3 leaves counts behind.
            self._others = self._body.cancelling()
            self._cut_off = self._body.cancel()

    async def run(self, *command: Any) -> Any:
        """Runs the command if and only if we still hold the lock, in one step of the server.

        Where the connection is lost it may have run. With `also` only the first lock is asked for.
        """
        return await self._server.drive(self.running(command))

    async def touch(self, lease: Optional[float] = None) -> None:
        """Lets the lease begin anew; a lease given here is that of later renewals too."""
        try:
            async with self._busy:
                await self._server.drive(self.touching(lease))
        finally:
            self._keeper.look_at(0)

    async def owned(self) -> bool:
        """Whether the server says that it is ours."""
        return await self._server.drive(self.owning())

    async def release(self) -> bool:
        """Gives the lock up and stops the renewal. False: it had been lost before.

        If the server cannot be reached: redis-py's error. The lease will end the hold.
        """
        try:
            async with self._busy:  # a renewal that is on its way comes to its end
                return await self._server.drive(self.giving_up())
        finally:
            self.ended()  # also if we are cancelled here, or it would be renewed for ever
            if self._grant.session:
                await hang_up(self._grant.session)

    def wants_renewal(self) -> bool:
        """Not if its connection is gone: then so is the hold."""
        session = self._grant.session
        if session and (not session.is_connected or session._reader.at_eof()):
            self.lose("its connection was closed: the server closed it")
        return self._released is None and not self.over()

    async def __aenter__(self) -> "Hold":
        if self._why:  # lost before the block began: nobody would cancel it
            await self.release()
            raise Lost(f"{self.key!r}: {self._why}")
        self._body = asyncio.current_task()
        return self

    async def __aexit__(self, kind: Any, error: Any, trace: Any) -> None:
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


Lock.hold_class = Hold

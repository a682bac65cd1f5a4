# SPDX-License-Identifier: BSD-3-Clause
# Copyright (c) 2026 The Turnstile authors
"""A client for Turnstile locks, on redis-py. One file: copy it.

    lock = Lock(redis.Redis(), "table:12", lease=10.0, wait=5.0)
    with lock as hold:                                # or NotAcquired
        for page in pages:
            hold.check()                              # raises Lost when somebody else may hold it
            hold.run("RPUSH", "table:12:log", page)   # written only while we hold it, or Fenced
            store.write(page, token=hold.token)       # a store of your own refuses lower tokens

Acquire and release are one command each, on the connections of your client (Redis or RedisCluster).
Whoever has to wait stands in a line of the server. A short wait blocks one of three connections,
which are used again; a longer one, or one more, is told of its end (LOCK.ACQUIRE ... NOTIFY) over a
connection that all waits of this process share. One thread renews the leases of all holds.
Only a hold with session=True has a connection of its own: it ends with it.

What can go wrong has a class each, below; connection errors and time-outs are redis-py's own.
Works with redis-py 4.3 (Debian 12: python3-redis) to 8. turnstile_lock_asyncio.py is the same for
asyncio.
"""

from __future__ import annotations

import binascii
import collections
import hashlib
import inspect
import itertools
import logging
import math
import os
import queue
import random
import secrets
import select
import socket
import threading
import time
import weakref
from typing import Any, Callable, Collection, Dict, Generator, Iterable, List, NamedTuple, Optional
from typing import Sequence, Set, Tuple, Union

import redis
from redis.exceptions import AskError, ClusterDownError, MovedError, SlotNotCoveredError
from redis.exceptions import NoPermissionError, TryAgainError

Key = Union[str, bytes]
Steps = Generator[Tuple, Any, Any]  # see ServerCore


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
    """The wait was ended: a newer call or a release of the same owner, or CLIENT UNBLOCK."""


class WaitLimit(LockError):
    """So many clients wait on this server that it takes no more."""


class NotPrimary(LockError):
    """This server is a replica. Find the primary and ask there."""


class Moved(LockError):
    """Another node of the cluster has the key: give a RedisCluster, not the client of one node."""


class Unsupported(LockError):
    """The server does not have the module, so this cannot be had. See `fallback` and `without`."""


KINDS = {
    "FENCED": Fenced,
    "DEADLOCK": Deadlock,
    "UNBLOCKED": Superseded,
    "WAITLIMIT": WaitLimit,
    "READONLY": NotPrimary,
    "MOVED": Moved,
    "ASK": Moved,
    "TRYAGAIN": Moved,
    "CLUSTERDOWN": Moved,
}
# redis-py takes the first word away where it has a class for it.
FIRST_WORDS = {
    redis.ReadOnlyError: "READONLY",
    NoPermissionError: "NOPERM",
    MovedError: "MOVED",
    AskError: "ASK",
    TryAgainError: "TRYAGAIN",
    ClusterDownError: "CLUSTERDOWN",
}
NOT_OURS = "the server says that it is not ours any more"
CLOSED = "its client was closed"
NO_MODULE = "this server does not have the Turnstile module"
PAUSE = 0.05  # between tries to reach the server
MARGIN = 0.5  # for a message that is on its way when the wait is over
PING_EVERY = 5.0  # on a subscriber that hears nothing
IDLE = 3  # connections that are kept for the next blocking wait
PARK = 1.0  # so long a wait may block one of them; then it waits for a message
SKIPS = 8  # how often a lock that was taken is not tried before standing in line
LONGEST = 2e6  # seconds that poll() takes for a time-out
PENDING = object()  # instead of a reply
RESP2 = inspect.signature(
    getattr(redis.connection, "AbstractConnection", redis.connection.Connection).__init__
).parameters.keys() & {"protocol"}
IF_OURS = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call(%s) end return 0"
RELEASE = IF_OURS % "'DEL', KEYS[1]"
TOUCH = IF_OURS % "'PEXPIRE', KEYS[1], ARGV[2]"
logger = logging.getLogger(__name__)
SERVERS: "weakref.WeakSet[ServerCore]" = weakref.WeakSet()


def first_word(error: BaseException) -> str:
    return FIRST_WORDS.get(type(error)) or str(error).partition(" ")[0]


def explained(error: Exception) -> Exception:
    """The server's error as one of the classes above, or as it is if it is none of them."""
    kind = KINDS.get(first_word(error)) if isinstance(error, redis.RedisError) else None
    return kind(str(error)) if kind else error


def milliseconds(seconds: float) -> int:
    return max(0, math.ceil(seconds * 1000))


def slot_of(key: Any) -> int:
    """The slot of the cluster in which a key is."""
    name = key if isinstance(key, bytes) else str(key).encode()
    begin = name.find(b"{")
    end = name.find(b"}", begin + 1) if begin >= 0 else -1
    return binascii.crc_hqx(name[begin + 1 : end] if end > begin + 1 else name, 0) % 16384


TAGS: Dict[int, int] = {}  # for a slot, a number that hashes to it
NUMBERS = itertools.count()


def tag_of(slot: int) -> int:
    while slot not in TAGS:
        number = next(NUMBERS)
        TAGS.setdefault(binascii.crc_hqx(b"%d" % number, 0) % 16384, number)
    return TAGS[slot]


def also(keys: Sequence[Key]) -> List:
    return ["ALSO", len(keys) - 1, *keys[1:]] if len(keys) > 1 else []


def fields(reply: Any) -> Dict[str, Any]:
    """A map of the server, which with RESP2 is a flat list."""
    pairs = reply.items() if isinstance(reply, dict) else zip(reply[::2], reply[1::2])
    return {text(name): value for name, value in pairs}


def text(word: Any) -> str:
    return word.decode(errors="replace") if isinstance(word, bytes) else str(word)


def exactly(word: Any) -> str:
    """For comparisons: no two words become the same."""
    return word.decode(errors="surrogateescape") if isinstance(word, bytes) else str(word)


def own_connection(pool: Any, patience: float = PING_EVERY) -> Any:
    """A connection like those of the pool, but not one of them. Time-outs are decided by us."""
    options = {
        name: value
        for name, value in pool.connection_kwargs.items()
        if "maint_notifications" not in name and not name.startswith("orig_")
    }
    options.update(retry=None, retry_on_error=[], retry_on_timeout=False, health_check_interval=0)
    options.update(decode_responses=False, **dict.fromkeys(RESP2, 2))
    connection = pool.connection_class(**options)
    connection.socket_timeout = connection.socket_connect_timeout = min(patience, PING_EVERY)
    return connection


class Grant(NamedTuple):
    token: Optional[int]  # None: from a server without the module
    valid_from: float  # on time.monotonic(): the lease lasts at least as long, counted from here
    place: Optional["Place"] = None  # hears of a loss
    session: Any = None  # the connection with which the hold ends


class Node(NamedTuple):
    name: str  # of a node of a cluster
    pool: Any


class Place:
    """A place in a line: the id of the request, and what was said about it."""

    def __init__(self, box: Any) -> None:
        self.id = secrets.token_hex(16)
        self.box = box  # a queue
        self.subscriber: Optional[SubscriberCore] = None
        self.channel = ""
        self._follow: Optional[Tuple[int, Callable[[str], None]]] = None

    def tell(self, kind: str, rest: str) -> None:
        self.box.put_nowait((kind, rest))
        if self._follow:
            self.follow(*self._follow)

    def follow(self, token: int, lost: Callable[[str], None]) -> None:
        """From now on only a loss of this token is of interest."""
        self._follow = (token, lost)
        while True:
            try:
                kind, rest = self.box.get_nowait()
            except Exception:  # it is empty
                return
            if kind == "lost" and rest.startswith(f"{token} "):
                lost(rest.split(" ")[1])

    def leave(self) -> None:
        if self.subscriber:
            self.subscriber.places.pop(self.id, None)


def forgotten(grant: Grant) -> Steps:
    """For those who do not want to be told of a loss."""
    if grant.place:
        grant.place.leave()
    return grant._replace(place=None)
    yield  # so that it is a generator, as all steps


class Request:
    """One call of acquire(), and what is known of it."""

    def __init__(
        self,
        keys: Sequence[Key],
        owner: Key,
        lease: int,
        wait: int,
        options: Sequence,
        patience: float,
        holds: Optional[Set["HoldState"]],  # None: nobody else knows the owner
    ) -> None:
        self.keys, self.key, self.owner, self.lease = keys, keys[0], owner, lease
        self.patience = patience
        self.begin = time.monotonic()
        self.deadline = self.begin + wait / 1000
        # What is granted by message is confirmed at once; until then a short lease will do.
        self.short = min(lease, max(2000, milliseconds(2 * patience)))
        self.options, self.line = list(options), []
        if "MAXLINE" in options:  # goes with WAIT only
            at = self.options.index("MAXLINE")
            self.line, self.options[at : at + 2] = self.options[at : at + 2], []
        self.session = "SESSION" in options
        self.reentrant = "REENTRANT" in options
        # Another call of this process holds it for the same owner: not ours to give up.
        self.guest = any(
            hold.owner == owner and not hold._why and not hold.names.isdisjoint(keys)
            for hold in (holds or set()).copy()
        )
        self.named = holds is not None
        self.unsure = False  # whether the server may have a hold or a wait of ours
        self.connection: Any = None  # of the session
        self.parked: Any = None  # the node, the connection that is blocked, and more

    def left(self) -> float:
        return self.deadline - time.monotonic()

    def command(self, lease: int, *more: Any) -> List:
        words = ["LOCK.ACQUIRE", self.key, self.owner, "PX", lease, *self.options, *more]
        return words + also(self.keys)

    def waiting_command(self, lease: int, *more: Any) -> List:
        return self.command(lease, "WAIT", milliseconds(self.left()), *self.line, *more)


class ServerCore:
    """What is to be said to a server, and in which order. The part of Server that does not talk.

    Each method with -> Steps is a generator. It yields what is to be done next, as the name of a
    method of Server and its arguments, and is sent what came of it, or the exception.
    """

    def __init__(self, client: Any, plain: bool) -> None:
        self.client = client
        self.cluster = hasattr(client, "nodes_manager")
        self.plain = plain
        self.module: Optional[bool] = False if plain else None  # None: not known to be missing
        self._compare: Optional[List] = None  # the command that deletes what it compares, or []
        self._deaf = False  # whether we may not subscribe, or the server not publish for us
        self._channel = "turnstile:" + secrets.token_hex(16)
        self._subscribers: Dict[str, Any] = {}
        self._idle: Dict[str, List] = {}  # connections for blocking waits
        self._parked: Set[Request] = set()  # those that block one of them now
        self._crowded: Dict[Key, int] = {}  # locks that were taken: how often not to try them first
        self._moved: Dict[int, str] = {}  # slots of which we know better than the client
        self._nodes: Dict[str, Node] = {}
        self._strangers: Dict[str, Node] = {}  # those of which the client has not heard
        self._node = None if self.cluster else Node("", client.connection_pool)
        SERVERS.add(self)

    @classmethod
    def of(cls, client: Any, plain: bool = False) -> Any:
        """The object that all clients of this connection pool, or cluster, share."""
        home = client if hasattr(client, "nodes_manager") else client.connection_pool
        servers = vars(home).setdefault("_turnstile", {})  # there, so that it lives as long
        server = servers.get((cls, plain))
        if server is None:
            server = servers.setdefault((cls, plain), cls(client, plain))
        elif server.outlived():
            server = servers[cls, plain] = cls(client, plain)
        return server

    def outlived(self) -> bool:
        return False

    def holds(self) -> Set["HoldState"]:
        """All that are renewed where this object is used, and those that nobody renews."""
        raise NotImplementedError

    # What Server offers; of the asyncio one each is to be awaited.

    def acquire(
        self,
        keys: Sequence[Key],
        owner: Key,
        lease_ms: int,
        wait_ms: int,
        options: Sequence = (),
        *,
        reply_timeout: float = 2.0,
        fallback: bool = False,
        without: Collection[str] = (),
        named: bool = True,
    ) -> Any:
        """A Grant of all the keys to this owner, or None if they cannot be had within wait_ms.

        `options` are words of LOCK.ACQUIRE, such as ["TAG", "host-1"]; not PX, WAIT, NOTIFY, ALSO.
        Not `named`: this is the only call that knows the owner.
        Whatever it raises, also KeyboardInterrupt, it leaves no hold and no wait. Renews nothing.
        """
        holds = self.holds() if named else None
        request = Request(keys, owner, lease_ms, wait_ms, options, reply_timeout, holds)
        return self.drive(self.acquiring(request, fallback, without))

    def touch(
        self, keys: Sequence[Key], owner: Key, lease_ms: int, *, reply_timeout: float = 2.0
    ) -> Any:
        """How many of the leases now end that long from now (counted from before the call)."""
        return self.drive(self.touching(keys, owner, lease_ms, reply_timeout))

    def release(self, keys: Sequence[Key], owner: Key, *, reply_timeout: float = 2.0) -> Any:
        """How many of the locks this owner gave up, or stopped waiting for."""
        return self.drive(self.releasing(keys, owner, reply_timeout))

    def abandon(self, keys: Sequence[Key], owner: Key, *, reply_timeout: float = 2.0) -> Any:
        """release(), as far as the server can be reached."""
        return self.drive(self.abandoning(keys, owner, reply_timeout))

    def ask(self, key: Key, *command: Any, reply_timeout: Optional[float] = 2.0) -> Any:
        """The reply to a command about this key, from the right node. Not sent again if it is lost."""
        return self.drive(self.asking_once(key, command, reply_timeout))

    def node_of(self, key: Key) -> Node:
        if self._node:
            return self._node
        node = self._nodes.get(self._moved.get(slot_of(key), ""))
        try:
            return node or self._cluster_node(self.client.get_node_from_key(key))
        except SlotNotCoveredError as error:
            raise ClusterDownError(str(error)) from None

    def channel_of(self, key: Key) -> str:
        return f"{self._channel}:{{{tag_of(slot_of(key))}}}" if self.cluster else self._channel

    # One command, at the right node.

    def asking(
        self,
        key: Key,
        command: Sequence,
        patience: Optional[float],
        request: Optional[Request] = None,
        node: Optional[Node] = None,  # there and nowhere else
        alone: bool = False,
    ) -> Steps:
        """The reply, and when it was asked for.

        Only a request is asked again after a lost connection: it is no harm, because the same owner
        gets the same token.
        """
        end = request.deadline if request else 0.0
        if self.cluster:
            end = max(end, time.monotonic() + (patience or 2.0))
        other = None  # the node that the server sent us to, for once
        while True:
            start = time.monotonic()
            before = request and request.unsure
            try:
                commands = [("ASKING",), command] if other else [command]
                at, other = node or other or self.node_of(key), None
                if request:
                    request.unsure = True
                reply = (yield "_ask", at, commands, patience, request, alone)[-1]
                if request and (reply is None or isinstance(reply, Exception)):
                    request.unsure = before
                if isinstance(reply, Exception):
                    raise reply
                return reply, start
            except redis.RedisError as error:
                if node or not (yield from self._recovering(error, end, request is not None)):
                    raise
                if first_word(error) == "ASK":
                    other = self._node_at(error.host, error.port)

    def asking_once(self, key: Key, command: Sequence, patience: Optional[float]) -> Steps:
        return (yield from self.asking(key, command, patience))[0]

    def _recovering(self, error: Exception, end: float, again: bool) -> Steps:
        """Whether there is any point in asking again. First does what can be done about it."""
        word = first_word(error)
        if time.monotonic() >= end or isinstance(error, redis.AuthenticationError):
            return False
        if isinstance(error, redis.ConnectionError):
            self._moved.clear()
        elif not self.cluster or KINDS.get(word) not in (Moved, NotPrimary):
            return False
        elif word == "ASK":
            return True
        elif word == "MOVED":
            name = self._node_at(error.host, error.port).name
            known, self._moved[error.slot_id] = self._moved.get(error.slot_id), name
            if known != name:
                return True
        if self.cluster and word != "TRYAGAIN":
            yield ("_refresh",)
        if isinstance(error, redis.ConnectionError) and not again:
            return False
        yield "_sleep", PAUSE
        return True

    # Acquire.

    def acquiring(
        self,
        request: Request,
        fallback: bool,
        without: Collection[str],
        hold: Callable[[Grant], Steps] = forgotten,
    ) -> Steps:
        """What `hold` makes of the Grant, or None."""
        grant = None
        try:
            if self.module is not False:
                try:
                    grant = yield from self._obtaining(request)
                except redis.ResponseError as error:
                    yield from self.learning(error, request.key, request.patience)
            if self.does_without(fallback):
                grant = yield from self._polling(request, without)
            return (yield from hold(grant)) if grant else None
        except BaseException as error:
            if request.parked:
                yield from self._unparking(request, True)
            if grant and grant.place:
                grant.place.leave()
            counted = grant and request.reentrant
            if counted or ((grant or request.unsure) and not request.guest):
                alone = isinstance(error, redis.TimeoutError)  # those of the pool may be dead, too
                yield "_finish", self.abandoning(
                    request.keys, request.owner, request.patience, alone
                )
            if request.connection:
                yield "_drop", request.connection
            raise
        finally:
            self._parked.discard(request)

    def _asking_for(self, request: Request, command: Sequence) -> Steps:
        return self.asking(request.key, command, request.patience, request)

    def _obtaining(self, request: Request) -> Steps:
        if not (request.session or self._is_crowded(request)):
            token, start = yield from self._asking_for(request, request.command(request.lease))
            if token:
                return Grant(token, start)
            if request.left() <= 0:
                return None
            if len(self._crowded) > 1000:
                self._crowded.clear()
            self._crowded[request.key] = SKIPS
        if not (request.session or request.guest or self._deaf):
            place, grant = Place(self._box()), None
            try:
                grant = yield from self._in_line(request, place)
                return grant
            except NoMessages:
                self._deaf = True
            finally:
                if not (grant and grant.place):
                    place.leave()
        return (yield from self._blocking(request))

    def _in_line(self, request: Request, place: Place) -> Steps:
        """Waits for a message. That is only a reason to ask again: anybody may have sent it.

        Unless it is that we are not in line any more: then a release makes sure of that.
        """
        channel = self.channel_of(request.key)
        notify = ["NOTIFY", channel, place.id]
        park = 0 < PARK and len(self._parked) < IDLE and not (request.reentrant or request.line)
        while request.left() > 0:
            try:
                node = self.node_of(request.key)
                if park:
                    park = False
                    try:
                        answer, start = yield from self._parking(request, node)
                    except redis.ResponseError as error:
                        if first_word(error) != "WAITLIMIT":  # of blocked clients: messages may do
                            raise
                    else:
                        if answer is not PENDING:
                            return Grant(answer, start) if answer else None
                yield "_join", place, node, channel, min(request.left(), request.patience)
                command = request.waiting_command(request.short, *notify)
                answer, start = yield from self.asking(
                    request.key, command, request.patience, request, node
                )
                if request.parked:  # this call took over its place, so it is answered
                    yield from self._unparking(request, False)
            except redis.RedisError as error:
                if request.parked:
                    yield from self._unparking(request, True)
                if "instance state changed" in str(error):  # what was blocked was sent away
                    yield "_sleep", PAUSE
                    continue
                if first_word(error) == "NOPERM" or "unknown command" in str(error).lower():
                    raise NoMessages from error
                if not (yield from self._recovering(error, request.deadline, True)):
                    raise
                if first_word(error) != "ASK":
                    continue
                answer = 1  # the slot is on its way, and the line with it: try, and try again
                yield "_sleep", PAUSE
            if answer is None:  # the line is too long
                return None
            if answer == 0:
                kind, rest = yield "_message", place, request.left() + MARGIN
                if kind == "timeout" and request.left() < PAUSE:  # else it is not from the server
                    request.unsure = False
                    return None
                if kind == "error":
                    if rest.startswith("UNBLOCKED") and "no longer a primary" not in rest:
                        # Perhaps by a newer call that has taken over the place, if others know it.
                        request.unsure = not request.named
                        raise Superseded(rest)
                    yield "_sleep", PAUSE
                if kind in ("again", "timeout", "error"):
                    continue
            elif answer > 1 and request.short == request.lease:
                return Grant(answer, start, place)
            # It is granted, or so they say, or nothing was heard in time.
            try:
                command = request.command(request.lease, *notify)
                token, start = yield from self._asking_for(request, command)
            except redis.ResponseError as error:
                if "owner holds some" not in str(error):
                    raise
                yield from self.releasing(request.keys, request.owner, request.patience)
                continue
            if token:
                return Grant(token, start, place)
        if request.unsure:
            yield from self.releasing(request.keys, request.owner, request.patience)
            request.unsure = False
        return None

    def _is_crowded(self, request: Request) -> bool:
        """Whether it is better to stand in line at once. Now and then it is tried all the same."""
        if request.left() <= 0:
            return False
        skips = self._crowded.pop(request.key, 0)
        if skips > 1:
            self._crowded[request.key] = skips - 1
        return skips > 0

    def _parking(self, request: Request, node: Node) -> Steps:
        """Waits for a moment on a connection of its own, which is the quickest way.

        What it answers, which may be PENDING: then another call is to take over the place.
        """
        self._parked.add(request)
        start, left = time.monotonic(), request.left()
        command = request.waiting_command(request.lease)
        before, request.unsure = request.unsure, True
        moment = min(PARK, request.lease / 3000)  # so that the lease can be counted from the start
        brief = left <= moment  # then there is nothing to take over
        moment = left + request.patience if brief else moment
        answer = yield "_park", request, node, command, moment
        if answer is PENDING and brief:
            raise redis.TimeoutError(f"no answer in {moment:.3f} s")
        if not request.parked:
            self._parked.discard(request)
        if answer is None or isinstance(answer, Exception):
            request.unsure = before
        if isinstance(answer, Exception):
            raise answer
        return answer, start

    def _unparking(self, request: Request, abort: bool) -> Steps:
        yield "_unpark", request, abort
        self._parked.discard(request)

    def _blocking(self, request: Request) -> Steps:
        """Waits on a connection of its own, where the server answers when it is our turn."""
        while True:
            command = request.waiting_command(request.lease)
            patience = max(0.0, request.left()) + request.patience
            token, start = yield from self.asking(
                request.key, command, patience, request, alone=True
            )
            lasts = token is not None
            if lasts and time.monotonic() >= start + request.lease / 3000:
                # Only the server knows when the lease began: let it begin anew.
                start = time.monotonic()
                count = yield from self.touching(
                    request.keys, request.owner, request.lease, request.patience
                )
                lasts = count == len(request.keys)
            if lasts:
                return Grant(token, start, None, request.connection)
            if token is not None:
                yield from self.releasing(request.keys, request.owner, request.patience)
            request.unsure = False
            if request.connection:
                yield "_drop", request.connection
                request.connection = None
            if request.left() <= 0:
                return None

    # Touch, release.

    def touching(self, keys: Sequence[Key], owner: Key, lease: int, patience: float) -> Steps:
        return self._counting(self.touch_command(keys, owner, lease), patience)

    def releasing(self, keys: Sequence[Key], owner: Key, patience: float) -> Steps:
        return self._counting(self.release_command(keys, owner), patience)

    def _counting(self, command: List, patience: float) -> Steps:
        key = command[3] if command[0].startswith("EVAL") else command[1]
        try:
            reply, _ = yield from self.asking(key, command, patience)
        except redis.ResponseError as error:
            if "WRONGTYPE" in str(error) and self.module is False:
                return 0  # somebody has it who uses the module
            if command[0] != "EVALSHA" or first_word(error) in KINDS:
                raise explained(error) from None
            # The server does not know the script.
            script = next(each for each in (RELEASE, TOUCH) if sha_of(each) == command[1])
            return (yield from self._counting(["EVAL", script, *command[2:]], patience))
        return count_of(reply)

    def abandoning(
        self, keys: Sequence[Key], owner: Key, patience: float, alone: bool = False
    ) -> Steps:
        try:
            if alone:
                node, release = self.node_of(keys[0]), self.release_command(keys, owner, True)
                patience = shortest(patience, node.pool.connection_kwargs.get("socket_timeout"))
                yield "_ask", node, [release], patience, None, True
            else:
                yield from self.releasing(keys, owner, patience)
        except (redis.RedisError, LockError, OSError):
            pass  # then the lease ends it

    def touch_command(self, keys: Sequence[Key], owner: Key, lease: int) -> List:
        if self.module is not False:
            return ["LOCK.TOUCH", keys[0], owner, "PX", lease, *also(keys)]
        if self._compare:
            return ["SET", keys[0], owner, "IFEQ", owner, "PX", lease]
        return ["EVALSHA", sha_of(TOUCH), 1, keys[0], owner, lease]

    def release_command(self, keys: Sequence[Key], owner: Key, certain: bool = False) -> List:
        if self.module is not False:
            return ["LOCK.RELEASE", keys[0], owner, *also(keys)]
        if self._compare:
            return [self._compare[0], keys[0], *self._compare[1:], owner]
        script = ["EVAL", RELEASE] if certain else ["EVALSHA", sha_of(RELEASE)]
        return [*script, 1, keys[0], owner]

    def renewing(self, holds: List["HoldState"]) -> Steps:
        """The leases of these holds, all in one round trip."""
        start = time.monotonic()
        commands = [
            self.touch_command(h.keys, h.owner, milliseconds(h.next_lease())) for h in holds
        ]
        try:
            patience = min(hold.patience() for hold in holds)
            replies = yield "_ask", self.node_of(holds[0].key), commands, patience
        except Exception as error:  # whatever it is, the work must be told in the end
            replies = [error] * len(holds)
            if self.cluster:  # perhaps another node has the slot
                self._moved.clear()
                yield ("_refresh",)
        for hold, command, reply in zip(holds, commands, replies):
            if isinstance(reply, redis.ResponseError):  # it moved, or the script is not known
                try:
                    reply = yield from self._counting(command, hold.patience())
                except Exception as error:
                    reply = error
            hold.renewed(reply, start)

    # Without the module.

    def does_without(self, fallback: bool) -> bool:
        """Whether it is missing; an error if that is not what the caller can do with."""
        if self.module is False and not (fallback or self.plain):
            raise Unsupported(f"{NO_MODULE} (plain locks, SET NX PX, do with fallback=True)")
        return self.module is False

    def learning(self, error: redis.ResponseError, key: Key, patience: float) -> Steps:
        """Raises the error, unless it means that the module is missing, which we did not know."""
        if self.module is False or "unknown command" not in str(error).lower():
            raise explained(error) from None
        yield from self._look(key, patience)
        if self.module is not False:
            raise error

    def _look(self, key: Key, patience: float) -> Steps:
        """Finds out whether it is missing, and what can be had instead."""
        names = ["lock.acquire", "delex", "delifeq"]
        reply, _ = yield from self.asking(key, ["COMMAND", "INFO", *names], patience)
        known = {text(entry[0]).lower() for entry in reply if entry}
        # A server that has one of these also has SET ... IFEQ.
        self._compare = ["DELEX", "IFEQ"] if "delex" in known else []
        self._compare = ["DELIFEQ"] if "delifeq" in known else self._compare
        self.module = "lock.acquire" in known and not self.plain

    def _polling(self, request: Request, without: Collection[str]) -> Steps:
        missing = {
            "modes": not {"SHARED", "LIMIT", "WEIGHT"}.isdisjoint(request.options),
            "linger": "LINGER" in request.options,
            "session": request.session,
            "line": request.line or request.left() > 0,
        }
        for what, wanted in missing.items():
            if wanted and what not in without:
                raise Unsupported(f"{NO_MODULE}: no {what} (can you do without={{{what!r}}}?)")
        if request.reentrant or len(request.keys) > 1:
            raise Unsupported(f"{NO_MODULE}: neither reentrant locks nor several at once")
        if self._compare is None:
            yield from self._look(request.key, request.patience)
        command = ["SET", request.key, request.owner, "NX", "PX", request.lease]
        delay = 0.005
        while True:
            reply, start = yield from self._asking_for(request, command)
            if not count_of(reply):
                # Perhaps it is ours: the owner asked before, or an answer was lost.
                start = time.monotonic()
                reply = yield from self.touching(
                    request.keys, request.owner, request.lease, request.patience
                )
            if count_of(reply):
                return Grant(None, start)
            request.unsure = False
            if request.left() <= 0:
                return None
            yield "_sleep", max(0.001, min(request.left(), delay * random.uniform(0.5, 1.0)))
            delay = min(2 * delay, 0.25)


class NoMessages(Exception):
    """We may not subscribe to our channel, or not have the server publish there."""


def sha_of(script: str) -> str:
    return hashlib.sha1(script.encode()).hexdigest()


def count_of(reply: Any) -> int:
    return reply if isinstance(reply, int) else int(reply in (b"OK", "OK"))


class SubscriberCore:
    """What a subscriber knows. The part of Subscriber that does not talk."""

    def __init__(self, sharded: bool) -> None:
        self.places: Dict[str, Place] = {}
        self.verb = "SSUBSCRIBE" if sharded else "SUBSCRIBE"
        self.channels: Dict[str, Any] = {}  # channel -> None: asked for, True: ours, or an error
        self.closed = False
        self.asked: collections.deque = collections.deque()  # what the next answers are about

    def add(self, place: Place, channel: str) -> None:
        place.leave()
        place.subscriber, place.channel = self, channel
        self.places[place.id] = place

    def heard(self, reply: Any) -> None:
        """What the server said; an error if it refused what we asked for."""
        if isinstance(reply, Exception):
            self.channels[self.asked.popleft()] = reply
        elif not isinstance(reply, list):
            pass  # PONG, when we are not subscribed
        elif reply[0] in (b"message", b"smessage"):
            words = text(reply[2]).split(" ", 2)
            place = self.places.get(words[0])
            if place and len(words) == 3:
                place.tell(words[1], words[2])
        elif reply[0] in (b"subscribe", b"ssubscribe"):
            self.channels[self.asked.popleft()] = True
        elif reply[0] == b"sunsubscribe":  # the slot has moved away
            self.channels.pop(text(reply[1]), None)
            self.ask_again(text(reply[1]))

    def ask_again(self, channel: Optional[str] = None) -> None:
        for place in list(self.places.values()):
            if channel in (None, place.channel):
                place.tell("again", "")

    def broken(self, error: Exception) -> None:
        """The connection is gone. Who waits asks again when there is a new one."""
        if not isinstance(error, redis.RedisError):
            error = redis.ConnectionError(str(error))
        self.asked.clear()
        for channel, state in list(self.channels.items()):
            self.channels[channel] = None if state is True else error
        self.ask_again()

    def outcome(self, channel: str) -> None:
        """Raises unless we are subscribed to it."""
        state = self.channels.get(channel)
        if state is not True:
            self.channels.pop(channel, None)
            raise state or redis.ConnectionError("no subscription in time")


# What is asked for, and what is held. Both without talking.


class LockTerms:
    """What is asked for: a name and options. The part of Lock that does not talk to the server."""

    hold_class: Any = None

    def __init__(
        self,
        client: Any,  # redis.Redis or redis.RedisCluster
        key: Key,
        lease: float = 10.0,  # seconds, as all times here
        wait: float = 5.0,  # 0: one try
        *,
        owner: Optional[Key] = None,  # None: a new random one for each hold. A worker that takes
        # one lock while it holds another gives both the same owner: only so can the server see a
        # deadlock. On the same key the same owner is one holder: without reentrant the inner release
        # ends the outer. But an acquire() that fails leaves another hold of this process as it is.
        # So an upgrade that is interrupted keeps the shared hold; if it was granted in the same
        # moment, that hold is exclusive and has a new token
        shared: bool = False,
        limit: Optional[int] = None,
        weight: Optional[int] = None,  # of the limit
        reentrant: bool = False,  # needs an owner. After a lost reply the server may count one too
        # many: then the lease ends the hold
        session: bool = False,  # ends with a connection of its own
        linger: float = 0.0,
        also: Iterable[Key] = (),  # more keys, taken together with this one or not at all
        renew: bool = True,
        max_hold: Optional[float] = None,  # the hold ends after that, whoever renews it
        max_line: Optional[int] = None,  # do not wait behind so many
        tag: Optional[str] = None,  # who this is, for operators and for the errors of others
        fallback: Union[bool, str] = False,  # plain locks where the module is missing; "always"
        without: Collection[str] = (),  # what of token, line, modes, linger, session you can miss
        reply_timeout: float = 2.0,  # for an answer; how long connecting may take says the client
    ) -> None:
        if reentrant and (session or owner is None):
            # A new owner would wait for itself; a session would end with the inner hold.
            raise ValueError("reentrant needs an owner, and does not go with session")
        self.client = client
        self.key = key
        self.keys: List[Key] = [key, *also]
        self.max_hold = math.inf if max_hold is None else max_hold
        self.lease = min(lease, self.max_hold)
        self.wait = wait
        self.owner = owner
        self.reentrant = reentrant
        self.session = session
        self.renew = renew
        self.fallback = fallback
        self.without = without
        self.reply_timeout = reply_timeout
        self._server: Any = None
        self.entered: Dict[Any, List] = {}  # the holds of the `with` blocks of a thread or task
        self.options: List = ["SHARED"] if shared else []
        self.options += ["LIMIT", limit] if limit is not None else []
        self.options += ["WEIGHT", weight] if weight is not None else []
        self.options += ["REENTRANT"] if reentrant else []
        self.options += ["SESSION"] if session else []
        self.options += ["LINGER", milliseconds(linger)] if linger else []
        self.options += ["MAXHOLD", milliseconds(max_hold)] if max_hold is not None else []
        self.options += ["MAXLINE", max_line] if max_line is not None else []
        self.options += ["TAG", tag] if tag is not None else []

    def acquiring(self, server: ServerCore, owner: Optional[Key], wait: Optional[float]) -> Steps:
        """A Hold, or None."""
        named = owner or self.owner
        request = Request(
            self.keys,
            named or secrets.token_hex(16),
            milliseconds(self.lease),
            milliseconds(self.wait if wait is None else wait),
            self.options,
            self.reply_timeout,
            server.holds() if named else None,
        )

        def hold(grant: Grant) -> Steps:
            max_end = yield from self._max_end(server, request, grant, bool(named))
            return self.hold_class(self, server, request.owner, grant, max_end)

        return server.acquiring(request, bool(self.fallback), self.without, hold)

    def _max_end(self, server: ServerCore, request: Request, grant: Grant, named: bool) -> Steps:
        """When the server ends the hold, whoever renews it: max_hold after its first grant."""
        if grant.token is None:
            return grant.valid_from + self.max_hold
        end = request.begin + self.max_hold  # which is too early if we waited
        waited = grant.valid_from > request.begin + PAUSE
        if self.max_hold == math.inf or not (named or waited):
            return end
        start = time.monotonic()
        try:
            holder = yield from self.holder(server, request.owner)
        except redis.RedisError:
            if named:  # it may have been granted long ago
                raise
            return end
        left = holder.get("max-hold-left-ms")
        return end if left is None else start + left / 1000

    def holder(self, server: ServerCore, owner: Key) -> Steps:
        """What LOCK.INFO says of this owner's hold; {} if it lists others only."""
        info, _ = yield from server.asking(self.key, ["LOCK.INFO", self.key], self.reply_timeout)
        holders = map(fields, fields(info or []).get("holders", []))
        return next((each for each in holders if exactly(each["owner"]) == exactly(owner)), {})

    def insisting(self, server: ServerCore, owner: Optional[Key], wait: Optional[float]) -> Steps:
        hold = yield from self.acquiring(server, owner, wait)
        if hold is None:
            raise (yield from self.refusing(server))
        return hold

    def adopting(self, server: ServerCore, owner: Key, token: Optional[int]) -> Steps:
        lease, count = milliseconds(self.lease), None
        while count is None:
            plain, start = server.does_without(bool(self.fallback)), time.monotonic()
            try:
                count = yield from server.touching(self.keys, owner, lease, self.reply_timeout)
            except redis.ResponseError as error:
                yield from server.learning(error, self.key, self.reply_timeout)
        ours, end = count == len(self.keys), start + self.max_hold
        if ours and not plain:
            asked = time.monotonic()
            holder = yield from self.holder(server, owner)
            left = holder.get("max-hold-left-ms")
            end = end if left is None else min(end, asked + left / 1000)
            token = holder.get("token") if token is None else token
            if token is None:
                raise LockError(f"{self.key!r}: the server does not list this owner: give a token")
        hold = self.hold_class(self, server, owner, Grant(None if plain else token, start), end)
        try:
            if not (ours and (yield from hold.owning())):
                hold.lose(NOT_OURS)
            hold.check()
        except BaseException:
            hold.lose("it was not adopted")
            hold.ended()
            raise
        return hold

    def refusing(self, server: ServerCore) -> Steps:
        """NotAcquired, with who holds the lock and for how long, as far as that can be known."""
        for key in self.keys:
            command = ["PTTL" if server.module is False else "LOCK.INFO", key]
            try:
                reply, _ = yield from server.asking(key, command, self.reply_timeout)
            except Exception:
                break
            if isinstance(reply, int) and reply >= 0:
                return NotAcquired(f"{key!r} is held for another {reply / 1000:.1f} s")
            info = fields(reply) if reply and not isinstance(reply, int) else {}
            holders = [fields(holder) for holder in info.get("holders", [])]
            if holders:
                tags = sorted({text(h["tag"]) for h in holders if h.get("tag")})
                left = max(int(h.get("lease-left-ms") or 0) for h in holders) / 1000
                several = f"{info['holding']} owners" if info["holding"] > 1 else "an owner"
                who = ", ".join(tags[:3]) or several
                line = f", {info['waiting']} in line" if info.get("waiting") else ""
                return NotAcquired(f"{key!r} is held by {who} for another {left:.1f} s{line}")
        return NotAcquired(f"{self.key!r} is taken")

    def server_of(self, kind: Any) -> Any:
        if self._server is None or self._server.outlived():
            self._server = kind.of(self.client, self.fallback == "always")
        return self._server

    def push(self, who: Any, hold: Any) -> Any:
        self.entered.setdefault(who, []).append(hold)
        return hold

    def pop(self, who: Any) -> Any:
        """The hold of the block that ends."""
        if who not in self.entered:  # a generator may be closed elsewhere than where it began
            blocks = [(each, hold) for each, holds in list(self.entered.items()) for hold in holds]
            found = [block for block in blocks if self.is_gone(block[0])] or blocks
            if len(found) != 1:
                for _, hold in found:  # one of them has ended: its lease must do so
                    hold.renew_no_more()
                raise RuntimeError(
                    f"{self.key!r}: a `with` block ends in another thread or task than it began in,"
                    f" and it is not known which of {len(found)}. None of them is renewed any more."
                    " Where this can happen write `with lock.acquire()`"
                )
            who = found[0][0]
        holds = self.entered[who]
        hold = holds.pop()
        if not holds:
            del self.entered[who]
        return hold

    def is_gone(self, who: Any) -> bool:
        """Whether this thread or task has ended."""
        raise NotImplementedError


class HoldState:
    """What is known of a hold. The part of Hold that does not talk to the server."""

    def __init__(
        self,
        terms: LockTerms,
        server: Any,
        owner: Key,
        grant: Grant,
        keeper: Any,
        busy: Any,
        max_end: float,  # the server ends it then, whoever renews it
    ) -> None:
        self.key = terms.key
        self.keys = terms.keys
        self.names = set(terms.keys)
        self.owner = owner
        self.lease = terms.lease
        self._lost: Any = None
        self._token = grant.token
        self._grant = grant
        self._server = server
        self._keeper = keeper
        self._busy = busy  # a lock: one question at a time
        self._why: Optional[str] = None  # it was lost
        self._terms = terms
        self._doubt = NOT_OURS  # or what a message says
        self._trouble: Any = "nobody renewed it"  # or the last error of a renewal
        self._released: Optional[bool] = None  # what release() answered
        self._max_end = max_end
        self._renew = terms.renew
        self._lease_starts(grant.valid_from)
        keeper.holds.add(self)
        try:
            keeper.look_at(min(self._due, self.until, self._max_end))
        except BaseException:  # there are no more threads, say
            self.ended()
            raise
        if grant.place:
            grant.place.follow(grant.token, self._told)

    def _told(self, reason: str) -> None:
        """A message says that it is lost. Anybody may have sent it: a TOUCH will show."""
        self._doubt, self._due = f"the server says: {reason}", 0.0
        self._keeper.look_at(0)

    @property
    def lost(self) -> Any:
        """An event: set when the work has to stop. Made when somebody wants it."""
        if not self._lost:
            self._lost = self._event()
            if self._why:
                self._lost.set()
        return self._lost

    @property
    def token(self) -> Optional[int]:
        if self._token is None and "token" not in self._terms.without:
            raise Unsupported(f"{NO_MODULE}: no token (can you do without={{'token'}}?)")
        return self._token

    def _lease_starts(self, start: float) -> None:
        """`start` is when we asked. The server's lease began later, so it lasts beyond `until`."""
        self.until = start + self.lease  # on time.monotonic()
        self._due = start + self.lease / 3 if self._renew else math.inf

    def _lease_may_start(self, start: float, lease: float) -> None:
        """The same while the answer is not known: what counts is the lease that ends first."""
        self.until = min(self.until, start + lease)
        if self._renew:
            self._due = min(self._due, start + lease / 3)

    def renew_no_more(self) -> None:
        self._renew, self._due = False, math.inf

    def next_lease(self) -> float:
        """What a TOUCH by the keeper asks for: if it is not to be renewed, what is left of it."""
        return self.lease if self._renew else max(0.001, self.until - time.monotonic())

    def patience(self) -> float:
        """For the answer to a TOUCH. Then another connection is tried."""
        return max(0.001, min(self.lease / 3, self.until - time.monotonic()))

    def over(self) -> Optional[str]:
        """Why the work has to stop, or None. Asks only the clock."""
        now = time.monotonic()
        if self._why:
            return self._why
        if now >= self._max_end:
            return "max_hold is over"
        if now >= self.until:
            return f"the lease ran out: {self._trouble}"
        return None

    def lose(self, why: str) -> None:
        self._why = self._why or why  # the first reason is the one that counts
        if self._lost:
            self._lost.set()

    def check(self) -> None:
        """Raises Lost unless the hold is good. Asks nobody: it knows the end of the lease."""
        why = self._why or ("it was released" if self._released is not None else self.over())
        if why:
            raise Lost(f"{self.key!r}: {why}")

    def renewed(self, reply: Any, start: float) -> None:
        """An error is no loss yet: while the lease lasts it is tried again."""
        if self._why:
            return  # too late
        if isinstance(reply, Exception):
            self._trouble = reply
            if self._due < math.inf:
                self._due = time.monotonic() + min(1.0, self.lease / 20)
        elif count_of(reply) < len(self.keys):
            self.lose(self._doubt)
        elif self._renew:
            self._lease_starts(start)
        else:
            self._due = math.inf

    def ended(self) -> None:
        self._keeper.holds.discard(self)
        if self._grant.place:
            self._grant.place.leave()

    def running(self, command: Sequence) -> Steps:
        if self._token is None:
            raise Unsupported(f"{NO_MODULE}: no token, so it cannot guard a command")
        words = ["LOCK.FENCE", self.key, self._token, "THEN", *command]
        try:
            return (yield from self._server.asking(self.key, words, None))[0]
        except redis.ResponseError as error:
            error = explained(error)
            if isinstance(error, Fenced):
                self.lose(str(error))
            raise error from None

    def owning(self) -> Steps:
        plain = self._server.module is False
        words = ["GET", self.key] if plain else ["LOCK.FENCE", self.key, self._token]
        try:
            reply, _ = yield from self._server.asking(self.key, words, self._terms.reply_timeout)
        except redis.ResponseError as error:
            if plain and "WRONGTYPE" in str(error):
                return False
            raise explained(error) from None
        return text(reply) == text(self.owner) if plain else reply == 1

    def touching(self, lease: Optional[float]) -> Steps:
        self.check()
        lease, start = lease or self.lease, time.monotonic()
        self._lease_may_start(start, lease)
        count = yield from self._server.touching(
            self.keys, self.owner, milliseconds(lease), self.patience()
        )
        if count < len(self.keys):
            self.lose(NOT_OURS)
            self.check()
        self.lease = lease
        self._lease_starts(start)

    def giving_up(self) -> Steps:
        """Whether it was ours to the end."""
        if self._released is None:
            self.ended()
            try:
                self._released = yield from self._giving_up()
            finally:
                if self._grant.session:
                    yield "_drop", self._grant.session
        return self._released

    def _giving_up(self) -> Steps:
        patience, again = self._terms.reply_timeout, False
        while True:
            try:
                count = yield from self._server.releasing(self.keys, self.owner, patience)
                break
            except (redis.ConnectionError, redis.TimeoutError):
                if self.over():
                    self.lose(self.over())
                    return False
                if self._terms.reentrant:  # if it was done, another one would end the outer hold
                    self._released = False
                if self._terms.reentrant or again:
                    raise
                again = True  # over a new connection
        if again and not self.over():
            return True  # whatever the count: if it is 0 the first one did it, for the lease lasts
        if count < len(self.keys):
            self.lose(NOT_OURS)
        return count == len(self.keys)


class Survey:
    """Which holds are over and which are due, and when to look again."""

    def __init__(self, holds: Iterable[Any], busy: Collection) -> None:
        now, spent = time.monotonic(), time.thread_time()
        self.over: List[Tuple[Any, str]] = []
        self.due: Dict[Tuple, List] = {}
        self.then = math.inf
        for hold in holds:
            why = hold.over()
            if why:
                self.over.append((hold, why))
                continue
            self.then = min(self.then, hold.until, hold._max_end)
            if hold._due > now + hold.lease / 12:  # those that are due soon go with the others
                self.then = min(self.then, hold._due)
                continue
            if hold._busy.locked():  # by touch(), which lets the keeper look again
                continue
            try:
                group = (hold._server, hold._server.node_of(hold.key).name)
            except Exception:  # no node has the slot, say: renewing() will tell
                group = (hold._server, "")
            if group not in busy:
                self.due.setdefault(group, []).append(hold)
        # So that many holds cost at most a small part of the time.
        self.then = max(self.then, now + 20 * (time.thread_time() - spent))


# What follows talks to the server. turnstile_lock_asyncio.py has it once more, with await.


class Keeper(threading.Thread):
    """The thread that renews the leases of all holds, and tells the work when a hold is over.

    It never waits for a server: each round trip has a thread of its own, at most one a server.
    """

    def __init__(self) -> None:
        super().__init__(name="turnstile", daemon=True)
        self.holds: Set["Hold"] = set()
        self._busy: Set[Tuple] = set()
        self._changed = threading.Condition()
        self._then = math.inf
        self._running = False

    def look_at(self, moment: float) -> None:
        if moment < self._then or not self._running:  # else it looks in time anyway
            with self._changed:
                self._then = min(moment, self._then)
                self._changed.notify()
                if not self._running:
                    self.start()
                    self._running = True

    def run(self) -> None:
        while True:
            try:
                self._look()
            except Exception:  # renewal must go on
                logger.exception("Leases were not renewed")
                time.sleep(PAUSE)

    def _look(self) -> None:
        while True:
            self._then = math.inf
            survey = Survey(self.holds.copy(), self._busy)
            for hold, why in survey.over:
                hold.ended()
                hold.lose(why)
            for group, holds in survey.due.items():
                self._busy.add(group)
                name, work = "turnstile-renewal", (group, holds)
                try:
                    threading.Thread(target=self._renew, name=name, args=work, daemon=True).start()
                except RuntimeError:  # the process has no more threads, or is about to end
                    self._busy.discard(group)
                    for hold in holds:
                        hold.renewed(redis.RedisError("no thread to renew it"), 0)
            with self._changed:
                self._then = min(self._then, survey.then)
                while (left := self._then - time.monotonic()) > 0:
                    self._changed.wait(min(left, threading.TIMEOUT_MAX))

    def _renew(self, group: Tuple, holds: List["Hold"]) -> None:
        locked = [hold for hold in holds if hold._busy.acquire(blocking=False)]
        try:
            wanted = [hold for hold in locked if hold.wants_renewal()]
            if wanted:
                group[0].drive(group[0].renewing(wanted))
        except Exception as error:  # tried again, until the lease is over
            logger.exception("Leases were not renewed")
            for hold in locked:
                hold.renewed(error, 0)
        finally:
            for hold in locked:
                hold._busy.release()
            self._busy.discard(group)
            self.look_at(0)


class Subscriber(SubscriberCore):
    """A connection that hears what becomes of all the waits of this process, and its thread."""

    def __init__(self, pool: Any, sharded: bool) -> None:
        super().__init__(sharded)
        self._pool = weakref.ref(pool)
        self._changed = threading.Condition()
        self._connection: Any = None
        self._running = False

    def join(self, place: Place, channel: str, timeout: float) -> None:
        """Returns when we are subscribed, and messages for this place will be heard."""
        with self._changed:
            self.add(place, channel)
            if channel not in self.channels:
                self.channels[channel] = None
                if self._connection:
                    self._subscribe(channel)
            if not self._running:
                threading.Thread(target=self._run, name="turnstile-messages", daemon=True).start()
                self._running = True
            self._changed.wait_for(lambda: self.channels.get(channel) is not None, timeout)
            self.outcome(channel)

    def _subscribe(self, channel: str) -> None:
        self.asked.append(channel)
        try:
            self._connection.send_command(self.verb, channel)
        except (redis.RedisError, OSError):
            pass  # the thread will notice

    def _run(self) -> None:
        while True:
            connection: Any = None
            try:
                connection = own_connection(self._pool())
                connection.connect()
                with self._changed:
                    self._connection = connection
                    for channel in list(self.channels):
                        self._subscribe(channel)
                self._listen(connection)
            except Exception as error:  # whatever it is, those who wait must not wait for ever
                with self._changed:
                    self._connection = None
                    self.broken(error)
                    self._changed.notify_all()
                    if self.closed or not self.places or not self._pool():
                        self.channels.clear()
                        self._running = False
                if connection:
                    connection.disconnect()
            if not self._running:
                return
            time.sleep(PAUSE)

    def _listen(self, connection: Any) -> None:
        quiet = 0
        while not self.closed and self._pool():
            if connection.can_read(PING_EVERY):
                quiet = 0
                try:
                    reply = connection.read_response(disable_decoding=True)
                except redis.ResponseError as error:
                    reply = error
                with self._changed:
                    self.heard(reply)
                    self._changed.notify_all()
            elif quiet:
                break
            else:
                quiet += 1
                with self._changed:
                    connection.send_command("PING")
        raise redis.ConnectionError("the subscriber hears nothing")

    def close(self) -> None:
        self.closed = True
        try:
            self._connection._sock.shutdown(socket.SHUT_RDWR)  # the thread does the rest
        except (AttributeError, OSError):
            pass  # it is not connected


class Server(ServerCore):
    """What talks to the server, or cluster, of one client. Thread-safe. Drop-ins build upon it.

    Get it with Server.of(client). All that share a connection pool share it, too.
    """

    def __init__(self, client: Any, plain: bool = False) -> None:
        super().__init__(client, plain)
        self._mutex = threading.Lock()

    def holds(self) -> Set["Hold"]:
        return KEEPER.holds

    def close(self) -> None:
        """Ends the renewal of the holds, which are lost, and closes all connections that are ours.

        Those of your client are its own. The next wait makes new ones.
        """
        for hold in self.holds().copy():
            if hold._server is self:
                hold.lose(CLOSED)
                hold.ended()
                if hold._grant.session:
                    hold._grant.session.disconnect()
        subscribers, self._subscribers = self._subscribers, {}
        idle, self._idle = self._idle, {}
        for subscriber in subscribers.values():
            subscriber.close()
        for connection in itertools.chain(*idle.values()):
            connection.disconnect()
        for node in self._strangers.values():
            node.pool.disconnect()

    def drive(self, steps: Steps) -> Any:
        """Does the steps one by one. What it returns is what they return."""
        step, argument = steps.send, None
        while True:
            try:
                name, *arguments = step(argument)
                step, argument = steps.send, getattr(self, name)(*arguments)
            except StopIteration as end:
                return end.value
            except BaseException as error:
                if steps.gi_frame is None:
                    raise
                step, argument = steps.throw, error

    # The steps.

    def _ask(
        self,
        node: Node,
        commands: List[Sequence],
        patience: Optional[float],
        request: Optional[Request] = None,
        alone: bool = False,
    ) -> List[Any]:
        """The replies, errors among them. `alone`: not on a connection that others may want."""
        if alone:
            connection = self._own(node, patience)
        else:
            connection = node.pool.get_connection(*words_of(node.pool))
            patience = shortest(patience, connection.socket_timeout)
        replies: List[Any] = []
        try:
            if len(commands) == 1:
                connection.send_command(*commands[0])
            else:
                connection.send_packed_command(connection.pack_commands(commands))
            for _ in commands:
                if patience is not None and not readable(connection, patience, replies):
                    raise redis.TimeoutError(f"no answer in {patience:.3f} s")
                try:
                    replies.append(connection.read_response())
                except redis.ResponseError as error:
                    replies.append(error)
            return replies
        except BaseException:
            try:
                if request and getattr(connection, "_sock", None):
                    blocked_at = node if alone else None
                    owed = len(commands) - len(replies)
                    self._take_back(connection, owed, request, blocked_at)
            finally:
                connection.disconnect()
            raise
        finally:
            if alone:
                self._put_by(node, connection, request)
            else:
                node.pool.release(connection)

    def _take_back(
        self, connection: Any, owed: int, request: Request, blocked_at: Optional[Node]
    ) -> None:
        """Sends a release behind the request whose answer nobody waits for any more.

        So it gives up what the request brought, however late the server reads both. One that is
        blocked reads nothing: its wait is ended from elsewhere, again until the answer is here,
        because a release that overtakes the request does nothing.
        """
        if request.guest and not request.reentrant:
            return  # an upgrade: a release would give up the older hold too
        release = self.release_command(request.keys, request.owner, certain=True)
        patience = shortest(request.patience, connection.socket_timeout)
        end = time.monotonic() + patience
        sent = request.guest and not owed
        try:
            while owed or not sent:
                if not sent and not (request.guest and owed):
                    connection.send_command(*release, check_health=False)
                    sent, owed = True, owed + 1
                if connection.can_read(PAUSE):
                    try:
                        brought = connection.read_response()
                    except redis.ResponseError:
                        brought = None
                    owed -= 1
                    sent = sent or not brought  # then there is nothing to release
                elif time.monotonic() >= end:
                    return
                elif blocked_at and not request.guest:
                    self._ask(blocked_at, [release], patience)
            request.unsure = False
        except (redis.RedisError, OSError):
            pass

    def _park(self, request: Request, node: Node, command: List, moment: float) -> Any:
        connection = self._own(node, request.patience)
        request.parked = node, connection
        connection.send_command(*command)
        return self._unpark(request, False) if readable(connection, moment, []) else PENDING

    def _unpark(self, request: Request, abort: bool) -> Any:
        """The answer of the call that blocks a connection. `abort`: if it comes, nobody wants it."""
        node, connection = request.parked
        try:
            if abort:
                request.parked = None
                return self._take_back(connection, 1, request, node) if connection._sock else None
            if not connection.can_read(request.patience):
                raise redis.TimeoutError(f"no answer in {request.patience:.3f} s")
            try:
                answer = connection.read_response()
            except redis.ResponseError as error:
                answer = error
            request.parked = None
            self._put_by(node, connection, None)
            return answer
        finally:
            if abort:
                connection.disconnect()

    def _own(self, node: Node, patience: float) -> Any:
        idle = self._idle.setdefault(node.name, [])
        while True:
            try:
                connection = idle.pop()
            except IndexError:
                connection = own_connection(node.pool, patience)
                connection.connect()
                return connection
            if connection._sock and not readable(connection, 0, []):
                return connection
            connection.disconnect()  # the server has closed it, or says what nobody asked for

    def _put_by(self, node: Node, connection: Any, request: Optional[Request]) -> None:
        idle = self._idle.setdefault(node.name, [])
        if connection._sock and request and request.session:
            request.connection = connection
        elif connection._sock and len(idle) < IDLE:
            idle.append(connection)
        else:
            connection.disconnect()

    def _join(self, place: Place, node: Node, channel: str, timeout: float) -> None:
        with self._mutex:
            subscriber = self._subscribers.get(node.name)
            if subscriber is None or subscriber.closed:
                subscriber = Subscriber(node.pool, self.cluster)
                self._subscribers[node.name] = subscriber
        subscriber.join(place, channel, timeout)

    def _message(self, place: Place, timeout: float) -> Tuple[str, str]:
        try:
            return place.box.get(timeout=max(timeout, 0.001))
        except queue.Empty:
            return "", ""

    def _box(self) -> Any:
        return queue.SimpleQueue()

    def _sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def _finish(self, steps: Steps) -> None:
        self.drive(steps)

    def _drop(self, connection: Any) -> None:
        connection.disconnect()

    def _refresh(self) -> None:
        with self._mutex:
            try:
                self.client.nodes_manager.initialize()
            except Exception:
                pass  # none of the nodes it knows answers, for now

    def _cluster_node(self, node: Any) -> Node:
        pool = self.client.get_redis_connection(node).connection_pool
        known = self._nodes.get(node.name)
        if known is None or known.pool is not pool:
            known = self._nodes[node.name] = Node(node.name, pool)
        return known

    def _node_at(self, host: str, port: int) -> Node:
        """The node at this address, of which the client may never have heard."""
        known = self.client.get_node(host=host, port=port)
        if known:
            return self._cluster_node(known)
        name = f"{host}:{port}"
        if name not in self._strangers:
            pool = self.client.get_redis_connection(self.client.get_nodes()[0]).connection_pool
            options = {**pool.connection_kwargs, "host": host, "port": port}
            pool = redis.ConnectionPool(connection_class=pool.connection_class, **options)
            self._nodes[name] = self._strangers[name] = Node(name, pool)
        return self._strangers[name]

    def forked(self) -> None:
        self._subscribers, self._idle, self._parked = {}, {}, set()
        self._mutex = threading.Lock()


def readable(connection: Any, patience: float, replies: List) -> bool:
    """connection.can_read(), but cheaper as long as nothing has been read."""
    sock = getattr(connection, "_sock", None)
    if replies or not sock:
        return connection.can_read(patience)
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(1000 * min(patience, LONGEST)))


def shortest(patience: Optional[float], socket_timeout: Optional[float]) -> Optional[float]:
    if patience is None or socket_timeout is None:
        return patience if socket_timeout is None else socket_timeout
    return min(patience, socket_timeout)


def words_of(pool: Any) -> Tuple[str, ...]:
    """What get_connection() wants to be told: up to redis-py 5.2 the name of the command."""
    try:
        return pool._turnstile_words
    except AttributeError:
        command = inspect.signature(pool.get_connection).parameters.get("command_name")
        words = ("LOCK",) if command and command.default is command.empty else ()
        pool._turnstile_words = words
        return words


class Lock(LockTerms):
    """A lock's name and the terms to hold it. May be used many times and by many threads."""

    def acquire(self, wait: Optional[float] = None, owner: Optional[Key] = None) -> "Hold":
        """A Hold, which renews itself; or an error, and then nothing is held.

        An owner that holds the lock already, in this process or another, gets the same token.
        """
        server = self.server_of(Server)
        return server.drive(self.insisting(server, owner, wait))

    def try_acquire(self) -> Optional["Hold"]:
        """A Hold, or None if it cannot be had at once."""
        server = self.server_of(Server)
        return server.drive(self.acquiring(server, None, 0))

    def adopt(self, owner: Key, token: Optional[int] = None) -> "Hold":
        """A Hold of what this owner holds (under this token), whoever acquired it; or Lost."""
        server = self.server_of(Server)
        return server.drive(self.adopting(server, owner, token))

    def locked(self) -> bool:
        """Whether anybody holds it."""
        return self.server_of(Server).ask(self.key, "EXISTS", self.key) == 1

    def __enter__(self) -> "Hold":
        return self.push(threading.current_thread(), self.acquire())

    def __exit__(self, *error: Any) -> None:
        return self.pop(threading.current_thread()).__exit__(*error)

    def is_gone(self, who: threading.Thread) -> bool:
        return not who.is_alive()


class Hold(HoldState):
    """A lock that is held. Work until `lost` is set; give `token` to whatever you write to."""

    _event = threading.Event

    def __init__(
        self, lock: Lock, server: Server, owner: Key, grant: Grant, max_end: float = math.inf
    ) -> None:
        super().__init__(lock, server, owner, grant, KEEPER, threading.Lock(), max_end)

    def run(self, *command: Any) -> Any:
        """Runs the command if and only if we still hold the lock, in one step of the server.

        Where the connection is lost it may have run. With `also` only the first lock is asked for.
        """
        return self._server.drive(self.running(command))

    def touch(self, lease: Optional[float] = None) -> None:
        """Lets the lease begin anew; a lease given here is that of later renewals too."""
        try:
            with self._busy:
                self._server.drive(self.touching(lease))
        finally:
            self._keeper.look_at(0)

    def owned(self) -> bool:
        """Whether the server says that it is ours."""
        return self._server.drive(self.owning())

    def release(self) -> bool:
        """Gives the lock up and stops the renewal. False: it had been lost before.

        If the server cannot be reached: redis-py's error. The lease will end the hold.
        """
        with self._busy:  # a renewal that is on its way comes to its end
            return self._server.drive(self.giving_up())

    def wants_renewal(self) -> bool:
        """Not if its connection is gone: then so is the hold."""
        try:
            if self._grant.session and self._grant.session.can_read(0):
                raise redis.ConnectionError("the server closed it")
        except (redis.RedisError, OSError) as error:
            self.lose(f"its connection was closed: {error}")
        return self._released is None and not self.over()

    def orphaned(self) -> None:
        """In a child after a fork: the hold is the parent's."""
        self._busy = threading.Lock()
        self._released = False
        self._why = "this process is a fork of its holder"

    def __enter__(self) -> "Hold":
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        try:
            released = self.release()
        except (redis.RedisError, LockError):
            if error is None:
                raise
            return  # the error of the work is the one to tell
        if not released and error is None:
            raise Lost(f"{self.key!r}: {self._why}")


Lock.hold_class = Hold
KEEPER = Keeper()


def start_anew() -> None:
    """A child has neither the threads nor the connections of its parent."""
    global KEEPER
    for hold in KEEPER.holds:
        hold.orphaned()
    KEEPER = Keeper()
    for server in list(SERVERS):
        server.forked()


os.register_at_fork(after_in_child=start_anew)

# SPDX-License-Identifier: BSD-3-Clause
# Copyright (c) 2026 The Turnstile authors
"""Turnstile locks with the interface of redis-py's Lock.

    lock = client.lock("table:12", timeout=10, lock_class=TurnstileLock)
    with lock:                                # or LockError, when blocking_timeout is over
        store.write(page, token=lock.fencing_token)

Copy it with turnstile_lock.py and turnstile_lock_asyncio.py. AsyncTurnstileLock is the same for
redis.asyncio. Both are subclasses of redis-py's own, with the same arguments and errors (LockError
and LockNotOwnedError of redis.exceptions). Who waits stands in a line of the server: the order is
arrival, and the lock is handed over at once. What is different:

- Without a timeout redis-py's lock lasts until release(), or for ever if its process dies. Here it
  has a lease of `default_lease` seconds, renewed until release() or the end of its process.
  As in redis-py, extend() and reacquire() are errors then.
- `sleep` has no effect: nothing is polled. A wait lasts for all of blocking_timeout but the last
  25 ms, in which the answer comes, also if that is shorter than `sleep`.
- The key is no string: GET is WRONGTYPE, use owned() or LOCK.INFO. Its TTL follows the lease:
  EXPIRE and PERSIST do not change it, use extend().
- acquire(token=...) by a token that holds the lock succeeds: it is the same holder, under the same
  fencing_token. So a stored token can be adopted. Use one token for one acquisition.
- In a thread that did not acquire it a thread-local lock is an unlocked one, not AttributeError.
- extend() without replace_ttl asks what is left and sets the sum. The time between the two is given
  on top. Two such calls for one hold at the same time may count as one. Never can the lock be taken
  from somebody else.

redis-py's own lock tests pass but for those that do what the list says is different: test_lock,
test_lock_token, test_lock_token_thread_local_false and test_context_manager read the key with GET
(and expect no TTL); test_reacquire_lock shortens the lease with PEXPIRE; and in 8
test_blocking_timeout and test_context_manager_blocking_timeout count the sleeps between tries, on
a clock that they have replaced.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
from types import SimpleNamespace, TracebackType
from typing import Any, Dict, Iterator, List, Optional, Type, Union

import redis.asyncio.lock
import redis.lock
from redis.exceptions import LockError, LockNotOwnedError

import turnstile_lock
import turnstile_lock_asyncio

Number = Union[int, float]
FOREVER_MS = 300_000_000_000  # nine years; the server takes up to ten
logger = logging.getLogger(__name__)


class ThreadLocal(threading.local):
    """What a thread knows of its hold."""

    token: Optional[bytes] = None  # redis-py's word for what Turnstile calls the owner
    fencing_token: Optional[int] = None
    renewed: Any = None  # a Hold of the module below, if there is no timeout


class DropIn:
    """The part of both classes that does not talk to the server."""

    default_lease: Number = 30  # seconds, of a lock without a timeout

    def __init__(
        self,
        redis: Any,
        name: Union[str, bytes, memoryview],
        timeout: Optional[Number] = None,
        sleep: Number = 0.1,
        blocking: bool = True,
        blocking_timeout: Optional[Number] = None,
        thread_local: bool = True,
        raise_on_release_error: bool = True,  # which redis-py 4.3 does not know
    ) -> None:
        super().__init__(redis, name, timeout, sleep, blocking, blocking_timeout, thread_local)
        self.raise_on_release_error = raise_on_release_error
        shared = SimpleNamespace(token=None, fencing_token=None, renewed=None)
        self.local = ThreadLocal() if self.thread_local else shared
        self._key = bytes(name) if isinstance(name, memoryview) else name

    def register_scripts(self) -> None:
        """There are none."""

    @property
    def fencing_token(self) -> Optional[int]:
        """The number of the hold; None without one. Every later holder has a higher number."""
        return self.local.fencing_token

    def _encode(self, token: Union[str, bytes]) -> bytes:
        source = getattr(self.redis, "connection_pool", self.redis)  # a cluster client has no pool
        return source.get_encoder().encode(token)

    def _owner(self, token: Union[None, str, bytes]) -> bytes:
        return secrets.token_hex(16).encode() if token is None else self._encode(token)

    def _lease_ms(self) -> int:
        return int((self.timeout or self.default_lease) * 1000)

    def _wait_ms(self, blocking: Optional[bool], timeout: Optional[Number]) -> int:
        if not (self.blocking if blocking is None else blocking):
            return 0
        timeout = self.blocking_timeout if timeout is None else timeout
        if timeout is None:
            return FOREVER_MS
        return min(int(1000 * (timeout - min(timeout / 16, 0.025))), FOREVER_MS)

    def _begin(self, core: Any, server: Any, owner: bytes, grant: turnstile_lock.Grant) -> None:
        self.local.token = owner
        self.local.fencing_token = grant.token
        if not self.timeout:
            terms = core.Lock(self.redis, self._key, self.default_lease)
            self.local.renewed = core.Hold(terms, server, owner, grant)

    def _end(self) -> None:
        self.local.token = self.local.fencing_token = self.local.renewed = None

    def _renewed(self, owner: bytes) -> Any:
        """What renews the lease, if we have no timeout and the token is not another's."""
        hold = self.local.renewed
        return hold if hold and hold.owner == owner else None

    def _hold(self, info: Any) -> Optional[Dict[str, Any]]:
        """What LOCK.INFO says of our hold."""
        ours = self._encode(self.local.token)
        holders: List = turnstile_lock.fields(info)["holders"] if info else []
        holds = map(turnstile_lock.fields, holders)
        return next((hold for hold in holds if self._encode(hold["owner"]) == ours), None)

    def _sum_ms(self, info: Any, additional_time: Number) -> int:
        hold = self._hold(info)
        if hold is None or hold["lease-left-ms"] is None:
            raise self._not_owned("extend")
        return hold["lease-left-ms"] + int(additional_time * 1000)

    def _error(self, kind: Type[LockError], text: str) -> LockError:
        error = kind(text)
        error.lock_name = self.name  # as in newer versions of redis-py
        return error

    def _not_owned(self, what: str) -> LockError:
        return self._error(LockNotOwnedError, f"Cannot {what} a lock that's no longer owned")

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except turnstile_lock.Unsupported:
            text = f"{turnstile_lock.NO_MODULE}: redis-py's own Lock does without"
            raise self._error(LockError, text) from None
        except turnstile_lock.LockError as error:
            raise self._error(LockError, str(error)) from error

    @contextlib.contextmanager
    def _forgiven(self) -> Iterator[None]:
        """Around the release at the end of a `with` block."""
        try:
            yield
        except LockError as error:
            if self.raise_on_release_error:
                raise
            logger.warning("%r: %s", self.name, error)


class TurnstileLock(DropIn, redis.lock.Lock):
    """For redis.Redis and redis.RedisCluster."""

    @property
    def _server(self) -> turnstile_lock.Server:
        return turnstile_lock.Server.of(self.redis)

    def acquire(
        self,
        sleep: Optional[Number] = None,
        blocking: Optional[bool] = None,
        blocking_timeout: Optional[Number] = None,
        token: Union[None, str, bytes] = None,
    ) -> bool:
        """True: it is ours. False: it could not be had in time."""
        owner, server = self._owner(token), self._server
        wait_ms = self._wait_ms(blocking, blocking_timeout)
        with self._translated():
            grant = server.acquire(
                [self._key], owner, self._lease_ms(), wait_ms, named=token is not None
            )
        if grant:
            self._begin(turnstile_lock, server, owner, grant)
        return grant is not None

    def locked(self) -> bool:
        """Whether anybody holds it, also as a plain string key."""
        with self._translated():
            return bool(self._server.ask(self._key, "EXISTS", self._key))

    def owned(self) -> bool:
        """Whether it is ours, that is: of this thread, if thread_local."""
        return self.local.token is not None and self._hold(self._info()) is not None

    def _info(self) -> Any:
        with self._translated():
            return self._server.ask(self._key, "LOCK.INFO", self._key)

    def release(self) -> None:
        """If the server cannot be reached the token stays, so that you can try again."""
        if self.local.token is None:
            raise self._error(LockError, "Cannot release an unlocked lock")
        self.do_release(self.local.token)

    def do_release(self, expected_token: bytes) -> None:
        renewed = self._renewed(expected_token)
        with self._translated():
            if renewed:
                released = renewed.release()
            else:
                released = self._server.release([self._key], expected_token)
        self._end()
        if not released:
            raise self._not_owned("release")

    def do_extend(self, additional_time: Number, replace_ttl: bool) -> bool:
        if replace_ttl:
            return self._touch(int(additional_time * 1000), "extend")
        return self._touch(self._sum_ms(self._info(), additional_time), "extend")

    def do_reacquire(self) -> bool:
        return self._touch(self._lease_ms(), "reacquire")

    def _touch(self, lease_ms: int, what: str) -> bool:
        with self._translated():
            if not self._server.touch([self._key], self.local.token, lease_ms):
                raise self._not_owned(what)
        return True

    def __exit__(
        self,
        exc_type: Optional[Type[BaseException]],
        exc_value: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None:
        with self._forgiven():
            self.release()


class AsyncTurnstileLock(DropIn, redis.asyncio.lock.Lock):
    """For redis.asyncio. As in redis-py, tasks that share a lock object share its token."""

    @property
    def _server(self) -> turnstile_lock_asyncio.Server:
        return turnstile_lock_asyncio.Server.of(self.redis)

    async def acquire(
        self,
        blocking: Optional[bool] = None,
        blocking_timeout: Optional[Number] = None,
        token: Union[None, str, bytes] = None,
    ) -> bool:
        """True: it is ours. False: it could not be had in time."""
        owner, server = self._owner(token), self._server
        wait_ms = self._wait_ms(blocking, blocking_timeout)
        with self._translated():
            grant = await server.acquire(
                [self._key], owner, self._lease_ms(), wait_ms, named=token is not None
            )
        if grant:
            self._begin(turnstile_lock_asyncio, server, owner, grant)
        return grant is not None

    async def locked(self) -> bool:
        """Whether anybody holds it, also as a plain string key."""
        with self._translated():
            return bool(await self._server.ask(self._key, "EXISTS", self._key))

    async def owned(self) -> bool:
        """Whether it is ours."""
        return self.local.token is not None and self._hold(await self._info()) is not None

    async def _info(self) -> Any:
        with self._translated():
            return await self._server.ask(self._key, "LOCK.INFO", self._key)

    async def release(self) -> None:
        """If it fails or is cancelled the token stays, so that you can try again."""
        if self.local.token is None:
            raise self._error(LockError, "Cannot release an unlocked lock")
        await self.do_release(self.local.token)

    async def do_release(self, expected_token: bytes) -> None:
        renewed = self._renewed(expected_token)
        with self._translated():
            if renewed:
                released = await renewed.release()
            else:
                released = await self._server.release([self._key], expected_token)
        self._end()
        if not released:
            raise self._not_owned("release")

    async def do_extend(self, additional_time: Number, replace_ttl: bool) -> bool:
        if replace_ttl:
            return await self._touch(int(additional_time * 1000), "extend")
        return await self._touch(self._sum_ms(await self._info(), additional_time), "extend")

    async def do_reacquire(self) -> bool:
        return await self._touch(self._lease_ms(), "reacquire")

    async def _touch(self, lease_ms: int, what: str) -> bool:
        with self._translated():
            if not await self._server.touch([self._key], self.local.token, lease_ms):
                raise self._not_owned(what)
        return True

    async def __aexit__(
        self,
        exc_type: Optional[Type[BaseException]],
        exc_value: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None:
        with self._forgiven():
            await self.release()

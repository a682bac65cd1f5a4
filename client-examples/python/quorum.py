# SPDX-License-Identifier: BSD-3-Clause
# Copyright (c) 2026 The Turnstile authors
"""One lock over N independent Turnstile servers, held while a majority of them agrees.

    quorum = Quorum(["redis://10.0.0.1", "redis://10.0.0.2", "redis://10.0.0.3"])
    with quorum.holding("report:daily", lease_ms=10_000, wait_ms=5_000) as hold:
        store.write(page, fencing_token=hold.token)

The lock survives the loss of any minority of the servers. Two rounds find one fencing token: the
first asks every server for a token, the second raises a majority to one of them. Any two majorities
share a server, so a later holder's token is larger, and a store that keeps the highest token it has
seen can refuse a holder that is late.

The lease is extended in the background at every third of it, and the event hold.lost is set when
that fails for too long. A server that has lost the hold because it restarted is asked for it again
at every extension: so servers may restart one after another during a long hold.

The servers share nothing: no replication, no persistence is needed. A server that restarts empty
has forgotten its holds: set turnstile.failover-grace-ms on all of them to the longest lease in use,
and turnstile.token-margin-ms to at least twice what their clocks may be apart.

Needs redis-py, tested with 4.3 (Debian: python3-redis). Threads may share a Quorum.
"""

import contextlib
import os
import random
import secrets
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry


class NotAcquired(Exception):
    """No majority could be had in time."""


class Lost(Exception):
    """The hold is gone, or a majority can no longer say that it is not. Stop working."""


class Quorum:
    """N servers, each given timeout_ms to connect and to answer, so that a dead one blocks nobody.

    The time-out should be a small part of the lease; pause_ms is the longest pause between tries.
    """

    def __init__(self, urls, timeout_ms=50, pause_ms=30):
        self.servers = [
            redis.Redis.from_url(
                url,
                socket_timeout=timeout_ms / 1000,
                socket_connect_timeout=timeout_ms / 1000,
                retry=Retry(NoBackoff(), 0),  # trying again is decided here, not in redis-py
            )
            for url in urls
        ]
        self.majority = len(self.servers) // 2 + 1
        self.pause_ms = pause_ms
        self.last_error = None  # why a server did not count; for logs
        self._start_threads()
        _quorums.add(self)

    def _start_threads(self):
        # Enough for a few callers and the renewal at a time. They are started on demand.
        self._threads = ThreadPoolExecutor(4 * len(self.servers))

    @contextlib.contextmanager
    def holding(self, key, lease_ms, wait_ms=0, also=(), renew=True):
        """A context with a Hold, which is released at its end.

        Raises NotAcquired; and at the end Lost, if the hold was gone and the block raised nothing.
        """
        hold = self.acquire(key, lease_ms, wait_ms, also, renew)
        if not hold:
            raise NotAcquired(f"no majority for {key}; the last error was: {self.last_error}")
        with hold:
            yield hold
            hold.check()

    def acquire(self, key, lease_ms, wait_ms=0, also=(), renew=True):
        """A Hold, or None if no majority could be had in wait_ms. Makes at least one try.

        `also` names more locks, all or none, under one token. Without `renew` the hold ends with
        its lease unless extend() is called.
        """
        deadline = time.monotonic() + wait_ms / 1000
        while True:
            hold = self._try(key, lease_ms, also, renew)
            if hold:
                return hold
            # Rivals that split the servers between them must not meet again at the same moment.
            pause = random.uniform(0, self.pause_ms / 1000)
            if time.monotonic() + pause >= deadline:
                return None
            time.sleep(pause)

    def _try(self, key, lease_ms, also, renew):
        # A new owner for each try: what a slow server does with an old request concerns nobody.
        locks = _Locks(key, secrets.token_hex(16), also)
        start = time.monotonic()  # before the first lease can begin
        tokens = self.ask_each(self.servers, locks.acquire(lease_ms))
        granted = [server for server, token in zip(self.servers, tokens) if token is not None]
        if len(granted) >= self.majority:
            token = closest_majority(
                [token for token in tokens if token is not None], self.majority
            )
            # A larger answer means that the hold was lost in between, or that this server is not of
            # the majority: only the same token counts.
            same = self.ask_each(granted, locks.acquire(lease_ms, token)).count(token)
            until = valid_until(start, lease_ms)
            if same >= self.majority and time.monotonic() < until:
                return Hold(self, locks, token, until, lease_ms, renew)
        self.ask_each(self.servers, locks.release())
        return None

    def ask_each(self, servers, command):
        """The answers of the servers to one command; None for one that failed."""
        return [answer for [answer] in self.ask_all([(server, [command]) for server in servers])]

    def ask_all(self, requests):
        """The answers to (server, commands) pairs.

        All servers are asked in parallel, each with one pipeline.
        """
        try:
            return list(self._threads.map(lambda request: self._ask_or_none(*request), requests))
        except RuntimeError:  # closed, or the interpreter is about to end: no threads any more
            return [[None] * len(commands) for _, commands in requests]

    def _ask_or_none(self, server, commands):
        try:
            answers = self.ask(server, commands)
        except redis.RedisError as error:  # no answer in time
            answers = [error] * len(commands)
        for error in answers:
            if isinstance(error, Exception):
                self.last_error = error
        return [None if isinstance(answer, Exception) else answer for answer in answers]

    def ask(self, server, commands):
        with server.pipeline(transaction=False) as pipeline:
            for command in commands:
                pipeline.execute_command(*command)
            return pipeline.execute(raise_on_error=False)

    def _extend(self, holds):
        """Extends {hold: lease_ms}, and returns those for which a majority did so in time."""
        holds = {hold: lease_ms for hold, lease_ms in holds.items() if hold.valid()}
        start = time.monotonic()
        touches = [hold._locks.touch(lease_ms) for hold, lease_ms in holds.items()]
        if not touches:
            return []
        answers = self.ask_all([(server, touches) for server in self.servers])
        extended = []
        denied = {}  # hold: how many servers do not hold it
        again = [[] for _ in self.servers]  # the holds that each server is asked for again
        for (hold, lease_ms), counts in zip(holds.items(), zip(*answers)):
            until = valid_until(start, lease_ms)
            if counts.count(hold._locks.count) >= self.majority and hold.valid():
                hold.until, hold._lease_ms = until, lease_ms
                extended.append(hold)
            else:
                hold.until = min(hold.until, until)  # the new lease may be the shorter one
            denied[hold] = sum(n is not None and n < hold._locks.count for n in counts)
            # A server that restarted can be won back. It counts from the next extension on: by then
            # a majority has kept everybody else out without it. One that lost only some of several
            # locks is left alone: what it has still is relied on.
            for asked, n in zip(again, counts):
                if n == 0 and hold.valid():
                    asked.append(hold)
        requests = [
            (server, [hold._locks.acquire(holds[hold], hold.token) for hold in asked])
            for server, asked in zip(self.servers, again)
            if asked
        ]
        for asked, tokens in zip(filter(None, again), self.ask_all(requests)):
            for hold, token in zip(asked, tokens):
                denied[hold] -= token is not None
        for hold, servers in denied.items():
            if servers >= self.majority:
                # They have nothing for us and give us nothing: others hold it already.
                hold._lose()
        return [hold for hold in extended if hold.valid()]

    def close(self):
        self._threads.shutdown()
        for server in self.servers:
            server.connection_pool.disconnect()


class _Locks:
    """The requests about a set of locks."""

    def __init__(self, key, owner, also):
        self.key = key
        self.count = 1 + len(also)
        self._about = (key, owner)
        self._also = ("ALSO", len(also), *also) if also else ()

    def acquire(self, lease_ms, floor=None):
        least = ("FLOOR", floor) if floor else ()
        return ("LOCK.ACQUIRE", *self._about, "PX", lease_ms, *least, *self._also)

    def touch(self, lease_ms):
        return ("LOCK.TOUCH", *self._about, "PX", lease_ms, *self._also)

    def release(self):
        return ("LOCK.RELEASE", *self._about, *self._also)


class Hold:
    """A lock that was obtained. Work only while valid(); give `token` to whatever you write to."""

    def __init__(self, quorum, locks, token, until, lease_ms, renew):
        self.key = locks.key
        self.token = token
        self.until = until  # on time.monotonic()
        self.lost = threading.Event()  # set when it is not valid any more, and was not released
        self._quorum = quorum
        self._locks = locks
        self._lease_ms = lease_ms
        self._renew = renew
        self._released = False
        self._turn = threading.Lock()  # a release must not overtake an extension
        self._watch()

    def valid(self):
        return not self._released and not self.lost.is_set() and time.monotonic() < self.until

    def check(self):
        """Raises Lost if the hold is not valid."""
        if not self.valid():
            self._lose()
            raise Lost(f"{self.key} is lost; the last error was: {self._quorum.last_error}")

    def extend(self, lease_ms=None):
        """Whether a majority let the lease end lease_ms from now, while the old one was valid."""
        with self._turn:
            extended = self._quorum._extend({self: lease_ms or self._lease_ms})
        self._watch()
        return bool(extended)

    def release(self):
        """Gives the lock up on every server it can reach; elsewhere the lease ends it."""
        if self._released:
            return
        self._released = True
        _renewal.forget(self)
        with self._turn:
            self._quorum.ask_each(self._quorum.servers, self._locks.release())

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.release()

    def _watch(self, retry=False):
        """Says when the renewal has to look at this hold."""
        due = self.until
        if self._renew and retry:
            due = min(due, time.monotonic() + self._lease_ms / 10_000)
        elif self._renew:
            due -= self._lease_ms / 1_500  # a third of the lease after it began
        if self.valid():
            _renewal.watch(self, due)
        else:
            self._lose()

    def _lose(self):
        _renewal.forget(self)
        if not self._released:
            self.lost.set()


class _Renewal:
    """Extends all holds of the process in time: one daemon thread, started with the first hold."""

    def __init__(self):
        self._changed = threading.Condition()
        self._due = {}  # hold: when to look at it, on time.monotonic()
        self._next = 0  # until when the thread sleeps
        self._thread = None

    def watch(self, hold, due):
        with self._changed:
            self._due[hold] = due
            if not self._thread:
                self._thread = threading.Thread(target=self._run, name="quorum", daemon=True)
                self._thread.start()
            elif due < self._next:
                self._changed.notify()

    def forget(self, hold):
        with self._changed:
            self._due.pop(hold, None)

    def holds(self):
        return list(self._due)

    def _run(self):
        while True:
            self._renew(self._wait_for_due())

    def _wait_for_due(self):
        with self._changed:
            while True:
                now = time.monotonic()
                due = [hold for hold, at in self._due.items() if at <= now]
                if due:
                    for hold in due:
                        self._due.pop(hold)
                    return due
                self._next = min(self._due.values(), default=now + 3600)
                self._changed.wait(min(self._next - now, 3600))

    def _renew(self, due):
        by_quorum = {}
        for hold in due:
            # A hold that somebody extends or releases in this moment needs nothing from us.
            if hold._renew and hold.valid() and hold._turn.acquire(blocking=False):
                by_quorum.setdefault(hold._quorum, {})[hold] = hold._lease_ms
            else:
                hold._watch(retry=True)
        for quorum, holds in by_quorum.items():
            try:
                extended = quorum._extend(holds)
            finally:
                for hold in holds:
                    hold._turn.release()
            for hold in holds:
                hold._watch(retry=hold not in extended)


_quorums = weakref.WeakSet()
_renewal = _Renewal()


def _after_fork():
    """No thread has survived in the child, and the holds are the parent's."""
    global _renewal
    for hold in _renewal.holds():
        hold._released = True
    _renewal = _Renewal()
    for quorum in _quorums:
        quorum._start_threads()


os.register_at_fork(after_in_child=_after_fork)


def closest_majority(tokens, size):
    """The highest of the `size` tokens that lie closest together.

    A server that started a moment ago leads the others, by up to its margin, and they would refuse
    to follow it: it is left out if there are enough of them.
    """
    tokens = sorted(tokens)
    spans = zip(tokens, tokens[size - 1 :])
    return min(spans, key=lambda span: span[1] - span[0])[1]


def valid_until(start, lease_ms):
    """The end of a lease less what the clocks may drift apart meanwhile: 1 % of it and 2 ms."""
    return start + (lease_ms - lease_ms / 100 - 2) / 1000


def main():
    quorum = Quorum(sys.argv[1:] or ["redis://127.0.0.1:6379"])
    with quorum.holding("report:daily", lease_ms=2_000, wait_ms=5_000) as hold:
        print(f"a majority of {len(quorum.servers)} agreed on token {hold.token}")
        if not hold.extend(lease_ms=10_000):
            sys.exit("lost")
        print("extended; now write, and send the token along")
    print("released")
    quorum.close()


if __name__ == "__main__":
    main()

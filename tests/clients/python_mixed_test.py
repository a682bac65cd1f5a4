"""A mixed fleet: clients that use the module, and clients that do without it, want the same lock.

    /usr/bin/python3 tests/clients/python_mixed_test.py

Never two of them are inside. The room that they enter notices; that it does is tested, too.
"""

import asyncio
import contextlib
import os
import random
import signal
import sys
import tempfile
import threading
import time
import unittest

import redis
import redis.asyncio

from python_test import PATIENCE_S, Server, eventually
import turnstile_lock
import turnstile_lock_asyncio

TURNS = 12
WAIT = 30.0  # with plain locks there is no line: it takes luck
LEASE = 0.6
PLAIN = {"fallback": "always", "without": {"line", "token"}}


class Room:
    """A folder that can exist once, on a disk that knows nothing of locks."""

    def __init__(self, folder):
        self.path = os.path.join(folder, "room")
        self.violations = []
        self.visits = []

    @contextlib.contextmanager
    def entered(self, kind):
        try:
            os.mkdir(self.path)
        except FileExistsError:
            self.violations.append(kind)
            yield
            return
        self.visits.append(kind)
        yield
        os.rmdir(self.path)


def stay(turn):
    """How long: mostly a moment, sometimes so long that the lease has to be renewed."""
    return 2.5 * LEASE if turn == TURNS // 2 else random.uniform(0, 0.003)


class MixedFleet(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.room = Room(self.folder.name)
        self.errors = []

    def server(self, **options):
        server = Server(**options)
        self.addCleanup(server.close)
        return server

    def threads(self, server, kind, key, **options):
        """A worker that uses threads."""
        client = server.client()
        lock = turnstile_lock.Lock(client, key(kind), lease=LEASE, wait=WAIT, **options)
        for turn in range(TURNS):
            with lock as hold:
                with self.room.entered(kind):
                    time.sleep(stay(turn))
                    hold.check()
            time.sleep(random.uniform(0, 0.003))
        turnstile_lock.Server.of(client).close()

    def tasks(self, server, kind, key, **options):
        """A worker that uses asyncio."""

        async def work():
            client = redis.asyncio.Redis(port=server.port)
            terms = {"lease": LEASE, "wait": WAIT, **options}
            lock = turnstile_lock_asyncio.Lock(client, key(kind), **terms)
            for turn in range(TURNS):
                async with lock as hold:
                    with self.room.entered(kind):
                        await asyncio.sleep(stay(turn))
                        hold.check()
                await asyncio.sleep(random.uniform(0, 0.003))
            await turnstile_lock_asyncio.Server.of(client).close()
            await client.connection_pool.disconnect()

        asyncio.run(work())

    def redis_py(self, server, kind, key):
        """A worker that has not been changed over yet: redis-py's own Lock."""
        client = server.client()
        for turn in range(TURNS):
            with client.lock(key(kind), timeout=10 * LEASE, sleep=0.01):
                with self.room.entered(kind):
                    time.sleep(stay(turn))
            time.sleep(random.uniform(0, 0.003))

    def fleet(self, workers, key):
        def run(worker, *arguments, **options):
            try:
                worker(*arguments, key, **options)
            except Exception as error:
                self.errors.append((arguments[1], error))

        threads = [
            threading.Thread(target=run, args=(worker, server, kind), kwargs=options, daemon=True)
            for worker, server, kind, options in workers
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT + PATIENCE_S)
            self.assertFalse(thread.is_alive(), "a worker that does not come to an end")
        self.assertEqual(self.errors, [])

    def workers(self, server):
        return [
            (self.threads, server, "module", {}),
            (self.threads, server, "module again", {"tag": "again"}),
            (self.threads, server, "plain", PLAIN),
            (self.tasks, server, "module, asyncio", {}),
            (self.tasks, server, "plain, asyncio", PLAIN),
            (self.redis_py, server, "redis-py", {}),
        ]

    def test_never_two_inside(self):
        server = self.server()
        workers = self.workers(server)
        self.fleet(workers, lambda kind: "shared")
        self.assertEqual(self.room.violations, [])
        kinds = {kind: self.room.visits.count(kind) for _, _, kind, _ in workers}
        self.assertEqual(set(kinds.values()), {TURNS}, kinds)
        look = server.client()
        eventually(lambda: not look.exists("shared"), "nothing to be left")
        stats = {name.lower(): stat["calls"] for name, stat in look.info("commandstats").items()}
        for command in ("lock.acquire", "lock.touch", "set", "evalsha"):  # both ways were gone
            self.assertGreater(stats[f"cmdstat_{command}"], 0)
        look.connection_pool.disconnect()

    def test_the_room_would_notice(self):
        """The same with a lock of his own for each kind."""
        server = self.server()
        self.fleet(self.workers(server), lambda kind: f"shared:{kind}")
        self.assertNotEqual(self.room.violations, [])

    def test_without_the_module_at_all(self):
        server = self.server(module=False)
        options = {"fallback": True, "without": {"line", "token"}}
        workers = [
            (self.threads, server, "one", options),
            (self.threads, server, "two", options),
            (self.tasks, server, "three", options),
            (self.redis_py, server, "four", {}),
        ]
        self.fleet(workers, lambda kind: "shared")
        self.assertEqual(self.room.violations, [])
        self.assertEqual(len(self.room.visits), 4 * TURNS)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that servers are stopped
    unittest.main()

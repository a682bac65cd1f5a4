#!/usr/bin/python3
"""client-examples/python/quorum.py on three servers that restart with nothing. See run.

The module is build/turnstile.so, or what TURNSTILE_MODULE names.
"""

import argparse
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest

import redis

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CLIENT = ROOT / "client-examples" / "python"
sys.path.insert(0, str(HERE))
sys.path.insert(0, str(CLIENT))
from quorum import Lost, NotAcquired, Quorum, closest_majority  # noqa: E402
from servers import PATIENCE_S, Server  # noqa: E402

LEASE_MS = 900
TIMEOUT_MS = 200


class ClosestMajority(unittest.TestCase):
    def test_closest_majority(self):
        for tokens, size, expected in [
            ([7], 1, 7),
            ([5, 9], 2, 9),
            ([10, 11, 12], 2, 11),  # equally close: the lower
            ([10, 13, 14], 2, 14),
            ([30_000_014, 10, 13], 2, 13),  # one that has just started
            ([30_000_014, 10, 30_000_010], 2, 30_000_014),  # two that have, beside one that is old
            ([1, 2, 3, 100, 101], 3, 3),
            ([100, 101, 102, 1, 2], 3, 102),
            ([1, 50, 51, 52, 99], 3, 52),
            ([1, 50, 51, 101], 3, 51),  # four of five answered
            ([4, 4, 4, 9, 9], 3, 4),
            ([9007199254740990, 1, 9007199254740991], 2, 9007199254740991),
        ]:
            with self.subTest(tokens=tokens):
                self.assertEqual(closest_majority(tokens, size), expected)
                self.assertEqual(closest_majority(tokens[::-1], size), expected)


class QuorumTest(unittest.TestCase):
    def start(self, grace_ms=0):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        module = os.environ.get("TURNSTILE_MODULE", ROOT / "build" / "turnstile.so")
        module = pathlib.Path(module).resolve()
        options = argparse.Namespace(module=module, margin_ms=30_000, grace_ms=grace_ms)
        self.servers = [Server(pathlib.Path(folder.name) / str(i), None, options) for i in range(3)]
        for server in self.servers:
            self.addCleanup(server.kill)
            server.start()
        self.admins = [redis.Redis(port=server.port) for server in self.servers]
        self.quorum = self.open()

    def open(self, kind=Quorum):
        quorum = kind(self.urls(), timeout_ms=TIMEOUT_MS)
        self.addCleanup(quorum.close)
        return quorum

    def urls(self):
        return [f"redis://127.0.0.1:{server.port}" for server in self.servers]

    def until(self, condition, what):
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            self.assertLess(time.monotonic(), deadline, what)
            time.sleep(0.005)

    def token_on(self, i, key="lock"):
        return self.admins[i].execute_command("LOCK.FENCE", key)

    def restart(self, i):
        self.servers[i].kill()
        self.servers[i].start()

    def holds(self, i, hold):
        return hold._locks.acquire(1)[2] in str(self.admins[i].execute_command("LOCK.INFO", "lock"))

    def grace_left(self, i):
        return self.admins[i].info("turnstile")["turnstile_grace_left_ms"]

    def restart_one_after_another(self, hold):
        """Each when those before it hold the lock again; or until it is lost."""
        for i in range(3):
            self.restart(i)
            self.until(lambda: hold.lost.is_set() or self.holds(i, hold), f"{i} holds again")

    def test_a_hold_outlasts_the_restart_of_every_server(self):
        self.start(grace_ms=LEASE_MS)
        hold = self.quorum.acquire("lock", LEASE_MS, wait_ms=PATIENCE_S * 1000)
        token = hold.token
        self.until(lambda: all(self.holds(i, hold) for i in range(3)), "all hold it")
        rival = self.open()
        entered = []
        stop = threading.Event()

        def compete():
            while not stop.is_set():
                entered.append(rival.acquire("lock", LEASE_MS, wait_ms=10, renew=False))

        competitor = threading.Thread(target=compete, daemon=True)
        competitor.start()
        self.addCleanup(stop.set)
        self.restart_one_after_another(hold)
        self.assertTrue(hold.valid())
        self.assertFalse(hold.lost.is_set())
        self.assertEqual(hold.token, token)
        self.assertGreater(len(entered), 1)
        self.assertEqual(set(entered), {None})
        hold.release()
        self.until(lambda: any(entered), "the rival's turn")
        stop.set()
        competitor.join()
        self.assertGreater(next(filter(None, entered)).token, token)

    def test_without_healing_the_same_hold_is_lost(self):
        class Forgetful(Quorum):
            heals = True

            def ask(self, server, commands):
                if not self.heals and commands[0][0] == "LOCK.ACQUIRE":
                    raise redis.ConnectionError("not asked")
                return super().ask(server, commands)

        self.start(grace_ms=LEASE_MS)
        quorum = self.open(Forgetful)
        hold = quorum.acquire("lock", LEASE_MS, wait_ms=PATIENCE_S * 1000)
        self.until(lambda: all(self.holds(i, hold) for i in range(3)), "all hold it")
        quorum.heals = False
        self.restart(0)
        self.until(lambda: not self.grace_left(0), "it could give the lock again")
        self.assertTrue(hold.valid())
        self.restart(1)
        self.assertTrue(hold.lost.wait(PATIENCE_S))

    def test_a_server_that_answers_with_a_larger_token_does_not_count(self):
        class Overtaken(Quorum):
            """A hold is lost between the two rounds, and somebody else was there."""

            def ask(self, server, commands):
                if "FLOOR" in commands[0] and server is self.servers[0]:
                    floor = commands[0][commands[0].index("FLOOR") + 1]
                    server.delete("lock")
                    rival = ("LOCK.ACQUIRE", "lock", "rival", "PX", 1000, "FLOOR", floor + 1)
                    server.execute_command(*rival)
                    server.delete("lock")
                return super().ask(server, commands)

        self.start()
        quorum = self.open(Overtaken)
        self.admins[2].set("lock", "other")
        self.assertIsNone(quorum.acquire("lock", LEASE_MS))
        self.assertIsNone(quorum.last_error)  # it did answer
        self.assertEqual([self.token_on(i) for i in range(2)], [None] * 2)

    def test_an_empty_server_counts_from_the_next_extension_on(self):
        self.start()
        hold = self.quorum.acquire("lock", 20_000, renew=False)
        self.restart(0)
        self.servers[2].kill()
        self.assertFalse(hold.extend(20_000))  # 0 and 1, and no answer
        self.assertTrue(hold.valid())
        self.assertGreaterEqual(self.token_on(0), hold.token)
        token = hold.token
        self.assertTrue(hold.extend(20_000))  # 1 and 1
        self.assertEqual(hold.token, token)
        hold.release()
        self.assertIsNone(self.token_on(0))

    def test_a_hold_that_others_have_taken_is_lost_at_once(self):
        self.start()
        hold = self.quorum.acquire("lock", 60_000, renew=False)
        token = hold.token
        for admin in self.admins[:2]:
            admin.delete("lock")
        self.assertFalse(hold.extend())  # no majority this time, but both give it back
        self.assertTrue(hold.valid())
        self.assertTrue(hold.extend())
        self.assertEqual(hold.token, token)
        for admin in self.admins[:2]:
            admin.delete("lock")
        rival = self.open().acquire("lock", 60_000, renew=False)
        self.assertGreater(rival.token, token)
        self.assertFalse(hold.extend())
        self.assertTrue(hold.lost.is_set())
        self.assertFalse(hold.valid())
        self.assertTrue(rival.valid())

    def test_several_locks_under_one_token(self):
        self.start()
        hold = self.quorum.acquire("a", 20_000, also=["b", "c"], renew=False)
        tokens = [[self.token_on(i, key) for key in "abc"] for i in range(3)]
        self.assertGreaterEqual(tokens.count([hold.token] * 3), 2, tokens)
        self.assertIsNone(self.quorum.acquire("c", 1000))
        self.assertIsNone(self.quorum.acquire("x", 1000, also=["b"]))
        self.assertIsNone(self.token_on(0, "x"))
        self.assertTrue(hold.extend())

        self.restart(0)
        self.assertTrue(hold.extend())
        self.assertTrue(all(self.token_on(0, key) >= hold.token for key in "abc"))

        # One that lost some of them does not count, and is not asked to give up the others.
        self.admins[1].delete("b")
        self.assertTrue(hold.extend())
        self.assertEqual([bool(self.token_on(1, key)) for key in "abc"], [True, False, True])
        self.admins[2].delete("c")
        self.assertFalse(hold.extend())
        self.assertTrue(hold.lost.is_set())
        hold.release()
        for i in range(3):
            self.assertEqual([self.token_on(i, key) for key in "abc"], [None] * 3)

    def test_holds_are_renewed_by_one_thread(self):
        self.start()
        holds = [self.quorum.acquire(f"lock:{i}", LEASE_MS) for i in range(40)]
        renewed = time.monotonic() + 2.5 * LEASE_MS / 1000
        self.until(lambda: min(hold.until for hold in holds) > renewed, "renewed by two leases")
        names = [thread.name for thread in threading.enumerate()]
        self.assertEqual(names.count("quorum"), 1)
        for hold in holds[:20]:
            hold.release()
        self.assertFalse(any(hold.lost.is_set() for hold in holds))
        # The servers of those that are left go away.
        for server in self.servers[:2]:
            server.kill()
        for hold in holds[20:]:
            self.assertTrue(hold.lost.wait(PATIENCE_S))
            self.assertFalse(hold.valid())
            self.assertLess(time.monotonic() - hold.until, 0.5)
        self.assertFalse(any(hold.lost.is_set() for hold in holds[:20]))

    def test_a_hold_that_is_not_renewed_ends_with_its_lease(self):
        self.start()
        hold = self.quorum.acquire("lock", 100, renew=False)
        self.assertTrue(hold.lost.wait(PATIENCE_S))
        self.assertGreaterEqual(time.monotonic(), hold.until)
        with self.assertRaises(Lost):
            hold.check()

    def test_the_context(self):
        self.start()
        with self.quorum.holding("lock", 5000) as hold:
            self.assertIsNotNone(self.token_on(0))
            with self.assertRaises(NotAcquired), self.quorum.holding("lock", 5000):
                self.fail("two inside")
        self.assertIsNone(self.token_on(0))
        with self.assertRaises(KeyError), self.quorum.holding("lock", 5000):
            raise KeyError("its own")
        self.assertIsNone(self.token_on(0))
        with self.assertRaises(Lost), self.quorum.holding("lock", LEASE_MS) as hold:
            for admin in self.admins:
                admin.set("lock", "other")
            self.assertTrue(hold.lost.wait(PATIENCE_S))
        for admin in self.admins:
            admin.delete("lock")
        with self.assertRaises(KeyError), self.quorum.holding("lock", LEASE_MS) as hold:
            for admin in self.admins:
                admin.set("lock", "other")
            raise KeyError("its own error says more")

    def test_a_release_does_not_overtake_an_extension(self):
        self.start()
        for _ in range(100):
            hold = self.quorum.acquire("lock", 5000, renew=False)
            self.admins[0].flushall()  # so that the extension asks for it again
            extension = threading.Thread(target=hold.extend)
            extension.start()
            hold.release()
            extension.join()
            self.assertEqual([self.token_on(i) for i in range(3)], [None] * 3)
            self.assertFalse(hold.lost.is_set())

    def test_a_dead_minority_costs_time_only(self):
        self.start()
        self.servers[1].kill()
        hold = self.quorum.acquire("lock", LEASE_MS)
        renewed = hold.until + LEASE_MS / 1000
        self.until(lambda: hold.until > renewed, "renewed")
        hold.release()
        self.assertIsNone(self.token_on(0))

    def test_an_unreleased_hold_does_not_keep_the_process_alive(self):
        self.start()
        program = (
            "import sys, time; from quorum import Quorum\n"
            "hold = Quorum(sys.argv[1:]).acquire('lock', 300)\n"
            "end = hold.until + 0.3\n"
            "while hold.until < end: time.sleep(0.01)\n"  # it is being renewed
        )
        command = [sys.executable, "-c", program, *self.urls()]
        done = subprocess.run(
            command, cwd=CLIENT, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
        self.assertEqual((done.returncode, done.stdout, done.stderr), (0, "", ""))

    def test_a_forked_child_starts_clean(self):
        self.start()
        hold = self.quorum.acquire("lock", LEASE_MS)
        child = os.fork()
        if child == 0:
            signal.alarm(PATIENCE_S)
            hold.release()  # not the child's
            mine = self.quorum.acquire("child", 5000)
            os._exit(0 if mine and mine.valid() and not hold.valid() else 1)
        self.assertEqual(os.waitpid(child, 0)[1], 0)
        self.assertIsNotNone(self.token_on(0))
        renewed = hold.until + LEASE_MS / 1000
        self.until(lambda: hold.until > renewed, "renewed by the parent")


if __name__ == "__main__":
    unittest.main()

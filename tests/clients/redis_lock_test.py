"""Tests of client-examples/python/turnstile_redis_lock.py, on servers of their own.

    /usr/bin/python3 tests/clients/redis_lock_test.py

The module is build/turnstile.so, or what TURNSTILE_MODULE names.
"""

import asyncio
import contextlib
import inspect
import pathlib
import signal
import subprocess
import sys
import threading
import time
import unittest

import redis
import redis.asyncio
import redis.asyncio.lock
import redis.lock
from redis.exceptions import LockError, LockNotOwnedError

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from python_test import PATIENCE_S, ROOT, SLACK_S, Server, eventually  # noqa: E402
from python_test import lock_info, waiting  # noqa: E402

sys.path.insert(0, str(ROOT / "client-examples" / "python"))
from turnstile_redis_lock import AsyncTurnstileLock, TurnstileLock  # noqa: E402

SHORT_S = 0.1  # a lease that is to run out
LONG_S = 60  # a lease that must not


class InThread(threading.Thread):
    """Runs `work` in a thread; result() is what it returned, or raises what it raised."""

    def __init__(self, work):
        super().__init__(daemon=True)
        self.work = work
        self.error = self.value = None
        self.start()

    def run(self):
        try:
            self.value = self.work()
        except BaseException as error:
            self.error = error

    def result(self):
        self.join(PATIENCE_S)
        if self.is_alive():
            raise AssertionError("the thread does not come to an end")
        if self.error:
            raise self.error
        return self.value


class Loop:
    """An event loop in a thread of its own, for calls from other threads."""

    def __init__(self):
        runs = threading.Event()

        async def run():
            self.loop, self.end = asyncio.get_running_loop(), asyncio.Event()
            runs.set()
            await self.end.wait()

        self.thread = InThread(lambda: asyncio.run(run()))
        runs.wait(PATIENCE_S)

    def __call__(self, awaitable):
        async def run():
            return await awaitable

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(LONG_S)

    def close(self):
        self.loop.call_soon_threadsafe(self.end.set)
        self.thread.result()


class Blocking:
    """An AsyncTurnstileLock whose coroutines are run to their end in `loop`."""

    def __init__(self, loop, target):
        self._loop = loop
        self._target = target

    def __getattr__(self, name):
        attribute = getattr(self._target, name)
        if not callable(attribute):
            return attribute

        def call(*args, **options):
            result = attribute(*args, **options)
            return self._loop(result) if inspect.isawaitable(result) else result

        return call

    def __enter__(self):
        self._loop(self._target.__aenter__())
        return self

    def __exit__(self, *error):
        return self._loop(self._target.__aexit__(*error))


class Common:
    """What is true of both classes. The classes below say how to make a client and a lock."""

    @classmethod
    def setUpClass(cls):
        cls.server = Server()
        cls.addClassCleanup(cls.server.close)

    def setUp(self):
        self.look = self.server.client()  # what the test looks with, from outside
        self.addCleanup(self.look.close)
        self.key = self.id()

    def holder(self):
        [holder] = lock_info(self.look, self.key)["holders"]
        return holder

    def lease_left(self):
        return self.look.pttl(self.key) / 1000

    def stale_touches(self):
        return self.look.info("turnstile")["turnstile_stale_touches"]

    def in_line(self, count=1):
        eventually(lambda: waiting(self.look, self.key) == count, f"{count} in line")

    def lost(self, **options):
        """A lock whose lease has run out."""
        lock = self.lock(timeout=SHORT_S, **options)
        self.assertTrue(lock.acquire())
        eventually(lambda: not self.look.exists(self.key), "the end of the lease")
        return lock

    # acquire and release

    def test_acquire_and_release(self):
        lock = self.lock(timeout=10)
        self.assertIs(lock.acquire(), True)
        self.assertEqual(self.look.type(self.key), b"turnstile")
        self.assertEqual(self.holder()["owner"], lock.local.token)
        self.assertEqual(self.holder()["token"], lock.fencing_token)
        self.assertTrue(8 < self.lease_left() <= 10)
        self.assertIsNone(lock.release())
        self.assertFalse(self.look.exists(self.key))
        self.assertIsNone(lock.local.token)
        self.assertIsNone(lock.fencing_token)

    def test_a_lease_may_be_a_fraction(self):
        self.lock(timeout=9.5).acquire()
        self.assertTrue(8 < self.lease_left() <= 9.5)

    def test_each_acquisition_has_a_new_owner_and_a_higher_fencing_token(self):
        lock, owners, tokens = self.lock(timeout=10), set(), []
        for _ in range(5):
            lock.acquire()
            owners.add(lock.local.token)
            tokens.append(lock.fencing_token)
            lock.release()
        self.assertEqual(len(owners), 5)
        self.assertEqual(tokens, sorted(set(tokens)))

    def test_a_token_of_the_callers_own(self):
        lock = self.lock(timeout=10)
        lock.acquire(token="mine")
        self.assertEqual(lock.local.token, b"mine")
        self.assertEqual(self.holder()["owner"], b"mine")

    def test_the_same_token_asks_again_and_is_the_same_holder(self):
        lock, again = self.lock(timeout=10), self.lock(timeout=LONG_S)
        lock.acquire()
        self.assertTrue(again.acquire(blocking=False, token=lock.local.token))
        self.assertEqual(again.fencing_token, lock.fencing_token)
        self.assertGreater(self.lease_left(), 10)
        again.release()
        self.assertRaises(LockNotOwnedError, lock.release)

    def test_a_stored_token_is_enough_to_release(self):
        lock, other = self.lock(timeout=10), self.lock(timeout=10)
        lock.acquire()
        other.local.token = lock.local.token
        self.assertTrue(other.owned())
        other.release()
        self.assertFalse(lock.locked())

    def test_release_of_an_unlocked_lock(self):
        with self.assertRaises(LockError) as caught:
            self.lock(timeout=10).release()
        self.assertNotIsInstance(caught.exception, LockNotOwnedError)
        self.assertEqual(caught.exception.lock_name, self.key)

    def test_a_name_may_be_of_any_type_that_redis_py_takes(self):
        for name in (self.key.encode(), memoryview(self.key.encode())):
            with self.lock(name=name, timeout=10) as lock:
                self.assertEqual(self.holder()["token"], lock.fencing_token)
                self.assertTrue(lock.extend(10))

    def test_a_server_without_the_module(self):
        server = Server(module=False)
        self.addCleanup(server.close)
        lock = self.lock(client=self.client_of(server.port), timeout=10)
        self.assertRaisesRegex(LockError, "module: redis-py's own Lock", lock.acquire)
        self.assertIsNone(lock.local.token)

    def test_after_the_lease_it_is_not_ours(self):
        lock = self.lost()
        self.assertFalse(lock.owned())
        self.assertRaises(LockNotOwnedError, lock.extend, 10)
        self.assertRaises(LockNotOwnedError, lock.extend, 10, replace_ttl=True)
        self.assertRaises(LockNotOwnedError, lock.reacquire)
        with self.assertRaises(LockNotOwnedError) as caught:
            lock.release()
        self.assertEqual(caught.exception.lock_name, self.key)
        self.assertIsNone(lock.local.token)
        self.assertIsNone(lock.fencing_token)

    def test_a_lost_lock_leaves_the_next_holder_alone(self):
        lock, other = self.lost(), self.lock(timeout=10)
        other.acquire()
        self.assertFalse(lock.owned())
        for call in (lambda: lock.extend(LONG_S), lock.reacquire, lock.release):
            self.assertRaises(LockNotOwnedError, call)
        self.assertTrue(other.owned())
        self.assertLessEqual(self.lease_left(), 10)

    def test_a_release_that_does_not_reach_the_server_can_be_tried_again(self):
        server = Server()
        self.addCleanup(server.close)
        lock = self.lock(client=self.client_of(server.port, socket_timeout=SHORT_S), timeout=LONG_S)
        lock.acquire()
        server.pause()
        self.assertRaises((redis.TimeoutError, redis.ConnectionError), lock.release)
        self.assertIsNotNone(lock.local.token)
        server.go_on()
        # It may have been done the first time, when the server woke up.
        with contextlib.suppress(LockNotOwnedError):
            lock.release()
        self.assertIsNone(lock.local.token)
        self.assertFalse(lock.locked())

    # waiting

    def test_without_blocking_it_is_one_try(self):
        self.lock(timeout=LONG_S).acquire()
        self.assertIs(self.lock(timeout=10, blocking=False).acquire(), False)
        lock = self.lock(timeout=10)
        self.assertIs(lock.acquire(blocking=False), False)
        self.assertIsNone(lock.local.token)
        self.assertEqual(waiting(self.look, self.key), 0)

    def test_blocking_timeout(self):
        self.lock(timeout=LONG_S).acquire()
        constructed = self.lock(timeout=10, blocking=False, blocking_timeout=LONG_S)
        for call in (
            lambda: self.lock(timeout=10, blocking_timeout=0.3).acquire(),
            lambda: constructed.acquire(blocking=True, blocking_timeout=0.3),
        ):
            start = time.monotonic()
            self.assertIs(call(), False)
            self.assertTrue(0.27 <= time.monotonic() - start < 0.3 + SLACK_S)
            self.assertEqual(waiting(self.look, self.key), 0)

    def test_a_blocking_timeout_of_0_is_one_try(self):
        self.lock(timeout=LONG_S).acquire()
        for timeout in (0, -1):
            self.assertIs(self.lock(timeout=10).acquire(blocking_timeout=timeout), False)

    def test_it_waits_without_end_and_is_told_of_the_release(self):
        lock = self.lock(timeout=LONG_S)
        other = self.lock(timeout=10, sleep=LONG_S, thread_local=False)
        lock.acquire()
        waits = InThread(other.acquire)
        self.in_line()
        start = time.monotonic()
        lock.release()
        self.assertTrue(waits.result())
        self.assertLess(time.monotonic() - start, SLACK_S)  # whatever `sleep` is
        self.assertTrue(other.owned())
        self.assertTrue(8 < self.lease_left() <= 10)

    def test_it_waits_for_the_end_of_a_lease(self):
        self.lock(timeout=0.3).acquire()
        self.assertTrue(self.lock(timeout=10).acquire(blocking_timeout=PATIENCE_S))

    def test_it_waits_for_a_plain_lock(self):
        self.look.set(self.key, "plain", px=300)
        lock = self.lock(timeout=10)
        self.assertTrue(lock.locked())
        self.assertIs(lock.acquire(blocking=False), False)
        self.assertTrue(lock.acquire(blocking_timeout=PATIENCE_S))

    def test_the_order_is_arrival(self):
        first, served, waits = self.lock(timeout=LONG_S), [], []
        first.acquire()

        def take_turn(number):
            with self.lock(timeout=LONG_S) as lock:
                served.append((number, lock.fencing_token))

        for number in range(5):
            waits.append(InThread(lambda number=number: take_turn(number)))
            self.in_line(number + 1)
        first.release()
        for wait in waits:
            wait.result()
        self.assertEqual([number for number, _ in served], list(range(5)))
        self.assertEqual(served, sorted(served, key=lambda turn: turn[1]))

    def test_two_processes_are_never_inside_together(self):
        worker = f"""
import asyncio, sys
sys.path.insert(0, {str(ROOT / "client-examples" / "python")!r})
import redis, redis.asyncio
from turnstile_redis_lock import TurnstileLock, AsyncTurnstileLock
look = redis.Redis(port={self.server.port})
def inside(lock):
    count = int(look.get("{self.key}:count") or 0)
    look.rpush("{self.key}:tokens", lock.fencing_token)
    look.set("{self.key}:count", count + 1)
{self.worker_body()}
"""
        rounds = 100
        command = [sys.executable, "-c", worker, self.key, str(rounds)]
        workers = [subprocess.Popen(command) for _ in range(2)]
        for process in workers:
            self.addCleanup(process.kill)
        for process in workers:
            self.assertEqual(process.wait(60), 0)
        self.assertEqual(int(self.look.get(f"{self.key}:count")), 2 * rounds)
        tokens = [int(token) for token in self.look.lrange(f"{self.key}:tokens", 0, -1)]
        self.assertEqual(tokens, sorted(set(tokens)))

    def test_a_deadlock_is_a_lock_error(self):
        names = [self.key + ":x", self.key + ":y"]
        locks = {
            (owner, name): self.lock(name=name, timeout=LONG_S, thread_local=False)
            for owner in "ab"
            for name in names
        }
        x, y = names
        locks["a", x].acquire(token="a")
        locks["b", y].acquire(token="b")
        waits = InThread(lambda: locks["a", y].acquire(token="a"))
        eventually(lambda: waiting(self.look, y) == 1, "the first in line")
        with self.assertRaisesRegex(LockError, "DEADLOCK") as caught:
            locks["b", x].acquire(token="b")
        self.assertEqual(caught.exception.lock_name, x)
        locks["b", y].release()
        self.assertTrue(waits.result())

    def test_no_connection_and_no_thread_per_acquire(self):
        lock, other = self.lock(timeout=LONG_S), self.lock(timeout=LONG_S, thread_local=False)

        def contended():
            lock.acquire()
            waits = InThread(other.acquire)
            self.in_line()
            lock.release()
            waits.result()
            other.release()

        contended()  # makes what is made once
        connections = self.look.info("stats")["total_connections_received"]
        threads = threading.active_count()
        for _ in range(20):
            lock.acquire()
            self.assertIs(other.acquire(blocking=False), False)
            self.assertEqual(threading.active_count(), threads)
            lock.release()
            contended()
        made = self.look.info("stats")["total_connections_received"] - connections
        self.assertLessEqual(made, 1)  # for a second thread at the same moment
        eventually(lambda: threading.active_count() <= threads, "the threads of this test to end")

    # extend and reacquire

    def test_extend_adds_to_what_is_left(self):
        lock = self.lock(timeout=10)
        lock.acquire()
        self.assertIs(lock.extend(10), True)
        self.assertTrue(16 < self.lease_left() <= 20)
        self.assertIs(lock.extend(10.5), True)
        self.assertTrue(26 < self.lease_left() <= 30.5)

    def test_extend_knows_of_extensions_by_others(self):
        lock, other = self.lock(timeout=10), self.lock(timeout=10)
        lock.acquire()
        other.local.token = lock.local.token
        other.extend(100)
        lock.extend(5)
        self.assertTrue(111 < self.lease_left() <= 115)

    def test_extend_may_replace_what_is_left(self):
        lock = self.lock(timeout=10)
        lock.acquire()
        self.assertIs(lock.extend(50, replace_ttl=True), True)
        self.assertTrue(48 < self.lease_left() <= 50)
        self.assertIs(lock.extend(5, replace_ttl=True), True)
        self.assertTrue(3 < self.lease_left() <= 5)

    def test_a_key_without_a_lease_cannot_be_extended(self):
        self.look.set(self.key, "plain")
        lock = self.lock(timeout=10)
        lock.local.token = b"plain"
        self.assertTrue(lock.owned())
        self.assertRaises(LockNotOwnedError, lock.extend, 10)

    def test_reacquire_lets_the_lease_begin_anew(self):
        lock = self.lock(timeout=10)
        lock.acquire()
        lock.extend(5, replace_ttl=True)
        self.assertIs(lock.reacquire(), True)
        self.assertTrue(8 < self.lease_left() <= 10)

    def test_an_unlocked_lock_cannot_be_extended(self):
        lock = self.lock(timeout=10)
        self.lock(timeout=10).acquire()
        self.assertRaises(LockError, lock.extend, 10)
        self.assertRaises(LockError, lock.reacquire)

    # locked and owned

    def test_locked_and_owned(self):
        for client in (self.client, self.client_of(self.server.port, decode_responses=True)):
            lock, other = self.lock(client=client, timeout=10), self.lock(client=client, timeout=10)
            self.assertIs(lock.locked(), False)
            self.assertIs(lock.owned(), False)
            lock.acquire()
            self.assertIs(lock.locked(), True)
            self.assertIs(lock.owned(), True)
            self.assertIs(other.locked(), True)
            self.assertIs(other.owned(), False)
            self.assertTrue(lock.extend(10))
            lock.release()
            self.assertIs(other.locked(), False)
            self.assertIs(lock.owned(), False)

    def test_a_key_that_was_overwritten_is_not_ours(self):
        lock = self.lock(timeout=10)
        lock.acquire()
        self.look.set(self.key, "other")
        self.assertIs(lock.locked(), True)
        self.assertIs(lock.owned(), False)
        self.assertRaises(LockNotOwnedError, lock.extend, 1)
        self.assertRaises(LockNotOwnedError, lock.release)

    # context manager

    def test_context_manager(self):
        with self.lock(timeout=10) as lock:
            self.assertTrue(lock.owned())
            self.assertGreater(lock.fencing_token, 0)
        self.assertFalse(self.look.exists(self.key))

    def test_the_error_of_the_block_is_the_one_that_comes_out(self):
        with self.assertRaises(ZeroDivisionError), self.lock(timeout=10):
            1 / 0
        self.assertFalse(self.look.exists(self.key))

    def test_context_manager_that_does_not_get_it(self):
        self.lock(timeout=LONG_S).acquire()
        for options in ({"blocking": False}, {"blocking_timeout": SHORT_S}):
            with self.assertRaises(LockError), self.lock(timeout=10, **options):
                self.fail("two inside")

    def test_a_lost_lock_at_the_end_of_the_block(self):
        def lose():
            self.look.delete(self.key)

        with self.assertRaises(LockNotOwnedError), self.lock(timeout=10):
            lose()
        with self.assertLogs("turnstile_redis_lock", "WARNING") as logs:
            with self.lock(timeout=10, raise_on_release_error=False):
                lose()
        self.assertIn("no longer owned", logs.output[0])
        with self.assertLogs("turnstile_redis_lock", "WARNING"):
            with self.lock(timeout=10, raise_on_release_error=False) as lock:
                lock.release()

    # without a timeout

    def test_without_a_timeout_it_is_held_until_release(self):
        lock = self.lock(default_lease=0.3)
        lock.acquire()
        end = time.monotonic() + 1.2
        while time.monotonic() < end:
            self.assertTrue(lock.owned())
            self.assertLessEqual(self.lease_left(), 0.3)
        lock.release()
        self.assertFalse(self.look.exists(self.key))
        # Nor is it renewed after that.
        before = self.stale_touches()
        time.sleep(0.3)
        self.assertEqual(self.stale_touches(), before)

    def test_without_a_timeout_a_stored_token_can_be_released_too(self):
        lock = self.lock()
        lock.acquire()
        self.look.set(self.key, "stored")
        lock.local.token = b"stored"
        lock.release()
        self.assertFalse(lock.locked())

    def test_without_a_timeout_a_default_lease_protects_against_crashes(self):
        lock = self.lock()
        lock.acquire()
        self.assertTrue(25 < self.lease_left() <= 30)

    def test_without_a_timeout_it_cannot_be_extended(self):
        lock = self.lock()
        lock.acquire()
        self.assertRaisesRegex(LockError, "no timeout", lock.extend, 10)
        self.assertRaisesRegex(LockError, "no timeout", lock.reacquire)

    def test_without_a_timeout_it_can_be_lost(self):
        lock, other = self.lock(default_lease=0.3), self.lock(timeout=LONG_S)
        lock.acquire()
        self.look.delete(self.key)
        before = self.stale_touches()
        other.acquire()
        eventually(lambda: self.stale_touches() > before, "a renewal")
        self.assertTrue(other.owned())
        self.assertRaises(LockNotOwnedError, lock.release)
        self.assertTrue(other.owned())

    def test_without_a_timeout_it_ends_with_the_process(self):
        worker = f"""
import asyncio, sys
sys.path.insert(0, {str(ROOT / "client-examples" / "python")!r})
import redis, redis.asyncio
from turnstile_redis_lock import TurnstileLock, AsyncTurnstileLock
def wait_for_the_end(): print("held", flush=True); sys.stdin.read()
{self.keeper_body()}
"""
        process = subprocess.Popen(
            [sys.executable, "-c", worker, self.key],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        with process:
            self.addCleanup(process.kill)
            self.assertEqual(process.stdout.readline(), b"held\n")
            end = time.monotonic() + 1.2
            while time.monotonic() < end:
                self.assertTrue(self.look.exists(self.key))
            process.send_signal(signal.SIGKILL)
        self.assertTrue(self.lock(timeout=10).acquire(blocking_timeout=PATIENCE_S))


class SyncTest(Common, unittest.TestCase):
    def setUp(self):
        super().setUp()
        self.client = self.client_of(self.server.port)

    def client_of(self, port, **options):
        client = redis.Redis(port=port, **options)
        self.addCleanup(client.connection_pool.disconnect)
        return client

    def lock(self, name=None, client=None, default_lease=30, **options):
        # client.lock() of redis-py 4.3 does not hand on all the options.
        lock = TurnstileLock(client or self.client, name or self.key, **options)
        lock.default_lease = default_lease
        return lock

    def worker_body(self):
        return f"""
lock = redis.Redis(port={self.server.port}).lock(sys.argv[1], timeout=10, lock_class=TurnstileLock)
for _ in range(int(sys.argv[2])):
    with lock:
        inside(lock)
"""

    def keeper_body(self):
        return f"""
lock = TurnstileLock(redis.Redis(port={self.server.port}), sys.argv[1])
lock.default_lease = 0.3
lock.acquire()
wait_for_the_end()
"""

    def test_it_is_a_lock_of_redis_py(self):
        lock = self.client.lock(self.key, timeout=10, lock_class=TurnstileLock)
        self.assertIsInstance(lock, TurnstileLock)
        self.assertIsInstance(lock, redis.lock.Lock)
        with lock:
            self.assertEqual(self.holder()["token"], lock.fencing_token)

    def test_the_constructor(self):
        lock = TurnstileLock(self.client, "a", 1, 2, False, 3, False, False)
        self.assertEqual((lock.name, lock.timeout, lock.sleep), ("a", 1, 2))
        self.assertEqual((lock.blocking, lock.blocking_timeout), (False, 3))
        self.assertEqual((lock.thread_local, lock.raise_on_release_error), (False, False))

    def test_thread_local(self):
        lock = self.lock(timeout=10)
        lock.acquire()

        def elsewhere():
            self.assertIsNone(lock.local.token)
            self.assertIsNone(lock.fencing_token)
            self.assertIs(lock.owned(), False)
            self.assertIs(lock.locked(), True)
            for call in (lock.release, lock.reacquire, lambda: lock.extend(1)):
                self.assertRaises(LockError, call)
            self.assertIs(lock.acquire(blocking=False), False)

        InThread(elsewhere).result()
        self.assertTrue(lock.owned())
        lock.release()

    def test_not_thread_local(self):
        lock = self.lock(timeout=10, thread_local=False)
        lock.acquire()

        def elsewhere():
            self.assertEqual(self.holder()["token"], lock.fencing_token)
            self.assertIs(lock.owned(), True)
            lock.extend(10)
            lock.release()

        InThread(elsewhere).result()
        self.assertIsNone(lock.local.token)
        self.assertFalse(self.look.exists(self.key))

    def test_threads_that_share_a_lock_object_wait_for_each_other(self):
        lock, inside, most = self.lock(timeout=LONG_S), [], []

        def work():
            for _ in range(20):
                with lock:
                    inside.append(lock.fencing_token)
                    most.append(len(inside))
                    inside.remove(lock.fencing_token)

        for thread in [InThread(work) for _ in range(4)]:
            thread.result()
        self.assertEqual((len(most), max(most)), (80, 1))

    def test_cluster(self):
        server = Server("--cluster-enabled", "yes")
        self.addCleanup(server.close)
        look = server.client()
        look.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        eventually(lambda: look.cluster("INFO")["cluster_state"] == "ok", "the cluster")
        client = redis.RedisCluster(host="127.0.0.1", port=server.port)
        self.addCleanup(client.close)
        lock = client.lock("a", timeout=10, lock_class=TurnstileLock)
        other = client.lock(
            memoryview(b"a"), timeout=10, lock_class=TurnstileLock, thread_local=False
        )
        lock.acquire()
        self.assertIs(other.acquire(blocking=False), False)
        self.assertTrue(lock.owned() and lock.locked() and lock.extend(10) and lock.reacquire())
        waits = InThread(other.acquire)
        eventually(lambda: waiting(look, "a") == 1, "one in line")
        lock.release()
        self.assertTrue(waits.result())
        other.release()


class AsyncTest(Common, unittest.TestCase):
    """The tests above, the coroutines run from outside their loop."""

    def setUp(self):
        super().setUp()
        self.loop = Loop()
        self.addCleanup(self.loop.close)
        self.client = self.client_of(self.server.port)

    def client_of(self, port, **options):
        client = redis.asyncio.Redis(port=port, **options)
        self.addCleanup(lambda: self.loop(client.connection_pool.disconnect()))
        return client

    def lock(self, name=None, client=None, default_lease=30, **options):
        options["thread_local"] = False  # the loop has a thread of its own
        lock = AsyncTurnstileLock(client or self.client, name or self.key, **options)
        lock.default_lease = default_lease
        return Blocking(self.loop, lock)

    def worker_body(self):
        return f"""
async def work():
    client = redis.asyncio.Redis(port={self.server.port})
    lock = client.lock(sys.argv[1], timeout=10, lock_class=AsyncTurnstileLock)
    for _ in range(int(sys.argv[2])):
        async with lock:
            inside(lock)
asyncio.run(work())
"""

    def keeper_body(self):
        return f"""
async def work():
    lock = AsyncTurnstileLock(redis.asyncio.Redis(port={self.server.port}), sys.argv[1])
    lock.default_lease = 0.3
    await lock.acquire()
    await asyncio.to_thread(wait_for_the_end)
asyncio.run(work())
"""


class TasksTest(unittest.IsolatedAsyncioTestCase):
    """What is special about asyncio."""

    @classmethod
    def setUpClass(cls):
        cls.server = Server()
        cls.addClassCleanup(cls.server.close)

    async def asyncSetUp(self):
        self.look = self.server.client()
        self.addCleanup(self.look.close)
        self.key = self.id()
        self.client = redis.asyncio.Redis(port=self.server.port)
        self.addAsyncCleanup(self.client.connection_pool.disconnect)

    def lock(self, **options):
        return AsyncTurnstileLock(self.client, self.key, **options)

    async def in_line(self, count):
        deadline = time.monotonic() + PATIENCE_S
        while waiting(self.look, self.key) != count:
            self.assertLess(time.monotonic(), deadline)
            await asyncio.sleep(0.005)

    async def test_it_is_a_lock_of_redis_py(self):
        lock = self.client.lock(self.key, timeout=10, lock_class=AsyncTurnstileLock)
        self.assertIsInstance(lock, redis.asyncio.lock.Lock)
        async with lock:
            self.assertTrue(await lock.owned())

    async def test_the_constructor(self):
        lock = AsyncTurnstileLock(self.client, "a", 1, 2, False, 3, False, False)
        self.assertEqual((lock.name, lock.timeout, lock.sleep), ("a", 1, 2))
        self.assertEqual((lock.blocking, lock.blocking_timeout), (False, 3))
        self.assertEqual((lock.thread_local, lock.raise_on_release_error), (False, False))

    async def test_thread_local(self):
        lock = self.lock(timeout=10)
        await lock.acquire()
        self.assertIsNone(await asyncio.to_thread(lambda: lock.local.token))
        await lock.release()
        lock = self.lock(timeout=10, thread_local=False)
        await lock.acquire()
        self.assertIsNotNone(await asyncio.to_thread(lambda: lock.local.token))

    async def test_tasks_are_served_in_order_of_arrival(self):
        first, served, tasks = self.lock(timeout=LONG_S), [], []
        await first.acquire()

        async def take_turn(number):
            async with self.lock(timeout=LONG_S):
                served.append(number)
                await asyncio.sleep(0)

        for number in range(5):
            tasks.append(asyncio.create_task(take_turn(number)))
            await self.in_line(number + 1)
        await first.release()
        await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE_S)
        self.assertEqual(served, list(range(5)))

    async def test_many_tasks_wait_over_few_connections(self):
        first = self.lock(timeout=LONG_S)
        await first.acquire()

        async def take_turn():
            async with self.lock(timeout=LONG_S):
                pass

        tasks = []
        for number in range(50):
            tasks.append(asyncio.create_task(take_turn()))
            await self.in_line(number + 1)
        self.assertLess(len(self.look.client_list()), 10)
        await first.release()
        await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE_S)

    async def test_a_cancelled_acquire_leaves_no_wait_and_no_hold(self):
        first = self.lock(timeout=LONG_S)
        await first.acquire()
        task = asyncio.create_task(self.lock(timeout=LONG_S).acquire())
        await self.in_line(1)
        task.cancel()
        with self.assertRaises(asyncio.CancelledError):
            await task
        await self.in_line(0)
        await first.release()
        self.assertFalse(await first.locked())

    async def test_a_cancelled_release_can_be_tried_again(self):
        lock = self.lock(timeout=LONG_S)
        await lock.acquire()
        task = asyncio.create_task(lock.release())
        task.cancel()
        with self.assertRaises(asyncio.CancelledError):
            await task
        self.assertTrue(await lock.owned())
        await lock.release()
        self.assertFalse(await lock.locked())


if __name__ == "__main__":
    unittest.main()

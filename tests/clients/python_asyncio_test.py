"""Tests of client-examples/python/turnstile_asyncio.py, on servers of their own.

    /usr/bin/python3 tests/clients/python_asyncio_test.py
"""

import asyncio
import pathlib
import secrets
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
import unittest

import redis
import redis.asyncio

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from python_test import PATIENCE_S, SLACK_S, Proxy, Server  # noqa: E402
from python_test import eventually, lock_connection, lock_info, stale_releases  # noqa: E402
from python_test import times_asked, waiting  # noqa: E402
from turnstile_asyncio import Deadlock, Fenced, Lock, Lost, Moved, NotAcquired  # noqa: E402
from turnstile_asyncio import NotPrimary, Superseded, WaitLimit  # noqa: E402


class LockTest(unittest.IsolatedAsyncioTestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = Server()
        cls.addClassCleanup(cls.server.close)

    def setUp(self):
        self.look = self.server.client()  # what the test looks with, from outside
        self.addCleanup(self.assert_no_connection_left)
        self.key = self.id()

    async def asyncSetUp(self):
        self.client = self.client_of(self.server)
        self.tasks = len(asyncio.all_tasks())

    async def asyncTearDown(self):
        self.assertEqual(len(asyncio.all_tasks()), self.tasks)

    def assert_no_connection_left(self):
        eventually(lambda: len(self.look.client_list()) == 1, "connections to close")
        self.look.connection_pool.disconnect()

    def client_of(self, server, **options):
        client = redis.asyncio.Redis(port=server.port, **options)
        self.addAsyncCleanup(client.connection_pool.disconnect)
        return client

    def proxy(self):
        proxy = Proxy(self.server.port)
        self.addCleanup(proxy.close)
        return proxy

    def lock(self, key=None, **options):
        return Lock(options.pop("client", self.client), key or self.key, **options)

    def held_by(self, token):
        return self.look.execute_command("LOCK.FENCE", self.key, token) == 1

    async def in_line(self, count=1, key=None):
        await self.soon(lambda: waiting(self.look, key or self.key) == count, f"{count} in line")

    async def soon(self, condition, what):
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            self.assertLess(time.monotonic(), deadline, f"waited for: {what}")
            await asyncio.sleep(0.005)

    async def turns(self):
        """Lets the event loop turn a few times, so that a task gets where it waits next."""
        for _ in range(10):
            await asyncio.sleep(0)

    async def is_lost(self, hold, within):
        """Whether it is told in that time."""
        try:
            async with asyncio.timeout(within):
                await hold.lost.wait()
            return True
        except TimeoutError:
            return False

    def assert_between(self, value, low, high):
        self.assertGreaterEqual(value, low)
        self.assertLessEqual(value, high)


class Basics(LockTest):
    async def test_acquire_touch_release(self):
        hold = await self.lock(lease=5.0).acquire()
        self.assertTrue(self.held_by(hold.token))
        await hold.touch(lease=50.0)
        self.assertGreater(self.look.pttl(self.key), 40_000)
        await hold.touch(lease=2.0)
        self.assert_between(hold.until - time.monotonic(), 1, 2)
        self.assertIs(await hold.release(), True)
        self.assertIs(await hold.release(), True)
        self.assertFalse(self.look.exists(self.key))
        with self.assertRaises(Lost):
            hold.check()
        with self.assertRaises(Lost):
            await hold.touch()

    async def test_try_acquire(self):
        async with self.lock() as hold:
            self.assertIsNone(await self.lock().try_acquire())
            with self.assertRaises(NotAcquired):
                await self.lock(wait=0.05).acquire()
        again = await self.lock().try_acquire()
        self.assertGreater(again.token, hold.token)
        await again.release()

    async def test_released_when_the_work_throws(self):
        with self.assertRaisesRegex(ValueError, "the work"):
            async with self.lock():
                raise ValueError("the work")
        self.assertFalse(self.look.exists(self.key))

    async def test_the_error_of_the_work_is_told_even_if_the_release_fails(self):
        with self.assertRaisesRegex(ValueError, "the work"):
            async with self.lock():
                self.look.delete(self.key)
                raise ValueError("the work")
        server = Server()
        self.addCleanup(server.close)
        with self.assertRaisesRegex(ValueError, "the work"):
            async with self.lock(client=self.client_of(server)):
                server.kill()
                raise ValueError("the work")

    async def test_a_loss_is_told_at_the_end_of_the_block(self):
        with self.assertRaises(Lost):
            async with self.lock(lease=60.0):
                self.look.delete(self.key)

    async def test_guarded_write(self):
        async with self.lock() as hold:
            self.assertEqual(await hold.run("SET", self.key + ":guest", "alice"), b"OK")
            with self.assertRaisesRegex(redis.ResponseError, "integer"):
                await hold.run("INCR", self.key + ":guest")
        with self.assertRaises(Fenced):
            await hold.run("SET", self.key + ":guest", "mallory")
        self.assertEqual(self.look.get(self.key + ":guest"), b"alice")

    async def test_many_tasks_share_a_lock_object(self):
        lock = self.lock(wait=PATIENCE_S)
        inside, most, total = 0, 0, 0

        async def work():
            nonlocal inside, most, total
            for _ in range(10):
                async with lock:
                    inside += 1
                    most = max(most, inside)
                    await asyncio.sleep(0)
                    total += 1
                    inside -= 1

        await asyncio.gather(*(work() for _ in range(4)))
        self.assertEqual((most, total), (1, 40))
        self.assertEqual(lock.entered, {})


class Loss(LockTest):
    async def test_renewal_keeps_a_lock_far_beyond_its_lease(self):
        async with self.lock(lease=0.9) as hold:
            self.assertFalse(await self.is_lost(hold, within=1.8))
            hold.check()
            self.assertTrue(self.held_by(hold.token))

    async def test_a_forced_release_cancels_the_block(self):
        cancelled = False
        start = time.monotonic()
        with self.assertRaises(Lost):
            async with self.lock(lease=1.5) as hold:
                await self.client.delete(self.key)
                try:
                    await asyncio.sleep(PATIENCE_S)
                except asyncio.CancelledError:
                    cancelled = True
                    raise
        self.assertTrue(cancelled and hold.lost.is_set())
        self.assert_between(time.monotonic() - start, 0, 0.5 + SLACK_S)
        await asyncio.sleep(0)  # and only the block
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.sleep(0.01)

    async def test_a_stopped_server_cancels_at_the_end_of_the_lease(self):
        await self.assert_told_in_time(Server.pause, reply_timeout=0.2)

    async def test_a_dead_server_cancels_at_the_end_of_the_lease(self):
        await self.assert_told_in_time(Server.kill)

    async def assert_told_in_time(self, strike, **options):
        server = Server()
        self.addCleanup(server.close)
        lease, told = 0.6, None
        with self.assertRaisesRegex(Lost, "lease ran out"):
            async with self.lock(client=self.client_of(server), lease=lease, **options) as hold:
                self.assertFalse(await self.is_lost(hold, within=lease / 2))
                strike(server)
                struck = time.monotonic()
                try:
                    await asyncio.sleep(PATIENCE_S)
                finally:
                    told = time.monotonic()
        self.assert_between(told, hold.until, hold.until + SLACK_S)
        self.assert_between(hold.until, struck + lease / 2, struck + lease)

    async def test_a_short_outage_is_survived(self):
        proxy = self.proxy()
        async with self.lock(client=self.client_of(proxy), lease=0.6) as hold:
            for _ in range(3):
                proxy.cut()
                self.assertFalse(await self.is_lost(hold, within=0.25))
            self.assertTrue(self.held_by(hold.token))

    async def test_a_connection_that_says_nothing_is_replaced(self):
        proxy = self.proxy()
        async with self.lock(client=self.client_of(proxy), lease=0.75) as hold:
            proxy.freeze()
            self.assertFalse(await self.is_lost(hold, within=1.0))
            self.assertTrue(self.held_by(hold.token))

    async def test_release_lets_a_renewal_come_to_its_end(self):
        hold = await self.lock(lease=1.2).acquire()
        connections = self.look.info("stats")["total_connections_received"]
        self.server.pause()
        try:
            await self.soon(self.server.is_asked, "a renewal that is on its way")
            release = asyncio.create_task(hold.release())
            await self.turns()
        finally:
            self.server.go_on()
        self.assertIs(await release, True)
        now = self.look.info("stats")["total_connections_received"]
        self.assertEqual(now, connections)  # a session has only the one

    async def test_never_beyond_the_maximum(self):
        start = time.monotonic()
        with self.assertRaisesRegex(Lost, "max_hold"):
            async with self.lock(lease=0.45, max_hold=0.6):
                await asyncio.sleep(PATIENCE_S)
        self.assert_between(time.monotonic(), start + 0.6, start + 0.6 + SLACK_S)
        self.assertFalse(self.look.exists(self.key))

    async def test_without_a_block_only_the_event_tells(self):
        hold = await self.lock(lease=0.3, renew=False).acquire()
        self.assertTrue(await self.is_lost(hold, within=PATIENCE_S))
        self.assert_between(time.monotonic(), hold.until, hold.until + SLACK_S)
        with self.assertRaises(Lost):
            async with hold:
                self.fail("a lost hold let the block begin")

    async def test_a_block_that_swallows_the_cancellation_is_told_at_its_end(self):
        with self.assertRaises(Lost):
            async with self.lock(max_hold=0.2):
                try:
                    await asyncio.sleep(PATIENCE_S)
                except asyncio.CancelledError:
                    pass

    async def test_an_error_of_the_clean_up_is_told(self):
        with self.assertRaisesRegex(ValueError, "clean-up"):
            async with self.lock(lease=0.3):
                self.look.delete(self.key)
                try:
                    await asyncio.sleep(PATIENCE_S)
                finally:
                    raise ValueError("clean-up")


class Cancellation(LockTest):
    """From outside: it stays a cancellation, and the lock is released."""

    async def work(self, inside, **options):
        async with self.lock(**options):
            inside.set()
            await asyncio.sleep(PATIENCE_S)

    async def test_of_the_work(self):
        inside = asyncio.Event()
        task = asyncio.create_task(self.work(inside))
        await inside.wait()
        task.cancel()
        with self.assertRaises(asyncio.CancelledError):
            await task
        self.assertTrue(task.cancelled())
        self.assertFalse(self.look.exists(self.key))

    async def test_by_a_time_out(self):
        with self.assertRaises(TimeoutError):
            async with asyncio.timeout(0.2):
                await self.work(asyncio.Event())
        self.assertFalse(self.look.exists(self.key))

    async def test_together_with_a_loss(self):
        """The work is being cancelled by us when somebody else cancels it too."""

        async def stubborn(inside, in_clean_up):
            async with self.lock(lease=0.3):
                inside.set()
                try:
                    await asyncio.sleep(PATIENCE_S)
                finally:
                    in_clean_up.set()
                    await asyncio.sleep(PATIENCE_S)

        inside, in_clean_up = asyncio.Event(), asyncio.Event()
        task = asyncio.create_task(stubborn(inside, in_clean_up))
        await inside.wait()
        self.look.delete(self.key)
        await in_clean_up.wait()
        task.cancel()
        with self.assertRaises(asyncio.CancelledError):
            await task

    async def test_again_during_the_release(self):
        """The release waits for a renewal that gets no answer; nobody may go on renewing."""
        inside = asyncio.Event()
        task = asyncio.create_task(self.work(inside, lease=1.2))
        await inside.wait()
        self.server.pause()
        try:
            await self.soon(self.server.is_asked, "a renewal that is on its way")
            task.cancel()
            await self.turns()
            task.cancel()
            with self.assertRaises(asyncio.CancelledError):
                await task
        finally:
            self.server.go_on()
        await self.soon(lambda: not self.look.exists(self.key), "the lease to end")

    async def test_of_the_wait(self):
        async with self.lock():
            task = asyncio.create_task(self.work(asyncio.Event(), wait=PATIENCE_S))
            await self.in_line()
            task.cancel()
            with self.assertRaises(asyncio.CancelledError):
                await task
            await self.in_line(0)
        self.assertFalse(self.look.exists(self.key))

    async def test_of_the_wait_when_the_grant_is_on_its_way(self):
        self.server.pause()  # the answer will be written after the cancellation
        try:
            task = asyncio.create_task(self.work(asyncio.Event(), lease=60.0, reply_timeout=0.5))
            await self.soon(self.server.is_asked, "the request")
            task.cancel()
            await self.turns()
        finally:
            self.server.go_on()
        with self.assertRaises(asyncio.CancelledError):
            await task
        await self.soon(lambda: not self.look.exists(self.key), "nothing to be left behind")


class CancelledAcquire(LockTest):
    """When acquire() was cancelled, the server has neither a hold nor a waiter of it.

    Repeated often, because what is at stake is which of two connections the server reads first.
    """

    TRIES = 200

    def left(self, keys):
        return [key for key in keys if lock_info(self.look, key) is not None]

    def owners(self):
        return {"random": lambda: None, "the caller's": lambda: secrets.token_hex(16)}.items()

    async def cancelled(self, task):
        task.cancel()
        with self.assertRaises(asyncio.CancelledError):
            await task

    async def test_in_line_leaves_nothing(self):
        for whose, owner in self.owners():
            with self.subTest(whose):
                keys = [f"{self.key}:{whose}:{i}" for i in range(self.TRIES)]
                for key in keys:
                    hold = await self.lock(key, lease=60.0).acquire()
                    lock = self.lock(key, wait=60.0, lease=60.0, owner=owner())
                    task = asyncio.create_task(lock.acquire())
                    await self.in_line(key=key)
                    await asyncio.gather(self.cancelled(task), hold.release())
                self.assertEqual(self.left(keys), [])

    async def test_at_any_moment_leaves_nothing(self):
        for whose, owner in self.owners():
            with self.subTest(whose):
                keys = [f"{self.key}:{whose}:{i}" for i in range(self.TRIES // 2)]
                for i, key in enumerate(keys):
                    options = {"owner": owner(), "also": [key + ":b"], "session": i % 3 == 0}
                    lock = self.lock(key, wait=60.0, lease=60.0, **options)
                    hold = await self.lock(key, lease=60.0).acquire() if i % 2 else None
                    task = asyncio.create_task(lock.acquire())
                    for _ in range(i % 30):
                        await asyncio.sleep(0)
                    task.cancel()
                    if hold:
                        await hold.release()
                    try:
                        await (await task).release()
                    except asyncio.CancelledError:
                        pass
                self.assertEqual(self.left(keys), [])

    async def test_before_the_request_arrives(self):
        for whose, owner in self.owners():
            for when in ("before", "after"):
                with self.subTest(whose, released=when):
                    proxy = self.proxy()
                    proxy.hold_back(b"LOCK.ACQUIRE")
                    client = self.client_of(proxy)
                    lock = self.lock(client=client, wait=60.0, lease=60.0, owner=owner())
                    hold = await self.lock(lease=60.0).acquire()
                    stale = stale_releases(self.look)
                    task = asyncio.create_task(lock.acquire())
                    await self.soon(lambda: proxy.holds_back(b"LOCK.ACQUIRE"), "the request")
                    task.cancel()
                    await self.soon(lambda: stale_releases(self.look) > stale, "a release")
                    if when == "before":
                        await hold.release()
                    proxy.let_through()
                    with self.assertRaises(asyncio.CancelledError):
                        await task
                    self.assertEqual(waiting(self.look, self.key), 0)
                    await hold.release()
                    self.assertEqual(self.left([self.key]), [])

    async def test_without_an_answer_in_time(self):
        for whose, owner in self.owners():
            with self.subTest(whose):
                server = Server()
                self.addCleanup(server.close)
                options = {"wait": 0.1, "lease": 60.0, "reply_timeout": 0.2, "owner": owner()}
                server.pause()
                with self.assertRaises(redis.TimeoutError):
                    await self.lock(client=self.client_of(server), **options).acquire()
                server.go_on()  # and only now it reads the request and the release behind it
                look = server.client()
                await self.soon(lambda: len(look.client_list()) == 1, "the connections to close")
                self.assertIsNone(lock_info(look, self.key))
                look.connection_pool.disconnect()

    async def test_twice_leaves_nothing(self):
        keys = [f"{self.key}:{i}" for i in range(self.TRIES // 4)]
        for i, key in enumerate(keys):
            hold = await self.lock(key, lease=60.0).acquire()
            task = asyncio.create_task(self.lock(key, wait=60.0, lease=60.0).acquire())
            await self.in_line(key=key)
            task.cancel()
            for _ in range(1 + i % 10):
                await asyncio.sleep(0)
            task.cancel()
            await hold.release()
            with self.assertRaises(asyncio.CancelledError):
                await task
        await self.soon(lambda: self.left(keys) == [], "nothing to be left behind")

    async def test_of_an_upgrade_keeps_the_shared_hold(self):
        other = await self.lock(shared=True).acquire()
        async with self.lock(shared=True, owner="upgrade") as reader:
            for _ in range(20):
                task = asyncio.create_task(self.lock(wait=60.0, owner="upgrade").acquire())
                await self.in_line()
                await self.cancelled(task)
                await self.in_line(0)
                await reader.touch()
            await other.release()
            await reader.run("SET", self.key + ":data", "x")  # under the token of before
        self.assertEqual(self.left([self.key]), [])

    async def test_of_a_re_entry_keeps_the_count(self):
        options = {"owner": "alice", "reentrant": True, "lease": 60.0}
        async with self.lock(**options):
            for i in range(self.TRIES // 2):
                task = asyncio.create_task(self.lock(**options).acquire())
                for _ in range(i % 30):
                    await asyncio.sleep(0)
                task.cancel()
                try:
                    await (await task).release()
                except asyncio.CancelledError:
                    pass
            [holder] = lock_info(self.look, self.key)["holders"]
            self.assertEqual(holder["count"], 1)
        self.assertEqual(self.left([self.key]), [])


class SilentPeer:
    """Speaks TLS and says yes to the first questions. Then it reads one more and is silent."""

    def __init__(self, answers):
        self.answers = answers
        self.asked = threading.Event()
        self._end = threading.Event()
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        with tempfile.TemporaryDirectory() as folder:
            files = ["-keyout", f"{folder}/key", "-out", f"{folder}/certificate"]
            command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt"]
            command += ["ec_paramgen_curve:prime256v1", "-nodes", "-subj", "/CN=localhost", *files]
            subprocess.run(command, check=True, capture_output=True)
            self._context.load_cert_chain(files[3], files[1])
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self):
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            self._threads.append(threading.Thread(target=self._serve, args=(peer,)))
            self._threads[-1].start()

    def _serve(self, peer):
        try:
            with self._context.wrap_socket(peer, server_side=True) as tls:
                while tls.recv(65536):
                    self.asked.set()
                    if not self.answers:
                        break
                    self.answers -= 1
                    tls.sendall(b":1\r\n")
                self._end.wait(60)
        except OSError:
            pass

    def close(self):
        self._end.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._listener.close()


class SilentTLS(LockTest):
    """Who closes a TLS connection politely waits for the other side. Nothing here may."""

    def lock_at_silent_peer(self, answers, **options):
        self.peer = SilentPeer(answers)
        self.addCleanup(self.peer.close)
        client = self.client_of(self.peer, ssl=True, ssl_cert_reqs="none")
        return self.lock(client=client, reply_timeout=0.2, **options)

    async def test_a_loss_is_told_at_the_end_of_the_lease(self):
        told = None
        with self.assertRaisesRegex(Lost, "lease ran out"):
            async with self.lock_at_silent_peer(2, lease=0.9) as hold:
                try:
                    await asyncio.sleep(PATIENCE_S)
                finally:
                    told = time.monotonic()
        self.assert_between(told, hold.until, hold.until + SLACK_S)
        self.assertLess(time.monotonic(), told + 0.2 + SLACK_S)  # and the release did not wait

    async def test_acquire_and_release(self):
        start = time.monotonic()
        with self.assertRaises(redis.TimeoutError):
            await self.lock_at_silent_peer(0, wait=0).acquire()  # it also tries to release
        self.assertLess(time.monotonic(), start + 0.4 + SLACK_S)
        hold = await self.lock_at_silent_peer(1, lease=60.0).acquire()
        start = time.monotonic()
        with self.assertRaises(redis.TimeoutError):
            await hold.release()
        self.assertLess(time.monotonic(), start + 0.4 + SLACK_S)

    async def test_cancellation(self):
        lock = self.lock_at_silent_peer(0, wait=60.0)
        task = asyncio.create_task(lock.acquire())
        await self.soon(self.peer.asked.is_set, "the request")
        task.cancel()
        start = time.monotonic()
        with self.assertRaises(asyncio.CancelledError):
            await task
        self.assertLess(time.monotonic(), start + 0.2 + SLACK_S)


class LostReplies(LockTest):
    async def test_asking_again_gets_the_same_token(self):
        proxy = self.proxy()
        proxy.lose(b"LOCK.ACQUIRE", 1)
        async with self.lock(client=self.client_of(proxy), wait=PATIENCE_S) as hold:
            self.assertEqual(proxy.lost, [b":%d\r\n" % hold.token])
            [holder] = lock_info(self.look, self.key)["holders"]
            self.assertEqual((holder["token"], holder["count"]), (hold.token, 1))
        self.assertFalse(self.look.exists(self.key))

    async def test_giving_up_leaves_no_grant_behind(self):
        proxy = self.proxy()
        for wait, losses in ((0, 1), (0.2, 1000)):
            with self.subTest(wait=wait):
                proxy.lost.clear()
                proxy.lose(b"LOCK.ACQUIRE", losses)
                with self.assertRaises(redis.ConnectionError):
                    lock = self.lock(client=self.client_of(proxy), wait=wait, lease=60.0)
                    await lock.acquire()
                self.assertRegex(proxy.lost[0], rb"^:\d+")  # it had been granted
                self.assertFalse(self.look.exists(self.key))

    async def test_a_lost_answer_to_a_release(self):
        proxy = self.proxy()
        proxy.lose(b"LOCK.RELEASE", 1)
        async with self.lock(client=self.client_of(proxy), lease=60.0):
            pass
        self.assertEqual(proxy.lost, [b":1\r\n"])

    async def test_a_lost_answer_to_a_reentrant_release(self):
        proxy = self.proxy()
        options = {"owner": "alice", "reentrant": True, "lease": 60.0}
        async with self.lock(**options) as outer:
            proxy.lose(b"LOCK.RELEASE", 1)
            inner = await self.lock(client=self.client_of(proxy), **options).acquire()
            with self.assertRaises(redis.ConnectionError):
                await inner.release()
            self.assertIs(await inner.release(), False)
            self.assertTrue(self.held_by(outer.token))  # asking again would have ended it
        self.assertFalse(self.look.exists(self.key))

    async def test_an_error_after_a_grant_leaves_nothing_behind(self):
        proxy = self.proxy()
        proxy.answer(b"LOCK.TOUCH", b"-READONLY You can't write against a read only replica.\r\n")
        first = await self.lock(lease=0.5, renew=False).acquire()
        with self.assertRaises(NotPrimary):
            lock = self.lock(client=self.client_of(proxy), wait=PATIENCE_S, lease=1.0)
            await lock.acquire()
        self.assertFalse(self.look.exists(self.key))
        await first.release()

    async def test_waiting_longer_than_the_time_out_of_the_client(self):
        client = self.client_of(self.server, socket_timeout=0.1)
        self.look.config_resetstat()
        first = await self.lock().acquire()
        second = asyncio.create_task(self.lock(client=client, wait=PATIENCE_S, lease=0.9).acquire())
        await self.in_line()
        self.assertFalse(await self.is_lost(first, within=0.4))
        await first.release()
        hold = await second
        self.assertEqual(times_asked(self.look), 2)  # it asked once and was patient
        left = hold.until - time.monotonic()
        self.assertGreater(left, 0.5)
        self.assertLessEqual(left * 1000, self.look.pttl(self.key) + 1)
        await hold.release()


class Errors(LockTest):
    async def test_deadlock(self):
        a, b = self.key + ":a", self.key + ":b"
        async with self.lock(a, owner="alice"), self.lock(b, owner="bob"):
            bob = asyncio.create_task(self.lock(a, owner="bob", wait=PATIENCE_S).acquire())
            await self.in_line(key=a)
            with self.assertRaises(Deadlock):
                await self.lock(b, owner="alice", wait=PATIENCE_S).acquire()
        await (await bob).release()

    async def test_superseded(self):
        async with self.lock():
            waiter = asyncio.create_task(self.lock(wait=PATIENCE_S).acquire())
            await self.in_line()
            self.look.execute_command("CLIENT UNBLOCK", lock_connection(self.look, "b"), "ERROR")
            with self.assertRaises(Superseded):
                await waiter

    async def test_wait_limit(self):
        self.look.config_set("turnstile.max-waiters", 1)
        self.addCleanup(self.look.config_set, "turnstile.max-waiters", 10000)
        async with self.lock():
            waiter = asyncio.create_task(self.lock(wait=PATIENCE_S).acquire())
            await self.in_line()
            with self.assertRaises(WaitLimit):
                await self.lock().acquire()
        await (await waiter).release()

    async def test_not_primary_and_moved(self):
        for option, value, kind in (
            ("--replicaof", "127.0.0.1 1", NotPrimary),
            ("--cluster-enabled", "yes", Moved),
        ):
            server = Server(option, value)
            self.addCleanup(server.close)
            with self.assertRaises(kind):
                await self.lock(client=self.client_of(server)).acquire()

    async def test_nobody_answers(self):
        self.server.pause()
        try:
            with self.assertRaises(redis.TimeoutError):
                await self.lock(wait=0.1, reply_timeout=0.1).acquire()
        finally:
            self.server.go_on()


class Options(LockTest):
    async def test_shared_and_limit(self):
        for options in ({"shared": True}, {"limit": 2}):
            lock = self.lock(**options)
            async with lock as one, lock as two:
                self.assertTrue(self.held_by(one.token) and self.held_by(two.token))
                self.assertIsNone(await self.lock(limit=2).try_acquire())
            self.assertFalse(self.look.exists(self.key))

    async def test_session(self):
        async with self.lock(session=True, lease=0.9) as hold:
            self.assertFalse(await self.is_lost(hold, within=1.5))
            self.assertTrue(lock_info(self.look, self.key)["holders"][0]["session"])
        with self.assertRaisesRegex(Lost, "connection"):
            async with self.lock(session=True, lease=1.5):
                self.look.client_kill_filter(_id=lock_connection(self.look))
                await self.soon(lambda: not self.look.exists(self.key), "the session to end")
                await asyncio.sleep(PATIENCE_S)

    async def test_also(self):
        keys = [self.key, self.key + ":2", self.key + ":3"]
        lock = self.lock(also=keys[1:], lease=0.9)
        async with lock as hold:
            self.assertFalse(await self.is_lost(hold, within=1.5))
            self.assertEqual(self.look.exists(*keys), 3)
        self.assertEqual(self.look.exists(*keys), 0)
        with self.assertRaises(Lost):
            async with lock:
                self.look.delete(keys[1])
                await asyncio.sleep(PATIENCE_S)
        self.assertEqual(self.look.exists(*keys), 0)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that servers are stopped
    unittest.main()

"""Tests of client-examples/python/turnstile_lock_asyncio.py, on servers of their own.

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
import redis.asyncio.cluster
import redis.asyncio.retry
from redis.backoff import NoBackoff

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from python_test import PATIENCE_S, SLACK_S, OneNodeCluster, Proxy, Server  # noqa: E402
from python_test import connections, eventually, lock_info, received  # noqa: E402
from python_test import times_asked, waiting  # noqa: E402
import turnstile_lock  # noqa: E402
import turnstile_lock_asyncio  # noqa: E402
from turnstile_lock_asyncio import Deadlock, Fenced, Lock, Lost, Moved, NotAcquired  # noqa: E402
from turnstile_lock_asyncio import NotPrimary, Superseded, Unsupported, WaitLimit  # noqa: E402


NO_RETRY = redis.asyncio.retry.Retry(NoBackoff(), 0)  # as with redis-py up to 5


class LockTest(unittest.IsolatedAsyncioTestCase):
    park = 1.0  # how long a wait blocks a connection before it waits for a message

    @classmethod
    def setUpClass(cls):
        cls.server = Server()
        cls.addClassCleanup(cls.server.close)

    def setUp(self):
        turnstile_lock.PARK = self.park
        self.look = self.server.client()  # what the test looks with, from outside
        self.addCleanup(self.assert_no_connection_left)
        self.key = self.id()

    async def asyncSetUp(self):
        self.clients = []
        self.client = self.client_of(self.server)
        self.tasks = len(asyncio.all_tasks())

    async def asyncTearDown(self):
        """No task is left, and nothing that would be renewed."""
        left = turnstile_lock_asyncio.keeper().holds.copy()
        for client in self.clients:
            for plain in (False, True):
                await turnstile_lock_asyncio.Server.of(client, plain).close()
        await self.soon(lambda: len(asyncio.all_tasks()) <= self.tasks, "the tasks to end")
        self.assertEqual(left, set())

    def assert_no_connection_left(self):
        eventually(lambda: len(self.look.client_list()) == 1, "connections to close")
        self.look.connection_pool.disconnect()

    def client_of(self, server, **options):
        options = {"retry": NO_RETRY, **options}
        client = redis.asyncio.Redis(port=server.port, **options)
        self.clients.append(client)
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


    async def test_a_block_that_ends_in_another_task(self):
        async def block(lock):
            async with lock as hold:
                yield hold

        async def begin(generator):  # anext() is no coroutine
            return await anext(generator)

        async def close(generator):
            await generator.aclose()

        lock = self.lock(shared=True, lease=60.0)
        first, second = block(lock), block(lock)
        await asyncio.create_task(begin(first))  # and its task is gone
        hold = await begin(second)
        await asyncio.create_task(close(first))
        self.assertIs(await hold.owned(), True)
        await asyncio.create_task(close(second))  # there is only one
        self.assertFalse(self.look.exists(self.key))
        lock = self.lock(shared=True, lease=0.3)
        first, second = block(lock), block(lock)
        for generator in (first, second):
            await asyncio.create_task(begin(generator))
        with self.assertRaisesRegex(RuntimeError, "which of 2"):
            await first.aclose()
        await self.soon(lambda: not self.look.exists(self.key), "the leases to end unrenewed")
        lock.entered.clear()
        with self.assertRaises(RuntimeError):
            await second.aclose()


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
        self.server.pause()
        try:
            await self.soon(self.server.is_asked, "a renewal that is on its way")
            release = asyncio.create_task(hold.release())
            await self.turns()
        finally:
            self.server.go_on()
        self.assertIs(await release, True)

    async def test_renewal_survives_errors(self):
        server = turnstile_lock_asyncio.Server.of(self.client)
        hold = await self.lock(lease=60.0).acquire()
        for place, name in ((turnstile_lock_asyncio, "Survey"), (server, "renewing")):
            failed, until = asyncio.Event(), hold.until

            def fail(*_):
                setattr(place, name, real)
                failed.set()
                raise ZeroDivisionError

            real = getattr(place, name)
            with self.assertLogs("turnstile_lock_asyncio", "ERROR"):
                hold._due = 0
                setattr(place, name, fail)
                turnstile_lock_asyncio.keeper().look_at(0)
                await self.soon(failed.is_set, "the error")
                await self.soon(lambda: hold.until > until, "it to be renewed")
        self.assertIs(await hold.release(), True)

    async def test_close_ends_all(self):
        session = await self.lock(self.key + ":session", session=True, lease=60.0).acquire()
        with self.assertRaisesRegex(Lost, "closed"):
            async with self.lock(lease=60.0):
                await turnstile_lock_asyncio.Server.of(self.client).close()
                self.assertEqual(turnstile_lock_asyncio.keeper().holds, set())
                await asyncio.sleep(PATIENCE_S)
        self.assertFalse(self.look.exists(self.key))
        with self.assertRaisesRegex(Lost, "closed"):
            session.check()
        await self.soon(lambda: not self.look.exists(session.key), "it to end on the server")
        self.assertIs(await session.release(), False)

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
            for word, held in ((b"PX", False), (b"WAIT", True), (b"WAIT", False)):
                with self.subTest(whose, word=word, held=held):
                    proxy = self.proxy()
                    proxy.hold_back(word)
                    client = self.client_of(proxy)
                    lock = self.lock(client=client, wait=60.0, lease=60.0, owner=owner())
                    hold = await self.lock(lease=60.0).acquire() if word == b"WAIT" else None
                    task = asyncio.create_task(lock.acquire())
                    await self.soon(lambda: proxy.holds_back(word), "the request")
                    task.cancel()
                    await self.soon(lambda: proxy.holds_back(b"LOCK.RELEASE"), "a release")
                    if hold and not held:
                        await hold.release()
                    proxy.let_through()
                    with self.assertRaises(asyncio.CancelledError):
                        await task
                    self.assertEqual(waiting(self.look, self.key), 0)
                    if hold:
                        await hold.release()
                    self.assertEqual(self.left([self.key]), [])

    async def test_without_an_answer_in_time(self):
        for whose, owner in self.owners():
            with self.subTest(whose):
                server = Server()
                self.addCleanup(server.close)
                options = {"wait": 0.1, "lease": 60.0, "reply_timeout": 0.2, "owner": owner()}
                client = self.client_of(server)
                await asyncio.create_task(client.ping())
                server.pause()
                with self.assertRaises(redis.TimeoutError):
                    await self.lock(client=client, **options).acquire()
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
            for _ in range(2 + i % 30):  # and again
                task.cancel()
                await asyncio.sleep(0)
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


class CancelledWaitForMessages(CancelledAcquire):
    park = 0.0  # every wait waits for a message


class CancelledTakeOver(CancelledAcquire):
    park = 0.002  # by then some waits are answered, and some are being taken over


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
                while data := tls.recv(65536):
                    if b"LOCK" not in data:  # what redis-py says for a start
                        proto = b"%1\r\n$5\r\nproto\r\n:3\r\n" * data.count(b"HELLO")
                        tls.sendall(proto + b"+OK\r\n" * data.count(b"CLIENT"))
                        continue
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
        return self.lock(client=client, reply_timeout=1.5, **options)

    async def test_a_loss_is_told_at_the_end_of_the_lease(self):
        told = None
        with self.assertRaisesRegex(Lost, "lease ran out"):
            async with self.lock_at_silent_peer(2, lease=0.9) as hold:
                try:
                    await asyncio.sleep(PATIENCE_S)
                finally:
                    told = time.monotonic()
        self.assert_between(told, hold.until, hold.until + SLACK_S)
        self.assertLess(time.monotonic(), told + 1.5 + SLACK_S)  # and the release did not wait

    async def test_acquire_and_release(self):
        start = time.monotonic()
        with self.assertRaises(redis.TimeoutError):
            await self.lock_at_silent_peer(0, wait=0).acquire()  # it also tries to release
        self.assertLess(time.monotonic(), start + 4.5 + SLACK_S)
        hold = await self.lock_at_silent_peer(1, lease=60.0).acquire()
        start = time.monotonic()
        with self.assertRaises(redis.TimeoutError):
            await hold.release()
        self.assertLess(time.monotonic(), start + 4.5 + SLACK_S)

    async def test_cancellation(self):
        lock = self.lock_at_silent_peer(0, wait=60.0)
        task = asyncio.create_task(lock.acquire())
        await self.soon(self.peer.asked.is_set, "the request")
        task.cancel()
        start = time.monotonic()
        with self.assertRaises(asyncio.CancelledError):
            await task
        self.assertLess(time.monotonic(), start + 3.0 + SLACK_S)


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
            options = {"wait": PATIENCE_S, "lease": 1.0, "session": True}
            await self.lock(client=self.client_of(proxy), **options).acquire()
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
        self.assertEqual(times_asked(self.look), 5)  # it tried, waited twice and confirmed
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
            lock = self.lock(wait=PATIENCE_S, session=True)
            waiter = asyncio.create_task(lock.acquire())
            await self.in_line()
            [blocked] = connections(self.look, "b")
            self.look.execute_command("CLIENT UNBLOCK", blocked, "ERROR")
            with self.assertRaises(Superseded):
                await waiter
            waiter = asyncio.create_task(self.lock(owner="bob", wait=PATIENCE_S).acquire())
            await self.in_line()
            self.look.execute_command("LOCK.RELEASE", self.key, "bob")
            with self.assertRaises(Superseded):
                await waiter

    async def test_wait_limit(self):
        turnstile_lock.PARK = 0.0
        self.look.config_set("turnstile.max-queued", 1)
        self.addCleanup(self.look.config_set, "turnstile.max-queued", 100000)
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
                [session] = connections(self.look, command="lock.acquire")
                self.look.client_kill_filter(_id=session)
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


class Connections(LockTest):
    """What a lock costs: connections, tasks, round trips."""

    park = 0.0

    async def test_uncontended_holds_use_those_of_the_client(self):
        await (await self.lock(self.key + ":first").acquire()).release()
        before, tasks = received(self.look), len(asyncio.all_tasks())
        holds = [await self.lock(f"{self.key}:{i}", lease=60.0).acquire() for i in range(300)]
        for hold in holds:
            self.assertIsNone(await self.lock(hold.key).try_acquire())
        self.assertEqual(len(asyncio.all_tasks()), tasks)
        for hold in holds:
            self.assertTrue(await hold.release())
        self.assertEqual(received(self.look), before)

    async def test_all_waits_share_one(self):
        async def turn(key):
            return await (await self.lock(key, wait=PATIENCE_S, lease=60.0).acquire()).release()

        holds = [await self.lock(f"{self.key}:{i}").acquire() for i in range(3)]
        waits = [asyncio.create_task(turn(holds[i % 3].key)) for i in range(60)]
        for hold in holds:
            await self.in_line(20, key=hold.key)
        self.assertEqual(len(connections(self.look, "P")), 1)
        self.assertEqual(connections(self.look, "b"), [])
        for hold in holds:
            await hold.release()
        self.assertEqual(await asyncio.gather(*waits), [True] * 60)
        self.assertEqual(len(connections(self.look, "P")), 1)

    async def test_renewals_go_together(self):
        sent = []

        class Watched(turnstile_lock_asyncio.Server):
            async def _ask(self, node, commands, *arguments):
                sent.append([command[0] for command in commands])
                return await super()._ask(node, commands, *arguments)

        turnstile_lock_asyncio.Server.of(self.client).__class__ = Watched
        holds = [await self.lock(f"{self.key}:{i}", lease=60.0).acquire() for i in range(100)]
        self.look.execute_command("LOCK.TOUCH", holds[-1].key, holds[-1].owner, "EX", 9)
        sent.clear()
        for hold in holds:
            hold._due = 0
        turnstile_lock_asyncio.keeper().look_at(0)
        await self.soon(lambda: all(hold._due for hold in holds), "the answers")
        self.assertEqual(sent, [["LOCK.TOUCH"] * 100])
        self.assertGreater(self.look.pttl(holds[-1].key), 50_000)
        for hold in holds:
            await hold.release()


class Parking(LockTest):
    """A short wait blocks one of a few connections. A longer one is taken over."""

    park = 0.3

    async def test_a_short_wait_hears_no_message(self):
        hold = await self.lock().acquire()
        waiter = asyncio.create_task(self.lock(wait=PATIENCE_S, lease=60.0).acquire())
        await self.soon(lambda: len(connections(self.look, "b")) == 1, "a blocked one")
        await hold.release()
        await (await waiter).release()
        self.assertEqual(connections(self.look, "P"), [])
        self.assertEqual(connections(self.look, "b"), [])

    async def test_a_longer_wait_keeps_its_place(self):
        hold = await self.lock(lease=60.0).acquire()
        order, waits = [], []

        async def turn(number):
            async with self.lock(wait=PATIENCE_S, lease=60.0):
                order.append(number)

        for number in range(6):  # more than may block a connection
            waits.append(asyncio.create_task(turn(number)))
            await self.in_line(number + 1)
            self.assertLessEqual(len(connections(self.look, "b")), turnstile_lock.IDLE)
        await self.soon(lambda: not connections(self.look, "b"), "all to wait for messages")
        self.assertEqual(len(connections(self.look, "P")), 1)
        await hold.release()
        await asyncio.gather(*waits)
        self.assertEqual(order, list(range(6)))

    async def test_a_connection_that_the_server_has_closed_is_not_used_again(self):
        hold = await self.lock().acquire()
        waiter = asyncio.create_task(self.lock(wait=PATIENCE_S).acquire())
        await self.soon(lambda: connections(self.look, "b"), "a blocked one")
        await hold.release()
        await (await waiter).release()
        [idle] = turnstile_lock_asyncio.Server.of(self.client)._idle[""]
        [blocked] = connections(self.look, command="lock.acquire")
        self.look.client_kill_filter(_id=blocked)
        await self.soon(idle._reader.at_eof, "its end")
        self.assertTrue(await (await self.lock(session=True).try_acquire()).release())

    async def test_a_wait_that_runs_out(self):
        async with self.lock(lease=60.0):
            for wait in (0.1, 0.8):
                start = time.monotonic()
                with self.assertRaises(NotAcquired):
                    await self.lock(wait=wait).acquire()
                self.assert_between(time.monotonic() - start, wait, wait + SLACK_S)


class Messages(LockTest):
    """The rules for messages: what is said may be lost, and anybody may have said it."""

    park = 0.0

    async def wait_in_line(self, **options):
        """A hold, and a wait for it that has begun."""
        hold = await self.lock(lease=60.0).acquire()
        lock = self.lock(lease=60.0, **{"wait": PATIENCE_S, **options})
        waiter = asyncio.create_task(lock.acquire())
        await self.in_line()
        return hold, waiter

    def place(self):
        """The one place in a line that this process has."""
        [place] = turnstile_lock_asyncio.Server.of(self.client)._subscribers[""].places.values()
        return place

    async def test_a_lost_subscriber(self):
        hold, waiter = await self.wait_in_line()
        [subscriber] = connections(self.look, "P")
        self.look.client_kill_filter(_id=subscriber)
        await hold.release()
        start = time.monotonic()
        self.assertTrue(await (await waiter).release())
        self.assertLess(time.monotonic() - start, SLACK_S)

    async def test_a_subscriber_that_hears_nothing_is_replaced(self):
        period, turnstile_lock_asyncio.PING_EVERY = turnstile_lock_asyncio.PING_EVERY, 0.1
        self.addCleanup(setattr, turnstile_lock_asyncio, "PING_EVERY", period)
        proxy = self.proxy()
        hold, waiter = await self.wait_in_line(client=self.client_of(proxy))
        [subscriber] = connections(self.look, "P")
        await self.soon(lambda: proxy.has_heard(b"PING"), "a sign of life")
        proxy.freeze(b"PING")
        another = lambda: connections(self.look, "P") not in ([subscriber], [])  # noqa: E731
        await self.soon(another, "another one")
        await hold.release()
        self.assertTrue(await (await waiter).release())

    async def test_a_lost_message(self):
        proxy = self.proxy()
        proxy.swallow(b"granted")
        start = time.monotonic()
        hold, waiter = await self.wait_in_line(client=self.client_of(proxy), wait=1.0)
        await hold.release()
        late = await waiter
        self.assertEqual(proxy.swallowed, 1)
        self.assert_between(time.monotonic() - start, 1.0, 1.5 + SLACK_S)
        self.assertTrue(self.held_by(late.token))
        self.assertTrue(await late.release())

    async def test_forged_messages_are_not_believed(self):
        hold, waiter = await self.wait_in_line()
        place = self.place()
        messages = ["granted 9007199254740991", "timeout", "lost 9007199254740991 forced"]
        for message in (*messages, "error DEADLOCK made up"):
            asked = times_asked(self.look)
            self.look.publish(place.channel, f"{place.id} {message} {self.key}")
            await self.soon(lambda: times_asked(self.look) > asked, "it to ask again")
            await self.in_line()
        self.look.publish(place.channel, b"\xff\xfe")
        await hold.release()
        real = await waiter
        self.assertTrue(self.held_by(real.token))
        real._due = -1
        self.look.publish(place.channel, f"{place.id} lost {real.token} forced {self.key}")
        await self.soon(lambda: 0 < real._due, "it to ask the server")
        self.assertFalse(real.lost.is_set())
        self.assertTrue(await real.release())

    async def test_a_forged_message_that_the_wait_was_ended_leaves_nothing(self):
        hold, waiter = await self.wait_in_line(wait=60.0)
        place = self.place()
        self.look.publish(place.channel, f"{place.id} error UNBLOCKED made up")
        with self.assertRaises(Superseded):
            await waiter
        await self.in_line(0)
        await hold.release()
        self.assertFalse(self.look.exists(self.key))

    async def test_a_loss_cancels_at_once(self):
        hold, waiter = await self.wait_in_line()
        await hold.release()
        start = time.monotonic()
        with self.assertRaisesRegex(Lost, "forced"):
            async with await waiter:
                self.look.delete(self.key)
                await asyncio.sleep(PATIENCE_S)
        self.assertLess(time.monotonic() - start, SLACK_S)  # a third of the lease would be 20 s

    async def test_without_the_right_to_the_channel_it_blocks(self):
        rights = ["on", ">secret", "+@all", "~*", "resetchannels"]
        self.look.execute_command("ACL", "SETUSER", "deaf", *rights)
        client = self.client_of(self.server, username="deaf", password="secret")
        for turn in range(2):
            before = received(self.look)
            hold, waiter = await self.wait_in_line(client=client)
            await self.soon(lambda: len(connections(self.look, "b")) == 1, "a blocked one")
            await hold.release()
            self.assertTrue(await (await waiter).release())
        self.assertEqual(received(self.look), before)  # the same connection

    async def test_of_a_cancelled_blocking_wait_nothing_is_left(self):
        self.look.execute_command("ACL", "SETUSER", "deaf", "on", ">secret", "+@all", "~*")
        client = self.client_of(self.server, username="deaf", password="secret")
        for _ in range(20):
            hold, waiter = await self.wait_in_line(client=client)
            await self.soon(lambda: connections(self.look, "b"), "a blocked one")
            waiter.cancel()
            await hold.release()
            with self.assertRaises(asyncio.CancelledError):
                await waiter
            self.assertIsNone(lock_info(self.look, self.key))


class TimeOuts(LockTest):
    """redis-py's own, and asyncio's: what was given up must not bring a hold or a wait later."""

    async def stopped(self, **options):
        server = Server()
        self.addCleanup(server.close)
        client = self.client_of(server, **options)
        await asyncio.create_task(client.ping())  # redis-py 4.3 leaves a cancellation behind
        server.pause()
        return server, client

    async def assert_nothing_comes(self, server):
        look = server.client()
        await self.soon(lambda: len(look.client_list()) == 1, "the connections to close")
        self.assertIsNone(lock_info(look, self.key))
        self.assertEqual(look.info("turnstile")["turnstile_acquired"], 1)  # it came, and went
        look.connection_pool.disconnect()

    async def test_of_the_client(self):
        server, client = await self.stopped(socket_timeout=0.2)
        start = time.monotonic()
        with self.assertRaises(redis.TimeoutError):
            await self.lock(client=client, lease=60.0, wait=PATIENCE_S).acquire()
        self.assert_between(time.monotonic() - start, 0.2, 0.6 + SLACK_S)
        server.go_on()
        await self.assert_nothing_comes(server)

    async def test_the_release_goes_behind_the_request(self):
        proxy = self.proxy()
        client = self.client_of(proxy, socket_timeout=1.5)
        await asyncio.create_task(client.ping())
        proxy.hold_back(b"LOCK.ACQUIRE")
        outcome = asyncio.create_task(self.lock(client=client, lease=60.0).acquire())
        await self.soon(lambda: proxy.holds_back(b"LOCK.RELEASE"), "a release")
        proxy.let_through()
        with self.assertRaises(redis.TimeoutError):
            await outcome
        self.assertIsNone(lock_info(self.look, self.key))

    async def test_of_asyncio(self):
        server, client = await self.stopped()
        with self.assertRaises(TimeoutError):
            async with asyncio.timeout(0.2):
                lock = self.lock(client=client, lease=60.0, reply_timeout=0.3)
                await lock.acquire()
        server.go_on()
        await self.assert_nothing_comes(server)


class Knowing(LockTest):
    park = 0.0

    async def test_the_error_says_who_and_for_how_long(self):
        async with self.lock(tag="host-7 pid 12", lease=30.0, owner="a-secret"):
            for wait in (0, 0.05):
                with self.assertRaisesRegex(NotAcquired, r"by host-7 pid 12 .* (29|30)\.\d s"):
                    await self.lock(wait=wait).acquire()

    async def test_locked_owned_and_adopted(self):
        lock = self.lock(lease=60.0)
        self.assertIs(await lock.locked(), False)
        stored = await lock.acquire()
        self.assertIs(await lock.locked(), True)
        self.assertIs(await stored.owned(), True)
        hold = await lock.adopt(stored.owner, stored.token)
        self.assertEqual(hold.token, stored.token)
        self.assertEqual((await lock.adopt(stored.owner)).token, stored.token)
        self.assertEqual((await lock.acquire(owner=stored.owner)).token, stored.token)
        for owner, token in (("another", stored.token), (stored.owner, stored.token + 1)):
            with self.assertRaises(Lost):
                await lock.adopt(owner, token)
        self.assertIs(await hold.release(), True)
        self.assertIs(await stored.owned(), False)
        self.assertIs(await stored.release(), False)
        for left in list(turnstile_lock_asyncio.keeper().holds):
            await left.release()

    async def test_the_maximum_of_an_adopted_hold(self):
        stored = await self.lock(max_hold=0.5).acquire()
        with self.assertRaisesRegex(Lost, "max_hold"):
            async with await self.lock(lease=60.0).adopt(stored.owner):
                await asyncio.sleep(PATIENCE_S)
        self.assertIs(await stored.release(), False)

    async def test_the_seam(self):
        server = turnstile_lock_asyncio.Server.of(self.client)
        grant = await server.acquire([self.key], "alice", 5000, 0)
        self.assertTrue(self.held_by(grant.token))
        self.assertIsNone(await server.acquire([self.key], "bob", 5000, 50))
        self.assertEqual(await server.touch([self.key], "alice", 9000), 1)
        self.assertEqual(await server.release([self.key], "alice"), 1)
        await server.abandon([self.key], "bob")
        self.assertEqual(await server.ask(self.key, "EXISTS", self.key), 0)

    async def test_in_another_loop(self):
        """A client that is used by one loop after the other, as some tests do."""
        client = redis.asyncio.Redis(port=self.server.port)

        async def work():
            async with Lock(client, self.key + ":loop"):
                with self.assertRaises(NotAcquired):
                    await Lock(client, self.key + ":loop", wait=0.05).acquire()
            await turnstile_lock_asyncio.Server.of(client).close()
            await client.connection_pool.disconnect()

        for _ in range(2):
            await asyncio.to_thread(asyncio.run, work())


class Cluster(LockTest):
    park = 0.0

    @classmethod
    def setUpClass(cls):
        cls.server = OneNodeCluster()
        cls.addClassCleanup(cls.server.close)

    async def asyncSetUp(self):
        await super().asyncSetUp()
        self.cluster = redis.asyncio.cluster.RedisCluster("127.0.0.1", self.server.port)

    async def asyncTearDown(self):
        await turnstile_lock_asyncio.Server.of(self.cluster).close()
        await self.cluster.close()
        await super().asyncTearDown()

    def lock(self, key=None, **options):
        return Lock(self.cluster, key or self.key, **options)

    async def test_hold_and_renewal(self):
        self.look.config_resetstat()
        async with self.lock("{a}:1", also=["{a}:2"], lease=0.9) as hold:
            self.assertFalse(await self.is_lost(hold, within=1.2))
            await hold.run("SET", "{a}:data", "x")
            self.assertTrue(await hold.owned() and await self.lock("{a}:2").locked())
        commands = {name.lower() for name in self.look.info("commandstats")}
        self.assertNotIn("cmdstat_command|getkeys", commands)

    async def test_all_waits_share_a_subscriber(self):
        async def turn(key):
            return await (await self.lock(key, wait=PATIENCE_S).acquire()).release()

        holds = [await self.lock(f"{self.key}:{i}").acquire() for i in range(5)]
        waits = [asyncio.create_task(turn(hold.key)) for hold in holds for _ in range(4)]
        for hold in holds:
            await self.in_line(4, key=hold.key)
        self.assertEqual(len(connections(self.look, "P")), 1)
        self.assertEqual(connections(self.look, "b"), [])
        self.look.client_kill_filter(_id=connections(self.look, "P")[0])
        for hold in holds:
            await hold.release()
        self.assertEqual(await asyncio.gather(*waits), [True] * 20)


class WithoutTheModule(LockTest):
    @classmethod
    def setUpClass(cls):
        cls.server = Server(module=False)
        cls.addClassCleanup(cls.server.close)

    async def test_a_plain_lock(self):
        with self.assertRaisesRegex(Unsupported, "module.*fallback=True"):
            await self.lock(wait=0).acquire()
        lock = self.lock(fallback=True, wait=0, lease=0.9)
        async with lock as hold:
            self.assertEqual(self.look.get(self.key), hold.owner.encode())
            self.assertIs(await hold.owned(), True)
            self.assertIsNone(await lock.try_acquire())
            self.assertFalse(await self.is_lost(hold, within=1.5))  # it is renewed
            with self.assertRaisesRegex(Unsupported, "without=.*token"):
                hold.token
        self.assertFalse(self.look.exists(self.key))

    async def test_what_is_missing_is_told(self):
        for what, wanted in (("modes", {"shared": True}), ("line", {"wait": 1.0})):
            options = {"fallback": True, "wait": 0, **wanted}
            with self.assertRaisesRegex(Unsupported, f"without=.*{what}"):
                await self.lock(**options).acquire()
            async with self.lock(**options, without={what, "token"}) as hold:
                self.assertIsNone(hold.token)
                with self.assertRaises(Unsupported):
                    await hold.run("SET", "x", "y")

    async def test_a_cancelled_acquire_leaves_nothing(self):
        self.server.pause()
        try:
            task = asyncio.create_task(self.lock(fallback=True, wait=0, lease=60.0).acquire())
            await self.soon(self.server.is_asked, "the request")
            task.cancel()
            await self.turns()
        finally:
            self.server.go_on()
        with self.assertRaises(asyncio.CancelledError):
            await task
        await self.soon(lambda: not self.look.exists(self.key), "nothing to be left behind")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that servers are stopped
    unittest.main()

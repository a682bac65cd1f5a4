"""Tests of client-examples/python/turnstile.py, on servers of their own.

    /usr/bin/python3 tests/clients/python_test.py

The module is build/turnstile.so, or what TURNSTILE_MODULE names. python_asyncio_test.py uses the
servers and the proxy of this file.
"""

import contextlib
import os
import pathlib
import random
import secrets
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import unittest

import redis
from redis.exceptions import MovedError, TryAgainError

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "client-examples" / "python"))
import turnstile  # noqa: E402
from turnstile import Deadlock, Fenced, Lock, LockError, Lost, Moved, NotAcquired  # noqa: E402
from turnstile import NotPrimary, Superseded, WaitLimit  # noqa: E402

PATIENCE_S = 10.0  # for what must happen
SLACK_S = 1.5  # for what must happen at a certain time, on a busy machine


class Server:
    """A redis-server with the module. Stop it with close()."""

    def __init__(self, *options):
        self.folder = tempfile.TemporaryDirectory()
        for _ in range(20):  # another program may take the port before the server does
            # It lies, as does the port of a cluster's own traffic (10000 higher), below the ports
            # that the kernel gives to clients.
            self.port = random.SystemRandom().randrange(12000, 22000)
            if self._start(options):
                return
        self.close()
        raise RuntimeError("no server:\n" + self.log)

    def _start(self, options):
        module = os.environ.get("TURNSTILE_MODULE", ROOT / "build" / "turnstile.so")
        command = [os.environ.get("REDIS_SERVER", "redis-server"), "--bind", "127.0.0.1"]
        command += ["--port", str(self.port), "--save", "", "--dir", self.folder.name]
        command += ["--loadmodule", str(module), *options]
        with open(pathlib.Path(self.folder.name) / "log", "w+") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        eventually(lambda: self.process.poll() is not None or self._answers(), "a server")
        if self.process.poll() is None and self._is_ours():
            return True
        self.kill()
        self.log = (pathlib.Path(self.folder.name) / "log").read_text()
        return False

    def _answers(self):
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def _is_ours(self):
        try:
            with contextlib.closing(self.client(socket_timeout=PATIENCE_S)) as client:
                return client.info("server")["process_id"] == self.process.pid
        except redis.ConnectionError:  # it ended after it listened: its second port was taken
            return False

    def is_asked(self):
        """Whether there is something to read for it, which it does not while it is paused."""
        for line in pathlib.Path("/proc/net/tcp").read_text().splitlines()[1:]:
            _, local, _, _, queues, *_ = line.split()
            if int(local.split(":")[1], 16) == self.port and int(queues.split(":")[1], 16) > 0:
                return True
        return False

    def client(self, **options):
        return redis.Redis(port=self.port, **options)

    def pause(self):
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self):
        self.process.send_signal(signal.SIGCONT)

    def kill(self):
        self.process.kill()
        self.process.wait()

    def close(self):
        self.kill()
        self.folder.cleanup()


class Proxy:
    """Stands between a client and a server and can lose answers.

    lose(b"LOCK.ACQUIRE", 1): the next such request reaches the server and is carried out; instead
    of its answer the client gets a closed connection. answer(b"LOCK.ACQUIRE", b"-ERR\\r\\n")
    answers in the server's place. hold_back(b"LOCK.ACQUIRE"): the first connection that sends such
    a request gets nothing through before let_through().
    """

    def __init__(self, server_port):
        self.server_port = server_port
        self.lost = []  # the answers that were kept back
        self._losses = {}
        self._answers = {}
        self._connections = set()
        self._frozen = set()
        self._to_hold_back = None
        self._held_back = None  # the connection to the server, and what is kept from it
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def client(self, **options):
        return redis.Redis(port=self.port, **options)

    def lose(self, word, times):
        self._losses[word] = times

    def answer(self, word, line):
        self._answers[word] = line

    def hold_back(self, word):
        self._to_hold_back = word

    def holds_back(self, word):
        return self._held_back is not None and word in self._held_back[1]

    def let_through(self):
        server, data = self._held_back
        self._held_back = None
        server.sendall(data)

    def freeze(self):
        """Lets nothing through on the connections that there are; new ones are welcome."""
        self._frozen |= self._connections

    def cut(self):
        """Closes the connections that there are; new ones are welcome."""
        for connection in list(self._connections):
            connection.shutdown(socket.SHUT_RDWR)

    def close(self):
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        self.cut()

    def _accept(self):
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client):
        with client, socket.create_connection(("127.0.0.1", self.server_port)) as server:
            self._connections.add(client)
            try:
                self._pump(client, server)
            except OSError:
                pass
            finally:
                self._connections.discard(client)

    def _pump(self, client, server):
        losing = False
        while True:
            for source in select.select([client, server], [], [])[0]:
                data = source.recv(65536)
                if not data:
                    return
                if client in self._frozen:
                    continue
                if source is server and losing:
                    self.lost.append(data)
                    return
                if source is server:
                    client.sendall(data)
                    continue
                if self._to_hold_back and self._to_hold_back in data:
                    self._to_hold_back = None
                    self._held_back = (server, b"")
                if self._held_back and self._held_back[0] is server:
                    self._held_back = (server, self._held_back[1] + data)
                    continue
                for word, line in self._answers.items():
                    if word in data:
                        client.sendall(line)
                        break
                else:
                    for word, times in self._losses.items():
                        if word in data and times:
                            self._losses[word] -= 1
                            losing = True
                    server.sendall(data)


def eventually(condition, what):
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {PATIENCE_S} s for: {what}")
        time.sleep(0.005)


def lock_info(client, key):
    """LOCK.INFO as dicts, or None."""

    def as_dict(flat):
        pairs = flat.items() if isinstance(flat, dict) else zip(flat[::2], flat[1::2])
        return {field.decode(): value for field, value in pairs}

    reply = client.execute_command("LOCK.INFO", key)
    if reply is None:
        return None
    info = as_dict(reply)
    info["holders"] = [as_dict(holder) for holder in info["holders"]]
    return info


def lock_connection(client, flag="N"):
    """The id of the only connection that has asked for a lock last; flag b: that waits for one."""
    asked = [c for c in client.client_list() if c["cmd"].lower() == "lock.acquire"]
    [connection] = [c for c in asked if flag in c["flags"]]
    return connection["id"]


def times_asked(client):
    """How many LOCK.ACQUIRE there have been since CONFIG RESETSTAT."""
    commands = client.info("commandstats").items()
    return sum(stats["calls"] for name, stats in commands if name.lower().endswith("lock.acquire"))


def stale_releases(client):
    return client.info("turnstile")["turnstile_stale_releases"]


def waiting(client, key):
    info = lock_info(client, key)
    return info["waiting"] if info else 0


class LockTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = Server()
        cls.addClassCleanup(cls.server.close)

    def setUp(self):
        self.client = self.server.client()
        self.key = self.id()
        self.addCleanup(self.assert_nothing_left, threading.active_count())

    def assert_nothing_left(self, threads):
        """No thread, no connection, no waiter. The last clean-up of each test."""
        self.client.connection_pool.disconnect()
        eventually(lambda: threading.active_count() <= threads, "threads to end")
        eventually(lambda: len(self.client.client_list()) == 1, "connections to close")
        self.client.connection_pool.disconnect()

    def proxy(self):
        proxy = Proxy(self.server.port)
        self.addCleanup(proxy.close)
        return proxy

    def in_thread(self, work):
        """Runs work in a thread; the result is called to get what it returned or raised."""
        outcome = []

        def run():
            try:
                outcome.append((work(), None))
            except Exception as error:
                outcome.append((None, error))

        thread = threading.Thread(target=run, daemon=True)
        thread.start()

        def result():
            thread.join(PATIENCE_S)
            value, error = outcome[0]
            if error:
                raise error
            return value

        return result

    def lock(self, key=None, **options):
        return Lock(options.pop("client", self.client), key or self.key, **options)

    def held_by(self, token):
        return self.client.execute_command("LOCK.FENCE", self.key, token) == 1


class Basics(LockTest):
    def test_acquire_touch_release(self):
        hold = self.lock(lease=5.0).acquire()
        self.assertIsInstance(hold.token, int)
        self.assertTrue(self.held_by(hold.token))
        hold.touch(lease=50.0)
        self.assertGreater(self.client.pttl(self.key), 40_000)
        self.assertGreater(hold.until - time.monotonic(), 40)
        hold.touch()
        self.assertGreater(self.client.pttl(self.key), 40_000)
        hold.touch(lease=2.0)
        self.assertLessEqual(self.client.pttl(self.key), 2_000)
        self.assertLessEqual(hold.until - time.monotonic(), 2)
        self.assertIs(hold.release(), True)
        self.assertNotIn("turnstile", [thread.name for thread in threading.enumerate()])
        self.assertIs(hold.release(), True)
        self.assertFalse(self.client.exists(self.key))
        with self.assertRaises(Lost):
            hold.check()
        with self.assertRaises(Lost):
            hold.touch()

    def test_try_acquire(self):
        with self.lock() as hold:
            self.assertIsNone(self.lock().try_acquire())
            with self.assertRaises(NotAcquired):
                self.lock().acquire(wait=0)
            with self.assertRaises(NotAcquired):
                self.lock(wait=0.05).acquire()
        again = self.lock().try_acquire()
        self.assertGreater(again.token, hold.token)
        again.release()

    def test_released_when_the_work_throws(self):
        with self.assertRaisesRegex(ValueError, "the work"):
            with self.lock() as hold:
                raise ValueError("the work")
        self.assertFalse(self.client.exists(self.key))
        self.assertFalse(hold.lost.is_set())

    def test_the_error_of_the_work_is_told_even_if_the_release_fails(self):
        with self.assertRaisesRegex(ValueError, "the work"):
            with self.lock():
                self.client.delete(self.key)
                raise ValueError("the work")
        server = Server()
        self.addCleanup(server.close)
        with self.assertRaisesRegex(ValueError, "the work"):
            with self.lock(client=server.client()):
                server.kill()
                raise ValueError("the work")

    def test_a_loss_is_told_at_the_end_of_the_block(self):
        with self.assertRaises(Lost):
            with self.lock(lease=60.0):
                self.client.delete(self.key)

    def test_release_of_a_lost_lock_is_false(self):
        hold = self.lock().acquire()
        self.client.delete(self.key)
        self.assertIs(hold.release(), False)
        self.assertIs(hold.release(), False)

    def test_owners(self):
        lock = self.lock(shared=True)
        with lock as first, lock as second:
            self.assertNotEqual(first.owner, second.owner)
            self.assertGreaterEqual(len(first.owner), 32)
        with self.lock(owner="alice"):
            self.assertEqual(lock_info(self.client, self.key)["holders"][0]["owner"], b"alice")

    def test_many_threads_share_a_lock_object(self):
        lock = self.lock(wait=PATIENCE_S)
        inside, most, total = 0, 0, 0

        def work():
            nonlocal inside, most, total
            for _ in range(20):
                with lock:
                    inside += 1
                    most = max(most, inside)
                    total += 1
                    inside -= 1

        for result in [self.in_thread(work) for _ in range(4)]:
            result()
        self.assertEqual((most, total), (1, 80))
        self.assertEqual(lock.entered, {})

    def test_a_client_that_decodes(self):
        client = self.server.client(decode_responses=True, db=1)
        self.addCleanup(client.connection_pool.disconnect)
        with self.lock(client=client) as hold:
            self.assertEqual(hold.run("SET", "x", "1"), "OK")
            self.assertFalse(self.client.exists(self.key))


class GuardedWrite(LockTest):
    def test_runs_while_held(self):
        with self.lock() as hold:
            self.assertEqual(hold.run("SET", self.key + ":guest", "alice"), b"OK")
            self.assertEqual(hold.run("INCRBY", self.key + ":n", 5), 5)
            with self.assertRaisesRegex(redis.ResponseError, "integer"):
                hold.run("INCR", self.key + ":guest")
            self.assertFalse(hold.lost.is_set())

    def test_is_fenced_when_lost(self):
        hold = self.lock(lease=60.0).acquire()
        self.client.delete(self.key)
        with self.lock():
            with self.assertRaises(Fenced):
                hold.run("SET", self.key + ":guest", "mallory")
        self.assertFalse(self.client.exists(self.key + ":guest"))
        self.assertTrue(hold.lost.is_set())
        with self.assertRaises(Lost):
            hold.check()
        self.assertIs(hold.release(), False)


class Renewal(LockTest):
    def test_keeps_a_lock_far_beyond_its_lease(self):
        with self.lock(lease=0.9) as hold:
            self.assertFalse(hold.lost.wait(1.8))
            hold.check()
            self.assertTrue(self.held_by(hold.token))

    def test_without_it_the_end_of_the_lease_is_told(self):
        start = time.monotonic()
        hold = self.lock(lease=0.3, renew=False).acquire()
        self.assertTrue(hold.lost.wait(PATIENCE_S))
        self.assert_between(time.monotonic(), hold.until, hold.until + SLACK_S)
        self.assert_between(hold.until, start + 0.3, start + 0.3 + SLACK_S)
        with self.assertRaisesRegex(Lost, "lease ran out"):
            hold.check()
        hold.release()

    def test_touch_by_hand(self):
        hold = self.lock(lease=0.6, renew=False).acquire()
        hold.touch(lease=1.6)
        self.assertFalse(hold.lost.wait(0.8))
        self.assertTrue(hold.lost.wait(PATIENCE_S))
        self.assert_between(time.monotonic(), hold.until, hold.until + SLACK_S)
        hold.release()
        hold = self.lock(lease=60.0).acquire()
        hold.touch(lease=0.9)  # from now on renewed every 0.3 s
        self.assertFalse(hold.lost.wait(1.5))
        self.assertTrue(hold.release())

    def test_a_lost_answer_to_a_shorter_lease(self):
        proxy = self.proxy()
        proxy.lose(b"LOCK.TOUCH", 1)
        with self.lock(client=proxy.client(), lease=60.0) as hold:
            with self.assertRaises(redis.ConnectionError):
                hold.touch(lease=0.6)  # this is the lease now, and who knows
            self.assertLess(hold.until - time.monotonic(), 0.6)
            self.assertFalse(hold.lost.wait(0.7))
            self.assertTrue(self.held_by(hold.token))

    def test_a_forced_release_is_told_within_a_third_of_the_lease(self):
        with self.assertRaises(Lost):
            with self.lock(lease=1.5) as hold:
                self.client.delete(self.key)
                self.assertTrue(hold.lost.wait(0.5 + SLACK_S))
                hold.check()

    def test_a_stopped_server_is_told_at_the_end_of_the_lease(self):
        self.assert_told_in_time(Server.pause, reply_timeout=0.2)

    def test_a_dead_server_is_told_at_the_end_of_the_lease(self):
        self.assert_told_in_time(Server.kill)

    def assert_told_in_time(self, strike, **options):
        server = Server()
        self.addCleanup(server.close)
        lease = 0.6
        with self.assertRaisesRegex(Lost, "lease ran out"):
            with self.lock(client=server.client(), lease=lease, **options) as hold:
                self.assertFalse(hold.lost.wait(lease / 2))  # it has been renewed meanwhile
                strike(server)
                struck = time.monotonic()
                self.assertTrue(hold.lost.wait(PATIENCE_S))
                told = time.monotonic()
                self.assert_between(told, hold.until, hold.until + SLACK_S)
                self.assert_between(hold.until, struck + lease / 2, struck + lease)

    def test_a_short_outage_is_survived(self):
        proxy = self.proxy()
        with self.lock(client=proxy.client(), lease=0.6) as hold:
            for _ in range(3):
                proxy.cut()
                self.assertFalse(hold.lost.wait(0.25))
            self.assertTrue(self.held_by(hold.token))

    def test_a_connection_that_says_nothing_is_replaced(self):
        proxy = self.proxy()
        with self.lock(client=proxy.client(), lease=0.75) as hold:
            proxy.freeze()
            self.assertFalse(hold.lost.wait(1.0))
            self.assertTrue(self.held_by(hold.token))

    def test_release_lets_a_renewal_come_to_its_end(self):
        hold = self.lock(lease=3.0).acquire()
        self.server.pause()
        renewal = self.in_thread(hold.touch)
        eventually(hold._busy.locked, "the renewal to be on its way")
        release = self.in_thread(hold.release)
        self.assertFalse(hold.lost.wait(0.1))
        self.server.go_on()
        renewal()
        self.assertIs(release(), True)
        self.assertFalse(self.client.exists(self.key))

    def test_a_server_that_answers_with_errors_is_no_loss_yet(self):
        proxy = self.proxy()
        proxy.answer(b"LOCK.TOUCH", b"-READONLY You can't write against a read only replica.\r\n")
        hold = self.lock(client=proxy.client(), lease=0.6).acquire()
        self.assertTrue(hold.lost.wait(PATIENCE_S))
        self.assert_between(time.monotonic(), hold.until, hold.until + SLACK_S)
        hold.release()

    def test_never_beyond_the_maximum(self):
        start = time.monotonic()
        with self.lock(lease=0.45, max_hold=0.6) as hold:
            self.assertTrue(hold.lost.wait(PATIENCE_S))
            self.assert_between(time.monotonic(), start + 0.6, start + 0.6 + SLACK_S)
            with self.assertRaisesRegex(Lost, "max_hold"):
                hold.check()
            self.assertTrue(self.held_by(hold.token))
        hold = self.lock(lease=0.3, max_hold=0.2).acquire()
        self.assertTrue(hold.lost.wait(PATIENCE_S))
        eventually(lambda: not self.client.exists(self.key), "the lease to end unrenewed")
        self.assertIs(hold.release(), False)

    def assert_between(self, value, low, high):
        self.assertGreaterEqual(value, low)
        self.assertLessEqual(value, high)


class Waiting(LockTest):
    def test_longer_than_the_time_out_of_the_client(self):
        client = self.server.client(socket_timeout=0.1)
        self.addCleanup(client.connection_pool.disconnect)
        self.client.config_resetstat()
        first = self.lock().acquire()
        second = self.in_thread(self.lock(client=client, wait=PATIENCE_S, lease=0.9).acquire)
        eventually(lambda: waiting(self.client, self.key), "the second to stand in line")
        self.assertFalse(first.lost.wait(0.4))
        first.release()
        hold = second()
        self.assertEqual(times_asked(self.client), 2)  # it asked once and was patient
        # It waited for most of a lease: what it knows of the end must not be too late for that.
        left = hold.until - time.monotonic()
        self.assertGreater(left, 0.5)
        self.assertLessEqual(left * 1000, self.client.pttl(self.key) + 1)
        self.assertGreater(hold.token, first.token)
        hold.release()


class Interrupt(BaseException):
    pass


class Interruption(LockTest):
    """When acquire() has raised, the server has neither a hold nor a waiter of it.

    Repeated often, because what is at stake is which of two connections the server reads first.
    """

    TRIES = 200

    def setUp(self):
        super().setUp()
        previous = signal.signal(signal.SIGUSR1, self.interrupt)
        self.addCleanup(signal.signal, signal.SIGUSR1, previous)
        self.look = self.server.client()  # for the thread that watches
        self.addCleanup(self.look.connection_pool.disconnect)

    @staticmethod
    def interrupt(*_):
        raise Interrupt

    def interrupted(self, lock, when):
        """Interrupts lock.acquire() when `when` is true."""

        def send():
            eventually(when, "the moment to interrupt")
            os.kill(os.getpid(), signal.SIGUSR1)

        result = self.in_thread(send)
        with self.assertRaises(Interrupt):
            lock.acquire()
        result()

    def left(self, keys):
        return [key for key in keys if lock_info(self.client, key) is not None]

    def owners(self):
        return {"random": lambda: None, "the caller's": lambda: secrets.token_hex(16)}.items()

    def test_in_line_leaves_nothing(self):
        for whose, owner in self.owners():
            with self.subTest(whose):
                keys = [f"{self.key}:{whose}:{i}" for i in range(self.TRIES)]
                for key in keys:
                    options = {"wait": 60.0, "lease": 60.0, "owner": owner(), "also": [key + ":b"]}
                    with self.lock(key, lease=60.0):
                        self.interrupted(self.lock(key, **options), lambda: waiting(self.look, key))
                self.assertEqual(self.left(keys), [])

    def test_before_the_request_arrives(self):
        for whose, owner in self.owners():
            for when in ("before", "after"):
                with self.subTest(whose, released=when):
                    proxy = self.proxy()
                    proxy.hold_back(b"LOCK.ACQUIRE")
                    hold = self.lock(lease=60.0).acquire()
                    lock = self.lock(client=proxy.client(), wait=60.0, lease=60.0, owner=owner())
                    stale = stale_releases(self.look)

                    def let_through():
                        eventually(lambda: stale_releases(self.look) > stale, "a release")
                        if when == "before":
                            hold.release()
                        proxy.let_through()

                    helper = self.in_thread(let_through)
                    self.interrupted(lock, lambda: proxy.holds_back(b"LOCK.ACQUIRE"))
                    helper()
                    self.assertEqual(waiting(self.client, self.key), 0)
                    hold.release()
                    self.assertEqual(self.left([self.key]), [])

    def test_without_an_answer_in_time(self):
        for whose, owner in self.owners():
            with self.subTest(whose):
                server = Server()
                self.addCleanup(server.close)
                options = {"wait": 0.1, "lease": 60.0, "reply_timeout": 0.2, "owner": owner()}
                server.pause()
                with self.assertRaises(redis.TimeoutError):
                    self.lock(client=server.client(), **options).acquire()
                server.go_on()  # and only now it reads the request and the release behind it
                look = server.client()
                eventually(lambda: len(look.client_list()) == 1, "the connections to close")
                self.assertIsNone(lock_info(look, self.key))
                self.assertEqual(look.info("turnstile")["turnstile_acquired"], 1)
                look.connection_pool.disconnect()

    def test_of_an_upgrade_keeps_the_shared_hold(self):
        with self.lock(shared=True) as other:
            with self.lock(shared=True, owner="upgrade") as reader:
                for _ in range(20):
                    writer = self.lock(wait=60.0, owner="upgrade")
                    self.interrupted(writer, lambda: waiting(self.look, self.key))
                    eventually(lambda: not waiting(self.client, self.key), "the wait to end")
                    reader.touch()
                other.release()
                reader.run("SET", self.key + ":data", "x")  # under the token of before
        self.assertEqual(self.left([self.key]), [])

    def test_of_a_re_entry_keeps_the_count(self):
        options = {"owner": "alice", "reentrant": True, "lease": 60.0}
        proxy = self.proxy()
        with self.lock(**options):
            for _ in range(20):
                proxy.hold_back(b"LOCK.ACQUIRE")
                asked = times_asked(self.client)

                def let_through():
                    eventually(lambda: interrupted.is_set(), "the interruption")
                    proxy.let_through()

                interrupted = threading.Event()
                signal.signal(signal.SIGUSR1, lambda *_: (interrupted.set(), self.interrupt()))
                helper = self.in_thread(let_through)
                lock = self.lock(client=proxy.client(), **options)
                self.interrupted(lock, lambda: proxy.holds_back(b"LOCK.ACQUIRE"))
                helper()
                self.assertEqual(times_asked(self.client), asked + 1)
                [holder] = lock_info(self.client, self.key)["holders"]
                self.assertEqual(holder["count"], 1)
        self.assertEqual(self.left([self.key]), [])


class LostReplies(LockTest):
    def test_asking_again_gets_the_same_token(self):
        proxy = self.proxy()
        for wait in (0, 0.4):  # granted at once, and after a wait
            with self.subTest(wait=wait):
                proxy.lost.clear()
                proxy.lose(b"LOCK.ACQUIRE", 1)
                first = self.lock(lease=wait, renew=False).acquire() if wait else None
                hold = self.lock(client=proxy.client(), wait=PATIENCE_S).acquire()
                self.assertEqual(proxy.lost, [b":%d\r\n" % hold.token])
                [holder] = lock_info(self.client, self.key)["holders"]
                self.assertEqual((holder["token"], holder["count"]), (hold.token, 1))
                self.assertTrue(hold.release())
                self.assertFalse(self.client.exists(self.key))
                if first:
                    first.release()

    def test_giving_up_leaves_no_grant_behind(self):
        proxy = self.proxy()
        for wait, losses in ((0, 1), (0.2, 1000)):
            with self.subTest(wait=wait):
                proxy.lost.clear()
                proxy.lose(b"LOCK.ACQUIRE", losses)
                with self.assertRaises(redis.ConnectionError):
                    self.lock(client=proxy.client(), wait=wait, lease=60.0).acquire()
                self.assertRegex(proxy.lost[0], rb"^:\d+")  # it had been granted
                self.assertFalse(self.client.exists(self.key))

    def test_a_lost_answer_to_a_release(self):
        proxy = self.proxy()
        proxy.lose(b"LOCK.RELEASE", 1)
        with self.lock(client=proxy.client(), lease=60.0):
            pass
        self.assertEqual(proxy.lost, [b":1\r\n"])
        self.assertFalse(self.client.exists(self.key))


    def test_a_lost_answer_to_a_reentrant_release(self):
        proxy = self.proxy()
        options = {"owner": "alice", "reentrant": True, "lease": 60.0}
        with self.lock(**options) as outer:
            proxy.lose(b"LOCK.RELEASE", 1)
            inner = self.lock(client=proxy.client(), **options).acquire()
            with self.assertRaises(redis.ConnectionError):
                inner.release()
            self.assertIs(inner.release(), False)
            self.assertTrue(self.held_by(outer.token))  # asking again would have ended it
        self.assertFalse(self.client.exists(self.key))

    def test_an_error_after_a_grant_leaves_nothing_behind(self):
        proxy = self.proxy()
        proxy.answer(b"LOCK.TOUCH", b"-READONLY You can't write against a read only replica.\r\n")
        first = self.lock(lease=0.5, renew=False).acquire()
        with self.assertRaises(NotPrimary):
            self.lock(client=proxy.client(), wait=PATIENCE_S, lease=1.0).acquire()
        self.assertFalse(self.client.exists(self.key))
        first.release()


class Errors(LockTest):
    def test_deadlock(self):
        with self.lock(self.key + ":a", owner="alice"), self.lock(self.key + ":b", owner="bob"):
            bob = self.in_thread(self.lock(self.key + ":a", owner="bob", wait=PATIENCE_S).acquire)
            eventually(lambda: waiting(self.client, self.key + ":a"), "bob to stand in line")
            with self.assertRaisesRegex(Deadlock, "alice"):
                self.lock(self.key + ":b", owner="alice", wait=PATIENCE_S).acquire()
        bob().release()

    def test_superseded(self):
        with self.lock():
            for end in (self.unblock, self.ask_again):
                with self.subTest(end=end.__name__):
                    patient = self.lock(owner="bob", wait=PATIENCE_S)
                    outcome = self.in_thread(patient.acquire)
                    eventually(lambda: waiting(self.client, self.key), "bob to stand in line")
                    end()
                    with self.assertRaises(Superseded):
                        outcome()

    def unblock(self):
        self.client.execute_command("CLIENT UNBLOCK", lock_connection(self.client, "b"), "ERROR")

    def ask_again(self):
        with self.assertRaises(NotAcquired):
            self.lock(owner="bob", wait=0.05).acquire()

    def test_wait_limit(self):
        self.client.config_set("turnstile.max-waiters", 1)
        self.addCleanup(self.client.config_set, "turnstile.max-waiters", 10000)
        with self.lock():
            waiter = self.in_thread(self.lock(wait=PATIENCE_S).acquire)
            eventually(lambda: waiting(self.client, self.key), "the first to stand in line")
            with self.assertRaises(WaitLimit):
                self.lock().acquire()
        waiter().release()

    def test_not_primary(self):
        replica = Server("--replicaof", "127.0.0.1 1")
        self.addCleanup(replica.close)
        with self.assertRaises(NotPrimary):
            self.lock(client=replica.client()).acquire()

    def test_moved(self):
        node = Server("--cluster-enabled", "yes")  # it has no slots
        self.addCleanup(node.close)
        with self.assertRaisesRegex(Moved, "slot"):
            self.lock(client=node.client()).try_acquire()
        proxy = self.proxy()
        proxy.answer(b"LOCK.ACQUIRE", b"-MOVED 866 127.0.0.1:7000\r\n")
        with self.assertRaisesRegex(Moved, "866"):
            self.lock(client=proxy.client()).acquire()
        for error in (MovedError("866 127.0.0.1:7000"), TryAgainError("Multiple keys")):
            self.assertIsInstance(turnstile.explained(error), Moved)

    def test_other_errors_are_as_they_are(self):
        self.client.lpush(self.key, 1)
        with self.assertRaisesRegex(redis.ResponseError, "WRONGTYPE"):
            self.lock().acquire()
        with self.assertRaisesRegex(redis.ResponseError, "syntax"):
            self.lock(shared=True, limit=1).acquire()

    def test_nobody_listens(self):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        for wait in (0, 0.2):
            start = time.monotonic()
            with self.assertRaises(redis.ConnectionError):
                self.lock(client=redis.Redis(port=port), wait=wait).acquire()
            self.assertGreaterEqual(time.monotonic() - start, wait)
            self.assertLessEqual(time.monotonic() - start, wait + SLACK_S)

    def test_nobody_answers(self):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            client = redis.Redis(port=listener.getsockname()[1])
            with self.assertRaises(redis.TimeoutError):
                self.lock(client=client, wait=0.1, reply_timeout=0.1).acquire()

    def test_a_wrong_password_is_not_tried_again(self):
        server = Server()
        self.addCleanup(server.close)
        server.client().config_set("requirepass", "secret")
        start = time.monotonic()
        for password, text in (("wrong", "WRONGPASS|invalid"), (None, "Authentication required")):
            with self.assertRaisesRegex(redis.RedisError, text):
                self.lock(client=server.client(password=password), wait=PATIENCE_S).acquire()
        self.assertLess(time.monotonic() - start, PATIENCE_S / 2)
        with self.lock(client=server.client(password="secret")):
            pass

    def test_all_are_lock_errors_and_none_is_another(self):
        kinds = [NotAcquired, Lost, Fenced, Deadlock, Superseded, WaitLimit, NotPrimary, Moved]
        for kind in kinds:
            self.assertEqual(kind.__bases__, (LockError,))


class Options(LockTest):
    def test_shared(self):
        with self.lock(shared=True) as one, self.lock(shared=True) as two:
            self.assertIsNone(self.lock().try_acquire())
            self.assertTrue(self.held_by(one.token) and self.held_by(two.token))
        lock = self.lock(shared=True)
        with lock as outer:
            with lock as inner:
                pass
            self.assertTrue(self.held_by(outer.token) and not self.held_by(inner.token))
        with self.lock():
            self.assertIsNone(self.lock(shared=True).try_acquire())

    def test_limit(self):
        lock = self.lock(limit=2)
        with lock, lock:
            self.assertIsNone(lock.try_acquire())
        with lock:
            pass

    def test_reentrant(self):
        lock = self.lock(owner="alice", reentrant=True)
        with lock as outer:
            with lock as inner:
                self.assertEqual(inner.token, outer.token)
            self.assertTrue(self.held_by(outer.token))
        self.assertFalse(self.client.exists(self.key))

    def test_reentrant_needs_an_owner_and_no_session(self):
        for options in ({}, {"owner": "alice", "session": True}):
            with self.assertRaises(ValueError):
                self.lock(reentrant=True, **options)

    def test_session(self):
        with self.lock(session=True, lease=0.9) as hold:
            self.assertFalse(hold.lost.wait(1.5))
            self.assertTrue(lock_info(self.client, self.key)["holders"][0]["session"])
        hold = self.lock(session=True, lease=1.5).acquire()
        self.client.client_kill_filter(_id=lock_connection(self.client))
        eventually(lambda: not self.client.exists(self.key), "the session to end")
        self.assertTrue(hold.lost.wait(0.5 + SLACK_S))
        with self.assertRaisesRegex(Lost, "connection"):
            hold.check()
        self.assertIs(hold.release(), False)

    def test_linger(self):
        hold = self.lock(lease=0.2, linger=60.0, renew=False).acquire()
        self.assertTrue(hold.lost.wait(PATIENCE_S))
        eventually(lambda: not self.held_by(hold.token), "the lease to end on the server")
        self.assertIsNone(self.lock().try_acquire())
        self.assertIs(hold.release(), False)
        self.lock().try_acquire().release()

    def test_also(self):
        keys = [self.key, self.key + ":2", self.key + ":3"]
        lock = self.lock(also=keys[1:], lease=0.9)
        with lock as hold:
            self.assertFalse(hold.lost.wait(1.5))
            self.assertEqual(self.client.exists(*keys), 3)
            self.assertIsNone(self.lock(keys[2]).try_acquire())
        self.assertEqual(self.client.exists(*keys), 0)
        with self.assertRaises(Lost):
            with lock as hold:
                self.client.delete(keys[1])
                self.assertTrue(hold.lost.wait(PATIENCE_S))
        self.assertEqual(self.client.exists(*keys), 0)
        with self.lock(keys[1]):
            self.assertIsNone(lock.try_acquire())
            self.assertFalse(self.client.exists(self.key))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that servers are stopped
    unittest.main()

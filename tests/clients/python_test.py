"""Tests of client-examples/python/turnstile_lock.py, on servers of their own.

    /usr/bin/python3 tests/clients/python_test.py

The module is build/turnstile.so, or what TURNSTILE_MODULE names. The other tests of the Python
clients use the servers and the proxy of this file.
"""

import contextlib
import gc
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
from redis.backoff import NoBackoff
from redis.exceptions import MovedError, TryAgainError
from redis.retry import Retry

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "client-examples" / "python"))
import turnstile_lock  # noqa: E402
from turnstile_lock import Deadlock, Fenced, Lock, LockError, Lost, Moved, NotAcquired  # noqa: E402
from turnstile_lock import NotPrimary, Superseded, Unsupported, WaitLimit  # noqa: E402

PATIENCE_S = 10.0  # for what must happen
NO_RETRY = Retry(NoBackoff(), 0)  # as with redis-py up to 5
SLACK_S = 1.5  # for what must happen at a certain time, on a busy machine


class Server:
    """A redis-server, with the module unless told otherwise. Stop it with close()."""

    def __init__(self, *options, module=True):
        self.module = module
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
        command += [*(["--loadmodule", str(module)] if self.module else []), *options]
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
        return redis.Redis(port=self.port, **{"retry": NO_RETRY, **options})

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
    a request gets nothing through before let_through(), also if the client has hung up by then.
    swallow(b"granted"): what the server says
    with that word in it does not arrive.
    """

    def __init__(self, server_port):
        self.server_port = server_port
        self.lost = []  # the answers that were kept back
        self._losses = {}
        self._answers = {}
        self._connections = {}  # and what was sent over them last
        self._frozen = set()
        self._to_hold_back = None
        self._swallowed = None
        self.swallowed = 0
        self._held_back = None  # the connection to the server, and what is kept from it
        self._holding = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def client(self, **options):
        return redis.Redis(port=self.port, **{"retry": NO_RETRY, **options})

    def lose(self, word, times):
        self._losses[word] = times

    def answer(self, word, line):
        self._answers[word] = line

    def swallow(self, word):
        self._swallowed = word

    def hold_back(self, word):
        self._to_hold_back = word

    def holds_back(self, word):
        return self._held_back is not None and word in self._held_back[1]

    def let_through(self):
        with self._holding:
            server, data = self._held_back
            server.sendall(data)
            self._held_back = None

    def has_heard(self, word):
        return any(word in said for said in list(self._connections.values()))

    def freeze(self, word=b""):
        """Lets nothing through on the connections that sent this; new ones are welcome."""
        self._frozen |= {each for each, said in list(self._connections.items()) if word in said}

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
            self._connections[client] = b""
            try:
                self._pump(client, server)
            except OSError:
                pass
            finally:
                del self._connections[client]
            with contextlib.suppress(AssertionError):  # what was sent before comes, as on any network
                eventually(lambda: (self._held_back or [None])[0] is not server, "let_through()")

    def _holds(self, server, data):
        with self._holding:
            if self._to_hold_back and self._to_hold_back in data:
                self._to_hold_back = None
                self._held_back = (server, b"")
            if self._held_back and self._held_back[0] is server:
                self._held_back = (server, self._held_back[1] + data)
                return True
            return False

    def _pump(self, client, server):
        losing = False
        while True:
            for source in select.select([client, server], [], [])[0]:
                data = source.recv(65536)
                if not data:
                    return
                if client in self._frozen:
                    continue
                if source is server and self._swallowed and self._swallowed in data:
                    self.swallowed += 1
                    continue
                if source is server and losing:
                    self.lost.append(data)
                    return
                if source is server:
                    client.sendall(data)
                    continue
                self._connections[client] = data
                if self._holds(server, data):
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


def connections(client, flag="", command=""):
    """The connections with this flag (b: blocked, P: subscribed) that have sent this last."""
    found = [c for c in client.client_list() if command in c["cmd"].lower()]
    return [c["id"] for c in found if flag in c["flags"]]


def received(client):
    """How many connections the server has had."""
    return client.info("stats")["total_connections_received"]


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
    park = 1.0  # how long a wait blocks a connection before it waits for a message

    @classmethod
    def setUpClass(cls):
        cls.server = Server()
        cls.addClassCleanup(cls.server.close)

    def setUp(self):
        turnstile_lock.PARK = self.park
        self.clients = []
        self.client = self.server.client()
        self.key = self.id()
        turnstile_lock.KEEPER.look_at(0)  # now its thread runs
        self.addCleanup(self.assert_nothing_left, threading.active_count())

    def assert_nothing_left(self, threads):
        """No thread, no connection, no waiter. The last clean-up of each test."""
        left = [hold.key for hold in turnstile_lock.KEEPER.holds]
        for client in (*self.clients, self.client):
            for plain in (False, True):
                turnstile_lock.Server.of(client, plain).close()
            client.connection_pool.disconnect()
        self.clients.clear()
        eventually(lambda: threading.active_count() <= threads, "threads to end")
        eventually(lambda: len(self.client.client_list()) == 1, "connections to close")
        self.client.connection_pool.disconnect()
        turnstile_lock.KEEPER.holds.clear()
        self.assertEqual(left, [], "holds that would be renewed")

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
        client = options.pop("client", self.client)
        self.clients.append(client)
        return Lock(client, key or self.key, **options)

    def held_by(self, token):
        return self.client.execute_command("LOCK.FENCE", self.key, token) == 1

    def in_line(self, count=1):
        eventually(lambda: waiting(self.client, self.key) == count, f"{count} in line")

    def assert_between(self, value, low, high):
        self.assertGreaterEqual(value, low)
        self.assertLessEqual(value, high)


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

    def test_a_block_that_ends_in_another_thread(self):
        def block(lock):
            with lock as hold:
                yield hold

        lock = self.lock(shared=True, lease=60.0)
        first, second = block(lock), block(lock)
        self.in_thread(lambda: next(first))()  # and its thread is gone
        hold = next(second)
        self.in_thread(first.close)()
        self.assertIs(hold.owned(), True)
        self.in_thread(second.close)()  # there is only one
        self.assertFalse(self.client.exists(self.key))
        lock = self.lock(shared=True, lease=0.3)
        first, second = block(lock), block(lock)
        next(first), next(second)
        with self.assertRaisesRegex(RuntimeError, "which of 2"):
            self.in_thread(first.close)()
        eventually(lambda: not self.client.exists(self.key), "the leases to end unrenewed")
        second.close()

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
        lease = 1.5
        with self.assertRaisesRegex(Lost, "lease ran out"):
            client = server.client(socket_timeout=1.0)  # for the release: connecting takes as long
            with self.lock(client=client, lease=lease, **options) as hold:
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

    def test_it_survives_errors(self):
        server = turnstile_lock.Server.of(self.client)
        hold = self.lock(lease=60.0).acquire()
        for place, name in ((turnstile_lock, "Survey"), (server, "renewing")):
            failed, until = threading.Event(), hold.until

            def fail(*_):
                setattr(place, name, real)
                failed.set()
                raise ZeroDivisionError

            real = getattr(place, name)
            with self.assertLogs("turnstile_lock", "ERROR"):
                hold._due = 0
                setattr(place, name, fail)
                turnstile_lock.KEEPER.look_at(0)
                self.assertTrue(failed.wait(PATIENCE_S))
                eventually(lambda: hold.until > until, "it to be renewed")
        self.assertIs(hold.release(), True)

    def test_a_thread_that_has_to_wait_for_the_cpu_does_not_delay_it(self):
        hold = self.lock(lease=0.9, renew=False).acquire()
        hold.over = lambda: time.sleep(0.1)
        self.assertEqual(turnstile_lock.Survey([hold], ()).then, hold.until)
        hold.release()

    def test_close_ends_it(self):
        hold = self.lock(lease=0.6).acquire()
        session = self.lock(self.key + ":session", session=True, lease=60.0).acquire()
        turnstile_lock.Server.of(self.client).close()
        for ended in (hold, session):
            self.assertTrue(ended.lost.is_set())
            with self.assertRaisesRegex(Lost, "closed"):
                ended.check()
            eventually(lambda: not self.client.exists(ended.key), "it to end on the server")
            self.assertIs(ended.release(), False)

    def test_never_beyond_the_maximum(self):
        start = time.monotonic()
        with self.assertRaises(ValueError), self.lock(lease=0.45, max_hold=0.6) as hold:
            self.assertTrue(hold.lost.wait(PATIENCE_S))
            self.assert_between(time.monotonic(), start + 0.6, start + 0.6 + SLACK_S)
            with self.assertRaisesRegex(Lost, "max_hold"):
                hold.check()
            eventually(lambda: not self.client.exists(self.key), "the server to end it too")
            raise ValueError("the work")
        self.assertIs(hold.release(), False)
        hold = self.lock(lease=0.3, max_hold=0.2).acquire()
        self.assertTrue(hold.lost.wait(PATIENCE_S))
        eventually(lambda: not self.client.exists(self.key), "the lease to end unrenewed")
        self.assertIs(hold.release(), False)


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
        self.assertEqual(times_asked(self.client), 5)  # it tried, waited twice and confirmed
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

    def reads(self):
        """Whether the main thread has sent what it had to say, and waits for the answer."""
        frame = sys._current_frames()[threading.main_thread().ident]
        while frame and frame.f_code.co_name not in ("readable", "can_read"):
            frame = frame.f_back
        return frame is not None

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
            for word, held in ((b"PX", False), (b"WAIT", True), (b"WAIT", False)):
                with self.subTest(whose, word=word, held=held):
                    proxy = self.proxy()
                    proxy.hold_back(word)
                    hold = self.lock(lease=60.0).acquire() if word == b"WAIT" else None
                    lock = self.lock(client=proxy.client(), wait=60.0, lease=60.0, owner=owner())

                    def let_through():
                        eventually(lambda: proxy.holds_back(b"LOCK.RELEASE"), "a release")
                        if hold and not held:
                            hold.release()
                        proxy.let_through()

                    helper = self.in_thread(let_through)
                    self.interrupted(lock, lambda: proxy.holds_back(word) and self.reads())
                    helper()
                    self.assertEqual(waiting(self.client, self.key), 0)
                    if hold:
                        hold.release()
                    self.assertEqual(self.left([self.key]), [])

    def test_without_an_answer_in_time(self):
        for whose, owner in self.owners():
            with self.subTest(whose):
                server = Server()
                self.addCleanup(server.close)
                options = {"wait": 0.1, "lease": 60.0, "reply_timeout": 0.2, "owner": owner()}
                client = server.client()
                client.ping()
                server.pause()
                with self.assertRaises(redis.TimeoutError):
                    self.lock(client=client, **options).acquire()
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
                self.interrupted(
                    lock, lambda: proxy.holds_back(b"LOCK.ACQUIRE") and self.reads()
                )
                helper()
                self.assertEqual(times_asked(self.client), asked + 1)
                [holder] = lock_info(self.client, self.key)["holders"]
                self.assertEqual(holder["count"], 1)
        self.assertEqual(self.left([self.key]), [])


class InterruptionOfMessages(Interruption):
    park = 0.0  # every wait waits for a message


class InterruptionOfTakeOvers(Interruption):
    park = 0.002  # by then some waits are answered, and some are being taken over


class LostReplies(LockTest):
    def test_asking_again_gets_the_same_token(self):
        proxy = self.proxy()
        proxy.lose(b"LOCK.ACQUIRE", 1)
        hold = self.lock(client=proxy.client(), wait=PATIENCE_S).acquire()
        self.assertEqual(proxy.lost, [b":%d\r\n" % hold.token])
        [holder] = lock_info(self.client, self.key)["holders"]
        self.assertEqual((holder["token"], holder["count"]), (hold.token, 1))
        self.assertTrue(hold.release())
        self.assertFalse(self.client.exists(self.key))

    def test_in_line(self):
        proxy = self.proxy()
        for word in (b"WAIT", b"PX\r\n$5\r\n60000"):  # the answer 0; the one that confirms
            with self.subTest(word):
                proxy.lost.clear()
                first = self.lock().acquire()
                options = {"owner": secrets.token_hex(16), "reentrant": True, "lease": 60.0}
                lock = self.lock(client=proxy.client(), wait=PATIENCE_S, **options)
                if word == b"WAIT":
                    proxy.lose(word, 1)
                waiter = self.in_thread(lock.acquire)
                self.in_line()
                if word != b"WAIT":
                    proxy.lose(word, 1)
                first.release()
                hold = waiter()
                self.assertEqual(len(proxy.lost), 1)
                [holder] = lock_info(self.client, self.key)["holders"]
                self.assertEqual((holder["token"], holder["count"]), (hold.token, 1))
                self.assertTrue(hold.release())
                self.assertFalse(self.client.exists(self.key))

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
            lock = self.lock(client=proxy.client(), wait=PATIENCE_S, lease=1.0, session=True)
            lock.acquire()
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
            for end, session in ((self.unblock, True), (self.ask_again, False), (self.leave, False)):
                with self.subTest(end=end.__name__):
                    patient = self.lock(owner="bob", wait=PATIENCE_S, session=session)
                    outcome = self.in_thread(patient.acquire)
                    self.in_line()
                    end()
                    with self.assertRaises(Superseded):
                        outcome()

    def unblock(self):
        [blocked] = connections(self.client, "b")
        self.client.execute_command("CLIENT UNBLOCK", blocked, "ERROR")

    def ask_again(self):
        with self.assertRaises(NotAcquired):
            self.lock(owner="bob", wait=0.05).acquire()

    def leave(self):
        self.client.execute_command("LOCK.RELEASE", self.key, "bob")

    def test_wait_limit(self):
        turnstile_lock.PARK = 0.0
        self.client.config_set("turnstile.max-queued", 1)
        self.addCleanup(self.client.config_set, "turnstile.max-queued", 100000)
        with self.lock():
            waiter = self.in_thread(self.lock(wait=PATIENCE_S).acquire)
            self.in_line()
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
            self.assertIsInstance(turnstile_lock.explained(error), Moved)

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
                client = redis.Redis(port=port, retry=NO_RETRY)
                self.lock(client=client, wait=wait).acquire()
            self.assertGreaterEqual(time.monotonic() - start, wait)
            self.assertLessEqual(time.monotonic() - start, wait + SLACK_S)

    def test_nobody_answers(self):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            client = redis.Redis(port=port, socket_timeout=0.1, retry=NO_RETRY)
            with self.assertRaises(redis.TimeoutError):
                self.lock(client=client, wait=0.1, reply_timeout=0.1).acquire()

    def test_a_wrong_password_is_not_tried_again(self):
        server = Server()
        self.addCleanup(server.close)
        server.client().config_set("requirepass", "secret")
        start = time.monotonic()
        for password, text in (("wrong", "WRONGPASS|invalid"), (None, "uthenticat")):
            with self.assertRaisesRegex(redis.RedisError, text):
                self.lock(client=server.client(password=password), wait=PATIENCE_S).acquire()
        self.assertLess(time.monotonic() - start, PATIENCE_S / 2)
        with self.lock(client=server.client(password="secret")):
            pass

    def test_all_are_lock_errors_and_none_is_another(self):
        kinds = [NotAcquired, Lost, Fenced, Deadlock, Superseded, WaitLimit, NotPrimary, Moved]
        kinds.append(Unsupported)
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
        [session] = connections(self.client, command="lock.acquire")
        self.client.client_kill_filter(_id=session)
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


class Connections(LockTest):
    """What a lock costs: connections, threads, round trips."""

    park = 0.0

    def test_uncontended_holds_use_those_of_the_client(self):
        self.lock(self.key + ":first").acquire().release()
        before, threads = received(self.client), threading.active_count()
        holds = [self.lock(f"{self.key}:{i}", lease=60.0).acquire() for i in range(300)]
        self.assertEqual(len(turnstile_lock.KEEPER.holds), 300)
        for hold in holds:
            self.assertIsNone(self.lock(hold.key).try_acquire())
            self.assertTrue(hold.release())
        self.assertEqual(received(self.client), before)
        self.assertEqual(threading.active_count(), threads)

    def test_all_waits_share_one(self):
        threads = threading.active_count()
        holds = [self.lock(f"{self.key}:{i}").acquire() for i in range(3)]
        locks = [self.lock(holds[i % 3].key, wait=PATIENCE_S, lease=60.0) for i in range(30)]
        waits = [self.in_thread(lambda lock=lock: lock.acquire().release()) for lock in locks]
        for hold in holds:
            eventually(lambda: waiting(self.client, hold.key) == 10, "ten to stand in line")
        self.assertEqual(len(connections(self.client, "P")), 1)
        self.assertEqual(connections(self.client, "b"), [])
        self.assertEqual(threading.active_count(), threads + 30 + 1)
        for hold in holds:
            hold.release()
        self.assertEqual([wait() for wait in waits], [True] * 30)
        self.assertEqual(len(connections(self.client, "P")), 1)

    def test_renewals_go_together(self):
        sent = []

        class Watched(turnstile_lock.Server):
            def _ask(self, node, commands, *arguments):
                sent.append([command[0] for command in commands])
                return super()._ask(node, commands, *arguments)

        server = turnstile_lock.Server.of(self.client)
        server.__class__ = Watched
        holds = [self.lock(f"{self.key}:{i}", lease=60.0).acquire() for i in range(100)]
        self.client.execute_command("LOCK.TOUCH", holds[-1].key, holds[-1].owner, "EX", 9)
        sent.clear()
        for hold in holds:
            hold._due = 0
        turnstile_lock.KEEPER.look_at(0)
        eventually(lambda: all(hold._due for hold in holds), "the answers")
        self.assertEqual(sent, [["LOCK.TOUCH"] * 100])
        self.assertGreater(self.client.pttl(holds[-1].key), 50_000)
        for hold in holds:
            hold.release()

    def test_a_client_that_is_gone_takes_its_connections_with_it(self):
        client = self.server.client()
        with self.lock():
            with self.assertRaises(NotAcquired):
                Lock(client, self.key, wait=0.05).acquire()
            self.assertEqual(len(connections(self.client, "P")), 1)
            client.connection_pool.disconnect()
            del client
            gc.collect()
            eventually(lambda: not connections(self.client, "P"), "the subscriber to close")


class Parking(LockTest):
    """A short wait blocks one of a few connections. A longer one is taken over."""

    park = 0.3

    def test_a_short_wait_hears_no_message(self):
        hold = self.lock().acquire()
        waiter = self.in_thread(self.lock(wait=PATIENCE_S, lease=60.0).acquire)
        eventually(lambda: len(connections(self.client, "b")) == 1, "a blocked one")
        hold.release()
        waiter().release()
        self.assertEqual(connections(self.client, "P"), [])
        self.assertEqual(connections(self.client, "b"), [])

    def test_a_longer_wait_keeps_its_place(self):
        hold = self.lock(lease=60.0).acquire()
        order = []

        def turn(number):
            with self.lock(wait=PATIENCE_S, lease=60.0, tag=str(number)):
                order.append(number)

        waits = []
        for number in range(6):  # more than may block a connection
            waits.append(self.in_thread(lambda number=number: turn(number)))
            self.in_line(number + 1)
            self.assertLessEqual(len(connections(self.client, "b")), turnstile_lock.IDLE)
        eventually(lambda: not connections(self.client, "b"), "all to wait for messages")
        self.assertEqual(len(connections(self.client, "P")), 1)
        hold.release()
        for wait in waits:
            wait()
        self.assertEqual(order, list(range(6)))

    def test_a_wait_that_runs_out(self):
        with self.lock(lease=60.0):
            for wait in (0.1, 0.8):
                start = time.monotonic()
                with self.assertRaises(NotAcquired):
                    self.lock(wait=wait).acquire()
                self.assert_between(time.monotonic() - start, wait, wait + SLACK_S)
            self.assertEqual(waiting(self.client, self.key), 0)

    def test_where_no_connection_may_be_blocked(self):
        other = Server()
        self.addCleanup(other.close)
        look = other.client()
        look.config_set("turnstile.max-waiters", 0)
        lock = self.lock(client=other.client(), wait=PATIENCE_S, lease=60.0)
        hold = lock.acquire()
        waiter = self.in_thread(self.lock(client=other.client(), wait=PATIENCE_S).acquire)
        eventually(lambda: waiting(look, self.key) == 1, "somebody in line")
        self.assertEqual(len(connections(look, "P")), 1)
        hold.release()
        waiter().release()

    def test_a_connection_that_the_server_has_closed_is_not_used_again(self):
        hold = self.lock().acquire()
        waiter = self.in_thread(self.lock(wait=PATIENCE_S).acquire)
        eventually(lambda: connections(self.client, "b"), "a blocked one")
        [blocked] = connections(self.client, "b")
        hold.release()
        waiter().release()
        self.client.client_kill_filter(_id=blocked)
        eventually(lambda: blocked not in connections(self.client), "its end")
        self.assertTrue(self.lock(session=True).try_acquire().release())

    def test_a_lock_that_was_taken_is_not_tried_first(self):
        turnstile_lock.PARK = PATIENCE_S
        lock = self.lock(wait=PATIENCE_S, lease=60.0)
        hold = self.lock(lease=60.0).acquire()
        waiter = self.in_thread(lock.acquire)
        self.in_line()
        hold.release()
        waiter().release()
        self.client.config_resetstat()
        self.client.execute_command("LOCK.ACQUIRE", self.key, "x", "PX", 60_000)
        waiter = self.in_thread(lock.acquire)
        self.in_line()
        self.assertEqual(times_asked(self.client), 2)  # by x, and once to stand in line
        self.client.execute_command("LOCK.RELEASE", self.key, "x")
        waiter().release()
        for _ in range(turnstile_lock.SKIPS):
            lock.acquire().release()
        turnstile_lock.Server.of(self.client).close()  # the connections that are not the client's
        before = received(self.client)
        lock.acquire().release()  # it is tried first again
        self.assertEqual(received(self.client), before)

    def test_an_old_primary(self):
        other = Server()
        self.addCleanup(other.close)
        look = other.client()
        look.execute_command("LOCK.ACQUIRE", self.key, "x", "PX", 60_000)
        for park in (self.park, PATIENCE_S):
            turnstile_lock.PARK = park
            lock = self.lock(client=other.client(), wait=PATIENCE_S, lease=60.0)
            waiter = self.in_thread(lock.acquire)
            eventually(lambda: connections(look, "b"), "a blocked one")
            look.replicaof("127.0.0.1", 1)
            with self.assertRaises(NotPrimary):
                waiter()
            look.replicaof("no", "one")


class Messages(LockTest):
    """The rules for messages: what is said may be lost, and anybody may have said it."""

    park = 0.0

    def wait_in_line(self, **options):
        """A hold, and a wait for it that has begun."""
        hold = self.lock(lease=60.0).acquire()
        waiter = self.in_thread(self.lock(lease=60.0, **{"wait": PATIENCE_S, **options}).acquire)
        self.in_line()
        return hold, waiter

    def place(self):
        """The one place in a line that this process has."""
        [place] = turnstile_lock.Server.of(self.client)._subscribers[""].places.values()
        return place

    def test_a_lost_subscriber(self):
        for when in ("before the grant", "after"):
            with self.subTest(when):
                hold, waiter = self.wait_in_line()
                [subscriber] = connections(self.client, "P")
                if when == "after":
                    self.server.pause()  # so that it notices nothing before the grant
                    release = self.in_thread(hold.release)
                    eventually(self.server.is_asked, "the release to be sent")
                    place = self.place()
                    place.subscriber._connection._sock.shutdown(socket.SHUT_RDWR)
                    self.server.go_on()
                    release()
                else:
                    self.client.client_kill_filter(_id=subscriber)
                    eventually(lambda: connections(self.client, "P") != [subscriber], "its end")
                    hold.release()
                start = time.monotonic()
                self.assertTrue(waiter().release())
                self.assertLess(time.monotonic() - start, SLACK_S)
                self.assertFalse(self.client.exists(self.key))

    def test_a_subscriber_that_hears_nothing_is_replaced(self):
        period, turnstile_lock.PING_EVERY = turnstile_lock.PING_EVERY, 0.1
        self.addCleanup(setattr, turnstile_lock, "PING_EVERY", period)
        proxy = self.proxy()
        hold, waiter = self.wait_in_line(client=proxy.client())
        [subscriber] = connections(self.client, "P")
        eventually(lambda: proxy.has_heard(b"PING"), "a sign of life")
        proxy.freeze(b"PING")
        eventually(lambda: connections(self.client, "P") not in ([subscriber], []), "another one")
        hold.release()
        self.assertTrue(waiter().release())

    def test_a_lost_message(self):
        proxy = self.proxy()
        proxy.swallow(b"granted")
        start = time.monotonic()
        hold, waiter = self.wait_in_line(client=proxy.client(), wait=1.0)
        hold.release()
        late = waiter()
        self.assertEqual(proxy.swallowed, 1)
        self.assert_between(time.monotonic() - start, 1.0, 1.0 + turnstile_lock.MARGIN + SLACK_S)
        self.assertTrue(self.held_by(late.token))
        self.assertGreater(self.client.pttl(self.key), 50_000)  # and not only the short lease
        self.assertTrue(late.release())

    def test_a_lost_message_that_the_wait_is_over(self):
        proxy = self.proxy()
        proxy.swallow(b"timeout")
        hold, waiter = self.wait_in_line(client=proxy.client(), wait=0.3)
        with self.assertRaises(NotAcquired):
            waiter()
        self.assertEqual(proxy.swallowed, 1)
        self.in_line(0)
        hold.release()
        self.assertFalse(self.client.exists(self.key))

    def test_a_wait_that_lasts_longer_on_the_server(self):
        """Its clock is slow, say. The client leaves the line."""
        real = turnstile_lock.Request.waiting_command

        def longer(request, lease, *more):
            request.deadline += 60
            try:
                return real(request, lease, *more)
            finally:
                request.deadline -= 60

        turnstile_lock.Request.waiting_command = longer
        self.addCleanup(setattr, turnstile_lock.Request, "waiting_command", real)
        hold, waiter = self.wait_in_line(wait=0.3)
        with self.assertRaises(NotAcquired):
            waiter()
        self.in_line(0)
        hold.release()

    def test_forged_messages_are_not_believed(self):
        hold, waiter = self.wait_in_line()
        place = self.place()
        mallory = self.server.client()
        self.addCleanup(mallory.connection_pool.disconnect)
        messages = ["granted 9007199254740991", "timeout", "lost 9007199254740991 forced"]
        messages += ["error DEADLOCK made up", "error UNBLOCKED this server is no longer a primary"]
        for message in messages:
            asked = times_asked(self.client)
            received = mallory.publish(place.channel, f"{place.id} {message} {self.key}")
            self.assertEqual(received, 1)
            eventually(lambda: times_asked(self.client) > asked, "it to ask again")
            self.in_line()
            self.assertTrue(self.held_by(hold.token))
        for nonsense in ("", " ", place.id, f"{place.id} granted", "x granted 1 k", f"{place.id} hm x"):
            mallory.publish(place.channel, nonsense)
        mallory.publish(place.channel, b"\xff\xfe")
        # Even when the lock is ours: the token is what the server says.
        self.server.pause()
        release = self.in_thread(hold.release)
        eventually(self.server.is_asked, "the release to be sent")
        place.tell("granted", f"9007199254740991 {self.key}")
        self.server.go_on()
        release()
        real = waiter()
        self.assertLess(real.token, 9007199254740991)
        self.assertTrue(self.held_by(real.token))
        mallory.publish(place.channel, f"{place.id} lost 9007199254740991 forced {self.key}")
        real.touch()
        self.assertTrue(real.release())

    def test_a_forged_message_of_a_loss_is_not_believed(self):
        for renew in (True, False):
            hold, waiter = self.wait_in_line(renew=renew)
            hold.release()
            real = waiter()
            place = real._grant.place
            eventually(lambda: self.client.pttl(self.key) < 59_900, "some of it to be over")
            real._due, until = -1, real.until
            self.client.publish(place.channel, f"{place.id} lost {real.token} forced {self.key}")
            eventually(lambda: 0 < real._due, "it to ask the server")
            self.assertFalse(real.lost.is_set())
            self.assertEqual(real.until > until, renew)
            self.assertLess(self.client.pttl(self.key), 60_001 if renew else 59_900)
            self.assertTrue(real.release())

    def test_a_forged_message_that_the_wait_was_ended_leaves_nothing(self):
        hold, waiter = self.wait_in_line(wait=60.0)
        place = self.place()
        self.client.publish(place.channel, f"{place.id} error UNBLOCKED made up")
        with self.assertRaises(Superseded):
            waiter()
        self.in_line(0)
        hold.release()
        self.assertFalse(self.client.exists(self.key))

    def test_a_loss_is_told_at_once(self):
        hold, waiter = self.wait_in_line()
        hold.release()
        second = waiter()
        self.client.delete(self.key)
        self.assertTrue(second.lost.wait(SLACK_S))  # a third of the lease would be 20 s
        with self.assertRaisesRegex(Lost, "forced"):
            second.check()
        self.assertIs(second.release(), False)
        self.assertEqual(turnstile_lock.Server.of(self.client)._subscribers[""].places, {})

    def test_a_demoted_server(self):
        server = Server()
        self.addCleanup(server.close)
        look = server.client()
        hold = self.lock(client=look, lease=60.0).acquire()
        waiter = self.in_thread(self.lock(client=look, wait=PATIENCE_S).acquire)
        eventually(lambda: waiting(look, self.key), "one in line")
        look.execute_command("REPLICAOF", "127.0.0.1", "1")
        with self.assertRaises(NotPrimary):  # asked again, and this is the answer
            waiter()
        look.execute_command("REPLICAOF", "NO", "ONE")
        hold.release()

    def test_without_the_right_to_the_channel_it_blocks(self):
        rights = ["on", ">secret", "+@all", "~*"]
        for who, channels in (("deaf", ["resetchannels"]), ("mute", ["resetchannels", "&other:*"])):
            self.client.execute_command("ACL", "SETUSER", who, *rights, *channels)
        self.client.execute_command("ACL", "SETUSER", "nosub", *rights, "&*", "-subscribe")
        for who in ("deaf", "mute", "nosub"):
            with self.subTest(who):
                client = self.server.client(username=who, password="secret")
                for turn in range(2):
                    before = received(self.client)
                    hold = self.lock().acquire()
                    waiter = self.in_thread(self.lock(client=client, wait=PATIENCE_S).acquire)
                    self.in_line()
                    eventually(lambda: len(connections(self.client, "b")) == 1, "a blocked one")
                    hold.release()
                    self.assertTrue(waiter().release())
                    if turn == 1:
                        self.assertEqual(received(self.client), before)  # the same connection
                turnstile_lock.Server.of(client).close()
                client.connection_pool.disconnect()


class TimeOuts(LockTest):
    """redis-py's own: the command that it gave up must not bring a hold or a wait later."""

    def setUp(self):
        super().setUp()
        self.other = Server()
        self.addCleanup(self.other.close)
        self.look = self.other.client()
        self.addCleanup(self.look.connection_pool.disconnect)
        self.hasty = self.other.client(socket_timeout=0.2)
        self.hasty.ping()

    def assert_nothing_there(self):
        eventually(lambda: len(self.look.client_list()) <= 2, "the connections to close")
        self.assertIsNone(lock_info(self.look, self.key))

    def test_of_a_stopped_server(self):
        self.other.pause()
        start = time.monotonic()
        with self.assertRaises(redis.TimeoutError):
            self.lock(client=self.hasty, lease=60.0, wait=PATIENCE_S).acquire()
        self.assert_between(time.monotonic() - start, 0.2, 0.6 + SLACK_S)
        self.other.go_on()
        self.assert_nothing_there()
        self.assertEqual(self.look.info("turnstile")["turnstile_acquired"], 1)  # it came, and went

    def test_the_release_goes_behind_the_request(self):
        proxy = self.proxy()
        client = proxy.client(socket_timeout=1.5)
        client.ping()
        proxy.hold_back(b"LOCK.ACQUIRE")
        outcome = self.in_thread(self.lock(client=client, lease=60.0).acquire)
        eventually(lambda: proxy.holds_back(b"LOCK.RELEASE"), "a release")
        proxy.let_through()
        with self.assertRaises(redis.TimeoutError):
            outcome()
        self.assertIsNone(lock_info(self.client, self.key))

    def test_of_a_paused_server(self):
        self.look.execute_command("CLIENT", "PAUSE", 60_000, "WRITE")
        with self.assertRaises(redis.TimeoutError):
            self.lock(client=self.hasty, lease=60.0, wait=PATIENCE_S).acquire()
        self.look.execute_command("CLIENT", "UNPAUSE")
        self.assert_nothing_there()

    def test_of_a_server_that_stops_while_we_wait(self):
        hold = self.lock(client=self.look, lease=60.0).acquire()
        lock = self.lock(client=self.hasty, lease=60.0, wait=0.5)
        waiter = self.in_thread(lock.acquire)
        eventually(lambda: waiting(self.look, self.key), "one in line")
        self.other.pause()
        with self.assertRaises(redis.TimeoutError):
            waiter()
        self.other.go_on()
        eventually(lambda: not waiting(self.look, self.key), "the line to be empty")
        self.assertTrue(hold.release())
        turnstile_lock.Server.of(self.hasty).close()
        self.assert_nothing_there()


class TimeOutsOfMessages(TimeOuts):
    park = 0.0


class Fork(LockTest):
    park = 0.0

    def in_child(self, work):
        """What work() returned in a forked child."""
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.write(write, work().encode())
            except BaseException as error:
                os.write(write, repr(error).encode())
            finally:
                os._exit(0)
        os.close(write)
        with os.fdopen(read) as pipe:
            told = pipe.read()
        os.waitpid(child, 0)
        return told

    def test_a_child_starts_anew(self):
        other = self.lock(self.key + ":other").acquire()
        waiter = self.in_thread(self.lock(self.key + ":other", wait=PATIENCE_S).acquire)
        eventually(lambda: waiting(self.client, self.key + ":other"), "one in line")

        def work():
            with self.lock(self.key + ":child", lease=0.9) as hold:
                hold.lost.wait(1.2)  # it has a thread that renews
                hold.check()
                self.assertEqual(turnstile_lock.KEEPER.holds, {hold})
            try:
                self.lock(self.key, wait=0.1).acquire()
            except NotAcquired:  # it has a subscriber: else the wait had not begun
                return f"{len(turnstile_lock.Server.of(self.client)._subscribers)} subscriber"

        with self.lock(lease=0.9) as hold:
            self.assertEqual(self.in_child(work), "1 subscriber")
            hold.check()
        other.release()
        self.assertTrue(waiter().release())

    def test_the_hold_stays_the_parent_s(self):
        def work():
            try:
                hold.check()
            except Lost as error:
                return f"{error} {hold.release()}"

        with self.lock(owner="alice") as hold:
            self.assertRegex(self.in_child(work), "fork.* False")
            self.assertTrue(self.held_by(hold.token))
            self.assertTrue(hold.owned())


class Knowing(LockTest):
    """Who holds it, whether it is ours, and holds that another process began."""

    park = 0.0

    def test_the_error_says_who_and_for_how_long(self):
        with self.lock(tag="host-7 pid 12", lease=30.0, owner="a-secret"):
            for wait in (0, 0.05):
                with self.assertRaises(NotAcquired) as caught:
                    self.lock(wait=wait).acquire()
                self.assertRegex(str(caught.exception), r"held by host-7 pid 12 .* (29|30)\.\d s")
                self.assertNotIn("a-secret", str(caught.exception))
            waiter = self.in_thread(self.lock(wait=PATIENCE_S).acquire)
            self.in_line()
            with self.assertRaisesRegex(NotAcquired, "1 in line"):
                self.lock(wait=0).acquire()
            with self.assertRaisesRegex(NotAcquired, "host-7"):
                self.lock(self.key + ":free", also=[self.key], wait=0).acquire()
        waiter().release()
        with self.lock(owner="a-secret", shared=True), self.lock(shared=True):
            with self.assertRaisesRegex(NotAcquired, "held by 2 owners"):
                self.lock(wait=0).acquire()
        self.client.set(self.key, "plain", px=30_000)
        with self.assertRaisesRegex(NotAcquired, r"an owner for another (29|30)\.\d s"):
            self.lock(wait=0).acquire()
        self.client.delete(self.key)

    def test_a_failed_try_asks_nothing_more(self):
        with self.lock():
            self.client.config_resetstat()
            self.assertIsNone(self.lock().try_acquire())
            commands = {name.lower() for name in self.client.info("commandstats")}
            self.assertNotIn("cmdstat_lock.info", commands)

    def test_locked_and_owned(self):
        lock = self.lock(lease=60.0)
        self.assertIs(lock.locked(), False)
        hold = lock.acquire()
        self.assertIs(lock.locked(), True)
        self.assertIs(hold.owned(), True)
        self.client.delete(self.key)
        self.assertIs(hold.owned(), False)
        with self.lock():
            self.assertIs(lock.locked(), True)
            self.assertIs(hold.owned(), False)
        with self.assertRaises(Lost):
            hold.touch()
        self.assertIs(hold.release(), False)

    def test_adopt(self):
        stored = self.lock(lease=1.0, renew=False).acquire()
        hold = self.lock(lease=60.0).adopt(stored.owner, stored.token)
        self.assertEqual(hold.token, stored.token)
        self.assertGreater(self.client.pttl(self.key), 50_000)
        hold.run("SET", self.key + ":data", "x")
        for owner, token in (("another", stored.token), (stored.owner, stored.token + 1)):
            with self.assertRaises(Lost):
                self.lock().adopt(owner, token)
        again = self.lock(lease=60.0).acquire(owner=stored.owner)
        self.assertEqual(again.token, stored.token)
        self.assertTrue(hold.release())
        with self.assertRaises(Lost):
            self.lock().adopt(stored.owner, stored.token)
        for ended in (stored, again):
            ended.release()

    def test_adopt_without_a_token(self):
        for owner in ("alice", b"\xff\xfe"):
            stored = self.lock(shared=True, lease=60.0, max_hold=1.0).acquire(owner=owner)
            with self.lock(shared=True):
                hold = self.lock(lease=60.0).adopt(owner)
            self.assertEqual(hold.token, stored.token)
            self.assertTrue(hold.lost.wait(PATIENCE_S))
            with self.assertRaisesRegex(Lost, "max_hold"):  # which began with the first grant
                hold.check()
            eventually(lambda: not self.client.exists(self.key), "the server to end it too")
            for ended in (hold, stored):
                self.assertIs(ended.release(), False)
        with self.assertRaises(Lost):
            self.lock().adopt("bob")

    def test_the_maximum_of_an_older_hold(self):
        lock = self.lock(max_hold=60.0, owner="alice")
        hold = lock.acquire()

        def left():
            return lock_info(self.client, self.key)["holders"][0]["max-hold-left-ms"]

        eventually(lambda: left() < 59_900, "some of it to be over")
        again = lock.acquire()
        self.assertLessEqual(again._max_end - time.monotonic(), 59.9)
        self.assertIs(hold.release(), True)
        self.assertIs(again.release(), False)

    def test_the_options_of_the_second_edition(self):
        with self.lock(limit=3, weight=2, tag="t", max_hold=5.0, linger=0.1):
            [holder] = lock_info(self.client, self.key)["holders"]
            self.assertEqual((holder["weight"], holder["tag"]), (2, b"t"))
            self.assert_between(holder["max-hold-left-ms"], 4000, 5000)
            self.assertIsNone(self.lock(limit=3, weight=2).try_acquire())
            self.lock(limit=3).try_acquire().release()
            waiter = self.in_thread(self.lock(wait=PATIENCE_S).acquire)
            self.in_line()
            start = time.monotonic()
            with self.assertRaises(NotAcquired):
                self.lock(wait=PATIENCE_S, max_line=1).acquire()
            self.assertLess(time.monotonic() - start, SLACK_S)
        waiter().release()

    def test_the_seam(self):
        server = turnstile_lock.Server.of(self.client)
        twin = redis.Redis(connection_pool=self.client.connection_pool)
        self.assertIs(turnstile_lock.Server.of(twin), server)
        keys = [self.key, self.key + ":2"]
        grant = server.acquire(keys, "alice", 5000, 0)
        self.assertTrue(self.held_by(grant.token))
        self.assertIsNone(server.acquire(keys, "bob", 5000, 50))
        self.assertEqual(server.touch(keys, "alice", 9000), 2)
        request = (keys[1:], "bob", 60_000, 10_000, ["TAG", "b"])
        waiter = self.in_thread(lambda: server.acquire(*request))
        eventually(lambda: waiting(self.client, keys[1]), "bob to stand in line")
        self.assertEqual(server.release(keys, "alice"), 2)
        start = time.monotonic()
        grant = waiter()
        self.assert_between(grant.valid_from, start - SLACK_S, time.monotonic())
        self.assertGreater(self.client.pttl(keys[1]), 50_000)
        self.assertEqual(server._subscribers[""].places, {})  # nobody wants to hear of a loss
        server.abandon(keys[1:], "bob")
        self.assertFalse(self.client.exists(*keys))


class OneNodeCluster(Server):
    """A cluster that needs no friends. tests/cluster/run has one whose slots move."""

    def __init__(self):
        super().__init__("--cluster-enabled", "yes")
        with contextlib.closing(self.client()) as client:
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
            eventually(lambda: client.cluster("INFO")["cluster_state"] == "ok", "a cluster")


class Cluster(LockTest):
    park = 0.0

    @classmethod
    def setUpClass(cls):
        cls.server = OneNodeCluster()
        cls.addClassCleanup(cls.server.close)

    def setUp(self):
        super().setUp()
        self.cluster = redis.RedisCluster("127.0.0.1", self.server.port)
        self.addCleanup(self.close)

    def close(self):
        turnstile_lock.Server.of(self.cluster).close()
        self.cluster.disconnect_connection_pools()

    def lock(self, key=None, **options):
        return Lock(self.cluster, key or self.key, **options)

    def test_at_the_right_node_without_a_question(self):
        keys = ["{a}:1", "{a}:2"]
        self.client.config_resetstat()
        with self.lock(keys[0], also=keys[1:], lease=0.9) as hold:
            self.assertFalse(hold.lost.wait(1.2))
            hold.run("SET", "{a}:data", "x")
            self.assertTrue(hold.owned() and self.lock(keys[1]).locked())
            with self.assertRaisesRegex(NotAcquired, "another 0"):
                self.lock(keys[1], wait=0).acquire()
        commands = {name.lower() for name in self.client.info("commandstats")}
        self.assertFalse({"cmdstat_command|getkeys", "cmdstat_command"} & commands, commands)
        with self.assertRaisesRegex(redis.ResponseError, "slot"):
            self.lock("a", also=["b"]).acquire()

    def test_all_waits_share_a_subscriber(self):
        holds = [self.lock(f"{self.key}:{i}").acquire() for i in range(5)]
        locks = [self.lock(hold.key, wait=PATIENCE_S) for hold in holds for _ in range(4)]
        waits = [self.in_thread(lambda lock=lock: lock.acquire().release()) for lock in locks]
        for hold in holds:
            eventually(lambda: waiting(self.client, hold.key) == 4, "four to stand in line")
        self.assertEqual(len(connections(self.client, "P")), 1)
        self.assertEqual(connections(self.client, "b"), [])
        self.assertEqual(len(self.client.execute_command("PUBSUB", "SHARDCHANNELS")), 5)
        self.client.client_kill_filter(_id=connections(self.client, "P")[0])
        for hold in holds:
            hold.release()
        self.assertEqual([wait() for wait in waits], [True] * 20)

    def test_a_slot_that_is_gone_for_a_while(self):
        """The server ends the subscription to its channel and refuses, then it is back."""
        hold = self.lock().acquire()
        waiter = self.in_thread(self.lock(wait=PATIENCE_S).acquire)
        self.in_line()
        slot = turnstile_lock.slot_of(self.key)
        self.assertEqual(slot, self.client.execute_command("CLUSTER KEYSLOT", self.key))
        self.client.execute_command("CLUSTER", "DELSLOTS", slot)
        eventually(lambda: not self.client.execute_command("PUBSUB", "SHARDCHANNELS"), "the end")
        self.client.execute_command("CLUSTER", "ADDSLOTS", slot)
        eventually(lambda: self.client.execute_command("PUBSUB", "SHARDCHANNELS"), "a new one")
        self.in_line()
        self.assertTrue(hold.release() and waiter().release())

    def test_slots(self):
        for key in ("a", "{a}b", "a{b}c", "{}a", "a{}b{c}", "{a", b"\xff{x}", "}a{"):
            expected = self.client.execute_command("CLUSTER KEYSLOT", key)
            self.assertEqual(turnstile_lock.slot_of(key), expected, key)
        for slot in (0, 1, 16383):
            self.assertEqual(turnstile_lock.slot_of(f"x{{{turnstile_lock.tag_of(slot)}}}"), slot)


class WithoutTheModule(LockTest):
    @classmethod
    def setUpClass(cls):
        cls.server = Server(module=False)
        cls.addClassCleanup(cls.server.close)

    def test_it_has_to_be_asked_for(self):
        with self.assertRaisesRegex(Unsupported, "module.*fallback=True"):
            self.lock(wait=0).acquire()
        self.assertFalse(self.client.exists(self.key))

    def test_a_plain_lock(self):
        lock = self.lock(fallback=True, wait=0, lease=0.9)
        with lock as hold:
            self.assertEqual(self.client.get(self.key), hold.owner.encode())
            self.assertIs(lock.locked(), True)
            self.assertIs(hold.owned(), True)
            self.assertIsNone(lock.try_acquire())
            with self.assertRaisesRegex(NotAcquired, r"for another 0\.\d s"):
                lock.acquire()
            self.assertFalse(hold.lost.wait(1.5))  # it is renewed
            hold.touch(lease=60.0)
            self.assertGreater(self.client.pttl(self.key), 50_000)
        self.assertFalse(self.client.exists(self.key))
        self.client.script_flush()
        lock.acquire().release()
        self.assertFalse(self.client.exists(self.key))

    def test_only_ones_own_is_touched_and_released(self):
        for theirs in (self.client.set, self.client.lpush):
            hold = self.lock(fallback=True, wait=0, lease=60.0).acquire()
            self.client.delete(self.key)
            theirs(self.key, "theirs")
            self.assertIs(hold.owned(), False)
            with self.assertRaises(Lost):
                hold.touch()
            self.assertIs(hold.release(), False)
            self.assertEqual(self.client.delete(self.key), 1)

    def test_what_is_missing_is_told(self):
        options = {"fallback": True, "wait": 0}
        for what, wanted in (
            ("modes", {"shared": True}),
            ("modes", {"limit": 2, "weight": 1}),
            ("line", {"wait": 1.0}),
            ("linger", {"linger": 1.0}),
            ("session", {"session": True}),
        ):
            with self.assertRaisesRegex(Unsupported, f"without=.*{what}"):
                self.lock(**{**options, **wanted}).acquire()
            self.lock(**{**options, **wanted}, without={what}).acquire().release()
        for never in ({"also": ["another"]}, {"reentrant": True, "owner": "alice"}):
            with self.assertRaises(Unsupported):
                self.lock(**options, **never, without={"modes", "also", "reentrant"}).acquire()
        with self.lock(**options) as hold:
            with self.assertRaisesRegex(Unsupported, "without=.*token"):
                hold.token
            with self.assertRaises(Unsupported):
                hold.run("SET", "x", "y")
        with self.lock(**options, without={"token"}) as hold:
            self.assertIsNone(hold.token)
            with self.assertRaises(Unsupported):
                hold.run("SET", "x", "y")
        self.assertFalse(self.client.exists(self.key))

    def test_waiting_is_polling(self):
        options = {"fallback": True, "without": {"line"}, "wait": PATIENCE_S}
        hold = self.lock(**options).acquire()
        waiter = self.in_thread(self.lock(**options).acquire)
        self.assertFalse(hold.lost.wait(0.3))
        hold.release()
        start = time.monotonic()
        self.assertTrue(waiter().release())
        self.assertLess(time.monotonic() - start, SLACK_S)
        with self.lock(**options):
            start = time.monotonic()
            with self.assertRaises(NotAcquired):
                self.lock(**options).acquire(wait=0.2)
            self.assert_between(time.monotonic() - start, 0.2, 0.2 + SLACK_S)

    def test_the_same_owner_asks_again(self):
        proxy = self.proxy()
        proxy.lose(b"NX", 1)
        options = {"fallback": True, "without": {"line"}, "wait": PATIENCE_S, "lease": 60.0}
        hold = self.lock(client=proxy.client(), **options).acquire()
        self.assertEqual(proxy.lost, [b"+OK\r\n"])
        again = self.lock(**options).acquire(owner=hold.owner)
        adopted = self.lock(**options).adopt(hold.owner, None)
        self.assertTrue(adopted.release())
        for ended in (hold, again):
            self.assertIs(ended.release(), False)

    def test_adopt_is_the_first_to_learn_of_it(self):
        self.client.set(self.key, "stored", px=60_000)
        with self.assertRaises(Unsupported):
            self.lock().adopt("stored")
        for client in (self.client, self.server.client()):
            lock = self.lock(client=client, fallback=True)
            with self.assertRaises(Lost):
                lock.adopt("stranger")
        self.assertIs(lock.adopt("stored").release(), True)

    def test_giving_up_leaves_nothing(self):
        hasty = self.server.client(socket_timeout=0.2)
        self.lock(client=hasty, fallback=True, wait=0).acquire().release()
        self.client.script_flush()
        self.server.pause()
        with self.assertRaises(redis.TimeoutError):
            self.lock(client=hasty, fallback=True, wait=0, lease=60.0).acquire()
        self.server.go_on()
        eventually(lambda: not self.client.exists(self.key), "nothing to be left")

    def test_once_it_is_known_nobody_asks_again(self):
        self.lock(fallback=True, wait=0).acquire().release()
        self.client.config_resetstat()
        self.lock(fallback=True, wait=0).acquire().release()
        commands = {name.lower() for name in self.client.info("commandstats")}
        self.assertFalse({"cmdstat_command|info", "cmdstat_lock.acquire"} & commands)


class Files(unittest.TestCase):
    def test_a_module_in_the_same_folder_is_not_imported(self):
        """Python would take turnstile.so before turnstile.py, so no file has that name."""
        code = "import turnstile_lock, turnstile_lock_asyncio; print(turnstile_lock.Lock)"
        with tempfile.TemporaryDirectory() as folder:
            for file in (ROOT / "client-examples" / "python").glob("turnstile*.py"):
                self.assertNotEqual(file.name, "turnstile.py")
                (pathlib.Path(folder) / file.name).write_bytes(file.read_bytes())
            (pathlib.Path(folder) / "turnstile.so").write_bytes(b"not for Python")
            command = [sys.executable, "-B", "-c", code]
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
            self.assertEqual((done.returncode, done.stderr), (0, ""))
            command[-1] = "import turnstile"  # this is what would happen
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
            self.assertIn("turnstile.so", done.stderr)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that servers are stopped
    unittest.main()

"""Servers of the abuse benchmark, connections to them, and their CPU time.

The connections implement RESP themselves over a Unix socket: thousands of connections that only
wait need neither a client library nor ports.
"""

import contextlib
import dataclasses
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
MODULE = pathlib.Path(os.environ.get("TURNSTILE_MODULE", ROOT / "build" / "turnstile.so"))
QUIET_S = 0.004  # a server that was idle for so long has nothing left to do
QUIET_PINGS = 20
BUSY_NS = 100_000  # more than a PING takes


class TooLong(Exception):
    """A measurement exceeded its time limit."""


class TooSlow(Exception):
    """The state ended before it could be measured: the machine needs more patience."""


class ReplyError(Exception):
    """The server replied with an error."""


def encode(command):
    parts = [b"*%d\r\n" % len(command)]
    for word in command:
        word = word if isinstance(word, bytes) else str(word).encode()
        parts.append(b"$%d\r\n%b\r\n" % (len(word), word))
    return b"".join(parts)


class Connection:
    def __init__(self, server, user=None):
        self.server = server
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(server.time_left())
        self.socket.connect(str(server.folder / "socket"))
        self.replies = self.socket.makefile("rb")
        if user:
            self.ask("AUTH", user, "any")

    def send(self, *command):
        """Sends a command; its reply is read later, or never."""
        self.send_all([command])

    def send_all(self, commands):
        # The server keeps reading from a client that does not read its replies yet.
        with self.in_time():
            self.socket.sendall(b"".join(map(encode, commands)))

    def ask(self, *command):
        self.send(*command)
        return self.read()

    def do_all(self, commands):
        """Pipelines commands and ignores their replies, except errors."""
        commands = list(commands)
        for start in range(0, len(commands), 1000):
            self.send_all(commands[start:start + 1000])
            replies = b"\n" + self.raw_replies()
            if (error := replies.find(b"\n-")) >= 0:
                raise ReplyError(replies[error + 2:].partition(b"\r")[0].decode())

    def read(self):
        line = self.read_line()
        kind, rest = line[:1], line[1:]
        if kind == b"-":
            raise ReplyError(rest.decode(errors="replace"))
        if kind == b":":
            return int(rest)
        if kind == b"$":
            if rest == b"-1":
                return None
            with self.in_time():
                return self.replies.read(int(rest) + 2)[:-2]
        if kind == b"*":
            # An error within an array would leave the rest of the array unread.
            return None if rest == b"-1" else [self.read() for _ in range(int(rest))]
        return rest

    def read_line(self):
        with self.in_time():
            line = self.replies.readline()
        if not line:
            raise ConnectionError("the server closed the connection")
        return line[:-2]

    def raw_replies(self):
        """All outstanding replies as bytes, for those that are slow to parse."""
        end = b"end of replies"
        self.send("PING", end)
        end = b"$%d\r\n%b\r\n" % (len(end), end)
        text = bytearray()
        while not text.endswith(end):
            with self.in_time():
                more = self.replies.read1()
            if not more:
                raise ConnectionError("the server closed the connection")
            text += more
        return text.removesuffix(end)

    @contextlib.contextmanager
    def in_time(self):
        try:
            self.socket.settimeout(self.server.time_left())
            yield
        except TimeoutError:
            raise TooLong from None

    def close(self):
        self.replies.close()
        self.socket.close()


@dataclasses.dataclass
class Cost:
    """The cost of one measured action."""

    spent: float = 0  # nanoseconds of CPU, or instructions
    stall: float = 0  # maximum nanoseconds of CPU between two replies to another client
    calls: int = 1  # how many commands the action consists of
    memory: int = 0  # maximum bytes that the server needed in addition
    wrong: str = ""  # what the server did wrong


class Server:
    """A server with the module, in its own folder. A context manager."""

    MARK = "timeCommand"  # of the command TIME, at which callgrind dumps its counts

    def __init__(self, limit_s, *options, module=True, instructions=False, patience=1):
        """Raises TooLong when everything together takes longer than `limit_s`. `patience` extends
        leases that must last until the state is complete, for slow machines."""
        self.deadline = time.monotonic() + limit_s
        self.options = options
        self.patience = patience
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="turnstile-abuse-"))
        self.instructions = instructions
        self.counted = 0
        self.dumps = 0
        command = []
        if instructions:
            command += ["valgrind", "-q", "--tool=callgrind", f"--dump-before={self.MARK}",
                        f"--callgrind-out-file={self.folder}/counts"]
        command += [os.environ.get("REDIS_SERVER", "redis-server"), "--port", "0", "--save", ""]
        command += ["--unixsocket", str(self.folder / "socket"), "--dir", str(self.folder)]
        # A low cron frequency, because cron is not part of what is measured.
        command += ["--hz", "1", "--dynamic-hz", "no", "--tcp-backlog", "8192"]
        command += ["--loadmodule", str(MODULE)] if module else []
        with open(self.folder / "log", "w") as log:
            self.process = subprocess.Popen([*command, *options], stdout=log, stderr=log)
        self.task = pathlib.Path(f"/proc/{self.process.pid}/task/{self.process.pid}")
        try:
            self.wait_for(self.accepts)
        except BaseException:
            self.stop()
            raise

    def __enter__(self):
        return self

    def __exit__(self, *failure):
        self.stop()

    def stop(self):
        self.process.kill()
        self.process.wait()
        log = (self.folder / "log").read_text(errors="replace")
        shutil.rmtree(self.folder)
        if self.process.returncode != -signal.SIGKILL:
            raise SystemExit(f"abuse: the server ended by itself:\n{log}")

    def accepts(self):
        with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
            self.control = self.connect()
            return self.ask("PING")

    def without_module(self):
        """Another server, for comparison."""
        return Server(self.time_left(), *self.options, module=False,
                      instructions=self.instructions)

    def connect(self, user=None):
        return Connection(self, user)

    def time_left(self):
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TooLong
        return left

    def wait_for(self, condition):
        while not condition():
            if self.process.poll() is not None:
                raise ConnectionError("the server ended")
            self.time_left()
            time.sleep(0.001)

    def ask(self, *command):
        return self.control.ask(*command)

    def do_all(self, commands):
        self.control.do_all(commands)

    def info(self, section, field):
        return int(re.search(rb"^%b:(\d+)" % field.encode(), self.ask("INFO", section), re.M)[1])

    def has_setting(self, name):
        return bool(self.ask("CONFIG", "GET", name))

    def waiting(self):
        return self.info("clients", "blocked_clients")

    def queued(self):
        return self.info("turnstile", "turnstile_queued")

    def wait_until_waiting(self, count):
        self.wait_for(lambda: self.waiting() == count)

    @contextlib.contextmanager
    def frozen(self):
        """Stops the server, so that it sees everything sent in this context at the same time."""
        self.process.send_signal(signal.SIGSTOP)
        try:
            self.wait_for(lambda: self.state() == "T")
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def cpu_ns(self):
        """CPU time of the main thread."""
        try:
            return int((self.task / "schedstat").read_text().split()[0])
        except FileNotFoundError:
            info = self.ask("INFO", "cpu")
            return sum(int(float(used) * 1e9)
                       for used in re.findall(rb"used_cpu_\w+_main_thread:(\S+)", info))

    def spent(self):
        """CPU time or instructions used so far."""
        if not self.instructions:
            return self.cpu_ns()
        self.ask("TIME")
        self.dumps += 1
        dump = self.folder / f"counts.{self.dumps}"
        if not dump.exists():
            raise SystemExit(f"abuse: valgrind does not find {self.MARK} in the server")
        self.counted += int(re.search(r"^totals: (\d+)$", dump.read_text(), re.M)[1])
        dump.unlink()
        return self.counted

    def state(self):
        return (self.task / "stat").read_text().rpartition(")")[2].split()[0]

    def settle(self):
        """Waits until the server is idle."""
        cpu, since = self.cpu_ns(), time.monotonic()
        while time.monotonic() - since < QUIET_S:
            self.time_left()
            time.sleep(QUIET_S / 4)
            # A process that is runnable but not scheduled is not idle.
            if (now := self.cpu_ns()) != cpu or self.state() != "S":
                cpu, since = now, time.monotonic()

    @contextlib.contextmanager
    def measure(self, calls=1):
        """Measures what happens in this context, and everything the server does because of it."""
        cost = Cost(calls=calls)
        self.settle()
        memory, before = self.peak_memory(), self.spent()
        yield cost
        self.settle()
        cost.spent = self.spent() - before
        cost.memory = self.peak_memory() - memory

    @contextlib.contextmanager
    def measure_stalls(self, done):
        """Like measure(), with another client that sends PING until done() holds and the server is
        idle. The stall is the server's CPU time between two replies: wall time would depend on
        how busy the machine is."""
        with self.measure() as cost:
            last = self.cpu_ns()
            yield cost
            quiet = 0
            while quiet < QUIET_PINGS or not done():
                self.ask("PING")
                now = self.cpu_ns()
                cost.stall = max(cost.stall, now - last)
                quiet = quiet + 1 if now - last < BUSY_NS else 0
                last = now

    def peak_memory(self):
        return int(re.search(r"VmHWM:\s*(\d+) kB",
                             (self.task / "status").read_text())[1]) * 1024

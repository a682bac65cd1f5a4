"""What the parts of the benchmark share: servers of their own, paired ratios, goals.

A part is a module of this folder with

    TITLE     a heading
    SECONDS   about how long it takes, for the progress
    run(options) -> data             measures; data is plain JSON
    goals(data) -> list of Goal      what was to be reached, and what was
    report(data) -> Report           a section for the reader: Markdown and plots
    ENGINE                           optional: the engine of script/engine that it is measured on

script/bench runs the parts and writes bench/results/.
"""

import contextlib
import dataclasses
import os
import pathlib
import random
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time

import redis

ROOT = pathlib.Path(__file__).resolve().parents[1]
BINARIES = ROOT / "build" / "bench"
MODULE = pathlib.Path(os.environ.get("TURNSTILE_MODULE", ROOT / "build" / "turnstile.so"))
NOTHING = ROOT / "build/tests/turnstile_nothing_module.so"  # a module that does nothing
PATIENCE_S = 60.0
OTHERS = 10_000  # keys of others in a database that is not empty, a quarter of them with a TTL


@dataclasses.dataclass
class Options:
    full: bool = False  # also what takes long
    quick: bool = False  # fewer rounds: to try the benchmark, not to publish
    seed: int = 1


@dataclasses.dataclass
class Goal:
    what: str
    goal: str  # for example "≤ 1.10"
    measured: str  # for example "1.08"
    met: bool

    @staticmethod
    def at_most(what, bound, value, digits=2):
        return Goal(what, f"≤ {bound:g}", f"{value:.{digits}f}", round(value, digits) <= bound)

    @staticmethod
    def at_least(what, bound, value, digits=2):
        return Goal(what, f"≥ {bound:g}", f"{value:.{digits}f}", round(value, digits) >= bound)


@dataclasses.dataclass
class Report:
    markdown: str  # without a heading; plots as ![what it shows](name.svg)
    plots: dict[str, str] = dataclasses.field(default_factory=dict)  # name.svg: its text


def say(text):
    """Progress, for who watches."""
    print(f"bench: {text}", file=sys.stderr, flush=True)


def spread(values):
    """Median and quartiles."""
    if len(values) < 2:
        return {"median": values[0], "q1": values[0], "q3": values[0], "n": len(values)}
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": median, "q1": q1, "q3": q3, "n": len(values)}


def table(header, rows):
    """A Markdown table; the first column is text, the others are numbers."""
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines) + "\n"


def measure(program, *arguments):
    """Runs a program of this folder; what it prints. Ends the benchmark if it fails."""
    command = [str(BINARIES / program), *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(f"bench: {' '.join(command)} failed with status {done.returncode}")
    return done.stdout


def free_port():
    """Below the ports that the kernel gives to clients."""
    while True:
        port = random.SystemRandom().randrange(12000, 22000)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


@contextlib.contextmanager
def many_files():
    """As many open files as the system lets us have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        yield hard
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def wire(*words):
    """A command as it goes over the wire."""
    words = [word if isinstance(word, bytes) else str(word).encode() for word in words]
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(w), w) for w in words)


class Line:
    """A connection for commands as bytes, which says of a reply only how it begins."""

    def __init__(self, server):
        self.socket = socket.create_connection(("127.0.0.1", server.port), server.patience_s)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.replies = self.socket.makefile("rb")

    def send(self, data):
        self.socket.sendall(data)

    def reply(self):
        """The first line of the next reply."""
        line = self.replies.readline()
        if not line.endswith(b"\r\n"):
            sys.exit("bench: the server closed a connection")
        kind, rest = line[:1], line[1:-2]
        if kind == b"$" and rest != b"-1":
            self.replies.read(int(rest) + 2)
        if kind == b"*":
            for _ in range(int(rest)):
                self.reply()
        return line[:-2]

    def ask(self, *words):
        self.send(wire(*words))
        return self.reply()

    def close(self):
        self.replies.close()
        self.socket.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


class Server:
    """A redis-server, on a port and in a folder of its own. Use it with `with`."""

    def __init__(self, *options, under=(), module=MODULE, patience_s=PATIENCE_S, environment=None):
        """`under` is a command line that runs the server, such as valgrind's. `module` is ours,
        another one, or None. `environment` is more of it."""
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="turnstile-bench-"))
        self.options = options
        self.under = under
        self.environment = environment or {}
        self.module = ["--loadmodule", str(module)] if module else []
        self.patience_s = patience_s
        self.port = free_port()
        self.process = None
        with contextlib.ExitStack() as failed:  # what fails on the way is cleaned up
            failed.callback(self.__exit__)
            self.start()
            failed.pop_all()

    def start(self):
        command = [*self.under, os.environ.get("REDIS_SERVER", "redis-server")]
        command += ["--bind", "127.0.0.1", "--port", str(self.port), "--save", ""]
        command += ["--enable-debug-command", "local"]  # DEBUG POPULATE, DEBUG RELOAD
        command += ["--dir", str(self.folder), *self.module, *self.options]
        self.client = redis.Redis(port=self.port, socket_timeout=self.patience_s)
        with open(self.folder / "log", "a") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env={**os.environ, **self.environment})
        self.pid = self.process.pid
        self.wait_for("the server", self._answers)

    def _answers(self):
        if self.process.poll() is not None:
            sys.exit("bench: no server:\n" + (self.folder / "log").read_text())
        with contextlib.suppress(redis.ConnectionError):
            return self.client.ping()

    def wait_for(self, what, condition):
        end = time.monotonic() + self.patience_s
        while not condition():
            if time.monotonic() > end:
                sys.exit(f"bench: waited {self.patience_s:.0f} s for {what}")
            time.sleep(0.01)

    def populate(self):
        """Puts keys of others into the database."""
        self.ask("DEBUG", "POPULATE", OTHERS, "other", 32)
        with Line(self) as line:
            # Twice, because a table that has just grown is moved step by step, command by command.
            for _ in range(2):
                keys = range(0, OTHERS, 4)
                line.send(b"".join(wire("EXPIRE", f"other:{key}", 36000) for key in keys))
                if any(line.reply() != b":1" for _ in keys):
                    sys.exit("bench: there is no key that was put in")

    def ask(self, *command):
        return self.client.execute_command(*command)

    def info(self, section, field):
        return self.client.info(section)[field]

    def cpu_s(self):
        """CPU time of the server so far, user and system."""
        fields = pathlib.Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def kill(self):
        if self.process:
            self.client.close()
            self.process.kill()
            self.process.wait()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

"""Counts the instructions of a real server: one under callgrind, and who gives it work."""

import concurrent.futures
import contextlib
import os
import pathlib
import random
import re
import shutil
import sys
import tempfile
import threading
import time

import common
import modes
from common import Line, wire

# The more keys, the less it matters which of them collide. Few enough for the tables of a server
# with the keys of others not to grow.
KEYS = 256
PATIENCE_S = 300.0  # a server under callgrind is slow, above all on a machine with other work
GONE_S = 2.0  # after which a lock that is gone has no effect on others any more

STATES = {  # of a server, as others meet it
    "bare": "no module",
    "nothing": "a module that does nothing",
    "idle": "Turnstile, no lock taken",
    "held": "Turnstile, one lock held",
    "gone": "Turnstile, the last lock and waiter are gone",
}
LISTENERS = {"none": "no listener", "aof": "AOF on", "replica": "one replica"}
HAND_OVER = {  # how to wait, what is then the answer, and how to pass on
    "line": (["LOCK.ACQUIRE", "line", "@owner", "PX", "600000", "WAIT", "600000"], b":",
             ["LOCK.RELEASE", "line", "@owner"]),
    "token": (["BLPOP", "token", "600"], b"*2", ["RPUSH", "token", "1"]),
}


# --- The server -----------------------------------------------------------------------------------


class Counter:
    """A server under callgrind, and what it executes. Use it with `with`.

    Callgrind writes down and resets its counts whenever the server enters the function behind the
    command TIME, which nobody else calls. So the counts begin and end at exact places. The cron is
    not counted: it follows the clock, and a server under callgrind is slow.
    """

    MARK = "timeCommand"
    CRON = "serverCron"
    running = set()

    def __init__(self, state="idle", seed=0):
        """What has the same seed has the same collisions in its hash tables."""
        if not shutil.which("valgrind"):
            sys.exit("bench: counting instructions needs valgrind")
        self.stack = contextlib.ExitStack()
        folder = self.stack.enter_context(tempfile.TemporaryDirectory(prefix="turnstile-bench-"))
        self.folder = pathlib.Path(folder)
        self.dumps = 0
        self.counts = 0
        # Few ticks, no rewrite of the AOF, and no notes about commands during which the server had
        # to wait for the machine: what they cost is no part of an operation.
        options = ["--hz", "1", "--auto-aof-rewrite-percentage", "0"]
        options += ["--slowlog-log-slower-than", "-1"]
        options += ["--repl-diskless-sync-delay", "0"]
        # An engine of script/engine is started by a script.
        under = ["valgrind", "-q", "--tool=callgrind", "--trace-children=yes",
                 f"--dump-before={self.MARK}", f"--toggle-collect={self.CRON}",
                 "--collect-atstart=yes", f"--callgrind-out-file={self.folder}/%p"]
        # The server reads the seed once, and takes names of itself from what follows.
        (self.folder / "seed").write_bytes(random.Random(seed).randbytes(4096))
        environment = {"LD_PRELOAD": str(common.BINARIES / "seed_preload.so"),
                       "TURNSTILE_BENCH_SEED": str(self.folder / "seed")}
        module = {"bare": None, "nothing": common.NOTHING}.get(state, common.MODULE)
        with self.stack:  # what fails on the way is cleaned up
            self.server = self.stack.enter_context(
                common.Server(
                    *options, under=under, module=module, patience_s=PATIENCE_S,
                    environment=environment))
            self.stack = self.stack.pop_all()
        self.state = state
        self.running.add(self)

    def prepare(self):
        """Fills the database and brings the server into its state."""
        self.server.populate()
        modes.load_scripts(self.server)
        take = ["LOCK.ACQUIRE", "only-lock", "first", "PX", modes.LONG_LEASE]
        if self.state in ("held", "gone"):
            self.server.ask(*take)
        if self.state == "gone":
            with Line(self.server) as waiter:
                take[2] = "second"
                waiter.send(wire(*take, "WAIT", modes.LONG_LEASE))
                self.server.wait_for("a client to wait", lambda: self.server.info(
                    "clients", "blocked_clients") == 1)
                self.server.ask("LOCK.RELEASE", "only-lock", "first")
                expect("token", waiter.reply(), take)
            self.server.ask("LOCK.RELEASE", "only-lock", "second")
        if self.state in ("held", "gone"):
            time.sleep(GONE_S)
        return self

    def settle(self):
        """Waits until the server waits."""
        stat = pathlib.Path(f"/proc/{self.server.pid}/stat")
        end = time.monotonic() + self.server.patience_s
        while stat.read_text().rpartition(")")[2].split()[0] != "S":
            if time.monotonic() > end:
                sys.exit("bench: the server is never done")
            time.sleep(0.0005)

    def listen(self, listener):
        """Turns on what listens to the server's writes, and nothing else."""
        server = self.server
        server.ask("CONFIG", "SET", "appendonly", "yes" if listener == "aof" else "no")
        if listener == "aof":
            server.wait_for("the AOF", lambda: not server.info(
                "persistence", "aof_rewrite_in_progress"))
        if listener == "replica":
            module = None if self.state == "bare" else common.MODULE
            self.stack.enter_context(
                common.Server("--replicaof", "127.0.0.1", str(server.port), module=module))
            server.wait_for("the replica", lambda: server.client.info("replication").get(
                "slave0", {}).get("state") == "online")
        self.check(listener)

    def check(self, listener):
        """Ends the benchmark if something else listens than should."""
        replication = self.server.client.info("replication")
        listening = (
            self.server.info("persistence", "aof_enabled"),
            replication["connected_slaves"],
            replication["repl_backlog_active"],
        )
        if listening != {"none": (0, 0, 0), "aof": (1, 0, 0), "replica": (0, 1, 1)}[listener]:
            sys.exit(f"bench: {listener}: AOF, replicas and backlog are {listening}")

    def mark(self):
        """The file with the counts since the last mark."""
        self.server.ask("TIME")
        self.dumps += 1
        dump = self.folder / f"{self.server.pid}.{self.dumps}"
        if not dump.exists():
            sys.exit(f"bench: valgrind does not find {self.MARK} in the server")
        return dump

    def dump(self, act):
        """The file with the counts of what the server does while `act` goes on."""
        self.mark().unlink()
        act()
        return self.mark()

    def executed(self, act):
        """Instructions of the server while `act` goes on."""
        dump = self.dump(act)
        count = int(re.search(r"^totals: (\d+)$", dump.read_text(), re.MULTILINE)[1])
        dump.unlink()
        return count

    def each(self, job, count):
        """Instructions for one of the operations of `job(count)`, which gives the act that does so
        many: by the difference of twice as many and once as many, so what every count begins and
        ends with drops out."""
        job(max(count // 5, 1))()  # to get warm
        once, twice = (self.executed(job(k * count)) for k in (1, 2))
        return (twice - once) / count

    def count(self, name, mode, pipeline, operations):
        """Instructions for an operation of this mode, by one client."""
        with Line(self.server) as line:
            if name == modes.CONNECT:
                return self.each(lambda count: lambda: connect(self, count, pipeline),
                                 operations)
            self.counts += 1
            requests = Requests(line, mode, pipeline, self.counts)
            count = self.each(requests.job, operations)
            requests.clear()
            return count

    def __enter__(self):
        return self

    def __exit__(self, *failure):
        self.running.discard(self)
        self.stack.__exit__(*failure)


# --- Its clients ----------------------------------------------------------------------------------


def expect(name, reply, command):
    if not re.fullmatch(modes.REPLIES[name], reply):
        sys.exit(f"bench: {command} is answered {reply!r}")


class Requests:
    """The operations of a mode on one connection, with keys of its own."""

    def __init__(self, line, mode, pipeline, number=0):
        """What has the same number has the same keys and owners."""
        self.line, self.mode, self.pipeline, self.number = line, mode, pipeline, number
        self.random = random.Random(number)
        self.keys = [self.key(i) for i in range(KEYS)]
        self.holders = {key: self.owner() for key in self.keys}
        self.done = 0
        if mode.held:
            self.exchange(mode.held, [(key, "") for key in self.keys])

    def owner(self):
        return f"{self.random.getrandbits(128):032x}"

    def key(self, i):
        return f"key:{self.number:04}:{i:07}"

    def command(self, text, key, owner):
        """What is expected, and the command as it goes over the wire."""
        expected, *words = text.split(" ")
        places = {modes.KEY: key, modes.OWNER: owner, modes.HOLDER: self.holders.get(key)}
        return expected, wire(*(places.get(word, word) for word in words))

    def exchange(self, text, operations):
        """Sends one command for each operation, all together."""
        self.send([self.command(text, *operation) for operation in operations])

    def send(self, commands):
        self.line.send(b"".join(data for _, data in commands))
        for expected, data in commands:
            expect(expected, self.line.reply(), data)

    def clear(self):
        """Leaves nothing behind."""
        self.send([("number", wire("DEL", *self.keys))])

    def job(self, count):
        """The act that does so many operations."""
        operations = [(self.random.choice(self.keys), self.owner()) for _ in range(count)]
        if self.mode.fresh:
            operations = [(self.key(self.done + i), owner)
                          for i, (_, owner) in enumerate(operations)]
            self.done += count
            self.exchange(self.mode.fresh, operations)
        commands = [self.command(text, *operation)
                    for operation in operations for text in self.mode.commands]

        def act():
            for start in range(0, len(commands), self.pipeline):
                self.send(commands[start:start + self.pipeline])
        return act


def connect(counter, count, pipeline):
    """So many clients come, send PING, as many as the pipeline takes, and go, one by one."""
    for _ in range(count):
        with Line(counter.server) as line:
            line.send(wire("PING") * pipeline)
            for _ in range(pipeline):
                expect("pong", line.reply(), "PING")
        counter.settle()


class Queue:
    """Clients that wait, one behind the other, for what the first of them has. Use it with
    `with`."""

    def __init__(self, counter, way, waiters):
        self.counter, self.way = counter, way
        self.stack = contextlib.ExitStack()
        self.first = 0
        with self.stack:
            self.lines = [self.stack.enter_context(Line(counter.server))
                          for _ in range(waiters + 1)]
            self.owners = [f"{i:032}" for i in range(len(self.lines))]
            if way == "token":
                counter.server.ask("RPUSH", "token", "1")
            for i, line in enumerate(self.lines):
                line.send(self.words(HAND_OVER[way][0], i))
                counter.server.ask("PING")  # comes behind: they stand in the order of numbers
            self.lines[0].reply()
            counter.server.wait_for("the line to form", lambda: counter.server.info(
                "clients", "blocked_clients") == waiters)
            self.stack = self.stack.pop_all()

    def words(self, words, i):
        return wire(*(self.owners[i] if word == "@owner" else word for word in words))

    def pass_on(self):
        """The first releases, the next one has it, and the first goes to the end of the line. One
        thing is done before the next begins, as it is where the server is not slowed down."""
        wait, grant, release = HAND_OVER[self.way]
        was, self.first = self.first, (self.first + 1) % len(self.lines)
        self.lines[was].send(self.words(release, was))
        expect("one", self.lines[was].reply(), release)
        if not (reply := self.lines[self.first].reply()).startswith(grant):
            sys.exit(f"bench: a hand-over ends with {reply!r}")
        self.counter.settle()
        self.lines[was].send(self.words(wait, was))
        self.counter.settle()

    def job(self, count):
        def act():
            for _ in range(count):
                self.pass_on()
        return act

    def come_and_go(self, count):
        """The act in which one enters the line and is told to leave it, so many times."""
        def act():
            with Line(self.counter.server) as coming, Line(self.counter.server) as calling:
                for _ in range(count):
                    coming.send(wire("LOCK.ACQUIRE", "line", "guest", "PX", "600000", "WAIT",
                                     "600000"))
                    self.counter.settle()
                    while calling.ask("LOCK.RELEASE", "line", "guest") != b":1":
                        time.sleep(0.001)  # the machine is slow today
                    if not (reply := coming.reply()).startswith(b"-UNBLOCKED"):
                        sys.exit(f"bench: who leaves the line is told {reply!r}")
                    self.counter.settle()
        return act

    def __enter__(self):
        return self

    def __exit__(self, *failure):
        self.stack.__exit__(*failure)


# --- Many of them ---------------------------------------------------------------------------------


def at_once(part, jobs):
    """What the jobs, by name, give. They run side by side: counts do not depend on who else has the
    machine."""
    left = len(jobs)
    lock = threading.Lock()

    def run_one(name, job):
        nonlocal left
        result = job()
        with lock:
            left -= 1
            common.say(f"{part}: {name}; {left} of {len(jobs)} are left")
        return result

    pool = concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0)))
    try:
        futures = {name: pool.submit(run_one, name, job) for name, job in jobs.items()}
        for future in concurrent.futures.as_completed(futures.values()):
            future.result()  # the first that fails ends all
        return {name: future.result() for name, future in futures.items()}
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for counter in list(Counter.running):  # ends the jobs that are under way
            counter.server.process.kill()
        raise
    finally:
        pool.shutdown()

"""The same pair on PostgreSQL advisory locks and on etcd: an order of magnitude, no more.

They promise other things than we do; the report says which.
"""

import contextlib
import json
import os
import pathlib
import pwd
import random
import secrets
import shutil
import signal
import socket
import statistics
import subprocess
import tempfile
import time

import common
import plot

TITLE = "Other systems"
SECONDS = 40

CLIENTS = 50
ROUNDS = 3
ROUND_S = 2.0
USER = "nobody"  # PostgreSQL does not run as root
FSYNC = ("--appendonly", "yes", "--appendfsync", "always")
SYSTEMS = {
    "turnstile": "Turnstile",
    "set-del": "SET NX PX + DEL",
    "turnstile-fsync": "Turnstile, AOF with fsync for each write",
    "postgresql": "PostgreSQL advisory locks",
    "etcd": "etcd",
}


class Missing(Exception):
    """A system that is not installed or does not start."""


class Daemon:
    """A program in a folder of its own, as a user without rights. Use it with `with`."""

    stop_signal = signal.SIGTERM

    def __init__(self):
        self.stack = contextlib.ExitStack()
        folder = self.stack.enter_context(tempfile.TemporaryDirectory(prefix="turnstile-bench-"))
        self.folder = pathlib.Path(folder)
        self.user = {}
        if os.getuid() == 0:
            who = pwd.getpwnam(USER)
            os.chown(self.folder, who.pw_uid, who.pw_gid)
            self.user = {"user": who.pw_uid, "group": who.pw_gid, "extra_groups": []}
        self.port = common.free_port()
        self.log = self.folder / "log"
        with self.stack:  # what fails on the way is cleaned up
            self.start()
            self.stack = self.stack.pop_all()

    def options(self):
        # Nothing of our environment but what it takes to find programs.
        environment = {"PATH": os.environ["PATH"], "HOME": str(self.folder), "LC_ALL": "C"}
        return {"cwd": self.folder, "env": environment, "stdin": subprocess.DEVNULL,
                "stderr": subprocess.STDOUT, **self.user}

    def spawn(self, *command):
        """Starts it and waits until it takes connections."""
        with open(self.log, "ab") as log:
            process = subprocess.Popen(command, stdout=log, **self.options())
        self.stack.callback(self.stop, process)
        end = time.monotonic() + 20
        while not self.answers():
            if process.poll() is not None or time.monotonic() > end:
                raise Missing(f"{command[0]} does not start: {self.last_words()}")
            time.sleep(0.02)

    def answers(self):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
            return self.ready()
        return False

    def ready(self):
        """Whether it is, given that it takes connections."""
        return True

    def last_words(self):
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "without a word"

    def stop(self, process):
        process.send_signal(self.stop_signal)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def __enter__(self):
        return self

    def __exit__(self, *failure):
        self.stack.__exit__(*failure)


class PostgreSql(Daemon):
    stop_signal = signal.SIGINT  # does not wait for clients

    def start(self):
        # Debian keeps them out of the PATH, one folder for each version.
        places = sorted(pathlib.Path("/usr/lib/postgresql").glob("*/bin/postgres"),
                        key=lambda place: float(place.parts[-3]))
        postgres = str(places[-1]) if places else shutil.which("postgres")
        initdb = postgres and str(pathlib.Path(postgres).with_name("initdb"))
        if not initdb or not shutil.which(initdb):
            raise Missing("not installed (Debian's package postgresql)")
        self.password = self.folder / "password"
        self.password.touch(mode=0o600)
        self.password.write_text(secrets.token_hex(16))
        if self.user:
            os.chown(self.password, self.user["user"], self.user["group"])
        data = str(self.folder / "data")
        with open(self.log, "ab") as log:
            made = subprocess.run(
                [initdb, "--no-sync", "--username", "bench", "--auth", "password", "--pwfile",
                 self.password, "--locale", "C", "--encoding", "UTF8", data], stdout=log,
                **self.options())
        if made.returncode != 0:
            raise Missing(f"{initdb} fails: {self.last_words()}")
        self.version = subprocess.run([postgres, "--version"], stdout=subprocess.PIPE,
                                      text=True).stdout.split()[2]
        self.spawn(postgres, "-D", data, "-p", str(self.port), "-c", "listen_addresses=127.0.0.1",
                   "-c", "unix_socket_directories=", "-c", f"max_connections={CLIENTS + 10}")

    def ready(self):
        return "database system is ready" in self.log.read_text(errors="replace")


class Etcd(Daemon):
    def start(self):
        etcd = shutil.which("etcd")
        if not etcd:
            raise Missing("not installed (Debian's package etcd-server)")
        self.version = subprocess.run([etcd, "--version"], stdout=subprocess.PIPE,
                                      text=True).stdout.split()[2]
        client, peer = (f"http://127.0.0.1:{port}" for port in (self.port, common.free_port()))
        self.spawn(etcd, "--name", "bench", "--data-dir", str(self.folder / "data"),
                   "--listen-client-urls", client, "--advertise-client-urls", client,
                   "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
                   "--initial-cluster", f"bench={peer}", "--log-level", "error")

    def ready(self):
        """A leader is there."""
        with socket.create_connection(("127.0.0.1", self.port), 1) as line:
            line.sendall(b"GET /health HTTP/1.0\r\n\r\n")
            return b'"health":"true"' in line.makefile("rb").read()


def pairs(system, server, seconds, seed):
    arguments = ["--system", system.removesuffix("-fsync"), "--port", server.port]
    arguments += ["--clients", CLIENTS, "--seconds", seconds, "--seed", seed]
    if system == "postgresql":
        arguments += ["--password-file", server.password]
    figures = json.loads(common.measure("others", *arguments))
    return {"rate": figures["pairs"] / figures["seconds"], "p50": figures["p50_ms"],
            "p99": figures["p99_ms"]}


def run(options):
    rounds, seconds = (1, 0.5) if options.quick else (ROUNDS, ROUND_S)
    generator = random.Random(options.seed)
    data = {"clients": CLIENTS, "rounds": rounds, "seconds": seconds, "missing": {}, "version": {}}
    with contextlib.ExitStack() as stack:
        servers = {"turnstile": stack.enter_context(common.Server()),
                   "set-del": stack.enter_context(common.Server(module=None)),
                   "turnstile-fsync": stack.enter_context(common.Server(*FSYNC))}
        for name, kind in {"postgresql": PostgreSql, "etcd": Etcd}.items():
            try:
                servers[name] = stack.enter_context(kind())
                data["version"][name] = servers[name].version
            except Missing as reason:
                data["missing"][name] = str(reason)
                common.say(f"others: {SYSTEMS[name]}: {reason}")
        taken = {name: [] for name in servers}
        for number in range(rounds):
            common.say(f"others: round {number + 1} of {rounds}")
            for name in generator.sample(list(servers), len(servers)):
                if isinstance(servers[name], common.Server):
                    servers[name].ask("FLUSHALL", "SYNC")
                    servers[name].populate()
                seed = generator.randrange(1, 2**31)
                taken[name].append(pairs(name, servers[name], seconds, seed))
    data["systems"] = {name: summary(taken, name) for name in servers}
    return data


def summary(taken, name):
    """Medians over the rounds; the rate also over ours of the same round."""
    median = {figure: statistics.median(each[figure] for each in taken[name])
              for figure in ("rate", "p50", "p99")}
    against = [one["rate"] / ours["rate"] for one, ours in zip(taken[name], taken["turnstile"])]
    return {**median, "ratio": common.spread(against)}


def goals(_):
    return []


DIFFERENCES = """What differs, so that these figures are no race:

- **Turnstile** and **SET NX PX + DEL** answer from memory; without an AOF a crash forgets them.
  The row with fsync answers when the lock is on the disk, one fsync for all that came together.
  Both have a lease; only Turnstile checks the owner and gives a fencing token.
- **PostgreSQL**'s advisory locks live in memory too: nothing is written to the disk, and a restart
  forgets them. There is no lease: a lock ends with its session, so a client that hangs holds it for
  as long as its connection lives. No owner but the session, no token, names are 64-bit numbers.
  Each client has a process of the server. The statements are prepared.
- **etcd** answers when the change is on the disk of a majority. Here it is one node, so there is no
  network in between. A lock is a key under a lease that each client was granted once; its revision
  can serve as a fencing token. The pair is two transactions over HTTP and JSON; gRPC, which etcd's
  own clients speak, was not measured.
"""


def report(data):
    rows, bars = [], []
    for name, title in SYSTEMS.items():
        if reason := data["missing"].get(name):
            rows.append([title, f"not measured: {reason}", "", "", ""])
            continue
        figures = data["systems"][name]
        if version := data["version"].get(name):
            title = f"{title}, {version}"
        rows.append([title, f"{figures['rate']:,.0f}", f"{figures['ratio']['median']:.3g}",
                     f"{figures['p50']:.2f}", f"{figures['p99']:.2f}"])
        bars.append((title, figures["rate"], None, None))
    header = ["system", "pairs/s", "ratio to Turnstile", "median, ms", "99th percentile, ms"]
    markdown = (
        f"Acquire and release of free locks with random names, {data['clients']} clients, each "
        "with one connection over loopback and one request on its way; one driver for all. SET NX "
        "PX + DEL runs in a server without any module; the servers that Turnstile is compared with "
        f"it on have {common.OTHERS:,} keys of others. The "
        "systems share the machine with the driver; the time is that of a pair, two requests. "
        f"Medians of {data['rounds']} rounds of {data['seconds']:g} s; ratios within a round. What "
        "waits for a disk waits for the one of the temporary folder.\n\n"
        f"{common.table(header, rows)}\n{DIFFERENCES}\n"
        "![Pairs per second on different systems](others.svg)\n")
    svg = plot.bars(f"Acquire and release of free locks, {data['clients']} clients", bars,
                    "pairs per second", log=True)
    return common.Report(markdown, {"others.svg": svg})

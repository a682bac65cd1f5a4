"""Runs steps on a real server and on the model, and compares.

A step is a tuple:
    ("call", connection, args)            a command; an argument ("token", ...) or ("floor", ...)
                                          is looked up in the model when the step is run
    ("multi", connection, [args, ...])    the same in a transaction
    ("eval", connection, args)            the same in a Lua script
    ("close", connection)                 the connection closes, and another one takes its number
    ("unblock", connection, how)          CLIENT UNBLOCK
    ("advance", microseconds)             wall clock and steady clock move
"""

import select
import time

import model as spec
from server import Connection, Error, encode

CONNECTIONS = 12
NAMES = [["x", "y", "z", "w"], ["x", "y"]]  # in each database
KEYS = [(db, name) for db, names in enumerate(NAMES) for name in names]
SCRIPT = "return redis.call(unpack(ARGV))"
START_WALL_US = 1_800_000_000_000_000
START_STEADY_US = 5_000_000_000


class Difference(Exception):
    """The server did something else than the model."""

    @property
    def kind(self):
        """The same for differences of one sort: what remains without numbers and names."""
        words = str(self).split("\n")[0].split(" ")
        return " ".join(word for word in words if word.isalpha() or word[:1] == "-")


def observation():
    parts = []
    for db, names in enumerate(NAMES):
        parts.append(encode(("SELECT", db)))
        for name in names:
            parts.append(encode(("LOCK.INFO", name)))
            parts.append(encode(("PTTL", name)))
    return b"".join(parts), len(parts)


OBSERVE, OBSERVED = observation()
PING = encode(("PING",))

HOLDER = [b"token", b"lease-left-ms", b"held-ms", b"count", b"session", b"linger-ms"]


def same(expected, actual):
    if isinstance(expected, spec.Error):
        return isinstance(actual, Error) and actual.code in expected.codes
    if isinstance(expected, list):
        return (isinstance(actual, list) and len(actual) == len(expected)
                and all(map(same, expected, actual)))
    return expected == actual and not isinstance(actual, Error)


class Driver:
    """One server, its connections, and the model of it."""

    def __init__(self, server, margin_ms=30000, broken=None, patience=2.0):
        self.server = server
        self.margin_ms = margin_ms
        self.broken = broken
        self.patience = patience  # how long, in real seconds, a reply that is due may take
        self.wall = START_WALL_US
        self.steady = START_STEADY_US
        self.control = Connection(server.port)
        self.model = spec.Model(self.wall, margin_ms, broken=broken)
        self.connections = {}
        self.numbers = {}  # (id, address) as LOCK.INFO shows them -> number
        self.steps = 0
        self.retries = 0
        self.trace = None  # a list, to keep what was said
        # From version 8 on, Redis may remove a key in the last millisecond of its TTL already.
        version = self.call("INFO", "server").split(b"\nredis_version:")[1]
        self.expires_early = int(version.split(b".")[0]) >= 8
        for number in range(CONNECTIONS):
            self.open(number)

    def plain_info(self, reply):
        """A LOCK.INFO reply in the form that the model has it."""
        if not isinstance(reply, dict):
            return reply

        def connection(fields):
            client = fields[b"client-id"], fields[b"client-addr"]
            return None if client == (None, None) else self.numbers.get(client, client)

        holders = [(holder[b"owner"].decode(), *[holder[field] for field in HOLDER],
                    connection(holder)) for holder in reply[b"holders"]]
        # FLOOR can make two tokens equal: their order is nowhere said.
        holders.sort(key=lambda holder: (holder[1] or 0, holder[0]))
        waiters = [(waiter[b"owner"].decode(), waiter[b"mode"].decode(), waiter[b"waited-ms"],
                    waiter[b"left-ms"], connection(waiter)) for waiter in reply[b"waiters"]]
        return {"mode": reply[b"mode"].decode(), "holding": reply[b"holding"], "holders": holders,
                "linger-left-ms": reply[b"linger-left-ms"], "waiting": reply[b"waiting"],
                "waiters": waiters, "grace-left-ms": reply[b"grace-left-ms"]}

    def open(self, number):
        """Every fourth connection is in the other database, every third speaks RESP2."""
        db = 1 if number % 4 == 3 else 0
        connection = Connection(self.server.port, resp=2 if number % 3 == 2 else 3, db=db)
        self.connections[number] = connection
        self.numbers[connection.id, b"%s:%d" % connection.address] = number
        self.model.connect(number, db)

    def reset(self):
        """A clean server and a model that knows its token clock."""
        for connection in self.connections.values():
            connection.close()
        self.call("FLUSHALL")
        deadline = time.monotonic() + 10
        while True:
            clients = self.call("CLIENT", "LIST").count(b"\n")
            if clients == 1:
                break
            if time.monotonic() > deadline:
                raise RuntimeError("connections do not close")
        token = self.call("LOCK.ACQUIRE", "probe", "probe", "PX", 1000)
        self.call("FLUSHALL")
        self.model = spec.Model(START_WALL_US, self.margin_ms, broken=self.broken)
        self.model.now_us = self.wall
        self.model.last_token = token
        self.connections = {}
        for number in range(CONNECTIONS):
            self.open(number)

    def call(self, *args):
        return self.control.call(*args)

    def note(self, *words):
        if self.trace is not None:
            self.trace.append(words)

    # --- One step -----------------------------------------------------------------------------

    def resolve(self, args):
        """Fills in what is known only now."""
        resolved = []
        for arg in args:
            if isinstance(arg, tuple) and arg[0] == "token":
                _, key, index, added = arg
                entry = self.model.entries.get(key)
                holds = entry.holds if isinstance(entry, spec.Lock) else []
                token = holds[index % len(holds)].token if holds else self.model.last_token
                arg = str(token + added)
            elif isinstance(arg, tuple) and arg[0] == "floor":
                _, base, added = arg
                margin = self.margin_ms * 1000
                arg = str(added + {"last": self.model.last_token,
                                   "wall": self.model.now_us,
                                   "half": self.model.now_us + margin // 2,
                                   "start": START_WALL_US + margin * 3 // 2}[base])
            resolved.append(arg)
        return resolved

    def run(self, step):
        """Runs one step; Difference if the server disagrees."""
        kind = step[0]
        if kind == "advance":
            self.advance(step[1])
            return
        number = step[1]
        blocked = self.model.is_blocked(number)
        if kind in ("call", "multi", "eval") and blocked:
            return  # where a step before this one was left out
        getattr(self, "run_" + kind)(*step[1:])

    def run_call(self, number, args):
        args = self.resolve(args)
        self.note("call", number, " ".join(args))
        reply = self.model.command(number, args)
        self.model.settle()
        self.connections[number].send(encode(args))
        self.compare(number, reply)

    def run_eval(self, number, args):
        args = self.resolve(args)
        self.note("call", number, f"EVAL '{SCRIPT}' 0 " + " ".join(args))
        reply = self.model.command(number, args, one_try=True, no_connection=True)
        self.model.settle()
        self.connections[number].send(encode(("EVAL", SCRIPT, "0", *args)))
        self.compare(number, reply)

    def run_multi(self, number, commands):
        replies, sent = [], [encode(("MULTI",))]
        for args in commands:
            args = self.resolve(args)
            self.note("call", number, "MULTI … " + " ".join(args))
            replies.append(self.model.command(number, args, one_try=True))
            sent.append(encode(args))
        self.model.settle()
        self.connections[number].send(b"".join(sent) + encode(("EXEC",)))
        self.compare(number, replies, before=1 + len(commands))

    def run_close(self, number):
        self.note("close", number)
        self.model.close(number)
        self.connections[number].close()
        del self.connections[number]
        self.compare(number, spec.BLOCKED)
        self.open(number)

    def run_unblock(self, number, how):
        self.note("call", "control", f"CLIENT UNBLOCK <id of {number}> {how}")
        expected = self.model.unblock(number, how)
        reply = self.call("CLIENT", "UNBLOCK", self.connections[number].id, how)
        if reply != expected:
            raise Difference(f"CLIENT UNBLOCK: {reply} instead of {expected}")
        self.compare(number, spec.BLOCKED)

    def advance(self, microseconds):
        """Stops at every moment at which something happens by itself."""
        target = self.wall + microseconds
        while self.expires_early and target // 1000 in self.model.last_milliseconds():
            target += 1000
        while True:
            moments = [moment for moment in self.model.moments() if moment[0] * 1000 <= target]
            if not moments:
                break
            first = min(moment[0] for moment in moments)
            here = [waiter for moment, waiter in moments if moment == first]
            waiters = [waiter for waiter in here if waiter is not None]
            # Which of two time-outs comes first in one millisecond, or of a time-out and the end of
            # a lease, is nowhere said.
            if waiters and len(here) > 1:
                for waiter in waiters if len(waiters) < len(here) else waiters[1:]:
                    if waiter in self.model.waiting:
                        self.run_unblock(waiter.connection, "TIMEOUT")
                continue
            if self.expires_early and first in self.model.last_milliseconds():
                raise spec.Unclear
            self.move(max(first * 1000, self.wall))
        if self.wall < target:
            self.move(target)

    def move(self, wall):
        self.note("advance", wall - self.wall)
        self.steady += wall - self.wall
        self.wall = wall
        self.model.advance(wall)
        self.server.set_clock(self.wall, self.steady)
        self.compare(None, spec.BLOCKED)

    # --- Comparing ----------------------------------------------------------------------------

    def compare(self, number, reply, before=0):
        """Waits until all that the model expects has happened, and nothing else."""
        self.steps += 1
        expected = {}
        if reply is not spec.BLOCKED:
            expected[number] = [(None, True)] * before + [(reply, False)]
        for other, later in self.model.replies:
            expected.setdefault(other, []).append((later, False))
        self.model.replies = []
        arrived = {}
        deadline = None
        # The reply itself shows that the command was run; without one, a round trip does.
        if number in expected and number in self.connections:
            poll = select.poll()
            poll.register(self.connections[number].socket, select.POLLIN)
            poll.poll(int(self.patience * 1000))
        else:
            self.control.send(PING)
            self.control.read(1)
        while True:
            try:
                self.control.send(OBSERVE)
                observed = self.control.read(OBSERVED)
                for other, connection in self.connections.items():
                    if connection_ready(connection):
                        arrived.setdefault(other, []).extend(connection.available())
            except ConnectionError:
                raise Difference("the server is gone") from None
            wrong = self.wrong(expected, arrived, observed)
            if wrong is None:
                self.note("reply", number, None if reply is spec.BLOCKED else reply, arrived)
                return
            if deadline is None:
                deadline = time.monotonic() + self.patience
                self.retries += 1
            elif time.monotonic() > deadline:
                self.note("reply", number, None, arrived)
                raise Difference(wrong)

    def wrong(self, expected, arrived, observed):
        for number, replies in arrived.items():
            wanted = expected.get(number, [])
            for (reply, any_reply), got in zip(wanted, replies):
                if not any_reply and not same(reply, got):
                    return f"connection {number} is answered {got}, the model says {show(reply)}"
            if len(replies) > len(wanted):
                return (f"connection {number} is answered {replies[len(wanted)]}, "
                        "the model says nothing")
        for number, wanted in expected.items():
            missing = wanted[len(arrived.get(number, [])):]
            if missing:
                return f"connection {number} is not answered, the model says {show(missing[0][0])}"
        at = 0
        for db, names in enumerate(NAMES):
            at += 1
            for name in names:
                info, ttl = observed[at], observed[at + 1]
                at += 2
                entry = self.model.info((db, name))
                shown = self.plain_info(info)
                if not same(entry, shown):
                    return (f"LOCK.INFO {name} (database {db}):\n  server {shown}\n"
                            f"  model  {entry}")
                if ttl != self.model.ttl((db, name)):
                    return (f"PTTL {name} (database {db}): {ttl}, the model says "
                            f"{self.model.ttl((db, name))}")
        return None


def connection_ready(connection):
    ready, _, _ = select.select([connection.socket], [], [], 0)
    return bool(ready)


def show(reply):
    return "nothing" if reply is spec.BLOCKED else repr(reply)

"""Runs steps on a real server and on the model, and compares.

A step is a tuple:
    ("call", connection, args)            a command; an argument ("token", ...) or ("floor", ...)
                                          is looked up in the model when the step is run
    ("multi", connection, [args, ...])    the same in a transaction
    ("eval", connection, args)            the same in a Lua script
    ("close", connection)                 the connection closes, and another one takes its number
    ("unblock", connection, how)          CLIENT UNBLOCK
    ("advance", microseconds)             wall clock and steady clock move
    ("subscribe", channel, yes)           the subscriber subscribes to a channel, or no longer does
    ("config", setting, value)            CONFIG SET turnstile.<setting>
"""

import select
import time

import model as spec
from server import Connection, Error, Subscriber, encode

CONNECTIONS = 12
NAMES = [["x", "y", "z", "w"], ["x", "y"]]  # in each database
KEYS = [(db, name) for db, names in enumerate(NAMES) for name in names]
CHANNELS = ["c0", "c1", "c2", "p0"]
SUBSCRIBED = ["c0", "c1"]  # at the beginning
PATTERN = "p*"  # of a second subscriber, always
SETTINGS = {"max-waiters": spec.MAX_WAITERS, "max-queued": spec.MAX_QUEUED,
            "max-waiters-per-user": 0}
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
    parts.append(encode(("INFO", "turnstile")))
    return b"".join(parts), len(parts)


OBSERVE, OBSERVED = observation()
PING = encode(("PING",))

HOLDER = [b"token", b"lease-left-ms", b"held-ms", b"count", b"session", b"linger-ms", b"weight"]


def same(expected, actual):
    if isinstance(expected, spec.Error):
        return isinstance(actual, Error) and actual.code in expected.codes
    if isinstance(expected, list):
        return (isinstance(actual, list) and len(actual) == len(expected)
                and all(map(same, expected, actual)))
    return expected == actual and not isinstance(actual, Error)


def is_message(expected, got):
    """Whether this is what was published: (channel, text)."""
    channel, text = got
    if channel.decode() != expected.channel:
        return False
    if not expected.begins:
        return text.decode() in (expected.text, expected.other)
    # "what a blocked client would be answered, without the key"
    return (text.startswith(expected.text.encode())
            and not any(f'"{name}"'.encode() in text for _, name in KEYS))


def wrong_messages(expected, arrived):
    """Compares the messages of one step. Their order is nowhere said, but for grants: they come in
    the order of the line."""
    expected = list(expected)
    for got in arrived:
        fits = [message for message in expected if is_message(message, got)]
        if not fits:
            return f"a message is published that the model does not expect: {got}"
        expected.remove(fits[0])
    return f"no message, the model says {expected[0]}" if expected else None


def read_counts(info, fields):
    """These fields of INFO turnstile."""
    lines = dict(line.split(":", 1) for line in info.decode().split("\r\n") if ":" in line)
    return {field: int(lines["turnstile_" + field]) for field in fields}


def grants(texts):
    return [text for text in texts if text.split()[1:2] == [b"granted"]]


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
        self.changed_settings = set()
        self.connections = {}
        self.numbers = {}  # (id, address) as LOCK.INFO shows them -> number
        self.steps = 0
        self.retries = 0
        self.trace = None  # a list, to keep what was said
        # From version 8 on, Redis may remove a key in the last millisecond of its TTL already.
        version = self.call("INFO", "server").split(b"\nredis_version:")[1]
        self.expires_early = int(version.split(b".")[0]) >= 8
        self.begin(spec.Model(self.wall, margin_ms, broken=broken))

    def begin(self, model):
        """A new model, and new connections."""
        self.model = model
        # Counters go on, of all else there is nothing yet.
        self.counted_before = read_counts(self.call("INFO", "turnstile"), model.counts())
        self.subscriptions = set()
        self.subscriber = Subscriber(self.server.port)
        self.by_pattern = Subscriber(self.server.port)
        self.by_pattern.subscribe("PSUBSCRIBE", PATTERN)
        for channel in SUBSCRIBED:
            self.subscribe(channel, True)
        model.subscribed = lambda channel: (channel in self.subscriptions
                                            or channel.startswith(PATTERN[:-1]))
        self.connections = {}
        for number in range(CONNECTIONS):
            self.open(number)

    def plain_info(self, reply):
        """A LOCK.INFO reply in the form that the model has it."""
        if not isinstance(reply, dict):
            return reply

        def connection(fields):
            client = fields[b"client-id"], fields[b"client-addr"]
            return None if client == (None, None) else self.numbers.get(client, client)

        def tag(fields):
            return None if fields[b"tag"] is None else fields[b"tag"].decode()

        holders = [(holder[b"owner"].decode(), *[holder[field] for field in HOLDER], tag(holder),
                    holder[b"max-hold-left-ms"], connection(holder))
                   for holder in reply[b"holders"]]
        # FLOOR can make two tokens equal: their order is nowhere said.
        holders.sort(key=lambda holder: (holder[1] or 0, holder[0]))
        waiters = [(waiter[b"owner"].decode(), waiter[b"mode"].decode(), waiter[b"waited-ms"],
                    waiter[b"left-ms"], tag(waiter), connection(waiter))
                   for waiter in reply[b"waiters"]]
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
        for connection in [*self.connections.values(), self.subscriber, self.by_pattern]:
            connection.close()
        for setting in self.changed_settings:
            self.call("CONFIG", "SET", f"turnstile.{setting}", SETTINGS[setting])
        self.changed_settings = set()
        self.call("FLUSHALL")
        deadline = time.monotonic() + 10
        while not self.is_clean():
            if time.monotonic() > deadline:
                raise RuntimeError("connections do not close, or waits do not end")
        token = self.call("LOCK.ACQUIRE", "probe", "probe", "PX", 1000)
        self.call("FLUSHALL")
        model = spec.Model(START_WALL_US, self.margin_ms, broken=self.broken)
        model.now_us = self.wall
        model.last_token = token
        self.begin(model)

    def is_clean(self):
        """Whether nobody is connected and nobody waits. Waits with NOTIFY go on without
        connections, but end when the locks are free and nobody receives that they are granted."""
        if self.call("CLIENT", "LIST").count(b"\n") > 1:
            return False
        self.call("FLUSHALL")
        for db in range(len(NAMES)):
            self.call("SELECT", db)
            if self.call("LOCK.TOP"):
                return False
        return True

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
        if kind in ("call", "multi", "eval") and self.model.is_blocked(step[1]):
            return  # where a step before this one was left out
        getattr(self, "run_" + kind)(*step[1:])

    def settle(self):
        self.model.settle()
        if self.expires_early and self.model.now in self.model.last_milliseconds():
            raise spec.Unclear  # a lease that MAXHOLD let end now: the key may be gone already

    def run_call(self, number, args):
        args = self.resolve(args)
        self.note("call", number, " ".join(args))
        reply = self.model.command(number, args)
        self.settle()
        self.connections[number].send(encode(args))
        self.compare(number, reply)

    def run_eval(self, number, args):
        args = self.resolve(args)
        self.note("call", number, f"EVAL '{SCRIPT}' 0 " + " ".join(args))
        reply = self.model.command(number, args, one_try=True, no_connection=True)
        self.settle()
        self.connections[number].send(encode(("EVAL", SCRIPT, "0", *args)))
        self.compare(number, reply)

    def run_multi(self, number, commands):
        replies, sent = [], [encode(("MULTI",))]
        for args in commands:
            args = self.resolve(args)
            self.note("call", number, "MULTI … " + " ".join(args))
            replies.append(self.model.command(number, args, one_try=True))
            sent.append(encode(args))
        self.settle()
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

    def run_subscribe(self, channel, yes):
        self.note("call", "sub", f"{'' if yes else 'UN'}SUBSCRIBE {channel}")
        self.subscribe(channel, yes)

    def subscribe(self, channel, yes):
        self.subscriber.subscribe("SUBSCRIBE" if yes else "UNSUBSCRIBE", channel)
        self.subscriptions.discard(channel)
        if yes:
            self.subscriptions.add(channel)

    def run_config(self, setting, value):
        self.note("call", "control", f"CONFIG SET turnstile.{setting} {value}")
        reply = self.call("CONFIG", "SET", f"turnstile.{setting}", value)
        if reply != b"OK":
            raise Difference(f"CONFIG SET turnstile.{setting}: {reply}")
        self.changed_settings.add(setting)
        setattr(self.model, setting.replace("-", "_"), value)

    def end_wait(self, waiter):
        """Ends a wait before its time-out: by CLIENT UNBLOCK or, with NOTIFY, by LOCK.RELEASE."""
        if waiter.blocks_client():
            self.run_unblock(waiter.connection, "TIMEOUT")
            return
        (db, name), owner = waiter.keys[0], waiter.owner
        self.note("call", "control", f"LOCK.RELEASE {name} {owner}")
        self.model.connect("control", db)
        expected = self.model.command("control", ("LOCK.RELEASE", name, owner))
        self.settle()
        self.call("SELECT", db)
        reply = self.call("LOCK.RELEASE", name, owner)
        if not same(expected, reply):
            raise Difference(f"LOCK.RELEASE: {reply} instead of {expected}")
        self.compare(None, spec.BLOCKED)

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
                        self.end_wait(waiter)
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
        published, self.model.messages = self.model.messages, []
        arrived, received = {}, ([], [])
        deadline = None
        # The reply itself shows that the command was run; without one, a round trip does.
        if number in expected and number in self.connections:
            poll = select.poll()
            poll.register(self.connections[number].socket, select.POLLIN)
            poll.poll(int(self.patience * 1000))
        else:
            self.control.send(PING)
            self.control.read(1)
        self.await_messages(published, received)
        while True:
            try:
                self.control.send(OBSERVE)
                observed = self.control.read(OBSERVED)
                for other, connection in self.connections.items():
                    if connection_ready(connection):
                        arrived.setdefault(other, []).extend(connection.available())
            except ConnectionError:
                raise Difference("the server is gone") from None
            self.receive(received)
            wrong = self.wrong(expected, arrived, observed, published, received)
            if wrong is None:
                self.note("reply", arrived, received)
                return
            if deadline is None:
                deadline = time.monotonic() + self.patience
                self.retries += 1
            elif time.monotonic() > deadline:
                self.note("reply", arrived, received)
                raise Difference(wrong)

    def receive(self, received):
        """Adds what has been published."""
        try:
            received[0].extend(self.subscriber.messages())
            received[1].extend(self.by_pattern.messages())
        except ConnectionError:
            raise Difference("the server is gone") from None

    def await_messages(self, published, received):
        """Messages must come by themselves, not only when somebody looks at the key."""
        deadline = time.monotonic() + self.patience
        late = False
        while published:
            self.receive(received)
            wrong = self.wrong_published(published, received)
            if wrong is None and late:
                raise spec.Unclear
            if wrong is None:
                return
            if time.monotonic() <= deadline:
                continue
            if late or not any(" expired " in message.text for message in published):
                self.note("reply", {}, received)
                raise Difference(wrong)
            # "within milliseconds of the end": where a server has two timers for the same
            # microsecond, it looks at the second one a millisecond later.
            self.wall += 1000
            self.steady += 1000
            self.server.set_clock(self.wall, self.steady)
            deadline, late = time.monotonic() + self.patience, True

    def wrong_published(self, published, received):
        """What is wrong about the messages of the two subscribers."""
        direct, by_pattern = received
        for messages, arrived in [
                ([m for m in published if m.channel in self.subscriptions], direct),
                ([m for m in published if m.channel.startswith(PATTERN[:-1])], by_pattern)]:
            wrong = wrong_messages(messages, arrived)
            if wrong is None:
                wanted = grants(message.text.encode() for message in messages)
                got = grants(text for _, text in arrived)
                if wanted != got:
                    wrong = f"the grants are published in the order {got}, the model says {wanted}"
            if wrong is not None:
                return wrong
        return None

    def wrong(self, expected, arrived, observed, published, received):
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
        wrong = self.wrong_published(published, received)
        if wrong is not None:
            return wrong
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
        counts = self.model.counts()
        for field, shown in read_counts(observed[at], counts).items():
            wanted = self.counted_before.get(field, 0) + counts[field]
            if shown != wanted:
                return f"{field} in INFO turnstile: {shown}, the model says {wanted}"
        return None


def connection_ready(connection):
    ready, _, _ = select.select([connection.socket], [], [], 0)
    return bool(ready)


def show(reply):
    return "nothing" if reply is spec.BLOCKED else repr(reply)

"""Many clients that use locks in every way: a part of tests/soak/run, in a process of its own.

    mix.py PORT CLIENTS BASE

Each client runs one scenario after the other: a generator that yields what to do next and is given
the reply. Any reply that a scenario does not expect is an error. Tokens must be above BASE, and
those of a contended lock above all earlier ones of that lock.

Prints a line of JSON every second. Ends when standard input does: the scenarios that have begun
are finished first.
"""

import collections
import heapq
import itertools
import json
import os
import pathlib
import random
import select
import socket
import struct
import sys
import time
import uuid

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "spec"))
sys.dont_write_bytecode = True

from server import Error, Incomplete, encode, parse  # noqa: E402

LEASE = 120_000  # of holds that must not end by themselves, however busy the machine is
LONGEST_WAIT_MS = 3000
PATIENCE_S = 120  # beyond any wait; longer means that there is no reply
REPORT_S = 1.0
THINK_S = 0.04  # the mean pause between two scenarios of a client
SHARE_OF_NEW_CONNECTIONS = 0.05  # after a scenario
DATA_KEYS = 10_000  # of others; tests/soak/run creates them
COUNTERS = 10
EARLY_MS = 5  # two clocks are compared
SHOWN_ERRORS = 10

DROP = object()  # close the connection and open another one


class Sleep:
    def __init__(self, seconds):
        self.seconds = seconds


class Message:
    """The next message for a request with NOTIFY."""

    def __init__(self, name):
        self.name = name


class Cast:
    """A command whose reply nobody waits for: the connection is dropped next."""

    def __init__(self, *command):
        self.command = command


class Unexpected(Exception):
    pass


def data_value(index):
    """The size depends on the key only, so that the data neither grows nor shrinks."""
    return b"x" * (16 + index % 200)


def need(condition, what, reply):
    if not condition:
        raise Unexpected(f"expected {what}, got {reply!r}")


def as_map(reply):
    """A map in RESP3, a flat array in RESP2."""
    return reply if isinstance(reply, dict) else dict(zip(reply[::2], reply[1::2]))


class Scenarios:
    """What clients do. Each method but the helpers is a scenario."""

    def __init__(self, client):
        self.client = client
        self.crowd = client.crowd
        self.random = self.crowd.random
        self.weights = {
            self.exclusive: 20, self.shared: 15, self.limit: 15, self.reentrant: 6,
            self.upgrade: 6, self.also: 10, self.notify: 15, self.notify_cancel: 3,
            self.notify_lost: 2, self.max_hold: 4, self.max_line: 6, self.tag: 4,
            self.session: 5, self.linger: 4, self.fence: 10, self.floor: 2, self.script: 4,
            self.plain: 4, self.others: 25, self.look: 2, self.die_holding: 3,
            self.die_waiting: 2, self.die_queued: 1,
        }

    def choose(self):
        kinds = list(self.weights)
        return self.random.choices(kinds, self.weights.values())[0]

    # Names and numbers

    def hot(self, kind, count=8):
        return f"hot:{kind}:{self.random.randrange(count)}"

    def own_key(self):
        return f"own:{self.crowd.name}:{next(self.crowd.numbers)}"

    def owner(self):
        return uuid.UUID(int=self.random.getrandbits(128)).hex

    def wait(self):
        return self.random.choice((50, 300, 1000, LONGEST_WAIT_MS))

    def message_name(self):
        name = f"n{next(self.crowd.numbers)}"
        self.crowd.messages[name] = collections.deque()
        self.client.names.append(name)
        return name

    def work(self):
        return Sleep(self.random.choice((0, 0.001, 0.005, 0.02)))

    # Steps that scenarios have in common

    def expect(self, wanted, *command):
        reply = yield command
        need(reply == wanted, wanted, reply)

    def acquire(self, keys, owner, *options):
        """A new hold by a new owner: its token, or None, or 0 with NOTIFY. `keys` is one key or
        several."""
        keys = [keys] if isinstance(keys, str) else keys
        before = max(map(self.crowd.highest_of, keys))
        also = ("ALSO", len(keys) - 1, *keys[1:]) if len(keys) > 1 else ()
        began = time.monotonic()
        reply = yield ("LOCK.ACQUIRE", keys[0], owner, *options, *also)
        if reply is None and "WAIT" in options and "MAXLINE" not in options:
            wait = options[options.index("WAIT") + 1]
            waited = (time.monotonic() - began) * 1000
            need(waited >= wait - EARLY_MS, f"null after {wait} ms", f"null after {waited:.0f} ms")
        if reply is None or reply == 0 and "NOTIFY" in options:
            return reply
        self.new_token(keys, reply, before)
        return reply

    def new_token(self, keys, token, before):
        need(isinstance(token, int) and token > before, f"a token above {before}", token)
        self.crowd.note(keys, token)

    # Modes

    def exclusive(self):
        key, owner = self.hot("lock"), self.owner()
        token = yield from self.acquire(key, owner, "PX", LEASE, "WAIT", self.wait())
        if token is None:
            return
        yield self.work()
        yield from self.expect(1, "LOCK.TOUCH", key, owner, "PX", LEASE)
        yield from self.expect(token, "LOCK.FENCE", key)
        yield from self.expect(token, "LOCK.ACQUIRE", key, owner, "PX", LEASE)
        yield from self.expect(1, "LOCK.RELEASE", key, owner)
        yield from self.expect(0, "LOCK.TOUCH", key, owner, "PX", LEASE)

    def shared(self):
        key, owner = self.hot("lock"), self.owner()
        token = yield from self.acquire(key, owner, "PX", LEASE, "SHARED", "WAIT", self.wait())
        if token is None:
            return
        yield self.work()
        yield from self.expect(1, "LOCK.FENCE", key, token)
        yield from self.expect(1, "LOCK.RELEASE", key, owner)

    def upgrade(self):
        key, owner = self.hot("lock"), self.owner()
        token = yield from self.acquire(key, owner, "PX", LEASE, "SHARED", "WAIT", self.wait())
        if token is None:
            return
        before = self.crowd.highest_of(key)
        reply = yield ("LOCK.ACQUIRE", key, owner, "PX", LEASE, "WAIT", self.wait())
        if reply is not None and not (isinstance(reply, Error) and reply.code == "DEADLOCK"):
            self.new_token([key], reply, before)
            yield self.work()
            yield from self.expect(reply, "LOCK.ACQUIRE", key, owner, "PX", LEASE, "SHARED")
        yield from self.expect(1, "LOCK.RELEASE", key, owner)

    def limit(self):
        key, owner = self.hot("limit", 3), self.owner()
        weight = self.random.choice((1, 1, 2, 4))
        token = yield from self.acquire(key, owner, "PX", LEASE, "LIMIT", 8, "WEIGHT", weight,
                                        "WAIT", self.wait())
        if token is None:
            return
        yield self.work()
        yield from self.expect(1, "LOCK.TOUCH", key, owner, "PX", LEASE)
        yield from self.expect(1, "LOCK.RELEASE", key, owner)

    def reentrant(self):
        key, owner = self.hot("lock"), self.owner()
        token = yield from self.acquire(key, owner, "PX", LEASE, "REENTRANT", "WAIT", self.wait())
        if token is None:
            return
        yield from self.expect(token, "LOCK.ACQUIRE", key, owner, "PX", LEASE, "REENTRANT")
        yield self.work()
        yield from self.expect(1, "LOCK.RELEASE", key, owner)
        yield from self.expect(1, "LOCK.FENCE", key, token)
        yield from self.expect(1, "LOCK.RELEASE", key, owner)
        yield from self.expect(0, "LOCK.RELEASE", key, owner)

    # Options

    def also(self):
        owner = self.owner()
        keys = self.random.sample([f"hot:set:{i}" for i in range(8)], 3)
        mode = self.random.choice(((), ("SHARED",), ("LIMIT", 4)))
        token = yield from self.acquire(keys, owner, "PX", LEASE, "WAIT", self.wait(), *mode)
        if token is None:
            return
        yield self.work()
        rest = ("ALSO", 2, *keys[1:])
        yield from self.expect(3, "LOCK.TOUCH", keys[0], owner, "PX", LEASE, *rest)
        yield from self.expect(3, "LOCK.RELEASE", keys[0], owner, *rest)

    def max_hold(self):
        key, owner = self.own_key(), self.owner()
        token = yield from self.acquire(key, owner, "PX", 50, "MAXHOLD", 50)
        reply = yield ("LOCK.TOUCH", key, owner, "PX", LEASE)
        need(reply in (0, 1), "0 or 1", reply)
        yield Sleep(0.08)
        yield from self.expect(0, "LOCK.TOUCH", key, owner, "PX", LEASE)
        yield from self.expect(0, "LOCK.FENCE", key, token)

    def max_line(self):
        key, owner = self.hot("lock"), self.owner()
        token = yield from self.acquire(key, owner, "PX", LEASE, "WAIT", self.wait(), "MAXLINE", 3)
        if token is not None:
            yield from self.expect(1, "LOCK.RELEASE", key, owner)

    def tag(self):
        key, owner = self.own_key(), self.owner()
        text = f"host-{self.random.randrange(1000)} of the soak test"
        yield from self.acquire(key, owner, "PX", LEASE, "TAG", text, "MAXHOLD", 2 * LEASE)
        info = yield ("LOCK.INFO", key)
        need(isinstance(info, (dict, list)), "a map", info)
        holders = as_map(info)[b"holders"]
        need(len(holders) == 1 and as_map(holders[0])[b"tag"] == text.encode(), text, info)
        yield from self.expect(1, "LOCK.RELEASE", key, owner)

    def session(self):
        key, owner = self.own_key(), self.owner()
        yield from self.acquire(key, owner, "PX", LEASE, "SESSION")
        yield DROP
        # Not null: the hold ends with its connection, long before its lease.
        other = self.owner()
        token = yield from self.acquire(key, other, "PX", LEASE, "WAIT", LEASE // 2)
        need(token is not None, "a token after the end of a session", token)
        yield from self.expect(1, "LOCK.RELEASE", key, other)

    def linger(self):
        key, owner, other = self.own_key(), self.owner(), self.owner()
        yield from self.acquire(key, owner, "PX", 20, "LINGER", 50)
        yield Sleep(0.03)
        yield from self.expect(0, "LOCK.TOUCH", key, owner, "PX", LEASE)
        token = yield from self.acquire(key, other, "PX", LEASE, "WAIT", LEASE // 2)
        need(token is not None, "a token after a linger", token)
        yield from self.expect(1, "LOCK.RELEASE", key, other)

    def floor(self):
        key, owner = self.own_key(), self.owner()
        floor = self.crowd.highest
        token = yield from self.acquire(key, owner, "PX", LEASE, "FLOOR", floor)
        need(token >= floor, f"a token from {floor} on", token)
        yield from self.expect(1, "LOCK.RELEASE", key, owner)

    def fence(self):
        key, owner = self.own_key(), self.owner()
        counter = f"counter:{self.random.randrange(COUNTERS)}"
        token = yield from self.acquire(key, owner, "PX", LEASE)
        reply = yield ("LOCK.FENCE", key, token, "THEN", "INCR", counter)
        need(isinstance(reply, int), "an integer", reply)
        yield from self.expect(1, "LOCK.RELEASE", key, owner)
        reply = yield ("LOCK.FENCE", key, token, "THEN", "DEL", counter)
        need(isinstance(reply, Error) and reply.code == "FENCED", "FENCED", reply)

    def script(self):
        key, owner = self.own_key(), self.owner()
        if self.random.random() < 0.5:
            before = self.crowd.base
            text = "return redis.call('LOCK.ACQUIRE', KEYS[1], ARGV[1], 'PX', ARGV[2])"
            token = yield ("EVAL", text, 1, key, owner, LEASE)
            self.new_token([key], token, before)
            yield from self.expect(1, "LOCK.RELEASE", key, owner)
        else:
            yield from self.expect(b"OK", "MULTI")
            yield from self.expect(b"QUEUED", "LOCK.ACQUIRE", key, owner, "PX", LEASE, "WAIT", 100)
            yield from self.expect(b"QUEUED", "LOCK.RELEASE", key, owner)
            reply = yield ("EXEC",)
            need(isinstance(reply, list) and len(reply) == 2 and reply[1] == 1, "[token, 1]", reply)
            self.new_token([key], reply[0], self.crowd.base)

    # Waits that do not block

    def notify(self):
        key, owner, name = self.hot("lock"), self.owner(), self.message_name()
        token = yield from self.acquire(key, owner, "PX", LEASE, "WAIT", self.wait(),
                                        "NOTIFY", self.crowd.channel, name)
        if token == 0:
            text = yield Message(name)
            words = text.split()
            if words == [b"timeout", key.encode()]:
                return
            need(words[0] == b"granted" and words[2] == key.encode(), "granted or timeout", text)
            self.new_token([key], int(words[1]), self.crowd.base)
        yield from self.expect(1, "LOCK.TOUCH", key, owner, "PX", LEASE)
        yield self.work()
        yield from self.expect(1, "LOCK.RELEASE", key, owner)

    def notify_cancel(self):
        key, owner, name = self.hot("lock"), self.owner(), self.message_name()
        token = yield from self.acquire(key, owner, "PX", LEASE, "WAIT", LONGEST_WAIT_MS,
                                        "NOTIFY", self.crowd.channel, name)
        need(token is not None, "a token or 0", token)
        reply = yield ("LOCK.RELEASE", key, owner)
        if token > 0:
            need(reply == 1, 1, reply)
            return
        text = yield Message(name)
        if text.split()[0] != b"timeout":
            need(reply == 1, 1, reply)
            need(text.split()[:2] == [b"error", b"UNBLOCKED"] or text.startswith(b"granted "),
                 "granted, or error UNBLOCKED", text)

    def notify_lost(self):
        key, owner, name = self.own_key(), self.owner(), self.message_name()
        token = yield from self.acquire(key, owner, "PX", LEASE,
                                        "NOTIFY", self.crowd.channel, name)
        yield from self.expect(1, "DEL", key)
        text = yield Message(name)
        need(text == f"lost {token} forced {key}".encode(), "lost ... forced", text)
        yield from self.expect(0, "LOCK.RELEASE", key, owner)

    # Everybody else

    def plain(self):
        key, owner = self.own_key(), self.owner()
        yield from self.expect(b"OK", "SET", key, owner, "NX", "PX", LEASE)
        yield from self.expect(None, "LOCK.ACQUIRE", key, self.owner(), "PX", LEASE, "WAIT", 10)
        yield from self.expect(1, "LOCK.RELEASE", key, owner)

    def others(self):
        key = self.own_key()
        index = self.random.randrange(DATA_KEYS)
        value = data_value(index)
        yield from self.expect(b"OK", "SET", f"data:{index}", value)
        yield from self.expect(value, "GET", f"data:{index}")
        yield from self.expect(b"OK", "SET", key, value)
        if self.random.random() < 0.3:
            yield from self.expect(1, "EXPIRE", key, 2)
        else:
            yield from self.expect(1, "PEXPIRE", key, LEASE)
            yield from self.expect(1, "DEL", key)

    def look(self):
        yield ("LOCK.INFO", self.hot("lock"))
        top = yield ("LOCK.TOP", 5)
        need(isinstance(top, list) and len(top) <= 5, "at most 5 locks", top)
        cursor = 0
        for _ in range(3):
            reply = yield ("LOCK.LIST", "COUNT", 300, "CURSOR", cursor)
            need(isinstance(reply, list) and len(reply) == 2, "a cursor and locks", reply)
            cursor = int(reply[0])
            if cursor == 0:
                break
        reply = yield ("INFO", "turnstile")
        need(b"turnstile_locks:" in reply, "INFO turnstile", reply)

    # Clients that die

    def die_holding(self):
        lease = self.random.randrange(100, 1000)
        options = self.random.choice(((), ("SHARED",), ("REENTRANT",), ("LINGER", 200),
                                      ("SESSION",)))
        yield from self.acquire(self.hot("lock"), self.owner(), "PX", lease, "WAIT", self.wait(),
                                *options)
        yield DROP

    def die_waiting(self):
        yield Cast("LOCK.ACQUIRE", self.hot("lock"), self.owner(), "PX", 500, "WAIT",
                   LONGEST_WAIT_MS)
        yield self.work()
        yield DROP

    def die_queued(self):
        yield from self.acquire(self.hot("lock"), self.owner(), "PX", 500, "WAIT", self.wait(),
                                "NOTIFY", self.crowd.channel, f"nobody-{next(self.crowd.numbers)}")
        yield DROP


class Client:
    """A connection, and the scenario that it is in."""

    def __init__(self, crowd):
        self.crowd = crowd
        self.socket = None
        self.script = None
        self.kind = ""
        self.command = None  # that is not answered yet
        self.sent = None  # the last command
        self.since = 0.0  # when it was sent, or a message began to be waited for
        self.life = 0  # counts what it has waited for, so that late events can be told
        self.names = []  # of the messages that this scenario expects
        self.scenarios = Scenarios(self)
        self.connect()

    def connect(self):
        self.socket = socket.create_connection(("127.0.0.1", self.crowd.port), PATIENCE_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.buffer = bytearray()
        if self.crowd.random.random() < 0.5:
            self.socket.sendall(encode(("HELLO", 3)))
            while self.take() is Incomplete:
                self.receive()
        self.socket.setblocking(False)
        self.crowd.watch(self)

    def drop(self):
        """As a client that exits or, half the time, one that is gone without a farewell."""
        self.crowd.forget(self)
        if self.crowd.random.random() < 0.5:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()
        self.command = None

    def send(self, command):
        self.command = self.sent = command
        self.since = time.monotonic()
        self.crowd.operations += 1
        self.socket.sendall(encode(command))

    def receive(self):
        data = self.socket.recv(65536)
        if not data:
            raise ConnectionError("the server closed the connection")
        self.buffer += data

    def take(self):
        """A reply, or Incomplete."""
        try:
            reply, at = parse(self.buffer, 0)
        except Incomplete:
            return Incomplete
        del self.buffer[:at]
        return reply

    def readable(self):
        try:
            self.receive()
        except BlockingIOError:
            return  # the event was for an earlier connection with the same number
        except OSError as error:
            self.fail(Unexpected(str(error)))
            return
        while (reply := self.take()) is not Incomplete:
            if self.command is None:
                self.fail(Unexpected(f"a reply that nobody asked for: {reply!r}"))
                return
            self.command = None
            self.resume(reply)

    def begin(self, scenario):
        self.kind = scenario.__name__
        self.script = scenario()
        self.resume(None)

    def resume(self, value):
        """Goes on until there is something to wait for."""
        while True:
            self.life += 1
            try:
                step = self.script.send(value)
                value = None
                if isinstance(step, tuple):
                    self.send(step)
                    return
                if isinstance(step, Sleep):
                    self.crowd.after(step.seconds, self)
                    return
                if isinstance(step, Message):
                    texts = self.crowd.messages[step.name]
                    if not texts:
                        self.since = time.monotonic()
                        self.crowd.readers[step.name] = self
                        return
                    value = texts.popleft()
                elif isinstance(step, Cast):
                    self.send(step.command)
                elif step is DROP:
                    self.drop()
                    self.connect()
            except StopIteration:
                self.end()
                return
            except (Unexpected, OSError) as error:
                self.fail(error)
                return

    def fail(self, error):
        self.crowd.failed(f"{self.kind}: {self.sent}: {error}")
        self.drop()
        self.connect()
        self.end()

    def end(self):
        self.script = None
        self.command = None
        for name in self.names:
            self.crowd.readers.pop(name, None)
            del self.crowd.messages[name]
        self.names.clear()
        self.crowd.ended(self)


class Crowd:
    def __init__(self, port, clients, base):
        self.port = port
        self.base = self.highest = base
        self.lowest = None  # of the tokens of new holds
        self.name = f"{os.getpid()}"
        self.random = random.Random()
        self.numbers = itertools.count()
        self.operations = 0
        self.errors = 0
        self.examples = []
        self.by_scenario = collections.Counter()
        self.highest_by_key = {}  # of contended locks
        self.channel = f"news:{self.name}"
        self.messages = {}  # by the id of a request: what was published and is not read yet
        self.readers = {}
        self.clients = {}  # by file descriptor
        self.timers = []
        self.poll = select.epoll()
        self.stopping = False
        self.busy = 0
        self.subscriber = socket.create_connection(("127.0.0.1", port), PATIENCE_S)
        self.subscriber.sendall(encode(("SUBSCRIBE", self.channel)))
        self.news = bytearray(self.subscriber.recv(65536))
        self.poll.register(self.subscriber, select.EPOLLIN)
        self.poll.register(sys.stdin, select.EPOLLIN)
        self.all = [Client(self) for _ in range(clients)]
        for client in self.all:
            self.after(self.random.random(), client)

    # What clients call

    def watch(self, client):
        self.clients[client.socket.fileno()] = client
        self.poll.register(client.socket, select.EPOLLIN)

    def forget(self, client):
        del self.clients[client.socket.fileno()]
        self.poll.unregister(client.socket)

    def after(self, seconds, client):
        when = time.monotonic() + seconds
        heapq.heappush(self.timers, (when, next(self.numbers), client, client.life))

    def highest_of(self, key):
        return self.highest_by_key.get(key, self.base)

    def note(self, keys, token):
        self.highest = max(self.highest, token)
        self.lowest = token if self.lowest is None else min(self.lowest, token)
        for key in keys:
            if key.startswith("hot:"):
                self.highest_by_key[key] = max(token, self.highest_of(key))

    def failed(self, text):
        self.errors += 1
        if len(self.examples) < SHOWN_ERRORS:
            self.examples.append(text)

    def ended(self, client):
        self.by_scenario[client.kind] += 1
        self.busy -= 1
        client.life += 1
        pause = self.random.expovariate(1 / THINK_S)
        self.after(pause, client)

    # The loop

    def run(self):
        next_report = time.monotonic() + REPORT_S
        while not self.stopping or self.busy:
            now = time.monotonic()
            if now >= next_report:
                next_report = now + REPORT_S
                self.look_for_silence(now)
                self.report()
            while self.timers and self.timers[0][0] <= now:
                _, _, client, life = heapq.heappop(self.timers)
                if life == client.life:
                    self.wake(client)
            until = min(next_report, self.timers[0][0] if self.timers else next_report)
            for fd, _ in self.poll.poll(max(0.0, until - time.monotonic())):
                if fd in self.clients:
                    self.clients[fd].readable()
                elif fd == self.subscriber.fileno():
                    self.read_news()
                elif fd == sys.stdin.fileno() and not os.read(fd, 4096):
                    self.stopping = True
                    self.poll.unregister(sys.stdin)
        self.report()

    def wake(self, client):
        if client.script is not None:
            client.resume(None)
        elif not self.stopping:
            if self.random.random() < SHARE_OF_NEW_CONNECTIONS:
                client.drop()
                client.connect()
            self.busy += 1
            client.begin(client.scenarios.choose())

    def look_for_silence(self, now):
        reading = {id(client): name for name, client in self.readers.items()}
        for client in self.all:
            name = reading.get(id(client))
            if (client.command or name) and now - client.since > PATIENCE_S:
                client.fail(Unexpected("no reply" if client.command else f"no message for {name}"))

    def read_news(self):
        data = self.subscriber.recv(65536)
        if not data:
            sys.exit("mix: the server closed the connection that subscribes")
        self.news += data
        at = 0
        while True:
            try:
                reply, at = parse(self.news, at)
            except Incomplete:
                break
            if reply[0] != b"message":
                continue
            name, _, text = reply[2].decode().partition(" ")
            if (reader := self.readers.pop(name, None)) is not None:
                reader.resume(text.encode())
            elif name in self.messages:
                self.messages[name].append(text.encode())
        del self.news[:at]

    def report(self):
        print(json.dumps({
            "operations": self.operations, "errors": self.errors, "examples": self.examples,
            "lowest_token": self.lowest, "highest_token": self.highest,
            "scenarios": self.by_scenario,
        }), flush=True)


def main():
    port, clients, base = map(int, sys.argv[1:])
    crowd = Crowd(port, clients, base)
    crowd.run()


if __name__ == "__main__":
    main()

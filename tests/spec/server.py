"""A server whose clocks stand still until they are moved, and connections to it."""

import mmap
import os
import pathlib
import random
import signal
import socket
import struct
import subprocess
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]


class Error:
    """An error reply. Two are equal if their first words are."""

    __slots__ = ("text",)

    def __init__(self, text):
        self.text = text

    @property
    def code(self):
        return self.text.split(" ", 1)[0]

    def __repr__(self):
        return "-" + self.text


class Incomplete(Exception):
    pass


def parse(data, at):
    """One RESP2 or RESP3 reply of `data` from `at` on, and where the next begins."""
    end = data.find(b"\r\n", at)
    if end < 0:
        raise Incomplete
    kind = data[at]
    line = data[at + 1:end]
    at = end + 2
    if kind == 36 or kind == 61:  # $ =
        size = int(line)
        if size < 0:
            return None, at
        if len(data) < at + size + 2:
            raise Incomplete
        return bytes(data[at:at + size]), at + size + 2
    if kind == 58:  # :
        return int(line), at
    if kind == 42 or kind == 37:  # * %
        size = int(line)
        if size < 0:
            return None, at
        items = []
        for _ in range(size if kind == 42 else 2 * size):
            item, at = parse(data, at)
            items.append(item)
        return items if kind == 42 else dict(zip(items[::2], items[1::2])), at
    if kind == 43:  # +
        return bytes(line), at
    if kind == 45:  # -
        return Error(line.decode(errors="replace")), at
    if kind == 95:  # _
        return None, at
    if kind == 35:  # #
        return int(line == b"t"), at
    raise ValueError(f"not RESP: {bytes(data[:80])!r}")


def encode(args):
    parts = [b"*%d\r\n" % len(args)]
    for arg in args:
        if isinstance(arg, int):
            arg = b"%d" % arg
        elif isinstance(arg, str):
            arg = arg.encode()
        parts.append(b"$%d\r\n%s\r\n" % (len(arg), arg))
    return b"".join(parts)


class Connection:
    def __init__(self, port, resp=3, db=0):
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.settimeout(30)
        host, port = self.socket.getsockname()
        self.address = host.encode(), port
        self.buffer = bytearray()
        self.call("HELLO", resp)
        self.id = self.call("CLIENT", "ID")
        if db:
            self.call("SELECT", db)

    def close(self):
        self.socket.close()

    def send(self, data):
        self.socket.sendall(data)

    def read(self, count):
        """The next `count` replies; waits for them."""
        replies, at = [], 0
        while len(replies) < count:
            try:
                reply, at = parse(self.buffer, at)
                replies.append(reply)
            except Incomplete:
                data = self.socket.recv(65536)
                if not data:
                    raise ConnectionError("the server closed the connection") from None
                self.buffer += data
        del self.buffer[:at]
        return replies

    def available(self):
        """The replies that have arrived, without waiting."""
        self.socket.setblocking(False)
        try:
            while data := self.socket.recv(65536):
                self.buffer += data
        except BlockingIOError:
            pass
        finally:
            self.socket.settimeout(30)
        replies, at = [], 0
        try:
            while at < len(self.buffer):
                reply, at = parse(self.buffer, at)
                replies.append(reply)
        except Incomplete:
            pass
        del self.buffer[:at]
        return replies

    def call(self, *args):
        self.send(encode(args))
        return self.read(1)[0]


class Subscriber(Connection):
    """A connection that listens to channels."""

    def __init__(self, port):
        super().__init__(port, resp=2)
        self.received = []  # [(channel, text)]
        self.subscribe("SUBSCRIBE", "always")  # so that it is never without a subscription

    def subscribe(self, command, channel):
        self.send(encode((command, channel)))
        self._read_until(command.lower().encode())

    def messages(self):
        """What was published before this call, and has not been returned yet."""
        self.send(encode(("PING",)))
        self._read_until(b"pong")
        messages, self.received = self.received, []
        return messages

    def _read_until(self, kind):
        while True:
            reply = self.read(1)[0]
            if isinstance(reply, Error):
                raise ConnectionError(reply.text)
            if reply[0] in (b"message", b"pmessage"):
                self.received.append(tuple(reply[-2:]))
            elif reply[0] == kind:
                return
            else:
                raise ConnectionError(f"unexpected: {reply}")


class Server:
    """A server of its own. Its clocks show `wall` and `steady` (microseconds) until set_clock()."""

    def __init__(self, clock_library, binary, module, wall, steady, options=()):
        self.folder = tempfile.TemporaryDirectory(prefix="turnstile-spec-")
        folder = pathlib.Path(self.folder.name)
        clock = folder / "clock"
        clock.write_bytes(struct.pack("<qq", wall, steady))
        self.clock_file = open(clock, "r+b")
        self.clock = mmap.mmap(self.clock_file.fileno(), 16)
        preload = " ".join(filter(None, [os.environ.get("TURNSTILE_SERVER_PRELOAD"),
                                         str(clock_library)]))
        environment = {**os.environ, "LD_PRELOAD": preload, "TURNSTILE_SPEC_CLOCK": str(clock)}
        self.log = folder / "log"
        self.process = None
        for _ in range(20):
            self.port = random.SystemRandom().randrange(20000, 32000)
            with open(self.log, "wb") as log:
                self.process = subprocess.Popen(
                    [str(binary), "--bind", "127.0.0.1", "--port", str(self.port), "--save", "",
                     "--dir", str(folder), "--databases", "2", "--loadmodule", str(module),
                     *options],
                    stdout=log, stderr=subprocess.STDOUT, env=environment)
            if self._started():
                if "monotonic clock: POSIX" not in self.log.read_text():
                    self.stop()
                    raise RuntimeError("the server does not ask the system for the time")
                return
            self.stop()
        raise RuntimeError("the server does not start:\n" + self.log.read_text())

    def _started(self):
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                connection = Connection(self.port)
            except OSError:
                time.sleep(0.005)
                continue
            info = connection.call("INFO", "server")
            connection.close()
            return b"process_id:%d\r" % self.process.pid in info
        return False

    def set_clock(self, wall, steady):
        struct.pack_into("<qq", self.clock, 0, wall, steady)

    def alive(self):
        return self.process.poll() is None

    def stop(self):
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        if self.process is not None:
            self.process.wait()
        self.process = None

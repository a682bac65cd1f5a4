"""Servers with the module, for the tests in this folder."""

import os
import random
import socket
import subprocess
import sys
import time

import redis

PATIENCE_S = 20  # for one step; longer means that it will not happen


class Server:
    """A redis-server with the module, without persistence, whose wall clock is off by skew_s.

    Of the options it needs module, margin_ms and grace_ms; and clock_shift, if there is a skew.
    """

    def __init__(self, folder, skew_s, options):
        folder.mkdir()
        self.folder = folder
        self.environment = dict(os.environ)
        self.skew_s = skew_s
        if skew_s is not None:
            self.shift = folder / "shift"
            self.shift.write_bytes(bytes(8))
            self.environment["LD_PRELOAD"] = str(options.clock_shift)
            # See tests/support/clock_shift.cc.
            self.environment["TURNSTILE_CLOCK_SHIFT_FILE"] = str(self.shift)
            self.set_clock(skew_s)
        self.options = options
        self.port = free_port()
        self.process = None

    def set_clock(self, skew_s):
        """Sets the error of the wall clock. In place, because the server has mapped the file."""
        self.skew_s = skew_s
        with self.shift.open("r+b") as file:
            file.write(int(skew_s * 1e6).to_bytes(8, sys.byteorder, signed=True))

    def start(self):
        command = [os.environ.get("REDIS_SERVER", "redis-server"), "--bind", "127.0.0.1"]
        command += ["--port", str(self.port), "--save", "", "--dir", str(self.folder)]
        command += ["--logfile", str(self.folder / "log"), "--loadmodule", str(self.options.module)]
        command += ["--turnstile.token-margin-ms", str(self.options.margin_ms)]
        command += ["--turnstile.failover-grace-ms", str(self.options.grace_ms)]
        self.process = subprocess.Popen(command, env=self.environment)
        deadline = time.monotonic() + PATIENCE_S
        client = redis.Redis("127.0.0.1", self.port, socket_timeout=PATIENCE_S)
        while True:
            try:
                seconds, microseconds = client.execute_command("TIME")
                break
            except redis.ConnectionError:
                if ended(self.process, within_s=0.005) or time.monotonic() > deadline:
                    sys.exit("quorum: the server does not start:\n" + self.log())
        off = seconds + microseconds / 1e6 - time.time() - (self.skew_s or 0)
        pid = client.info("server")["process_id"]
        client.connection_pool.disconnect()
        if pid != self.process.pid:
            sys.exit(f"quorum: another server has taken port {self.port}")
        if abs(off) > 0.5:
            sys.exit(f"quorum: --clock-shift does not work: the clock is {off:+.3f} s off its skew")

    def kill(self):
        if self.process:
            self.process.kill()
            self.process.wait()

    def log(self):
        log = self.folder / "log"
        return log.read_text() if log.exists() else "(no log)"


def ended(process, within_s):
    try:
        process.wait(within_s)
        return True
    except subprocess.TimeoutExpired:
        return False


def free_port():
    """Below the ports that the kernel assigns to outgoing connections: otherwise a client that
    keeps connecting to a dead server could be assigned that very port, and connect to itself."""
    while True:
        port = random.SystemRandom().randrange(15000, 32000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
                return port
            except OSError:
                pass

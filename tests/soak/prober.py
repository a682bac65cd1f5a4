"""Measures how long a server takes to answer: a part of tests/soak/run, in a process of its own.

    prober.py PORT BASE

One connection, one command after the other, at random times: PING, and LOCK.ACQUIRE, LOCK.TOUCH and
LOCK.RELEASE of a lock that nobody else wants. PING stands between the others at random, so that
both meet the same machine and the same server, and their ratio is what the locks themselves take.

Prints a line of JSON every second, with times in microseconds. Ends when standard input does.
"""

import json
import pathlib
import random
import select
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "spec"))
sys.dont_write_bytecode = True

from server import Connection  # noqa: E402

LEASE = 120_000
LONGEST_PAUSE_S = 0.006
KEYS = 1000
REPORT_S = 1.0
SHOWN_ERRORS = 10


def is_one(reply):
    return reply == 1


def is_pong(reply):
    return reply == b"PONG"


class Prober:
    def __init__(self, port, base):
        self.connection = Connection(port)
        self.connection.socket.settimeout(120)
        self.base = base
        self.times = {}
        self.operations = self.errors = 0
        self.examples = []
        self.lowest = None
        self.highest = base
        self.held = False

    def ask(self, name, expected, *command):
        began = time.perf_counter_ns()
        reply = self.connection.call(*command)
        self.times.setdefault(name, []).append((time.perf_counter_ns() - began) // 1000)
        self.operations += 1
        if not expected(reply):
            self.errors += 1
            if len(self.examples) < SHOWN_ERRORS:
                self.examples.append(f"prober: {command}: {reply!r}")
        return reply

    def is_token(self, reply):
        if not isinstance(reply, int) or reply <= max(self.base, self.highest):
            return False
        self.highest = reply
        self.lowest = reply if self.lowest is None else self.lowest
        return True

    def steps(self):
        """The commands for locks, without end."""
        number = 0
        while True:
            number += 1
            lock = f"probe:{number % KEYS}", f"prober-{number}"
            self.held = True
            yield lambda: self.ask("acquire", self.is_token, "LOCK.ACQUIRE", *lock, "PX", LEASE)
            yield lambda: self.ask("touch", is_one, "LOCK.TOUCH", *lock, "PX", LEASE)
            self.held = False
            yield lambda: self.ask("release", is_one, "LOCK.RELEASE", *lock)

    def run(self):
        steps = self.steps()
        next_report = time.monotonic() + REPORT_S
        stopped = False
        while not stopped:
            pause = random.random() * LONGEST_PAUSE_S
            stopped = bool(select.select([sys.stdin], [], [], pause)[0])
            if random.random() < 0.5:
                self.ask("ping", is_pong, "PING")
            else:
                next(steps)()
            if stopped:
                self.finish(steps)
            if stopped or time.monotonic() >= next_report:
                next_report = time.monotonic() + REPORT_S
                self.report()

    def finish(self, steps):
        """Leaves no lock behind."""
        while self.held:
            next(steps)()

    def report(self):
        print(json.dumps({
            "operations": self.operations, "errors": self.errors, "examples": self.examples,
            "lowest_token": self.lowest, "highest_token": self.highest, "times": self.times,
        }), flush=True)
        self.times = {}


if __name__ == "__main__":
    Prober(*map(int, sys.argv[1:])).run()

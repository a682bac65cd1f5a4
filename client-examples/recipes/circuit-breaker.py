#!/usr/bin/python3
# SPDX-License-Identifier: BSD-3-Clause
# Copyright (c) 2026 The Turnstile authors
"""A circuit breaker: while Redis does not answer, requests are refused at once.

Without it every request waits for the time-out of the client, and the service runs out of threads.
A request that cannot get the lock is refused; work that goes on without the lock is not protected.
"""

import os
import socket
import sys
import threading
import time
import uuid

import redis

URL = os.environ.get("REDIS_URL", "redis://127.0.0.1:6379")
LOCK = f"recipe:{uuid.uuid4()}:checkout"
NO_ANSWER = redis.ConnectionError, redis.TimeoutError


class Open(Exception):
    """Redis was away a moment ago: not asked."""


class CircuitBreaker:
    def __init__(self, failures, pause_s):
        self.mutex, self.failures, self.pause_s = threading.Lock(), failures, pause_s
        self.failed, self.ask_at = 0, 0.0

    def call(self, function):
        with self.mutex:
            if self.failed >= self.failures:
                if time.monotonic() < self.ask_at:
                    raise Open
                self.ask_at = time.monotonic() + self.pause_s  # this call tries; the others wait
        try:
            answer = function()
        except NO_ANSWER:
            with self.mutex:
                self.failed += 1
                self.ask_at = time.monotonic() + self.pause_s
            raise
        with self.mutex:
            self.failed = 0
        return answer


def main():
    # A server that takes connections and never answers, which is worse than one that is down.
    silent = socket.create_server(("127.0.0.1", 0))
    away = redis.Redis(port=silent.getsockname()[1], socket_timeout=0.2)
    server = redis.Redis.from_url(URL, socket_timeout=2)
    breaker = CircuitBreaker(failures=3, pause_s=0.5)
    unanswered = []  # owners that may hold the lock without knowing it

    def request(client):
        owner, began = str(uuid.uuid4()), time.monotonic()
        try:
            ask = "LOCK.ACQUIRE", LOCK, owner, "PX", 5000
            token = breaker.call(lambda: client.execute_command(*ask))
            outcome = "503: busy" if token is None else "200: token " + str(token)
        except Open:
            outcome = "503: breaker open"
        except NO_ANSWER:
            unanswered.append(owner)
            outcome = "503: no answer"
        return outcome, time.monotonic() - began, owner

    refused = [request(away) for _ in range(53)]
    for outcome in "503: no answer", "503: breaker open":
        times = [seconds for what, seconds, _ in refused if what == outcome]
        print(f"away, {outcome}: {len(times)} requests, {1000 * sum(times):.0f} ms together")

    deadline = time.monotonic() + 10
    while (answer := request(server))[0] == "503: breaker open" and time.monotonic() < deadline:
        time.sleep(0.05)
    print("back,", answer[0])
    for owner in unanswered:  # the time-out rule: release what may have been granted
        server.execute_command("LOCK.RELEASE", LOCK, owner)
    print("the next,", busy := request(server)[0])
    server.execute_command("LOCK.RELEASE", LOCK, answer[2])
    if [what for what, *_ in refused] != 3 * ["503: no answer"] + 50 * ["503: breaker open"]:
        sys.exit("FAILED: the breaker did not open, or it let requests through")
    if not answer[0].startswith("200: ") or busy != "503: busy":
        sys.exit("FAILED: the breaker did not close again, or the lock was given twice")


if __name__ == "__main__":
    main()

#!/usr/bin/python3
# SPDX-License-Identifier: BSD-3-Clause
# Copyright (c) 2026 The Turnstile authors
"""Single flight: forty requests miss the cache together, and one of them computes the value.

The first is the leader and holds the lock exclusively. The others ask for a shared hold and wait:
when the leader releases, the server lets all of them in together, and each reads the cache.
"""

import concurrent.futures
import os
import sys
import threading
import time
import uuid

import redis

URL = os.environ.get("REDIS_URL", "redis://127.0.0.1:6379")
CACHE = f"{{recipe:{uuid.uuid4()}}}:page"  # the braces: one slot in a cluster
LOCK = CACHE + ":lock"
REQUESTS = 40


def fetch(server, compute, lease_ms=5000):
    # The second round is for followers of a leader that failed: they stand in line to lead.
    for wait_ms in 0, 10000:
        if value := server.get(CACHE):
            return value
        owner = str(uuid.uuid4())
        ask = "LOCK.ACQUIRE", LOCK, owner, "PX", lease_ms, "WAIT"
        if token := server.execute_command(*ask, wait_ms):
            if value := server.get(CACHE):  # another leader was faster
                server.execute_command("LOCK.RELEASE", LOCK, owner)
                return value
            value = compute()  # a leader that crashes here is followed when its lease ends
            # Written only while we hold the lock: a leader that was too slow changes nothing.
            write = "SET", CACHE, value, "EX", 60
            server.execute_command("LOCK.FENCE", LOCK, token, "THEN", *write)
            server.execute_command("LOCK.RELEASE", LOCK, owner)
            return value
        if server.execute_command(*ask, 10000, "SHARED"):
            with server.pipeline(transaction=False) as pipe:
                value, _ = pipe.get(CACHE).execute_command("LOCK.RELEASE", LOCK, owner).execute()
            if value:
                return value
    raise RuntimeError("no value in time")


def main():
    server = redis.Redis.from_url(URL)
    mutex, computed = threading.Lock(), []

    def compute():
        with mutex:
            computed.append(threading.get_ident())
            crash = crashes and crashes.pop()
        time.sleep(0.1)  # stands for a slow query
        if crash:
            raise InterruptedError("the leader crashed, and has not released")
        return b"the page"

    def request(_):
        try:
            value = fetch(server, compute, lease_ms=1000)
            return value, time.monotonic()
        except InterruptedError:
            return None

    for name, crashes in ("all is well", []), ("the leader crashes", [True]):
        expected_runs, expected_answers = 1 + len(crashes), REQUESTS - len(crashes)
        computed.clear()
        with concurrent.futures.ThreadPoolExecutor(REQUESTS) as pool:
            answers = [answer for answer in pool.map(request, range(REQUESTS)) if answer]
        times = [when for _, when in answers]
        print(f"{name}: {len(answers)} answers, {len(computed)} computed, "
              f"all within {1000 * (max(times) - min(times)):.0f} ms of each other")
        server.delete(CACHE)
        if len(computed) != expected_runs or len(answers) != expected_answers:
            sys.exit("FAILED: computed too often, or an answer is missing")
        if any(value != b"the page" for value, _ in answers):
            sys.exit("FAILED: a wrong answer")


if __name__ == "__main__":
    main()

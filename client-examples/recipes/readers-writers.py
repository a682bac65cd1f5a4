#!/usr/bin/python3
# SPDX-License-Identifier: BSD-3-Clause
# Copyright (c) 2026 The Turnstile authors
"""Readers and writers: readers hold the lock together (SHARED), a writer holds it alone.

The resource has two halves that belong together. A reader that sees halves of different writes has
been in while a writer was. Then a reader becomes a writer (upgrade) and a reader again (downgrade).
"""

import concurrent.futures
import os
import sys
import threading
import time
import uuid

import redis

URL = os.environ.get("REDIS_URL", "redis://127.0.0.1:6379")
LOCK = f"recipe:{uuid.uuid4()}:prices"


def main():
    server = redis.Redis.from_url(URL)
    halves, mutex = [0, 0], threading.Lock()
    inside, most, torn = 0, 0, 0

    def acquire(owner, *options):
        token = server.execute_command("LOCK.ACQUIRE", LOCK, owner, "PX", 5000, *options)
        return token or sys.exit("FAILED: not acquired")

    def release(owner):
        return server.execute_command("LOCK.RELEASE", LOCK, owner)

    def read():
        nonlocal inside, most, torn
        owner = str(uuid.uuid4())
        acquire(owner, "SHARED", "WAIT", 10000)
        with mutex:
            inside += 1
            most = max(most, inside)
        first = halves[0]
        time.sleep(0.01)
        with mutex:
            torn += first != halves[1]
            inside -= 1
        release(owner)

    def write():
        owner = str(uuid.uuid4())
        acquire(owner, "WAIT", 10000)
        halves[0] += 1
        time.sleep(0.01)
        halves[1] += 1
        release(owner)

    def await_waiter():
        for _ in range(500):
            info = server.execute_command("LOCK.INFO", LOCK)
            if dict(zip(info[::2], info[1::2]))[b"waiting"] == 1:
                return
            time.sleep(0.01)
        sys.exit("FAILED: the upgrade does not wait")

    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        list(pool.map(lambda n: (write if n % 10 == 5 else read)(), range(60)))
    print(f"54 reads, up to {most} together, {torn} torn; {halves} after 6 writes")
    if torn or most < 2 or halves != [6, 6]:
        sys.exit("FAILED: a reader was in with a writer, or readers were never in together")

    alice, bob = str(uuid.uuid4()), str(uuid.uuid4())
    shared = acquire(alice, "SHARED")
    acquire(bob, "SHARED")
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        upgrade = pool.submit(acquire, alice, "WAIT", 10000)  # waits for bob to leave
        await_waiter()
        try:
            acquire(bob, "WAIT", 10000)  # would wait for alice, who waits for bob
            sys.exit("FAILED: two readers were upgraded")
        except redis.ResponseError as error:
            print("the second upgrade:", str(error).partition(" ")[0])
        release(bob)  # what to do at DEADLOCK: let go, and begin again
        exclusive = upgrade.result()
    downgraded = acquire(alice, "SHARED")
    print(f"token {shared}, upgraded {exclusive}, downgraded {downgraded}")
    if not shared < exclusive == downgraded or release(alice) != 1:
        sys.exit("FAILED: wrong tokens")


if __name__ == "__main__":
    main()

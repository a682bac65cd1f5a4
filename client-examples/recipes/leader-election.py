#!/usr/bin/python3
# SPDX-License-Identifier: BSD-3-Clause
# Copyright (c) 2026 The Turnstile authors
"""Leader election: three processes stand in line for one lock, and who holds it leads.

The first leader is killed: the next leads when the lease is over. The second is stopped: it
releases, and the next leads at once. The client renews the lease while a leader is at work.
"""

import itertools
import multiprocessing
import os
import pathlib
import signal
import sys
import time
import uuid

import redis

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "python"))
from turnstile_lock import Lock, LockError, NotAcquired  # noqa: E402

URL = os.environ.get("REDIS_URL", "redis://127.0.0.1:6379")
LOCK = f"{{recipe:{uuid.uuid4()}}}:leader"  # the braces: one slot in a cluster
TERMS = LOCK + ":terms"
LEASE = 1.0  # seconds: how long nobody leads after a crash


def candidate():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # ends the block below, which releases
    lock = Lock(redis.Redis.from_url(URL), LOCK, lease=LEASE, wait=5)
    while True:
        try:
            with lock as hold:  # its owner is a new random id each time
                hold.run("RPUSH", TERMS, f"{hold.token} {os.getpid()}")  # only a leader can write
                while True:
                    hold.check()  # raises Lost when somebody else may lead
                    time.sleep(LEASE / 20)  # stands for a small piece of work
        except NotAcquired:
            pass  # still in office: stand in line again
        except LockError as error:
            print(f"process {os.getpid()} leads no more: {error}", flush=True)


def wait_for_term(server, number):
    for deadline in itertools.repeat(time.monotonic() + 10):
        if server.llen(TERMS) >= number:
            break
        if time.monotonic() > deadline:
            sys.exit(f"FAILED: there was no term {number}")
        time.sleep(0.01)
    token, pid = map(int, server.lindex(TERMS, number - 1).split())
    print(f"term {number}: process {pid} leads under token {token}")
    return token, pid


def main():
    server = redis.Redis.from_url(URL)
    for _ in range(3):
        multiprocessing.Process(target=candidate, daemon=True).start()

    first, pid = wait_for_term(server, 1)
    os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()
    second, pid = wait_for_term(server, 2)
    print(f"... {time.monotonic() - killed:.2f} s after the crash; the lease is {LEASE} s")

    os.kill(pid, signal.SIGTERM)
    stopped = time.monotonic()
    third, _ = wait_for_term(server, 3)
    print(f"... {time.monotonic() - stopped:.2f} s after the release")

    try:
        server.execute_command("LOCK.FENCE", LOCK, first, "THEN", "RPUSH", TERMS, "a late write")
        sys.exit("FAILED: the first leader could still write")
    except redis.ResponseError as error:
        print(f"a late write of the first leader: {error}")
    if not first < second < third or server.llen(TERMS) != 3:
        sys.exit(f"FAILED: {server.lrange(TERMS, 0, -1)}")
    for process in multiprocessing.active_children():
        process.kill()
    server.delete(LOCK, TERMS)
    print("one leader at a time")


if __name__ == "__main__":
    main()

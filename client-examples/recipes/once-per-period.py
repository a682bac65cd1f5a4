#!/usr/bin/python3
# SPDX-License-Identifier: BSD-3-Clause
# Copyright (c) 2026 The Turnstile authors
"""A job that runs once per period, on machines whose timers are not quite together.

The job is quick. If it released the lock at its end, a machine whose timer is late would find the
lock free and run the job again. So a job that went well does not release: the lease is the minimum
hold. A job that failed releases, and another machine may try within the same period.
"""

import concurrent.futures
import os
import random
import sys
import time
import uuid

import redis

URL = os.environ.get("REDIS_URL", "redis://127.0.0.1:6379")
LOCK = f"recipe:{uuid.uuid4()}:report"
MACHINES, PERIODS = 3, 3
AT_LEAST_MS = 1000  # longer than the job takes and than timers differ, shorter than the period
LATE_S = 0.1  # how late a timer may be


def run_once(server, job):
    owner = str(uuid.uuid4())
    if server.execute_command("LOCK.ACQUIRE", LOCK, owner, "PX", AT_LEAST_MS) is None:
        return False  # another machine does it, or has done it in this period
    try:
        job()
    except Exception:
        server.execute_command("LOCK.RELEASE", LOCK, owner)  # so that another can try at once
        raise
    return True  # no release: the lock stays closed until its lease ends


def wait_until_free(server):
    deadline = time.monotonic() + 10
    while server.execute_command("LOCK.FENCE", LOCK) is not None:
        if time.monotonic() > deadline:
            sys.exit("FAILED: the lease does not end")
        time.sleep(0.01)


def main():
    server = redis.Redis.from_url(URL)

    def machine(_):
        time.sleep(random.uniform(0, LATE_S))
        return run_once(server, lambda: None)

    with concurrent.futures.ThreadPoolExecutor(MACHINES) as pool:
        for period in range(PERIODS):
            runs = sum(pool.map(machine, range(MACHINES)))
            print(f"period {period}: {runs} of {MACHINES} machines ran the job")
            if runs != 1:
                sys.exit("FAILED: not once per period")
            wait_until_free(server)  # stands for the rest of the period

    try:
        run_once(server, lambda: 1 / 0)
    except ZeroDivisionError:
        print("a run failed, and released")
    if not run_once(server, lambda: print("another machine runs the job in the same period")):
        sys.exit("FAILED: the lock is closed after a run that failed")
    wait_until_free(server)

    # A long job has a short lease, which it renews (LOCK.TOUCH). LINGER keeps the lock closed for a
    # while after the last renewal, whether the job ended well or the machine crashed.
    lingering = "LOCK.ACQUIRE", LOCK, str(uuid.uuid4()), "PX", 100, "LINGER", 60000
    server.execute_command(*lingering)
    wait_until_free(server)  # no renewal
    again = run_once(server, lambda: None)
    print("after a crash the lock is", "open" if again else "closed: it lingers")
    server.delete(LOCK)
    if again:
        sys.exit("FAILED: it does not linger")


if __name__ == "__main__":
    main()

#!/usr/bin/python3
# SPDX-License-Identifier: BSD-3-Clause
# Copyright (c) 2026 The Turnstile authors
"""A semaphore (LIMIT n), and a weighted one (LIMIT n WEIGHT w).

Eight workers share a database that takes three queries at a time. Then jobs of different size share
a machine of ten gigabytes. Each hold has a lease: a permit of a worker that crashed comes back.
"""

import concurrent.futures
import os
import sys
import threading
import time
import uuid

import redis

URL = os.environ.get("REDIS_URL", "redis://127.0.0.1:6379")
RUN = uuid.uuid4()


class Resource:
    """Counts how much of it is in use."""

    def __init__(self):
        self.mutex = threading.Lock()
        self.used = self.most = 0

    def use(self, amount):
        with self.mutex:
            self.used += amount
            self.most = max(self.most, self.used)
        time.sleep(0.02)  # stands for the work
        with self.mutex:
            self.used -= amount


def main():
    server = redis.Redis.from_url(URL)

    def work(resource, lock, limit, weight):
        owner = str(uuid.uuid4())  # one for each permit: the same owner twice is one permit
        options = ["LIMIT", limit] + (["WEIGHT", weight] if weight != 1 else [])
        # The n is in the request, so all must say the same. A heavy request that waits holds back
        # those behind it, so it is not starved by light ones.
        token = server.execute_command(
            "LOCK.ACQUIRE", lock, owner, "PX", 5000, "WAIT", 10000, *options
        )
        if token is None:
            raise RuntimeError("no permit within 10 s")
        try:
            resource.use(weight)
        finally:
            server.execute_command("LOCK.RELEASE", lock, owner)

    def share(name, limit, weights):
        resource = Resource()
        with concurrent.futures.ThreadPoolExecutor(len(weights)) as pool:
            lock = f"recipe:{RUN}:{name}"
            jobs = [pool.submit(work, resource, lock, limit, weight) for weight in weights]
            for job in jobs:
                job.result()
        print(f"{name}: {len(weights)} jobs, at most {resource.most} of {limit} in use")
        if resource.most > limit or resource.most < 2:
            sys.exit("FAILED: too many at a time, or one after the other")

    share("queries", limit=3, weights=8 * [1])
    share("gigabytes", limit=10, weights=[1, 4, 6, 1, 10, 2, 5, 3, 1, 7])


if __name__ == "__main__":
    main()

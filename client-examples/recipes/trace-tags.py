#!/usr/bin/python3
# SPDX-License-Identifier: BSD-3-Clause
# Copyright (c) 2026 The Turnstile authors
"""Trace ids with TAG: a request that cannot get the lock logs which request holds it.

The owner proves ownership and belongs in no log. The tag is public: LOCK.INFO, LOCK.LIST, LOCK.TOP
and DEADLOCK errors show it. A tag has up to 64 bytes, of which an error shows the first 40: begin with
the trace id, which has 32.
"""

import os
import secrets
import sys
import uuid

import redis

URL = os.environ.get("REDIS_URL", "redis://127.0.0.1:6379")
RUN = uuid.uuid4().hex[:8]
LOCK, OTHER = f"{{recipe:{RUN}}}:order:17", f"{{recipe:{RUN}}}:order:18"


class Request:
    def __init__(self, server):
        # The trace id is what the tracing library hands you with each request.
        self.server, self.owner, self.trace = server, str(uuid.uuid4()), secrets.token_hex(16)

    def acquire(self, key, *options):
        ask = "LOCK.ACQUIRE", key, self.owner, "PX", 10000, "TAG", self.trace, *options
        return self.server.execute_command(*ask)

    def release(self, *keys):
        for key in keys:
            self.server.execute_command("LOCK.RELEASE", key, self.owner)


def holders(server, key):
    """The tags of the holders and how long their leases go on. Needs the right to LOCK.INFO."""
    info = server.execute_command("LOCK.INFO", key)
    if info is None:
        return {}
    maps = [dict(zip(map[::2], map[1::2])) for map in dict(zip(info[::2], info[1::2]))["holders"]]
    return {holder["tag"]: holder["lease-left-ms"] for holder in maps}


def main():
    server = redis.Redis.from_url(URL, decode_responses=True)
    first, second = Request(server), Request(server)
    first.acquire(LOCK)
    refused = second.acquire(LOCK) is None
    held_by = holders(server, LOCK)
    print(f"request {second.trace}: order 17 is busy")
    for tag, left_ms in held_by.items():
        print(f"  held by request {tag} for {left_ms} ms more at most")

    # The first waits for what the second holds; then the second would close the cycle.
    second.acquire(OTHER)
    channel = f"{{recipe:{RUN}}}:messages"
    subscriber = server.pubsub()
    subscriber.subscribe(channel)  # waits without blocking, so one thread is enough here
    waiting = first.acquire(OTHER, "WAIT", 10000, "NOTIFY", channel, secrets.token_hex(16))
    try:
        second.acquire(LOCK, "WAIT", 10000)
        error = ""
    except redis.ResponseError as refusal:
        error = str(refusal)
    print(error)
    first.release(LOCK, OTHER)
    second.release(LOCK, OTHER)
    subscriber.close()

    if not refused or list(held_by) != [first.trace] or waiting != 0:
        sys.exit("FAILED: the holder is not shown by its tag")
    if not error.startswith("DEADLOCK") or first.trace not in error or second.trace not in error:
        sys.exit("FAILED: the cycle is not shown by tags")
    if first.owner in error or second.owner in error:
        sys.exit("FAILED: an owner is shown")


if __name__ == "__main__":
    main()

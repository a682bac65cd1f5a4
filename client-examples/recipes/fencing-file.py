#!/usr/bin/python3
# SPDX-License-Identifier: BSD-3-Clause
# Copyright (c) 2026 The Turnstile authors
"""Fencing a file: a second file beside it keeps the highest token that has written.

flock() makes the comparison and the write one step. It works among the processes of one machine; on
a network file system only if that file system has locks.
"""

import fcntl
import os
import sys
import tempfile
import uuid

import redis

URL = os.environ.get("REDIS_URL", "redis://127.0.0.1:6379")
LOCK = f"recipe:{uuid.uuid4()}:settings"


class Fenced(Exception):
    pass


def write_fenced(path, data, token):
    with open(os.open(path + ".token", os.O_RDWR | os.O_CREAT, 0o644), "r+") as fence:
        fcntl.flock(fence, fcntl.LOCK_EX)  # until the file is closed
        highest = int(fence.read() or 0)
        if token < highest:
            raise Fenced(f"a holder with token {highest} has written already")
        # The token first: a crash in between leaves the old data, and refuses the old holder. It is
        # overwritten in place, with a fixed width, so that a crash never leaves an empty file.
        fence.seek(0)
        fence.write(f"{token:020}")
        fence.flush()
        os.fsync(fence.fileno())
        with open(path + ".new", "w") as new:
            new.write(data)
            new.flush()
            os.fsync(new.fileno())
        os.replace(path + ".new", path)  # readers see the old file or the new one


def acquire(server, lease_ms):
    owner = str(uuid.uuid4())
    ask = "LOCK.ACQUIRE", LOCK, owner, "PX", lease_ms, "WAIT", 10000
    return owner, server.execute_command(*ask)


def main(path):
    server = redis.Redis.from_url(URL)
    _, old_token = acquire(server, lease_ms=200)  # paused: neither renews nor releases
    owner, new_token = acquire(server, lease_ms=60000)  # waits for the end of that lease

    results = []
    for name, token in ("new", new_token), ("old", old_token), ("new again", new_token):
        try:
            write_fenced(path, name, token)
            results.append(True)
            print(f"{name}, token {token}: written")
        except Fenced as error:
            results.append(False)
            print(f"{name}, token {token}: {error}")
    with open(path) as file:
        text = file.read()
    print(f"the file says: {text}")
    server.execute_command("LOCK.RELEASE", LOCK, owner)
    if results != [True, False, True] or text != "new again" or not old_token < new_token:
        sys.exit("FAILED: a late write got through, or one of the holder was refused")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(os.path.join(folder, "settings.ini"))

# SPDX-License-Identifier: BSD-3-Clause
# Copyright (c) 2026 The Turnstile authors
import os
import sys
import uuid

import redis

url = os.environ.get("REDIS_URL", "redis://127.0.0.1:6379")
client = redis.Redis.from_url(url, socket_timeout=7)  # seconds: WAIT and a margin
owner = str(uuid.uuid4())  # a new one for each acquisition
try:
    token = client.execute_command("LOCK.ACQUIRE", "table:12", owner, "PX", 10000, "WAIT", 5000)
except redis.TimeoutError:  # the lock may have been granted anyway
    client.execute_command("LOCK.RELEASE", "table:12", owner)
    raise
if token is None:
    sys.exit("not acquired")
print("token", token)
try:  # the work; this write happens only while the token holds the lock
    write = "SET", "{table:12}:guest", "alice", "EX", 60
    client.execute_command("LOCK.FENCE", "table:12", token, "THEN", *write)
finally:
    print("released", client.execute_command("LOCK.RELEASE", "table:12", owner))

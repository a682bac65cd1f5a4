"""One of several processes that compete for a lock, in Python. bench/clients.py starts it.

    clients_worker.py PORT WAY THINK_MS SECONDS FOLDER

Says "ready", waits for a line, competes, and prints JSON: how often it got the lock, how long each
wait was, and the CPU time that the process used. A file that only one can make tells whether two
hold the lock at a time.
"""

import json
import os
import pathlib
import sys
import time
import uuid

import redis

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "client-examples" / "python"))
from turnstile_lock import Lock  # noqa: E402
from turnstile_redis_lock import TurnstileLock  # noqa: E402

LEASE_S = 10
WAIT_S = 60


def bare(client):
    """The two commands themselves."""
    def acquire():
        owner = uuid.uuid4().hex
        token = client.execute_command(
            "LOCK.ACQUIRE", "lock", owner, "PX", LEASE_S * 1000, "WAIT", WAIT_S * 1000)
        assert token > 0
        return lambda: client.execute_command("LOCK.RELEASE", "lock", owner)
    return acquire


def turnstile(client):
    lock = Lock(client, "lock", lease=LEASE_S, wait=WAIT_S)
    return lambda: lock.acquire().release


def lock_class(kind):
    def way(client):
        def acquire():
            lock = client.lock("lock", timeout=LEASE_S, blocking_timeout=WAIT_S, lock_class=kind)
            assert lock.acquire()
            return lock.release
        return acquire
    return way


WAYS = {"bare": bare, "turnstile": turnstile, "drop-in": lock_class(TurnstileLock),
        "redis-py": lock_class(None)}


def main(port, way, think_ms, seconds, folder):
    client = redis.Redis(port=int(port))
    acquire = WAYS[way](client)
    inside = pathlib.Path(folder, "inside")
    acquire()()  # what is loaded and connected at first use
    print("ready", flush=True)
    sys.stdin.readline()
    waits = []
    cpu, end = time.process_time(), time.monotonic() + float(seconds)
    while time.monotonic() < end:
        asked = time.monotonic()
        release = acquire()
        waits.append(time.monotonic() - asked)
        os.close(os.open(inside, os.O_CREAT | os.O_EXCL))  # fails if two are inside
        os.unlink(inside)
        release()
        if int(think_ms):
            time.sleep(int(think_ms) / 1000)
    print(json.dumps({"waits": waits, "cpu": time.process_time() - cpu}))


main(*sys.argv[1:])

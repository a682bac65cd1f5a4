"""A service that needs the same locks as all the others, and takes them in its own way:

    /usr/bin/python3 service.py redis-py|turnstile|nothing URL FOLDER LOCK...

The same as service.mjs, in Python.
"""

import contextlib
import pathlib
import random
import signal
import sys
import time

import redis

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import scenario
import turnstile_lock

LEASE = 5.0
stopping = False


def stop(*_):
    global stopping
    stopping = True


def main(way, url, folder, *locks):
    signal.signal(signal.SIGTERM, stop)
    server = redis.Redis.from_url(url)
    ways = {
        "redis-py": lambda lock: server.lock(lock, timeout=LEASE, sleep=0.005),
        "turnstile": lambda lock: turnstile_lock.Lock(server, lock, lease=LEASE, wait=5.0),
        "nothing": lambda lock: contextlib.nullcontext(),
    }
    while not stopping:
        lock = random.choice(locks)
        with ways[way](lock):
            with scenario.alone_in(pathlib.Path(folder, lock.removeprefix("mutex:"))) as alone:
                if not alone:
                    scenario.fail(f"{way} is in the room of {lock}, and somebody else is there")
                scenario.note(pathlib.Path(folder, "journal"), f"{way} (Python)", lock)
                time.sleep(0.003)
        time.sleep(random.uniform(0, 0.01))


main(*sys.argv[1:])

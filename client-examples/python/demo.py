# SPDX-License-Identifier: BSD-3-Clause
# Copyright (c) 2026 The Turnstile authors
"""What turnstile_lock.py can do, one thing after the other. Prints what happens.

    /usr/bin/python3 client-examples/python/demo.py redis://127.0.0.1:6379
"""

import asyncio
import os
import sys
import threading
import time

import redis
import redis.asyncio

import turnstile_lock_asyncio
from turnstile_lock import Deadlock, Fenced, Lock, Lost, NotAcquired

RUN = os.getpid()  # own names for every run


def name(what):
    return f"demo:{RUN}:{what}"


def with_block(client):
    table = name("table:12")
    with Lock(client, table) as hold:
        print(f"with: held under token {hold.token}; the rival gets", end=" ")
        print(Lock(client, table).try_acquire())
        hold.run("SET", name("guest"), "alice", "EX", 60)
        print("guarded write: the guest is", client.get(name("guest")))
    print("after the block:", "held" if client.exists(table) else "free")
    try:
        with Lock(client, table):
            raise ValueError("the kitchen burns")
    except ValueError as error:
        print(f"work that throws ({error}):", "held" if client.exists(table) else "free")


def wait_in_line(client):
    lock = Lock(client, name("line"), wait=3.0)
    hold = lock.acquire()
    threading.Timer(0.2, hold.release).start()
    start = time.monotonic()
    with lock as second:
        waited = (time.monotonic() - start) * 1000
        print(f"wait: got it after {waited:.0f} ms, token {second.token} > {hold.token}")
        try:
            lock.acquire(wait=0.1)
        except NotAcquired as error:
            print("wait, too short:", error)  # who holds it, and for how long


def renewal(client):
    with Lock(client, name("long"), lease=0.3) as hold:
        hold.lost.wait(1.0)  # work for three leases
        hold.check()
        print("renewal: a lease of 0.3 s, still held after 1 s")
    hold = Lock(client, name("long"), lease=0.3, max_hold=0.6).acquire()
    hold.lost.wait()
    try:
        hold.check()
    except Lost as error:
        print("maximum:", error)
    hold.release()


def loss(client):
    hold = Lock(client, name("lost"), lease=0.6).acquire()
    client.delete(name("lost"))  # an operator's forced release
    hold.lost.wait()
    print("lost: told in time;", end=" ")
    try:
        hold.run("SET", name("guest"), "mallory")
    except Fenced as error:
        print("late write:", error)
    print("release() says", hold.release())


def modes(client):
    readers = Lock(client, name("menu"), shared=True)
    with readers, readers:
        writer = Lock(client, name("menu")).try_acquire()
        print("shared: two readers hold it; a writer gets", writer)
    ovens = Lock(client, name("ovens"), limit=2, wait=0)
    with ovens, ovens:
        print("limit: two of 2 are out; the third gets", ovens.try_acquire())
    with Lock(client, name("session"), session=True):
        print("session: ends with its connection")
    with Lock(client, name("a"), also=[name("b"), name("c")]) as hold:
        held = client.exists(name("a"), name("b"), name("c"))
        print(f"many: {held} locks under one token, {hold.token}")


def deadlock(client):
    both_hold_one = threading.Barrier(2)

    def diner(owner, first, second):  # one owner for both: so the server can see the circle
        with Lock(client, name(first), owner=owner):
            both_hold_one.wait()
            try:
                with Lock(client, name(second), owner=owner):
                    print(f"deadlock: {owner} eats")
            except Deadlock as error:
                print(f"deadlock: {owner} lets go: {error}")

    alice = threading.Thread(target=diner, args=("alice", "knife", "fork"))
    alice.start()
    diner("bob", "fork", "knife")
    alice.join()


async def with_asyncio(url):
    client = redis.asyncio.from_url(url)
    lock = turnstile_lock_asyncio.Lock(client, name("async"), lease=0.6)
    try:
        async with lock as hold:
            await hold.run("SET", name("guest"), "bob", "EX", 60)
            print("asyncio: held under token", hold.token)
            await client.delete(lock.key)
            await asyncio.sleep(60)
    except Lost as error:
        print("asyncio: the work was cancelled:", error)
    await client.connection_pool.disconnect()


def main(url):
    client = redis.Redis.from_url(url, decode_responses=True)
    try:
        client.ping()
    except redis.ConnectionError as error:
        sys.exit(f"No server: {error}")
    for show in (with_block, wait_in_line, renewal, loss, modes, deadlock):
        show(client)
    asyncio.run(with_asyncio(url))
    client.delete(name("guest"))
    client.connection_pool.disconnect()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "redis://127.0.0.1:6379")

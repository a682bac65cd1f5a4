#!/usr/bin/python3
# SPDX-License-Identifier: BSD-3-Clause
# Copyright (c) 2026 The Turnstile authors
"""Several resources at once (ALSO): transfers between accounts, all locks or none.

The locks of a transfer come under one token, in one step, so there is no order to keep and no
deadlock. Then two owners take the same locks one by one, in opposite order: the server refuses the
wait that would never end.
"""

import concurrent.futures
import os
import random
import sys
import uuid

import redis

URL = os.environ.get("REDIS_URL", "redis://127.0.0.1:6379")
# In a cluster all locks of a request, and what is written under them, must be in one slot.
BANK = f"{{recipe:{uuid.uuid4()}}}"
ACCOUNTS = [f"{BANK}:account:{number}" for number in range(4)]
TRANSFERS = 200


def main():
    server = redis.Redis.from_url(URL)
    expected = dict.fromkeys(ACCOUNTS, 100)
    server.mset(expected)
    plan = [random.sample(ACCOUNTS, 2) for _ in range(TRANSFERS)]
    for payer, payee in plan:
        expected[payer] -= 1
        expected[payee] += 1

    def transfer(pair):
        payer, payee = pair
        locks = payer + ":lock", "ALSO", 1, payee + ":lock"
        owner = str(uuid.uuid4())
        token = server.execute_command(
            "LOCK.ACQUIRE", locks[0], owner, "PX", 5000, "WAIT", 10000, *locks[1:]
        )
        if token is None:
            raise RuntimeError("no turn within 10 s")
        try:
            paid, got = map(int, server.mget(payer, payee))
            write = "MSET", payer, paid - 1, payee, got + 1
            server.execute_command("LOCK.FENCE", locks[0], token, "THEN", *write)
        finally:
            # Counts the locks that were given up. 2 here: else one of them had been lost.
            if server.execute_command("LOCK.RELEASE", locks[0], owner, *locks[1:]) != 2:
                raise RuntimeError("a lock was lost")

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(transfer, plan))
    balances = [int(balance) for balance in server.mget(ACCOUNTS)]
    print(f"{TRANSFERS} transfers: {balances}, together {sum(balances)}")
    server.delete(*ACCOUNTS)
    if balances != list(expected.values()):
        sys.exit(f"FAILED: a transfer was lost: not {list(expected.values())}")

    # One by one. The server sees a cycle only if a worker takes all its locks as one owner.
    one, two = f"{BANK}:one", f"{BANK}:two"
    alice, bob = str(uuid.uuid4()), str(uuid.uuid4())
    server.execute_command("LOCK.ACQUIRE", one, alice, "PX", 10000)
    server.execute_command("LOCK.ACQUIRE", two, bob, "PX", 10000)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        waits = [
            pool.submit(server.execute_command, "LOCK.ACQUIRE", key, owner, "PX", 10000, "WAIT", 9000)
            for key, owner in ((two, alice), (one, bob))
        ]
        done, _ = concurrent.futures.wait(waits, return_when=concurrent.futures.FIRST_COMPLETED)
        refused = done.pop()
        print("one by one:", str(refused.exception()).partition(" ")[0])
        loser, winner = (bob, alice) if refused is waits[1] else (alice, bob)
        server.execute_command("LOCK.RELEASE", one, loser, "ALSO", 1, two)  # lets the other go on
        (other,) = set(waits) - {refused}
        print("the other goes on, token", other.result())
    released = server.execute_command("LOCK.RELEASE", one, winner, "ALSO", 1, two)
    if not str(refused.exception()).startswith("DEADLOCK") or released != 2:
        sys.exit("FAILED: the deadlock was not refused")


if __name__ == "__main__":
    main()

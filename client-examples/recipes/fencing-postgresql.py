#!/usr/bin/python3
# SPDX-License-Identifier: BSD-3-Clause
# Copyright (c) 2026 The Turnstile authors
"""Fencing a PostgreSQL table: a holder that was paused past its lease cannot write any more.

The database keeps the highest token it has seen. fence() refuses a lower one, and with it the whole
transaction. It also locks its row to the end of the transaction, so writes come in the order of
their tokens. Uses psql, and its environment variables (PGHOST, PGPORT, PGUSER, PGDATABASE).
"""

import os
import subprocess
import sys
import uuid

import redis

URL = os.environ.get("REDIS_URL", "redis://127.0.0.1:6379")
RUN = uuid.uuid4().hex
LOCK, SCHEMA = f"recipe:{RUN}:stock", f"recipe_{RUN}"

TABLES = f"""
CREATE SCHEMA {SCHEMA};
SET search_path = {SCHEMA};
CREATE TABLE fences (resource text PRIMARY KEY, token bigint NOT NULL);
CREATE TABLE stock (item text PRIMARY KEY, pieces int, counted_by text);
INSERT INTO stock VALUES ('cup', 0, ''), ('plate', 0, '');

CREATE FUNCTION fence(text, bigint) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  INSERT INTO fences AS f VALUES ($1, $2)
    ON CONFLICT (resource) DO UPDATE SET token = $2 WHERE f.token <= $2;
  IF NOT FOUND THEN
    RAISE EXCEPTION 'a holder with a higher token has written to % already', $1;
  END IF;
END $$;
"""

WRITE = f"""
SET search_path = {SCHEMA};
BEGIN;
SELECT fence('stock', :token);  -- first of all
UPDATE stock SET pieces = 12, counted_by = :'name' WHERE item = 'cup';
UPDATE stock SET pieces = 30, counted_by = :'name' WHERE item = 'plate';
COMMIT;
"""


def psql(statements, **variables):
    command = ["psql", "-X", "-q", "-t", "-A", "-v", "ON_ERROR_STOP=1"]
    for name, value in variables.items():
        command += ["-v", f"{name}={value}"]
    return subprocess.run(command, input=statements, capture_output=True, text=True)


def acquire(server, lease_ms):
    owner = str(uuid.uuid4())
    ask = "LOCK.ACQUIRE", LOCK, owner, "PX", lease_ms, "WAIT", 10000
    return owner, server.execute_command(*ask)


def main():
    server = redis.Redis.from_url(URL)
    if (made := psql(TABLES)).returncode != 0:
        sys.exit(f"FAILED: {made.stderr}")
    _, old_token = acquire(server, lease_ms=200)  # paused: neither renews nor releases
    owner, new_token = acquire(server, lease_ms=60000)  # waits for the end of that lease

    results = []
    for name, token in ("new", new_token), ("old", old_token), ("new again", new_token):
        write = psql(WRITE, name=name, token=token)
        results.append(write.returncode == 0)
        print(f"{name}, token {token}:", "written" if results[-1] else write.stderr.splitlines()[0])
    names = psql(f"SELECT DISTINCT counted_by FROM {SCHEMA}.stock").stdout.split("\n")[:-1]
    print(f"the stock was counted by: {', '.join(names)}")
    psql(f"DROP SCHEMA {SCHEMA} CASCADE")
    server.execute_command("LOCK.RELEASE", LOCK, owner)
    if results != [True, False, True] or names != ["new again"] or not old_token < new_token:
        sys.exit("FAILED: a late write got through, or one of the holder was refused")


if __name__ == "__main__":
    main()

#!/usr/bin/python3
# SPDX-License-Identifier: BSD-3-Clause
# Copyright (c) 2026 The Turnstile authors
"""Fencing rows of SQLite: each row keeps the token that wrote it, and refuses a lower one.

The trigger is what refuses, so no writer can forget to compare. A writer must only say its token.
"""

import os
import sqlite3
import sys
import tempfile
import uuid

import redis

URL = os.environ.get("REDIS_URL", "redis://127.0.0.1:6379")
LOCK = f"recipe:{uuid.uuid4()}:report"

TABLES = """
CREATE TABLE report (name TEXT PRIMARY KEY, text TEXT NOT NULL, token INTEGER NOT NULL);
CREATE TRIGGER report_fence BEFORE UPDATE ON report WHEN NEW.token < OLD.token
BEGIN
  SELECT RAISE(ABORT, 'a holder with a higher token has written already');
END;
INSERT INTO report VALUES ('daily', '', 0);
"""


def acquire(server, lease_ms):
    owner = str(uuid.uuid4())
    ask = "LOCK.ACQUIRE", LOCK, owner, "PX", lease_ms, "WAIT", 10000
    return owner, server.execute_command(*ask)


def write(database, text, token):
    try:
        with database:  # one transaction
            database.execute(
                "UPDATE report SET text = ?, token = ? WHERE name = 'daily'", (text, token)
            )
        print(f"{text}, token {token}: written")
        return True
    except sqlite3.IntegrityError as error:
        print(f"{text}, token {token}: {error}")
        return False


def main(path):
    server = redis.Redis.from_url(URL)
    database = sqlite3.connect(path)
    database.executescript(TABLES)
    _, old_token = acquire(server, lease_ms=200)  # paused: neither renews nor releases
    owner, new_token = acquire(server, lease_ms=60000)  # waits for the end of that lease

    results = [
        write(database, "new", new_token),
        write(database, "old", old_token),
        write(database, "new again", new_token),
    ]
    text, token = database.execute("SELECT text, token FROM report").fetchone()
    print(f"the report is: {text}")
    server.execute_command("LOCK.RELEASE", LOCK, owner)
    if results != [True, False, True] or (text, token) != ("new again", new_token):
        sys.exit("FAILED: a late write got through, or one of the holder was refused")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(os.path.join(folder, "reports.db"))

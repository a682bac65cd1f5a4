"""One lock over N independent Turnstile servers, held while a majority of them agrees.

    quorum = Quorum(["redis://10.0.0.1", "redis://10.0.0.2", "redis://10.0.0.3"])
    hold = quorum.acquire("report:daily", lease_ms=10_000, wait_ms=5_000)
    if hold:
        with hold:
            store.write(page, fencing_token=hold.token)

The lock survives the loss of any minority of the servers. Two rounds find one fencing token: the
first asks every server for a token, the second raises a majority to one of them. Any two majorities
share a server, so a later holder's token is larger, and a store that keeps the highest token it has
seen can refuse a holder that is late.

The servers share nothing: no replication, no persistence is needed. A server that restarts empty
has forgotten its holds: set turnstile.failover-grace-ms on all of them to the longest lease in use,
and turnstile.token-margin-ms to at least twice what their clocks may be apart.

Needs redis-py, tested with 4.3 (Debian: python3-redis). One Quorum per thread.
"""

import random
import secrets
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry


class Quorum:
    """N servers, each given timeout_ms to connect and to answer, so that a dead one blocks nobody.

    The time-out should be a small part of the lease; pause_ms is the longest pause between tries.
    """

    def __init__(self, urls, timeout_ms=50, pause_ms=30):
        self.servers = [
            redis.Redis.from_url(
                url,
                socket_timeout=timeout_ms / 1000,
                socket_connect_timeout=timeout_ms / 1000,
                retry=Retry(NoBackoff(), 0),  # trying again is decided here, not in redis-py
            )
            for url in urls
        ]
        self.majority = len(self.servers) // 2 + 1
        self.pause_ms = pause_ms
        self.last_error = None  # why a server did not count; for logs
        self._threads = ThreadPoolExecutor(len(self.servers))

    def acquire(self, key, lease_ms, wait_ms=0):
        """A Hold, or None if no majority could be had in wait_ms. Makes at least one try."""
        deadline = time.monotonic() + wait_ms / 1000
        while True:
            hold = self._try(key, lease_ms)
            if hold:
                return hold
            # Rivals that split the servers between them must not meet again at the same moment.
            pause = random.uniform(0, self.pause_ms / 1000)
            if time.monotonic() + pause >= deadline:
                return None
            time.sleep(pause)

    def _try(self, key, lease_ms):
        # A new owner for each try: what a slow server does with an old request concerns nobody.
        owner = secrets.token_hex(16)
        command = ("LOCK.ACQUIRE", key, owner, "PX", lease_ms)
        start = time.monotonic()  # before the first lease can begin
        tokens = self.ask_all(self.servers, *command)
        granted = [server for server, token in zip(self.servers, tokens) if token is not None]
        if len(granted) >= self.majority:
            token = closest_majority(
                [token for token in tokens if token is not None], self.majority
            )
            # A larger answer means that the hold was lost in between, or that this server is not of
            # the majority: only the same token counts.
            same = self.ask_all(granted, *command, "FLOOR", token).count(token)
            hold = Hold(self, key, owner, token, valid_until(start, lease_ms))
            if same >= self.majority and hold.valid():
                return hold
        self.ask_all(self.servers, "LOCK.RELEASE", key, owner)
        return None

    def ask_all(self, servers, *command):
        """The answers of the servers, asked in parallel; None for one that failed."""
        return list(self._threads.map(lambda server: self._ask_or_none(server, command), servers))

    def _ask_or_none(self, server, command):
        try:
            return self.ask(server, *command)
        except redis.RedisError as error:  # no answer in time, or an error as the answer
            self.last_error = error
            return None

    def ask(self, server, *command):
        return server.execute_command(*command)

    def close(self):
        self._threads.shutdown()
        for server in self.servers:
            server.connection_pool.disconnect()


class Hold:
    """A lock that was obtained. Work only while valid(); give `token` to whatever you write to."""

    def __init__(self, quorum, key, owner, token, until):
        self.key = key
        self.token = token
        self.until = until  # on time.monotonic()
        self._quorum = quorum
        self._owner = owner

    def valid(self):
        return time.monotonic() < self.until

    def extend(self, lease_ms):
        """Whether a majority let the lease end lease_ms from now, while the old one was valid."""
        until = valid_until(time.monotonic(), lease_ms)
        servers = self._quorum.servers
        answers = self._quorum.ask_all(
            servers, "LOCK.TOUCH", self.key, self._owner, "PX", lease_ms
        )
        extended = answers.count(1) >= self._quorum.majority and self.valid()
        # If not, the new lease may be the shorter one.
        self.until = until if extended else min(self.until, until)
        lost = [server for server, answer in zip(servers, answers) if answer == 0]
        if lost and self.valid():
            # A server that restarted can be won back. It counts from the next extension on: by then
            # a majority has kept everybody else out without it.
            self._quorum.ask_all(
                lost, "LOCK.ACQUIRE", self.key, self._owner, "PX", lease_ms, "FLOOR", self.token
            )
        return extended and self.valid()

    def release(self):
        """Gives the lock up on every server it can reach; elsewhere the lease ends it."""
        self.until = time.monotonic()
        self._quorum.ask_all(self._quorum.servers, "LOCK.RELEASE", self.key, self._owner)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.release()


def closest_majority(tokens, size):
    """The highest of the `size` tokens that lie closest together.

    A server that started a moment ago leads the others, by up to its margin, and they would refuse
    to follow it: it is left out if there are enough of them.
    """
    tokens = sorted(tokens)
    spans = zip(tokens, tokens[size - 1 :])
    return min(spans, key=lambda span: span[1] - span[0])[1]


def valid_until(start, lease_ms):
    """The end of a lease less what the clocks may drift apart meanwhile: 1 % of it and 2 ms."""
    return start + (lease_ms - lease_ms / 100 - 2) / 1000


def main():
    quorum = Quorum(sys.argv[1:] or ["redis://127.0.0.1:6379"])
    hold = quorum.acquire("report:daily", lease_ms=2_000, wait_ms=5_000)
    if not hold:
        sys.exit(f"not obtained; the last error was: {quorum.last_error}")
    with hold:
        print(f"a majority of {len(quorum.servers)} agreed on token {hold.token}")
        if not hold.extend(lease_ms=10_000):
            sys.exit("lost")
        print("extended; now write, and send the token along")
    print("released")
    quorum.close()


if __name__ == "__main__":
    main()

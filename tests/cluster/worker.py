"""One competitor of tests/cluster/run: the Python client on redis-py's cluster client.

worker.py KIND REGISTER_PORT NODE_PORT... : does what the register says until it says stop. KIND is
redis-py or redis-py-asyncio.

The worker reports everything that a holder sees to the register, with the time until which the hold
is certainly valid: on the monotonic clock, which both share.
"""

import asyncio
import logging
import pathlib
import socket
import sys
import time

import redis
import redis.asyncio
import redis.asyncio.cluster
import redis.cluster

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "client-examples" / "python"))
import turnstile_lock  # noqa: E402
import turnstile_lock_asyncio  # noqa: E402
from turnstile_lock import Fenced, Lost, Moved, NotAcquired, NotPrimary  # noqa: E402

PATIENCE_S = 10
# What is left to the caller while a node is away, or a slot for longer than we wait.
PASSING = (redis.ConnectionError, redis.TimeoutError, redis.exceptions.ClusterError, Moved)
PASSING += (redis.exceptions.RedisClusterException, NotPrimary)


class GaveUp(Exception):
    pass


class Client:
    """The calls of the client, with and without asyncio."""

    def __init__(self, kind, ports, tell):
        self.tell = tell
        self.loop = asyncio.new_event_loop() if kind == "redis-py-asyncio" else None
        client, self.locks = redis.cluster, turnstile_lock
        if self.loop:
            client, self.locks = redis.asyncio.cluster, turnstile_lock_asyncio
        nodes = [client.ClusterNode("127.0.0.1", int(port)) for port in ports]
        self.cluster = self.done(self.connect(client, nodes))

    async def connect(self, client, nodes):
        cluster = client.RedisCluster(startup_nodes=nodes, socket_timeout=PATIENCE_S)
        return await cluster.initialize() if self.loop else cluster

    def done(self, result):
        if not asyncio.iscoroutine(result):
            return result
        if self.loop:
            return self.loop.run_until_complete(result)
        return asyncio.run(result)

    def call(self, ask):
        """What came of it, and whether it was asked only once."""
        deadline = time.monotonic() + PATIENCE_S
        once = True
        while time.monotonic() < deadline:
            try:
                return self.done(ask()), once
            except PASSING:
                once = False
                self.tell("disturbed")  # the register replies when the cluster has changed
            except redis.RedisError as error:
                self.tell("surprise", type(error).__name__, *str(error).split())
                raise GaveUp from error
        raise GaveUp

    def close(self):
        async def close():
            await self.locks.Server.of(self.cluster).close()
            await self.cluster.close()

        if self.loop:
            self.done(close())

    def lock(self, keys, lease_ms, wait_ms):
        options = {"also": keys[1:], "renew": False, "reply_timeout": 2.0}
        return self.locks.Lock(self.cluster, keys[0], lease_ms / 1000, wait_ms / 1000, **options)

    def write(self, hold, value):
        """The value that the guarded write replaced."""
        try:
            return int(self.call(lambda: hold.run("SET", value, hold.token, "GET"))[0])
        except Fenced:
            return "fenced"
        except GaveUp:
            return "unknown"


def end_of(hold):
    return int(hold.until * 1e6)


class Worker:
    def __init__(self, kind, register_port, *ports):
        connection = socket.create_connection(("127.0.0.1", int(register_port)))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.register = connection.makefile("rw")
        self.client = Client(kind, ports, self.tell)
        print(kind, file=self.register, flush=True)

    def tell(self, *words):
        print(*words, file=self.register, flush=True)
        answer = self.register.readline().split()
        if not answer:
            sys.exit("worker: the register is gone")
        return answer

    def run(self):
        while (order := self.tell("next"))[0] != "stop":
            keys, value, lease_ms, wait_ms, plan, work = order[1:]
            self.take(keys.split(","), value, int(lease_ms), int(wait_ms), plan, work)
        self.client.close()

    def take(self, keys, value, lease_ms, wait_ms, plan, work):
        client = self.client
        lock = client.lock(keys, lease_ms, wait_ms)
        try:
            hold, _ = client.call(lock.acquire)
        except NotAcquired:
            self.tell("missed", "busy" if wait_ms == 0 else "time-out")
            return
        except GaveUp:
            self.tell("missed", "errors")
            return
        if self.tell("enter", hold.token, end_of(hold)) == ["too-late"]:
            self.release(hold)
            return
        if plan == "oversleep":
            self.outstay(keys, lease_ms)
            self.tell("wrote-late", client.write(hold, value))
            hold.ended()
            return
        self.tell("work", work)  # the register replies when others have done that much
        try:
            if plan == "touch":
                try:
                    client.call(hold.touch)
                    self.tell("touched", len(keys), end_of(hold))
                except Lost:
                    self.tell("touched", 0, 0)
            elif plan == "again":
                try:
                    again, _ = client.call(lambda: lock.acquire(wait=0, owner=hold.owner))
                    self.tell("again", again.token, end_of(again))
                    again.ended()
                except NotAcquired:
                    self.tell("again", 0, 0)
        except GaveUp:
            self.tell("unsure", plan)
        if plan != "no-write":
            self.tell("wrote", client.write(hold, value))
        self.tell("leave")
        if self.release(hold) and plan == "late-write":
            self.tell("wrote-late", client.write(hold, value))

    def outstay(self, keys, lease_ms):
        """Returns when the lease has ended: waits for the lock as another owner."""
        try:
            heir, _ = self.client.call(self.client.lock(keys, lease_ms, PATIENCE_S * 500).acquire)
            self.client.call(heir.release)
        except (GaveUp, NotAcquired):
            pass

    def release(self, hold):
        try:
            released, once = self.client.call(hold.release)
        except GaveUp:
            self.tell("unsure", "release")
            return False
        count = len(hold.keys) if released else 0
        self.tell("released", count, "clean" if once else "disturbed")
        return True


logging.getLogger("redis").addHandler(logging.NullHandler())
logging.getLogger("redis").propagate = False
Worker(*sys.argv[1:]).run()

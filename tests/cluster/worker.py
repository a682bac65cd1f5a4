"""One competitor of tests/cluster/run: redis-py's cluster client.

worker.py KIND REGISTER_PORT NODE_PORT... : does what the register says until it says stop.

The worker reports everything that a holder sees to the register, with the time until which the hold
is certainly valid: counted from before the request, on the monotonic clock, which both share.
"""

import logging
import socket
import sys
import time
import uuid

import redis
from redis.cluster import ClusterNode, RedisCluster

PATIENCE_S = 10
# Errors that a cluster client has to expect, in addition to those that the library handles.
PASSING = ("TRYAGAIN", "MOVED", "ASK", "CLUSTERDOWN", "UNBLOCKED", "READONLY", "LOADING")


class Disturbances(logging.Handler):
    """Detects that the library lost a connection and may have repeated a command by itself."""

    seen = 0

    def emit(self, record):
        kind = record.exc_info[0] if record.exc_info else None
        if kind and issubclass(kind, (redis.ConnectionError, redis.TimeoutError)):
            self.seen += 1


class GaveUp(Exception):
    pass


class Fenced(Exception):
    pass


def now_us():
    return time.monotonic_ns() // 1000


def is_passing(error):
    if isinstance(error, redis.ResponseError):
        passing = (
            redis.exceptions.ClusterError,
            redis.exceptions.ClusterDownError,
            redis.exceptions.ReadOnlyError,
        )
        return isinstance(error, passing) or str(error).startswith(PASSING)
    return True  # lost connections, and the library's own cluster errors


class Client:
    def __init__(self, ports, tell):
        self.ports = ports
        self.connect()
        self.tell = tell
        self.disturbances = Disturbances()
        logger = logging.getLogger("redis")
        logger.addHandler(self.disturbances)
        logger.propagate = False

    def connect(self):
        nodes = [ClusterNode("127.0.0.1", int(port)) for port in self.ports]
        self.cluster = RedisCluster(startup_nodes=nodes, socket_timeout=PATIENCE_S + 2)

    def try_once(self, *command):
        """The reply and True, or None and False if the outcome is unknown."""
        try:
            return self.cluster.execute_command(*command), True
        except redis.RedisError as error:
            if str(error).startswith("FENCED"):
                raise Fenced from error
            if not is_passing(error):
                self.tell("surprise", *command[:1], *str(error).split())
                raise GaveUp from error
        except (AttributeError, IndexError):
            # redis-py 4.3 mistakes a primary for a replica when it is redirected to a node that it
            # already knows, or after failovers; without a primary it is unusable. And it has no
            # connection to a node without slots to which it is redirected with ASK.
            self.cluster.close()
            self.connect()
        self.disturbances.seen += 1
        self.tell("disturbed")  # the register replies when the cluster has changed
        return None, False

    def call(self, *command):
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            reply, certain = self.try_once(*command)
            if certain:
                return reply
        raise GaveUp

    def acquire(self, keys, owner, lease_ms, wait_ms):
        """The token and the end of its validity; (0, 0) if the lock was not acquired."""
        deadline = time.monotonic() + wait_ms / 1000
        while True:
            left_ms = max(0, int((deadline - time.monotonic()) * 1000))
            end = now_us() + lease_ms * 1000
            command = ["LOCK.ACQUIRE", keys[0], owner, "PX", lease_ms, "WAIT", left_ms]
            token, certain = self.try_once(*command, *also(keys))
            if certain:
                return (int(token), end) if token is not None else (0, 0)
            if time.monotonic() > deadline + PATIENCE_S / 2:
                raise GaveUp

    def write(self, key, token, value):
        """The value that the guarded write replaced."""
        try:
            return int(self.call("LOCK.FENCE", key, token, "THEN", "SET", value, token, "GET"))
        except Fenced:
            return "fenced"
        except GaveUp:
            return "unknown"


def also(keys):
    return ["ALSO", len(keys) - 1, *keys[1:]] if len(keys) > 1 else []


class Worker:
    def __init__(self, kind, register_port, *ports):
        connection = socket.create_connection(("127.0.0.1", int(register_port)))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.register = connection.makefile("rw")
        self.client = Client(ports, self.tell)
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

    def take(self, keys, value, lease_ms, wait_ms, plan, work):
        client, owner = self.client, uuid.uuid4().hex
        try:
            token, end = client.acquire(keys, owner, lease_ms, wait_ms)
        except GaveUp:
            self.release(keys, owner)
            self.tell("missed", "errors")
            return
        if not token:
            self.tell("missed", "busy" if wait_ms == 0 else "time-out")
            return
        if self.tell("enter", token, end) == ["too-late"]:
            self.release(keys, owner)
            return
        if plan == "oversleep":
            self.outstay(keys, lease_ms)
            self.tell("wrote-late", client.write(keys[0], token, value))
            return
        self.tell("work", work)  # the register replies when others have done that much
        try:
            if plan == "touch":
                end = now_us() + lease_ms * 1000
                count = client.call("LOCK.TOUCH", keys[0], owner, "PX", lease_ms, *also(keys))
                self.tell("touched", count, end)
            elif plan == "again":
                self.tell("again", *client.acquire(keys, owner, lease_ms, 0))
        except GaveUp:
            self.tell("unsure", plan)
        if plan != "no-write":
            self.tell("wrote", client.write(keys[0], token, value))
        self.tell("leave")
        if self.release(keys, owner) and plan == "late-write":
            self.tell("wrote-late", client.write(keys[0], token, value))

    def outstay(self, keys, lease_ms):
        """Returns when the lease has ended: waits for the lock as another owner."""
        heir = uuid.uuid4().hex
        try:
            self.client.acquire(keys, heir, lease_ms, PATIENCE_S * 500)
            self.client.call("LOCK.RELEASE", keys[0], heir, *also(keys))
        except GaveUp:
            pass

    def release(self, keys, owner):
        disturbances = self.client.disturbances.seen
        try:
            count = self.client.call("LOCK.RELEASE", keys[0], owner, *also(keys))
        except GaveUp:
            self.tell("unsure", "release")
            return False
        clean = self.client.disturbances.seen == disturbances
        self.tell("released", count, "clean" if clean else "disturbed")
        return True


Worker(*sys.argv[1:]).run()

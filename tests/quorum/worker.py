"""One competitor of tests/quorum/run: Python, with the client of client-examples/python.

worker.py REGISTER_PORT LEASE_MS SERVER_URL... : asks the register what to do until it says stop.
"""

import pathlib
import socket
import sys

import redis

root = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(root / "client-examples" / "python"))
from quorum import Quorum  # noqa: E402


class PartitionedQuorum(Quorum):
    """The example's client on a network in which some servers are unreachable."""

    cut = frozenset()

    def ask(self, server, commands):
        if self.servers.index(server) in self.cut:
            raise redis.ConnectionError("cut off")
        return super().ask(server, commands)


def main(register_port, lease_ms, *urls):
    lease_ms = int(lease_ms)
    quorum = PartitionedQuorum(urls)
    connection = socket.create_connection(("127.0.0.1", int(register_port)))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    register = connection.makefile("rw")
    print("python", file=register, flush=True)

    def tell(*words):
        print(*words, file=register, flush=True)
        return register.readline().split()

    def end_of(hold):
        return int(hold.until * 1e6)  # the register reads the same monotonic clock

    while True:
        order, *cut = tell("next")
        if order == "stop":
            break
        quorum.cut = frozenset(map(int, cut))
        hold = quorum.acquire("quorum:register", lease_ms, wait_ms=200, renew=False)
        if not hold:
            continue
        [order] = tell("enter", hold.token, end_of(hold))
        if order == "oversleep":
            tell("late-write", hold.token)  # the register replies when another worker has written
        elif order != "too-late":
            if order == "extend" and hold.extend(lease_ms):
                tell("extended", hold.token, end_of(hold))
            if hold.valid():
                tell("write", hold.token)
            tell("leave", hold.token)
        hold.release()
    quorum.close()


main(*sys.argv[1:])

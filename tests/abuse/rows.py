"""The work that one client with permission to lock can cause: one row for each scenario.

The function of a row takes a server and n, creates the state, and yields the cost of the action,
once or as often as the state allows repetitions.
"""

import dataclasses
import time
import typing

from server import Cost, Server, TooSlow

LINES = 65  # queues of a request with the maximum number of keys: one and 64 by ALSO
LEASE = ("PX", 3_600_000)
WAIT = ("WAIT", 600_000)
SOME_CALLS = 20


@dataclasses.dataclass
class Row:
    name: str
    title: str
    run: typing.Callable
    small: tuple  # n, 2n and 4n in CI
    full: tuple
    goal_ms: float | None = None  # per call, at every n up to `goal_at`
    goal_at: int = 0
    growth: float = 2.6  # maximum from one n to the next
    floor_ms: float = 0.3  # smaller values count as this, because they are noise
    stall_goal_ms: float | None = None
    memory_goal_mb: float | None = None  # in addition to what the server needs without the module
    instructions: bool = False  # counted instead of timed, if valgrind is installed
    connections: int = 0  # per unit of n


def also(keys):
    return ("ALSO", len(keys), *keys)


def same_keys(_waiter):
    return [f"k{line}" for line in range(1, LINES)]


def own_keys(waiter):
    return [f"k{waiter}:{line}" for line in range(1, LINES)]


def allow_holders(server, n):
    if n > 10_000 and server.has_setting("turnstile.max-holders"):
        server.ask("CONFIG", "SET", "turnstile.max-holders", n)


def hold(server, key, n, *mode):
    """Creates n holders of one lock."""
    allow_holders(server, n)
    server.do_all(("LOCK.ACQUIRE", key, f"holder{i}", *LEASE, *mode) for i in range(n))


def wait(server, n, keys, *mode, wait_ms=600_000):
    """Creates n connections that each wait for `a` and for keys(i)."""
    server.ask("LOCK.ACQUIRE", "a", "owner", *LEASE)
    waiters = [server.connect() for _ in range(n)]
    with server.frozen():  # they arrive at the same time, and so end at the same time
        for i, waiter in enumerate(waiters):
            waiter.send("LOCK.ACQUIRE", "a", f"waiter{i}", *LEASE, *mode, "WAIT", wait_ms,
                        *also(keys(i)))
    end = time.monotonic() + wait_ms / 1000
    server.wait_for(lambda: server.waiting() == n or time.monotonic() > end)
    return waiters


def a_while_s(server, n):
    """Enough time for n requests to arrive."""
    return (0.2 + n / 5000) * server.patience


def holding(server, key):
    info = server.ask("LOCK.INFO", key)
    return info[info.index(b"holding") + 1]


def let_pass_while_frozen(seconds):
    """A stopped server cannot be asked whether a lease has ended, but its clock advances."""
    time.sleep(seconds)


def must_be_before(end):
    if time.monotonic() >= end:
        raise TooSlow


def one_leaves(server: Server, n):
    waiters = wait(server, n, same_keys, "SHARED")
    for i in range(n // 4):
        with server.measure() as cost:
            waiters[i].close()
            server.wait_until_waiting(n - 1 - i)
        yield cost


def touch_after_others_ended(server: Server, n):
    allow_holders(server, n + 1)
    server.ask("LOCK.ACQUIRE", "a", "owner", *LEASE, "SHARED")
    lease_s = a_while_s(server, n // 5)
    end = time.monotonic() + lease_s
    server.do_all(("LOCK.ACQUIRE", "a", f"short{i}", "PX", int(lease_s * 1000), "SHARED")
                  for i in range(n))
    must_be_before(end)
    # By the clock only "owner" holds it, but the others have not been removed.
    server.wait_for(lambda: holding(server, "a") == 1)
    with server.measure() as cost:
        assert server.ask("LOCK.TOUCH", "a", "owner", *LEASE) == 1
    yield cost


def exclusive_behind_readers(server: Server, n):
    hold(server, "a", n, "SHARED")
    while True:
        with server.measure(SOME_CALLS) as cost:
            for _ in range(SOME_CALLS):
                server.ask("LOCK.ACQUIRE", "a", "writer", *LEASE, "WAIT", 1)
        yield cost


def deadlock_search(server: Server, n):
    hold(server, "a", 5 * n, "SHARED")
    waiters = []
    for i in range(n):
        waiters.append(server.connect())
        # Each holds a lock that somebody could wait for.
        waiters[-1].send("LOCK.ACQUIRE", f"of{i}", f"waiter{i}", *LEASE)
        waiters[-1].send("LOCK.ACQUIRE", "a", f"waiter{i}", *LEASE, *WAIT)
    server.wait_until_waiting(n)
    server.ask("LOCK.ACQUIRE", "b", "seeker", *LEASE)
    waiters.append(server.connect())
    waiters[-1].send("LOCK.ACQUIRE", "b", "other", *LEASE, *WAIT)
    server.wait_until_waiting(n + 1)
    while True:
        with server.measure(SOME_CALLS) as cost:
            for _ in range(SOME_CALLS):
                server.ask("LOCK.ACQUIRE", "a", "seeker", *LEASE, "WAIT", 1)
        yield cost


def info_of_many_holders(server: Server, n):
    hold(server, "a", n, "SHARED")
    while True:
        with server.measure(SOME_CALLS) as cost:
            for _ in range(SOME_CALLS):
                server.control.send("LOCK.INFO", "a")
                server.control.raw_replies()
        yield cost


def top_without_rights(server: Server, n):
    server.ask("ACL", "SETUSER", "stranger", "on", "nopass", "~none:*", "+@all")
    waiters = wait(server, n, own_keys, "SHARED")
    stranger = server.connect("stranger")
    while waiters:
        with server.measure(5) as cost:
            for _ in range(5):
                stranger.ask("LOCK.TOP", 10)
        yield cost


def touch_below_limit(server: Server, n):
    hold(server, "a", n, "LIMIT", 100_000)
    calls = 2000
    while True:
        with server.measure(calls) as cost:
            # All of them, in an order other than that of arrival.
            server.do_all(("LOCK.TOUCH", "a", f"holder{i * 7919 % n}", *LEASE)
                           for i in range(calls))
        yield cost


def session_closes(server: Server, n):
    session = server.connect()
    session.do_all(("LOCK.ACQUIRE", f"s{i}", "owner", *LEASE, "SESSION") for i in range(n))
    with server.measure_stalls(lambda: server.ask("DBSIZE") == 0) as cost:
        session.close()
    yield cost


def time_out_together(server: Server, n):
    wait_s = a_while_s(server, n)
    end = time.monotonic() + wait_s  # of the first wait, or later
    waiters = wait(server, n, same_keys, "SHARED", wait_ms=int(wait_s * 1000))
    with server.measure_stalls(lambda: server.waiting() == 0) as cost:
        with server.frozen():
            must_be_before(end)
            let_pass_while_frozen(wait_s + 0.05)
    for waiter in waiters:
        assert waiter.read() is None
    yield cost


def readers_enter(server: Server, n):
    waiters = wait(server, n, same_keys, "SHARED")
    with server.measure_stalls(lambda: server.waiting() == 0) as cost:
        server.ask("LOCK.RELEASE", "a", "owner")
    for waiter in waiters:
        assert waiter.read() > 0
    yield cost


def all_leave(server: Server, n):
    waiters = wait(server, n, same_keys, "SHARED")
    with server.measure_stalls(lambda: server.waiting() == 0) as cost:
        with server.frozen():
            for waiter in waiters:
                waiter.close()
    yield cost


def half_leave(server: Server, n):
    waiters = wait(server, n, same_keys, "SHARED")
    with server.measure_stalls(lambda: server.waiting() == n - n // 2) as cost:
        with server.frozen():
            for waiter in waiters[:n // 2 * 2:2]:
                waiter.close()
    yield cost


def more_join(server: Server, n, keys=same_keys, mode=("SHARED",)):
    server.ask("CONFIG", "SET", "turnstile.max-waiters", 2 * n + 100)
    waiters = wait(server, n, keys, *mode)
    for _ in range(5):
        newcomers = [(f"late{len(waiters) + i}", server.connect()) for i in range(10)]
        for owner, newcomer in newcomers:
            # Somebody could wait for each of them.
            newcomer.ask("LOCK.ACQUIRE", f"of:{owner}", owner, *LEASE)
        with server.measure(len(newcomers)) as cost:
            for owner, newcomer in newcomers:
                newcomer.send("LOCK.ACQUIRE", "a", owner, *LEASE, *WAIT, *also(keys(owner)))
            waiters += newcomers
            server.wait_until_waiting(len(waiters))
        yield cost


def more_writers_join(server: Server, n):
    yield from more_join(server, n, own_keys, ())


def leases_end_together(server: Server, n):
    server.do_all(("LOCK.ACQUIRE", f"a{i}", "holder", *LEASE) for i in range(n))
    waiters = [server.connect() for _ in range(n)]
    for i, waiter in enumerate(waiters):
        waiter.send("LOCK.ACQUIRE", f"a{i}", "waiter", *LEASE, *WAIT)
    server.wait_until_waiting(n)
    lease_s = a_while_s(server, n // 10)
    end = time.monotonic() + lease_s
    server.do_all(("LOCK.TOUCH", f"a{i}", "holder", "PX", int(lease_s * 1000)) for i in range(n))
    with server.measure_stalls(lambda: server.waiting() == 0) as cost:
        with server.frozen():
            must_be_before(end)
            let_pass_while_frozen(lease_s + 0.05)
    for waiter in waiters:
        assert waiter.read() > 0
    yield cost


EXPIRES = "for i = 1, ARGV[1] do redis.call('PEXPIRE', KEYS[1], 3600000 + i) end"


def many_expires(server: Server, n, waiter=False):
    key = b"k" * 1_000_000
    with server.without_module() as bare:
        bare.ask("SET", key, "value")
        with bare.measure() as without:
            bare.ask("EVAL", EXPIRES, 1, key, n)
    server.ask("LOCK.ACQUIRE", key, "owner", *LEASE)
    if waiter:
        waiter = server.connect()
        waiter.send("LOCK.ACQUIRE", key, "waiter", *LEASE, *WAIT)
        server.wait_until_waiting(1)
    with server.measure() as cost:
        server.ask("EVAL", EXPIRES, 1, key, n)
    cost.spent = max(0, cost.spent - without.spent)
    cost.memory = max(0, cost.memory - without.memory)
    yield cost


def many_expires_while_one_waits(server: Server, n):
    yield from many_expires(server, n, waiter=True)


def others_can_wait(server: Server, n):
    """One user may have n of 2n waiters."""
    if not server.has_setting("turnstile.max-waiters-per-user"):
        yield Cost(wrong="no turnstile.max-waiters-per-user")
        return
    server.ask("CONFIG", "SET", "turnstile.max-waiters-per-user", n)
    server.ask("CONFIG", "SET", "turnstile.max-waiters", 2 * n)
    for user in ("greedy", "modest"):
        server.ask("ACL", "SETUSER", user, "on", "nopass", "~*", "+@all")
    server.ask("LOCK.ACQUIRE", "a", "owner", *LEASE)
    crowd = [server.connect("greedy") for _ in range(2 * n)]
    for i, waiter in enumerate(crowd):
        waiter.send("LOCK.ACQUIRE", "a", f"greedy{i}", *LEASE, *WAIT)
    server.settle()
    waiting = server.waiting()
    modest = server.connect("modest")
    with server.measure() as cost:
        modest.send("LOCK.ACQUIRE", "a", "modest", *LEASE, *WAIT)
    if waiting != n:
        cost.wrong = f"{waiting} of one user wait, not {n}"
    elif server.waiting() != n + 1:
        cost.wrong = "another user cannot wait"
    yield cost


def queue(server, n, key, owner, *options, wait_ms=600_000):
    """Creates n waits that block nobody, for key(i) by owner(i), over one connection."""
    server.ask("CONFIG", "SET", "turnstile.max-queued", 4 * n + 100)
    client = server.connect()
    client.do_all(("LOCK.ACQUIRE", key(i), owner(i), *LEASE, "WAIT", wait_ms, "NOTIFY", "news",
                   f"id{i}", *options) for i in range(n))
    return client


def hold_each(server, n):
    server.do_all(("LOCK.ACQUIRE", f"a{i}", "holder", *LEASE) for i in range(n))


def one_owner_queues(server: Server, n):
    hold_each(server, n)
    queue(server, n, lambda i: f"a{i}", lambda _: "owner")
    while True:
        with server.measure(SOME_CALLS) as cost:
            for i in range(SOME_CALLS):
                server.ask("LOCK.ACQUIRE", f"a{i}", "owner", *LEASE, *WAIT, "NOTIFY", "news", f"id{i}")
        yield cost


def session_of_waits_closes(server: Server, n):
    hold_each(server, n)
    client = queue(server, n, lambda i: f"a{i}", lambda i: f"waiter{i}", "SESSION")
    with server.measure_stalls(lambda: server.queued() == 0) as cost:
        client.close()
    yield cost


def queued_time_out_together(server: Server, n):
    hold_each(server, n)
    wait_s = a_while_s(server, n // 5)
    end = time.monotonic() + wait_s
    queue(server, n, lambda i: f"a{i}", lambda i: f"waiter{i}", wait_ms=int(wait_s * 1000))
    with server.measure_stalls(lambda: server.queued() == 0) as cost:
        with server.frozen():
            must_be_before(end)
            let_pass_while_frozen(wait_s + 0.05)
    yield cost


def queued_are_not_received(server: Server, n):
    server.ask("LOCK.ACQUIRE", "a", "holder", *LEASE)
    queue(server, n, lambda _: "a", lambda i: f"waiter{i}")
    with server.measure_stalls(lambda: server.queued() == 0) as cost:
        server.ask("LOCK.RELEASE", "a", "holder")
    yield cost


def bound_leases_end_together(server: Server, n):
    lease_s = a_while_s(server, n // 5)
    end = time.monotonic() + lease_s
    server.do_all(("LOCK.ACQUIRE", f"a{i}", "holder", "PX", int(lease_s * 1000), "NOTIFY", "news",
                   f"id{i}") for i in range(n))
    with server.measure_stalls(lambda: server.ask("DBSIZE") == 0) as cost:
        with server.frozen():
            must_be_before(end)
            let_pass_while_frozen(lease_s + 0.05)
    yield cost


def try_beside_weights_that_ended(server: Server, n):
    allow_holders(server, n + 2)
    limit = ("LIMIT", 100_000)
    server.ask("LOCK.ACQUIRE", "a", "owner", *LEASE, *limit, "WEIGHT", 2)
    lease_s = a_while_s(server, n // 5)
    end = time.monotonic() + lease_s
    server.do_all(("LOCK.ACQUIRE", "a", f"short{i}", "PX", int(lease_s * 1000), *limit, "WEIGHT", 2)
                  for i in range(n))
    must_be_before(end)
    server.wait_for(lambda: holding(server, "a") == 1)
    while True:
        with server.measure(SOME_CALLS) as cost:
            for _ in range(SOME_CALLS):
                # Not granted, so what has ended stays.
                assert server.ask("LOCK.ACQUIRE", "a", "other", *LEASE, "LIMIT", 2) is None
        yield cost


def time_outs_heard_by_many(server: Server, n):
    """500 waits, and n connections that are told of each."""
    waits = 500
    hold_each(server, waits)
    listeners = [server.connect() for _ in range(n)]
    for listener in listeners:
        listener.ask("SUBSCRIBE", "news")
    wait_s = a_while_s(server, waits)
    end = time.monotonic() + wait_s
    queue(server, waits, lambda i: f"a{i}", lambda i: f"waiter{i}", wait_ms=int(wait_s * 1000))
    with server.measure_stalls(lambda: server.queued() == 0) as cost:
        with server.frozen():
            must_be_before(end)
            let_pass_while_frozen(wait_s + 0.05)
    yield cost


def max_line_with_long_names(server: Server, n):
    """The owner waits 65 times, each time for 65 locks; then for one lock of each wait."""
    names = [[b"k" * n + b"%02d%02d" % (i, j) for j in range(LINES)] for i in range(LINES)]
    for line in names:
        server.ask("LOCK.ACQUIRE", line[0], "holder", *LEASE, *also(line[1:]))
    while True:
        for line in names:
            server.ask("LOCK.ACQUIRE", line[0], "owner", *LEASE, *WAIT, "NOTIFY", "news", "id",
                       *also(line[1:]))
        crossing = [line[0] for line in names]
        with server.measure() as cost:
            server.ask("LOCK.ACQUIRE", crossing[0], "owner", *LEASE, *WAIT, "MAXLINE", 1,
                       "NOTIFY", "news", "id", *also(crossing[1:]))
        yield cost


ROWS = [
    Row("1", "one of n that wait in 65 lines closes", one_leaves,
        (100, 200, 400), (400, 800, 1600), goal_ms=50, goal_at=400, connections=1),
    # One less than the maximum number of holders.
    Row("2", "n shared holds have ended: one TOUCH", touch_after_others_ended,
        (2499, 4999, 9999), (24_999, 49_999, 99_999), goal_ms=20, goal_at=99_999),
    Row("3", "n shared holders: an exclusive WAIT 1", exclusive_behind_readers,
        (2500, 5000, 10_000), (25_000, 50_000, 100_000), goal_ms=3, goal_at=10_000),
    Row("4", "5n holders, n waiters: a search for deadlocks", deadlock_search,
        (125, 250, 500), (500, 1000, 2000), goal_ms=20, goal_at=2000, connections=1),
    Row("5", "n holders: LOCK.INFO", info_of_many_holders,
        (2500, 5000, 10_000), (25_000, 50_000, 100_000), growth=1.5),
    Row("6", "n wait in 65 lines, all but one their own: LOCK.TOP by a user without rights",
        top_without_rights, (250, 500, 1000), (1250, 2500, 5000), goal_ms=20, goal_at=5000, connections=1),
    Row("7", "n holders below a LIMIT: TOUCH", touch_below_limit,
        (100, 10_000), (100, 10_000), growth=1.5, instructions=True),
    Row("8", "a session of n holds closes", session_closes,
        (20_000, 40_000, 80_000), (100_000, 200_000, 400_000), stall_goal_ms=20),
    Row("9", "n PEXPIREs of a name of 1 MB in a script", many_expires,
        (50, 100, 200), (500, 1000, 2000), floor_ms=50, memory_goal_mb=16),
    Row("9b", "the same while somebody waits", many_expires_while_one_waits,
        (50, 100, 200), (500, 1000, 2000), floor_ms=50, memory_goal_mb=16),
    Row("10", "n waiters of one user: another can wait", others_can_wait,
        (100,), (2500,), connections=2),
    Row("11", "n that wait in 65 lines time out together", time_out_together,
        (250, 500, 1000), (1250, 2500, 5000), stall_goal_ms=20, connections=1),
    Row("12", "n readers in 65 lines are let in", readers_enter,
        (200, 400, 800), (1250, 2500, 5000), stall_goal_ms=20, connections=1),
    Row("13", "all n that wait in 65 lines close", all_leave,
        (200, 400, 800), (1250, 2500, 5000), stall_goal_ms=20, connections=1),
    Row("13b", "every other of n that wait in 65 lines closes", half_leave,
        (50, 100, 200), (1250, 2500, 5000), stall_goal_ms=20, connections=1),
    Row("14", "n wait in 65 lines: one more joins", more_join,
        (250, 500, 1000), (1250, 2500, 5000), goal_ms=20, goal_at=5000, connections=1),
    Row("14b", "n writers in 65 lines, all but one their own: one more joins", more_writers_join,
        (100, 200, 400), (1250, 2500, 5000), goal_ms=20, goal_at=5000, connections=1),
    Row("15", "n leases end together, and somebody waits for each", leases_end_together,
        (250, 500, 1000), (1250, 2500, 5000), stall_goal_ms=20, connections=1),
    # All n are dealt with, and more of them fit less well into the caches: growth is above 2.
    Row("16", "n waits of one owner by NOTIFY: it asks again for one", one_owner_queues,
        (5000, 10_000, 20_000), (25_000, 50_000, 100_000), goal_ms=3, goal_at=100_000),
    Row("17", "a session of n waits by NOTIFY closes", session_of_waits_closes,
        (5000, 10_000, 20_000), (25_000, 50_000, 100_000), growth=3.4, stall_goal_ms=20),
    Row("18", "n waits by NOTIFY time out together", queued_time_out_together,
        (5000, 10_000, 20_000), (25_000, 50_000, 100_000), growth=3.4, stall_goal_ms=20),
    Row("19", "n waits by NOTIFY in one line, and nobody receives anything",
        queued_are_not_received, (5000, 10_000, 20_000), (25_000, 50_000, 100_000),
        growth=3.4, stall_goal_ms=20),
    # The server itself takes up to 25 ms in one go when many keys expire.
    Row("20", "n leases bound to a channel end together", bound_leases_end_together,
        (2500, 5000, 10_000), (25_000, 50_000, 100_000), stall_goal_ms=45),
    Row("21", "n holders of weight 2 have ended: a request that does not fit",
        try_beside_weights_that_ended, (2499, 4998, 9996), (24_999, 49_998, 99_996),
        goal_ms=3, goal_at=99_996),
    Row("22", "n clients are told of 500 waits by NOTIFY that time out together",
        time_outs_heard_by_many, (200, 400, 800), (500, 1000, 2000), growth=3.4, stall_goal_ms=10,
        connections=1),
    Row("23", "MAXLINE by an owner that waits 65 times in 65 lines, names of n bytes",
        max_line_with_long_names, (1000, 2000, 4000), (1000, 2000, 4000), goal_ms=20, goal_at=4000),
]

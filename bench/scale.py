"""Many locks: their memory, the cost of a pair among them, their end, saving and loading them.

Everything is measured for Turnstile's locks, and in a server without the module for plain strings
with a TTL, which are what the server itself makes of a lock.
"""

import contextlib
import os
import pathlib
import random
import re
import socket
import sys
import time

import common
import counter
import plot
from common import wire
from modes import PAIRS as MODES
from throughput import CLIENTS, KEYS, Load

TITLE = "Many locks"
SECONDS = 140

PLAIN, OURS = "set-del", "turnstile"  # modes
KINDS = {PLAIN: "plain strings", OURS: "Turnstile locks"}
LOCKS = 1_000_000
SIZES = [1_000, LOCKS // 4, LOCKS // 2, LOCKS]
PAIRS = 60_000  # at least 0.2 s of CPU time
WARM_UP = 4  # part of the pairs
GROWTH_ROUNDS = 4
FULL_ROUNDS = 3  # among ten million locks
STORE_ROUNDS = 2
COUNTED = 10_000  # keys whose instructions are counted
WAITERS = 1_000
EXPIRY_ROUNDS = 3
# Ticks of which each may work on expired keys for two and a half milliseconds.
EXPIRY = ["--hz", "100"]
SIZED = {"memory": "bytes of used_memory", "file": "bytes in the RDB file"}
STORED = {"save": "BGSAVE", "load": "loading", "rewrite": "AOF rewrite"}


# --- Locks to hold ----------------------------------------------------------------------------

LEASE = 3_600_000  # longer than the benchmark
BATCH = 1000
KEY = b"held:%011d"


TAKE = {  # the command that takes a lock, what follows key and owner, and the reply
    PLAIN: ("SET", ["NX"], rb"\+OK\r\n"),
    OURS: ("LOCK.ACQUIRE", [], rb":[1-9]\d*\r\n"),
}


def template(mode, lease):
    """The command with places for the number of a lock and an owner of 32 bytes."""
    owner = b"O" * 32
    name, options, _ = TAKE[mode]
    command = wire(name, KEY % 0, owner, *options, "PX", lease)
    return command.replace(KEY % 0, KEY).replace(owner, b"%s")


def take(server, mode, first, end, until=None):
    """Takes the locks with these numbers; no pair of bench/load.cc meets one of them. Their leases
    end together, at a time of time.monotonic(), if one is given."""
    expected = re.compile(TAKE[mode][-1])
    address = ("127.0.0.1", server.port)
    with socket.create_connection(address, server.patience_s) as line:
        replies = line.makefile("rb")

        def send(numbers):
            owners = os.urandom(16 * len(numbers)).hex().encode()
            lease = LEASE if until is None else round((until - time.monotonic()) * 1000)
            command = template(mode, max(lease, 1))
            line.sendall(b"".join(command % (number, owners[32 * i:32 * i + 32])
                                  for i, number in enumerate(numbers)))

        def check(numbers):
            for number in numbers:
                got = replies.readline()
                if not expected.fullmatch(got):
                    sys.exit(f"bench: {KINDS[mode]}: lock {number} is answered {got!r}")

        sent = range(0)
        for start in range(first, end, BATCH):
            # One batch is on its way while the next is written.
            batch = range(start, min(start + BATCH, end))
            send(batch)
            check(sent)
            sent = batch
        check(sent)


def check_size(server, size):
    if (found := server.ask("DBSIZE")) != size:
        sys.exit(f"bench: {found} keys instead of {size}")


def cpu_ns(server):
    """CPU time of the server's main thread so far: finer than the ticks of Server.cpu_s."""
    return int(pathlib.Path(f"/proc/{server.pid}/schedstat").read_text().split()[0])


# --- The cost of a pair among many locks --------------------------------------------------------


def grow(server, mode, sizes, seed):
    """CPU time of the server for a pair of other keys while so many locks are held, and the bytes
    of each lock."""
    costs = []
    held = 0
    server.ask("FLUSHALL", "SYNC")
    with Load(server, mode, clients=CLIENTS, keys=KEYS, pipeline=16, seed=seed) as load:
        load.run(PAIRS // WARM_UP)
        empty = server.info("memory", "used_memory")
        for size in sizes:
            take(server, mode, held, size)
            held = size
            memory = (server.info("memory", "used_memory") - empty) / size
            load.run(PAIRS // WARM_UP)
            before = cpu_ns(server)
            load.run(PAIRS)
            costs.append(((cpu_ns(server) - before) / PAIRS, memory))
            check_size(server, held)
    return costs


def growth(servers, sizes, rounds, generator):
    """By size: cost over that of the first size, for each kind and for ours over plain; and the
    bytes of a lock of each kind."""
    taken = {mode: [] for mode in KINDS}
    memory = {}
    for number in range(rounds):
        common.say(f"scale: a pair among up to {sizes[-1]:,} locks, round {number + 1} of {rounds}")
        for mode in shuffled(generator):
            grown = grow(servers[mode], mode, sizes, generator.randrange(1, 2**31))
            taken[mode].append([cost / grown[0][0] for cost, _ in grown])
            memory[mode] = [each for _, each in grown]
    by_size = {mode: list(zip(*taken[mode])) for mode in KINDS}
    return [{
        "size": size,
        **{mode: common.spread(list(by_size[mode][k])) for mode in KINDS},
        "ratio": paired(by_size[OURS][k], by_size[PLAIN][k]),
        "memory": {mode: memory[mode][k] for mode in KINDS},
    } for k, size in enumerate(sizes)]


def shuffled(generator):
    return generator.sample(list(KINDS), len(KINDS))


def paired(ours, plain):
    return common.spread([one / other for one, other in zip(ours, plain)])


# --- The end of many leases ----------------------------------------------------------------------


def expiry(servers, order, size):
    """CPU time of each server for each of so many locks whose leases end together, in nanoseconds.
    The servers do it at the same time."""
    for slow in (1, 2, 4, 8):  # as the machine is
        until = time.monotonic() + 3 + slow * size / 80_000
        for mode in order:
            servers[mode].ask("FLUSHALL", "SYNC")
            take(servers[mode], mode, 0, size, until)
        if time.monotonic() < until - 1:
            break
    else:
        sys.exit(f"bench: it takes too long to take {size:,} locks")
    time.sleep(until - time.monotonic() - 0.5)
    before = {mode: cpu_ns(server) for mode, server in servers.items()}
    for server in servers.values():
        server.wait_for("the leases to end", lambda: server.ask("DBSIZE") == 0)
    return {mode: (cpu_ns(server) - before[mode]) / size for mode, server in servers.items()}


def expiries(servers, size, rounds, generator):
    taken = []
    for number in range(rounds):
        common.say(f"scale: the end of {size:,} leases, round {number + 1} of {rounds}")
        taken.append(expiry(servers, shuffled(generator), size))
    by_mode = {mode: [each[mode] for each in taken] for mode in KINDS}
    return {**{mode: common.spread(by_mode[mode])["median"] for mode in KINDS},
            "ratio": paired(by_mode[OURS], by_mode[PLAIN])}


# --- Memory, saving, loading --------------------------------------------------------------------


def children_s(server):
    """CPU time of the processes that the server forked and that have ended."""
    info = server.client.info("cpu")
    return info["used_cpu_user_children"] + info["used_cpu_sys_children"]


def forked(server, command, running, status):
    """CPU time of a command that the server gives to a process of its own."""
    before = children_s(server)
    server.ask(command)
    server.wait_for(command, lambda: not server.info("persistence", running))
    if server.info("persistence", status) != "ok":
        sys.exit(f"bench: {command} failed")
    return children_s(server) - before


def reload(server):
    """Loads what was saved last into the server, which must be empty."""
    server.ask("DEBUG", "RELOAD", "NOSAVE", "NOFLUSH")


def store(server, mode, size):
    """Takes so many locks, saves and loads them: bytes and CPU time for each lock."""
    server.ask("FLUSHALL", "SYNC")
    empty = server.info("memory", "used_memory")
    take(server, mode, 0, size)
    figures = {"memory": server.info("memory", "used_memory") - empty}
    figures["save"] = forked(
        server, "BGSAVE", "rdb_bgsave_in_progress", "rdb_last_bgsave_status")
    figures["file"] = (server.folder / "dump.rdb").stat().st_size
    figures["rewrite"] = forked(
        server, "BGREWRITEAOF", "aof_rewrite_in_progress", "aof_last_bgrewrite_status")
    server.ask("FLUSHALL", "SYNC")
    before = cpu_ns(server)
    reload(server)
    figures["load"] = (cpu_ns(server) - before) / 1e9
    check_size(server, size)
    return {name: figure / size for name, figure in figures.items()}


def stores(servers, size, rounds, generator):
    taken = {mode: [] for mode in KINDS}
    for number in range(rounds):
        common.say(f"scale: {size:,} locks in memory and in files, round {number + 1} of {rounds}")
        for mode in shuffled(generator):
            taken[mode].append(store(servers[mode], mode, size))
    return {name: {
        **{mode: common.spread([each[name] for each in taken[mode]])["median"] for mode in KINDS},
        "ratio": paired(*([each[name] for each in taken[mode]] for mode in (OURS, PLAIN))),
    } for name in taken[OURS][0]}


def waiting(waiters):
    """Bytes of the server for an idle connection, and how many more for one that waits."""
    limits = ["--maxclients", str(waiters + 100), "--turnstile.max-waiters", str(waiters)]
    with contextlib.ExitStack() as stack:
        stack.enter_context(common.many_files())
        server = stack.enter_context(common.Server(*limits))
        take(server, OURS, 0, 1)
        alone = server.info("memory", "used_memory")
        lines = [stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
                 for _ in range(waiters)]
        for line in lines:
            line.sendall(wire(b"PING"))
            if (got := line.recv(64)) != b"+PONG\r\n":
                sys.exit(f"bench: PING is answered {got!r}")
        idle = server.info("memory", "used_memory")
        for line in lines:
            owner = os.urandom(16).hex().encode()
            line.sendall(wire(b"LOCK.ACQUIRE", KEY % 0, owner, b"PX", LEASE, b"WAIT", LEASE))
        server.wait_for("all to wait", lambda: server.info(
            "turnstile", "turnstile_waiters") == waiters)
        all_wait = server.info("memory", "used_memory")
    return {"waiters": waiters, "idle": (idle - alone) / waiters,
            "waiting": (all_wait - idle) / waiters}


# --- Instructions of saving and loading ---------------------------------------------------------


def count(size):
    """By "save" and "load": instructions for each of so many locks."""
    taken = {"save": {}, "load": {}}
    for mode, kind in KINDS.items():
        common.say(f"scale: instructions of saving and loading {kind}")
        with counter.Counter("idle" if mode == OURS else "bare") as counted:
            server = counted.server
            take(server, mode, 0, size)
            taken["save"][mode] = counted.executed(lambda: server.ask("SAVE")) / size
            server.ask("FLUSHALL", "SYNC")
            taken["load"][mode] = counted.executed(lambda: reload(server)) / size
            check_size(server, size)
    return taken


@contextlib.contextmanager
def both(*options):
    """A server for each kind."""
    with common.Server(*options) as ours, common.Server(*options, module=None) as bare:
        yield {OURS: ours, PLAIN: bare}


# --- The part -----------------------------------------------------------------------------------


def run(options):
    generator = random.Random(options.seed)
    locks, sizes, rounds = LOCKS, SIZES, (STORE_ROUNDS, GROWTH_ROUNDS, EXPIRY_ROUNDS)
    if options.quick:
        locks, rounds = LOCKS // 10, (1, 2, 1)
        sizes = [SIZES[0], locks // 4, locks // 2, locks]
    data = {"locks": locks, "counted": COUNTED,
            "rounds": dict(zip(("store", "growth", "expiry"), rounds))}
    data["instructions"] = count(COUNTED)
    data["waiting"] = waiting(WAITERS)
    # Noticing that a process has ended takes a tick; a rewritten AOF with an RDB file at its head
    # would be that file.
    with both("--hz", "100", "--aof-use-rdb-preamble", "no") as servers:
        data["store"] = stores(servers, locks, rounds[0], generator)
    with both() as servers:
        data["growth"] = [growth(servers, sizes, rounds[1], generator)]
    with both(*EXPIRY) as servers:
        data["expiry"] = expiries(servers, locks, rounds[2], generator)
    if options.full:
        with both() as servers:
            sizes = [SIZES[0], 10 * LOCKS]
            data["growth"].append(growth(servers, sizes, FULL_ROUNDS, generator))
    return data


def ratio(data, what):
    counts = data["instructions"][what]
    return counts[OURS] / counts[PLAIN]


def goals(data):
    def growth_goal(rows):
        return common.Goal.at_most(
            f"server CPU per pair among {rows[-1]['size']:,} locks vs among {rows[0]['size']:,}, "
            "over the same for SET NX PX + DEL", 1.15, rows[-1]["ratio"]["median"])

    return [
        common.Goal.at_most(f"expiry of {data['locks']:,} locks at once, CPU per key / plain keys",
                            1.40, data["expiry"]["ratio"]["median"]),
        common.Goal.at_most("memory per lock / plain lock", 1.08,
                            data["store"]["memory"]["ratio"]["median"]),
        *map(growth_goal, data["growth"]),
        common.Goal.at_most("instructions of SAVE per lock vs plain string", 1.45,
                            ratio(data, "save")),
        common.Goal.at_most("instructions of loading per lock vs plain string", 1.45,
                            ratio(data, "load")),
    ]


def quartiles(of):
    return f"{of['q1']:.2f} to {of['q3']:.2f}"


def report(data):
    stored, line = data["store"], data["waiting"]
    header = ["", KINDS[PLAIN], KINDS[OURS], "ratio", "quartiles"]
    rows = [[name, *(f"{stored[key][mode]:.0f}" for mode in KINDS),
             f"{stored[key]['ratio']['median']:.2f}", ""]
            for key, name in SIZED.items()]
    rows += [[f"{name}, instructions", *(f"{counts[mode]:,.0f}" for mode in KINDS),
              f"{ratio(data, key):.2f}", ""]
             for key, name in (("save", "SAVE"), ("load", "loading"))
             for counts in [data["instructions"][key]]]
    rows += [[f"{name}, µs of CPU", *(f"{stored[key][mode] * 1e6:.2f}" for mode in KINDS),
              f"{stored[key]['ratio']['median']:.2f}", quartiles(stored[key]["ratio"])]
             for key, name in STORED.items()]
    ended = data["expiry"]
    rows.append(["expiry of all at once, µs of CPU",
                 *(f"{ended[mode] / 1e3:.2f}" for mode in KINDS),
                 f"{ended['ratio']['median']:.2f}", quartiles(ended["ratio"])])
    markdown = (
        "Keys of 16 bytes, random owners of 32 bytes, a TTL each. A plain string is what "
        "`SET NX PX` makes; it is in a server without any module. For each lock, of "
        f"{data['locks']:,} ({data['counted']:,} where instructions are counted); ratios of CPU "
        "time are medians of "
        f"{data['rounds']['store']} rounds:\n\n"
        f"{common.table(header, rows)}\n"
        "BGSAVE and the AOF rewrite (as commands, without an RDB file at its head) run in a "
        "process of their own, and this is that one's time. Loading is that of an RDB file.\n\n"
        f"A client that waits in line costs {line['waiting']:,.0f} bytes more than the "
        f"{line['idle']:,.0f} of its connection while it is idle ({line['waiters']:,} clients). "
        "Most of it the server takes for any blocked command of a module.\n\n"
        "Server CPU for an acquire and a release of other keys while so many locks are held, over "
        f"the same among the fewest ({CLIENTS} clients, pipeline 16; medians of "
        f"{data['rounds']['growth']} rounds"
        + (f", {FULL_ROUNDS} for the largest" if len(data["growth"]) > 1 else "") + "). For "
        "SET NX PX + DEL as many plain strings are held:\n\n")
    rows, lines = [], {MODES[mode].title: [] for mode in KINDS}
    measured = data["growth"][0] + [rows[-1] for rows in data["growth"][1:]]
    for row in measured:
        rows.append([f"{row['size']:,}", *(f"{row[mode]['median']:.2f}" for mode in KINDS),
                     f"{row['ratio']['median']:.2f}", quartiles(row["ratio"]),
                     *(f"{row['memory'][mode]:.0f}" for mode in KINDS)])
        for mode in KINDS:
            lines[MODES[mode].title].append((row["size"], row[mode]["median"]))
    markdown += common.table(
        ["locks held", *(MODES[mode].title for mode in KINDS), "ratio", "quartiles",
         *(f"bytes, {KINDS[mode]}" for mode in KINDS)], rows)
    markdown += "\n![Server CPU for a pair while locks are held](scale.svg)\n"
    svg = plot.lines("Server CPU per pair with many locks held", lines, "locks held",
                     f"server CPU, relative to that with {measured[0]['size']:,} locks", log_x=True)
    return common.Report(markdown, {"scale.svg": svg})

"""Many locks: their memory, the cost of a pair among them, saving and loading them.

Everything is measured for Turnstile's locks and for plain strings with a TTL, which are what the
server itself makes of a lock.
"""

import contextlib
import os
import pathlib
import random
import re
import resource
import socket
import sys

import common
import instructions
import plot
from throughput import CLIENTS, KEYS, NAMES, Load

TITLE = "Many locks"
SECONDS = 145

PLAIN, OURS = "set-del", "turnstile"  # modes of bench/load.cc
KINDS = {PLAIN: "plain strings", OURS: "Turnstile locks"}
LOCKS = 1_000_000
SIZES = [1_000, 10_000, 100_000, LOCKS]
PAIRS = 60_000  # at least 0.2 s of CPU time
WARM_UP = 4  # part of the pairs
GROWTH_ROUNDS = 7
FULL_ROUNDS = 3  # among ten million locks
STORE_ROUNDS = 3
COUNTED = 10_000  # keys whose instructions are counted
WAITERS = 1_000
DEBUG = ["--enable-debug-command", "local"]  # DEBUG RELOAD
SIZED = {"memory": "bytes of used_memory", "file": "bytes in the RDB file"}
STORED = {"save": "BGSAVE", "load": "loading", "rewrite": "AOF rewrite"}


# --- Locks to hold ----------------------------------------------------------------------------

LEASE = b"3600000"  # longer than the benchmark
BATCH = 1000
KEY = b"held:%011d"


def wire(*words):
    """A command as it goes over the wire."""
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(w), w) for w in words)


def template(command, *options):
    """A command with places for the number of a lock and an owner of 32 bytes."""
    owner = b"O" * 32
    return wire(command, KEY % 0, owner, *options).replace(KEY % 0, KEY).replace(owner, b"%s")


TAKE = {  # the command that takes a lock, and its reply
    PLAIN: (template(b"SET", b"NX", b"PX", LEASE), rb"\+OK\r\n"),
    OURS: (template(b"LOCK.ACQUIRE", b"PX", LEASE), rb":[1-9]\d*\r\n"),
}


def take(server, mode, first, end):
    """Takes the locks with these numbers; no pair of bench/load.cc meets one of them."""
    command, reply = TAKE[mode]
    expected = re.compile(reply)
    address = ("127.0.0.1", server.port)
    with socket.create_connection(address, server.patience_s) as line:
        replies = line.makefile("rb")

        def send(numbers):
            owners = os.urandom(16 * len(numbers)).hex().encode()
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
    """CPU time of the server for a pair of fresh keys while so many locks are held."""
    costs = []
    held = 0
    with Load(server, mode, clients=CLIENTS, keys=KEYS, pipeline=16, seed=seed) as load:
        for size in sizes:
            take(server, mode, held, size)
            held = size
            load.run(PAIRS // WARM_UP)
            before = cpu_ns(server)
            load.run(PAIRS)
            costs.append((cpu_ns(server) - before) / PAIRS)
            check_size(server, held)
    return costs


def growth(server, sizes, rounds, generator):
    """By size: cost over that of the first size, for each kind and for ours over plain."""
    taken = {mode: [] for mode in KINDS}
    for number in range(rounds):
        common.say(f"scale: a pair among up to {sizes[-1]:,} locks, round {number + 1} of {rounds}")
        for mode in shuffled(generator):
            costs = grow(server, mode, sizes, generator.randrange(1, 2**31))
            taken[mode].append([cost / costs[0] for cost in costs])
    by_size = {mode: list(zip(*taken[mode])) for mode in KINDS}
    return [{
        "size": size,
        **{mode: common.spread(list(by_size[mode][k])) for mode in KINDS},
        "ratio": paired(by_size[OURS][k], by_size[PLAIN][k]),
    } for k, size in enumerate(sizes)]


def shuffled(generator):
    return generator.sample(list(KINDS), len(KINDS))


def paired(ours, plain):
    return common.spread([one / other for one, other in zip(ours, plain)])


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


def stores(server, size, rounds, generator):
    taken = {mode: [] for mode in KINDS}
    for number in range(rounds):
        common.say(f"scale: {size:,} locks in memory and in files, round {number + 1} of {rounds}")
        for mode in shuffled(generator):
            taken[mode].append(store(server, mode, size))
    return {name: {
        **{mode: common.spread([each[name] for each in taken[mode]])["median"] for mode in KINDS},
        "ratio": paired(*([each[name] for each in taken[mode]] for mode in (OURS, PLAIN))),
    } for name in taken[OURS][0]}


def waiting(waiters):
    """Bytes of the server for an idle connection, and how many more for one that waits."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    limits = ["--maxclients", str(waiters + 100), "--turnstile.max-waiters", str(waiters)]
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
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


def executed(counter, act):
    """Instructions of the server while `act` goes on."""
    counter.mark().unlink()
    act()
    dump = counter.mark()
    count = instructions.total(dump)
    dump.unlink()
    return count


def count(size):
    """By "save" and "load": instructions for each of so many locks."""
    taken = {"save": {}, "load": {}}
    with instructions.Counter(*DEBUG) as counter:
        server = counter.server
        for mode, kind in KINDS.items():
            common.say(f"scale: instructions of saving and loading {kind}")
            server.ask("FLUSHALL", "SYNC")
            take(server, mode, 0, size)
            taken["save"][mode] = executed(counter, lambda: server.ask("SAVE")) / size
            server.ask("FLUSHALL", "SYNC")
            taken["load"][mode] = executed(counter, lambda: reload(server)) / size
            check_size(server, size)
    return taken


# --- The part -----------------------------------------------------------------------------------


def run(options):
    generator = random.Random(options.seed)
    locks, sizes, rounds = LOCKS, SIZES, (STORE_ROUNDS, GROWTH_ROUNDS)
    if options.quick:
        locks, sizes, rounds = LOCKS // 10, SIZES[:-1], (1, 2)
    data = {"locks": locks, "counted": COUNTED, "rounds": dict(zip(("store", "growth"), rounds))}
    data["instructions"] = count(COUNTED)
    data["waiting"] = waiting(WAITERS)
    # Noticing that a process has ended takes a tick; a rewritten AOF with an RDB file at its head
    # would be that file.
    with common.Server(*DEBUG, "--hz", "100", "--aof-use-rdb-preamble", "no") as server:
        data["store"] = stores(server, locks, rounds[0], generator)
    with common.Server() as server:
        data["growth"] = [growth(server, sizes, rounds[1], generator)]
    if options.full:
        with common.Server() as server:
            sizes = [SIZES[0], 10 * LOCKS]
            data["growth"].append(growth(server, sizes, FULL_ROUNDS, generator))
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
        common.Goal.at_most("used_memory per lock vs plain string", 1.10,
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
    markdown = (
        "Keys of 16 bytes, random owners of 32 bytes, a TTL each. A plain string is what "
        f"`SET NX PX` makes. For each lock, of {data['locks']:,} ({data['counted']:,} where "
        f"instructions are counted); ratios of CPU time are medians of "
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
    rows, lines = [], {NAMES[mode]: [] for mode in KINDS}
    measured = data["growth"][0] + [rows[-1] for rows in data["growth"][1:]]
    for row in measured:
        rows.append([f"{row['size']:,}", *(f"{row[mode]['median']:.2f}" for mode in KINDS),
                     f"{row['ratio']['median']:.2f}", quartiles(row["ratio"])])
        for mode in KINDS:
            lines[NAMES[mode]].append((row["size"], row[mode]["median"]))
    markdown += common.table(
        ["locks held", *(NAMES[mode] for mode in KINDS), "ratio", "quartiles"], rows)
    markdown += "\n![Server CPU for a pair while locks are held](scale.svg)\n"
    svg = plot.lines("Server CPU for a pair while so many locks are held", lines, "locks held",
                     f"over that among {measured[0]['size']:,}", log_x=True)
    return common.Report(markdown, {"scale.svg": svg})

"""Waiting by NOTIFY: 100,000 calls in line on one connection, and what a hand-over takes."""

import json
import random
import statistics
import subprocess
import sys

import common
from contention import arguments, number, one_core, with_quartiles

TITLE = "Waiting without a connection"
SECONDS = 220

WAITERS = 100_000
WARM_UP = 1_000  # waiters; a server takes some memory at its first lock and keeps it
ROUNDS = 3
TOO_SLOW = 3  # a status of bench/queued.cc
LINES = {"one": "one line", "many": "a line each"}
STORMS = {  # how the waits end, by lines
    "one": ("hand-over", "time-out", "release"),
    "many": ("hand-over", "time-out", "release", "leases"),
}
PHASES = {  # what is measured of each end, and its name
    "one": {("hand-over", "enter"): "enter",
            ("hand-over", "end"): "hand-over, one after the other",
            ("time-out", "end"): "time-outs, all at once",
            ("release", "end"): "LOCK.RELEASE by all who wait"},
    "many": {("hand-over", "enter"): "enter",
             ("hand-over", "end"): "LOCK.RELEASE by all holders, hand-over",
             ("hand-over", "release_holds"): "LOCK.RELEASE by all who were granted",
             ("time-out", "end"): "time-outs, all at once",
             ("release", "end"): "LOCK.RELEASE by all who wait",
             ("leases", "end"): "leases end, all at once, hand-over",
             ("leases", "lost"): "leases of all who were granted end"},
}
CONTROLS = {"idle": "nothing", "set": "SET NX PX of as many strings", "del": "DEL of them",
            "expire": "expiry of as many strings, all at once"}

HAND_OVER_WAITERS = (1, 10, 100)
HAND_OVER_ROUNDS = 9
WAYS = {  # of bench/queued.cc
    "blocked": "LOCK.ACQUIRE … WAIT, blocked",
    "notify": "LOCK.ACQUIRE … WAIT NOTIFY",
    "confirmed": "the same, confirmed by LOCK.TOUCH",
    "pubsub": "SET NX PX, pub/sub, all wake",
}


# --- Measuring --------------------------------------------------------------------------------


def run(options):
    """data: for each way in which waits end, and for each way to hand over, a run of each round."""
    waiters, rounds, hand_over_rounds = WAITERS, ROUNDS, HAND_OVER_ROUNDS
    if options.quick:
        waiters, rounds, hand_over_rounds = WAITERS // 10, 1, 2
    generator = random.Random(options.seed)
    return {"waiters": waiters, "rounds": {"storms": rounds, "hand_over": hand_over_rounds},
            **storms(waiters, rounds, generator),
            "hand_over": hand_overs(hand_over_rounds, 100 if options.quick else 300, generator)}


def program(task, server, generator, **settings):
    settings = {"port": server.port, "pid": server.pid, "seed": generator.randrange(1, 2**31),
                **settings}
    return json.loads(common.measure("queued", task, *arguments(settings)))


def storm(server, generator, lines, end, count):
    for slow in (1, 2, 4, 8):  # as the machine is
        command = arguments({"port": server.port, "pid": server.pid, "lines": lines, "end": end,
                             "count": count, "slow": slow,
                             "seed": generator.randrange(1, 2**31)})
        done = subprocess.run([str(common.BINARIES / "queued"), "storm", *command],
                              stdout=subprocess.PIPE, text=True)
        if done.returncode == 0:
            return json.loads(done.stdout)
        if done.returncode != TOO_SLOW:
            break
        # Nobody hears of a grant any more, so all waits end.
        server.ask("FLUSHALL")
        server.wait_for("the line to end",
                        lambda: server.info("turnstile", "turnstile_queued") == 0)
    sys.exit(f"bench: queued storm {' '.join(command)} failed with status {done.returncode}")


def storms(waiters, rounds, generator):
    """Each on the same two servers: what one leaves behind, the next would find."""
    runs = {lines: {end: [] for end in STORMS[lines]} for lines in LINES}
    controls = []
    with common.Server() as ours, common.Server(module=None) as bare:
        storm(ours, generator, "many", "release", WARM_UP)
        for k in range(rounds):
            common.say(f"queued: {waiters:,} waiters, round {k + 1} of {rounds}")
            tasks = [(lines, end) for lines, ends in STORMS.items() for end in ends] + [None]
            for task in generator.sample(tasks, len(tasks)):
                if task is None:
                    controls.append(program("plain", bare, generator, count=waiters))
                else:
                    lines, end = task
                    runs[lines][end].append(storm(ours, generator, lines, end, waiters))
    return {"storms": runs, "controls": controls}


def hand_overs(rounds, count, generator):
    """The runs by number of waiters and way. All ways take turns."""
    runs = {str(waiters): {way: [] for way in WAYS} for waiters in HAND_OVER_WAITERS}
    with one_core(), common.Server() as ours, common.Server(module=None) as bare:
        for server in (ours, bare):
            server.populate()
        for k in range(rounds):
            common.say(f"queued: hand-overs, round {k + 1} of {rounds}")
            for waiters in HAND_OVER_WAITERS:
                for way in generator.sample(sorted(WAYS), len(WAYS)):
                    server = bare if way == "pubsub" else ours
                    runs[str(waiters)][way].append(program(
                        "hand-over", server, generator, way=way, waiters=waiters, count=count))
    return {"count": count, "runs": runs}


# --- Figures ----------------------------------------------------------------------------------


def bytes_each(data, lines):
    """Bytes of used_memory for each waiter: in all storms the same work, so of all of them."""
    return [(run["memory_waiting"] - run["memory_held"]) / data["waiters"]
            for runs in data["storms"][lines].values() for run in runs]


def bytes_bound(data):
    """Bytes of a hold that is bound to a channel, and of one that is not."""
    runs = data["storms"]["many"]["hand-over"]

    def each(point):
        return statistics.median((run[point] - run["memory_start"]) / data["waiters"]
                                 for run in runs)

    return each("memory_granted"), each("memory_held")


def kept(data):
    """How much more memory is used when a storm is over, over what was used before it."""
    return [run["memory_end"] / run["memory_start"] - 1
            for ends in data["storms"].values() for runs in ends.values() for run in runs]


def phase(data, lines, end, name):
    return [run[name] for run in data["storms"][lines][end]]


def median_of(runs, figure):
    return statistics.median(run[figure] for run in runs)


def worst_stall(data, by_leases):
    """The phase with the longest stall, in CPU time of the server, and that stall: where leases
    end, or of all other phases."""
    stalls = {(lines, end, name): median_of(phase(data, lines, end, name), "cpu_max_ms")
              for lines, phases in PHASES.items() for end, name in phases
              if (end == "leases") == by_leases}
    worst = max(stalls, key=stalls.get)
    return f"{LINES[worst[0]]}, {PHASES[worst[0]][worst[1:]]}", stalls[worst]


def paired(runs, over, under, figure):
    """The ratios of two ways, of each round by itself."""
    return common.spread([a[figure] / b[figure] for a, b in zip(runs[over], runs[under])])


def goals(data):
    where, stall = worst_stall(data, by_leases=False)
    _, lease_stall = worst_stall(data, by_leases=True)
    runs = data["hand_over"]["runs"]
    return [
        *(common.Goal.at_most(f"bytes for each of {data['waiters']:,} waiters by NOTIFY, {name}",
                              1024, statistics.median(bytes_each(data, lines)), digits=0)
          for lines, name in LINES.items()),
        common.Goal.at_most("used_memory when they are gone / before", 1.03, 1 + max(kept(data))),
        common.Goal.at_most("longest stall of others, ms of server CPU; worst: " + where, 20,
                            stall, digits=1),
        common.Goal.at_most("the same where leases end, which the server's expiry cycle makes up "
                            "to 25 ms longer", 45, lease_stall, digits=1),
        common.Goal.at_most("server CPU per hand-over, 10 waiters, NOTIFY vs blocked", 1.25,
                            paired(runs["10"], "notify", "blocked", "cpu_us")["median"]),
        common.Goal.at_most("server CPU per hand-over, 100 waiters, NOTIFY vs pub/sub wake-all",
                            0.1, paired(runs["100"], "notify", "pubsub", "cpu_us")["median"],
                            digits=3),
    ]


# --- The report -------------------------------------------------------------------------------


def report(data):
    waiters = data["waiters"]
    bound, plain = bytes_bound(data)
    sections = [
        f"{waiters:,} calls of `LOCK.ACQUIRE … WAIT … NOTIFY` on one connection, with windows of "
        "1,000 commands, and one subscriber. They wait in one line, or in a line each, behind "
        "holders. Then all of the waits end, in several ways. Keys of 16 bytes, owners of 32, ids "
        f"of 22 and a channel of 24. Medians of {data['rounds']['storms']} rounds, in which all of "
        "this takes turns on one server, in random order.\n",
        storm_table(data),
        "A third connection sends a `PING` every millisecond. *Stall* is the longest time that one "
        "took in this phase. In CPU time of the server it does not depend on what else the machine "
        "does; by the clock it does. A `PING` that comes during one pass of the event loop is "
        "answered after the next, so a stall is up to two passes. For comparison, on a server "
        "without any module:\n",
        control_table(data),
        memory_section(data, bound, plain),
        "### Hand-over with NOTIFY and without\n",
        hand_over_section(data),
    ]
    return common.Report("\n".join(sections))


def phase_row(runs, waiters):
    return [f"{waiters / median_of(runs, 'seconds'):,.0f}",
            number(1e6 * median_of(runs, "cpu_s") / waiters),
            *(number(median_of(runs, figure)) for figure in ("cpu_max_ms", "cpu_p99_ms",
                                                             "wall_max_ms"))]


COLUMNS = ["waiters/s", "CPU µs for each", "stall, CPU ms", "p99, CPU ms", "stall, clock ms"]


def storm_table(data):
    rows = [[f"{LINES[lines]}: {title}", *phase_row(phase(data, lines, end, name), data["waiters"])]
            for lines, phases in PHASES.items() for (end, name), title in phases.items()]
    for row in rows:
        if "leases of all" in row[0]:
            row[1] = row[2] = ""  # most of that time the leases last
    return common.table(["", *COLUMNS], rows)


def control_table(data):
    rows = []
    for name, title in CONTROLS.items():
        row = phase_row([run[name] for run in data["controls"]], data["waiters"])
        rows.append([title, *(["", ""] + row[2:] if name == "idle" else row)])
    return common.table(["", *COLUMNS], rows)


def memory_section(data, bound, plain):
    one, many = (common.spread(bytes_each(data, lines))["median"] for lines in LINES)
    most = 100 * max(kept(data))
    return (f"A waiter takes {one:,.0f} bytes of used_memory in one line and {many:,.0f} in a line "
            f"of its own. A hold takes {bound:,.0f} bytes while it is bound to a channel, and "
            f"{plain:,.0f} without. A second after the last wait has ended used_memory is at most "
            f"{most:.1f} % above what it was before.\n")


def hand_over_section(data):
    text = (
        "One lock. The holder releases it, the next one hears that it holds it, and the former "
        "holder goes to the end of the line. The latency is from the release to the time when the "
        "next one knows. The waiters by NOTIFY share two connections, the blocked ones have one "
        "each. With pub/sub, on a server without any module, each has two and stays subscribed; a "
        "script releases and publishes, all who wait try `SET NX` again, and one of them gets it. "
        "Server and clients, which are one thread, share a core: the latency of pub/sub includes "
        f"the work of all clients. {data['hand_over']['count']} hand-overs in each of "
        f"{data['rounds']['hand_over']} rounds, in which the ways take turns; medians.\n\n")
    rows, ratios = [], []
    for waiters, runs in data["hand_over"]["runs"].items():
        for way, name in WAYS.items():
            rows.append([f"{waiters} waiting: {name}",
                         *(number(median_of(runs[way], figure))
                           for figure in ("p50_us", "p99_us", "cpu_us"))])
        for under in ("blocked", "pubsub"):
            for over in ("notify", "confirmed"):
                ratios.append([f"{waiters} waiting: {WAYS[over]} / {WAYS[under]}"
                               .replace("the same, confirmed by LOCK.TOUCH", "NOTIFY + LOCK.TOUCH"),
                               *(with_quartiles(paired(runs, over, under, figure))
                                 for figure in ("p50_us", "cpu_us"))])
    return (text + common.table(["", "latency p50 µs", "p99 µs", "server CPU µs"], rows)
            + "\nRatios within a round, median (quartiles):\n\n"
            + common.table(["", "latency p50", "server CPU"], ratios))

"""Contention: 50 clients on one lock, and what a hand-over costs while up to 9,000 wait."""

import contextlib
import json
import os
import random
import resource
import shutil
import subprocess
import sys

import common
import plot

TITLE = "Contention"
SECONDS = 160

CLIENTS = 50
THINK_MS = ("10", "0")  # as keys of the data
WAYS = {  # of bench/contention.cc
    "line": "Turnstile: LOCK.ACQUIRE … WAIT",
    "polling": "polling: SET NX PX every 100 ms",
    "token": "BLPOP token",
    "signal": "BLPOP with owner and lease",
    "pubsub": "pub/sub, all wake",
}
NODE_WAYS = {  # of bench/contention.mjs
    "plain": "Turnstile: LOCK.ACQUIRE … WAIT",
    "turnstile": "Turnstile: client-examples/node",
    "redlock": "redlock",
    "redis-semaphore": "redis-semaphore",
}
PACKAGES = common.ROOT / "client-examples" / "scenarios" / "07-change-over"

# Waiting clients, each number on a server of its own; the first a second time, which shows what a
# ratio of 1 looks like here.
WAITERS = (10, 10, 100, 1000, 9000)
AGAIN = 1  # its place
MAX_CLIENTS = 12_000


# --- Measuring --------------------------------------------------------------------------------


def run(options):
    """data: for each way its runs, one for each round."""
    data = {"clients": CLIENTS, "hand_over": hand_overs(options)}
    with common.Server() as ours, common.Server(module=None) as bare:
        for server in (ours, bare):
            server.populate()
        servers = {way: ours if "Turnstile" in name else bare
                   for way, name in {**WAYS, **NODE_WAYS}.items()}
        data["threads"] = compete(servers, compiled, WAYS, options, {"10": 5, "0": 3}, 2.0)
        missing = why_no_node()
        data["node"] = {"missing": missing} if missing else compete(
            servers, node, NODE_WAYS, options, {"10": 3, "0": 2}, 1.5)
    return data


def compete(servers, program, ways, options, rounds, seconds):
    """The runs of each way, each on its server."""
    if options.quick:
        rounds, seconds = {think: 1 for think in rounds}, 0.4
    generator = random.Random(options.seed)
    runs = {think: {way: [] for way in ways} for think in THINK_MS}
    for number in range(max(rounds.values())):
        common.say(f"contention: {program.__name__}, round {number + 1} of {max(rounds.values())}")
        for think in THINK_MS:
            if number >= rounds[think]:
                continue
            for way in generator.sample(sorted(ways), len(ways)):
                server = servers[way]
                settings = {"port": server.port, "pid": server.pid, "way": way, "think": think,
                            "clients": CLIENTS, "seconds": seconds}
                runs[think][way].append(json.loads(program(settings, options.seed * 100 + number)))
    return {"rounds": rounds, "seconds": seconds, "runs": runs}


def arguments(settings):
    return [text for name, value in settings.items() for text in (f"--{name}", str(value))]


def compiled(settings, seed):
    return common.measure("contention", "compete", *arguments({**settings, "seed": seed}))


def node(settings, _seed):
    command = ["node", str(common.ROOT / "bench" / "contention.mjs"), *arguments(settings)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(f"bench: {' '.join(command)} failed with status {done.returncode}")
    return done.stdout


def why_no_node():
    """Installs the packages if need be. None if they are there."""
    for program in ("node", "npm"):
        if shutil.which(program) is None:
            return f"there is no {program} here"
    if not (PACKAGES / "node_modules").exists():
        install = ["npm", "ci", "--prefix", str(PACKAGES), "--no-audit", "--no-fund", "--silent"]
        if subprocess.run(install, stdout=sys.stderr).returncode != 0:
            return "npm could not install the packages"
    return None


@contextlib.contextmanager
def one_core():
    """What is started meanwhile runs on one core. To wake a core that sleeps costs more than a
    hand-over, and whether it sleeps is chance."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def hand_overs(options):
    """data: for each way and each number of waiting clients the cost of a hand-over, by round."""
    numbers = WAITERS[:-1] if options.quick else WAITERS
    needed = sum(numbers) + 100
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if limit != resource.RLIM_INFINITY and limit < max(needed, MAX_CLIENTS + 100):
        sys.exit(f"bench: {needed} files must be open at a time, and the limit is {limit}")
    settings = {"rounds": 3 if options.quick else 15, "count": 200 if options.quick else 1000,
                "seed": options.seed}
    measured = {}
    for way in ("line", "token"):
        limits = ["--maxclients", str(MAX_CLIENTS)]
        module = None
        if way == "line":
            limits += ["--turnstile.max-waiters", str(MAX_CLIENTS)]
            module = common.MODULE
        with one_core(), contextlib.ExitStack() as stack:
            places = []
            for waiters in numbers:
                server = stack.enter_context(common.Server(*limits, module=module))
                server.populate()
                places += ["--server", f"{server.port},{server.pid},{waiters}"]
            common.say(f"contention: hand-overs, {WAYS[way]}")
            measured[way] = json.loads(common.measure(
                "contention", "hand-over", "--way", way, *places, *arguments(settings)))
    return measured


# --- Figures ----------------------------------------------------------------------------------

FIGURES = {  # of one run
    "rate": lambda run: run["acquisitions"] / run["seconds"],
    "p50": lambda run: run["p50_ms"],
    "p99": lambda run: run["p99_ms"],
    "max": lambda run: run["max_ms"],
    "fairness": lambda run: run["most"] / max(run["least"], 1),
    "requests": lambda run: run["requests"] / run["acquisitions"],
    "cpu": lambda run: run["cpu_us"] / run["acquisitions"],
}


def figures(runs, figure):
    return [FIGURES[figure](run) for run in runs]


def paired(runs, over, under, figure):
    """The ratios of two ways, of each round by itself."""
    return common.spread([a / b for a, b in zip(figures(runs[over], figure),
                                                figures(runs[under], figure))])


def growth(lines, place):
    """The cost of a hand-over against that with the fewest waiting clients."""
    return common.spread([a / b for a, b in zip(lines[place]["cpu_us"], lines[0]["cpu_us"])])


def own_growth(data):
    """That of the longest line, over what a BLPOP token grows by."""
    line, token = (growth(data["hand_over"][way], -1)["median"] for way in ("line", "token"))
    return line / token


def goals(data):
    runs = data["threads"]["runs"]["10"]
    requests = common.spread(figures(runs["line"], "requests"))["median"]
    fairness = common.spread(figures(runs["line"], "fairness"))["median"]
    seconds = data["threads"]["seconds"]
    longest = data["hand_over"]["line"][-1]["waiters"]

    def cpu_against(way):
        return paired(runs, "line", way, "cpu")["median"]

    return [
        common.Goal.at_least("contended acquisitions/s vs polling (think 0 to 10 ms)", 1.8,
                             paired(runs, "line", "polling", "rate")["median"]),
        common.Goal.at_least("p99 of the wait, so many times lower than with polling "
                             "(think 0 to 10 ms)", 8,
                             paired(runs, "polling", "line", "p99")["median"], digits=1),
        common.Goal.at_most("server CPU per acquisition vs pub/sub wake-all", 0.167,
                            cpu_against("pubsub"), digits=3),
        common.Goal.at_most("server CPU per acquisition vs BLPOP token (no owner, no lease)", 0.75,
                            cpu_against("token")),
        common.Goal.at_most("server CPU per acquisition vs BLPOP with owner and lease", 0.75,
                            cpu_against("signal")),
        common.Goal("requests per contended acquisition", "2", f"{requests:.2f}",
                    round(requests, 2) == 2),
        common.Goal.at_most(f"fairness most/least in {seconds:g} s", 1.10, fairness),
        common.Goal.at_most(f"CPU per hand-over, {longest:,} vs 10 waiters (less serverCron)", 1.10,
                            growth(data["hand_over"]["line"], -1)["median"]),
        common.Goal.at_most("the same, over the growth of a BLPOP token", 1.10, own_growth(data)),
    ]


# --- The report -------------------------------------------------------------------------------


def report(data):
    threads = data["threads"]
    rounds = " and ".join(f"{threads['rounds'][think]} rounds ({thinking(think)})"
                          for think in THINK_MS)
    sections = [
        f"{data['clients']} clients, each with a thread and a connection of its own, compete for "
        f"one lock: each thinks, acquires, holds for 0 to 1 ms and releases. Medians over {rounds} "
        f"of {threads['seconds']:g} s, in which the ways take turns in random order: Turnstile on "
        "one server, the others on one without any module, each with "
        f"{common.OTHERS:,} keys of others. "
        "The wait is that of the client; one that the end of the round has cut counts with what it "
        "had lasted by then. Requests, and CPU time of the server, are for each "
        "acquisition; most/least compares the client that got the lock most often in a round with "
        "the one that got it least often.\n",
        "The BLPOP token is a list with one element: no owner, no lease, and a holder that dies "
        "takes the token with it. *With owner and lease* is how libraries mend that: `SET NX PX`, "
        "`BLPOP` of a signal while it is held, `SET` again, and a script that releases and "
        "signals.\n",
    ]
    for think in THINK_MS:
        sections.append(f"### {thinking(think).capitalize()}\n\n"
                        + way_table(threads["runs"][think], WAYS))
        sections.append(ratio_table(threads["runs"][think], "line", WAYS))
    sections.append("With no think time a client that polls, and has just released, gets the lock "
                    "again at once: many acquisitions, by few clients.\n")
    sections.append("![Acquisitions per second](contention-rate.svg)\n\n"
                    "![p99 wait](contention-p99.svg)\n")
    sections += ["### In Node\n", *node_sections(data)]
    sections += ["### Hand-over\n", hand_over_section(data["hand_over"])]
    return common.Report("\n".join(sections), plots(data))


def thinking(think):
    return "no think time" if think == "0" else f"think 0 to {think} ms"


def number(value):
    """With three figures, as far as it makes sense."""
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:,.{digits}f}"


def way_table(runs, names):
    header = ["way", "acquisitions/s", "p50 ms", "p99 ms", "max ms", "most/least", "requests",
              "CPU µs"]
    rows = [[name] + [number(common.spread(figures(runs[way], figure))["median"])
                      for figure in ("rate", "p50", "p99", "max", "fairness", "requests", "cpu")]
            for way, name in names.items()]
    return common.table(header, rows)


def with_quartiles(ratio):
    return f"{number(ratio['median'])} ({number(ratio['q1'])} to {number(ratio['q3'])})"


def ratio_table(runs, ours, names):
    header = [f"{names[ours]}, against", "acquisitions/s", "p99", "CPU"]
    rows = [[name] + [with_quartiles(paired(runs, ours, way, figure))
                      for figure in ("rate", "p99", "cpu")]
            for way, name in names.items() if way != ours]
    return ("Ratios within a round, median (quartiles):\n\n" + common.table(header, rows))


def node_sections(data):
    measured = data["node"]
    if "missing" in measured:
        yield f"Not measured: {measured['missing']}.\n"
        return
    rounds = " and ".join(f"{measured['rounds'][think]} ({thinking(think)})" for think in THINK_MS)
    yield (f"redlock and redis-semaphore (its Mutex), with their own delays, against Turnstile; "
           f"all over ioredis, {data['clients']} clients with a connection each in one process. "
           f"They hold the lock for 0 or 1 ms: Node's timers know no less. {rounds} rounds of "
           f"{measured['seconds']:g} s. The client in `client-examples/node` leaves its connection "
           "to other work while it waits, and opens one for each wait; the first row waits on the "
           "connection that it has.\n")
    for think in THINK_MS:
        table = way_table(measured["runs"][think], NODE_WAYS)
        yield f"{thinking(think).capitalize()}:\n\n{table}"
    yield ratio_table(measured["runs"]["10"], "plain", NODE_WAYS)


def hand_over_section(measured):
    rows = []
    for place, at in enumerate(measured["line"]):
        cells = [f"{at['waiters']:,}" + (" again" if place == AGAIN else "")]
        for lines in measured.values():
            cells.append(number(common.spread(lines[place]["cpu_us"])["median"]))
            cells.append(with_quartiles(growth(lines, place)) if place else "1")
        cells.append(f"{100 * at['cron_share']:.1f} %")
        rows.append(cells)
    header = ["waiting", "line, CPU µs", "against 10", "token, CPU µs", "against 10", "cron"]
    text = (
        "CPU time of the server for one hand-over (a release, and a request that goes to the end "
        "of the line) while so many clients stand in line; the token's is in a server without the "
        "module. Server and clients share one core. "
        f"Median of {len(measured['line'][0]['cpu_us'])} rounds; the ratios are those within a "
        "round. Taken off is what the server spends on that many clients while nothing happens: "
        "its cron, in the last column as the share of a core. The BLPOP token is the control: "
        "with many clients each hand-over meets memory, in the server and in the kernel, that is "
        "no longer in the CPU's caches.\n\n")
    return text + common.table(header, rows) + "\n![CPU of a hand-over](contention-hand-over.svg)\n"


def plots(data):
    runs = data["threads"]["runs"]["10"]

    def bars(title, figure, axis, unit, log):
        spreads = {name: common.spread(figures(runs[way], figure)) for way, name in WAYS.items()}
        rows = [(name, it["median"], it["q1"], it["q3"]) for name, it in spreads.items()]
        return plot.bars(title, rows, axis, unit=unit, log=log)

    series = {}
    for way, lines in data["hand_over"].items():
        series[WAYS[way]] = [(at["waiters"], common.spread(at["cpu_us"])["median"])
                             for place, at in enumerate(lines) if place != AGAIN]
    return {
        "contention-rate.svg": bars(
            "Acquisitions: 50 clients, one lock, think time 0 to 10 ms", "rate",
            "acquisitions per second", "", False),
        "contention-p99.svg": bars(
            "p99 wait: 50 clients, one lock, think time 0 to 10 ms", "p99", "p99 wait, ms", "ms",
            True),
        "contention-hand-over.svg": plot.lines(
            "Server CPU per hand-over", series, "waiting clients", "server CPU per hand-over, µs",
            log_x=True),
    }

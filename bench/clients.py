"""Clients: those of client-examples against the libraries that people use today."""

import contextlib
import json
import random
import subprocess
import sys
import tempfile

import common
import contention

TITLE = "Clients"
SECONDS = 390

PROCESSES = 4
CASES = {  # processes, milliseconds outside the lock
    "alone": (1, 0),
    "no pause": (PROCESSES, 0),
    "100 ms outside": (PROCESSES, 100),
}
WAYS = {
    "python": {
        "bare": "LOCK.ACQUIRE … WAIT and LOCK.RELEASE",
        "turnstile": "turnstile_lock.py",
        "drop-in": "turnstile_redis_lock.py, for redis-py's Lock",
        "redis-py": "redis-py's Lock",
    },
    "node": {
        "bare": "LOCK.ACQUIRE … WAIT and LOCK.RELEASE",
        "turnstile": "turnstile.mjs",
        "drop-in": "redlock.mjs, for redlock",
        "redlock": "redlock",
        "redis-semaphore": "redis-semaphore, its Mutex",
    },
}
OURS = ("turnstile", "drop-in")
PEERS = {"python": ("redis-py",), "node": ("redlock", "redis-semaphore")}
PROGRAMS = {"python": ["/usr/bin/python3", "clients_worker.py"], "node": ["node", "clients_worker.mjs"]}


def run(options):
    """data: for each language, case and way its runs, one for each round."""
    rounds, seconds = (1, 0.5) if options.quick else (5, 2.0)
    missing = contention.why_no_node() or why_no_ioredis()
    languages = ["python"] if missing else list(WAYS)
    generator = random.Random(options.seed)
    runs = {language: {case: {way: [] for way in WAYS[language]} for case in CASES}
            for language in languages}
    with common.Server() as ours, common.Server(module=None) as plain:
        for number in range(rounds):
            common.say(f"clients: round {number + 1} of {rounds}")
            for language in languages:
                for case in CASES:
                    for way in generator.sample(sorted(WAYS[language]), len(WAYS[language])):
                        server = plain if way in PEERS[language] else ours
                        runs[language][case][way].append(
                            compete(server, language, way, *CASES[case], seconds))
    return {"rounds": rounds, "seconds": seconds, "missing": missing, "runs": runs}


def why_no_ioredis():
    """Installs what the clients in Node need. None if it is there."""
    folder = common.ROOT / "client-examples" / "node"
    if not (folder / "node_modules").exists():
        install = ["npm", "ci", "--prefix", str(folder), "--no-audit", "--no-fund", "--silent"]
        if subprocess.run(install, stdout=sys.stderr).returncode != 0:
            return "npm could not install the packages"
    return None


def compete(server, language, way, processes, think, seconds):
    """One run: what the processes measured, all together."""
    program, file = PROGRAMS[language]
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stop:
        command = [program, str(common.ROOT / "bench" / file), str(server.port), way, str(think),
                   str(seconds), folder]
        workers = []
        for _ in range(processes):
            worker = subprocess.Popen(command, text=True, stdin=subprocess.PIPE,
                                      stdout=subprocess.PIPE)
            stop.callback(worker.wait)
            stop.callback(worker.kill)
            workers.append(worker)
            if worker.stdout.readline() != "ready\n":
                sys.exit(f"bench: {' '.join(command)} did not start")
        before = server.client.info("stats")["total_connections_received"]
        for worker in workers:
            worker.stdin.write("go\n")
            worker.stdin.flush()
        results = []
        for worker in workers:
            answer, _ = worker.communicate(timeout=common.PATIENCE_S)
            if worker.returncode != 0:
                sys.exit(f"bench: {' '.join(command)} failed with status {worker.returncode}")
            results.append(json.loads(answer))
        opened = server.client.info("stats")["total_connections_received"] - before
    waits = sorted(wait for result in results for wait in result["waits"])
    counts = [len(result["waits"]) for result in results]
    return {
        "rate": len(waits) / seconds,
        "p99_ms": 1000 * waits[int(len(waits) * 0.99)],
        "max_ms": 1000 * waits[-1],
        "cpu_us": 1e6 * sum(result["cpu"] for result in results) / len(waits),
        "opened": opened,
        "least_most": min(counts) / max(counts),
    }


def ratio(runs, over, under, figure):
    """Of each round by itself."""
    return common.spread([a[figure] / b[figure] for a, b in zip(runs[over], runs[under])])


def median(runs, figure):
    return common.spread([run[figure] for run in runs])["median"]


def goals(data):
    found = []
    for language, cases in data["runs"].items():
        for peer in PEERS[language]:
            def against(case, figure, peer=peer, cases=cases):
                return ratio(cases[case], "turnstile", peer, figure)["median"]

            name = f"{language} client vs {peer}"
            found += [
                common.Goal.at_least(f"{name}: rate of one process", 1, against("alone", "rate")),
                common.Goal.at_least(f"{name}: rate of {PROCESSES}, no pause", 1,
                                     against("no pause", "rate")),
                common.Goal.at_least(f"{name}: rate of {PROCESSES}, 100 ms outside", 2,
                                     against("100 ms outside", "rate")),
                common.Goal.at_most(f"{name}: p99 of the wait, 100 ms outside", 0.125,
                                    against("100 ms outside", "p99_ms"), digits=3),
            ]
        found.append(common.Goal.at_most(
            f"{language} client vs bare commands: client CPU, one process", 1.3,
            ratio(cases["alone"], "turnstile", "bare", "cpu_us")["median"]))
    return found


def report(data):
    sections = [
        f"One lock. Each process acquires it, releases it at once, and in one of the cases works "
        f"for 100 ms outside before it comes back. Medians of {data['rounds']} rounds of "
        f"{data['seconds']:g} s, in which the ways take turns in random order; the libraries on a "
        "server without any module. CPU is that of the clients for each acquisition. "
        "*Opened* counts connections that were opened after the first acquisition; *least/most* "
        "compares the process that got the lock least often with the one that got it most often. "
        "Without a pause a library that polls lets the process that has just released get the lock "
        "again and again: a high rate, for one.\n"]
    if data["missing"]:
        sections.append(f"Node was not measured: {data['missing']}.\n")
    header = ["way", "acquisitions/s", "p99 ms", "max ms", "client CPU µs", "opened", "least/most"]
    figures = ("rate", "p99_ms", "max_ms", "cpu_us", "opened", "least_most")
    for language, cases in data["runs"].items():
        for case, runs in cases.items():
            processes = CASES[case][0]
            heading = "one process" if processes == 1 else f"{processes} processes, {case}"
            rows = [[name] + [contention.number(median(runs[way], figure)) for figure in figures]
                    for way, name in WAYS[language].items()]
            sections.append(f"### {language.capitalize()}, {heading}\n\n"
                            + common.table(header, rows))
            rows = [[WAYS[language][way] + ", against " + peer]
                    + [contention.with_quartiles(ratio(runs, way, peer, figure))
                       for figure in ("rate", "p99_ms", "cpu_us")]
                    for way in OURS for peer in ("bare", *PEERS[language])]
            sections.append("Ratios within a round, median (quartiles):\n\n"
                            + common.table(["", "acquisitions/s", "p99", "client CPU"], rows))
    return common.Report("\n".join(sections))

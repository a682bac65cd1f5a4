"""Instructions of the real server for each acquire and release, and for each touch.

    /usr/bin/python3 bench/instructions.py --profile [--setting S] [--mode M] [--pipeline N]

shows where they go, function by function.
"""

import argparse
import contextlib
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
import tempfile

import common
import plot
from throughput import NAMES as PAIRS
from throughput import Load

TITLE = "Instructions"
SECONDS = 100

OPERATIONS = 2000
WARM_UP = 10  # part of the operations
PIPELINES = (16, 1)
TOUCHES = {  # by mode of bench/load.cc
    "pexpire": "PEXPIRE",
    "touch": "LOCK.TOUCH",
    "evalsha-extend": "EVALSHA extend",
}
MODES = {**PAIRS, **TOUCHES}
SETTINGS = {"no-listener": "no listener", "aof": "AOF on", "replica": "one replica"}


class Counter:
    """A server under callgrind, and what it executes. Use it with `with`.

    Callgrind writes down and resets its counts whenever the server enters the function behind the
    command TIME, which nobody else calls. So the counts begin and end at exact places.
    """

    MARK = "timeCommand"

    def __init__(self, *more, module=True):
        """`more` are options of the server, which has our module or not."""
        if not shutil.which("valgrind"):
            sys.exit("bench: counting instructions needs valgrind")
        self.stack = contextlib.ExitStack()
        folder = self.stack.enter_context(tempfile.TemporaryDirectory(prefix="turnstile-bench-"))
        self.folder = pathlib.Path(folder)
        self.dumps = 0
        # Few ticks, and no rewrite of the AOF: what they cost is no part of an operation.
        options = [*more, "--hz", "1", "--auto-aof-rewrite-percentage", "0"]
        options += ["--repl-diskless-sync-delay", "0"]
        under = ["valgrind", "-q", "--tool=callgrind", f"--dump-before={self.MARK}",
                 f"--callgrind-out-file={self.folder}/%p"]
        self.server = self.stack.enter_context(common.Server(*options, under=under, module=module))

    def listen(self, setting):
        """Turns on what listens to the server's writes, and nothing else."""
        server = self.server
        server.ask("CONFIG", "SET", "appendonly", "yes" if setting == "aof" else "no")
        if setting == "aof":
            server.wait_for("the AOF", lambda: not server.info(
                "persistence", "aof_rewrite_in_progress"))
        if setting == "replica":
            self.stack.enter_context(
                common.Server("--replicaof", "127.0.0.1", str(server.port)))
            server.wait_for("the replica", lambda: server.client.info("replication").get(
                "slave0", {}).get("state") == "online")
        self.check(setting)

    def check(self, setting):
        """Ends the benchmark if something else listens than should."""
        replication = self.server.client.info("replication")
        listening = (
            self.server.info("persistence", "aof_enabled"),
            replication["connected_slaves"],
            replication["repl_backlog_active"],
        )
        if listening != {"no-listener": (0, 0, 0), "aof": (1, 0, 0), "replica": (0, 1, 1)}[setting]:
            sys.exit(f"bench: {setting}: AOF, replicas and backlog are {listening}")

    def mark(self):
        """The file with the counts since the last mark."""
        self.server.ask("TIME")
        self.dumps += 1
        dump = self.folder / f"{self.server.pid}.{self.dumps}"
        if not dump.exists():
            sys.exit(f"bench: valgrind does not find {self.MARK} in the server")
        return dump

    def count(self, mode, pipeline, operations):
        """The file with the counts of so many operations."""
        keys = 1000 if mode in TOUCHES else 16
        with Load(self.server, mode, clients=1, keys=keys, pipeline=pipeline) as load:
            load.run(operations // WARM_UP)
            self.mark().unlink()
            load.run(operations)
            return self.mark()

    def __enter__(self):
        return self

    def __exit__(self, *failure):
        self.stack.__exit__(*failure)


def total(dump):
    return int(re.search(r"^totals: (\d+)$", dump.read_text(), re.MULTILINE)[1])


def run(options):
    operations = 50 if options.quick else OPERATIONS
    data = {"operations": operations, "settings": {}}
    common.say("instructions: without the module")
    with Counter(module=False) as counter:
        bare = total(counter.count("set-del", 16, operations)) / operations
        data["without_module"] = {"set-del": bare}
    with Counter() as counter:
        # In this order: the replication backlog stays when the replica has gone.
        for setting in SETTINGS:
            counter.listen(setting)
            data["settings"][setting] = {}
            for pipeline in PIPELINES:
                common.say(f"instructions: {SETTINGS[setting]}, pipeline {pipeline}")
                data["settings"][setting][str(pipeline)] = both(counter, pipeline, operations)
            counter.check(setting)
    return data


def both(counter, pipeline, operations):
    """Every mode, and every mode again."""
    counts = {mode: [] for mode in MODES}
    for _ in range(2):
        for mode in MODES:
            dump = counter.count(mode, pipeline, operations)
            counts[mode].append(total(dump) / operations)
            dump.unlink()
    return {mode: {"instructions": statistics.mean(of), "apart": max(of) / min(of) - 1}
            for mode, of in counts.items()}


def ratio(data, setting, pipeline, mode, other):
    figures = data["settings"][setting][pipeline]
    return figures[mode]["instructions"] / figures[other]["instructions"]


def goals(data):
    def goal(what, bound, setting, mode, other):
        what = f"{what}, {SETTINGS[setting]}, pipeline 16"
        return common.Goal.at_most(what, bound, ratio(data, setting, "16", mode, other))

    plain = "instructions per pair vs SET NX PX + DEL"
    fencing = "instructions per pair vs EVALSHA fencing + release"
    return [
        goal(plain, 1.10, "no-listener", "turnstile", "set-del"),
        goal(plain, 1.32, "aof", "turnstile", "set-del"),
        goal(plain, 1.32, "replica", "turnstile", "set-del"),
        goal(fencing, 0.28, "no-listener", "turnstile", "evalsha-fencing"),
        goal(fencing, 0.42, "aof", "turnstile", "evalsha-fencing"),
        goal("instructions per touch vs PEXPIRE", 1.20, "no-listener", "touch", "pexpire"),
        goal("instructions per touch vs EVALSHA extend", 0.30, "no-listener", "touch",
             "evalsha-extend"),
    ]


def report(data):
    columns = [(setting, str(pipeline)) for setting in SETTINGS for pipeline in PIPELINES]
    heads = [f"{SETTINGS[setting]}, pipeline {pipeline}" for setting, pipeline in columns]
    against, counts, apart = [], [], []
    for mode, name in MODES.items():
        ours = "touch" if mode in TOUCHES else "turnstile"
        if mode != ours:
            against.append([name] + [f"{ratio(data, *column, ours, mode):.2f}"
                                     for column in columns])
        figures = [data["settings"][setting][pipeline][mode] for setting, pipeline in columns]
        counts.append([name] + [f"{figure['instructions']:,.0f}" for figure in figures])
        apart += [figure["apart"] for figure in figures]
    bare = data["without_module"]["set-del"]
    ours = data["settings"]["no-listener"]["16"]["turnstile"]["instructions"]
    markdown = (
        "What the server executes, counted by callgrind, for one client and few keys. Instructions "
        "of LOCK.ACQUIRE + LOCK.RELEASE, or of LOCK.TOUCH, as a ratio to others:\n\n"
        f"{common.table(['against', *heads], against)}\n"
        "Instructions for each pair and each touch:\n\n"
        f"{common.table(['command', *heads], counts)}\n"
        f"Each figure is the mean of two counts of {data['operations']:,} operations. The two "
        f"differ by {statistics.median(apart):.2%} (median), at most by {max(apart):.2%}.\n\n"
        "All of this is in one server with the module. It follows the TTL of keys, which costs every "
        "SET … PX and every DEL the event that the server sends it: on a server without the module "
        f"SET NX PX + DEL takes {bare:,.0f} instructions (no listener, pipeline 16), and "
        f"LOCK.ACQUIRE + LOCK.RELEASE {ours / bare:.2f} times as many.\n\n"
        "![Instructions for each pair, ratio to SET NX PX + DEL](instructions.svg)\n")
    bars = [(name, ratio(data, "no-listener", "16", mode, "set-del"), None, None)
            for mode, name in PAIRS.items()]
    svg = plot.bars("Instructions per pair, ratio to SET NX PX + DEL (no listener, pipeline 16)",
                    bars, reference=1)
    return common.Report(markdown, {"instructions.svg": svg})


def profile(setting, mode, pipeline, top):
    """Prints the functions that take most."""
    with Counter() as counter:
        counter.listen(setting)
        dump = counter.count(mode, pipeline, OPERATIONS)
        print(f"{MODES[mode]}, {SETTINGS[setting]}, pipeline {pipeline}: "
              f"{total(dump) / OPERATIONS:,.0f} instructions")
        # Calls that began before the mark; callgrind_annotate takes them for work of the caller.
        dump.write_text(dump.read_text().replace("\ncalls=0 ", "\ncalls=1 "))
        for title, inclusive in (("with what they call", "yes"), ("by themselves", "no")):
            print(f"\nfunctions, {title}:")
            annotated = subprocess.run(
                ["callgrind_annotate", f"--inclusive={inclusive}", "--threshold=100", str(dump)],
                stdout=subprocess.PIPE, text=True, check=True).stdout
            lines = re.findall(r"^ *([\d,]+) \( *[\d.]+%\)  (.*)$", annotated, re.MULTILINE)
            lines = [line for line in lines if line[1] != "PROGRAM TOTALS"]
            for count, function in lines[:top]:
                function = re.sub(r"^.*?:(?!:)(.*) \[.*?([^/]*)\]$", r"\1 [\2]", function)
                print(f"{int(count.replace(',', '')) / OPERATIONS:10,.1f}  {function}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Shows where the instructions go.")
    parser.add_argument("--profile", action="store_true", required=True)
    parser.add_argument("--setting", choices=SETTINGS, default="no-listener")
    parser.add_argument("--mode", choices=MODES, default="turnstile")
    parser.add_argument("--pipeline", type=int, default=16)
    parser.add_argument("--top", type=int, default=40, help="how many functions (40)")
    arguments = parser.parse_args()
    profile(arguments.setting, arguments.mode, arguments.pipeline, arguments.top)

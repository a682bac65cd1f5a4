"""Throughput and CPU time of the server: 50 clients, 100,000 random keys."""

import json
import random
import subprocess
import sys

import common
import modes
import plot
from modes import PAIRS

TITLE = "Throughput and CPU time"
SECONDS = 45

CLIENTS = 50
KEYS = 100_000
ROUNDS = 9
OPERATIONS = {16: 80_000, 1: 16_000}  # by pipeline: at least 0.2 s of CPU time each
WARM_UP = 4  # part of the operations
BASELINE = "set-del"
AGAIN = "set-del again"  # the baseline a second time: what a ratio of 1 looks like here


class Load:
    """bench/load.cc at work on a server with a pair of commands, connected. Use it with `with`."""

    def __init__(self, server, mode, **settings):
        command = [str(common.BINARIES / "load"), "--port", str(server.port)]
        for text in PAIRS[mode].commands:
            command += ["--command", text]
        for name, value in settings.items():
            command += [f"--{name}", str(value)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answer()  # it is ready

    def _answer(self):
        line = self.process.stdout.readline()
        if not line:
            command = " ".join(self.process.args)
            sys.exit(f"bench: {command} failed with status {self.process.wait()}")
        return line

    def run(self, operations):
        """The seconds that so many operations took."""
        self.process.stdin.write(f"{operations}\n")
        self.process.stdin.flush()
        return json.loads(self._answer())["seconds"]

    def __enter__(self):
        return self

    def __exit__(self, failure, *_):
        if failure:
            self.process.kill()
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()


def measure(server, mode, pipeline, operations, seed):
    settings = {"clients": CLIENTS, "keys": KEYS, "pipeline": pipeline, "seed": seed}
    with Load(server, mode, **settings) as load:
        load.run(operations // WARM_UP)
        before = server.cpu_s()
        seconds = load.run(operations)
        return {"rate": operations / seconds, "cpu": server.cpu_s() - before}


def run(options):
    rounds = 2 if options.quick else ROUNDS
    sizes = {pipeline: operations // 5 if options.quick else operations
             for pipeline, operations in OPERATIONS.items()}
    generator = random.Random(options.seed)
    data = {"rounds": rounds, "clients": CLIENTS, "keys": KEYS, "pipelines": {}}
    taken = {pipeline: {mode: [] for mode in [*PAIRS, AGAIN]} for pipeline in sizes}
    with common.Server() as ours, common.Server(module=None) as bare:
        for server in (ours, bare):
            server.populate()
            modes.load_scripts(server)
        for number in range(rounds):
            common.say(f"throughput: round {number + 1} of {rounds}")
            for pipeline, operations in sizes.items():
                for mode in generator.sample([*PAIRS, AGAIN], len(PAIRS) + 1):
                    command = BASELINE if mode == AGAIN else mode
                    server = ours if PAIRS[command].is_ours() else bare
                    figures = measure(
                        server, command, pipeline, operations, generator.randrange(1, 2**31))
                    taken[pipeline][mode].append(figures)
    for pipeline, operations in sizes.items():
        data["pipelines"][str(pipeline)] = {
            "operations": operations,
            "modes": {mode: summary(taken[pipeline], mode) for mode in [*PAIRS, AGAIN]},
            "turnstile vs evalsha-fencing": ratios(
                taken[pipeline], "turnstile", "evalsha-fencing", "rate"),
        }
    return data


def ratios(taken, mode, other, figure):
    """Paired within each round: what the machine does meanwhile cancels out."""
    pairs = zip(taken[mode], taken[other])
    return common.spread([one[figure] / two[figure] for one, two in pairs])


def summary(taken, mode):
    return {
        "rate": ratios(taken, mode, BASELINE, "rate"),
        "cpu": ratios(taken, mode, BASELINE, "cpu"),
        "pairs_per_s": common.spread([figures["rate"] for figures in taken[mode]])["median"],
        "cpu_s": common.spread([figures["cpu"] for figures in taken[mode]])["median"],
    }


def goals(data):
    fast = data["pipelines"]["16"]
    return [
        common.Goal.at_least("throughput, pipeline 16, vs SET NX PX + DEL", 0.80,
                             fast["modes"]["turnstile"]["rate"]["median"]),
        common.Goal.at_least("throughput, pipeline 16, vs EVALSHA fencing + release", 2.0,
                             fast["turnstile vs evalsha-fencing"]["median"]),
    ]


def report(data):
    markdown = (
        f"{data['clients']} clients, {data['keys']:,} random keys, and {common.OTHERS:,} others in "
        "the database; a pair is an acquire and a release. LOCK.ACQUIRE and LOCK.RELEASE run in a "
        "server with Turnstile, all else in a server without any module. Ratios to SET NX PX + DEL "
        f"of the same round: the median of {data['rounds']} "
        f"rounds, and the quartiles. The last row is SET NX PX + DEL a second time: what differs "
        f"from 1.00 there is noise.\n\n")
    names = {**{name: mode.title for name, mode in PAIRS.items()}, AGAIN: "SET NX PX + DEL, again"}
    header = ["pair", "pairs/s", "pairs/s, ratio", "quartiles", "server CPU, ratio", "quartiles"]
    for pipeline, figures in data["pipelines"].items():
        rows = []
        for mode, name in names.items():
            one = figures["modes"][mode]
            row = [name, f"{one['pairs_per_s']:,.0f}"]
            for figure in ("rate", "cpu"):
                of = one[figure]
                row += [f"{of['median']:.2f}", f"{of['q1']:.2f} to {of['q3']:.2f}"]
            rows.append(row)
        markdown += f"Pipeline {pipeline}:\n\n{common.table(header, rows)}\n"
    markdown += "![Throughput, ratio to SET NX PX + DEL](throughput.svg)\n"
    bars = []
    for mode, name in names.items():
        if mode != BASELINE:
            rate = data["pipelines"]["16"]["modes"][mode]["rate"]
            bars.append((name, rate["median"], rate["q1"], rate["q3"]))
    svg = plot.bars("Throughput of acquire and release (50 clients, pipeline 16)", bars,
                    "pairs per second, ratio to SET NX PX + DEL", reference=1)
    return common.Report(markdown, {"throughput.svg": svg})

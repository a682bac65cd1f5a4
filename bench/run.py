"""Runs the parts of the benchmark and writes bench/results/. Called by script/bench, which builds.

The page bench/results/README.md is made from the JSON files beside it and from nothing else: it can
be written again at any time, and a test holds it against its data.
"""

import argparse
import contextlib
import datetime
import importlib
import json
import os
import pathlib
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import common
from common import say

PARTS = ("instructions", "valkey", "throughput", "contention", "queued", "clients", "scale",
         "others")
RESULTS = pathlib.Path(__file__).resolve().parent / "results"


# --- Measuring --------------------------------------------------------------------------------


def machine():
    """Where and on what is measured; nothing that names the machine."""
    with common.Server() as server:
        log = (server.folder / "log").read_text()
    module, engine = re.search(r"turnstile (\S+) on (\w+ \d[\d.]*\d)", log).groups()
    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": f"{platform.system()} {platform.release()}",
        "server": engine,
        "module": f"Turnstile {module}",
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }


def cpu_model():
    listed = subprocess.run(["lscpu"], stdout=subprocess.PIPE, text=True,
                            env={**os.environ, "LC_ALL": "C"}).stdout
    found = re.search(r"^Model name:\s*(.+)$", listed, re.MULTILINE)
    return found[1].strip() if found else platform.machine()


def engine_server(name):
    """The path of this engine's server, or None if it cannot be had."""
    found = subprocess.run([common.ROOT / "script" / "engine", name], stdout=subprocess.PIPE,
                           text=True)
    return found.stdout.strip() if found.returncode == 0 else None


@contextlib.contextmanager
def server_program(path):
    """Servers that are started meanwhile are of this program; None: of the one that it is."""
    before = os.environ.get("REDIS_SERVER")
    if path:
        os.environ["REDIS_SERVER"] = path
    try:
        yield
    finally:
        if path and before is None:
            del os.environ["REDIS_SERVER"]
        elif path:
            os.environ["REDIS_SERVER"] = before


def measure(parts, options, folders):
    """Runs these parts; each one's data is in its folder as soon as it is there."""
    about = "" if options.quick else f" of about {sum(p.SECONDS for p in parts.values())}"
    begin = time.monotonic()
    for k, (name, part) in enumerate(parts.items(), 1):
        started = time.monotonic()
        say(f"part {k} of {len(parts)}: {name} ({started - begin:.0f}{about} s so far)")
        engine = getattr(part, "ENGINE", None)
        path = engine_server(engine) if engine else None
        if engine and not path:
            say(f"{name} is left out: there is no engine {engine}")
            continue
        with server_program(path):
            conditions = machine()
            data = part.run(options)
        seconds = round(time.monotonic() - started)
        store(folders[name] / f"{name}.json", json.dumps({
            "conditions": {**conditions, "seed": options.seed, "seconds": seconds}, "data": data,
        }, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
        say(f"{name} took {seconds} s")


def store(file, text):
    """All or nothing: an interrupted run leaves no half file."""
    part = file.with_name(file.name + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(file)


# --- The report -------------------------------------------------------------------------------


def pages(folder):
    """The page and the plots for what is stored in the folder: {name of the file: its text}."""
    stored = {}
    for name in PARTS:
        file = folder / f"{name}.json"
        if file.exists():
            stored[name] = json.loads(file.read_text(encoding="utf-8"))
    parts = {name: importlib.import_module(name) for name in stored}
    goals, sections, files = [], [], {}
    for name, part in parts.items():
        goals += part.goals(stored[name]["data"])
        report = part.report(stored[name]["data"])
        sections.append(f"## {part.TITLE}\n\n{report.markdown.strip()}\n")
        if twice := files.keys() & report.plots.keys():
            sys.exit(f"bench: {name} has a plot whose name is taken: {', '.join(twice)}")
        files |= report.plots
    absent = [name for name in PARTS if name not in stored]
    top = ["# Results\n",
           "Written by `script/bench` from the JSON files in this folder. "
           "[How it measures, and how to read it](../README.md).\n",
           measured_on({name: each["conditions"] for name, each in stored.items()})]
    if absent:
        top.append(f"Not measured: {', '.join(absent)}.\n")
    top.append(goal_section(goals))
    return {"README.md": "\n".join(top + sections), **files}


def measured_on(conditions):
    """One line if all parts were measured under the same conditions, else one for each kind."""
    kinds = {}
    seconds = 0
    for name, each in conditions.items():
        each = dict(each)
        seconds += each.pop("seconds")
        kinds.setdefault(tuple(each.items()), []).append(name)
    lines = []
    for kind, names in kinds.items():
        it = dict(kind)
        cores = f"{it['cores']} core" + ("s" if it["cores"] != 1 else "")
        text = (f"{it['module']} on {it['server']}; {it['cpu']}, {cores}, {it['kernel']}; "
                f"{it['date']}, seed {it['seed']}")
        lines.append(f"- {', '.join(names)}: {text}" if len(kinds) > 1 else f"{text}.")
    if len(kinds) > 1:
        lines.append("")
    if conditions:
        lines.append(f"The parts together took {seconds // 60} min {seconds % 60} s.")
    return "\n".join(lines) + "\n"


def goal_section(goals):
    rows = [[goal.what.replace("|", "\\|"), goal.goal, goal.measured,
             "yes" if goal.met else "**no**"] for goal in goals]
    met = sum(goal.met for goal in goals)
    why = "" if met == len(goals) else " [Why not all](../README.md#goals-that-are-missed)."
    return (f"## Goals\n\n{met} of {len(goals)} met.{why}\n\n"
            + common.table(["what", "goal", "measured", "met"], rows))


def write_report(folder):
    files = pages(folder)
    for name, text in files.items():
        store(folder / name, text)
    for plot in folder.glob("*.svg"):
        if plot.name not in files:
            plot.unlink()
    return files["README.md"]


# --- The command line -------------------------------------------------------------------------


def parts_of(text):
    """The parts named, in the order in which they run."""
    names = text.split(",")
    if unknown := set(names) - set(PARTS):
        raise argparse.ArgumentTypeError(f"no part {', '.join(sorted(unknown))}")
    return [name for name in PARTS if name in names]


def parse(arguments):
    parser = argparse.ArgumentParser(
        description="Measures Turnstile and writes bench/results/; script/bench builds it first.")
    parser.add_argument("--only", metavar="PART[,PART]", type=parts_of, default=list(PARTS),
                        help="measure only these parts, of " + ", ".join(PARTS))
    parser.add_argument("--report", action="store_true",
                        help="measure nothing, write the page again from the stored data")
    parser.add_argument("--quick", action="store_true",
                        help="try it in a minute or two; the results are printed, not stored")
    parser.add_argument("--full", action="store_true", help="also what takes long")
    parser.add_argument("--seed", type=int, default=common.Options.seed,
                        help="of the random choices (%(default)s)")
    parser.add_argument("--engine", metavar="NAME",
                        help="another server (script/engine list); printed, not stored, but for "
                             "the part that belongs to this engine")
    return parser.parse_args(arguments)


def main(arguments):
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers are stopped on the way out
    options = parse(arguments)
    if options.report:
        write_report(RESULTS)
        return
    parts = {name: importlib.import_module(name) for name in options.only}
    if options.engine:
        server = engine_server(options.engine)
        if not server:
            sys.exit(f"bench: no engine {options.engine}")
    # Published is what script/bench built, on the server that it belongs on, in full length.
    own = not (options.quick or {"REDIS_SERVER", "TURNSTILE_MODULE"} & os.environ.keys())
    published = {name for name, part in parts.items()
                 if own and (not options.engine or getattr(part, "ENGINE", None) == options.engine)}
    RESULTS.mkdir(exist_ok=True)
    trial = pathlib.Path(tempfile.mkdtemp(prefix="turnstile-results-"))
    folders = {name: RESULTS if name in published else trial for name in parts}
    try:
        with server_program(server if options.engine else None):
            measure(parts, common.Options(options.full, options.quick, options.seed), folders)
        page = write_report(trial)
        if published:
            write_report(RESULTS)
    except BaseException:
        shutil.rmtree(trial)
        raise
    if published:
        say("bench/results/README.md is written")
    if published == parts.keys():
        shutil.rmtree(trial)
    else:
        print(page)
        say(f"not stored with the published results; page, plots and data are in {trial}")


if __name__ == "__main__":
    main(sys.argv[1:])

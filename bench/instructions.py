"""Instructions of the real server: what Turnstile's commands take, and what it costs others.

    /usr/bin/python3 bench/instructions.py --profile [--mode M] [--pipeline N] [--state S]
                                           [--listener L]

shows where they go, function by function.
"""

import argparse
import contextlib
import re
import secrets
import statistics
import subprocess

import common
import modes
import plot
from common import Line
from counter import HAND_OVER, LISTENERS, STATES, Counter, Queue, Requests, at_once, connect
from modes import BUSY, OTHERS, PAIRS, TOUCHES

TITLE = "Instructions"
SECONDS = 210

OPERATIONS = 480  # and twice as many: a multiple of all pipelines
LIGHT = 2  # times as many where an operation is one short command
HAND_OVERS = 150
REPEATS = {"others": 3, "own": 2}  # servers, each with another seed
PIPELINES = (1, 16)
WAITERS = 10
HOLDERS = (1000, 2000, 4000)
WAITING = (500, 1000, 2000)
NAMED = (4, 8, 16)  # keys in a request


# --- What is counted --------------------------------------------------------------------------


def light(name):
    return LIGHT if len(OTHERS[name].commands) == 1 and name != modes.CONNECT else 1


def others(state, operations, seed=0):
    """By pipeline and mode: what others' commands take on a server in this state."""
    with Counter(state, seed) as counter:
        counter.prepare()
        return {str(pipeline): {
            name: counter.count(name, mode, pipeline, operations * light(name))
            for name, mode in OTHERS.items()} for pipeline in PIPELINES}


def own(named, state, operations, listeners=("none",), seed=0):
    """By listener, pipeline and mode: what it takes to lock, on a server with us or without."""
    counts = {}
    with Counter(state, seed) as counter:
        counter.prepare()
        # In this order: the replication backlog stays when the replica has gone.
        for listener in listeners:
            counter.listen(listener)
            pipelines = PIPELINES if listener == "none" else PIPELINES[-1:]
            counts[listener] = {
                str(pipeline): {name: counter.count(name, mode, pipeline, operations)
                                for name, mode in named.items()
                                if mode.is_ours() == (state != "bare")}
                for pipeline in pipelines}
            counter.check(listener)
    return counts


def hand_over(way, waiters, count, seed=0):
    """What a hand-over takes while so many wait; where it is ours, also to come and go."""
    with Counter("idle" if way == "line" else "bare", seed) as counter:
        counter.prepare()
        with Queue(counter, way, waiters) as queue:
            figures = {way: counter.each(queue.job, count)}
            if way == "line":
                figures["come and go"] = counter.each(queue.come_and_go, count)
            return figures


def holders(sizes, operations):
    """What one more shared holder takes beside so many."""
    rows = []
    take = f"token LOCK.ACQUIRE many {modes.OWNER} PX {modes.LONG_LEASE} SHARED"
    mode = modes.Mode("", (take, f"one LOCK.RELEASE many {modes.OWNER}"))
    with Counter() as counter, Line(counter.server) as line:
        counter.prepare()
        requests = Requests(line, mode, 16)
        size = 0
        for wanted in sizes:
            for _ in range(size, wanted, 100):
                requests.exchange(take, [("", secrets.token_hex(16)) for _ in range(100)])
            size = wanted
            rows.append({"size": size, "pair": counter.each(requests.job, operations)})
    return rows


def named_keys(sizes, operations):
    """What a pair takes that names so many keys, and as many plain pairs."""
    rows = [{"size": size} for size in sizes]
    for state, name in (("idle", "turnstile"), ("bare", "set-del")):
        with Counter(state) as counter, Line(counter.server) as line:
            counter.prepare()
            for row in rows:
                also = [f"named-key:{i:06}" for i in range(row["size"])]
                if name == "turnstile":
                    rest = f"ALSO {len(also) - 1} {' '.join(also[1:])}"
                    mode = modes.Mode("", (
                        f"token LOCK.ACQUIRE {also[0]} {modes.OWNER} PX {modes.LEASE} {rest}",
                        f"number LOCK.RELEASE {also[0]} {modes.OWNER} {rest}"))
                else:
                    mode = modes.Mode("", (
                        *(f"ok SET {key} {modes.OWNER} NX PX {modes.LEASE}" for key in also),
                        *(f"one DEL {key}" for key in also)))
                requests = Requests(line, mode, 16)
                row[name] = counter.each(requests.job, operations)
    return rows


def run(options):
    operations, hand_overs, repeats = OPERATIONS, HAND_OVERS, REPEATS
    sizes = {"holders": HOLDERS, "waiters": WAITING, "keys": NAMED}
    if options.quick:
        operations, hand_overs, repeats = 48, 10, {"others": 1, "own": 1}
        sizes = {"holders": (100, 200, 400), "waiters": (25, 50, 100), "keys": NAMED}
    locking = {**PAIRS, **TOUCHES, **BUSY}
    jobs = {}
    for number in range(repeats["others"]):
        for state in STATES:
            jobs[f"others {state} {number}"] = lambda state=state, seed=number: others(
                state, operations, seed)
    for number in range(repeats["own"]):
        for state in ("bare", "idle"):
            # What listens is counted once: it is no matter of a few instructions.
            listeners = tuple(LISTENERS) if number == 0 else ("none",)
            jobs[f"own {state} {number}"] = (
                lambda state=state, listeners=listeners, seed=number: own(
                    locking, state, operations, listeners, seed))
        for way in HAND_OVER:
            jobs[f"hand-over {way} {number}"] = lambda way=way, seed=number: hand_over(
                way, WAITERS, hand_overs, seed)
    jobs["holders"] = lambda: holders(sizes["holders"], operations // 2)
    jobs["keys"] = lambda: named_keys(sizes["keys"], operations // 4)
    for size in sizes["waiters"]:
        for way in HAND_OVER:
            jobs[f"waiters {way} {size}"] = lambda way=way, size=size: hand_over(
                way, size, hand_overs)
    with common.many_files():
        done = at_once("instructions", jobs)
    return {
        "operations": operations, "hand_overs": hand_overs, "repeats": repeats,
        "keys": common.OTHERS, "waiters": WAITERS,
        "others": {state: together([done[f"others {state} {number}"]
                                    for number in range(repeats["others"])])
                   for state in STATES},
        "own": together([done[f"own {state} {number}"]
                         for state in ("bare", "idle") for number in range(repeats["own"])]),
        "hand_over": together([done[f"hand-over {way} {number}"]
                               for way in HAND_OVER for number in range(repeats["own"])]),
        "growth": {
            "holders": done["holders"],
            "waiters": [{"size": size, **done[f"waiters line {size}"],
                         **done[f"waiters token {size}"]} for size in sizes["waiters"]],
            "keys": done["keys"],
        },
    }


def together(many):
    """Dictionaries of the same kind as one, with a list of all figures at each place."""
    result = {}
    for one in many:
        for key, value in one.items():
            if isinstance(value, dict):
                result[key] = together([result[key], value] if key in result else [value])
            else:
                value = value if isinstance(value, list) else [value]
                result[key] = result.get(key, []) + value
    return result


# --- Figures ------------------------------------------------------------------------------------


def figure(counts):
    return statistics.median(counts)


def paired(counts, under):
    """The ratio of servers with the same seed."""
    return statistics.median(ratios(counts, under))


def ratios(counts, under):
    return [one / other for one, other in zip(counts, under)]


def others_ratio(data, state, pipeline, mode):
    return paired(data["others"][state][pipeline][mode], data["others"]["nothing"][pipeline][mode])


def ratio(data, mode, other, pipeline, listener="none"):
    figures = data["own"][listener][pipeline]
    return paired(figures[mode], figures[other])


def hand_over_ratio(data):
    return paired(data["hand_over"]["line"], data["hand_over"]["token"])


def apart(data):
    """How far the ratios of the same thing are apart, of each of the things that others do."""
    return [max(each) / min(each) - 1
            for state in STATES if state != "nothing"
            for pipeline, figures in data["others"][state].items()
            for mode, counts in figures.items()
            for each in [ratios(counts, data["others"]["nothing"][pipeline][mode])]]


def goals(data):
    def others_goal(state, pipeline, mode, bound):
        return common.Goal.at_most(
            f"others' {OTHERS[mode].title}, pipeline {pipeline}, {short(state)} / a module that "
            "does nothing", bound, others_ratio(data, state, pipeline, mode))

    def own_goal(what, bound, mode, other, pipeline, listener="none"):
        heard = "" if listener == "none" else f", {LISTENERS[listener]}"
        return common.Goal.at_most(f"{what}, pipeline {pipeline}{heard}", bound,
                                   ratio(data, mode, other, pipeline, listener))

    worst, pipeline, mode = max(
        (others_ratio(data, "idle", pipeline, mode), pipeline, mode)
        for pipeline in map(str, PIPELINES) for mode in OTHERS)
    pair = "LOCK pair / SET NX PX + DEL"
    fencing = "LOCK pair / EVALSHA fencing + release"
    return [
        common.Goal.at_most(
            f"any of {len(OTHERS)} commands of others, no lock taken / a module that does nothing; "
            f"worst: {OTHERS[mode].title}, pipeline {pipeline}", 1.02, worst),
        others_goal("held", "1", "ping", 1.05),
        others_goal("held", "1", "set-px-del", 1.12),
        others_goal("held", "16", "set-px-del", 1.08),
        others_goal("gone", "1", "set-px-del", 1.10),
        others_goal("gone", "16", "set-px-del", 1.10),
        own_goal(pair, 1.10, "turnstile", "set-del", "16"),
        own_goal(pair, 1.20, "turnstile", "set-del", "1"),
        own_goal(pair, 1.32, "turnstile", "set-del", "16", "aof"),
        own_goal(pair, 1.32, "turnstile", "set-del", "16", "replica"),
        own_goal("busy LOCK.ACQUIRE / busy SET NX PX", 1.05, "busy", "busy-set", "16"),
        own_goal("busy LOCK.ACQUIRE / busy SET NX PX", 1.05, "busy", "busy-set", "1"),
        own_goal("LOCK.TOUCH / EVALSHA extend", 0.27, "touch", "evalsha-extend", "16"),
        own_goal(fencing, 0.28, "turnstile", "evalsha-fencing", "16"),
        common.Goal.at_most(f"hand-over, {data['waiters']} waiters / BLPOP token", 1.30,
                            hand_over_ratio(data)),
    ]


# --- The report -----------------------------------------------------------------------------------


def short(state):
    return STATES[state].removeprefix("Turnstile, ")


def report(data):
    both = apart(data)
    sections = [
        "What the server executes, counted by callgrind, for one client, in a "
        f"database with {data['keys']:,} keys of others, without its cron. Each figure is the "
        f"median of fresh servers with different seeds of their hash tables "
        f"({data['repeats']['others']} for the commands of others, {data['repeats']['own']} for "
        "ours; one where something grows or listens), on each "
        "the difference of "
        f"{2 * data['operations']:,} and {data['operations']:,} operations ({LIGHT} times as many "
        "where that is one short command). Ratios are "
        "those of servers with the same seed; those of the next section are "
        f"{statistics.median(both):.2%} apart from seed to seed (median), {max(both):.2%} at "
        "most.\n",
        "### Cost to other clients\n", others_section(data),
        "### Cost of acquire and release\n", own_section(data),
        "### Hand-over\n", hand_over_section(data),
        "### Growth\n", growth_section(data["growth"])]
    bars = [(mode.title, ratio(data, name, "set-del", "16"), None, None)
            for name, mode in PAIRS.items()]
    svg = plot.bars("Instructions per acquire and release (pipeline 16)", bars,
                    "ratio to SET NX PX + DEL in a server without the module", reference=1)
    return common.Report("\n".join(sections), {"instructions.svg": svg,
                                               "growth.svg": growth_plot(data["growth"])})


def others_section(data):
    text = ("Instructions of others' commands, over those in a server with a module that does "
            "nothing, and what they take there. (That a module is there at all is in the column "
            f"*{STATES['bare']}*.)\n\n")
    shown = [state for state in STATES if state != "nothing"]
    for pipeline in map(str, PIPELINES):
        rows = [[mode.title, *(f"{others_ratio(data, state, pipeline, name):.3f}"
                               for state in shown),
                 f"{figure(data['others']['nothing'][pipeline][name]):,.0f}"]
                for name, mode in OTHERS.items()]
        header = [f"pipeline {pipeline}", *(short(state) for state in shown),
                  "instructions with a module that does nothing"]
        text += common.table(header, rows) + "\n"
    return text + "With pipeline 16, *connect + PING + close* is 16 PINGs on each connection.\n"


def own_section(data):
    """Ratios and counts of pairs, touches and busy locks."""
    columns = [(listener, str(pipeline)) for listener in LISTENERS for pipeline in PIPELINES
               if str(pipeline) in data["own"][listener]]
    heads = [f"{LISTENERS[listener]}, pipeline {pipeline}" for listener, pipeline in columns]
    against, counts = [], []
    for named, ours in ((PAIRS, "turnstile"), (TOUCHES, "touch"), (BUSY, "busy")):
        for name, mode in named.items():
            if name != ours:
                against.append([f"{named[ours].title} / {mode.title}",
                                *(f"{ratio(data, ours, name, pipeline, listener):.2f}"
                                  for listener, pipeline in columns)])
            counts.append([mode.title, *(f"{figure(data['own'][listener][pipeline][name]):,.0f}"
                                         for listener, pipeline in columns)])
    return ("LOCK commands in a server with Turnstile, all else in a server without any module:\n\n"
            f"{common.table(['ratio', *heads], against)}\n"
            f"{common.table(['instructions', *heads], counts)}\n"
            "![Instructions for each pair, ratio to SET NX PX + DEL](instructions.svg)\n")


def hand_over_section(data):
    line, token = (figure(data["hand_over"][way]) for way in HAND_OVER)
    return (f"{data['waiters']} clients wait. One hand-over is a release, the grant to the next "
            "client, and then a request that goes to the end of the line. "
            f"LOCK.RELEASE and LOCK.ACQUIRE … WAIT take {line:,.0f} instructions, RPUSH and BLPOP "
            f"of a token in a server without the module {token:,.0f}: {line / token:.2f}. To enter "
            "the line and to be told to leave it by a LOCK.RELEASE takes "
            f"{figure(data['hand_over']['come and go']):,.0f}.\n")


GROWTH = {  # by what grows: its name, and the title of each figure
    "holders": ("shared holders of one lock", {
        "pair": "LOCK.ACQUIRE SHARED + LOCK.RELEASE by one more"}),
    "waiters": ("waiting clients of one lock", {
        "line": "hand-over", "token": "hand-over of a BLPOP token",
        "come and go": "to enter the line and to leave it"}),
    "keys": ("keys named in a request", {
        "turnstile": "LOCK.ACQUIRE + LOCK.RELEASE with ALSO",
        "set-del": "as many SET NX PX + DEL"}),
}


def growth_section(growth):
    rows = []
    for what, (title, figures) in GROWTH.items():
        sizes = [row["size"] for row in growth[what]]
        for name, of in figures.items():
            counts = [row[name] for row in growth[what]]
            rows.append([f"{of}; {title}: {', '.join(f'{size:,}' for size in sizes)}",
                         *(f"{count:,.0f}" for count in counts),
                         *(f"{count / counts[0]:.2f}" for count in counts[1:])])
    return ("Instructions while there are n, 2n and 4n of something. What locks on the server cost "
            "is under [Many locks](#many-locks).\n\n"
            + common.table(["operation", "n", "2n", "4n", "2n / n", "4n / n"], rows)
            + "\n![Growth of instructions](growth.svg)\n")


def growth_plot(growth):
    series = {}
    for what, (title, figures) in GROWTH.items():
        name = next(iter(figures))
        first = growth[what][0]
        series[f"{title}, {first['size']:,} to {growth[what][-1]['size']:,}"] = [
            (row["size"] / first["size"], row[name] / first[name]) for row in growth[what]]
    return plot.lines("Growth of instructions per pair or hand-over", series,
                      "n, relative to the smallest", "instructions, relative to the smallest n",
                      log_x=True)


# --- Where they go ------------------------------------------------------------------------------


def profile(name, pipeline, state, listener, top):
    """Prints the functions that take most."""
    if state is None:
        ours = name == "line" if name in HAND_OVER else modes.ALL[name].is_ours()
        state = "idle" if ours else "bare"
    with Counter(state) as counter, contextlib.ExitStack() as stack:
        counter.prepare()
        counter.listen(listener)
        count = OPERATIONS
        if name in HAND_OVER:
            count = HAND_OVERS
            job = stack.enter_context(Queue(counter, name, WAITERS)).job
        elif name == modes.CONNECT:
            def job(count):
                return lambda: connect(counter, count, pipeline)
        else:
            line = stack.enter_context(Line(counter.server))
            job = Requests(line, modes.ALL[name], pipeline).job
        job(count // 5)()
        dump = counter.dump(job(count))
        text = dump.read_text()
        total = int(re.search(r"^totals: (\d+)$", text, re.MULTILINE)[1])
        print(f"{name}, {STATES[state]}, {LISTENERS[listener]}, pipeline {pipeline}: "
              f"{total / count:,.0f} instructions")
        # Calls that began before the mark; callgrind_annotate takes them for work of the caller.
        dump.write_text(text.replace("\ncalls=0 ", "\ncalls=1 "))
        for title, inclusive in (("with what they call", "yes"), ("by themselves", "no")):
            print(f"\nfunctions, {title}:")
            annotated = subprocess.run(
                ["callgrind_annotate", f"--inclusive={inclusive}", "--threshold=100", str(dump)],
                stdout=subprocess.PIPE, text=True, check=True).stdout
            lines = re.findall(r"^ *([\d,]+) \( *[\d.]+%\)  (.*)$", annotated, re.MULTILINE)
            lines = [line for line in lines if line[1] != "PROGRAM TOTALS"]
            for executed, function in lines[:top]:
                function = re.sub(r"^.*?:(?!:)(.*) \[.*?([^/]*)\]$", r"\1 [\2]", function)
                print(f"{int(executed.replace(',', '')) / count:10,.1f}  {function}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Shows where the instructions go.")
    parser.add_argument("--profile", action="store_true", required=True)
    parser.add_argument("--mode", choices=[*modes.ALL, *HAND_OVER], default="turnstile")
    parser.add_argument("--pipeline", type=int, default=16)
    parser.add_argument("--state", choices=STATES, help="of the server (as the mode needs it)")
    parser.add_argument("--listener", choices=LISTENERS, default="none")
    parser.add_argument("--top", type=int, default=40, help="how many functions (40)")
    arguments = parser.parse_args()
    profile(arguments.mode, arguments.pipeline, arguments.state, arguments.listener, arguments.top)

"""Compares the segments of a soak: is everything flat? And a check that it would notice if not."""

import copy
import json
import random

MB = 2**20

# What may grow, within a segment or from the first segment to any later one. A shared machine is
# noisy: its latencies are compared as ratios to PING in the same segment, and are given more room.
GROWTH_WITHIN = 0.05  # of memory by its slope over the segment
MEMORY_FLOOR = 2 * MB  # less is no growth: tables are resized in powers of two
RSS_FLOOR = 8 * MB
HANDLES_MORE = 3
USED_MEMORY_RATIO = 1.05
IDLE_MEMORY_RATIO = 1.03
RSS_RATIO = 1.15
CPU_RATIO = 1.3
CPU_RATIO_OTHER_LOAD = 2.0  # fewer commands in each pass of the event loop cost more each
CALL_RATIO = 1.35  # time of a LOCK command inside the server, compared with SET
LATENCY_RATIOS = {"p50": 1.3, "p99": 1.6, "p99.9": 2.5}
LATENCY_FLOOR_US = 30  # added to both sides of a ratio: a few microseconds are the clock's
# Fewer of them, and a percentile is an accident.
SAMPLES_FOR = {"p50": 100, "p99": 2000, "p99.9": 20_000}
RATE_CHANGE = 0.15  # beyond it, two segments had different loads
CHECKS = ["digests_begin", "digests_end", "digest_restart", "digests_after_restart", "digests_last",
          "holds_end", "holds_restart", "token_after_restart", "tokens_rise", "log"]
CHECKS_CARRIED_ON = ["digest_as_left", "holds_begin"]
ROLES = ("primary", "replica")


def as_json(value, indent=""):
    """Objects line by line, lists in one line each."""
    if not isinstance(value, dict) or not value:
        return json.dumps(value) + ("" if indent else "\n")
    inner = indent + " "
    lines = [f"{inner}{json.dumps(key)}: {as_json(item, inner).rstrip()}"
             for key, item in value.items()]
    return "{\n" + ",\n".join(lines) + f"\n{indent}}}" + ("" if indent else "\n")


def wrong_alone(result):
    """What is wrong with a segment by itself."""
    wrong = []
    if "failed" in result:
        return [f"not completed: {result['failed']}"]
    if result["errors"]:
        wrong.append(f"{result['errors']} errors")
    if not result["operations"]:
        wrong.append("no operations")
    names = CHECKS + (CHECKS_CARRIED_ON if result["carried_on"] else [])
    wrong += [f"check {name}" for name in names if result["checks"].get(name) is not True]
    hours = result["measured_s"] / 3600
    for role in ROLES:
        slopes, medians = result["slopes_per_hour"][role], result["medians"][role]
        for name, floor in (("used_memory", MEMORY_FLOOR), ("own_memory", MEMORY_FLOOR),
                            ("rss", RSS_FLOOR)):
            grown = slopes[name] * hours
            if grown > max(GROWTH_WITHIN * medians[name], floor):
                wrong.append(f"{name} of the {role} grew by {grown / MB:.1f} MB")
        if slopes["other_handles"] * hours > HANDLES_MORE:
            wrong.append(f"handles of the {role} grew by {slopes['other_handles'] * hours:.0f}")
        before, after = result["idle_before"][role], result["idle_after"][role]
        grown = after["own_memory"] - before["own_memory"]
        if grown > max(GROWTH_WITHIN * before["own_memory"], MEMORY_FLOOR):
            wrong.append(f"memory of the idle {role} grew by {grown / MB:.1f} MB")
        if after["handles"] > before["handles"] + HANDLES_MORE:
            wrong.append(f"handles of the idle {role}: {before['handles']} before, "
                         f"{after['handles']} after")
    return wrong


def relative_latency(result, name, share):
    """How much longer than PING."""
    latency = result["latency_us"]
    return (latency[name][share] + LATENCY_FLOOR_US) / (latency["ping"][share] + LATENCY_FLOOR_US)


def wrong_beside(first, result):
    """What is not flat from `first` to `result`."""
    wrong = []

    def compare(what, before, after, ratio, floor=0.0):
        if after > max(before * ratio, before + floor):
            wrong.append(f"{what}: {before:.4g}, then {after:.4g}")

    if (first["engine"], first["server"]) != (result["engine"], result["server"]):
        return [f"another server: {first['server']}, then {result['server']}"]
    if result["tokens"]["lowest"] <= first["tokens"]["highest"]:
        wrong.append(f"tokens: up to {first['tokens']['highest']}, then from "
                     f"{result['tokens']['lowest']} on")
    for role in ROLES:
        medians = first["medians"][role], result["medians"][role]
        for name, ratio, floor in (("used_memory", USED_MEMORY_RATIO, MEMORY_FLOOR),
                                   ("own_memory", USED_MEMORY_RATIO, MEMORY_FLOOR),
                                   ("rss", RSS_RATIO, RSS_FLOOR)):
            compare(f"{name} of the {role}, MB", medians[0][name] / MB, medians[1][name] / MB,
                    ratio, floor / MB)
        idle = first["idle_after"][role], result["idle_after"][role]
        compare(f"memory of the idle {role}, MB", idle[0]["own_memory"] / MB,
                idle[1]["own_memory"] / MB, IDLE_MEMORY_RATIO, MEMORY_FLOOR / MB)
        compare(f"handles of the {role}", medians[0]["other_handles"], medians[1]["other_handles"],
                1, HANDLES_MORE)
        compare(f"handles of the idle {role}", idle[0]["handles"], idle[1]["handles"],
                1, HANDLES_MORE)
    for name in ("acquire", "touch", "release"):
        for share, ratio in LATENCY_RATIOS.items():
            counts = [one["latency_us"][kind]["count"] for one in (first, result)
                      for kind in (name, "ping")]
            if min(counts) >= SAMPLES_FOR[share]:
                compare(f"{share} of {name} / PING", relative_latency(first, name, share),
                        relative_latency(result, name, share), ratio)
        command = f"lock.{name}"
        calls = [one["usec_per_call"][command] / one["usec_per_call"]["set"]
                 for one in (first, result)]
        compare(f"time of {command} / SET", *calls, CALL_RATIO)
    compare("CPU time of a command, us", first["cpu_us_per_command"], result["cpu_us_per_command"],
            CPU_RATIO_OTHER_LOAD if other_load(first, result) else CPU_RATIO)
    return wrong


def other_load(first, result):
    before, after = first["commands_per_second"], result["commands_per_second"]
    return abs(after / before - 1) > RATE_CHANGE


def summary(result):
    if "failed" in result:
        return f"segment {result.get('segment', '?')} on {result.get('server', '?')}: failed"
    return (f"segment {result['segment']} on {result['server']}, {result['minutes']:g} min: "
            f"{result['operations']:,} operations, {result['errors']} errors, "
            f"{result['commands_per_second']:,} commands/s, primary "
            f"{result['primary_busy_percent']:.0f} % busy")


def table(results):
    rows = [["segment", "commit", "min", "operations", "errors", "commands/s", "primary busy %",
             "CPU µs", "memory MB", "per hour", "RSS MB", "per hour", "idle MB before", "after",
             "handles", "per hour", "PING p50/p99/p99.9 µs", "acquire", "touch", "release"]]
    for result in results:
        if "failed" in result:
            rows.append([str(result.get("segment", "?")), "failed"] + [""] * (len(rows[0]) - 2))
            continue
        medians, slopes = result["medians"]["primary"], result["slopes_per_hour"]["primary"]
        rows.append([
            f"{result['segment']}", result["commit"], f"{result['minutes']:g}",
            f"{result['operations']:,}", f"{result['errors']}",
            f"{result['commands_per_second']:,}", f"{result['primary_busy_percent']:.0f}",
            f"{result['cpu_us_per_command']:.1f}",
            f"{medians['used_memory'] / MB:.1f}", f"{slopes['used_memory'] / MB:+.1f}",
            f"{medians['rss'] / MB:.1f}", f"{slopes['rss'] / MB:+.1f}",
            f"{result['idle_before']['primary']['own_memory'] / MB:.1f}",
            f"{result['idle_after']['primary']['own_memory'] / MB:.1f}",
            f"{medians['other_handles']}", f"{slopes['other_handles']:+.1f}",
            *("/".join(str(result["latency_us"][name][share]) for share in LATENCY_RATIOS)
              for name in ("ping", "acquire", "touch", "release"))])
    rows.insert(1, ["--:"] * len(rows[0]))
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def findings(results):
    """All that is wrong: (segment, text)."""
    results = sorted(results, key=lambda result: result.get("began", ""))
    found = [(result.get("segment", "?"), text) for result in results
             for text in wrong_alone(result)]
    complete = [result for result in results if "failed" not in result]
    for result in complete[1:]:
        found += [(result["segment"], text) for text in wrong_beside(complete[0], result)]
    if len(complete) > 2:  # tokens also rise from each to the next
        for before, result in zip(complete[1:], complete[2:]):
            if result["tokens"]["lowest"] <= before["tokens"]["highest"]:
                found.append((result["segment"], "tokens do not rise from the segment before"))
    return found


def judge(results):
    results = sorted(results, key=lambda result: result.get("began", ""))
    print(f"{results[0].get('server', '?')}, {len(results)} segment"
          f"{'s' * (len(results) > 1)}; memory, handles and CPU time are the primary's\n")
    print(table(results) + "\n")
    for result in results[1:]:
        if "failed" not in result and "failed" not in results[0] and other_load(results[0], result):
            print(f"Note: segment {result['segment']} had another load: its latencies say less.")
    for result in results:
        if result.get("full_syncs"):
            print(f"Note: the replica of segment {result['segment']} lost its connection "
                  f"{result['full_syncs']} times.")
    found = findings(results)
    for segment, text in found:
        print(f"NOT FLAT: segment {segment}: {text}")
    print("not flat" if found else "flat; all digests are equal" if len(results) > 1
          else "right by itself; one segment cannot be compared")
    return 1 if found else 0


# --- The self-check -------------------------------------------------------------------------------


def healthy(number, rng):
    """A segment as it should be, with noise."""
    def noisy(value, share):
        return value * (1 + rng.uniform(-share, share))

    machine = rng.uniform(0.6, 1.8)  # how slow the shared machine is meanwhile

    def server(memory):
        return {"used_memory": round(noisy(memory, 0.01)),
                "own_memory": round(noisy(memory, 0.005)),
                "rss": round(noisy(1.4 * memory, 0.03)), "handles": 20 + rng.randrange(2),
                "other_handles": 12 + rng.randrange(2)}

    def latency(factor):
        return {"p50": round(noisy(200 * machine * factor, 0.05)),
                "p99": round(noisy(2000 * machine * factor, 0.1)),
                "p99.9": round(noisy(9000 * machine * factor, 0.2)), "count": 100_000}

    memory = 30 * MB
    flat = {"used_memory": 0.2 * MB, "own_memory": 0.1 * MB, "rss": 0.5 * MB, "handles": 0.1,
            "other_handles": 0.1}
    base = 1_795_000_000_000_000 + number * 4_000_000_000
    return {
        "engine": "redis-server", "server": "Redis 7.0.15", "commit": "0000000", "minutes": 60,
        "segment": number, "began": f"2026-01-01T{number:02}:00:00Z", "carried_on": number > 1,
        "checks": dict.fromkeys(CHECKS + CHECKS_CARRIED_ON, True), "measured_s": 3600.0,
        "operations": 100_000_000, "errors": 0, "examples": [],
        "commands_per_second": round(noisy(30_000, 0.05)), "primary_busy_percent": 70.0,
        "cpu_us_per_command": noisy(20, 0.08),
        "idle_before": {role: server(memory) for role in ROLES},
        "idle_after": {role: server(memory) for role in ROLES},
        "medians": {role: server(memory) for role in ROLES},
        "slopes_per_hour": {role: {name: noisy(value, 2) for name, value in flat.items()}
                            for role in ROLES},
        "latency_us": {"ping": latency(1), "acquire": latency(1.15), "touch": latency(1.1),
                       "release": latency(1.1)},
        "usec_per_call": {"lock.acquire": noisy(5 * machine, 0.05), "set": noisy(2 * machine, 0.05),
                          "lock.touch": noisy(4 * machine, 0.05),
                          "lock.release": noisy(4 * machine, 0.05)},
        "tokens": {"before": base - 1, "lowest": base, "highest": base + 3_600_000_000},
    }


def damage_in(*path, factor=1.0, add=0.0, value=None):
    """A function that changes one number of a result."""
    def change(result):
        for name in path[:-1]:
            result = result[name]
        last = path[-1]
        result[last] = value if value is not None else result[last] * factor + add
    return change


# What is done to the last of three segments, and a word of the finding that it must lead to.
DAMAGES = {
    "leak within a segment": (damage_in("slopes_per_hour", "primary", "used_memory", add=3 * MB),
                              "used_memory of the primary grew"),
    "leak on the replica": (damage_in("slopes_per_hour", "replica", "own_memory", add=3 * MB),
                            "own_memory of the replica grew"),
    "leak outside the allocator": (damage_in("slopes_per_hour", "primary", "rss", add=10 * MB),
                                   "rss of the primary grew"),
    "memory that stays when idle": (damage_in("idle_after", "primary", "own_memory", add=3 * MB),
                                    "memory of the idle primary grew"),
    "memory from segment to segment": (damage_in("medians", "primary", "used_memory", factor=1.1),
                                       "used_memory of the primary, MB"),
    "RSS from segment to segment": (damage_in("medians", "replica", "rss", factor=1.4),
                                    "rss of the replica, MB"),
    "idle memory from segment to segment": (
        lambda result: [damage_in("idle_" + when, "replica", "own_memory", add=3 * MB)(result)
                        for when in ("before", "after")], "memory of the idle replica, MB"),
    "handles grow": (damage_in("slopes_per_hour", "primary", "other_handles", add=5),
                     "handles of the primary grew"),
    "handles that stay open": (damage_in("idle_after", "replica", "handles", add=6),
                               "handles of the idle replica"),
    "handles from segment to segment": (damage_in("medians", "primary", "other_handles", add=6),
                                        "handles of the primary"),
    "slow acquires": (damage_in("latency_us", "acquire", "p99", factor=2.5),
                      "p99 of acquire / PING"),
    "slow releases": (damage_in("latency_us", "release", "p50", factor=2), "p50 of release / PING"),
    "slow touches, rarely": (damage_in("latency_us", "touch", "p99.9", factor=6),
                             "p99.9 of touch / PING"),
    "time inside the server": (damage_in("usec_per_call", "lock.touch", factor=1.8),
                               "time of lock.touch"),
    "CPU time": (damage_in("cpu_us_per_command", factor=1.7), "CPU time"),
    "an error": (damage_in("errors", value=1), "1 errors"),
    "nothing done": (damage_in("operations", value=0), "no operations"),
    "tokens that fall": (damage_in("tokens", "lowest", add=-4_000_000_000), "tokens"),
    "another server": (damage_in("server", value="Redis 8.0.2"), "another server"),
    "a segment that failed": (damage_in("failed", value="the server ended"), "not completed"),
    **{f"check {name}": (damage_in("checks", name, value=False), f"check {name}")
       for name in CHECKS + CHECKS_CARRIED_ON},
    "a check that was not made": (lambda result: result["checks"].pop("digests_end"),
                                  "check digests_end"),
}


def self_test():
    rng = random.Random(1)
    failures = 0
    for _ in range(300):  # healthy ones, on a machine that is fast or slow: no false alarm
        if found := findings([healthy(number, rng) for number in (1, 2, 3)]):
            failures += 1
            print(f"FALSE ALARM: {found}")
    print(f"300 healthy soaks, {failures} false alarms")
    for name, (damage, expected) in DAMAGES.items():
        missed = 0
        for _ in range(20):
            results = [healthy(number, rng) for number in (1, 2, 3)]
            damaged = copy.deepcopy(results)
            damage(damaged[-1])
            missed += not any(segment == 3 and expected in text
                              for segment, text in findings(damaged))
        print(f"  {name}: " + (f"MISSED {missed} times of 20" if missed else "noticed"))
        failures += missed > 0
    print("the judge is not right" if failures else f"all {len(DAMAGES)} damages are noticed")
    return 1 if failures else 0

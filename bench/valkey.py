"""On Valkey 9, which has a command of its own for a release by the owner: DELIFEQ.

It is measured on that engine, whatever the rest is measured on; script/engine gets it.
"""

import common
import counter
import instructions
from counter import HAND_OVER
from instructions import PIPELINES, WAITERS, figure
from modes import DELIFEQ, PAIRS

TITLE = "On Valkey 9"
SECONDS = 35
ENGINE = "valkey-9"

MODES = {"set-delifeq": DELIFEQ["set-delifeq"],
         **{name: PAIRS[name] for name in ("set-del", "turnstile", "evalsha", "fcall")}}


def run(options):
    operations, hand_overs, repeats = instructions.OPERATIONS, instructions.HAND_OVERS, 2
    if options.quick:
        operations, hand_overs, repeats = 48, 10, 1
    jobs = {}
    for number in range(repeats):
        for state in ("bare", "idle"):
            jobs[f"own {state} {number}"] = lambda state=state, seed=number: instructions.own(
                MODES, state, operations, seed=seed)
        for way in HAND_OVER:
            jobs[f"hand-over {way} {number}"] = lambda way=way, seed=number: instructions.hand_over(
                way, WAITERS, hand_overs, seed)
    done = counter.at_once("valkey", jobs)
    together = instructions.together
    return {
        "repeats": repeats, "operations": operations, "keys": common.OTHERS, "waiters": WAITERS,
        "own": together([done[name] for name in done if name.startswith("own")]),
        "hand_over": together([done[name] for name in done if name.startswith("hand-over")]),
    }


def goals(data):
    return [
        *(common.Goal.at_most(
            f"LOCK pair / SET NX PX + DELIFEQ, pipeline {pipeline}, Valkey 9", 1.00,
            instructions.ratio(data, "turnstile", "set-delifeq", str(pipeline)))
          for pipeline in reversed(PIPELINES)),
        common.Goal.at_most(f"hand-over, {data['waiters']} waiters / BLPOP token, Valkey 9", 1.30,
                            instructions.hand_over_ratio(data)),
    ]


def report(data):
    rows = []
    for name, mode in MODES.items():
        counts = [figure(data["own"]["none"][str(pipeline)][name]) for pipeline in PIPELINES]
        ratios = [f"{instructions.ratio(data, 'turnstile', name, str(pipeline)):.2f}"
                  for pipeline in PIPELINES]
        rows.append([mode.title, *(f"{count:,.0f}" for count in counts), *ratios])
    line, token = (figure(data["hand_over"][way]) for way in HAND_OVER)
    header = ["pair", *(f"pipeline {pipeline}" for pipeline in PIPELINES),
              *(f"LOCK pair / it, pipeline {pipeline}" for pipeline in PIPELINES)]
    return common.Report(
        f"Instructions, counted as above ({data['repeats']} servers each, {data['keys']:,} keys of "
        "others); all but the LOCK pair in a server without Turnstile. DELIFEQ checks the owner; "
        "only the LOCK pair has a token.\n\n"
        f"{common.table(header, rows)}\n"
        f"A hand-over with {data['waiters']} waiting clients takes {line:,.0f}, that of a BLPOP "
        f"token {token:,.0f}: {line / token:.2f}.\n")

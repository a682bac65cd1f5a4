"""Makes a list of steps shorter as long as it still leads to a difference."""

# Options of LOCK commands that can be left out of a step, with how many words follow them.
OPTIONS = {"WAIT": 1, "MAXLINE": 1, "SHARED": 0, "LIMIT": 1, "WEIGHT": 1, "REENTRANT": 0,
           "SESSION": 0, "LINGER": 1, "MAXHOLD": 1, "TAG": 1, "NOTIFY": 2, "FLOOR": 1}


def without_parts(steps, still):
    """Delta debugging: leaves out ever smaller parts."""
    size = max(1, len(steps) // 2)
    while True:
        shorter = False
        at = len(steps)
        while at > 0:
            begin = max(0, at - size)
            candidate = steps[:begin] + steps[at:]
            if candidate and still(candidate):
                steps = candidate
                shorter = True
            at = begin
        if size == 1 and not shorter:
            return steps
        size = max(1, size // 2)


def simpler_steps(step):
    """The same step with one option less."""
    if step[0] != "call":
        return
    args = step[2]
    for at in range(3, len(args)):
        word = args[at].upper() if isinstance(args[at], str) else ""
        if word in OPTIONS:
            yield ("call", step[1], args[:at] + args[at + 1 + OPTIONS[word]:])
        elif word == "ALSO" and at + 1 < len(args) and args[at + 1].isdigit():
            count = int(args[at + 1])
            yield ("call", step[1], args[:at] + args[at + 2 + count:])
            if count > 1:
                yield ("call", step[1], args[:at] + ("ALSO", "1", args[at + 2]) +
                       args[at + 2 + count:])


def shrink(steps, still):
    steps = without_parts(list(steps), still)
    changed = True
    while changed:
        changed = False
        for at, step in enumerate(steps):
            for simpler in simpler_steps(step):
                candidate = steps[:at] + [simpler] + steps[at + 1:]
                if still(candidate):
                    steps = candidate
                    changed = True
                    break
        if changed:
            steps = without_parts(steps, still)
    return steps

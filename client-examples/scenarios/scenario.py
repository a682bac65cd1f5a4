"""What the scenarios share: real processes, a room that notices a second visitor, and a loud end.

A scenario is a program `SCENARIO [redis-url] [--without-lock]`, with this frame:

    import scenario                        # also puts ../python on the path, with turnstile_lock.py
    from turnstile_lock import Lock

    def signer(url, folder): ...        # runs in a process of its own

    def run(url, folder, without_lock):
        "folder is a temporary one; without_lock is the switch that must end in a violation"
        totals = scenario.run_processes([(signer, url, folder)] * 4)
        if sum(totals) != 100:
            scenario.fail(f"the sum is {sum(totals)}, not 100")

    scenario.main(__doc__, run)

Exit codes: 0 all is well, 1 VIOLATION (the lock failed), 2 the scenario could not be run (no
server, a process that broke).

    say("text")                         prints a line at once
    fail("what was violated")           VIOLATION: ... and exit code 1; from any process, see below
    name("wallet")                      a key of this run alone
    run_processes([(function, *args), ...], timeout=20)
                                        starts all, waits for all, returns their results in order
    start(function, *args)              one process: .pid .kill() .result(timeout) .alive()
    processes.Barrier(2), .Event() ...  to hand to processes, as in multiprocessing
    alone_in(path)                      with alone_in(path) as alone: was anybody else in this room?
    note(path, *words), notes(path)     a journal that all processes write and any of them may read
    until(condition, seconds, what)     waits for a condition, for so long at most
    Moment(parties, locked)             the bad moment between reading and writing, see there
    with_and_without(run, without_lock) does run(False), where things must go wrong, then run(True)
    read_number(path), write_number()   a number in a file, always whole

A process that calls fail() ends itself, and result() or run_processes() ends the scenario.
"""

import argparse
import contextlib
import multiprocessing
import os
import pathlib
import secrets
import signal
import sys
import tempfile
import time
import traceback

import redis

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "python"))

processes = multiprocessing.get_context("fork")  # quick, and a scenario may be any file
LONGEST = 50  # seconds for a whole scenario, whatever hangs
_run = secrets.token_hex(4)
_started = []


class Violation(SystemExit):
    """The lock did not do its work. As a SystemExit it passes through every `except Exception`."""


class Broken(Exception):
    """A process ended without a result: it raised something, or was killed."""


def say(text):
    print(text, flush=True)


def fail(message):
    raise Violation(f"VIOLATION: {message}")


def name(key):
    return f"scenario:{_run}:{key}"


class Process:
    """A process that runs function(*args); see start()."""

    def __init__(self, function, args):
        self._outcome, outcome = processes.Pipe(duplex=False)
        self._process = processes.Process(target=_child, args=(outcome, function, args))
        self._name = function.__name__
        self._process.start()
        outcome.close()  # so that the end of the child is the end of the pipe
        self.pid = self._process.pid

    def alive(self):
        return self._process.is_alive()

    def kill(self):
        """kill -9: no release, no good-bye."""
        self._process.kill()
        self._process.join()

    def result(self, timeout=20):
        """What the function returned. Raises Violation if it called fail(), Broken if it broke."""
        if not self._outcome.poll(timeout):
            raise Broken(f"{self._name} (process {self.pid}) is not done after {timeout} s")
        try:
            kind, value = self._outcome.recv()
        except EOFError:
            kind, value = "error", "it was killed"
        if kind == "violation":
            raise Violation(value)
        if kind == "error":
            raise Broken(f"{self._name} (process {self.pid}): {value}")
        self._process.join(timeout)
        return value


def _child(outcome, function, args):
    _started.clear()  # the parent's
    try:
        outcome.send(("result", function(*args)))
    except Violation as violation:
        outcome.send(("violation", str(violation)))
    except Exception:
        outcome.send(("error", traceback.format_exc()))


def start(function, *args):
    process = Process(function, args)
    _started.append(process)
    return process


def run_processes(tasks, timeout=20):
    """Runs every (function, *args) in a process of its own, all at once: results in order."""
    deadline = time.monotonic() + timeout
    results, broken = [], []
    for process in [start(*task) for task in tasks]:
        try:
            results.append(process.result(max(0, deadline - time.monotonic())))
        except Broken as error:  # perhaps only because of another one's violation
            broken.append(error)
    if broken:
        raise broken[0]
    return results


class Moment:
    """The moment between reading and writing, in which somebody else may read too.

    With the lock it is just a moment. Without it all parties are made to be in it together: what
    bad luck does once a month happens for certain.
    """

    def __init__(self, parties, locked, seconds=0.01):
        self._all = None if locked else processes.Barrier(parties, timeout=10)
        self._seconds = seconds

    def passes(self):
        if self._all:
            self._all.wait()
        else:
            time.sleep(self._seconds)


def with_and_without(run, without_lock):
    """run(locked) returns what went wrong, as sentences. Without the lock something must."""
    say("Without the lock:")
    wrong = run(False)
    for sentence in wrong:
        say(f"  {sentence}")
    if not wrong:
        raise Broken("nothing went wrong without the lock, so this scenario would prove nothing")
    if without_lock:
        fail("; ".join(wrong))
    say("With the lock:")
    wrong = run(True)
    if wrong:
        fail("; ".join(wrong))


@contextlib.contextmanager
def alone_in(path):
    """Enters a room that has place for one. Yields False if somebody is in it already."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
        alone = True
    except FileExistsError:
        alone = False
    try:
        yield alone
    finally:
        if alone:
            os.unlink(path)


def note(path, *words):
    """Appends a line to a journal, whole, whoever else writes."""
    line = "\t".join(str(word) for word in words) + "\n"
    journal = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    try:
        os.write(journal, line.encode())
    finally:
        os.close(journal)


def notes(path):
    """The lines of a journal, as lists of words."""
    try:
        return [line.split("\t") for line in pathlib.Path(path).read_text().splitlines()]
    except FileNotFoundError:
        return []


def read_number(path):
    return int(pathlib.Path(path).read_text())


def write_number(path, number):
    draft = f"{path}.{os.getpid()}"  # renamed in one step, so that nobody reads half of it
    pathlib.Path(draft).write_text(str(number))
    os.replace(draft, path)


def until(condition, seconds, what):
    """Waits for a condition, which is asked every few milliseconds; returns what it answered."""
    deadline = time.monotonic() + seconds
    while not (answer := condition()):
        if time.monotonic() > deadline:
            raise Broken(f"waited {seconds} s in vain: {what}")
        time.sleep(0.005)
    return answer


def _too_long(*_):
    raise Broken(f"it takes longer than {LONGEST} s")


def main(text, run):
    """Reads the arguments, looks for the server, runs the scenario, leaves nothing behind."""
    options = argparse.ArgumentParser(description=text.partition("\n")[0])
    options.add_argument("url", nargs="?", default="redis://127.0.0.1:6379")
    options.add_argument("--without-lock", action="store_true", help="shows the damage, exits 1")
    options = options.parse_args()
    begin = time.monotonic()
    signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(LONGEST)
    try:
        redis.Redis.from_url(options.url).execute_command("LOCK.HELP")
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # some still write
            run(options.url, folder, options.without_lock)
        say(f"All is well, after {time.monotonic() - begin:.1f} s.")
    except (redis.RedisError, Broken) as error:
        print(f"The scenario could not be run: {error}", file=sys.stderr)
        sys.exit(2)
    except Exception:
        traceback.print_exc()
        sys.exit(2)
    finally:
        signal.alarm(0)
        for process in _started:
            process.kill()
        with contextlib.suppress(redis.RedisError):
            server = redis.Redis.from_url(options.url)
            for key in server.scan_iter(name("*"), count=1000):
                server.delete(key)

"""One segment of a soak: servers, holds that stay, load, samples, and the checks at the end."""

import contextlib
import fcntl
import hashlib
import json
import pathlib
import platform
import queue
import shutil
import subprocess
import sys
import threading
import time
import uuid

import redis

import mix
from servers import (BACKLOG_MB, PATIENCE_S, Failed, Server, caught_up, differences, equal_digests,
                     spawn, stop_quietly, wait_for)

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]

HOLDS = 20_000  # that stay from segment to segment
LEASE_MS = 86_400_000  # theirs: the longest that turnstile.max-lease-ms allows by default
MAX_HOLD_MS = 31_536_000_000
RENEW_S = 300  # each is renewed once in this time
CLIENTS = 60
PRESSURE_CLIENTS = 20
SHARE_OF_CAPACITY = 0.7
BURST_S = 0.02
TICK_S = 0.25
DRAIN_S = 300  # more than the leases of the load, should a client have left one
FAMILIES = ("ping", "acquire", "touch", "release")
COMMANDS = ("lock.acquire", "lock.release", "lock.touch", "lock.fence", "set", "del", "ping")
SHOWN_ERRORS = 20

# An operation of bench/load: the reply that is expected, and the command.
PRESSURE = [
    "token LOCK.ACQUIRE @key @owner PX 120000 TAG pressure LINGER 1000",
    "one LOCK.TOUCH @key @owner EX 120",
    "one LOCK.RELEASE @key @owner",
    "token LOCK.ACQUIRE @key @owner PX 120000 SHARED",
    "one LOCK.RELEASE @key @owner",
    "token LOCK.ACQUIRE @key @owner PX 120000 LIMIT 5 WEIGHT 2 MAXHOLD 240000",
    "one LOCK.RELEASE @key @owner",
    "token LOCK.ACQUIRE @key @owner EX 120 WAIT 1000 REENTRANT",
    "one LOCK.RELEASE @key @owner",
    "ok SET @key @owner PX 120000",
    "one EXPIRE @key 120",
    "one DEL @key",
]


def say(text):
    print(f"soak: {time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def percentile(values, share):
    """Of sorted values."""
    return values[min(len(values) - 1, int(share * len(values)))] if values else 0


def slope_per_hour(times_s, values):
    """By least squares."""
    count = len(values)
    if count < 2:
        return 0.0
    mean_t, mean_v = sum(times_s) / count, sum(values) / count
    spread = sum((t - mean_t) ** 2 for t in times_s)
    covariance = sum((t - mean_t) * (v - mean_v) for t, v in zip(times_s, values))
    return 3600 * covariance / spread if spread else 0.0


class Worker:
    """A process of ours that prints lines of JSON and ends when its standard input does."""

    def __init__(self, *command):
        self.name = pathlib.Path(command[1] if len(command) > 1 else command[0]).stem
        self.process = spawn(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE)
        self.lines = queue.Queue()
        self.complaints = []
        self.readers = [threading.Thread(target=self._read, daemon=True),
                        threading.Thread(target=self._listen, daemon=True)]
        for reader in self.readers:
            reader.start()

    def _read(self):
        for line in self.process.stdout:
            self.lines.put(line)

    def _listen(self):
        for line in self.process.stderr:
            self.complaints.append(line.decode(errors="replace").rstrip())

    def reports(self):
        """What it has printed since the last call."""
        while True:
            try:
                yield json.loads(self.lines.get_nowait())
            except queue.Empty:
                return

    def finish(self):
        """Lets it come to an end, and waits for that."""
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise Failed(f"{self.name} did not end") from None
        for reader in self.readers:
            reader.join(10)
        if self.process.returncode != 0:
            raise Failed(f"{self.name} ended with {self.process.returncode}: "
                         + " / ".join(self.complaints[-5:]))

    def stop(self):
        stop_quietly(self.process)


class Pressure:
    """bench/load, with as many operations a second as we say."""

    def __init__(self, program, port):
        commands = [word for text in PRESSURE for word in ("--command", text)]
        self.worker = Worker(program, "--port", port, "--clients", PRESSURE_CLIENTS,
                             "--pipeline", 4, "--keys", 2000, *commands)
        self.operations = 0
        self.failed = ""
        self.thread = None
        self.stopping = threading.Event()

    def line(self):
        while True:
            try:
                return self.worker.lines.get(timeout=1)
            except queue.Empty:
                if self.worker.process.poll() is not None:
                    time.sleep(0.5)
                    raise Failed("bench/load: " + " / ".join(self.worker.complaints[-5:])) from None

    def run(self, operations):
        """That many as fast as they go; the seconds that it took."""
        self.worker.process.stdin.write(b"%d\n" % operations)
        self.worker.process.stdin.flush()
        seconds = json.loads(self.line())["seconds"]
        self.operations += operations
        return seconds

    def stop(self):
        self.worker.stop()

    def capacity(self, seconds):
        """Operations a second, at most."""
        done, spent, burst = 0, 0.0, 20
        while spent < seconds:
            took = self.run(burst)
            done, spent = done + burst, spent + took
            burst = max(20, round(burst * 0.2 / max(took, 0.01)))
        return done / spent

    def start(self, rate):
        self.thread = threading.Thread(target=self._keep_up, args=(rate,), daemon=True)
        self.thread.start()

    def _keep_up(self, rate):
        owed, last = 0.0, time.monotonic()
        try:
            while not self.stopping.wait(BURST_S):
                now = time.monotonic()
                # What was missed while the machine was busy is not made up for.
                owed = min(owed + rate * (now - last), 5 * rate * BURST_S)
                last = now
                if owed >= 1:
                    self.run(int(owed))
                    owed -= int(owed)
        except (Failed, OSError) as error:
            self.failed = str(error)

    def finish(self):
        self.stopping.set()
        if self.thread:
            self.thread.join(PATIENCE_S)
        if self.failed:
            raise Failed(self.failed)
        self.worker.finish()


class Population:
    """The holds that stay. A hold is (keys, owner, token)."""

    def __init__(self, file):
        self.file = file
        self.holds = [tuple(hold) for hold in json.loads(file.read_text())] if file.exists() else []
        self.next = 0

    def create(self, server):
        """In every mode; some locks have several holders, some holds several locks."""
        asked = []
        for i in range(HOLDS):
            owner = uuid.uuid4().hex
            keys, options = [f"stay:{i}"], []
            kind = i % 10
            if kind < 4:
                options = ["TAG", f"host-{i % 100}"]
            elif kind < 6:
                keys, options = [f"stay:shared:{i // 40}"], ["SHARED"]
            elif kind < 7:
                weight = 1 + i // 10 % 3
                keys, options = [f"stay:limit:{i // 200}"], ["LIMIT", 100, "WEIGHT", weight]
            elif kind < 8:
                options = ["REENTRANT"]
            elif kind < 9:
                options = ["LINGER", 1000, "MAXHOLD", MAX_HOLD_MS]
            else:
                keys += [f"stay:{i}:also:{j}" for j in range(2)]
            also = ["ALSO", len(keys) - 1, *keys[1:]] if len(keys) > 1 else []
            asked.append((keys, owner, ["LOCK.ACQUIRE", keys[0], owner, "PX", LEASE_MS,
                                        *options, *also]))
        tokens = server.ask_all([command for _, _, command in asked])
        wrong = [(command, token) for (_, _, command), token in zip(asked, tokens)
                 if not isinstance(token, int) or token <= 0]
        if wrong:
            raise Failed(f"{len(wrong)} of the holds that stay were not granted: {wrong[0]}")
        again = [command for _, _, command in asked if "REENTRANT" in command]
        server.ask_all(again)  # so that they count
        self.holds = [(keys, owner, token) for (keys, owner, _), token in zip(asked, tokens)]
        self.file.write_text(json.dumps(self.holds))

    def highest(self):
        return max(token for _, _, token in self.holds)

    def keys(self):
        return len({key for keys, _, _ in self.holds for key in keys})

    def lost(self, server):
        """How many are not held any more under their tokens."""
        commands = [("LOCK.FENCE", key, token) for keys, _, token in self.holds for key in keys]
        return sum(reply != 1 for reply in server.ask_all(commands))

    def renew(self, server, count):
        """The next `count` of them; how many could not be."""
        commands, expected = [], []
        for _ in range(count):
            keys, owner, _ = self.holds[self.next]
            self.next = (self.next + 1) % len(self.holds)
            also = ["ALSO", len(keys) - 1, *keys[1:]] if len(keys) > 1 else []
            commands.append(["LOCK.TOUCH", keys[0], owner, "PX", LEASE_MS, *also])
            expected.append(len(keys))
        return sum(reply != wanted for reply, wanted in zip(server.ask_all(commands), expected))


class Segment:
    def __init__(self, options, program):
        self.options = options
        self.program = program
        self.folder = options.data.resolve()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.state_file = self.folder / "state.json"
        self.result = {"engine": options.engine or "redis-server", "minutes": options.minutes}
        self.cleaning = contextlib.ExitStack()  # stops all that was started
        self.errors = 0
        self.examples = []
        self.samples = []
        self.times = {name: [] for name in FAMILIES}
        self.window = {name: [] for name in FAMILIES}
        self.reports = {}  # of each worker, the last
        self.renewed = 0

    def run(self):
        """The result, as plain JSON. If the segment could not be completed, "failed" says why."""
        with self.cleaning:
            claim = self.cleaning.enter_context(open(self.folder / "claim", "w"))
            try:
                fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise Failed(f"another soak uses {self.folder}") from None
            try:
                self._run()
            except (Failed, OSError, redis.RedisError) as failure:
                self.result["failed"] = str(failure)
                self.result.update(errors=self.errors + 1, examples=self.examples)
            return self.result

    def own(self, one):
        self.cleaning.callback(one.stop)
        return one

    def error(self, text, count=1):
        self.errors += count
        if len(self.examples) < SHOWN_ERRORS:
            self.examples.append(text)

    # Begin

    def _run(self):
        options = self.options
        began = time.time()
        self.read_state()
        module = self.folder / "turnstile.so"
        shutil.copy(options.module, module)  # the tree may be built again meanwhile
        load = self.folder / "load"
        subprocess.run(["c++", "-std=c++20", "-O2", str(ROOT / "bench/load.cc"), "-lhiredis",
                        "-o", str(load)], check=True)

        primary = self.own(Server(self.program, module, self.folder / "primary"))
        primary.start()
        replica = self.own(Server(self.program, module, self.folder / "replica",
                                  "--replicaof", f"127.0.0.1 {primary.port}"))
        replica.start()
        info = primary.info()
        self.result.update({
            "server": f"{'Valkey' if 'valkey_version' in info else 'Redis'} "
                      f"{info.get('valkey_version', info['redis_version'])}",
            "machine": platform.machine(), "commit": commit(),
            "module": hashlib.sha256(module.read_bytes()).hexdigest()[:12],
            "segment": self.state["segments"] + 1,
            "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(began)),
        })
        self.checks = self.result["checks"] = {}
        say(f"segment {self.result['segment']} on {self.result['server']}, pids {primary.pid} "
            f"and {replica.pid}, in {self.folder}")
        self.take_over(primary, replica)
        self.result["idle_before"] = self.idle_sample(primary, replica)
        self.write_state(running=True)

        self.load(primary, replica, load)
        self.drain(primary)
        self.result["idle_after"] = self.idle_sample(primary, replica)
        self.check_end(primary, replica)
        replica.stop()
        primary.stop()

        signs = primary.crash_signs() + replica.crash_signs()
        self.checks["log"] = not signs
        for line in signs[:SHOWN_ERRORS]:
            self.error(f"log: {line}")
        self.summarise()
        self.result["seconds"] = round(time.time() - began)
        self.state["segments"] += 1
        self.write_state(running=False)

    def read_state(self):
        self.state = {"segments": 0, "rate": 0, "highest_token": 0, "digest": "", "running": False,
                      "program": str(self.program), "renewed": 0}
        if self.state_file.exists():
            self.state.update(json.loads(self.state_file.read_text()))
            if self.state["program"] != str(self.program):
                raise Failed(f"the data in {self.folder} is that of {self.state['program']}")
            if time.time() - self.state["renewed"] > LEASE_MS / 1000 - 3600:
                raise Failed(f"the data in {self.folder} is too old: its leases of a day have "
                             "ended, or will soon. Begin with an empty folder")
        if self.options.rate:
            self.state["rate"] = self.options.rate
        self.population = Population(self.folder / "holds.json")

    def write_state(self, running):
        self.state["running"] = running
        part = self.state_file.with_suffix(".part")
        part.write_text(json.dumps(self.state, indent=1) + "\n")
        part.replace(self.state_file)

    def saw_token(self, lowest, highest):
        """Tokens of this segment: all must be higher than those of the ones before."""
        if lowest is not None:
            self.lowest_token = lowest if self.lowest_token is None else min(self.lowest_token,
                                                                             lowest)
        self.state["highest_token"] = max(self.state["highest_token"], highest)

    def take_over(self, primary, replica):
        """What the last segment left, or else a new population."""
        self.base = self.state["highest_token"]
        self.lowest_token = None
        digests = equal_digests(primary, replica)
        carried_on = bool(self.population.holds)
        self.result["carried_on"] = carried_on
        self.checks["digests_begin"] = digests[0] == digests[1]
        if carried_on:
            # An interrupted segment left no digest.
            self.checks["digest_as_left"] = (self.state["running"]
                                             or digests[0] == self.state["digest"])
            lost = self.population.lost(primary)
            self.checks["holds_begin"] = lost == 0
            if lost:
                raise Failed(f"{lost} holds of the last segment are gone")
        else:
            self.population.create(primary)
            self.saw_token(min(token for _, _, token in self.population.holds),
                           self.population.highest())
        self.state["renewed"] = time.time()
        self.result["holds"] = len(self.population.holds)
        data = [("SET", f"data:{i}", mix.data_value(i)) for i in range(mix.DATA_KEYS)]
        data += [("INCR", f"counter:{i}") for i in range(mix.COUNTERS)]
        primary.ask_all(data)
        self.keys = self.population.keys() + len(data)
        # The buffer for replicas is filled, so that it grows no more.
        filler = [("SET", "filler", b"x" * 2**20)] * (BACKLOG_MB + 2) + [("DEL", "filler")]
        primary.ask_all(filler)
        self.drain(primary)
        wait_for("the replica to catch up", lambda: caught_up(primary, replica))

    def idle_sample(self, primary, replica):
        time.sleep(2)  # for the buffers of clients that have gone
        return {"primary": primary.sample(), "replica": replica.sample()}

    # Load

    def load(self, primary, replica, program):
        base = self.state["highest_token"]
        python = sys.executable
        crowd = self.own(Worker(python, HERE / "mix.py", primary.port, CLIENTS, base))
        prober = self.own(Worker(python, HERE / "prober.py", primary.port, base))
        pressure = self.own(Pressure(program, primary.port))
        self.workers = crowd, prober
        pressure.line()  # ready
        warm_up_s = min(60.0, self.options.minutes * 60 / 4)
        begin = time.monotonic()
        if not self.state["rate"]:
            capacity = pressure.capacity(warm_up_s / 2)
            self.state["rate"] = round(SHARE_OF_CAPACITY * capacity)
            say(f"at most {capacity * len(PRESSURE):.0f} commands a second")
        self.result["pressure_rate"] = self.state["rate"]
        pressure.start(self.state["rate"])
        self.tick_until(begin + warm_up_s, pressure, primary, replica)
        for times in (*self.times.values(), *self.window.values()):
            times.clear()  # of the warm-up
        primary.ask("CONFIG", "RESETSTAT")
        say("measuring")
        self.measure(pressure, primary, replica)
        say("the load ends")
        for worker in (pressure, crowd, prober):
            worker.finish()
        self.read_reports(into_times=False)
        for report in self.reports.values():
            self.errors += report["errors"]
            self.examples = (self.examples + report["examples"])[:SHOWN_ERRORS]
        mixed = self.reports.get("mix", {})
        self.result["scenarios"] = mixed.get("scenarios", {})
        self.result["operations"] = (
            sum(report["operations"] for report in self.reports.values())
            + pressure.operations * len(PRESSURE) + self.renewed)

    def measure(self, pressure, primary, replica):
        seconds = self.options.minutes * 60
        sample_s = 10 if seconds >= 300 else 5
        begin = time.monotonic()
        end = begin + seconds
        rewrite_s, save_s = min(240, seconds / 2.5), min(300, seconds / 3.5)
        next_sample, next_rewrite, next_save = begin, begin + rewrite_s, begin + save_s
        self.snapshots = {"rewrites": 0, "saves": 0}
        self.measured_from = (primary.sample(), pressure.operations, begin)
        while (now := time.monotonic()) < end:
            if now >= next_sample:
                next_sample += sample_s
                self.take_sample(now - begin, primary, replica)
            # One that goes on already is as good.
            if now >= next_rewrite:
                next_rewrite += rewrite_s
                self.snapshots["rewrites"] += self.ask_for("BGREWRITEAOF", primary)
            if now >= next_save:
                next_save += save_s
                self.snapshots["saves"] += self.ask_for("BGSAVE", primary)
            self.tick_until(min(end, now + TICK_S), pressure, primary, replica)
        first, operations, since = self.measured_from
        last, passed = primary.sample(), time.monotonic() - since
        commands = last["commands"]  # the count began at 0
        info = {name.lower(): value for name, value in primary.info().items()}
        self.result.update(
            measured_s=round(passed, 1),
            commands_per_second=round(commands / passed),
            pressure_per_second=round((pressure.operations - operations) / passed),
            primary_busy_percent=round((last["cpu_ns"] - first["cpu_ns"]) / passed / 1e7, 1),
            cpu_us_per_command=round((last["cpu_ns"] - first["cpu_ns"]) / 1000 / commands, 3),
            usec_per_call={name: info[f"cmdstat_{name}"]["usec_per_call"] for name in COMMANDS
                           if f"cmdstat_{name}" in info},
            turnstile={name.removeprefix("turnstile_"): value for name, value in info.items()
                       if name.startswith("turnstile_") and isinstance(value, (int, float))},
            full_syncs=last["full_syncs"], **self.snapshots)

    def ask_for(self, command, server):
        try:
            server.ask(command)
            return 1
        except redis.ResponseError as error:
            # Another fork is at work; redis-py leaves out how the error begins.
            if not any(text in str(error) for text in ("in progress", "child process is active")):
                self.error(f"{command}: {error}")
            return 0

    def tick_until(self, end, pressure, primary, replica):
        """Renews holds and reads what the workers report. Raises if something died."""
        renew_s = min(RENEW_S, self.options.minutes * 30)
        while (now := time.monotonic()) < end:
            for server in (primary, replica):
                if server.ended_by_itself():
                    raise Failed(f"a server ended by itself; see {server.log}")
            for worker in self.workers:
                if worker.process.poll() is not None:
                    raise Failed(f"{worker.name} ended: " + " / ".join(worker.complaints[-5:]))
            if pressure.failed:
                raise Failed(pressure.failed)
            count = round(len(self.population.holds) * TICK_S / renew_s)
            if lost := self.population.renew(primary, count):
                self.error("holds that stay could not be renewed", lost)
            self.renewed += count
            self.state["renewed"] = time.time()
            self.read_reports()
            time.sleep(max(0.0, min(end, now + TICK_S) - time.monotonic()))

    def read_reports(self, into_times=True):
        for worker in self.workers:
            for report in worker.reports():
                self.reports[worker.name] = report
                self.saw_token(report["lowest_token"], report["highest_token"])
                for name, times in report.get("times", {}).items():
                    if into_times:
                        self.times[name] += times
                        self.window[name] += times

    def take_sample(self, seconds, primary, replica):
        sample = {"t": round(seconds, 1), "primary": primary.sample(), "replica": replica.sample()}
        for name, times in self.window.items():
            times.sort()
            sample[name] = [percentile(times, 0.5), percentile(times, 0.99)]
            times.clear()
        self.samples.append(sample)
        self.write_state(running=True)

    # End

    def drain(self, primary):
        """Waits until only the holds that stay and the data of others are left."""
        def what_else():
            # SCAN removes what has ended. By itself the server looks at 200 keys a second.
            others = [key for key in primary.client.scan_iter(count=1000)
                      if not key.startswith((b"stay:", b"data:", b"counter:"))]
            info = primary.client.info("turnstile")
            left = info["turnstile_waiters"], info["turnstile_queued"], others[:10]
            return left if any(left) or primary.ask("DBSIZE") != self.keys else None

        try:
            wait_for("all short holds to end", lambda: what_else() is None, DRAIN_S)
        except Failed as failed:
            raise Failed(f"{failed}: waiters, entries of NOTIFY, keys: {what_else()}; "
                         f"{primary.ask('DBSIZE')} keys, expected {self.keys}") from None

    def new_token(self, primary):
        """One that is higher than all before, those included that nobody reported to us."""
        key, owner = "last", uuid.uuid4().hex
        token = primary.ask("LOCK.ACQUIRE", key, owner, "PX", 60_000)
        primary.ask("LOCK.RELEASE", key, owner)
        self.saw_token(token, token)
        return token

    def check_end(self, primary, replica):
        checks = self.checks
        self.new_token(primary)
        digests = equal_digests(primary, replica)
        checks["digests_end"] = digests[0] == digests[1]
        if not checks["digests_end"]:
            self.examples.append("other keys on the replica: " + differences(
                primary.digests_by_key(), replica.digests_by_key()))
        checks["holds_end"] = self.population.lost(primary) == 0
        wait_for("the AOF to be written",
                 lambda: primary.client.info("persistence")["aof_pending_bio_fsync"] == 0
                 and not primary.client.info("persistence")["aof_rewrite_in_progress"])
        time.sleep(1.5)  # appendfsync everysec
        before = primary.digests_by_key()
        say("the primary is killed and starts from its AOF")
        began = time.monotonic()
        primary.stop(kill=True)
        primary.start()
        self.result["restart_s"] = round(time.monotonic() - began, 2)
        checks["digest_restart"] = primary.digest() == digests[0]
        if not checks["digest_restart"]:
            self.examples.append("other keys after the restart: "
                                 + differences(before, primary.digests_by_key()))
        after = equal_digests(primary, replica)
        checks["digests_after_restart"] = after[0] == after[1]
        checks["holds_restart"] = self.population.lost(primary) == 0
        highest = self.state["highest_token"]
        checks["token_after_restart"] = self.new_token(primary) > highest
        last = equal_digests(primary, replica)
        checks["digests_last"] = last[0] == last[1] == digests[0]
        self.state["digest"] = last[0]
        checks["tokens_rise"] = self.lowest_token > self.base

    def summarise(self):
        result = self.result
        result["tokens"] = {"before": self.base, "lowest": self.lowest_token,
                            "highest": self.state["highest_token"]}
        latency = result["latency_us"] = {}
        for name, times in self.times.items():
            times.sort()
            latency[name] = {"p50": percentile(times, 0.5), "p99": percentile(times, 0.99),
                             "p99.9": percentile(times, 0.999), "count": len(times)}
        times_s = [sample["t"] for sample in self.samples]
        result["slopes_per_hour"], result["medians"] = {}, {}
        for role in ("primary", "replica"):
            columns = {name: [sample[role][name] for sample in self.samples]
                       for name in ("used_memory", "own_memory", "rss", "handles", "other_handles")}
            result["slopes_per_hour"][role] = {name: round(slope_per_hour(times_s, values), 2)
                                               for name, values in columns.items()}
            result["medians"][role] = {name: percentile(sorted(values), 0.5)
                                       for name, values in columns.items()}
        result["errors"] = self.errors
        result["examples"] = self.examples
        columns = [name for name in self.samples[0]["primary"]]
        result["samples"] = {
            "t": times_s,
            **{role: {name: [sample[role][name] for sample in self.samples] for name in columns}
               for role in ("primary", "replica")},
            **{f"{name}_p50_p99": [sample[name] for sample in self.samples] for name in FAMILIES},
        }


def commit():
    """Of the tree, with a + if the module's source is not what was committed."""
    git = ["git", "--no-optional-locks", "-C", str(ROOT)]
    try:
        name = subprocess.run([*git, "rev-parse", "--short", "HEAD"], check=True,
                              capture_output=True, text=True).stdout.strip()
        changed = subprocess.run([*git, "status", "--porcelain", "module", "CMakeLists.txt"],
                                 check=True, capture_output=True, text=True).stdout
        return name + ("+" if changed.strip() else "")
    except (OSError, subprocess.CalledProcessError):
        return "?"

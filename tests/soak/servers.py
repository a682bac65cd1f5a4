"""The primary and the replica of a soak, and what can be read from them and their processes."""

import contextlib
import ctypes
import os
import pathlib
import random
import re
import signal
import socket
import subprocess
import time

import redis

PATIENCE_S = 120  # for one step; longer means that it will not happen
LOADING_S = 600  # for the start of a server with a long AOF
CRASH_SIGNS = ("internal error", "BUG REPORT START", "crashed by signal", "ASSERTION FAILED",
               "ERROR: AddressSanitizer", "runtime error:")
BACKLOG_MB = 16
LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1


class Failed(Exception):
    """The segment cannot go on."""


def wait_for(what, condition, patience_s=PATIENCE_S):
    end = time.monotonic() + patience_s
    while not (result := condition()):
        if time.monotonic() > end:
            raise Failed(f"waited {patience_s} s in vain for {what}")
        time.sleep(0.05)
    return result


def spawn(command, **options):
    """A process that gets no Ctrl-C from the terminal, and dies with this one however it ends."""
    return subprocess.Popen(list(map(str, command)), start_new_session=True,
                            preexec_fn=lambda: LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL),
                            **options)


def free_port():
    """Below the ports that the kernel gives to clients."""
    while True:
        port = random.SystemRandom().randrange(12000, 22000)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


class Server:
    """A server with the module and an AOF. Its folder is kept."""

    def __init__(self, program, module, folder, *options):
        self.folder = folder
        self.log = folder / "log"
        folder.mkdir(exist_ok=True)
        self.log_begin = self.log.stat().st_size if self.log.exists() else 0
        self.command = [
            str(program), "--bind", "127.0.0.1", "--dir", str(folder), "--logfile", str(self.log),
            "--appendonly", "yes", "--appendfsync", "everysec", "--save", "",
            "--auto-aof-rewrite-min-size", "512mb", "--repl-backlog-size", f"{BACKLOG_MB}mb",
            "--repl-diskless-sync-delay", "0", "--maxmemory-policy", "noeviction",
            "--enable-debug-command", "local", "--shutdown-timeout", "0",
            "--loadmodule", str(module), *options]
        self.process = None
        self.port = None
        self.client = None

    def start(self):
        """On the port that it had, if any."""
        for _ in range(20):  # somebody else may take the port first
            port = self.port or free_port()
            with open(self.log, "a") as log:
                self.process = spawn([*self.command, "--port", port], stdout=log, stderr=log)
            client = redis.Redis("127.0.0.1", port, socket_timeout=PATIENCE_S)
            if wait_for("a server that has loaded its files", lambda: self._state(client),
                        LOADING_S) == "up":
                self.port, self.client = port, client
                return self
            client.close()
            self.stop()
            if self.port:
                break
        raise Failed(f"the server does not start; its log ends with:\n{self._log_end()}")

    def _state(self, client):
        if self.process.poll() is not None:
            return "ended"
        try:
            client.ping()  # refused while the server loads; INFO is not
            return "up" if client.info("server")["process_id"] == self.pid else "taken"
        except (redis.ConnectionError, redis.BusyLoadingError):
            return None

    def _log_end(self):
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-20:])

    @property
    def pid(self):
        return self.process.pid

    def ask(self, *command):
        return self.client.execute_command(*command)

    def ask_all(self, commands):
        """The replies to many commands; errors among them are returned."""
        replies = []
        for first in range(0, len(commands), 500):
            pipeline = self.client.pipeline(transaction=False)
            for command in commands[first:first + 500]:
                pipeline.execute_command(*command)
            replies += pipeline.execute(raise_on_error=False)
        return replies

    def info(self):
        """All of INFO that the soak looks at."""
        fields = {}
        for section in ("server", "clients", "memory", "persistence", "stats", "replication",
                        "commandstats", "turnstile"):
            fields.update(self.client.info(section))
        return fields

    def digest(self):
        """Of all keys and values; every byte of a lock counts."""
        return self.ask("DEBUG", "DIGEST").decode()

    def digests_by_key(self):
        keys = sorted(set(self.client.scan_iter(count=1000)))
        return dict(zip(keys, self.ask_all([("DEBUG", "DIGEST-VALUE", key) for key in keys])))

    def _shutdown(self):
        with contextlib.suppress(redis.RedisError):
            self.ask("SHUTDOWN", "NOSAVE")

    def stop(self, kill=False):
        """Ends the process; with `kill` without a chance to write anything."""
        if self.process is None:
            return
        if self.process.poll() is None:
            if kill:
                self.process.kill()
            elif self.client:
                self._shutdown()
            else:
                self.process.terminate()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        if self.client:
            self.client.close()
        self.process = self.client = None

    def ended_by_itself(self):
        return self.process is not None and self.process.poll() is not None

    def crash_signs(self):
        """Lines in the log of this segment that must not be there."""
        with open(self.log, "rb") as log:
            log.seek(self.log_begin)
            lines = log.read().decode(errors="replace").splitlines()
        return [line for line in lines if any(sign in line for sign in CRASH_SIGNS)]

    # What the system says of the process

    def rss(self):
        status = pathlib.Path(f"/proc/{self.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s*(\d+) kB", status)[1]) * 1024

    def handles(self):
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def cpu_ns(self):
        """Of the main thread."""
        path = pathlib.Path(f"/proc/{self.pid}/task/{self.pid}/schedstat")
        if path.exists():
            return int(path.read_text().split()[0])
        fields = self.client.info("cpu")
        return round(1e9 * sum(float(value) for name, value in fields.items()
                               if name.endswith("main_thread")))

    def sample(self):
        info = self.info()
        # The buffers for replicas follow the load, not the data.
        buffers = info.get("mem_total_replication_buffers", info.get("mem_replication_backlog", 0))
        handles = self.handles()
        return {
            "used_memory": info["used_memory"],
            "own_memory": info["used_memory"] - buffers - info["mem_clients_normal"]
            - info["mem_aof_buffer"],
            "rss": self.rss(),
            "fragmentation": info["mem_fragmentation_ratio"],
            "handles": handles,
            "clients": info["connected_clients"],
            # All that is not the connection of a client.
            "other_handles": handles - info["connected_clients"],
            "aof_size": info["aof_current_size"],
            "locks": info["turnstile_locks"],
            "waiters": info["turnstile_waiters"],
            "queued": info["turnstile_queued"],
            "contended": info["turnstile_contended_locks"],
            "cpu_ns": self.cpu_ns(),
            "commands": info["total_commands_processed"],
            "full_syncs": info["sync_full"],
        }


def caught_up(primary, replica):
    """Whether the replica has all that the primary has sent."""
    theirs = replica.client.info("replication")
    ours = primary.client.info("replication")
    return (theirs["role"] == "slave" and theirs["master_link_status"] == "up"
            and ours["connected_slaves"] == 1
            and theirs["slave_repl_offset"] == ours["master_repl_offset"])


def equal_digests(primary, replica):
    """Both digests, once the replica has caught up; and whether nothing came in between."""
    while True:
        wait_for("the replica to catch up", lambda: caught_up(primary, replica))
        before = primary.client.info("replication")["master_repl_offset"]
        digests = primary.digest(), replica.digest()
        # The primary pings its replicas every ten seconds.
        if primary.client.info("replication")["master_repl_offset"] == before:
            return digests


def differences(before, after):
    """The first keys that are in only one of two dictionaries, or different in them."""
    keys = [key for key in sorted({*before, *after}) if before.get(key) != after.get(key)]
    shown = [f"{key.decode(errors='replace')} ("
             + ("gone" if key not in after else "new" if key not in before else "changed") + ")"
             for key in keys[:5]]
    return f"{len(keys)} keys: " + ", ".join(shown)


def stop_quietly(process):
    """Ends a process that is not a server, and waits for it."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait()

"""The operations that are measured: what goes over the wire, and what must come back.

A mode says which commands make one operation. Its words may be KEY, a random key of a few or of
many; OWNER, a random owner, the same for all commands of an operation; and HOLDER, the owner that
took the key beforehand.
"""

import dataclasses
import hashlib

KEY, OWNER, HOLDER = "@key", "@owner", "@holder"
LEASE = "30000"
LONG_LEASE = "3600000"  # longer than the benchmark

REPLIES = {  # the first line of a reply, by name
    "ok": rb"\+OK",
    "one": rb":1",
    "token": rb":[1-9]\d*",
    "number": rb":\d+",
    "null": rb"\$-1|\*-1",
    "pong": rb"\+PONG",
    "bulk": rb"\$\d+",
}


@dataclasses.dataclass(frozen=True)
class Mode:
    title: str
    commands: tuple[str, ...]  # each: the name of the reply, then the words
    held: str = ""  # a command that each key needs beforehand, once
    fresh: str = ""  # a command that each operation needs beforehand; then none shares its key

    def is_ours(self):
        """Whether it needs Turnstile."""
        return any(" LOCK." in command for command in self.commands)


# --- Scripts and a library of functions, short ones of the usual kind -----------------------------

RELEASE = """
if redis.call('GET', KEYS[1]) == ARGV[1] then
  return redis.call('DEL', KEYS[1])
end
return 0
"""

EXTEND = """
if redis.call('GET', KEYS[1]) == ARGV[1] then
  return redis.call('PEXPIRE', KEYS[1], ARGV[2])
end
return 0
"""

ACQUIRE = """
if redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) then
  return redis.call('INCR', KEYS[2])
end
return false
"""

LIBRARY = """#!lua name=bench
redis.register_function('bench_acquire', function(keys, args)
  if redis.call('SET', keys[1], args[1], 'NX', 'PX', args[2]) then
    return redis.call('INCR', keys[2])
  end
  return false
end)
redis.register_function('bench_release', function(keys, args)
  if redis.call('GET', keys[1]) == args[1] then
    return redis.call('DEL', keys[1])
  end
  return 0
end)
"""

COUNTER = "fencing-counter"  # one for all locks: the cheapest way to fence with a script


def load_scripts(server):
    for script in (RELEASE, EXTEND, ACQUIRE):
        server.ask("SCRIPT", "LOAD", script)
    server.ask("FUNCTION", "LOAD", "REPLACE", LIBRARY)


def sha(script):
    return hashlib.sha1(script.encode()).hexdigest()


# --- The modes ------------------------------------------------------------------------------------

SET = f"ok SET {KEY} {OWNER} NX PX {LEASE}"
SET_LONG = f"ok SET {KEY} {HOLDER} NX PX {LONG_LEASE}"
ACQUIRE_LONG = f"token LOCK.ACQUIRE {KEY} {HOLDER} PX {LONG_LEASE}"
EVAL_RELEASE = f"one EVALSHA {sha(RELEASE)} 1 {KEY} {OWNER}"

PAIRS = {  # an acquire and a release
    "set-del": Mode("SET NX PX + DEL", (SET, f"one DEL {KEY}")),
    "turnstile": Mode("LOCK.ACQUIRE + LOCK.RELEASE", (
        f"token LOCK.ACQUIRE {KEY} {OWNER} PX {LEASE}", f"one LOCK.RELEASE {KEY} {OWNER}")),
    "evalsha": Mode("SET NX PX + EVALSHA release", (SET, EVAL_RELEASE)),
    "fcall": Mode("SET NX PX + FCALL release", (
        SET, f"one FCALL bench_release 1 {KEY} {OWNER}")),
    "evalsha-fencing": Mode("EVALSHA acquire with INCR + EVALSHA release", (
        f"token EVALSHA {sha(ACQUIRE)} 2 {KEY} {COUNTER} {OWNER} {LEASE}", EVAL_RELEASE)),
    "fcall-fencing": Mode("FCALL acquire with INCR + FCALL release", (
        f"token FCALL bench_acquire 2 {KEY} {COUNTER} {OWNER} {LEASE}",
        f"one FCALL bench_release 1 {KEY} {OWNER}")),
}

DELIFEQ = {  # Valkey 9 has it
    "set-delifeq": Mode("SET NX PX + DELIFEQ", (SET, f"one DELIFEQ {KEY} {OWNER}")),
}

TOUCHES = {  # a holder extends its lease
    "touch": Mode("LOCK.TOUCH", (
        f"one LOCK.TOUCH {KEY} {HOLDER} PX {LONG_LEASE}",), held=ACQUIRE_LONG),
    "pexpire": Mode("PEXPIRE", (f"one PEXPIRE {KEY} {LONG_LEASE}",), held=SET_LONG),
    "evalsha-extend": Mode("EVALSHA extend", (
        f"one EVALSHA {sha(EXTEND)} 1 {KEY} {HOLDER} {LONG_LEASE}",), held=SET_LONG),
}

BUSY = {  # somebody else holds the lock
    "busy": Mode("busy LOCK.ACQUIRE", (
        f"null LOCK.ACQUIRE {KEY} {OWNER} PX {LEASE}",), held=ACQUIRE_LONG),
    "busy-set": Mode("busy SET NX PX", (f"null {SET.partition(' ')[2]}",), held=SET_LONG),
}

CONNECT = "connect"
OTHERS = {  # what others do on the same server
    "ping": Mode("PING", ("pong PING",)),
    "get": Mode("GET", (f"bulk GET {KEY}",), held=f"ok SET {KEY} {HOLDER}"),
    "set": Mode("SET", (f"ok SET {KEY} {OWNER}",)),
    "set-px": Mode("SET PX", (f"ok SET {KEY} {OWNER} PX {LONG_LEASE}",)),
    "del": Mode("DEL", (f"one DEL {KEY}",), fresh=f"ok SET {KEY} {OWNER}"),
    "expire": Mode("EXPIRE", (f"one EXPIRE {KEY} 3600",), held=f"ok SET {KEY} {HOLDER}"),
    "incr": Mode("INCR", (f"number INCR {KEY}",)),
    "list": Mode("LPUSH + RPOP", (f"one LPUSH {KEY} {OWNER}", f"bulk RPOP {KEY}")),
    CONNECT: Mode("connect + PING + close", ("pong PING",)),
    "set-px-del": Mode("SET PX + DEL", (f"ok SET {KEY} {OWNER} PX {LEASE}", f"one DEL {KEY}")),
}

ALL = {**PAIRS, **DELIFEQ, **TOUCHES, **BUSY, **OTHERS}

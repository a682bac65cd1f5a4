# SPDX-License-Identifier: BSD-3-Clause
# Copyright (c) 2026 The Turnstile authors
"""What locktop shows, as text: pure functions, no curses and no Redis."""

import fnmatch
import re
import unicodedata
from typing import NamedTuple, Optional

# --- text --------------------------------------------------------------------------------------

MOST_OF_A_NAME = 1000  # the "owner" of a plain lock is a string's value, and may be megabytes
UTF8 = True  # whether the terminal shows more than ASCII; main() finds out


def printable(raw):
    """Keys and owners are any bytes. What comes out is safe for a terminal: no control characters,
    no escape sequences, nothing that changes direction or stacks up on its neighbour."""
    if raw is None:
        return "-"
    if not isinstance(raw, bytes):
        return "".join(map(_printable_char, str(raw)))
    if len(raw) > MOST_OF_A_NAME:
        return f"{printable(raw[:MOST_OF_A_NAME])}... ({len(raw):,} bytes)"
    return "".join(map(_printable_char, raw.decode("utf-8", "surrogateescape")))


def _printable_char(char):
    if char == "\\":
        return "\\\\"  # so that an escape cannot be mistaken for a name
    if " " <= char <= "~":
        return char
    if UTF8 and char.isprintable() and unicodedata.category(char)[0] not in "MZ":
        return char
    named = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}.get(char)
    return named or "".join(f"\\x{byte:02x}" for byte in char.encode("utf-8", "surrogateescape"))


def cells(text):
    """How many columns a terminal needs for a printable text."""
    return sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text)


def cut(text, width):
    """At most so many columns, with a mark if something is missing."""
    if cells(text) <= width:
        return text
    mark = ("…" if UTF8 else "~")[:max(width, 0)]
    text = text[:max(width, 0)]  # very long names first lose what cannot fit anyway
    while text and cells(text) > width - len(mark):
        text = text[:-1]
    return text + mark


def fit(text, width, right=False):
    """Exactly so many columns."""
    text = cut(text, width)
    space = " " * (width - cells(text))
    return space + text if right else text + space


def duration(ms):
    if ms is None:
        return "-"
    if ms < 1000:
        return f"{ms}ms"
    seconds = ms // 1000
    if seconds < 10:
        return f"{ms // 100 / 10}s"
    if seconds < 60:
        return f"{seconds}s"
    minutes, hours, days = seconds // 60, seconds // 3600, seconds // 86400
    if hours == 0:
        return f"{minutes}m{seconds % 60:02}s"
    if days == 0:
        return f"{hours}h{minutes % 60:02}m"
    return f"{days}d{hours % 24:02}h"


def glob(pattern):
    """LOCK.TOP has no MATCH. This is the server's kind of pattern, as a regular expression."""
    text = pattern.decode("latin-1").replace("[^", "[!")
    text = re.sub(r"\\(.)", lambda escaped: f"[{escaped[1]}]" if escaped[1] in "*?[" else escaped[1], text, flags=re.S)
    return re.compile(fnmatch.translate(text).encode("latin-1"), re.DOTALL)


# --- replies -----------------------------------------------------------------------------------


class Lock(NamedTuple):
    key: bytes
    mode: bytes = b""
    holding: int = 0
    owner: Optional[bytes] = None
    held: Optional[int] = None
    lease: Optional[int] = None
    linger: int = 0
    waiting: int = 0
    longest: int = 0
    tag: Optional[bytes] = None

    @property
    def holder(self):
        """The public name of the hold, if it has one."""
        return self.tag or self.owner


def as_map(reply):
    """A map of RESP3, or the flat array that RESP2 makes of it."""
    pairs = reply.items() if isinstance(reply, dict) else zip(reply[::2], reply[1::2])
    return {name.decode() if isinstance(name, bytes) else name: value for name, value in pairs}


def parse_lock(reply):
    fields = as_map(reply)
    return Lock(fields["key"], fields.get("mode") or b"", fields.get("holding") or 0, fields.get("owner"),
                fields.get("held-ms"), fields.get("lease-left-ms"), fields.get("linger-left-ms") or 0,
                fields.get("waiting") or 0, fields.get("longest-wait-ms") or 0, fields.get("tag"))


def parse_details(reply):
    if reply is None:
        return None
    details = as_map(reply)
    for part in ("holders", "waiters"):
        details[part] = [as_map(each) for each in details.get(part) or []]
    return details


def parse_info(reply):
    text = (reply if isinstance(reply, bytes) else str(reply).encode()).decode("utf-8", "replace")
    return dict(line.split(":", 1) for line in text.splitlines() if ":" in line)


def number(info, name):
    try:
        return int(info[f"turnstile_{name}"])
    except (KeyError, ValueError):
        return None


REFUSED = ("rejected", "rejected_line_full")  # counters of requests that were answered null at once


def rates(before, now, seconds):
    """What happened a second between two INFOs, and which share of it was contended. None if that
    cannot be known: a counter that fell means that the server started anew."""
    names = ("acquired", "waits", "acquired_immediately") + REFUSED
    diff = {}
    for name in names:
        old, new = number(before or {}, name), number(now, name)
        if old is None or new is None or new < old or seconds <= 0:
            return None
        diff[name] = new - old
    refused = sum(diff[name] for name in REFUSED)
    contended = refused + diff["waits"]
    asked = contended + diff["acquired_immediately"]
    return (diff["acquired"] / seconds, refused / seconds, 100 * contended / asked if asked else 0)


# How to sort: the field, its name on the screen, and whether the largest comes first.
SORTS = {
    "w": (lambda lock: (lock.waiting, lock.longest), "waiting", True),
    "h": (lambda lock: lock.held, "held", True),
    "l": (lambda lock: lock.lease, "lease left", False),
    "o": (lambda lock: lock.holder, "owner", False),
    "n": (lambda lock: lock.key, "key", False),
}


def sort_locks(locks, by, reverse):
    """Equals are in the order of their names, and what is not known comes last, either way."""
    field, _, falling = SORTS[by]
    known = sorted((lock for lock in locks if field(lock) is not None), key=lambda lock: lock.key)
    known.sort(key=field, reverse=falling != reverse)
    return known + sorted((lock for lock in locks if field(lock) is None), key=lambda lock: lock.key)


# --- what is shown, as text --------------------------------------------------------------------


class Column(NamedTuple):
    title: str
    text: object
    width: int = 0  # 0: takes what is left
    drop: int = 0  # which goes first when the window is narrow; 0: never
    right: bool = True


def owner_text(lock):
    if lock.holding == 0 and lock.linger > 0:
        return f"(lingers {duration(lock.linger)})"
    more = f" +{lock.holding - 1}" if lock.holding > 1 else ""
    return printable(lock.holder) + more


COLUMNS = (
    Column("KEY", lambda lock: printable(lock.key), right=False),
    Column("MODE", lambda lock: printable(lock.mode), 9, 1, False),
    Column("HOLDERS", lambda lock: str(lock.holding), 7, 2),
    Column("OWNER", owner_text, 0, 6, False),
    Column("HELD", lambda lock: duration(lock.held), 6, 5),
    Column("LEASE", lambda lock: duration(lock.lease), 6, 4),
    Column("WAITING", lambda lock: str(lock.waiting), 7),
    Column("LONGEST", lambda lock: duration(lock.longest) if lock.waiting else "-", 7, 3),
)
ENOUGH = 28  # columns for key and owner, below which others make room


def layout(locks, width):
    """Which columns fit, and how wide they are. width None: as wide as their texts."""
    longest = {column: max([len(column.title)] + [cells(column.text(lock)) for lock in locks])
               for column in COLUMNS if not column.width or width is None}
    if width is None:
        return [(column, longest[column]) for column in COLUMNS], 2
    gap, columns = (2 if width >= 100 else 1), list(COLUMNS)

    def free():
        return width - sum(column.width + gap for column in columns) + gap

    while free() < ENOUGH and any(column.drop for column in columns):
        columns.remove(min((column for column in columns if column.drop), key=lambda column: column.drop))
    flexible = [column for column in columns if not column.width]
    key = owner = max(free(), 8)
    if len(flexible) == 2:
        owner = min(longest[flexible[1]], max(free() * 2 // 5, free() - longest[flexible[0]]))
        key = free() - owner
    widths = {"KEY": key, "OWNER": owner}
    return [(column, column.width or widths[column.title]) for column in columns], gap


def table_cells(columns, lock=None):
    """The cells of a lock, or the titles. Numbers are at the right."""
    return [fit(column.title if lock is None else column.text(lock), width, column.right) for column, width in columns]


def table_line(columns, gap, lock=None):
    return (" " * gap).join(table_cells(columns, lock))


def header(address, info, before, seconds):
    """Lines of (label, value)."""
    if not info:
        return [[("locktop", printable(address))]]
    engine = next((name for name in ("valkey", "redict") if f"{name}_version" in info), "redis")
    role = {"master": "primary", "slave": "replica"}.get(info.get("role"), "?")
    first = [("locktop", address), (engine, f"{info.get(engine + '_version', '?')} {role}")]
    state = [("locks", number(info, "locks")), ("waiters", number(info, "waiters")),
             ("queued", number(info, "queued"))]
    rate = rates(before, info, seconds)
    if rate:
        state += [("acquired/s", f"{rate[0]:.1f}"), ("refused/s", f"{rate[1]:.1f}"), ("contention", f"{rate[2]:.0f}%")]
    else:
        state += [("acquired", number(info, "acquired")), ("refused", sum(number(info, name) or 0 for name in REFUSED)),
                  ("contention", info.get("turnstile_contention_percent", "-") + "%")]
    past = [("p99 wait", duration(number(info, "wait_p99_ms"))), ("hold", duration(number(info, "hold_p99_ms")))]
    past += [(name, number(info, name)) for name in ("expired", "evicted", "forced")]
    past.append(("clock lead", duration(number(info, "clock_lead_ms"))))
    if number(info, "grace_left_ms"):
        first.append(("GRACE", f"nothing new is granted for {duration(number(info, 'grace_left_ms'))}"))
    return [[(label, printable(value)) for label, value in line] for line in (first, state, past)]


def optional(title, values):
    """A column, title first; of no width if no row has a value."""
    texts = ["-" if value is None else printable(value) for value in values]
    if all(value is None for value in values):
        return [""] * (len(texts) + 1)
    width = max(map(len, [title] + texts))
    return [f"{text:<{width}}  " for text in [title] + texts]


def optional_columns(rows):
    """What most holds and waits do not have, side by side: title first, then a text for each row."""
    def weight(each):
        return each["weight"] if each.get("weight", 1) != 1 else None

    def cap(each):
        return duration(each["max-hold-left-ms"]) if each.get("max-hold-left-ms") is not None else None

    columns = (optional("WEIGHT", [weight(each) for each in rows]), optional("CAP", [cap(each) for each in rows]),
               optional("FROM", [each.get("client-addr") or None for each in rows]),
               optional("TAG", [each.get("tag") for each in rows]))
    return ["".join(texts) for texts in zip(*columns)]


def hidden(details, count, shown):
    """How many there are beyond those that LOCK.INFO shows one by one."""
    return max((details.get(count) or 0) - len(details[shown]), 0)


def more(details, count, shown):
    number = hidden(details, count, shown)
    return [(f"... and {number} more", False)] if number else []


def details_text(key, details):
    """Lines of (text, is a title)."""
    lines = [(printable(key), True)]
    if details is None:
        return lines + [("nobody holds it, nobody waits", False)]
    lines.append((f"mode {printable(details.get('mode'))}, waiting {details.get('waiting', 0)}, lingers "
                  f"{duration(details.get('linger-left-ms'))}, grace {duration(details.get('grace-left-ms'))}", False))
    title, *extra = optional_columns(details["holders"])
    lines += [("", False), (f"{'HELD':>8} {'LEASE':>8} {'COUNT':>6} {'SESSION':>7} {'LINGER':>7}  "
                            f"{'TOKEN':>17}  {title}HOLDER", True)]
    for each, columns in zip(details["holders"], extra):
        lines.append((f"{duration(each.get('held-ms')):>8} {duration(each.get('lease-left-ms')):>8} "
                      f"{each.get('count') or '-':>6} {'yes' if each.get('session') else 'no':>7} "
                      f"{duration(each.get('linger-ms')):>7}  {each.get('token') or '-':>17}  "
                      f"{columns}{printable(each.get('owner'))}", False))
    lines += more(details, "holding", "holders")
    title, *extra = optional_columns(details["waiters"])
    lines += [("", False), (f"{'WAITED':>8} {'AT MOST':>8} {'MODE':>9}  {title}IN LINE", True)]
    for each, columns in zip(details["waiters"], extra):
        lines.append((f"{duration(each.get('waited-ms')):>8} {duration(each.get('left-ms')):>8} "
                      f"{printable(each.get('mode')):>9}  {columns}{printable(each.get('owner'))}", False))
    return lines + more(details, "waiting", "waiters")


# --- forced release: what is asked, and what may be done -----------------------------------------


HIDDEN = 0  # no token


def holders_of(details):
    """Who would be hit: by owner and token, the tag of each. None if there is nothing to release.
    Those that are not shown one by one are a number and the token HIDDEN."""
    if details is None or not (details["holders"] or details.get("linger-left-ms")):
        return None
    holders = {(each.get("owner"), each.get("token")): each.get("tag") for each in details["holders"]}
    number = hidden(details, "holding", "holders")
    return {**holders, (number, HIDDEN): None} if number else holders


def who(holders):
    names = [(token, tag or owner) for (owner, token), tag in holders.items() if token != HIDDEN]
    names.sort(key=lambda pair: pair[0] or 0, reverse=True)  # the highest token first
    if not names:
        return "nobody (it lingers)"
    others = len(names) - 1 + sum(number for number, token in holders if token == HIDDEN)
    return printable(names[0][1]) + (f" and {others} more" if others else "")


def question(key, holders, width):
    most = max(width, 20)  # of each name: a long one must not push the question off the screen
    plural = "holders" if len(holders) > 1 else "holder"
    return (f"Force-release {cut(printable(key), most)}, held by {cut(who(holders), most)}? "
            f"Its {plural} will not be asked. [y/N]")


def objection(key, asked, now):
    """Why the answer to the question does not count any more, or None. Holders may have left since,
    but nobody may have come: the question was not about them."""
    if now is None:
        return f"Not released: nobody holds {printable(key)} any more."
    others = {holder: tag for holder, tag in now.items() if holder not in asked}
    if others:
        return f"Not released: {printable(key)} has another holder now, {who(others)}."
    return None

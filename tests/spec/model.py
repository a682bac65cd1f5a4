"""A naive model of Turnstile, written from docs/commands.md alone.

It knows no module API, no timers and no indexes: plain lists and dictionaries that are walked from
one end to the other, and a clock that the driver sets. Each rule quotes the sentence of
docs/commands.md that it comes from. Whoever changes this file does not look into module/.

Where the page is silent, a rule that begins with SEEN was taken from what servers did. Such a rule
notices that the behaviour changes, not that it is wrong; it should get a sentence on the page.

    model = Model(wall_us, margin_ms)
    model.command(connection, args)     a command's reply, or BLOCKED; then
    model.settle()                      hand over what is free
    model.replies                       [(connection, reply)] of calls that waited and have ended
    model.advance(wall_us)              the time goes on to there; no moment() lies in between
    model.info(key)                     what LOCK.INFO shows

A rule that a self-test can break is asked for with self.rule("name"), see MUTATIONS.
"""

EXCLUSIVE, SHARED, LIMIT = "exclusive", "shared", "limit"

MAX_LEASE_MS = 24 * 60 * 60 * 1000
MAX_WAIT_MS = 315360000000
MAX_LIMIT = 100000
MAX_ALSO = 64
MAX_OWNER = 256
MAX_TOKEN = 2**53 - 1

BLOCKED = object()  # in place of a reply: the caller waits

# Rules that `run --self-test` breaks one at a time, to show that the comparison notices.
MUTATIONS = {
    "live-at-the-end": "a hold is live while now is not later than the end of its lease",
    "same-token": "the same owner asking again gets the token it already has",
    "nobody-overtakes": "a request is compatible with everybody who waits already",
    "smallest-n": "the smallest n among those waiters and itself",
    "linger-blocks": "holds that linger count as holders",
    "count": "as many releases are needed",
    "session-ends": "the hold also ends when the connection that acquired it closes",
    "binding-ends": "the next ACQUIRE without SESSION ends the binding",
    "upgrade-first": "an upgrade waits ahead of everybody whom its shared hold already blocks",
    "downgrade-keeps": "a downgrade keeps its token",
    "floor-exact": "else its token becomes exactly this",
    "floor-bound": "a floor is an error if it is above all three",
    "deadlock-queue": "waits for who stands before it in this line",
    "deadlock-limit": "between two LIMIT requests there is no edge",
    "deadlock-limit-1": "a request with LIMIT 1 waits for every LIMIT holder",
    "takes-over": "the newer call takes over the place",
    "release-leaves": "a release ends this owner's wait",
    "arrival": "waiters are served in order of arrival over all locks",
    "place-in-every-line": "keeps its place in every line",
    "plain-owner": "a string key counts as a lock held by its value",
    "touch-from-now": "sets the lease to end that long from now",
}


class Error:
    """An error reply: the first word that it must have."""

    def __init__(self, *codes):
        self.codes = codes

    def __repr__(self):
        return "-" + " or ".join(self.codes)


class Unclear(Exception):
    """What should happen is nowhere said."""


class Failed(Exception):
    def __init__(self, *codes):
        self.error = Error(*codes)


class Hold:
    """One owner's hold on one lock. Times in milliseconds."""

    def __init__(self, owner, token, end, linger, count, session, granted):
        self.owner = owner
        self.token = token
        self.end = end  # of the lease: "live while now is not later than the end of its lease"
        self.linger = linger
        self.count = count
        self.session = session  # a connection, or None
        self.granted = granted
        self.ended = False  # with its session; then `end` is when that was

    def until(self):
        """The last moment at which it keeps others out."""
        return self.end + self.linger


class Lock:
    def __init__(self, mode):
        self.mode = mode
        self.holds = []


class Plain:
    """A string key. "A string key counts as a lock held by its value"."""

    def __init__(self, value, end):
        self.value = value
        self.end = end  # of its TTL, or None


class Other:
    """A key of any other type: here always a list."""

    def __init__(self):
        self.length = 0
        self.end = None


class Request:
    """A checked LOCK.ACQUIRE; while it waits, a place in the line of each of its keys."""

    def __init__(self):
        self.connection = None
        self.owner = None
        self.keys = []
        self.mode = EXCLUSIVE
        self.n = None
        self.lease = None
        self.wait = 0
        self.reentrant = False
        self.session = False
        self.linger = 0
        self.floor = 0
        # While it waits:
        self.arrival = None
        self.since = None
        self.deadline = None


def compatible(a, b):
    """Modes alone: whether a limit has room for both is another question."""
    return a == b and a != EXCLUSIVE


def integer(text, low, high):
    """"Integers are plain decimal digits: no sign, no space, no leading zero, no exponent"."""
    if not text.isdigit() or not text.isascii() or (text[0] == "0" and text != "0"):
        raise Failed("ERR")
    value = int(text)
    if not low <= value <= high:
        raise Failed("ERR")
    return value


class Model:
    def __init__(self, wall_us, margin_ms, databases=2, broken=None):
        self.now_us = wall_us
        self.databases = databases
        self.entries = {}  # (db, name) -> Lock, Plain or Other
        self.lines = {}  # (db, name) -> [Request], in order
        self.waiting = []  # [Request], in order of arrival
        self.arrivals = 0
        self.replies = []
        self.db_of = {}  # connection -> db
        self.margin_us = margin_ms * 1000
        self.start_us = wall_us
        # "the highest token it has issued or seen, and the floor it noted at its start"
        self.last_token = wall_us + self.margin_us
        self.broken = broken

    def rule(self, name):
        """Whether to obey this rule."""
        return self.broken != name

    # --- Time ---------------------------------------------------------------------------------

    @property
    def now(self):
        return self.now_us // 1000

    def live(self, hold):
        if self.rule("live-at-the-end"):
            return not hold.ended and self.now <= hold.end
        return not hold.ended and self.now < hold.end

    def blocks(self, hold):
        """Live or lingering."""
        if not self.rule("linger-blocks"):
            return self.live(hold)
        if hold.ended and hold.linger == 0:
            return False
        return self.live(hold) or self.now <= hold.until()

    def moments(self):
        """When something happens by itself: [(millisecond, waiter or None)].

        None stands for the first millisecond at which a hold has ended, or its linger.
        """
        found = []
        for entry in self.entries.values():
            if isinstance(entry, Lock):
                for hold in entry.holds:
                    if self.live(hold):
                        found.append((hold.end + 1, None))
                    if hold.linger:
                        found.append((hold.until() + 1, None))
            elif entry.end is not None:
                found.append((entry.end + 1, None))
        for request in self.waiting:
            found.append((request.deadline, request))
        return found

    def advance(self, wall_us):
        self.now_us = wall_us
        for request in list(self.waiting):
            if request.deadline <= self.now:  # SEEN: in the millisecond of its end, not after it
                # "A waiter leaves at its time-out (null)"
                self.leave(request)
                self.replies.append((request.connection, None))
        self.clean()
        self.settle()

    def last_milliseconds(self):
        """Of all keys: "Its TTL is the latest end of its holds, linger included"."""
        return {self.now + self.ttl(key) for key in self.entries if self.ttl(key) >= 0}

    def clean(self):
        """Drops what nobody can see any more: "The key exists only while held or lingers"."""
        for key, entry in list(self.entries.items()):
            if isinstance(entry, Lock):
                entry.holds = [hold for hold in entry.holds if self.blocks(hold)]
                if not entry.holds:
                    del self.entries[key]
            elif entry.end is not None and self.now > entry.end:
                del self.entries[key]

    # --- Tokens -------------------------------------------------------------------------------

    def new_token(self, floor):
        # "A new one is larger than every token this lock was held under before"; "A new token is at
        # least this one". Over all, from docs/guarantees.md: max(last token + 1, wall clock in µs).
        self.last_token = max(self.last_token + 1, self.now_us, floor)
        return self.last_token

    def floor_allowed(self, floor):
        # "A floor is an error if it is above all three of these": the server's own token clock, its
        # wall clock plus half of the margin, its wall clock at the start plus one and a half.
        if not self.rule("floor-bound"):
            return floor <= self.now_us + self.margin_us // 2
        return (floor <= self.last_token or floor <= self.now_us + self.margin_us // 2
                or floor <= self.start_us + self.margin_us * 3 // 2)

    # --- Who may have the lock ------------------------------------------------------------------

    def live_hold(self, key, owner):
        entry = self.entries.get(key)
        if isinstance(entry, Lock):
            for hold in entry.holds:
                if hold.owner == owner and self.live(hold):
                    return hold
        return None

    def is_plain_of(self, key, owner):
        entry = self.entries.get(key)
        if not isinstance(entry, Plain):
            return False
        return entry.value == owner or not self.rule("plain-owner")

    def fits(self, request, key, ahead):
        """"A request is granted when it is compatible with all holders of the lock and with
        everybody who waits for it already"."""
        entry = self.entries.get(key)
        if isinstance(entry, Plain) and not self.is_plain_of(key, request.owner):
            return False
        others = []
        if isinstance(entry, Lock):
            # "It does not keep the owner itself out": a lingering hold of the same owner.
            others = [h for h in entry.holds if self.blocks(h) and h.owner != request.owner]
            if others and not compatible(entry.mode, request.mode):
                return False
        if not self.rule("nobody-overtakes"):
            ahead = []
        if self.passes_somebody(request, key, ahead):
            return False
        if request.mode == LIMIT:
            # "It fits if the holders, the waiters before it and itself together are at most the
            # smallest n among those waiters and itself"
            smallest = min([request.n] + [waiter.n for waiter in ahead])
            if not self.rule("smallest-n"):
                smallest = request.n
            return len(others) + len(ahead) + 1 <= smallest
        return True

    def passes_somebody(self, request, key, ahead):
        """Whether one of these keeps the request waiting, whatever the holders."""
        entry = self.entries.get(key)
        lingers = isinstance(entry, Lock) and any(
            hold.owner == request.owner and self.blocks(hold) and not self.live(hold)
            for hold in entry.holds)
        for waiter in ahead:
            if not compatible(waiter.mode, request.mode):
                return True
            # "but passes nobody whom the lingering hold keeps waiting"
            if lingers and not compatible(entry.mode, waiter.mode):
                return True
        return False

    def ahead(self, request, key):
        """Those who wait before it; for a newcomer everybody."""
        line = self.lines.get(key, [])
        return line[:line.index(request)] if request in line else list(line)

    def upgrade_place(self, key):
        """"ahead of everybody whom its shared hold already blocks". SEEN: and of those behind."""
        line = self.lines.get(key, [])
        if not self.rule("upgrade-first"):
            return len(line)
        for place, waiter in enumerate(line):
            if waiter.mode != SHARED:
                return place
        return len(line)

    def is_upgrade(self, request):
        if len(request.keys) != 1 or request.mode != EXCLUSIVE:
            return False
        key = request.keys[0]
        return self.live_hold(key, request.owner) is not None and self.entries[key].mode == SHARED

    def decide(self, request):
        """What becomes of the request now: "again", "grant" or "busy"; or Failed."""
        for key in request.keys:
            if isinstance(self.entries.get(key), Other):
                raise Failed("WRONGTYPE")
        # "6. A FLOOR that is too high, then a request that contradicts what the owner holds"
        if request.floor and not self.floor_allowed(request.floor):
            raise Failed("ERR")

        holds = [self.live_hold(key, request.owner) for key in request.keys]
        held = [hold for hold in holds if hold is not None]
        plain = [key for key in request.keys if self.is_plain_of(key, request.owner)]
        if plain and len(plain) == len(request.keys):
            return "grant"  # "all, plain strings: new token". SEEN: whoever waits already.
        if held or plain:
            # "One that holds only some of them, or under different tokens, gets an error"
            if len(held) != len(request.keys) or len({hold.token for hold in held}) != 1:
                raise Failed("ERR")
            modes = {self.entries[key].mode for key in request.keys}
            if modes == {SHARED} and request.mode == EXCLUSIVE and len(request.keys) == 1:
                return self.decide_upgrade(request)
            # The tables under Combinations.
            for mode in modes:
                if mode != request.mode and (mode, request.mode) != (EXCLUSIVE, SHARED):
                    raise Failed("ERR")
            return "again"

        for key in request.keys:
            ahead = self.ahead(request, key)
            if not self.fits(request, key, ahead):
                return "busy"
            # "While a line has such work left, a newcomer joins its end, and one that does not wait
            # is answered null": inside a transaction, between a release and the hand-over.
            if request not in self.waiting:
                for waiter in ahead:
                    if self.its_turn(waiter):
                        if len(waiter.keys) > 1:
                            raise Unclear  # the work may be left in another line of its
                        return "busy"
        return "grant"

    def its_turn(self, waiter):
        """Whether it is its turn to be answered."""
        ahead = {key: self.ahead(waiter, key) for key in waiter.keys}
        fits = all(self.fits(waiter, key, ahead[key]) for key in waiter.keys)
        holds = [key for key in waiter.keys
                 if self.live_hold(key, waiter.owner) or self.is_plain_of(key, waiter.owner)]
        broken = any(isinstance(self.entries.get(key), Other) for key in waiter.keys)
        if not holds and not broken:
            return fits
        # "If a stranger's command makes the owner a holder of a lock that it waits for, the waiter
        # is answered when its turn comes, as if it asked then: with its token, a new one or an
        # error. So too if the key is no lock any more"
        try:
            self.decide(waiter)
        except Failed:
            if not fits or any(ahead.values()):
                raise Unclear from None  # an error, but now or when all the locks are free?
            return True
        for key in holds:
            entry = self.entries[key]
            if isinstance(entry, Lock) and self.passes_somebody(waiter, key, ahead[key]):
                return False
            if ahead[key]:
                raise Unclear  # is it before those who wait for what it holds, or behind them?
        return True

    def decide_upgrade(self, request):
        # "gets it, under a new token, when it is the only holder and nobody waits who came before
        # it and whom its shared hold does not block"
        key = request.keys[0]
        others = [h for h in self.entries[key].holds if h.owner != request.owner and self.blocks(h)]
        line = self.lines.get(key, [])
        place = line.index(request) if request in line else self.upgrade_place(key)
        return "busy" if others or place > 0 else "grant"

    def carry_out(self, request, verdict, connection):
        """Writes the hold; the token."""
        session = connection if request.session else None
        end = self.now + request.lease
        if verdict == "again":
            token = None
            for key in request.keys:
                lock = self.entries[key]
                hold = self.live_hold(key, request.owner)
                downgrade = lock.mode == EXCLUSIVE and request.mode == SHARED
                lock.mode = request.mode
                # "Lease, linger and session binding become what the new call says."
                hold.end = end
                hold.linger = request.linger
                if session is not None or self.rule("binding-ends"):
                    hold.session = session
                if request.reentrant:
                    hold.count += 1  # "Each call of the owner counts one hold more"
                if hold.token < request.floor:
                    # "keeps its token if it is at least this, else its token becomes exactly this"
                    hold.token = request.floor + (0 if self.rule("floor-exact") else 1)
                    self.last_token = max(self.last_token, hold.token)
                elif not self.rule("same-token") or (
                        downgrade and not self.rule("downgrade-keeps")):
                    hold.token = self.new_token(0)
                token = hold.token
            return token

        token = self.new_token(request.floor)
        for key in request.keys:
            count = 1
            hold = self.live_hold(key, request.owner)
            if hold is not None:
                # "Upgrade and downgrade keep it": the count.
                count = hold.count + (1 if request.reentrant else 0)
            entry = self.entries.get(key)
            if not isinstance(entry, Lock):
                entry = self.entries[key] = Lock(request.mode)
            entry.mode = request.mode
            # "An owner has at most one hold on a lock."
            entry.holds = [h for h in entry.holds if h.owner != request.owner and self.blocks(h)]
            entry.holds.append(
                Hold(request.owner, token, end, request.linger, count, session, self.now))
        return token

    # --- Waiting --------------------------------------------------------------------------------

    def leave(self, request):
        self.waiting.remove(request)
        for key in request.keys:
            if request in self.lines[key]:
                self.lines[key].remove(request)
            if not self.lines[key]:
                del self.lines[key]

    def settle(self):
        """Hands over: "Locks that become free in the same moment serve their waiters in order of
        arrival over all of them"."""
        self.clean()
        changed = True
        while changed:
            changed = False
            order = sorted(self.waiting, key=lambda waiter: waiter.arrival,
                           reverse=not self.rule("arrival"))
            for request in order:
                # "when its turn comes"
                if not self.its_turn(request):
                    continue
                try:
                    verdict = self.decide(request)
                    if verdict == "busy":
                        continue
                    self.leave(request)
                    reply = self.carry_out(request, verdict, request.connection)
                except Failed as failed:
                    # "the waiter is answered when its turn comes, as if it asked then: with its
                    # token, a new one or an error. So too if the key is no lock any more"
                    self.leave(request)
                    reply = failed.error
                self.replies.append((request.connection, reply))
                changed = True

    def wait(self, request):
        # SEEN: a newer call that is answered at once leaves the waiting one alone, also if it has
        # WAIT and is granted. The page says so of refused ones and of those without WAIT only.
        older = self.overlapping(request)
        same = [w for w in older if set(w.keys) == set(request.keys) and w.mode == request.mode]
        if self.closes_cycle(request, older, same):
            raise Failed("DEADLOCK")

        request.since = self.now
        request.deadline = self.now + request.wait
        self.arrivals += 1
        request.arrival = (self.arrivals, 0)
        if same and self.rule("takes-over"):
            # "The same owner waiting twice for the same locks in the same mode: the newer call
            # takes over the place, the older is answered -UNBLOCKED."
            taken = same[0]
            request.arrival = taken.arrival
            self.waiting[self.waiting.index(taken)] = request
            for key in taken.keys:
                line = self.lines[key]
                line[line.index(taken)] = request
            self.replies.append((taken.connection, Error("UNBLOCKED")))
            return
        for waiter in older:
            # "the older is answered so too, and the newer goes to the end of the line"
            self.leave(waiter)
            self.replies.append((waiter.connection, Error("UNBLOCKED")))
        self.waiting.append(request)
        keys = request.keys if self.rule("place-in-every-line") else request.keys[:1]
        for key in keys:
            # "keeps its place in every line"
            place = len(self.lines.get(key, []))
            if self.is_upgrade(request):
                place = self.upgrade_place(key)
                if place < len(self.lines.get(key, [])):
                    # SEEN: served as if it had come just before those behind it.
                    number, before = self.lines[key][place].arrival
                    request.arrival = (number, before - 1)
            self.lines.setdefault(key, []).insert(place, request)
        for key in request.keys:
            self.lines.setdefault(key, [])

    def overlapping(self, request):
        """Waiting calls of the same owner for some of the same locks."""
        return [w for w in self.waiting
                if w.owner == request.owner and w is not request and set(w.keys) & set(request.keys)]

    # --- Deadlocks --------------------------------------------------------------------------------

    def owners_waited_for(self, request, key, ahead):
        """"An owner that waits for a lock waits for each other owner that holds this lock live, in
        a way that is not compatible with the request, and that stands before it in this line with
        a request that is not compatible with its own." """
        found = []
        entry = self.entries.get(key)
        if isinstance(entry, Plain):
            found.append(entry.value)  # "A plain string's value is its owner."
        if isinstance(entry, Lock):
            for hold in entry.holds:
                if not self.live(hold):
                    continue  # "Nobody waits for an owner whose hold only lingers"
                one = entry.mode == LIMIT and request.mode == LIMIT and request.n == 1
                # "a request with LIMIT 1 waits for every LIMIT holder"
                if (not compatible(entry.mode, request.mode)
                        or (one and self.rule("deadlock-limit-1"))
                        or (entry.mode == LIMIT and not self.rule("deadlock-limit"))):
                    found.append(hold.owner)
        for waiter in ahead:
            if not compatible(waiter.mode, request.mode) and self.rule("deadlock-queue"):
                found.append(waiter.owner)
        return [owner for owner in found if owner != request.owner]

    def closes_cycle(self, request, replaced, same):
        """"A wait is refused if by it its owner would wait for itself, over any number of steps;
        waits that the call would replace are not counted." """
        to_visit = []
        if same:
            # SEEN: its place counts, because the newer call takes it over.
            replaced = [waiter for waiter in replaced if waiter is not same[0]]
        for key in request.keys:
            line = self.lines.get(key, [])
            if same:
                line = line[:line.index(same[0])] if same[0] in line else line
            elif self.is_upgrade(request):
                line = line[:self.upgrade_place(key)]
            ahead = [waiter for waiter in line if waiter not in replaced]
            to_visit += self.owners_waited_for(request, key, ahead)
        visited = set()
        while to_visit:
            owner = to_visit.pop()
            if owner == request.owner:
                return True
            if owner in visited:
                continue
            visited.add(owner)
            for waiter in self.waiting:
                if waiter.owner != owner:
                    continue
                for key in waiter.keys:
                    ahead = [w for w in self.ahead(waiter, key) if w not in replaced]
                    to_visit += self.owners_waited_for(waiter, key, ahead)
        return False

    # --- Connections ------------------------------------------------------------------------------

    def connect(self, connection, db):
        self.db_of[connection] = db

    def is_blocked(self, connection):
        return any(waiter.connection == connection for waiter in self.waiting)

    def close(self, connection):
        """"A waiter leaves when its connection closes"; "The hold also ends when the connection
        that acquired it closes, at once and whatever its count"."""
        for waiter in list(self.waiting):
            if waiter.connection == connection:
                self.leave(waiter)
        if self.rule("session-ends"):
            for entry in self.entries.values():
                for hold in entry.holds if isinstance(entry, Lock) else []:
                    if hold.session == connection:
                        if self.live(hold):
                            # "If the hold ends without a release (its session closed), the lock
                            # stays closed for that many milliseconds more"
                            hold.ended = True
                            # SEEN: counted from the millisecond before.
                            hold.end = self.now - 1
                        hold.session = None
        del self.db_of[connection]
        self.settle()

    def unblock(self, connection, how):
        """CLIENT UNBLOCK: "TIMEOUT (null) or ERROR (-UNBLOCKED)"."""
        for waiter in list(self.waiting):
            if waiter.connection == connection:
                self.leave(waiter)
                self.replies.append(
                    (connection, None if how == "TIMEOUT" else Error("UNBLOCKED")))
                self.settle()
                return 1
        return 0

    # --- Commands ---------------------------------------------------------------------------------

    def command(self, connection, args, one_try=False, no_connection=False):
        """The reply to one command. `one_try`: inside MULTI, a script or after THEN.
        `no_connection`: inside a script or after THEN."""
        self.clean()
        name = args[0].upper()
        method = getattr(self, "do_" + name.lower().replace(".", "_"))
        self.one_try = one_try
        self.no_connection = no_connection
        try:
            return method(connection, self.db_of[connection], list(args[1:]))
        except Failed as failed:
            return failed.error

    def also(self, db, args):
        """key and the keys of ALSO, from the end of the options that are left in args."""
        if not args:
            raise Failed("ERR")
        count = integer(args.pop(0), 1, MAX_ALSO)
        if len(args) < count:
            raise Failed("ERR")
        keys = [(db, name) for name in args[:count]]
        del args[:count]
        return keys

    def check_owner(self, owner):
        if not 1 <= len(owner.encode()) <= MAX_OWNER:
            raise Failed("ERR")

    def check_distinct(self, keys):
        if len(set(keys)) != len(keys):
            raise Failed("ERR")  # "Naming a key twice is an error."

    def parse_acquire(self, connection, db, args):
        if len(args) < 2:
            raise Failed("ERR")
        request = Request()
        request.connection = connection
        request.keys = [(db, args.pop(0))]
        request.owner = args.pop(0)
        self.check_owner(request.owner)
        seen = set()
        while args:
            option = args.pop(0).upper()
            if option in seen:
                raise Failed("ERR")  # "an option that is repeated is an error"
            seen.add(option)
            if option in ("PX", "EX", "WAIT", "LIMIT", "LINGER", "FLOOR") and not args:
                raise Failed("ERR")
            if option == "PX":
                request.lease = integer(args.pop(0), 1, MAX_LEASE_MS)
            elif option == "EX":
                request.lease = integer(args.pop(0), 1, MAX_LEASE_MS // 1000) * 1000
            elif option == "WAIT":
                request.wait = integer(args.pop(0), 0, MAX_WAIT_MS)
            elif option == "SHARED":
                request.mode = SHARED
            elif option == "LIMIT":
                request.mode = LIMIT
                request.n = integer(args.pop(0), 1, MAX_LIMIT)
            elif option == "REENTRANT":
                request.reentrant = True
            elif option == "SESSION":
                request.session = True
            elif option == "LINGER":
                request.linger = integer(args.pop(0), 0, MAX_LEASE_MS)
            elif option == "FLOOR":
                request.floor = integer(args.pop(0), 1, MAX_TOKEN)
            elif option == "ALSO":
                request.keys += self.also(db, args)
            else:
                raise Failed("ERR")
        if {"PX", "EX"} <= seen or not {"PX", "EX"} & seen:
            raise Failed("ERR")
        if "LIMIT" in seen and {"SHARED", "REENTRANT"} & seen:
            raise Failed("ERR")
        self.check_distinct(request.keys)
        return request

    def do_lock_acquire(self, connection, db, args):
        request = self.parse_acquire(connection, db, args)
        if request.session and self.no_connection:
            raise Failed("ERR")  # "Inside scripts and functions, and after THEN, SESSION is an error"
        # "Inside MULTI, scripts and functions, and after THEN, a wait is one try."
        waits = request.wait > 0 and not self.one_try
        verdict = self.decide(request)
        if verdict == "busy":
            if not waits:
                return None
            self.wait(request)
            return BLOCKED
        return self.carry_out(request, verdict, connection)

    def parse_named(self, db, args, lease):
        """key owner [PX ms | EX s] [ALSO numkeys key ...]"""
        if len(args) < 2:
            raise Failed("ERR")
        keys, owner, time = [(db, args.pop(0))], args.pop(0), None
        self.check_owner(owner)
        seen = set()
        while args:
            option = args.pop(0).upper()
            if option in seen:
                raise Failed("ERR")
            seen.add(option)
            if option == "ALSO":
                keys += self.also(db, args)
            elif lease and option in ("PX", "EX") and args:
                unit = 1 if option == "PX" else 1000
                time = integer(args.pop(0), 1, MAX_LEASE_MS // unit) * unit
            else:
                raise Failed("ERR")
        if lease and (time is None or {"PX", "EX"} <= seen):
            raise Failed("ERR")
        self.check_distinct(keys)
        for key in keys:
            if isinstance(self.entries.get(key), Other):
                raise Failed("WRONGTYPE")
        return keys, owner, time

    def do_lock_release(self, connection, db, args):
        keys, owner, _ = self.parse_named(db, args, lease=False)
        waits = [w for w in self.waiting if w.owner == owner and set(w.keys) & set(keys)]
        if not self.rule("release-leaves"):
            waits = []
        released = 0
        for key in keys:
            hold = self.live_hold(key, owner)
            # "1: this owner held the lock, live, or waited for it."
            if hold or self.is_plain_of(key, owner) or any(key in w.keys for w in waits):
                released += 1
            if self.is_plain_of(key, owner):
                del self.entries[key]
            elif hold is not None and hold.count > 1 and self.rule("count"):
                hold.count -= 1  # "as many releases are needed, and each answers 1"
            elif isinstance(self.entries.get(key), Lock):
                # "a linger ends with this call"
                lock = self.entries[key]
                lock.holds = [h for h in lock.holds if h.owner != owner]
        for waiter in waits:
            # "The call that waits is answered -UNBLOCKED. A wait with ALSO ends in all its lines"
            self.leave(waiter)
            self.replies.append((waiter.connection, Error("UNBLOCKED")))
        self.clean()
        return released

    def do_lock_touch(self, connection, db, args):
        keys, owner, lease = self.parse_named(db, args, lease=True)
        touched = 0
        for key in keys:
            hold = self.live_hold(key, owner)
            if hold is not None:
                # "Sets the lease to end that long from now, which may be earlier than before."
                end = self.now + lease
                hold.end = end if self.rule("touch-from-now") else max(hold.end, end)
                touched += 1
            elif self.is_plain_of(key, owner):
                self.entries[key].end = self.now + lease
                touched += 1
        return touched

    def do_lock_fence(self, connection, db, args):
        if not args:
            raise Failed("ERR")
        key = (db, args.pop(0))
        token = None
        if args:
            # "THEN without a token is an error."
            token = integer(args.pop(0), 0, MAX_TOKEN)
        inner = None
        if args:
            if args.pop(0).upper() != "THEN" or not args:
                raise Failed("ERR")
            inner = args
            if (inner[0].upper() == "LOCK.FENCE" and len(inner) > 3
                    and inner[3].upper() == "THEN"):
                raise Failed("ERR")  # "Refused also for the holder: a THEN inside a THEN"
        entry = self.entries.get(key)
        if isinstance(entry, Other):
            raise Failed("WRONGTYPE")
        tokens = []
        if isinstance(entry, Lock):
            tokens = [hold.token for hold in entry.holds if self.live(hold)]
        if token is None:
            return max(tokens) if tokens else None
        if inner is None:
            return 1 if token in tokens else 0
        if token not in tokens:
            return Error("FENCED")
        return self.command(connection, inner, one_try=True, no_connection=True)

    # --- Strangers' commands ------------------------------------------------------------------------

    def do_set(self, connection, db, args):
        key = (db, args[0])
        options = [option.upper() for option in args[2:]]
        if "NX" in options and key in self.entries:
            return None
        end = self.now + int(args[2 + options.index("PX") + 1]) if "PX" in options else None
        self.entries[key] = Plain(args[1], end)
        return b"OK"

    def do_get(self, connection, db, args):
        entry = self.entries.get((db, args[0]))
        if entry is None:
            return None
        if not isinstance(entry, Plain):
            raise Failed("WRONGTYPE")
        return entry.value.encode()

    def do_incr(self, connection, db, args):
        entry = self.entries.get((db, args[0]))
        if entry is None:
            entry = self.entries[(db, args[0])] = Plain("0", None)
        if not isinstance(entry, Plain):
            raise Failed("WRONGTYPE")
        if not entry.value.isdigit():
            raise Failed("ERR")
        entry.value = str(int(entry.value) + 1)
        return int(entry.value)

    def do_rpush(self, connection, db, args):
        key = (db, args[0])
        if key not in self.entries:
            self.entries[key] = Other()
        if not isinstance(self.entries[key], Other):
            raise Failed("WRONGTYPE")
        self.entries[key].length += 1
        return self.entries[key].length

    def do_del(self, connection, db, args):
        """"DEL is an operator's forced release." """
        found = [key for key in {(db, name) for name in args} if key in self.entries]
        for key in found:
            del self.entries[key]
        return len(found)

    do_unlink = do_del

    def do_pexpire(self, connection, db, args):
        """"The leases inside the value decide: when EXPIRE, PERSIST or RESTORE change the TTL of a
        lock, the server sets it back at once." """
        entry = self.entries.get((db, args[0]))
        if entry is None:
            return 0
        if int(args[1]) <= 0:
            del self.entries[(db, args[0])]
        elif not isinstance(entry, Lock):
            entry.end = self.now + int(args[1])
        return 1

    def do_persist(self, connection, db, args):
        entry = self.entries.get((db, args[0]))
        if isinstance(entry, Lock):
            return 1
        if entry is None or entry.end is None:
            return 0
        entry.end = None
        return 1

    def unbind(self, entry):
        """"RENAME and MOVE take a lock along, but not its binding." """
        for hold in entry.holds if isinstance(entry, Lock) else []:
            hold.session = None

    def do_rename(self, connection, db, args):
        source, target = (db, args[0]), (db, args[1])
        if source not in self.entries:
            raise Failed("ERR")
        if source != target:
            self.entries[target] = self.entries.pop(source)
            self.unbind(self.entries[target])
        return b"OK"

    def do_move(self, connection, db, args):
        source, target = (db, args[0]), (int(args[1]), args[0])
        if source == target:
            raise Failed("ERR")
        if source not in self.entries or target in self.entries:
            return 0
        self.entries[target] = self.entries.pop(source)
        self.unbind(self.entries[target])
        return 1

    def do_swapdb(self, connection, db, args):
        pair = [int(args[0]), int(args[1])]
        swapped = {}
        for (index, name), entry in self.entries.items():
            if index in pair:
                index = pair[1 - pair.index(index)]
            swapped[(index, name)] = entry
        self.entries = swapped
        return b"OK"

    def do_flushdb(self, connection, db, args):
        for key in [key for key in self.entries if key[0] == db]:
            del self.entries[key]
        return b"OK"

    def do_flushall(self, connection, db, args):
        self.entries = {}
        return b"OK"

    # --- What can be seen ---------------------------------------------------------------------------

    def info(self, key):
        """The fields of LOCK.INFO that this model knows, or None."""
        entry = self.entries.get(key)
        line = self.lines.get(key, [])
        if isinstance(entry, Other):
            return Error("WRONGTYPE")
        holders, linger = [], 0
        if isinstance(entry, Plain):
            left = None if entry.end is None else entry.end - self.now
            holders = [(entry.value, None, left, None, 1, 0, 0, None)]
        elif isinstance(entry, Lock):
            # "Holds that have ended by this server's clock are left out."
            live = sorted((hold for hold in entry.holds if self.live(hold)),
                          key=lambda hold: (hold.token, hold.owner))
            for hold in live:
                holders.append((hold.owner, hold.token, hold.end - self.now,
                                self.now - hold.granted, hold.count,
                                int(hold.session is not None), hold.linger, hold.session))
            for hold in entry.holds:
                if not self.live(hold) and self.blocks(hold):
                    # "how long holds that have ended go on keeping others out; 0 if none does"
                    linger = max(linger, hold.until() - self.now)
        elif not line:
            return None
        mode = "plain" if isinstance(entry, Plain) else entry.mode if entry else line[0].mode
        waiters = [(w.owner, w.mode, self.now - w.since, w.deadline - self.now, w.connection)
                   for w in line]
        return {"mode": mode, "holding": len(holders), "holders": holders,
                "linger-left-ms": linger, "waiting": len(line), "waiters": waiters,
                "grace-left-ms": 0}

    def ttl(self, key):
        """"Its TTL is the latest end of its holds, linger included"."""
        entry = self.entries.get(key)
        if entry is None:
            return -2
        if isinstance(entry, Lock):
            return max(hold.until() for hold in entry.holds) - self.now
        return -1 if entry.end is None else entry.end - self.now

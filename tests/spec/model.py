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
    model.messages                      [Message] that somebody receives
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
MAX_LINE = 10000000
MAX_HOLD_MS = 31536000000
MAX_TAG = 64
MAX_CHANNEL = 256
MAX_ID = 64
MAX_WAITERS = 5000
MAX_QUEUED = 100000

# The texts that docs/commands.md gives in full.
SUPERSEDED = "UNBLOCKED replaced by a newer call of the same owner"
RELEASED = "UNBLOCKED cancelled by a LOCK.RELEASE of the same owner"
CLOSED = "UNBLOCKED the connection of this call closed"

# How many words follow an option.
WORDS_AFTER = {"PX": 1, "EX": 1, "WAIT": 1, "MAXLINE": 1, "LIMIT": 1, "WEIGHT": 1, "LINGER": 1,
               "MAXHOLD": 1, "TAG": 1, "NOTIFY": 2, "FLOOR": 1}

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
    "deadlock-limit-1": "a request whose weight is its n waits for every LIMIT holder",
    "deadlock-weight": "a request whose weight is its n, not only LIMIT 1",
    "takes-over": "the newer call takes over the place",
    "release-leaves": "a release ends this owner's wait",
    "arrival": "waiters are served in order of arrival over all locks",
    "place-in-every-line": "keeps its place in every line",
    "plain-owner": "a string key counts as a lock held by its value",
    "touch-from-now": "sets the lease to end that long from now",
    "weight": "the hold counts as w of the n",
    "weight-ahead": "the weights of the LIMIT requests that wait before it count",
    "weight-again": "another weight is an error",
    "line-full": "does not join a line in which n or more wait already",
    "line-full-own": "waits of the same owner that the call would replace are not counted",
    "line-full-place": "a call that only takes over its owner's place is never refused",
    "max-hold": "ends at most that long after its first grant",
    "max-hold-touch": "a TOUCH that would reach beyond the cap is cut to it",
    "max-hold-shorter": "the cap may become shorter, never longer",
    "max-hold-upgrade": "upgrade keeps the cap, and the time of the first grant",
    "tag-stays": "asking again leaves the tag as it is",
    "in-line": "the call never blocks, also inside MULTI, scripts and functions",
    "received": "if nobody received the message, nothing is written",
    "first-key": "the others once, with the first key",
    "timeout-told": "id timeout <key>",
    "lost-told": "the hold ended without a release: expired",
    "lost-forced": "the hold ended without a release: forced",
    "lost-session": "the hold ended without a release: session",
    "release-told": "a token that the call returns is not published, nor is a release",
    "wait-stays": "the wait belongs to the owner, not to the connection",
    "wait-ends": "with SESSION wait and hold end with the connection",
    "same-id": "with the same channel and id nothing is published for the older call",
    "channel-stays": "an ACQUIRE without NOTIFY leaves the channel bound to the hold",
    "channel-moves": "one with NOTIFY moves it",
    "counts-once": "where channel and id are bound already, REENTRANT does not count one more",
    "places": "one queue entry for each key of each wait",
    "the-word-also": "the word ALSO is no tag, channel or id",
}


class Error:
    """An error reply: the first word that it must have."""

    def __init__(self, *codes):
        self.codes = codes

    def __repr__(self):
        return "-" + " or ".join(self.codes)


class Message:
    """What is published. `text` is all of it or, if `begins`, how it begins; `other` is another
    text that would also be right."""

    def __init__(self, channel, text, begins=False, other=None, ends=None):
        self.channel = channel
        self.text = text
        self.begins = begins
        self.other = other
        self.ends = ends  # the call whose end it tells of

    def __repr__(self):
        return f"{self.channel}: {self.text}" + (" …" if self.begins else "")


class Unclear(Exception):
    """What should happen is nowhere said."""


class Failed(Exception):
    def __init__(self, *codes):
        self.error = Error(*codes)


class Hold:
    """One owner's hold on one lock. Times in milliseconds."""

    def __init__(self, owner, token, end, linger, count, session, granted, weight=1, cap=None,
                 tag=None, notify=None):
        self.owner = owner
        self.token = token
        self.end = end  # of the lease: "live while now is not later than the end of its lease"
        self.linger = linger
        self.count = count
        self.session = session  # a connection, or None
        self.granted = granted  # for the first time
        self.weight = weight
        self.cap = cap  # of MAXHOLD: the last moment at which the lease can end, or None
        self.tag = tag
        self.notify = notify  # (channel, id), or None
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
        self.weight = 1
        self.max_line = None
        self.max_hold = None
        self.tag = None
        self.notify = None  # (channel, id)
        # While it waits:
        self.arrival = None
        self.since = None
        self.deadline = None

    def blocks_client(self):
        return self.notify is None

    def bound_to(self):
        """The connection with which the wait ends, or None. "The wait belongs to the owner, not to
        the connection"; "With SESSION wait and hold end with the connection"."""
        return self.connection if self.blocks_client() or self.session else None


def compatible(a, b):
    """Modes alone: whether a limit has room for both is another question."""
    return a == b and a != EXCLUSIVE


def printable(text, most, lowest):
    """"1 to 64 printable ASCII bytes"; `lowest` is the space, or what comes after it."""
    data = text.encode()
    if not 1 <= len(data) <= most or any(not lowest <= byte <= 0x7e for byte in data):
        raise Failed("ERR")


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
        self.messages = []
        self.subscribed = lambda channel: False  # whether anybody receives what is published to it
        self.undelivered = 0
        self.rejected_line_full = 0
        self.max_waiters = MAX_WAITERS
        self.max_queued = MAX_QUEUED
        self.max_waiters_per_user = 0
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
                self.answer(request, None)
        self.clean()
        self.settle()

    def last_milliseconds(self):
        """Of all keys: "Its TTL is the latest end of its holds, linger included"."""
        return {self.now + self.ttl(key) for key in self.entries if self.ttl(key) >= 0}

    def clean(self):
        """Drops what nobody can see any more: "The key exists only while held or lingers"."""
        for key, entry in list(self.entries.items()):
            if isinstance(entry, Lock):
                for hold in entry.holds:
                    # "comes within milliseconds of the end of the lease, with LINGER too, and also
                    # when nobody waits"
                    if not self.live(hold) and self.rule("lost-told"):
                        self.lose(key, hold, "expired")
                entry.holds = [hold for hold in entry.holds if self.blocks(hold)]
                if not entry.holds:
                    del self.entries[key]
            elif entry.end is not None and self.now > entry.end:
                del self.entries[key]

    # --- Messages -----------------------------------------------------------------------------

    def publish(self, notify, text, begins=False, other=None, ends=None):
        """Whether somebody received it."""
        channel, name = notify
        if not self.subscribed(channel):
            return False
        if other is not None:
            other = f"{name} {other}"
        self.messages.append(Message(channel, f"{name} {text}", begins, other, ends))
        return True

    def answer(self, request, reply, text=None):
        """The end of a wait without the lock: null or an error; `text` is that of the error, where
        the page gives it."""
        if request.blocks_client():
            self.replies.append((request.connection, reply))
        elif reply is None:
            if self.rule("timeout-told"):
                self.publish(request.notify, f"timeout {self.first_key(request)}")
        elif text is not None:
            self.publish(request.notify, f"error {text}", ends=request)
        else:
            self.publish(request.notify, f"error {reply.codes[0]} ", begins=True, ends=request)

    def first_key(self, request):
        """"the others once, with the first key"."""
        return request.keys[0 if self.rule("first-key") else -1][1]

    def lose(self, key, hold, reason):
        """"id lost <token> <reason> <key>: the hold ended without a release"."""
        if hold.notify is not None:
            # SEEN: a key that goes in the last millisecond of the lease may count as expired.
            other = f"lost {hold.token} expired {key[1]}" if hold.end == self.now else None
            self.publish(hold.notify, f"lost {hold.token} {reason} {key[1]}", other=other)
            hold.notify = None

    def remove(self, key, reason="forced"):
        """A stranger takes the key away."""
        entry = self.entries.pop(key)
        if isinstance(entry, Lock):
            for hold in entry.holds:
                if self.rule("lost-forced"):
                    self.lose(key, hold, reason)

    # --- Tokens -------------------------------------------------------------------------------

    def new_token(self, floor):
        # "A new one is larger than every token this lock was held under before"; "A new token is at
        # least this one". Over all, from docs/guarantees.md: max(last token + 1, wall clock in µs).
        return max(self.last_token + 1, self.now_us, floor)

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
            # "The request fits if the weights of the holders (lingering ones too), of the LIMIT
            # requests that wait before it and its own together are at most the smallest n among
            # those requests and itself"
            smallest = min([request.n] + [waiter.n for waiter in ahead])
            if not self.rule("smallest-n"):
                smallest = request.n
            weights = [hold.weight for hold in others] + [request.weight]
            if self.rule("weight-ahead"):
                weights += [waiter.weight for waiter in ahead]
            else:
                weights += [1] * len(ahead)
            return (sum(weights) if self.rule("weight") else len(weights)) <= smallest
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
            # "but passes nobody whom the lingering hold keeps waiting": because of its mode, or
            # because of its weight
            if lingers and (not compatible(entry.mode, waiter.mode)
                            or not self.fits(waiter, key, self.ahead(waiter, key))):
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
            # "Asking again needs the weight of the hold, and without WEIGHT means 1"
            if self.rule("weight-again") and any(h.weight != request.weight for h in held):
                raise Failed("ERR")
            return "again"

        for key in request.keys:
            ahead = self.ahead(request, key)
            if not self.fits(request, key, ahead):
                return "busy"
            # "While a line has such work left, a new request joins its end, and one without WAIT
            # gets null": inside a transaction, between a release and the hand-over.
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
        # "If another client's command makes the owner a holder of a lock it waits for, the waiter
        # is answered when its turn comes, as if it asked then: with its token, a new one or an
        # error. The same applies if the key is no longer a lock"
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

    def carry_out(self, request, verdict, connection, published=False):
        """Writes the hold; the token. If `published`, tells it first, and writes nothing if nobody
        received it: then None."""
        session = connection if request.session else None
        holds = [self.live_hold(key, request.owner) for key in request.keys]
        if verdict == "again":
            token = holds[0].token
            downgrade = request.mode == SHARED and self.entries[request.keys[0]].mode == EXCLUSIVE
            if token < request.floor:
                # "keeps its token if it is at least this, else its token becomes exactly this"
                token = request.floor + (0 if self.rule("floor-exact") else 1)
            elif not self.rule("same-token") or (downgrade and not self.rule("downgrade-keeps")):
                token = self.last_token + 1
        else:
            token = self.new_token(request.floor)
        if published:
            # "After all checks a grant is first published, then written. If nobody received the
            # message, nothing is written: the wait ends in all its lines, those behind it move up"
            told = self.publish(request.notify, f"granted {token} {self.first_key(request)}")
            if not told and self.rule("received"):
                self.undelivered += 1
                return None  # SEEN: the next grant may get the token that nobody was told of
        self.last_token = max(self.last_token, token)

        for key, hold in zip(request.keys, holds):
            if hold is None:
                # "a new hold without the cap, tag and channel of the old one"
                hold = Hold(request.owner, token, None, 0, 0, None, self.now, request.weight)
                count = 1
            else:
                # "Each call of the owner adds one to the count of its hold"; "Asking again without
                # REENTRANT leaves the count as it is. Upgrade and downgrade keep it."; "Where that channel
                # and id are bound to the hold already, REENTRANT does not count one more."
                again = request.notify is not None and request.notify == hold.notify
                again = again and self.rule("counts-once")
                count = hold.count + (1 if request.reentrant and not again else 0)
                if verdict != "again" and not self.rule("max-hold-upgrade"):
                    hold.granted, hold.cap = self.now, None
            entry = self.entries.get(key)
            if not isinstance(entry, Lock):
                entry = self.entries[key] = Lock(request.mode)
            entry.mode = request.mode
            # "An owner has at most one hold on a lock."
            entry.holds = [h for h in entry.holds if h.owner != request.owner and self.blocks(h)]
            entry.holds.append(hold)
            hold.token = token
            hold.count = count
            # "Lease, linger and session binding become what the new call says"
            hold.linger = request.linger
            if session is not None or self.rule("binding-ends"):
                hold.session = session
            if request.tag is not None or not self.rule("tag-stays"):
                hold.tag = request.tag  # "leaves the tag as it is, or with TAG replaces it"
            if request.notify is None:
                # "leaves the channel bound to the hold; one with NOTIFY moves it"
                hold.notify = hold.notify if self.rule("channel-stays") else None
            elif hold.notify is None or self.rule("channel-moves"):
                hold.notify = request.notify
            if request.max_hold is not None:
                # "becomes the earlier of the old cap and the first grant plus ms"
                cap = hold.granted + request.max_hold
                if hold.cap is None or cap < hold.cap or not self.rule("max-hold-shorter"):
                    hold.cap = cap
            hold.end = self.now + request.lease
            if hold.cap is not None and self.rule("max-hold"):
                # "If that is in the past, the lease ends now"
                hold.end = max(self.now, min(hold.end, hold.cap))
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
                    told = not request.blocks_client()
                    token = self.carry_out(request, verdict, request.connection, published=told)
                    if request.blocks_client():
                        self.replies.append((request.connection, token))
                except Failed as failed:
                    # "the waiter is answered when its turn comes, as if it asked then: with its
                    # token, a new one or an error. The same applies if the key is no longer a lock"
                    self.leave(request)
                    self.answer(request, failed.error)
                changed = True

    def wait(self, request):
        # SEEN: a newer call that is answered at once leaves the waiting one alone, also if it has
        # WAIT and is granted. The page says so of refused ones and of those without WAIT only.
        older = self.overlapping(request)
        same = [w for w in older if set(w.keys) == set(request.keys) and w.mode == request.mode]
        # "a line that is too long for MAXLINE (null), then WAITLIMIT, then DEADLOCK"
        if self.line_is_full(request, older, same):
            self.rejected_line_full += 1
            return None
        if self.too_many_wait(request, older):
            raise Failed("WAITLIMIT")
        if self.closes_cycle(request, older, same):
            raise Failed("DEADLOCK")

        request.since = self.now
        request.deadline = self.now + request.wait
        self.arrivals += 1
        request.arrival = (self.arrivals, 0)
        if same and self.rule("takes-over"):
            # "The same owner waiting twice for the same locks in the same mode: the newer call
            # takes over the place in the line, and the older one gets -UNBLOCKED."
            taken = same[0]
            request.arrival = taken.arrival
            self.waiting[self.waiting.index(taken)] = request
            for key in taken.keys:
                line = self.lines[key]
                line[line.index(taken)] = request
            self.supersede(taken, request)
            return self.in_line(request)
        for waiter in older:
            # "the older one gets -UNBLOCKED too, but the newer one goes to the end of the line"
            self.leave(waiter)
            self.supersede(waiter, request)
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
        return self.in_line(request)

    def in_line(self, request):
        """"With WAIT, where it would have to wait, it answers 0"."""
        return BLOCKED if request.blocks_client() else 0

    def supersede(self, older, newer):
        # "With the same channel and id nothing is published for the older call"
        if older.notify is None or older.notify != newer.notify or not self.rule("same-id"):
            self.answer(older, Error("UNBLOCKED"), SUPERSEDED)

    def line_is_full(self, request, replaced, same):
        """"the call does not join a line in which n or more wait already"; "With ALSO, one line
        that is too long is enough"."""
        if request.max_line is None or not self.rule("line-full"):
            return False
        if same and self.rule("line-full-place"):
            return False  # "a call that only takes over its owner's place is never refused"
        if not self.rule("line-full-own"):
            replaced = []
        return any(len([w for w in self.lines.get(key, []) if w not in replaced])
                   >= request.max_line for key in request.keys)

    def too_many_wait(self, request, replaced):
        """"Waits that the call would replace do not count"."""
        others = [waiter for waiter in self.waiting if waiter not in replaced]
        # "waits of both kinds"; here all belong to one user
        if 0 < self.max_waiters_per_user <= len(others):
            return True
        if request.blocks_client():
            return len([w for w in others if w.blocks_client()]) + 1 > self.max_waiters
        # "queue entries, one for each key of each wait"
        places = [len(w.keys) for w in [*others, request] if not w.blocks_client()]
        return (sum(places) if self.rule("places") else len(places)) > self.max_queued

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
                # "a request whose weight is its n (LIMIT 1, or LIMIT 3 WEIGHT 3) waits for every
                # LIMIT holder"
                one = (entry.mode == LIMIT and request.mode == LIMIT
                       and request.weight == request.n
                       and (request.n == 1 or self.rule("deadlock-weight")))
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
        return any(waiter.blocks_client() and waiter.connection == connection
                   for waiter in self.waiting)

    def close(self, connection):
        """"A waiter leaves when its connection closes"; "The hold also ends when the connection
        that acquired it closes, at once and whatever its count"."""
        for waiter in list(self.waiting):
            bound = waiter.bound_to()
            if not waiter.blocks_client() and not self.rule(
                    "wait-ends" if waiter.session else "wait-stays"):
                bound = None if waiter.session else waiter.connection
            if bound == connection:
                self.leave(waiter)
                if not waiter.blocks_client():
                    self.answer(waiter, Error("UNBLOCKED"), CLOSED)
        if self.rule("session-ends"):
            for key, entry in self.entries.items():
                for hold in entry.holds if isinstance(entry, Lock) else []:
                    if hold.session == connection:
                        if self.live(hold):
                            if self.rule("lost-session"):
                                self.lose(key, hold, "session")
                            # "If the hold ends without a release (its session closed), the lock
                            # stays closed for that many milliseconds more"
                            hold.ended = True
                            # SEEN: counted from the millisecond before.
                            hold.end = self.now - 1
                        hold.session = None
        del self.db_of[connection]
        self.settle()

    def unblock(self, connection, how):
        """CLIENT UNBLOCK: "TIMEOUT (null) or ERROR (-UNBLOCKED)"; with NOTIFY "CLIENT UNBLOCK does
        not end it"."""
        for waiter in list(self.waiting):
            if waiter.blocks_client() and waiter.connection == connection:
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

    def check_word(self, *words):
        # "The word ALSO, in whatever case, is no tag, channel or id: it is an error there"
        if "ALSO" in [word.upper() for word in words] and self.rule("the-word-also"):
            raise Failed("ERR")

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
            if len(args) < WORDS_AFTER.get(option, 0):
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
            elif option == "MAXLINE":
                request.max_line = integer(args.pop(0), 1, MAX_LINE)
            elif option == "WEIGHT":
                request.weight = integer(args.pop(0), 1, MAX_LIMIT)
            elif option == "MAXHOLD":
                request.max_hold = integer(args.pop(0), 1, MAX_HOLD_MS)
            elif option == "TAG":
                request.tag = args.pop(0)
                printable(request.tag, MAX_TAG, 0x20)
                self.check_word(request.tag)
            elif option == "NOTIFY":
                request.notify = (args.pop(0), args.pop(0))
                if not 1 <= len(request.notify[0].encode()) <= MAX_CHANNEL:
                    raise Failed("ERR")
                printable(request.notify[1], MAX_ID, 0x21)
                self.check_word(*request.notify)
            elif option == "ALSO":
                request.keys += self.also(db, args)
            else:
                raise Failed("ERR")
        if {"PX", "EX"} <= seen or not {"PX", "EX"} & seen:
            raise Failed("ERR")
        if "LIMIT" in seen and {"SHARED", "REENTRANT"} & seen:
            raise Failed("ERR")
        # "MAXLINE requires WAIT, and WEIGHT requires LIMIT (an error otherwise)"; "1 to n"
        if "MAXLINE" in seen and "WAIT" not in seen:
            raise Failed("ERR")
        if "WEIGHT" in seen and (request.mode != LIMIT or request.weight > request.n):
            raise Failed("ERR")
        # "the lease to 31536000000"
        if request.max_hold is not None and request.max_hold < request.lease:
            raise Failed("ERR")
        self.check_distinct(request.keys)
        return request

    def do_lock_acquire(self, connection, db, args):
        request = self.parse_acquire(connection, db, args)
        if request.session and self.no_connection:
            raise Failed("ERR")  # "Inside scripts and functions, and after THEN, SESSION is an error"
        # "Inside MULTI, scripts and functions, and after THEN, a wait is a single attempt", but for
        # NOTIFY
        waits = request.wait > 0 and not self.one_try
        if request.notify is not None and self.rule("in-line"):
            waits = request.wait > 0
        verdict = self.decide(request)
        if verdict == "busy":
            reply = self.wait(request) if waits else None
        else:
            reply = self.carry_out(request, verdict, connection)
        if reply is not None:
            self.retract(request)
        return reply

    def retract(self, newer):
        """"With the same channel and id nothing is published for the older call", "also if it ended
        earlier in the same transaction"."""
        if newer.notify is not None and self.rule("same-id"):
            self.messages = [message for message in self.messages if message.ends is None or
                             (message.ends.owner, message.ends.notify) != (newer.owner, newer.notify)]

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
                if hold is not None and not self.rule("release-told"):
                    self.lose(key, hold, "forced")
                lock.holds = [h for h in lock.holds if h.owner != owner]
        for waiter in waits:
            # "The call that waits is answered -UNBLOCKED. A wait with ALSO ends in all its lines"
            self.leave(waiter)
            self.answer(waiter, Error("UNBLOCKED"), RELEASED)
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
                if hold.cap is not None and self.rule("max-hold-touch"):
                    # "but at most at the cap of MAXHOLD", which may be just over
                    end = max(self.now, min(end, hold.cap))
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
        if key in self.entries:
            self.remove(key)
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
            self.remove(key)
        return len(found)

    do_unlink = do_del

    def do_pexpire(self, connection, db, args):
        """"The leases inside the value decide: when EXPIRE, PERSIST or RESTORE change the TTL of a
        lock, the server sets it back at once." """
        entry = self.entries.get((db, args[0]))
        if entry is None:
            return 0
        if int(args[1]) <= 0:
            self.remove((db, args[0]))
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

    def carry(self, source, target):
        """"RENAME and MOVE take a lock along, but not its binding"; "its holders are told lost …
        forced"."""
        entry = self.entries[source]
        self.remove(source)
        holds = entry.holds if isinstance(entry, Lock) else []
        # "A hold that is removed and is back at once under its token is not lost and stays bound":
        # the other lock was taken together with this one.
        back = {(hold.owner, hold.token) for hold in holds if self.live(hold)}
        bound = {}
        if isinstance(self.entries.get(target), Lock):
            for hold in self.entries[target].holds:
                if (hold.owner, hold.token) in back:
                    bound[hold.owner] = hold.notify
                    hold.notify = None
        if target in self.entries:
            self.remove(target)
        self.entries[target] = entry
        for hold in holds:
            hold.session = None
            hold.notify = bound.get(hold.owner)

    def do_rename(self, connection, db, args):
        source, target = (db, args[0]), (db, args[1])
        if source not in self.entries:
            raise Failed("ERR")
        if source != target:
            self.carry(source, target)
        return b"OK"

    def do_move(self, connection, db, args):
        source, target = (db, args[0]), (int(args[1]), args[0])
        if source == target:
            raise Failed("ERR")
        if source not in self.entries or target in self.entries:
            return 0
        self.carry(source, target)
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
            self.remove(key, "flushed")
        return b"OK"

    def do_flushall(self, connection, db, args):
        for key in list(self.entries):
            self.remove(key, "flushed")
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
            holders = [(entry.value, None, left, None, 1, 0, 0, 1, None, None, None)]
        elif isinstance(entry, Lock):
            # "Holds that have ended by this server's clock are left out."
            live = sorted((hold for hold in entry.holds if self.live(hold)),
                          key=lambda hold: (hold.token, hold.owner))
            for hold in live:
                holders.append((hold.owner, hold.token, hold.end - self.now,
                                self.now - hold.granted, hold.count,
                                int(hold.session is not None), hold.linger, hold.weight, hold.tag,
                                None if hold.cap is None else max(0, hold.cap - self.now),
                                hold.session))
            for hold in entry.holds:
                if not self.live(hold) and self.blocks(hold):
                    # "how long holds that have ended go on keeping others out; 0 if none does"
                    linger = max(linger, hold.until() - self.now)
        elif not line:
            return None
        mode = "plain" if isinstance(entry, Plain) else entry.mode if entry else line[0].mode
        waiters = [(w.owner, w.mode, self.now - w.since, w.deadline - self.now, w.tag,
                    w.bound_to()) for w in line]
        return {"mode": mode, "holding": len(holders), "holders": holders,
                "linger-left-ms": linger, "waiting": len(line), "waiters": waiters,
                "grace-left-ms": 0}

    def counts(self):
        """The fields of INFO turnstile that this model knows; they are in docs/operations.md."""
        queued = [len(w.keys) for w in self.waiting if not w.blocks_client()]
        return {"waiters": len(self.waiting) - len(queued), "queued": sum(queued),
                "undelivered": self.undelivered, "rejected_line_full": self.rejected_line_full}

    def ttl(self, key):
        """"Its TTL is the latest end of its holds, linger included"."""
        entry = self.entries.get(key)
        if entry is None:
            return -2
        if isinstance(entry, Lock):
            return max(hold.until() for hold in entry.holds) - self.now
        return -1 if entry.end is None else entry.end - self.now

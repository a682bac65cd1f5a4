"""Random steps, biased towards what is interesting in the model's present state."""

import model as spec
from driver import CHANNELS, CONNECTIONS, NAMES

OWNERS = ["A", "B", "C", "D", "E", "F", "G", "H"]
TAGS = ["web-1", "web-2", "two words", "t" * 64, " ~", "WAIT"]

# Ends of LOCK.ACQUIRE key owner PX 1000 …: what is just wrong, and what is just right.
DETAILS = [
    ["NOTIFY", "c0", ""], ["NOTIFY", "c0", "a b"], ["NOTIFY", "c0", "i" * 65], ["NOTIFY", "c0"],
    ["NOTIFY", "c0", "i" * 64], ["NOTIFY", "c0", "\x7f"], ["NOTIFY", "c0", "é"],
    ["NOTIFY", "c0", "a\n"], ["NOTIFY", "", "i"], ["NOTIFY", "c" * 257, "i"],
    ["NOTIFY", "c" * 256, "i"], ["NOTIFY", "c 0\n", "~"], ["NOTIFY", "also", "i"],
    ["NOTIFY", "c0", "ALSO"], ["NOTIFY", "c0", "Also"], ["NOTIFY", "WAIT", "PX"],
    ["NOTIFY", "c0", "i", "NOTIFY", "c0", "i"], ["NOTIFY"],
    ["WEIGHT", "1"], ["LIMIT", "3", "WEIGHT", "0"], ["LIMIT", "3", "WEIGHT", "4"],
    ["WEIGHT", "3", "LIMIT", "3"], ["LIMIT", "3", "WEIGHT"], ["LIMIT", "3", "WEIGHT", "01"],
    ["SHARED", "WEIGHT", "1"], ["REENTRANT", "WEIGHT", "1"], ["LIMIT", "3", "WEIGHT", "-1"],
    ["WEIGHT", "100000", "LIMIT", "100000"], ["WEIGHT", "100001", "LIMIT", "100000"],
    ["WEIGHT", "1", "LIMIT", "3", "WEIGHT", "1"], ["WEIGHT", "18446744073709551617", "LIMIT", "3"],
    ["MAXLINE", "1"], ["MAXLINE", "0", "WAIT", "50"], ["MAXLINE", "10000000", "WAIT", "0"],
    ["WAIT", "50", "MAXLINE", "10000001"], ["WAIT", "50", "MAXLINE"], ["MAXLINE", "-1", "WAIT", "0"],
    ["WAIT", "0", "MAXLINE", "2", "MAXLINE", "2"],
    ["MAXHOLD", "0"], ["MAXHOLD", "999"], ["MAXHOLD", "1000"], ["MAXHOLD", "1000000000000000000"],
    ["MAXHOLD", "31536000000"], ["MAXHOLD", "31536000001"], ["MAXHOLD"], ["MAXHOLD", "1e9"],
    ["MAXHOLD", "5000", "MAXHOLD", "5000"], ["MAXHOLD", "18446744073709552616"],
    ["TAG", ""], ["TAG", "a\nb"], ["TAG", "t" * 65], ["TAG", "\x7f"], ["TAG", "é"], ["TAG"],
    ["TAG", "ALSO"], ["TAG", "aLsO"], ["TAG", "a", "TAG", "a"], ["TAG", "ALSO", "ALSO", "1", "v"],
    ["TAG", " "], ["TAG", "~"],
]


class Generator:
    """The steps of one episode. Each has a character of its own: few keys, many limits, and so on."""

    def __init__(self, rng):
        self.rng = rng
        self.owners = OWNERS[:rng.choice([3, 4, 6, 8])]
        self.keys = rng.choice([1, 2, 3, 4])
        self.modes = rng.choice([(45, 30, 25), (80, 10, 10), (20, 70, 10), (10, 10, 80),
                                 (34, 33, 33), (50, 50, 0)])
        self.also = rng.choice([0.0, 0.2, 0.5])
        self.wait = rng.choice([0.3, 0.6, 0.9])
        self.linger = rng.choice([0.0, 0.1, 0.5])
        self.session = rng.choice([0.0, 0.15, 0.5])
        self.strangers = rng.choice([0, 1, 1, 4])
        self.notify = rng.choice([0.0, 0.2, 0.5, 0.95])
        self.weight = rng.choice([0.0, 0.5, 0.9])
        self.max_hold = rng.choice([0.0, 0.1, 0.5])
        self.max_line = rng.choice([0.0, 0.2, 0.7])
        self.tag = rng.choice([0.0, 0.3])
        # How often each channel is taken; most are subscribed to.
        self.channels = rng.choice([(6, 2, 1, 2), (1, 0, 0, 0), (3, 3, 3, 3)])
        self.setting = None
        if self.chance(0.1):
            self.setting = rng.choice([("max-queued", rng.choice([1, 2, 4])),
                                       ("max-waiters", rng.choice([1, 2])),
                                       ("max-waiters-per-user", rng.choice([1, 3]))])
        self.leases = rng.choice([[20, 60, 200], [100, 400, 2000], [1000, 10000, 60000],
                                  [20, 300, 60000]])
        self.waits = rng.choice([[20, 60, 200], [100, 400, 2000], [5000, 20000]])
        if self.chance(0.25):
            # Deadlocks need a few owners that hold for long and wait for long.
            self.owners = OWNERS[:4]
            self.keys = 3
            self.wait = 0.8
            self.strangers = 0
            self.linger = 0.0
            self.leases = [10000, 60000]
            self.waits = [20000]

    def chance(self, probability):
        return self.rng.random() < probability

    def name(self, db):
        names = NAMES[db]
        return names[min(self.rng.randrange(self.keys), len(names) - 1)]

    def owner(self):
        return self.rng.choice(self.owners)

    def milliseconds(self, choices):
        return str(self.rng.choice(choices) + self.rng.randrange(1, 20))

    def next(self, model):
        if self.setting is not None:
            setting, self.setting = self.setting, None
            return ("config", *setting)
        free = [n for n in range(CONNECTIONS) if not model.is_blocked(n)]
        rng = self.rng
        if not free:
            return rng.choice([("advance", self.time(model)),
                               ("close", rng.randrange(CONNECTIONS)),
                               ("unblock", rng.randrange(CONNECTIONS), "TIMEOUT")])
        number = rng.choice(free)
        db = model.db_of[number]
        kind = rng.choices(
            ["acquire", "release", "touch", "fence", "advance", "close", "unblock", "stranger",
             "multi", "eval", "mistake", "subscribe"],
            [45, 14, 5, 6, 14, 2.5, 2, 5 * self.strangers, 2, 2, 1.5, 1.5 * (self.notify > 0)])[0]
        if kind == "advance":
            return ("advance", self.time(model))
        if kind == "close":
            return ("close", rng.randrange(CONNECTIONS))
        if kind == "unblock":
            return ("unblock", rng.randrange(CONNECTIONS), rng.choice(["TIMEOUT", "ERROR"]))
        if kind == "subscribe":
            # The first two are subscribed to more often than not.
            channel = rng.choice(CHANNELS)
            return ("subscribe", channel, self.chance(0.8 if channel in CHANNELS[:2] else 0.3))
        if kind == "multi":
            return ("multi", number,
                    [self.command(db) for _ in range(rng.choice([1, 1, 2, 2, 3]))])
        if kind == "eval":
            return ("eval", number, self.command(db))
        return ("call", number, getattr(self, kind)(db))

    def command(self, db):
        kind = self.rng.choices(["acquire", "release", "touch", "fence"], [5, 2, 1, 1])[0]
        return getattr(self, kind)(db)

    def time(self, model):
        """Microseconds; whole milliseconds, and rarely more than it takes for something to end."""
        rng = self.rng
        moments = sorted({moment for moment, _ in model.moments() if moment > model.now})
        if moments and self.chance(0.5):
            moment = moments[0] if self.chance(0.7) else rng.choice(moments)
            # One millisecond early is the last at which a hold is live.
            return max(1, min(moment - model.now - self.chance(0.4), 70000)) * 1000
        return rng.choice([1, 2, 10, 50, 200, 200, 1000, 3000]) * 1000 * rng.randrange(1, 4)

    def others(self, db, name):
        names = [other for other in NAMES[db] if other != name]
        return self.rng.sample(names, self.rng.choice([1, 1, min(2, len(names))]))

    def acquire(self, db):
        rng = self.rng
        name = self.name(db)
        owner = self.owner()
        lease = rng.choice(self.leases) + rng.randrange(1, 20)
        options = [["PX", str(lease)]]
        if self.chance(0.05):
            seconds = rng.randrange(1, 5)
            lease = seconds * 1000
            options = [["EX", str(seconds)]]
        waits = self.chance(self.wait)
        if waits:
            options.append(["WAIT", self.milliseconds(self.waits)])
        elif self.chance(0.1):
            options.append(["WAIT", "0"])
        if waits and self.chance(self.max_line):
            options.append(["MAXLINE", str(rng.choice([1, 1, 2, 3]))])
        mode = rng.choices(["", "SHARED", "LIMIT"], self.modes)[0]
        if mode == "SHARED":
            options.append(["SHARED"])
        if mode == "LIMIT":
            weighs = self.chance(self.weight)
            limit = rng.choice([1, 2, 3, 4, 5, 5] if weighs else [1, 1, 2, 2, 3, 5])
            options.append(["LIMIT", str(limit)])
            if weighs:
                # Mostly the same for the same owner, which has to ask again with its weight.
                usual = min(limit, 1 + self.owners.index(owner) % 3)
                options.append(["WEIGHT", str(usual if self.chance(0.7)
                                              else rng.randrange(1, limit + 1))])
        elif self.chance(0.15):
            options.append(["REENTRANT"])
        if self.chance(self.session):
            options.append(["SESSION"])
        if self.chance(self.linger):
            options.append(["LINGER", self.milliseconds([10, 100, 500])])
        if self.chance(self.max_hold):
            options.append(["MAXHOLD", str(lease + rng.choice([0, 0, 1, 30, 300, 5000]))])
        if self.chance(self.tag):
            options.append(["TAG", rng.choice(TAGS)])
        if self.chance(self.notify):
            channel = rng.choices(CHANNELS, self.channels)[0]
            options.append(["NOTIFY", channel, owner + rng.choice(["1", "1", "1", "2"])])
        if self.chance(0.06):
            base = rng.choice(["last", "last", "wall", "half", "start"])
            options.append(["FLOOR", ("floor", base, rng.choice([-1, 0, 1, 2, 1000]))])
        if self.chance(self.also):
            others = self.others(db, name)
            options.append(["ALSO", str(len(others)), *others])
        rng.shuffle(options)
        return ("LOCK.ACQUIRE", name, owner, *[part for option in options for part in option])

    def release(self, db):
        name = self.name(db)
        args = ["LOCK.RELEASE", name, self.owner()]
        if self.chance(self.also):
            others = self.others(db, name)
            args += ["ALSO", str(len(others)), *others]
        return tuple(args)

    def touch(self, db):
        name = self.name(db)
        options = [["PX", self.milliseconds(self.leases)]]
        if self.chance(self.also):
            others = self.others(db, name)
            options.append(["ALSO", str(len(others)), *others])
        self.rng.shuffle(options)
        return ("LOCK.TOUCH", name, self.owner(), *[part for option in options for part in option])

    def fence(self, db, then=True):
        name = self.name(db)
        if self.chance(0.3):
            return ("LOCK.FENCE", name)
        token = ("token", (db, name), self.rng.randrange(4), self.rng.choice([0, 0, 0, -1, 1]))
        if not then or self.chance(0.5):
            return ("LOCK.FENCE", name, token)
        inner = self.rng.choice([
            lambda: ("INCR", "counter"),
            lambda: ("SET", "value", "1"),
            lambda: ("GET", "value"),
            lambda: ("GET", name),
            lambda: ("DEL", name),
            lambda: self.acquire(db),
            lambda: self.release(db),
            lambda: self.touch(db),
            lambda: self.fence(db, then=self.chance(0.2)),
        ])()
        return ("LOCK.FENCE", name, token, "THEN", *inner)

    def stranger(self, db):
        """What clients do that know nothing of locks, and operators."""
        rng = self.rng
        name = self.name(db)
        kind = rng.choices(["set", "setnx", "get", "del", "pexpire", "persist", "rename", "move",
                            "swapdb", "flushdb", "flushall", "rpush"],
                           [10, 20, 5, 15, 12, 5, 10, 6, 3, 2, 1, 2])[0]
        if kind == "set":
            lease = ["PX", self.milliseconds(self.leases)] if self.chance(0.7) else []
            return ("SET", name, self.owner(), *lease)
        if kind == "setnx":
            lease = ["PX", self.milliseconds(self.leases)] if self.chance(0.8) else []
            return ("SET", name, self.owner(), "NX", *lease)
        if kind == "get":
            return ("GET", name)
        if kind == "del":
            return (rng.choice(["DEL", "UNLINK"]), name, *rng.choice([[], self.others(db, name)]))
        if kind == "pexpire":
            return ("PEXPIRE", name, rng.choice(["0", "-1", "1", "50", "100000"]))
        if kind == "persist":
            return ("PERSIST", name)
        if kind == "rename":
            return ("RENAME", name, rng.choice(NAMES[db]))
        if kind == "move":
            return ("MOVE", rng.choice(NAMES[1]), str(1 - db))
        if kind == "swapdb":
            return ("SWAPDB", "0", "1")
        if kind == "flushdb":
            return ("FLUSHDB",)
        if kind == "flushall":
            return ("FLUSHALL",)
        return ("RPUSH", name, "element")

    def mistake(self, db):
        """A request with something wrong in it (or by chance not)."""
        rng = self.rng
        if self.chance(0.5):
            return ("LOCK.ACQUIRE", self.name(db), self.owner(), "PX", "1000", *rng.choice(DETAILS))
        args = list(rng.choice([self.acquire, self.release, self.touch])(db))
        fault = rng.randrange(6)
        place = rng.randrange(3, len(args) + 1)
        if fault == 0 and len(args) > 3:
            del args[rng.randrange(3, len(args))]
        elif fault == 1:
            args.insert(place, rng.choice(["WAIT", "SHARED", "LIMIT", "PX", "ALSO", "BOGUS", "0",
                                           "NOTIFY", "TAG", "WEIGHT"]))
        elif fault == 2:
            args += rng.choice([["WAIT", "-1"], ["PX", "01"], ["LIMIT", "0"], ["LINGER", "-0"],
                                ["FLOOR", "0"], ["FLOOR", str(spec.MAX_TOKEN + 1)]])
        elif fault == 3:
            args[2] = rng.choice(["", "o" * 257])
        elif fault == 4:
            args += ["ALSO", "1", args[1]]
        else:
            args += rng.choice([["SHARED", "LIMIT", "2"], ["EX", "1"], ["REENTRANT", "LIMIT", "1"],
                                ["WEIGHT", "1"], ["MAXLINE", "1"], ["MAXHOLD", "1"]])
        return tuple(args)

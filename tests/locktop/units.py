"""Checks of locktop's pure parts, and of the one race that a terminal cannot show. Run by tests/locktop/run, with the
port of a server in LOCKTOP_PORT."""

import importlib.machinery
import importlib.util
import os
import sys
import unittest

sys.dont_write_bytecode = True
FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../client-examples/locktop")
sys.path.insert(0, FOLDER)
import lockview as view

loader = importlib.machinery.SourceFileLoader("locktop", os.path.join(FOLDER, "locktop"))
locktop = importlib.util.module_from_spec(importlib.util.spec_from_loader("locktop", loader))
loader.exec_module(locktop)


class Text(unittest.TestCase):
    def test_nothing_unprintable_comes_out(self):
        for code in list(range(0x100)) + [0x200b, 0x202e, 0x2028, 0x301, 0xfeff, 0xe000, 0x1f600, 0xd55c]:
            for raw in (chr(code).encode(), bytes([code & 0xff])):
                self.assertTrue(view.printable(raw).isprintable(), raw)

    def test_names(self):
        self.assertEqual(view.printable(b"table:12"), "table:12")
        self.assertEqual(view.printable(b"\x1b[31m\n\xff\\"), "\\x1b[31m\\n\\xff\\\\")
        self.assertEqual(view.printable("Prüfung 한".encode()), "Prüfung 한")
        self.assertEqual(view.printable("\u202eevil".encode()), "\\xe2\\x80\\xaeevil")
        self.assertEqual(view.printable(None), "-")
        self.assertLess(len(view.printable(b"\n" * 10**7)), 3000)

    def test_ascii_terminal(self):
        view.UTF8 = False
        try:
            self.assertEqual(view.printable("ü".encode()), "\\xc3\\xbc")
            self.assertEqual(view.fit("abcdef", 4), "abc~")
        finally:
            view.UTF8 = True

    def test_every_width_is_kept(self):
        for text in ("", "a", "abcdef", "한국어", "a한b국"):
            for width in range(9):
                self.assertEqual(view.cells(view.fit(text, width)), width, (text, width))

    def test_durations(self):
        for ms, text in ((None, "-"), (0, "0ms"), (999, "999ms"), (1000, "1.0s"), (9999, "9.9s"), (10000, "10s"),
                         (59999, "59s"), (60000, "1m00s"), (3600000, "1h00m"), (90061000, "1d01h")):
            self.assertEqual(view.duration(ms), text)

    def test_patterns_are_the_servers(self):
        for pattern, key, fits in (
                (b"table:*", b"table:12", True), (b"table:*", b"my-table:12", False), (b"t?", b"t\n", True),
                (b"[a-c]x", b"bx", True), (b"[^a-c]x", b"bx", False), (b"\\*", b"*", True), (b"\\*", b"a", False),
                (b"a.b", b"axb", False), (b"\xff*", b"\xff\x00", True), (b"", b"a", False)):
            self.assertEqual(bool(view.glob(pattern).fullmatch(key)), fits, (pattern, key))


class Replies(unittest.TestCase):
    def test_lock_of_resp2_and_resp3(self):
        flat = [b"key", b"k", b"mode", b"shared", b"holding", 2, b"owner", None, b"lease-left-ms", None, b"new", 1]
        lock = view.parse_lock(flat)
        self.assertEqual(lock, view.Lock(b"k", b"shared", 2))
        self.assertEqual(view.parse_lock(dict(zip(flat[::2], flat[1::2]))), lock)

    def test_a_tag_is_shown_in_place_of_the_owner(self):
        lock = view.parse_lock([b"key", b"k", b"holding", 2, b"owner", b"7c9e", b"tag", b"web-3 pid 42"])
        self.assertEqual(view.owner_text(lock), "web-3 pid 42 +1")
        self.assertEqual(view.owner_text(lock._replace(tag=None)), "7c9e +1")
        self.assertEqual(view.owner_text(lock._replace(tag=b"\x1b[31m")), "\\x1b[31m +1")
        locks = [lock, view.Lock(b"a", owner=b"x"), view.Lock(b"b", owner=b"a")]
        self.assertEqual([each.key for each in view.sort_locks(locks, "o", False)], [b"b", b"k", b"a"])

    def test_columns_of_details_that_few_need(self):
        def shown(rows):
            return view.optional_columns(rows)
        self.assertEqual(shown([]), [""])
        self.assertEqual(shown([{"owner": b"a", "weight": 1, "tag": None, "max-hold-left-ms": None}]), ["", ""])
        self.assertEqual(shown([{"tag": b"t"}, {"client-addr": b"1:2"}]), ["FROM  TAG  ", "-     t    ", "1:2   -    "])
        self.assertEqual(shown([{"weight": 3, "max-hold-left-ms": 0}, {}]),
                         ["WEIGHT  CAP  ", "3       0ms  ", "-       -    "])

    def test_rates(self):
        def info(acquired, refused, waited, at_once):
            return {"turnstile_acquired": str(acquired), "turnstile_rejected": str(refused),
                    "turnstile_rejected_line_full": str(2 * refused), "turnstile_waits": str(waited),
                    "turnstile_acquired_immediately": str(at_once)}
        self.assertEqual(view.rates(info(10, 0, 0, 10), info(30, 2, 4, 20), 2), (10, 3, 50))
        self.assertEqual(view.rates(info(1, 1, 1, 1), info(1, 1, 1, 1), 1), (0, 0, 0))
        self.assertIsNone(view.rates(info(10, 0, 0, 10), info(3, 0, 0, 3), 1))
        self.assertIsNone(view.rates(None, info(3, 0, 0, 3), 1))

    def test_what_is_not_known_comes_last(self):
        locks = [view.Lock(b"none"), view.Lock(b"long", lease=900), view.Lock(b"short", lease=1)]
        for reverse, order in ((False, [b"short", b"long", b"none"]), (True, [b"long", b"short", b"none"])):
            self.assertEqual([lock.key for lock in view.sort_locks(locks, "l", reverse)], order)

    def test_columns_fit_any_window(self):
        locks = [view.Lock(b"k" * 300, b"exclusive", 3, b"o" * 300, 1, 2, 0, 4, 5)]
        for width in range(16, 200):
            columns, gap = view.layout(locks, width)
            self.assertLessEqual(view.cells(view.table_line(columns, gap, locks[0])), width)
        self.assertEqual(len(view.layout(locks, 80)[0]), len(view.COLUMNS))


class Releases(unittest.TestCase):
    def test_who_may_be_hit(self):
        asked = {(b"a", 1): None, (b"b", 2): b"tag of b"}
        self.assertIsNone(view.objection(b"k", asked, asked))
        self.assertIsNone(view.objection(b"k", asked, {(b"a", 1): b"a tag by now"}))
        self.assertIn("another holder now, c", view.objection(b"k", asked, {**asked, (b"c", 3): None}))
        self.assertIn("another holder now, tag of c", view.objection(b"k", asked, {**asked, (b"c", 3): b"tag of c"}))
        self.assertIn("another holder now, a", view.objection(b"k", asked, {(b"a", 4): None}))
        self.assertIn("nobody", view.objection(b"k", asked, None))
        self.assertEqual(view.who(asked), "tag of b and 1 more")

    def test_question_is_short_for_long_names(self):
        text = view.question(b"k" * 5000, {(b"o" * 256, 1): None}, 80)
        self.assertLess(len(text), 250)
        self.assertTrue(text.endswith("[y/N]"))

    def release_while(self, change):
        """A forced release; change happens after it has looked and before it acts."""
        url = f"redis://127.0.0.1:{os.environ['LOCKTOP_PORT']}"
        other = locktop.Server(url)
        other.call("LOCK.ACQUIRE", "race", "old", "PX", 60000)

        class Slow(locktop.Server):
            looks = 0

            def details(self, key):
                seen = super().details(key)
                self.looks += 1
                if self.looks == 1:
                    change(other)
                return seen

        slow = Slow(url)
        said = slow.release(b"race", view.holders_of(other.details(b"race")))
        left = other.details(b"race")
        other.call("DEL", "race")
        for each in (other, slow):
            each.drop()
        return said, slow.looks, left

    def test_a_new_holder_is_not_hit(self):
        def hand_over(other):
            other.call("LOCK.RELEASE", "race", "old")
            other.call("LOCK.ACQUIRE", "race", "new", "PX", 60000)
        said, looks, left = self.release_while(hand_over)
        self.assertIn("another holder now, new", said)
        self.assertEqual(looks, 2)
        self.assertEqual(left["holders"][0]["owner"], b"new")

    def test_a_renewed_lease_only_delays_it(self):
        said, looks, left = self.release_while(lambda other: other.call("LOCK.TOUCH", "race", "old", "PX", 50000))
        self.assertIn("Released race", said)
        self.assertEqual(looks, 2)
        self.assertIsNone(left)


if __name__ == "__main__":
    unittest.main()

"""Tests of the benchmark itself: plots, tables, goals; and the published page is that of its data.

    /usr/bin/python3 bench/bench_test.py

Measures nothing and starts no server.
"""

import contextlib
import io
import json
import pathlib
import re
import sys
import tempfile
import threading
import types
import unittest
import xml.etree.ElementTree as ElementTree
from unittest import mock

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import common  # noqa: E402
import counter  # noqa: E402
import instructions  # noqa: E402
import modes  # noqa: E402
import plot  # noqa: E402
import queued  # noqa: E402
import run  # noqa: E402
import valkey  # noqa: E402

SVG = "{http://www.w3.org/2000/svg}"
CONDITIONS = {"cpu": "A CPU", "cores": 2, "kernel": "Linux 6", "server": "Redis 7.0.15",
              "module": "Turnstile 0.1.0", "date": "2026-01-02"}


class PlotTest(unittest.TestCase):
    def draw(self, svg):
        """The texts of a plot that is well-formed and stays within its frame."""
        root = ElementTree.fromstring(svg)
        _, _, width, height = map(float, root.get("viewBox").split())
        for element in root.iter():
            for name, limit in {"x": width, "x1": width, "x2": width, "cx": width,
                                "y": height, "y1": height, "y2": height, "cy": height}.items():
                place = float(element.get(name, 0))
                self.assertTrue(0 <= place <= limit, ElementTree.tostring(element))
            self.assertGreaterEqual(float(element.get("width", 0)), 0)
        return [element.text for element in root.iter(f"{SVG}text")]

    def bars(self, *rows, **options):
        return self.draw(plot.bars("a title", rows, "the axis", **options))

    def lines(self, log_x=False, log_y=False, **series):
        return self.draw(plot.lines("a title", series, "the x", "the y", log_x, log_y))

    def test_bars(self):
        texts = self.bars(("Turnstile", 1.084, 1.05, 1.1), ("plain", 1, None, None), unit="ms",
                          reference=1)
        for text in ("a title", "Turnstile", "1.08 ms", "1.00 ms", "plain"):
            self.assertIn(text, texts)

    def test_bars_of_anything(self):
        for log in (False, True):
            for values in ((0,), (0, 0), (5,), (1e-300, 1e300), (1e300,), (1e-12,), (0, 7),
                           (-3, 4), (-1e9, -1), (0.999, 1), (float("nan"), 2), (float("inf"), 2)):
                for reference in (None, 0, 1, 1e6):
                    with self.subTest(log=log, values=values, reference=reference):
                        rows = [(f"row {i}", value, value / 2, value * 2)
                                for i, value in enumerate(values)]
                        self.bars(*rows, reference=reference, log=log)

    def test_axes_are_labelled(self):
        self.assertIn("the axis", self.bars(("a", 1, None, None)))
        self.assertIn("the axis (logarithmic scale)", self.bars(("a", 1, None, None), log=True))
        texts = self.lines(log_y=True, a=[(1, 1), (2, 2)])
        self.assertIn("the x", texts)
        self.assertIn("the y (logarithmic scale)", texts)

    def test_no_bar_begins_at_a_value_other_than_zero(self):
        rows = [("a", 2000, 1500, 2500), ("b", 90000, None, None)]
        self.assertIn("<rect", plot.bars("a title", rows, "the axis"))
        self.assertNotIn('height="18"', plot.bars("a title", rows, "the axis", log=True))

    def test_nothing_to_show(self):
        self.assertIn("not measured", self.bars())
        self.assertIn("not measured", self.bars(("a", None, None, None), reference=1))
        self.assertIn("not measured", self.bars(("a", None, None, None), ("b", 1, None, None)))
        self.assertIn("not measured", self.lines())
        self.assertIn("not measured", self.lines(a=[]))
        self.assertIn("not measured", self.lines(a=[(0, 0)], log_y=True))

    def test_lines_of_anything(self):
        for log_x in (False, True):
            for log_y in (False, True):
                for points in ([(1, 1)], [(0, 0), (1, 5), (2, 0)], [(10, 1e-9), (1e7, 1e12)],
                               [(1, -5), (2, 5)], [(1, None), (2, 3)], [(1e300, 1), (1, 1e300)]):
                    with self.subTest(log_x=log_x, log_y=log_y, points=points):
                        self.lines(log_x, log_y, a=points, b=[(1, 2), (3, 2)])

    def test_labels_at_the_ends_of_lines_keep_apart(self):
        series = {f"series {i}": [(1, 1), (2, 1 + i / 1000)] for i in range(20)}
        root = ElementTree.fromstring(plot.lines("many", series, "x", "y"))
        places = sorted(float(text.get("y")) for text in root.iter(f"{SVG}text")
                        if text.text.startswith("series"))
        self.assertEqual(len(places), 20)
        for above, below in zip(places, places[1:]):
            self.assertGreaterEqual(below - above, plot.TEXT)

    def test_ticks_keep_apart(self):
        for high in (1, 3, 7e3, 123456, 99999999, 3e12):
            for log in (False, True):
                scale = plot.Scale([1e-3, high], log, 0, plot.PLOT, plot.width)
                places = [scale(value) for value, _ in scale.ticks]
                self.assertGreaterEqual(len(places), 2)
                needed = [plot.width(text) for _, text in scale.ticks]
                for a, b, m, n in zip(places, places[1:], needed, needed[1:]):
                    self.assertGreaterEqual(b - a, (m + n) / 2)

    def test_text_is_escaped(self):
        name = "<b> & \"quoted\" 'too' \x00\x1b ü 锁"
        shown = name.replace("\x00", "\ufffd").replace("\x1b", "\ufffd")
        self.assertIn(shown, self.draw(plot.bars(name, [(name, 1, None, None)], name)))
        self.assertIn(f"{shown} 1.00", self.draw(plot.lines(name, {name: [(1, 1)]}, name, name)))

    def test_long_text_is_wrapped(self):
        texts = self.bars(("an owner-checked release by EVALSHA after an acquire with fencing",
                           1, None, None))
        self.assertNotIn("an owner-checked release by EVALSHA after an acquire with fencing", texts)
        self.draw(plot.bars("many words " * 30, [("word" * 50, 1, None, None)], "word " * 40))

    def test_figures(self):
        figures = {0: "0", 1: "1.00", 0.267: "0.27", 0.0123: "0.012", 12.34: "12.3", 999.6: "1,000",
                   123456.7: "123,457", 1e12: "1e+12", -2.5: "-2.50"}
        for value, text in figures.items():
            self.assertEqual(plot.figure(value), text)
        self.assertEqual(plot.with_unit(3, "×"), "3.00×")
        self.assertEqual(plot.with_unit(3, "µs"), "3.00 µs")


class CommonTest(unittest.TestCase):
    def test_table(self):
        self.assertEqual(common.table(["a", "b"], [["x", 1], ["y", "2"]]),
                         "| a | b |\n| --- | ---: |\n| x | 1 |\n| y | 2 |\n")

    def test_spread(self):
        self.assertEqual(common.spread([7]), {"median": 7, "q1": 7, "q3": 7, "n": 1})
        self.assertEqual(common.spread([5, 1, 3, 2, 4]),
                         {"median": 3, "q1": 2, "q3": 4, "n": 5})

    def test_goals(self):
        self.assertEqual(common.Goal.at_most("x", 1.10, 1.08),
                         common.Goal("x", "≤ 1.1", "1.08", True))
        self.assertTrue(common.Goal.at_most("x", 1.10, 1.104).met)  # as shown: 1.10
        self.assertFalse(common.Goal.at_most("x", 1.10, 1.106).met)
        self.assertEqual(common.Goal.at_least("x", 1.8, 1.71, digits=1),
                         common.Goal("x", "≥ 1.8", "1.7", False))


class FakeLine:
    """A connection that answers each command with the next of these replies."""

    def __init__(self, *replies):
        self.replies = list(replies)
        self.sent = []

    def send(self, data):
        self.sent.append(data)

    def reply(self):
        return self.replies.pop(0)


class ModesTest(unittest.TestCase):
    def test_every_command_names_its_reply(self):
        for name, mode in modes.ALL.items():
            for command in (*mode.commands, *filter(None, (mode.held, mode.fresh))):
                self.assertIn(command.split(" ")[0], modes.REPLIES, name)

    def test_what_is_ours(self):
        ours = {name for name, mode in modes.ALL.items() if mode.is_ours()}
        self.assertEqual(ours, {"turnstile", "touch", "busy"})

    def test_replies(self):
        for name, reply in (("ok", b"+OK"), ("one", b":1"), ("token", b":17"), ("null", b"$-1"),
                            ("null", b"*-1"), ("pong", b"+PONG"), ("bulk", b"$32")):
            counter.expect(name, reply, "a command")
        for name, reply in (("ok", b"-ERR"), ("one", b":0"), ("token", b":0"), ("null", b"$1")):
            with self.assertRaises(SystemExit):
                counter.expect(name, reply, "a command")


class InstructionsTest(unittest.TestCase):
    def test_operations_go_out_in_pipelines_and_have_an_owner_each(self):
        line = FakeLine(*[b"+OK", b":1"] * 6)
        requests = counter.Requests(line, modes.PAIRS["set-del"], 4)
        requests.job(6)()
        self.assertEqual([data.count(b"*") for data in line.sent], [4, 4, 4])
        owners = re.findall(rb"\$32\r\n(\w{32})\r\n", b"".join(line.sent))
        self.assertEqual(len(set(owners)), 6)

    def test_keys_that_have_to_be_there_are_put_there_before(self):
        count = counter.KEYS
        line = FakeLine(*[b"+OK"] * count, *[b"$32"] * 3)
        requests = counter.Requests(line, modes.OTHERS["get"], 1)
        self.assertEqual(len(line.sent), 1)
        requests.job(3)()
        self.assertEqual(len(line.sent), 4)
        line = FakeLine(*[b"+OK"] * 5, *[b":1"] * 5)
        act = counter.Requests(line, modes.OTHERS["del"], 1).job(5)
        self.assertEqual(line.sent[0].count(b"SET"), 5)
        act()
        keys = re.findall(rb"DEL\r\n\$16\r\n(\S{16})", b"".join(line.sent))
        self.assertEqual(len(set(keys)), 5)

    def test_an_unexpected_reply_ends_the_run(self):
        requests = counter.Requests(FakeLine(b"+OK", b":0"), modes.PAIRS["set-del"], 16)
        with self.assertRaises(SystemExit):
            requests.job(1)()

    def test_what_all_counts_have_in_common_drops_out(self):
        fake = types.SimpleNamespace(executed=lambda operations: 5000 + 70 * operations)
        job = mock.Mock(side_effect=lambda count: NumberThatActs(count))
        self.assertEqual(counter.Counter.each(fake, job, 100), 70)
        self.assertEqual([call.args[0] for call in job.call_args_list], [20, 100, 200])

    def test_together(self):
        self.assertEqual(
            instructions.together([{"a": {"b": 1}}, {"a": {"b": 2}}, {"a": {"c": 3}, "d": 4}]),
            {"a": {"b": [1, 2], "c": [3]}, "d": [4]})

    def test_side_by_side(self):
        with contextlib.redirect_stderr(io.StringIO()):
            self.assertEqual(counter.at_once("part", {"a": lambda: 1, "b": lambda: 2}),
                             {"a": 1, "b": 2})
            with self.assertRaises(SystemExit):
                counter.at_once("part", {"a": lambda: 1, "b": lambda: sys.exit("failed")})
            # A job under way is ended by way of its server.
            server = types.SimpleNamespace(process=mock.Mock(), ended=threading.Event())
            server.process.kill = server.ended.set
            with mock.patch.object(counter.Counter, "running",
                                   [types.SimpleNamespace(server=server)]), \
                    self.assertRaises(SystemExit):
                counter.at_once("part", {"a": lambda: server.ended.wait(5),
                                         "b": lambda: sys.exit("failed")})
            self.assertTrue(server.ended.is_set())

    def test_goals_and_report(self):
        data = counted()
        data["others"]["idle"]["16"]["incr"] = [1030.0]
        data["others"]["held"]["1"]["ping"] = [1040.0]
        data["own"]["none"]["1"]["turnstile"] = [1190.0, 1210.0, 1400.0]
        data["own"]["none"]["1"]["set-del"] = [1000.0, 1000.0, 1000.0]
        goals = instructions.goals(data)
        self.assertEqual([goal.what for goal in goals if not goal.met][:1], [
            f"any of {len(modes.OTHERS)} commands of others, no lock taken / a module that does "
            "nothing; worst: INCR, pipeline 16"])
        measured = {goal.what: goal.measured for goal in goals}
        self.assertEqual(measured["others' PING, pipeline 1, one lock held / a module that does "
                                  "nothing"], "1.04")
        self.assertEqual(measured["LOCK pair / SET NX PX + DEL, pipeline 1"], "1.21")
        page = instructions.report(data)
        self.assertIn("| INCR | 1.000 | 1.030 | 1.000 | 1.000 | 1,000 |", page.markdown)
        self.assertIn("| hand-over; waiting clients of one lock: 5, 10, 20 | 1,000 | 2,000 | 4,000 "
                      "| 2.00 | 4.00 |", page.markdown)
        for svg in page.plots.values():
            ElementTree.fromstring(svg)

    def test_valkey(self):
        data = {**counted(), "repeats": 1}
        for pipeline in ("1", "16"):
            data["own"]["none"][pipeline]["set-delifeq"] = [2000.0]
        self.assertEqual([goal.measured for goal in valkey.goals(data)], ["0.50", "0.50", "1.00"])
        self.assertIn("| SET NX PX + DELIFEQ | 2,000 | 2,000 | 0.50 | 0.50 |",
                      valkey.report(data).markdown)


class QueuedTest(unittest.TestCase):
    def setUp(self):
        self.data = {
            "waiters": 1000, "rounds": {"storms": 3, "hand_over": 3},
            "storms": {lines: {end: [storm() for _ in range(3)] for end in ends}
                       for lines, ends in queued.STORMS.items()},
            "controls": [{name: measured_phase() for name in queued.CONTROLS} for _ in range(3)],
            "hand_over": {"count": 10, "runs": {
                str(waiters): {way: [{"p50_us": 10.0, "p99_us": 20.0, "cpu_us": 5.0 + k}
                                     for k in range(3)] for way in queued.WAYS}
                for waiters in queued.HAND_OVER_WAITERS}},
        }

    def test_every_phase_is_one_that_is_measured(self):
        for lines, phases in queued.PHASES.items():
            self.assertLessEqual({end for end, _ in phases}, set(queued.STORMS[lines]))

    def test_memory(self):
        self.assertEqual(set(queued.bytes_each(self.data, "one")), {900.0})
        self.assertEqual(queued.bytes_bound(self.data), (700.0, 200.0))
        self.data["storms"]["many"]["leases"][1]["memory_end"] = 1_040_000
        self.assertAlmostEqual(max(queued.kept(self.data)), 0.04)

    def test_the_worst_stall_is_that_of_a_phase_not_of_a_round(self):
        for run_, longest in zip(self.data["storms"]["many"]["release"], (9.0, 7.0, 100.0)):
            run_["end"]["cpu_max_ms"] = longest
        self.data["storms"]["many"]["time-out"][0]["end"]["cpu_max_ms"] = 50.0
        for run_ in self.data["storms"]["many"]["leases"]:
            run_["lost"]["cpu_max_ms"] = 30.0
        self.assertEqual(queued.worst_stall(self.data, by_leases=False),
                         ("a line each, LOCK.RELEASE by all who wait", 9.0))
        self.assertEqual(queued.worst_stall(self.data, by_leases=True)[1], 30.0)

    def test_goals_and_report(self):
        for run_, cpu in zip(self.data["hand_over"]["runs"]["100"]["pubsub"], (50.0, 120.0, 140.0)):
            run_["cpu_us"] = cpu
        goals = queued.goals(self.data)
        self.assertEqual([goal.measured for goal in goals],
                         ["900", "900", "1.00", "2.0", "2.0", "1.00", "0.050"])
        markdown = queued.report(self.data).markdown
        self.assertIn("| one line: time-outs, all at once | 2,000 | 100 | 2.00 | 1.00 | 3.00 |",
                      markdown)
        self.assertIn("| nothing |  |  | 2.00 | 1.00 | 3.00 |", markdown)
        self.assertIn("A waiter takes 900 bytes of used_memory in one line", markdown)


def measured_phase():
    return {"seconds": 0.5, "cpu_s": 0.1, "pings": 9, "wall_p99_ms": 1.5, "wall_max_ms": 3.0,
            "cpu_p99_ms": 1.0, "cpu_max_ms": 2.0}


def storm():
    """A run of bench/queued.cc with all phases and points that any has."""
    return {"memory_start": 1_000_000, "memory_held": 1_200_000, "memory_waiting": 2_100_000,
            "memory_granted": 1_700_000, "memory_end": 1_000_000,
            **{name: measured_phase() for name in ("enter", "end", "release_holds", "lost")}}


class NumberThatActs(int):
    """A number of operations, as the act that does so many."""

    def __call__(self):
        pass


def counted():
    """Data of the part instructions, in which everything takes a thousand."""
    pipelines = [str(pipeline) for pipeline in instructions.PIPELINES]
    locking = {**modes.PAIRS, **modes.TOUCHES, **modes.BUSY}
    ways = ["line", "token", "come and go"]
    sizes = {5: 1000.0, 10: 2000.0, 20: 4000.0}
    return {
        "operations": 10, "hand_overs": 10, "repeats": {"others": 1, "own": 1},
        "keys": 100, "waiters": 10,
        "others": {state: {pipeline: {mode: [1000.0] for mode in modes.OTHERS}
                           for pipeline in pipelines} for state in counter.STATES},
        "own": {listener: {pipeline: {mode: [1000.0] for mode in locking}
                           for pipeline in (pipelines if listener == "none" else ["16"])}
                for listener in counter.LISTENERS},
        "hand_over": {way: [1000.0] for way in ways},
        "growth": {
            what: [{"size": size, **{name: count for name in figures}}
                   for size, count in sizes.items()]
            for what, (_, figures) in instructions.GROWTH.items()},
    }


def fake_part(value):
    """A part that measures `value`, or fails if there is none."""
    def measure(options):
        if value is None:
            sys.exit("bench: an unexpected reply")
        return {"value": value, "seed": options.seed, 1: "keys become text"}

    def report(data):
        rows = [("Turnstile", data["value"], None, None)]
        name = f"fake-{data['value']}.svg"
        return common.Report(f"A line, {data['1']}.\n\n![A plot]({name})\n\n",
                             {name: plot.bars("A plot", rows, "an axis")})

    return types.SimpleNamespace(
        TITLE=f"Fake {value}", SECONDS=1, run=measure, report=report,
        goals=lambda data: [common.Goal.at_most("a | b", 2, data["value"])])


class RunTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name) / "results"
        for patch in (mock.patch.object(run, "RESULTS", self.folder),
                      mock.patch.object(run, "PARTS", ("one", "two")),
                      mock.patch.object(run, "machine", lambda: dict(CONDITIONS)),
                      mock.patch.object(run.signal, "signal"),
                      mock.patch.dict(sys.modules, one=fake_part(1), two=fake_part(3)),
                      mock.patch.dict("os.environ")):
            patch.start()
            self.addCleanup(patch.stop)
        for name in ("REDIS_SERVER", "TURNSTILE_MODULE"):
            run.os.environ.pop(name, None)

    def main(self, *arguments):
        """What goes to stdout and to stderr."""
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            run.main(arguments)
        return out.getvalue(), err.getvalue()

    def page(self):
        return (self.folder / "README.md").read_text()

    def test_all(self):
        _, progress = self.main("--seed", "9")
        self.assertIn("bench: part 2 of 2: two (0 of about 2 s so far)", progress)
        self.assertEqual(sorted(file.name for file in self.folder.iterdir()),
                         ["README.md", "fake-1.svg", "fake-3.svg", "one.json", "two.json"])
        page = self.page()
        self.assertIn("Turnstile 0.1.0 on Redis 7.0.15; A CPU, 2 cores, Linux 6; 2026-01-02, "
                      "seed 9.", page)
        self.assertIn("1 of 2 met.", page)
        self.assertIn("| a \\| b | ≤ 2 | 1.00 | yes |\n| a \\| b | ≤ 2 | 3.00 | **no** |\n", page)
        self.assertIn("## Fake 1\n\nA line, keys become text.\n\n![A plot](fake-1.svg)\n", page)
        self.assertEqual(run.pages(self.folder)["README.md"], page)

    def test_only_one_part_keeps_the_data_of_the_other(self):
        self.main()
        sys.modules["one"] = fake_part(2)
        self.main("--only", "one", "--seed", "5")
        page = self.page()
        self.assertIn("- one: Turnstile", page)
        self.assertIn("seed 5\n- two: Turnstile", page)
        self.assertIn("1 of 2 met.", page)
        self.assertIn("## Fake 2", page)
        self.assertIn("## Fake 3", page)
        self.assertFalse((self.folder / "fake-1.svg").exists())

    def test_report_only(self):
        self.main("--only", "two")
        self.assertIn("Not measured: one.", self.page())
        before = self.page()
        (self.folder / "README.md").write_text("old")
        sys.modules["two"].run = None
        self.main("--report")
        self.assertEqual(self.page(), before)

    def test_trials_are_printed_and_not_stored(self):
        self.main()
        before = {file: file.read_text() for file in self.folder.iterdir()}
        for arguments, environment in ((["--quick"], {}), ([], {"REDIS_SERVER": "other"})):
            sys.modules["one"] = fake_part(7)
            with mock.patch.dict("os.environ", environment), \
                    tempfile.TemporaryDirectory() as elsewhere, \
                    mock.patch.object(tempfile, "tempdir", elsewhere):
                page, _ = self.main("--only", "one", *arguments)
            self.assertIn("| a \\| b | ≤ 2 | 7.00 | **no** |", page)
            self.assertNotIn("Fake 3", page)
            self.assertEqual({file: file.read_text() for file in self.folder.iterdir()}, before)

    def test_a_part_of_an_engine_is_stored_from_that_engine(self):
        sys.modules["two"].ENGINE = "other-1"
        with mock.patch.object(run, "engine_server", lambda name: f"/server/{name}"), \
                tempfile.TemporaryDirectory() as elsewhere, \
                mock.patch.object(tempfile, "tempdir", elsewhere):
            page, _ = self.main("--engine", "other-1")
            self.assertIn("Fake 1", page)
            self.assertNotIn("Fake 3", page)
            self.assertIn("Fake 3", self.page())
            self.assertNotIn("Fake 1", self.page())
            page, _ = self.main("--engine", "other-1", "--only", "two")
            self.assertEqual(page, "")
        self.assertNotIn("REDIS_SERVER", run.os.environ)

    def test_a_part_whose_engine_cannot_be_had_is_left_out(self):
        sys.modules["two"].ENGINE = "other-1"
        with mock.patch.object(run, "engine_server", lambda name: None):
            _, progress = self.main()
        self.assertIn("two is left out: there is no engine other-1", progress)
        self.assertIn("Not measured: two.", self.page())

    def test_an_error_ends_the_run_and_keeps_what_was_measured(self):
        sys.modules["two"] = fake_part(None)
        with self.assertRaises(SystemExit) as ended:
            self.main()
        self.assertEqual(ended.exception.code, "bench: an unexpected reply")
        self.assertTrue((self.folder / "one.json").exists())
        self.assertFalse((self.folder / "two.json").exists())

    def test_wrong_arguments(self):
        for arguments in (["--only", "three"], ["--only", ""], ["--seed", "x"], ["more"]):
            with self.assertRaises(SystemExit) as ended:
                self.main(*arguments)
            self.assertEqual(ended.exception.code, 2)


class PublishedTest(unittest.TestCase):
    """What is in bench/results/ belongs together."""

    def setUp(self):
        if not list(run.RESULTS.glob("*.json")):
            self.skipTest("nothing is published yet")
        self.expected = run.pages(run.RESULTS)

    def test_page_and_plots_are_those_of_the_data(self):
        for name, text in self.expected.items():
            self.assertEqual((run.RESULTS / name).read_text(encoding="utf-8"), text,
                             f"{name} is not that of the data: script/bench --report")
        known = {*self.expected, *(f"{name}.json" for name in run.PARTS)}
        self.assertLessEqual({file.name for file in run.RESULTS.iterdir()}, known)

    def test_every_plot_is_shown_and_well_formed(self):
        shown = set(re.findall(r"\]\((\S+\.svg)\)", self.expected["README.md"]))
        plots = {name for name in self.expected if name.endswith(".svg")}
        self.assertEqual(shown, plots)
        for name in plots:
            ElementTree.fromstring(self.expected[name])

    def test_the_machine_is_not_named(self):
        for name in run.PARTS:
            file = run.RESULTS / f"{name}.json"
            if file.exists():
                text = file.read_text(encoding="utf-8")
                self.assertEqual(set(json.loads(text)["conditions"]),
                                 {*CONDITIONS, "seed", "seconds"})
                self.assertNotRegex(text, r"/(home|root|tmp|work|usr)/")


if __name__ == "__main__":
    unittest.main()

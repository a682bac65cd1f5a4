"""Plots as SVG: plain text, readable on a light and on a dark page.

A plot brings its own background, because a picture in a page follows the reader's system and not
the page. Widths of text are estimated, a little too wide, because the font is the reader's.
"""

import math
import re
import unicodedata
from xml.sax.saxutils import escape

OURS = ("turnstile", "lock.")  # what has one of these in its name gets the first colour
TEXT = 13  # pixels
SMALL = 12
LINE = 18  # from one line of text to the next
EDGE = 16  # around everything
PLOT = 420  # width of the area that is to scale
LABEL = 250  # labels wider than this are wrapped

# background, text, weak text, grid, bars of others, then series
LIGHT = ["#ffffff", "#1f2328", "#59636e", "#dfe3e8", "#9aa5b1"]
LIGHT += ["#0969da", "#bc4c00", "#1a7f37", "#8250df", "#9a6700", "#bf3989"]
DARK = ["#161b22", "#e6edf3", "#9198a1", "#30363d", "#6e7681"]
DARK += ["#58a6ff", "#f0883e", "#3fb950", "#bc8cff", "#d29922", "#f778ba"]
SERIES = len(LIGHT) - 5


def bars(title, rows, axis, unit="", reference=None, log=False):
    """Horizontal bars; on a logarithmic scale, which has no zero for a bar to begin at, points.
    rows: (label, value, low, high), low and high (quartiles) may be None. `axis` says what is
    shown. `reference` is a value at which a line is drawn, such as 1 for a ratio."""
    figures = [[number(value) for value in row[1:]] for row in rows]
    known = [value for row in figures for value in [*row, number(reference)] if value is not None]
    if not any(row[0] is not None for row in figures):
        return nothing(title)
    labels = [wrap(label, LABEL) for label, *_ in rows]
    values = [with_unit(value, unit) for value, *_ in figures]
    left = EDGE + max(width(line) for label in labels for line in label) + 10
    scale = Scale(known, log, left, left + PLOT, lambda tick: width(tick, SMALL) + 12)
    heights = [max(30, len(label) * LINE + 10) for label in labels]
    axis = with_scale(axis, scale)
    picture = Picture(title, max(left + PLOT + EDGE + 10 + max(map(width, values)),
                                 left + PLOT / 2 + width(axis, SMALL) / 2 + EDGE,
                                 width(axis, SMALL) + 2 * EDGE))
    top = picture.height + (LINE if number(reference) is not None else 0)
    bottom = top + sum(heights)
    for value, tick in scale.ticks:
        picture.line("grid", scale(value), top, scale(value), bottom)
        picture.text("small", scale(value), bottom + LINE, tick, "middle")
    ours = any(is_ours(row[0]) for row in rows)
    texts = []
    y = top
    for row, (value, low, high), label, text, height in zip(rows, figures, labels, values, heights):
        middle = y + height / 2
        for i, line in enumerate(label):
            picture.text("text", left - 10, middle + (i - (len(label) - 1) / 2) * LINE + 4.5, line,
                         "end")
        end = scale.zero
        if value is not None:
            kind = "fill0" if is_ours(row[0]) or not ours else "others"
            start, end = sorted((scale.zero, scale(value)))
            if scale.log:
                picture.add(f'<circle class="{kind}" cx="{short(end)}" cy="{short(middle)}" '
                            'r="6"/>')
                end += 6
            else:
                picture.add(f'<rect class="{kind}" x="{short(start)}" y="{short(middle - 9)}" '
                            f'width="{short(end - start)}" height="18"/>')
        if value is not None and low is not None and high is not None:
            x1, x2 = sorted((scale(low), scale(high)))
            end = max(end, x2)
            picture.line("whisker", x1, middle, x2, middle)
            picture.line("whisker", x1, middle - 4, x1, middle + 4)
            picture.line("whisker", x2, middle - 4, x2, middle + 4)
        texts.append((end + 8, middle + 4.5, text))
        y += height
    if number(reference) is not None:
        picture.line("reference", scale(reference), top - 2, scale(reference), bottom)
        picture.text("small", scale(reference), top - 7, tick_text(reference), "middle")
    for x, y, text in texts:  # over the lines
        picture.text("value", x, y, text)
    picture.text("small", max(left + PLOT / 2, EDGE + width(axis, SMALL) / 2), bottom + 2 * LINE,
                 axis, "middle")
    picture.height = bottom + 2 * LINE + 4
    return picture.svg()


def lines(title, series, x_label, y_label, log_x=False, log_y=False):
    """series: {name: [(x, y), ...]}."""
    points = {}
    for name, pairs in series.items():
        pairs = [(number(x), number(y)) for x, y in pairs]
        points[name] = [(x, y) for x, y in pairs if x is not None and y is not None
                        and (x > 0 or not log_x) and (y > 0 or not log_y)]
    points = {name: sorted(pairs) for name, pairs in points.items() if pairs}
    if not points:
        return nothing(title)
    high = max(260, 2 * LINE * len(points))
    x_scale = Scale([x for pairs in points.values() for x, _ in pairs], log_x, 0, PLOT,
                    lambda tick: width(tick, SMALL) + 12, from_zero=False)
    y_scale = Scale([y for pairs in points.values() for _, y in pairs], log_y, high, 0,
                    lambda tick: 2 * LINE)
    x_label, y_label = with_scale(x_label, x_scale), with_scale(y_label, y_scale)
    left = EDGE + max(width(tick, SMALL) for _, tick in y_scale.ticks) + 8
    ends = {name: wrap(f"{name} {figure(pairs[-1][1])}", LABEL) for name, pairs in points.items()}
    right = left + PLOT + 24
    needed = max(width(line) for text in ends.values() for line in text)
    picture = Picture(title, max(right + needed + EDGE, left + width(x_label, SMALL) + EDGE,
                                 2 * EDGE + width(y_label, SMALL)))
    top = picture.height + LINE + 8
    picture.text("small", EDGE, top - 14, y_label)
    x_scale.shift(left)
    y_scale.shift(top)
    for value, tick in y_scale.ticks:
        picture.line("grid", left, y_scale(value), left + PLOT, y_scale(value))
        picture.text("small", left - 8, y_scale(value) + 4, tick, "end")
    for value, tick in x_scale.ticks:
        picture.line("grid", x_scale(value), top, x_scale(value), top + high)
        picture.text("small", x_scale(value), top + high + LINE, tick, "middle")
    picture.text("small", left + PLOT / 2, top + high + 2 * LINE, x_label, "middle")
    colours = colour_of(points)
    for name, pairs in points.items():
        places = [(x_scale(x), y_scale(y)) for x, y in pairs]
        path = " ".join(f"{short(x)},{short(y)}" for x, y in places)
        dash = ' stroke-dasharray="6 3"' if colours[name] >= SERIES else ""
        colour = colours[name] % SERIES
        picture.add(f'<polyline class="line{colour}" points="{path}"{dash}/>')
        for x, y in places:
            picture.add(f'<circle class="fill{colour}" cx="{short(x)}" cy="{short(y)}" r="3.5"/>')
    wanted = {name: y_scale(pairs[-1][1]) for name, pairs in points.items()}
    room = {name: len(text) * LINE for name, text in ends.items()}
    for name, y in apart(wanted, room, top - 9, top + high + 9).items():
        colour = colours[name] % SERIES
        last = x_scale(points[name][-1][0])
        picture.line(f"leader line{colour}", last + 5, wanted[name], right - 6, y)
        for i, line in enumerate(ends[name]):
            at = y + (i - (len(ends[name]) - 1) / 2) * LINE + 4.5
            picture.text(f"text fill{colour}", right, at, line)
    picture.height = max(top + high + 2 * LINE + 4, top + sum(room.values()))
    return picture.svg()


def nothing(title):
    picture = Picture(title, 400)
    picture.text("small", EDGE, picture.height + LINE, "not measured")
    picture.height += LINE + 4
    return picture.svg()


# --- Text -------------------------------------------------------------------------------------


def number(value):
    """A float, or None for what cannot be drawn."""
    return float(value) if value is not None and math.isfinite(value) else None


def figure(value):
    """Three digits or so: what a reader takes from a plot."""
    size = abs(value)
    if size == 0:
        return "0"
    if size >= 1e9 or size < 1e-4:
        return f"{value:.3g}"
    if size >= 100:
        return f"{value:,.0f}"
    if size >= 10:
        return f"{value:.1f}"
    return f"{value:.{2 if size >= 0.1 else 1 - math.floor(math.log10(size))}f}"


def with_scale(label, scale):
    """The label of an axis."""
    return f"{label} (logarithmic scale)" if scale.log else label


def with_unit(value, unit):
    if value is None:
        return "not measured"
    return figure(value) + (" " if unit[:1].isalnum() else "") + unit


def tick_text(value, log=False):
    power = round(math.log10(value)) if log else 0
    if not -5 < power < 9 and math.isclose(value, 10.0 ** power):
        return "10" + str(power).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    if value and not 1e-4 <= abs(value) < 1e9:
        return f"{value:.3g}"
    return f"{value:,.10f}".rstrip("0").rstrip(".")


def width(text, size=TEXT):
    def one(character):
        if unicodedata.combining(character):
            return 0
        if unicodedata.east_asian_width(character) in "WF":
            return 1.05
        if character in "mwMW%@—…":
            return 1
        if character in " .,:;'|!ijlI":
            return 0.36
        return 0.74 if character.isupper() else 0.65
    return size * sum(map(one, text))


def wrap(text, limit):
    """Lines no wider than the limit, unless a word is."""
    rows = [""]
    for word in str(text).split():
        joined = f"{rows[-1]} {word}".strip()
        if rows[-1] and width(joined) > limit:
            rows.append(word)
        else:
            rows[-1] = joined
    return rows


def short(value):
    return f"{value:.1f}".removesuffix(".0")


# --- Axes -------------------------------------------------------------------------------------


class Scale:
    """From values to pixels `first` … `last`, with ticks of which each takes `room(text)` pixels.
    A logarithmic scale becomes a linear one if there is nothing that it could show."""

    def __init__(self, values, log, first, last, room, from_zero=True):
        self.first, self.last = first, last
        positive = [value for value in values if value > 0]
        self.log = log and bool(positive)
        if self.log:
            # The shortest bar has to be seen.
            self._logarithmic(min(positive) / (1.25 if from_zero else 1), max(positive), room)
        else:
            low, high = min(values), max(values)
            if from_zero:
                low, high = min(low, 0.0), max(high, 0.0)
            if low == high:
                low, high = (0.0, 1.0) if low == 0 else sorted((low / 2, low * 1.5))
            self._linear(low, high, room)
        self.zero = self(0) if not self.log and self.low <= 0 else first

    def _fits(self, ticks, room):
        places = [self(tick) for tick in ticks]
        needed = [room(tick_text(tick, self.log)) for tick in ticks]
        self.ticks = [(tick, tick_text(tick, self.log)) for tick in ticks]
        return all(abs(b - a) >= (m + n) / 2
                   for a, b, m, n in zip(places, places[1:], needed, needed[1:]))

    def _linear(self, low, high, room):
        for count in (6, 5, 4, 3, 2, 1):
            raw = (high - low) / count
            power = 10.0 ** math.floor(math.log10(raw))
            step = next(power * k for k in (1, 2, 5, 10) if power * k >= raw * 0.999999)
            first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
            self.low, self.high = first * step, last * step
            if self._fits([k * step for k in range(first, last + 1)], room):
                return

    def _logarithmic(self, low, high, room):
        powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
        steps = [k * 10.0 ** power for power in powers for k in (1, 2, 5)]
        self.low = max(step for step in steps if step <= low * 1.000001)
        self.high = min(step for step in steps if step >= high * 0.999999 and step > self.low)
        every = 0
        while not self._fits([step for step in steps if self.low <= step <= self.high], room):
            every += 1
            steps = [10.0 ** power for power in powers[::every]]

    def __call__(self, value):
        low, high = self.low, self.high
        if self.log:
            low, high = math.log10(low), math.log10(high)
            value = max(low, math.log10(value)) if value > 0 else low
        return self.first + (self.last - self.first) * ((value - low) / (high - low))

    def shift(self, by):
        self.first += by
        self.last += by
        self.zero += by


def apart(wanted, room, top, bottom):
    """Moves labels so that none covers another: {name: y}."""
    names = sorted(wanted, key=wanted.get)
    bottom = max(bottom, top + sum(room.values()))
    places = {}
    end = top
    for i, name in enumerate(names):
        rest = sum(room[other] for other in names[i + 1:])
        y = min(max(wanted[name], end + room[name] / 2), bottom - rest - room[name] / 2)
        places[name] = y
        end = y + room[name] / 2
    return places


# --- The picture ------------------------------------------------------------------------------


def is_ours(name):
    return any(word in str(name).lower() for word in OURS)


def colour_of(names):
    """{name: number of its colour}; ours is the first where there is one of ours."""
    ours = [name for name in names if is_ours(name)]
    ordered = ours + [name for name in names if name not in ours]
    return {name: i for i, name in enumerate(ordered)}


def clean(text):
    """What XML may contain."""
    text = re.sub("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", str(text))
    return escape(text, {'"': "&quot;"})


def colours(palette):
    back, text, weak, grid, others, *series = palette
    rules = [f".back{{fill:{back}}}.text,.title,.value{{fill:{text}}}.small{{fill:{weak}}}",
             f".value{{stroke:{back}}}.grid{{stroke:{grid}}}.others{{fill:{others}}}",
             f".whisker{{stroke:{text}}}.reference{{stroke:{weak}}}"]
    rules += [f".fill{i}{{fill:{colour}}}.line{i}{{stroke:{colour}}}"
              for i, colour in enumerate(series)]
    return "\n".join(rules)


STYLE = f"""<style>
text{{font-family:system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,"DejaVu Sans",\
sans-serif;font-size:{TEXT}px}}
.title{{font-size:15px;font-weight:600}}.small{{font-size:{SMALL}px}}
.value{{stroke-width:4px;stroke-linejoin:round;paint-order:stroke}}
polyline{{fill:none;stroke-width:2}}.whisker{{stroke-width:1.5}}.leader{{stroke-dasharray:1 3}}
.reference{{stroke-dasharray:4 3}}
{colours(LIGHT)}
@media (prefers-color-scheme:dark){{
{colours(DARK)}
}}
</style>"""


class Picture:
    """Grows downwards: `height` is where the next thing may begin."""

    def __init__(self, title, minimum):
        self.title = title
        self.width = math.ceil(minimum)
        self.height = EDGE
        self.parts = []
        # The title is larger and bolder than what wrap() reckons with.
        for line in wrap(title, (self.width - 2 * EDGE) / 1.3):
            self.text("title", EDGE, self.height + 14, line)
            self.width = max(self.width, math.ceil(width(line) * 1.3 + 2 * EDGE))
            self.height += 20
        self.height += 8

    def add(self, part):
        self.parts.append(part)

    def text(self, kind, x, y, text, anchor=""):
        anchor = f' text-anchor="{anchor}"' if anchor else ""
        self.add(f'<text class="{kind}" x="{short(x)}" y="{short(y)}"{anchor}>{clean(text)}</text>')

    def line(self, kind, x1, y1, x2, y2):
        self.add(f'<line class="{kind}" x1="{short(x1)}" y1="{short(y1)}" x2="{short(x2)}" '
                 f'y2="{short(y2)}"/>')

    def svg(self):
        height = math.ceil(self.height + EDGE)
        head = (f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width}" height="{height}" '
                f'viewBox="0 0 {self.width} {height}" role="img" '
                f'aria-label="{clean(self.title)}">')
        back = f'<rect class="back" width="{self.width}" height="{height}" rx="6"/>'
        return "\n".join([head, STYLE, back, *self.parts, "</svg>"]) + "\n"

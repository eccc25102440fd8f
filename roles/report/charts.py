"""Charts as inline SVG: colours are variables of the page that holds them, so that it may be light or dark.

Each function draws for a width in pixels and returns one ``<svg>``. Text is escaped here. What is drawn is bounded by
the width, not by how long a run was: values that share a pixel are averaged before.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

LETTER = 6.6  # width of one, at the font size of the page's charts
LINE = 14  # from one line of text to the next
Point = tuple[float, float]


@dataclass
class Mark:
    """Something that happened at ``x``."""

    x: float
    text: str
    colour: str


@dataclass
class Row:
    """A line of a timeline: when it was there, how busy in each part of that (0 to 1), and what became of it."""

    name: str
    colour: str
    bars: list[tuple[float, float, list[float]]]
    marks: list[Mark]


@dataclass
class Frame:
    """The area of a plot, and its scales."""

    width: float
    height: float
    x_range: Point
    y_range: Point
    left: float = 44
    right: float = 12
    top: float = 10
    bottom: float = 38

    def x(self, value: float) -> float:
        low, high = self.x_range
        return self.left + (self.width - self.left - self.right) * (value - low) / ((high - low) or 1)

    def y(self, value: float) -> float:
        low, high = self.y_range
        return self.height - self.bottom - (self.height - self.top - self.bottom) * (value - low) / ((high - low) or 1)

    def levels(self, written: Callable[[float], str]) -> str:
        """Grid lines, with their values at the left."""
        out = []
        for tick in ticks(*self.y_range, 5):
            y = self.y(tick)
            out.append(line(self.left, y, self.width - self.right, y, "grid"))
            out.append(text(self.left - 6, y + 4, written(tick), "end"))
        return "".join(out)

    def below(self, label: str, values: Sequence[tuple[float, str]]) -> str:
        """Names of places on the x axis, and what they are."""
        base = self.height - self.bottom
        out = [text(self.x(x), base + 16, name) for x, name in values]
        return "".join([*out, text((self.left + self.width - self.right) / 2, self.height - 4, label, cls="dim")])

    def numbers(self, label: str, *, whole: bool = False) -> str:
        found = ticks(*self.x_range, max(3, int(self.width / 100)), whole=whole)
        return self.below(label, [(tick, number(tick)) for tick in found])


def number(value: float) -> str:
    """As short as a person would write it."""
    if not math.isfinite(value):
        return str(value)
    if value and abs(value) < 0.01:
        return f"{value:.1g}"
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def ticks(low: float, high: float, most: int, *, whole: bool = False) -> list[float]:
    """At most about so many round numbers in [low, high]."""
    if not high > low:
        return [low]
    raw = (high - low) / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(s * power for s in (1, 2, 5, 10) if s * power >= raw * 0.999)
    step = max(1.0, step) if whole else step
    first = math.ceil(low / step - 1e-9)
    return [round(n * step, 10) for n in range(first, math.floor(high / step + 1e-9) + 1)]


def svg(width: float, height: float, label: str, *parts: str) -> str:
    return (
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" role="img" aria-label="{escape(label)}">'
        f"<title>{escape(label)}</title>{''.join(parts)}</svg>"
    )


def line(x1: float, y1: float, x2: float, y2: float, cls: str, style: str = "") -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{cls}"{_style(style)}/>'


def text(x: float, y: float, words: str, anchor: str = "middle", cls: str = "", style: str = "") -> str:
    named = f' class="{cls}"' if cls else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{named}{_style(style)}>{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, colour: str, title: str = "", opacity: float = 1.0) -> str:
    """Colour is the name of a variable of the page."""
    tip = f"<title>{escape(title)}</title>" if title else ""
    faded = f";opacity:{opacity:.2f}" if opacity < 1 else ""
    size = f'width="{max(0.0, width):.1f}" height="{max(0.0, height):.1f}"'
    return f'<rect x="{x:.1f}" y="{y:.1f}" {size} style="fill:var(--{colour}){faded}">{tip}</rect>'


def _style(style: str) -> str:
    return f' style="{style}"' if style else ""


def thin(points: Sequence[Point], most: int) -> list[Point]:
    """No more points than that: neighbours are averaged."""
    size = max(1, math.ceil(len(points) / max(1, most)))
    parts = [points[i : i + size] for i in range(0, len(points), size)]
    return [(sum(p[0] for p in part) / len(part), sum(p[1] for p in part) / len(part)) for part in parts]


def smooth(points: Sequence[Point], weight: float = 0.8) -> list[Point]:
    """Exponential moving average, corrected for its start."""
    out, mean, total = [], 0.0, 0.0
    for x, y in points:
        mean, total = weight * mean + (1 - weight) * y, weight * total + (1 - weight)
        out.append((x, mean / total))
    return out


def learning(
    width: float, label: str, rewards: Sequence[Point], tests: Sequence[tuple[float, float, float, float]],
    last: float, marks: Sequence[Mark],
) -> str:  # fmt: skip
    """Reward by step, the accuracies measured on the way with their intervals (step, value, low, high), and what
    happened at which step, in words above the plot."""
    room = int(width / 2)
    points, soft = thin(rewards, room), thin(smooth(rewards), room)
    values = [y for _, y in points] + [v for test in tests for v in test[1:]]
    low, high = min(values, default=0.0), max(values, default=1.0)
    low, high = (0.0, 1.0) if low > -0.1 and high < 1.1 else (low, high)
    marks = sorted(marks, key=lambda m: m.x)
    frame = Frame(width, 300, (0, max(last, 1)), (low, high), top=14, right=30)
    lanes, said = _lanes(frame, marks)
    frame.top += LINE * lanes
    frame.height += LINE * lanes
    parts = [frame.levels(number), frame.numbers("step", whole=True)]
    for mark, lane, anchor in said:
        x, y = frame.x(mark.x), 12 + LINE * lane
        parts.append(line(x, y + 3, x, frame.height - frame.bottom, "mark", f"stroke:var(--{mark.colour})"))
        parts.append(text(x, y, mark.text, anchor, style=f"fill:var(--{mark.colour})"))
    parts.append(_path(frame, points, "reward", 0.35, 1))
    parts.append(_path(frame, soft, "reward", 1, 2))
    for x, value, below, above in tests:
        at = frame.x(x)
        parts.append(
            line(at, frame.y(below), at, frame.y(above), "mark", "stroke:var(--accuracy);stroke-dasharray:none")
        )
        parts.append(
            f'<circle cx="{at:.1f}" cy="{frame.y(value):.1f}" r="4" style="fill:var(--accuracy)">'
            f"<title>step {number(x)}: {value:.3f} ({below:.3f} to {above:.3f})</title></circle>"
        )
    parts.append(_path(frame, [(t[0], t[1]) for t in tests], "accuracy", 1, 2))
    return svg(width, frame.height, label, *parts)


def _path(frame: Frame, points: Sequence[Point], colour: str, opacity: float, wide: float) -> str:
    if len(points) < 2:
        return ""
    along = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in points)
    style = f"stroke:var(--{colour});opacity:{opacity};stroke-width:{wide}"
    return f'<polyline points="{along}" class="curve" style="{style}"/>'


def _lanes(frame: Frame, marks: Sequence[Mark]) -> tuple[int, list[tuple[Mark, int, str]]]:
    """Words of neighbouring marks stand in lines above one another; they end where the plot does."""
    ends: list[float] = []
    said = []
    for mark in marks:
        wide, x = LETTER * len(mark.text), frame.x(mark.x)
        anchor = "middle"
        start = x - wide / 2
        if start < 2:
            anchor, start = "start", x
        if start + wide > frame.width - 2:
            anchor, start = "end", x - wide
        lane = next((n for n, end in enumerate(ends) if end < start), len(ends))
        ends[lane : lane + 1] = [start + wide + LETTER]
        said.append((mark, lane, anchor))
    return len(ends), said


def columns(width: float, label: str, names: Sequence[str], shares: Sequence[float], x_label: str) -> str:
    """A histogram: a column each, its share above it."""
    frame = Frame(width, 240, (0, len(names) or 1), (0, max([*shares, 0.01]) * 1.1), top=18)
    every = math.ceil(len(names) / 16) or 1
    places = [(n + 0.5, name) for n, name in enumerate(names) if n % every == 0]
    parts = [frame.levels(lambda v: f"{v:.0%}"), frame.below(x_label, places)]
    slot = frame.x(1) - frame.x(0)
    for n, (name, share) in enumerate(zip(names, shares, strict=True)):
        middle, wide = frame.x(n + 0.5), min(70.0, 0.7 * slot)
        top = frame.y(share)
        parts.append(box(middle - wide / 2, top, wide, frame.y(0) - top, "c0", f"{name}: {share:.1%}"))
        if slot > 34:
            parts.append(text(middle, top - 5, f"{share:.0%}"))
    return svg(width, frame.height, label, *parts)


def stack(width: float, label: str, steps: Sequence[float], parts_s: Sequence[tuple[str, str, Sequence[float]]]) -> str:
    """Seconds of each step, by what they were spent on: (name, colour, seconds by step), the first at the bottom."""
    most = int((width - 60) / 4)
    rows = [thin(list(zip(steps, seconds, strict=True)), most) for _, _, seconds in parts_s]
    heights = [sum(row[n][1] for row in rows) for n in range(len(rows[0]))] if rows else []
    first, last = (min(steps), max(steps)) if len(steps) else (0, 1)
    frame = Frame(width, 240, (first - 0.5, last + 0.5), (0, usual(heights) * 1.05))
    out = [frame.levels(lambda v: f"{number(v)} s"), frame.numbers("step", whole=True)]
    slot = (width - frame.left - frame.right) / max(1, len(heights))
    below = [0.0] * len(heights)
    for (_, colour, _), row in zip(parts_s, rows, strict=True):
        for n, (_, seconds) in enumerate(row):
            top = min(below[n] + seconds, frame.y_range[1])
            if top > below[n]:
                x = frame.left + n * slot
                out.append(box(x, frame.y(top), slot * 0.92, frame.y(below[n]) - frame.y(top), colour))
            below[n] = top
    return svg(width, frame.height, label, *out)


def usual(heights: Sequence[float]) -> float:
    """What most are within: a few slow steps must not flatten the others, and are cut off."""
    ordered = sorted(heights)
    if not ordered:
        return 1.0
    high = ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))]
    return min(ordered[-1], 1.5 * high) or 1.0


def share(width: float, label: str, parts: Sequence[tuple[str, str, float]]) -> str:
    """One bar, whole, of (name, colour, amount)."""
    whole = sum(amount for _, _, amount in parts) or 1.0
    x, out = 0.0, []
    for name, colour, amount in parts:
        wide = width * amount / whole
        if amount:
            out.append(box(x, 0, max(1.5, wide - 1), 26, colour, f"{name}: {number(amount)} ({amount / whole:.1%})"))
        x += wide
    return svg(width, 26, label, *out)


def lives(width: float, label: str, rows: Sequence[Row], until: float, turns: Sequence[Mark]) -> str:
    """A line a peer, over seconds: faint while it waits, full while it works. ``turns`` concern all of them."""
    names = max([len(row.name) for row in rows], default=0) * LETTER + 14
    above = names > 0.3 * width  # names stand above their bars where there is no room beside them
    left, pitch = (4.0 if above else names), (38 if above else 26)
    frame = Frame(width, 30 + pitch * len(rows) + 38, (0, max(until, 1e-9)), (0, 1), left=left, right=14, top=24)
    out = [line(frame.x(t.x), 18, frame.x(t.x), frame.height - frame.bottom, "mark", f"stroke:var(--{t.colour})")
           for t in turns]  # fmt: skip
    _, said = _lanes(frame, turns)
    out += [text(frame.x(t.x), 13, t.text, anchor, "dim") for t, lane, anchor in said if lane == 0]
    for n, row in enumerate(rows):
        y = frame.top + n * pitch + (14 if above else 3)
        out.append(text(0, y - 3, row.name, "start") if above else text(left - 8, y + 12, row.name, "end"))
        for first, last, busy in row.bars:
            x, wide = frame.x(first), max(2.0, frame.x(last) - frame.x(first))
            out.append(box(x, y, wide, 16, row.colour, f"{row.name}: {last - first:.1f} s", 0.25 if busy else 0.5))
            slot = wide / max(1, len(busy))
            for k, count, shade in _alike(busy):
                out.append(box(x + k * slot, y, count * slot + 0.3, 16, row.colour, opacity=0.75 * shade))
        for mark in row.marks:
            x = frame.x(mark.x)
            out.append(_sign(x, y + 8, mark))
    base = frame.height - frame.bottom
    out.append(line(left, base, width - frame.right, base, "grid"))
    out.append(frame.numbers("seconds with a peer there"))
    return svg(width, frame.height, label, *out)


def _alike(busy: Sequence[float], shades: int = 8) -> Iterator[tuple[int, int, float]]:
    """Neighbours of one shade together: the first, how many, the shade. What has none is left out."""
    first = 0
    for shade, group in itertools.groupby(round(shades * part) for part in busy):
        count = len(list(group))
        if shade:
            yield first, count, shade / shades
        first += count


def _sign(x: float, y: float, mark: Mark) -> str:
    """A cross for a death, a ring for anything else."""
    title = f"<title>{escape(mark.text)}</title>"
    if mark.colour == "bad":
        lines = "".join(f"M{x - 6:.1f},{y - s * 6:.1f}L{x + 6:.1f},{y + s * 6:.1f}" for s in (1, -1))
        return f'<path d="{lines}" class="curve" style="stroke:var(--bad);stroke-width:3">{title}</path>'
    style = f"fill:var(--card);stroke:var(--{mark.colour});stroke-width:2"
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" style="{style}">{title}</circle>'

"""Pictures of what benchmarks found, all in one style, readable at 700 pixels.

A ``Panel`` says what is drawn in plain values, which also go into the JSON: ``python benchmarks/parts/picture.py
results/NAME.json`` draws the picture again from there. Marks are medians, whiskers the middle half of the rounds.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

PANEL_INCHES = (3.5, 3.3)
DPI = 100  # two panels side by side are 700 pixels wide
COLOURS = ("#1b6ca8", "#d1603d", "#5b8c5a", "#8d6a9f", "#b08900", "#5c6770", "#c2577a")
MARKS = "osD^vPX"
LONG = 16  # letters


@dataclass
class Panel:
    """One pair of axes. ``lines``: by name, points ``[x, median, low, high]``. Where ``ticks`` are given the x are
    0, 1, ... and the ticks their names: bars side by side, else lines. ``level``: a height that is drawn across, for
    what would be ideal, with its ``level_name``."""

    title: str
    y: str
    x: str = ""
    lines: dict[str, list[list[float]]] = field(default_factory=dict)
    ticks: list[str] = field(default_factory=list)
    log_x: bool = False
    log_y: bool = False
    level: float | None = None
    level_name: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def point(x: float, spread: Any) -> list[float]:
    """A ``Spread`` as a point of a line."""
    return [x, spread.median, spread.low, spread.high]


def draw(panels: Sequence[Panel], out: Path) -> None:
    """Two panels a row, into the PNG ``out``. Nothing when there are none."""
    if not panels:
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    size = (2 * PANEL_INCHES[0], PANEL_INCHES[1] * rows)
    with pyplot.rc_context({"font.size": 8, "axes.spines.top": False, "axes.spines.right": False}):
        figure, axes = pyplot.subplots(rows, columns, figsize=size, dpi=DPI, squeeze=False, layout="constrained")
        for panel, ax in zip(panels, axes.flat, strict=False):
            _panel(panel, ax)
        for ax in list(axes.flat)[len(panels) :]:
            ax.axis("off")
        figure.savefig(out, metadata={"Software": None})
        pyplot.close(figure)


def _panel(panel: Panel, ax: Any) -> None:
    across = any(len(tick) > LONG for tick in panel.ticks)  # long names stand beside bars that lie
    for i, (name, points) in enumerate(panel.lines.items()):
        x, y, low, high = ([p[k] for p in points] for k in range(4))
        whiskers = [[max(0.0, m - b) for m, b in zip(y, low, strict=True)],
                    [max(0.0, t - m) for m, t in zip(y, high, strict=True)]]  # fmt: skip
        colour = COLOURS[i % len(COLOURS)]
        if panel.ticks:
            width = 0.8 / len(panel.lines)
            places = [v + width * (i - (len(panel.lines) - 1) / 2) for v in x]
            style: dict[str, Any] = {"color": colour, "label": name, "error_kw": {"elinewidth": 0.8}}
            if across:
                ax.barh(places, y, 0.92 * width, xerr=whiskers, **style)
            else:
                ax.bar(places, y, 0.92 * width, yerr=whiskers, **style)
        else:
            mark = MARKS[i % len(MARKS)]
            ax.errorbar(x, y, yerr=whiskers, color=colour, marker=mark, markersize=3.5, linewidth=1.2, elinewidth=0.8,
                        capsize=2, label=name)  # fmt: skip
    _axes(panel, ax, across)


def _axes(panel: Panel, ax: Any, across: bool) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    names, values = (ax.yaxis, ax.xaxis) if across else (ax.xaxis, ax.yaxis)
    if panel.level is not None:
        draw_level = ax.axvline if across else ax.axhline
        draw_level(panel.level, color="#444", linewidth=0.8, linestyle=":", label=panel.level_name or None)
    if panel.log_x:
        ax.set_xscale("log", base=2)
        ax.xaxis.set_major_formatter("{x:g}")
    if panel.log_y:
        (ax.set_xscale if across else ax.set_yscale)("log")
        values.set_major_locator(LogLocator(subs=(1, 2, 5)))
        values.set_major_formatter("{x:g}")
        values.set_minor_formatter(NullFormatter())
    else:
        (ax.set_xlim if across else ax.set_ylim)(0)
    if panel.ticks:
        names.set_ticks(range(len(panel.ticks)), panel.ticks)
    if across:
        ax.invert_yaxis()
    ax.set_title(panel.title, fontsize=9, loc="left")
    names.set_label_text(panel.x)
    values.set_label_text(panel.y)
    ax.grid(axis="x" if across else "y", linewidth=0.4, alpha=0.5)
    if len(panel.lines) > 1 or panel.level_name:
        below = (0.5, -0.16)  # of the axes, where no mark can be
        ax.legend(loc="upper center", bbox_to_anchor=below, ncols=2, frameon=False, fontsize=7)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        draw([Panel(**panel) for panel in json.loads(Path(name).read_text())["panels"]], Path(name).with_suffix(".png"))

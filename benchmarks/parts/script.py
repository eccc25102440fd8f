"""What every benchmark script is: flags, a measurement, and its table, JSON and picture in one directory.

python benchmarks/NAME.py             the figures that are published, into results/
python benchmarks/NAME.py --quick     does it work at all: under 20 s, numbers that mean little, into results/quick/
python benchmarks/NAME.py --out DIR   somewhere else
python benchmarks/NAME.py --long      where a script has it: all of it, which takes hours, into NAME-long.json
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from parts.measure import ROOT, Result, environment
from parts.picture import Panel, draw
from parts.report import tell

RESULTS = ROOT / "benchmarks/results"


@dataclass
class Findings:
    results: list[Result]
    panels: list[Panel] = field(default_factory=list)


def flags(file: str, about: str, *, long: str = "") -> argparse.ArgumentParser:
    """The flags that all have; a script may add its own. ``long``: what --long does, where there is that."""
    parser = argparse.ArgumentParser(prog=f"benchmarks/{Path(file).name}", description=about.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few repetitions, small sizes: does it work at all?")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where results go (default: benchmarks/results)")
    if long:
        parser.add_argument("--long", action="store_true", help=long)
    return parser


def directory(arguments: argparse.Namespace) -> Path:
    """Where results go."""
    return arguments.out or (RESULTS / "quick" if arguments.quick else RESULTS)


def run(parser: argparse.ArgumentParser, measure: Callable[[argparse.Namespace], Findings]) -> None:
    """Measure, print the table, write NAME.json and NAME.png."""
    arguments = parser.parse_args()
    where, began = environment(), time.time()
    found = measure(arguments)
    chosen = {n: v for n, v in vars(arguments).items() if n != "out" and v != parser.get_default(n)}
    said = [f"--{name}" if value is True else f"--{name}={value}" for name, value in chosen.items()]
    name = Path(parser.prog).stem + "-long" * getattr(arguments, "long", False)
    path = directory(arguments) / f"{name}.json"
    tell(" ".join([parser.prog, *said]), found.results, where, began, path, found.panels)
    draw(found.panels, path.with_suffix(".png"))

"""How old may a sample be, and what must be done about it? The mask of the product and the corrections of others.

One process trains with every sample held at a lag (``parts/held_lag.py``), by the product's own engine, buffer, loss
and optimizer; the contestants differ in what becomes of a stale token's gradient (``parts/corrections.py``). Each has
its own best learning rate at each lag, found with other seeds. All sample and train the same number of batches. What is
reported is the mean of the last five evaluations, over seeds, with its 95% interval.

    python benchmarks/staleness.py             4 contestants, lags 0, 2 and 8, 3 seeds, an easy start
    python benchmarks/staleness.py --long      all contestants, lags 0 to 16, 5 seeds, three tasks: hours
    python benchmarks/staleness.py --long --tasks smollm2      a real language model, fewer points: longer

The long one keeps each finished training in a file and goes on there: ``--minutes 30`` ends it in time.

At lag 0 all ratios are one and the mask does nothing, so all contestants are one: on-policy, which the others are
compared with, at its own best rate. What this does not show: lags that vary within a batch, as a mesh makes them
(``sync_vs_async.py`` has those), and models that take more than two cores.
"""

import argparse
import dataclasses
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from parts.cells import Cells, mean_interval
from parts.held_lag import CONTESTANTS, FIGURES, TASKS, Cell, train
from parts.measure import Result, Spread
from parts.picture import Panel
from parts.script import Findings, directory, flags, run

LOSS = 0.05  # of accuracy below on-policy: from there on a lag is called unsafe
CHOOSING = 1000  # seeds that choose rates begin here
ON_POLICY = "fresh"  # at lag 0 all are
SAID = {
    "fresh": "as if fresh",
    "age": "age mask",
    "drift": "drift mask",
    "ppo": "PPO clip",
    "tis": "TIS",
    "topr": "TOPR",
    "gspo": "GSPO",
    "gspo-wide": "GSPO, clip 0.2",
    "decoupled": "decoupled PPO",
}


@dataclass(frozen=True)
class Table:
    """What is trained for one task."""

    contestants: tuple[str, ...] = CONTESTANTS
    lags: tuple[int, ...] = (1, 2, 4, 8, 16)
    rates: tuple[float, ...] = (1e-4, 2e-4, 4e-4, 8e-4)
    seeds: int = 5
    choosing: int = 2
    steps: int = 100
    prompts: int = 256


FOUR = ("fresh", "drift", "ppo", "tis")
SMALL = Table(FOUR, (2, 8), (2e-4, 4e-4, 8e-4), seeds=3, choosing=1, steps=50, prompts=128)
QUICK = Table(("fresh", "drift"), (2,), (4e-4,), seeds=1, choosing=0, steps=4, prompts=16)
LONG = {
    "easy": Table(),
    "sort": Table(steps=150),
    "graded": Table(lags=(2, 8, 16)),
    "many": Table(lags=(2, 8, 16)),
    "smollm2": Table(FOUR, (2, 8), (3e-6, 1e-5, 3e-5), seeds=3, choosing=1, steps=30, prompts=128),
}


def main() -> None:
    parser = flags(__file__, __doc__, long="all contestants and lags, three tasks: hours, in pieces if need be")
    parser.add_argument("--tasks", help=f"separated by commas: {', '.join(TASKS)}")
    parser.add_argument("--minutes", type=float, help="end in time, to go on later (with --long)")
    run(parser, measure)


def measure(arguments: argparse.Namespace) -> Findings:
    standard, tasks = (QUICK, "sort") if arguments.quick else (SMALL, "easy")
    tasks = (arguments.tasks or ("sort,graded,many" if arguments.long else tasks)).split(",")
    if unknown := set(tasks) - set(TASKS):
        raise SystemExit(f"unknown task {', '.join(sorted(unknown))}; known are {', '.join(TASKS)}")
    tables = {name: LONG[name] if arguments.long else standard for name in tasks}
    deadline = time.monotonic() + 60 * arguments.minutes if arguments.minutes else math.inf
    file = directory(arguments) / f"staleness{'-long' * arguments.long}.jsonl"
    if not arguments.long:
        file.unlink(missing_ok=True)
    cells = Cells(file, train, deadline)
    found = {task: Found(task, table, cells) for task, table in tables.items()}
    if not arguments.long:
        file.unlink()
    results = [line for f in found.values() for line in f.results()]
    panels = [f.accuracy() for f in found.values()]
    first = next(iter(found.values()))
    return Findings(results, [*panels, *(first.figure(name) for name in ("ess_token", "negative_mass", "entropy"))])


class Found:
    """The trainings of one task."""

    def __init__(self, task: str, table: Table, cells: Cells) -> None:
        self.task, self.table, self.cells = task, table, cells
        self.rates = self._choose()
        seeds = range(table.seeds)
        cells.run([self._cell(*where, self.rates[where], seed) for seed in seeds for where in self.rates], task)

    def rows(self, contestant: str, lag: int) -> list[dict[str, Any]]:
        """By seed."""
        where = (contestant if lag else ON_POLICY, lag)
        return [self.cells.row(self._cell(*where, self.rates[where], seed)) for seed in range(self.table.seeds)]

    def results(self) -> list[Result]:
        fresh = self._result(ON_POLICY, 0, f"{self.task}, on-policy")
        lines = [self._result(c, lag, f"{self.task}, {lag} versions old, {SAID[c]}")
                 for lag in self.table.lags for c in self.table.contestants]  # fmt: skip
        return [fresh, *lines, *(self._safe(c) for c in self.table.contestants)]

    def accuracy(self) -> Panel:
        lags = (0, *self.table.lags)
        lines = {
            SAID[c]: [[float(lag), *(100 * v for v in mean_interval(_accuracies(self.rows(c, lag))))] for lag in lags]
            for c in self.table.contestants
        }
        return Panel(f"{self.task}: right answers, 95% interval", "%", "versions that samples are old", lines)

    def figure(self, name: str) -> Panel:
        lines = {
            SAID[c]: [[float(lag), value, value, value] for lag in (0, *self.table.lags)
                      if (value := _mean(self.rows(c, lag), name)) is not None]
            for c in self.table.contestants
        }  # fmt: skip
        return Panel(f"{self.task}: {name.replace('_', ' ')}", "", "versions that samples are old", lines)

    def _choose(self) -> dict[tuple[str, int], float]:
        """For each contestant and lag the rate with the highest accuracy over the choosing seeds."""
        t = self.table
        where = [(ON_POLICY, 0), *((c, lag) for lag in t.lags for c in t.contestants)]
        if not t.choosing:
            return dict.fromkeys(where, t.rates[0])
        seeds = range(CHOOSING, CHOOSING + t.choosing)
        tries = {(*w, rate): [self._cell(*w, rate, seed) for seed in seeds] for w in where for rate in t.rates}
        self.cells.run([cell for cells in tries.values() for cell in cells], f"{self.task}, rates")
        reached = {place: sum(_accuracies([self.cells.row(c) for c in cells])) for place, cells in tries.items()}
        return {w: max(t.rates, key=lambda rate, w=w: reached[*w, rate]) for w in where}

    def _cell(self, contestant: str, lag: int, rate: float, seed: int) -> Cell:
        return Cell(self.task, contestant, lag, rate, seed, self.table.steps, self.table.prompts)

    def _result(self, contestant: str, lag: int, name: str) -> Result:
        rows, fresh = self.rows(contestant, lag), self.rows(ON_POLICY, 0)
        here, there = _accuracies(rows), _accuracies(fresh)
        mean, low, high = mean_interval(here)
        less, least, most = mean_interval([b - a for a, b in zip(here, there, strict=True)])
        rate = self.rates[contestant if lag else ON_POLICY, lag]
        edge = rate in (min(self.table.rates), max(self.table.rates))
        details = {"mean": 100 * mean, "low": 100 * low, "high": 100 * high, "rate": rate, "rate_at_the_edge": edge}
        if lag:
            details |= {"below_on_policy": 100 * less, "at_least": 100 * least, "at_most": 100 * most}
        measured = (*FIGURES, "ess_token_lowest", "distinct_right", "pass_at_8")
        details |= {name: value for name in measured if (value := _mean(rows, name)) is not None}
        return Result(
            name,
            "%",
            Spread.of([100 * a for a in here]),
            Spread.of([100 * a for a in there]) if lag else None,
            "on-policy" if lag else "",
            details=details | {"curves": [row["curve"] for row in rows]},
            settings=dataclasses.asdict(self.table) | {"task": self.task},
            more_is_better=True,
        )

    def _safe(self, contestant: str) -> Result:
        """The oldest lag up to which none loses more than ``LOSS`` against on-policy."""
        there, safe = _accuracies(self.rows(ON_POLICY, 0)), 0
        for lag in self.table.lags:
            here = _accuracies(self.rows(contestant, lag))
            if mean_interval([b - a for a, b in zip(here, there, strict=True)])[0] > LOSS:
                break
            safe = lag
        name = f"{self.task}, {SAID[contestant]}: within {100 * LOSS:.0f} points of on-policy up to"
        return Result(name, "versions", Spread.of([float(safe)]), settings={"lags": list(self.table.lags)})


def _accuracies(rows: Sequence[dict[str, Any]]) -> list[float]:
    return [row["accuracy"] for row in rows]


def _mean(rows: Sequence[dict[str, Any]], name: str) -> float | None:
    """Over those rows that have it."""
    values = [row[name] for row in rows if row.get(name) is not None]
    return sum(values) / len(values) if values else None


if __name__ == "__main__":
    main()

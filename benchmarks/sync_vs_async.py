"""Synchronous against asynchronous training on the same cores: a tuned plain loop, and the mesh at max_lag 0 to 4.

What is ideal is said first: cores that generate do not train. Where nobody waits, a loop that keeps all cores busy by
turns does as much in a second as one that divides them, and the ideal of asynchronous training is 1.0 times the plain
loop, less what the mesh costs. It can win where cores would idle: while completions wait for a tool, or a batch for its
longest one. So there are two tasks: the quickstart's model as it is (``sort``), and the same whose completions first
wait (``parts/waiting.py``), with a long tail. They use two cores, wherever this runs.

    python benchmarks/sync_vs_async.py          2 seeds of 50 steps, throughput alone where completions wait
    python benchmarks/sync_vs_async.py --long   5 seeds of both, each contestant's best layout of the cores
"""

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parts import waiting
from parts.cells import mean_interval
from parts.contest import EASY, WARM, WINDOW, Layout, Outcome, mesh, plain
from parts.measure import Result, Spread, compare
from parts.picture import Panel, point
from parts.script import Findings, flags, run

from roles.starter import ensure

CORES = 2
SAMPLES = 32 * 8  # of a step
LAGS = (0, 1, 2, 4)
PLAIN = "plain loop"
PLAIN_LAYOUTS = (Layout(1), Layout(2))
MESH_LAYOUTS = (Layout(1, 2, 1), Layout(2, 2, 1), Layout(2, 1, 1))
SEARCH_SEED = 1000
TARGET = 0.8


@dataclass(frozen=True)
class Size:
    """``steps``: of training, and of the task that waits. ``searched``: which contestants find their own layout;
    others take that of the next one before."""

    seeds: int
    steps: int
    waiting_seeds: int
    waiting_steps: int
    search_steps: int
    lags: tuple[int, ...] = LAGS
    searched: tuple[int, ...] = (0, 2)
    heldout: int = 256


STANDARD = Size(seeds=2, steps=50, waiting_seeds=1, waiting_steps=20, search_steps=10)
LONG = Size(seeds=5, steps=100, waiting_seeds=5, waiting_steps=100, search_steps=25, searched=LAGS, heldout=512)
QUICK = Size(seeds=1, steps=6, waiting_seeds=0, waiting_steps=0, search_steps=0, lags=(2,), heldout=0)


def main() -> None:
    run(flags(__file__, __doc__, long="5 seeds of both tasks: two hours"), measure)


def measure(arguments: argparse.Namespace) -> Findings:
    size = QUICK if arguments.quick else LONG if arguments.long else STANDARD
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])  # and of all that is started from here
    directory = Path(tempfile.mkdtemp(prefix="mesh-sync-async-"))
    contest = Contest(size, directory, "starter:sort" if arguments.quick else "")
    layouts = contest.search()
    results, panels = [], []
    for task, seeds in (("sort", size.seeds), ("waiting", size.waiting_seeds)):
        if seeds:
            found = contest.train(task, seeds, layouts)
            results += lines(task, found, layouts, size)
            panels += pictures(task, found)
    shutil.rmtree(directory)
    return Findings(results, panels)


class Contest:
    """``model``: the starting model of all seeds; empty: an easy one, made for each seed."""

    def __init__(self, size: Size, directory: Path, model: str) -> None:
        self.size, self.directory, self.model, self.runs = size, directory, model, 0

    def names(self) -> list[str]:
        return [PLAIN, *(_name(lag) for lag in self.size.lags)]

    def search(self) -> dict[str, Layout]:
        """The layout of the cores with which each contestant is fastest, on the task that does not wait."""
        size, best = self.size, {PLAIN: PLAIN_LAYOUTS[0]}
        if size.search_steps:
            best[PLAIN] = self._fastest(PLAIN, PLAIN_LAYOUTS)
        for lag in size.lags:
            if size.search_steps and lag in size.searched:
                best[_name(lag)] = self._fastest(_name(lag), MESH_LAYOUTS)
            else:
                known = [layout for name, layout in best.items() if name != PLAIN]
                best[_name(lag)] = known[-1] if known else MESH_LAYOUTS[0]
        return best

    def _fastest(self, name: str, layouts: Sequence[Layout]) -> Layout:
        rates = {layout: self.run(name, "sort", SEARCH_SEED, layout, self.size.search_steps, 0).samples_per_s
                 for layout in layouts}  # fmt: skip
        for layout, rate in rates.items():
            print(f"{name}, {layout}: {rate:.0f} samples/s", file=sys.stderr, flush=True)
        return max(rates, key=rates.__getitem__)

    def train(self, task: str, seeds: int, layouts: dict[str, Layout]) -> dict[str, list[Outcome]]:
        """By contestant, then by seed. Who begins changes with the seed."""
        steps = self.size.steps if task == "sort" else self.size.waiting_steps
        names, found = self.names(), {name: [] for name in self.names()}
        for seed in range(seeds):
            for name in names[seed % len(names) :] + names[: seed % len(names)]:
                outcome = self.run(name, task, seed, layouts[name], steps, self.size.heldout)
                found[name].append(outcome)
                right = "" if outcome.accuracy is None else f", {outcome.accuracy:.2f} right"
                said = f"{task}, seed {seed}, {name}: {outcome.samples_per_s:.0f} samples/s{right}"
                print(said, file=sys.stderr, flush=True)
        return found

    def run(self, name: str, task: str, seed: int, layout: Layout, steps: int, heldout: int) -> Outcome:
        model = self.model or ensure(EASY, seed)
        overrides = [f"run.steps={steps}", f"run.seed={seed}", f"model.path={model}", f"task.heldout_prompts={heldout}"]
        if task == "waiting":
            overrides += [f"task.rollout={waiting.NAME}", "rollout.groups_in_flight=64", "rollout.max_batch=512"]
        if name == PLAIN:
            return plain(overrides, layout, SAMPLES, evaluate=heldout > 0)
        self.runs += 1
        overrides.append(f"trainer.max_lag={_lag(name)}")
        return mesh(overrides, layout, SAMPLES, self.directory / f"run-{self.runs}")


def _name(lag: int) -> str:
    return f"mesh, max_lag {lag}"


def _lag(name: str) -> int:
    return int(name.split()[-1])


def lines(task: str, found: dict[str, list[Outcome]], layouts: dict[str, Layout], size: Size) -> list[Result]:
    results, loop = [], found[PLAIN]
    for name, own in found.items():
        settings = {"task": task, "layout": str(layouts[name]), "cores": CORES, "seeds": len(own), "from_step": WARM,
                    "steps": len(own[0].ends), "samples_a_step": SAMPLES, "start": "easy"}  # fmt: skip
        details = {"steps_per_s": _mean([1 / o.step_s for o in own]), **_means(own)}
        if name == PLAIN:
            details |= ideal(task, own)
        said = f"{task}: samples a second, {name}"
        rates = [o.samples_per_s for o in own]
        if name == PLAIN:
            results.append(
                Result(said, "1/s", Spread.of(rates), details=details, settings=settings, more_is_better=True)
            )
        else:
            results.append(compare(said, "1/s", rates, [o.samples_per_s for o in loop], PLAIN, details=details,
                                   settings=settings, more_is_better=True))  # fmt: skip
        results += learned(task, name, own, loop, settings)
    return results


def learned(task: str, name: str, own: list[Outcome], loop: list[Outcome], settings: dict[str, Any]) -> list[Result]:
    """The time to the target, where all reach it, and the accuracy in the end."""
    results = []
    times = [(o.seconds_to(TARGET), p.seconds_to(TARGET)) for o, p in zip(own, loop, strict=True)]
    reached = [(o, p) for o, p in times if o is not None and p is not None]
    if reached:
        details = {"seeds_that_reach_it": sum(o is not None for o, _ in times), "window_steps": WINDOW}
        said = f"{task}: seconds to {TARGET:.0%} right, {name}"
        ours, theirs = [o for o, _ in reached], [p for _, p in reached]
        results.append(compare(said, "s", ours, theirs, PLAIN, details=details, settings=settings) if name != PLAIN
                       else Result(said, "s", Spread.of(ours), details=details, settings=settings))  # fmt: skip
    right = [100 * o.accuracy for o in own if o.accuracy is not None]
    if right:
        mean, low, high = mean_interval(right)
        details = {"mean": mean, "low": low, "high": high}
        results.append(Result(f"{task}: right in the end, {name}", "%", Spread.of(right), details=details,
                              settings=settings, more_is_better=True))  # fmt: skip
    return results


def ideal(task: str, loop: list[Outcome]) -> dict[str, float]:
    """How much faster than the plain loop anybody could be on these cores, by its own times: as fast as it would be
    without the seconds in which all of its samples waited. 1.0 where none wait."""
    sample, idle, learn = (_mean([o.details[name] for o in loop]) for name in ("sample_s", "idle_s", "learn_s"))
    waits = (
        {"mean_wait_s": waiting.mean(), "mean_longest_wait_s": waiting.longest(SAMPLES)} if task == "waiting" else {}
    )
    return {**waits, "ideal_ratio": (sample + learn) / (sample - idle + learn)}


def pictures(task: str, found: dict[str, list[Outcome]]) -> list[Panel]:
    names = list(found)
    rates = [point(i, Spread.of([o.samples_per_s for o in found[name]])) for i, name in enumerate(names)]
    curves: dict[str, list[list[float]]] = {}
    for name, own in found.items():
        every = max(1, len(own[0].ends) // 12)
        curves[name] = []
        for i in range(every, len(own[0].ends) + 1, every):
            y = Spread.of([100 * _mean(o.rewards[max(0, i - WINDOW) : i]) for o in own])
            curves[name].append(point(_mean([o.ends[i - 1] for o in own]), y))
    return [
        Panel(
            f"{task}: samples a second",
            "1/s",
            lines={"": rates},
            ticks=[n.replace(", max_lag", "\nlag") for n in names],
        ),
        Panel(f"{task}: right answers in training", "%", "seconds", curves),
    ]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _means(own: list[Outcome]) -> dict[str, float]:
    return {name: _mean([o.details[name] for o in own]) for name in own[0].details}


if __name__ == "__main__":
    main()

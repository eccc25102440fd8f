"""The mesh and the plain loop next to TRL's GRPOTrainer: same model, task, prompts, batch, token budget and cores.

All three train on the same prompts in the same order, with as many samples, one optimizer step a batch, the same
advantages (without division by the standard deviation) and a loss over the same tokens, in float32, on two cores. Each
uses them as it is fastest, which is searched first: threads and micro-batches. TRL without logging and checkpoints,
without a reference model (beta = 0) and without gradient checkpointing; with ``transformers.generate``, its fastest way
to sample that needs no GPU and no server of its own.

What each leaves out: the project's loss, in the loop and the mesh, passes over completions without an advantage (all or
none of a prompt's answers are right), which TRL computes like all others. The quickstart's model starts from an easier
warm-up here, with some right answers, or else the first steps would cost the project next to nothing. The loop has no
second process, proof, ledger or figures. TRL has hooks, metrics and distributed training that nobody uses here. The
mesh does all that it does otherwise, but evaluations and checkpoints on the way.

    python benchmarks/vs_trl.py            the quickstart's model
    python benchmarks/vs_trl.py --long     SmolLM2-135M as well (make smollm2), and 5 seeds

TRL is the newest that pip finds, in an environment of its own in the user's cache, which sees the project's packages.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from parts.cells import mean_interval
from parts.contest import EASY, WARM, WINDOW, Layout, Outcome, mesh, outcome_of, plain
from parts.measure import ROOT, Result, Spread, compare
from parts.mesh_run import environment_of_tasks
from parts.picture import Panel, point
from parts.script import Findings, flags, run

from mesh import config as settings
from roles.starter import ensure

CORES = 2
LIMIT_S = 3600.0
INSTALL_S = 900.0
SEARCH_SEED = 1000
TARGET = 0.8
TRL, PLAIN, MESH = "TRL", "plain loop", "mesh"


@dataclass(frozen=True)
class Case:
    """``micro_batches``: those that TRL may take. ``mesh_layouts``: those of the mesh."""

    name: str
    config: Path
    seeds: int
    steps: int
    search_steps: int
    micro_batches: tuple[int, ...]
    overrides: tuple[str, ...] = ()
    mesh_layouts: tuple[Layout, ...] = (Layout(1, 2, 1), Layout(2, 2, 1))

    @property
    def samples(self) -> int:
        t = settings.load(self.config).trainer
        return t.group_size * t.groups_per_step


QUICKSTART = Case("quickstart", ROOT / "configs/quickstart.toml", seeds=2, steps=60, search_steps=8,
                  micro_batches=(256, 64), overrides=("task.heldout_prompts=256",))  # fmt: skip
SMOLLM2 = Case("SmolLM2-135M", ROOT / "configs/smollm2-135m.toml", seeds=2, steps=30, search_steps=7,
               micro_batches=(64, 16), overrides=("task.heldout_prompts=128", "rollout.engine=transformers"),
               mesh_layouts=(Layout(1, 1, 1), Layout(2, 1, 2)))  # fmt: skip


def main() -> None:
    run(flags(__file__, __doc__, long="5 seeds, and SmolLM2-135M: hours"), measure)


def measure(arguments: argparse.Namespace) -> Findings:
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])  # and of all that is started from here
    python = environment()
    cases = [QUICKSTART]
    if arguments.quick:
        cases = [replace(QUICKSTART, seeds=1, steps=7, search_steps=0, overrides=("task.heldout_prompts=8",))]
    elif arguments.long:
        cases = [replace(QUICKSTART, seeds=5, steps=100), SMOLLM2]
    directory = Path(tempfile.mkdtemp(prefix="mesh-vs-trl-"))
    results, panels = [], []
    refused = "" if arguments.quick else asynchronous(python)
    for case in cases:
        contest = Contest(case, python, directory, easy=not arguments.quick)
        found = contest.train()
        results += lines(case, contest, found, {"trl": version(python), "asynchronous_trainer": refused})
        panels += pictures(case, found)
    shutil.rmtree(directory)
    return Findings(results, panels)


# ----------------------------------------------------------------------------------------------------------------------
# TRL
# ----------------------------------------------------------------------------------------------------------------------


def environment() -> Path:
    """The Python of an environment with TRL, made on first use, and anew when the project's packages have
    changed: it sees them, torch among them, and has the others."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mesh-node"
    target = cache / f"trl-{sys.version_info.major}.{sys.version_info.minor}"
    python, done = target / "bin/python", target / "installed"
    here = sysconfig.get_paths()["purelib"]
    packages = "\n".join([here, *sorted(path.name for path in Path(here).glob("*.dist-info"))])
    if done.exists() and done.read_text() == packages:
        return python
    print(f"installing TRL into {target}", file=sys.stderr, flush=True)
    shutil.rmtree(target, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(target)], check=True, timeout=INSTALL_S)
    inside = target.joinpath(*Path(here).parts[-3:])
    (inside / "project.pth").write_text(here + "\n")
    install = [str(python), "-m", "pip", "--disable-pip-version-check", "--quiet", "install", "trl", "aiohttp"]
    subprocess.run(install, check=True, timeout=INSTALL_S)
    done.write_text(packages)
    return python


def version(python: Path) -> str:
    told = "import importlib.metadata as m; print(m.version('trl'))"
    return subprocess.run([str(python), "-c", told], check=True, capture_output=True, text=True).stdout.strip()


def trl(python: Path, config: Path, arguments: Sequence[str], overrides: Sequence[str]) -> dict:
    script = ROOT / "benchmarks/parts/trl_loop.py"
    command = [str(python), str(script), str(config), *arguments]
    command += [part for override in overrides for part in ("--set", override)]
    there = environment_of_tasks()
    there["PYTHONPATH"] = os.pathsep.join([str(ROOT), there["PYTHONPATH"]])
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=there)
    if done.returncode:
        raise RuntimeError(f"TRL failed: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def asynchronous(python: Path) -> str:
    """Why TRL's asynchronous trainer does not run here; empty when it does."""
    try:
        return trl(python, QUICKSTART.config, ["--asynchronous"], [])["asynchronous"]
    except RuntimeError as e:
        return str(e).splitlines()[-1]


# ----------------------------------------------------------------------------------------------------------------------
# The contest
# ----------------------------------------------------------------------------------------------------------------------


class Contest:
    """``easy``: the quickstart's model starts with some right answers, another for each seed."""

    def __init__(self, case: Case, python: Path, directory: Path, easy: bool) -> None:
        self.case, self.python, self.directory, self.runs = case, python, directory, 0
        self.easy = easy and case.config == QUICKSTART.config
        self.layouts = self._search()

    def _search(self) -> dict[str, tuple]:
        """By contestant the setting that is fastest."""
        case = self.case
        options = {
            TRL: [(2, case.micro_batches[0]), (1, case.micro_batches[0]), *((2, m) for m in case.micro_batches[1:])],
            PLAIN: [(Layout(1),), (Layout(2),)],
            MESH: [(layout,) for layout in case.mesh_layouts],
        }
        best = {}
        for name, choices in options.items():
            best[name] = choices[0]
            if case.search_steps:
                rates = {choice: self.run(name, choice, SEARCH_SEED, case.search_steps, False).samples_per_s
                         for choice in choices}  # fmt: skip
                for choice, rate in rates.items():
                    print(f"{case.name}, {self.said(name, choice)}: {rate:.1f} samples/s", file=sys.stderr, flush=True)
                best[name] = max(rates, key=rates.__getitem__)
        return best

    def said(self, name: str, choice: tuple) -> str:
        return f"{name}, {choice[0]} threads, {choice[1]} a micro-batch" if name == TRL else f"{name}, {choice[0]}"

    def train(self) -> dict[str, list[Outcome]]:
        """By contestant, then by seed. Who begins changes with the seed."""
        names, found = list(self.layouts), {name: [] for name in self.layouts}
        for seed in range(self.case.seeds):
            for name in names[seed % len(names) :] + names[: seed % len(names)]:
                own = self.run(name, self.layouts[name], seed, self.case.steps, True)
                found[name].append(own)
                said = f"{own.samples_per_s:.1f} samples/s, {own.accuracy:.2f} right"
                print(f"{self.case.name}, seed {seed}, {name}: {said}", file=sys.stderr, flush=True)
        return found

    def run(self, name: str, choice: tuple, seed: int, steps: int, evaluate: bool) -> Outcome:
        case = self.case
        overrides = [*case.overrides, f"run.steps={steps}", f"run.seed={seed}"]
        if self.easy:
            overrides.append(f"model.path={ensure(EASY, seed)}")
        if not evaluate:
            overrides.append("task.heldout_prompts=0")
        kinds: dict[str, Callable[[], Outcome]] = {
            TRL: lambda: self._trl(choice, overrides, evaluate),
            PLAIN: lambda: plain(overrides, choice[0], case.samples, evaluate, case.config),
            MESH: lambda: self._mesh(choice[0], overrides),
        }
        return kinds[name]()

    def _trl(self, choice: tuple, overrides: list[str], evaluate: bool) -> Outcome:
        threads, micro_batch = choice
        arguments = ["--threads", str(threads), "--micro-batch", str(micro_batch), *["--evaluate"] * evaluate]
        told = trl(self.python, self.case.config, arguments, overrides)
        return outcome_of(told["step_s"], told["reward"], self.case.samples, told.get("accuracy_after"))

    def _mesh(self, layout: Layout, overrides: list[str]) -> Outcome:
        self.runs += 1
        where = self.directory / f"{self.case.name}-{self.runs}"
        return mesh([*overrides, "trainer.max_lag=2", "evaluation.temperature=1.0"], layout, self.case.samples, where,
                    self.case.config)  # fmt: skip


def lines(case: Case, contest: Contest, found: dict[str, list[Outcome]], facts: dict[str, str]) -> list[Result]:
    results, theirs = [], found[TRL]
    for name, own in found.items():
        about = {"settings": {"config": case.config.name, "cores": CORES, "seeds": case.seeds, "steps": case.steps,
                              "samples_a_step": case.samples, "from_step": WARM, "overrides": list(case.overrides),
                              "how": contest.said(name, contest.layouts[name]), **facts}}  # fmt: skip
        right = [100 * o.accuracy for o in own if o.accuracy is not None]
        mean, low, high = mean_interval(right)
        details = {"seconds_a_step": sum(o.step_s for o in own) / len(own), "right_in_the_end": mean, "low": low,
                   "high": high}  # fmt: skip
        rates, reference = [o.samples_per_s for o in own], [o.samples_per_s for o in theirs]
        said, aim = f"{case.name}: samples a second, {name}", "at least 2" if case.config == QUICKSTART.config else ""
        times = [(a, b) for a, b in zip(_times(own), _times(theirs), strict=True) if a is not None and b is not None]
        reached = {"seeds_that_reach_it": sum(t is not None for t in _times(own)), "window_steps": WINDOW}
        to_target = f"{case.name}: seconds to {TARGET:.0%} right in training, {name}"
        if name == TRL:
            results.append(Result(said, "1/s", Spread.of(rates), details=details, more_is_better=True, **about))
            if times:
                results.append(Result(to_target, "s", Spread.of([a for a, _ in times]), details=reached, **about))
            continue
        results.append(
            compare(said, "1/s", rates, reference, TRL, aim=aim, details=details, more_is_better=True, **about)
        )
        if times:
            results.append(compare(to_target, "s", *zip(*times, strict=True), TRL, details=reached, **about))
    return results


def _times(own: list[Outcome]) -> list[float | None]:
    return [o.seconds_to(TARGET) for o in own]


def pictures(case: Case, found: dict[str, list[Outcome]]) -> list[Panel]:
    rates = [point(i, Spread.of([o.samples_per_s for o in own])) for i, own in enumerate(found.values())]
    curves = {}
    for name, own in found.items():
        steps = range(WINDOW, case.steps + 1, max(1, case.steps // 12))
        ends = {i: sum(o.ends[i - 1] for o in own) / len(own) for i in steps}
        curves[name] = [point(ends[i], Spread.of([100 * _recent(o, i) for o in own])) for i in steps]
    return [
        Panel(f"{case.name}: samples a second", "1/s", lines={"": rates}, ticks=list(found)),
        Panel(f"{case.name}: mean reward of {WINDOW} steps", "%", "seconds", curves),
    ]


def _recent(outcome: Outcome, step: int) -> float:
    return sum(outcome.rewards[step - WINDOW : step]) / WINDOW


if __name__ == "__main__":
    main()

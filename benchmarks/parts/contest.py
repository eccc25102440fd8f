"""One training run, by the plain loop or by a mesh, and what is compared between them.

Both take the same settings, prompts in the same order, and number of samples, on the same cores. Time runs from the
first sample of the first step. The accuracy of a step is the share of right answers among its own fresh prompts, which
costs nobody an evaluation; with samples that are some versions old it is a little late, to the loss of the mesh.
"""

import itertools
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from parts.measure import ROOT
from parts.mesh_run import MeshRun, environment_of_tasks, mesh_run
from roles.starter import Recipe

CONFIG = ROOT / "configs/quickstart.toml"
EASY = Recipe(ascending=0.35, descending=0.35)  # sampled, it starts right in 15 to 20 of a hundred answers
WARM = 5  # first steps that throughput leaves out: rollouts start, buffers fill
WINDOW = 5  # steps whose accuracy is averaged to say that a target is reached
LIMIT_S = 3600.0


@dataclass(frozen=True)
class Layout:
    """How the cores are used. A plain loop has no rollouts and one number of threads."""

    trainer_threads: int = 1
    rollouts: int = 0
    rollout_threads: int = 1

    def __str__(self) -> str:
        if not self.rollouts:
            return f"{self.trainer_threads} threads"
        return f"{self.rollouts} rollouts x {self.rollout_threads} threads, trainer {self.trainer_threads}"


@dataclass
class Outcome:
    """``ends``: seconds from the first sample to the end of each step; ``rewards``: of each step, 0 to 1."""

    ends: list[float]
    rewards: list[float]
    samples: int  # of a step
    accuracy: float | None = None  # on held-out prompts, afterwards
    details: dict[str, float] = field(default_factory=dict)

    @property
    def step_s(self) -> float:
        return (self.ends[-1] - self.ends[WARM - 1]) / (len(self.ends) - WARM)

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.step_s

    def seconds_to(self, target: float) -> float | None:
        """Until the mean accuracy of ``WINDOW`` steps is at least ``target``; None when it never is."""
        for i in range(WINDOW, len(self.rewards) + 1):
            if statistics.fmean(self.rewards[i - WINDOW : i]) >= target:
                return self.ends[i - 1]
        return None


def plain(overrides: Sequence[str], layout: Layout, samples: int, evaluate: bool, config: Path = CONFIG) -> Outcome:
    script = Path(__file__).with_name("plain_loop.py")
    command = [sys.executable, str(script), str(config), "--threads", str(layout.trainer_threads)]
    command += [part for override in overrides for part in ("--set", override)] + ["--evaluate"] * evaluate
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=environment_of_tasks())
    if done.returncode:
        raise RuntimeError(f"the plain loop failed: {done.stderr[-2000:]}")
    told = json.loads(done.stdout)
    steps = [a + b for a, b in zip(told["sample_s"], told["learn_s"], strict=True)]
    outcome = outcome_of(steps, told["reward"], samples, told.get("accuracy_after"))
    timed = sum(steps[WARM:])
    outcome.details = {
        "sample_s": statistics.fmean(told["sample_s"][WARM:]),
        "idle_s": statistics.fmean(told["idle_s"][WARM:]),
        "learn_s": statistics.fmean(told["learn_s"][WARM:]),
        "trainer_idle_share": sum(told["sample_s"][WARM:]) / timed,
        "rollouts_idle_share": (sum(told["learn_s"][WARM:]) + sum(told["idle_s"][WARM:])) / timed,
        "wasted_token_share": 0.0,
    }
    return outcome


def outcome_of(steps: Sequence[float], rewards: list[float], samples: int, accuracy: float | None) -> Outcome:
    """Of one process, whose steps took so many seconds."""
    return Outcome(list(itertools.accumulate(steps)), rewards, samples, accuracy)


def mesh(overrides: Sequence[str], layout: Layout, samples: int, directory: Path, config: Path = CONFIG) -> Outcome:
    threads = [f"trainer.threads={layout.trainer_threads}", f"rollout.threads={layout.rollout_threads}"]
    without = ["evaluation.every_steps=0", "checkpoint.every_steps=0"]
    run = mesh_run(config, directory, layout.rollouts, [*overrides, *threads, *without], LIMIT_S)
    began = run.rows[0]["at/generate_first"]
    return Outcome(
        [row["time"] - began for row in run.rows],
        [row["reward"] for row in run.rows],
        samples,
        run.summary["accuracy_after"] if run.summary["accuracy_samples"] else None,
        _details(run, layout),
    )


def _details(run: MeshRun, layout: Layout) -> dict[str, float]:
    """``generate_s`` and ``learn_s``: what a step keeps rollouts (each, on the mean) and trainer busy for, with the
    cores shared as they are. ``efficiency``: the longer of the two over what a step took."""
    rows = run.rows[WARM:]
    step = run.seconds(run.rows[WARM - 1]["step"]) / len(rows)
    learn = statistics.fmean(row["time/step_s"] - row["time/wait_s"] for row in rows)
    last, ends = run.rows[-1], [own[-1] for own in run.rollouts if own]
    first, final = run.rows[WARM - 1]["time"], last["time"]
    busy = sum(_at(own, final, "engine/busy_s") - _at(own, first, "engine/busy_s") for own in run.rollouts if own)
    generate = busy / layout.rollouts / len(rows)
    generated = sum(end["engine/tokens"] for end in ends)
    trained = sum(row["length_kept"] * row["samples"] for row in run.rows)
    tokens = run.summary["ledger_tokens"]
    return {
        "generate_s": generate,
        "learn_s": learn,
        "trainer_idle_share": run.waited_share(run.rows[WARM - 1]["step"]),
        "rollouts_idle_share": 1.0 - generate / step,
        "efficiency": max(generate, learn) / step,
        "lag_mean": statistics.fmean(row["lag_mean"] for row in rows),
        "masked_token_share": tokens["masked"] / max(1, tokens["delivered"]),
        "superseded_group_share": run.summary["ledger"]["superseded"] / run.summary["ledger"]["issued"],
        "wasted_token_share": max(0.0, 1.0 - trained / generated) if generated else 0.0,
        "length_kept": statistics.fmean(row["length_kept"] for row in rows),
        "length_generated": statistics.fmean(row["length_generated"] for row in rows),
        "length_longest": max(row["length_longest"] for row in rows),
    }


def _at(rows: Sequence[dict], when: float, name: str) -> float:
    """A running total at a time, between the two rows around it."""
    before = [row for row in rows if row["time"] <= when]
    after = [row for row in rows if row["time"] > when]
    if not before or not after:
        return (after or rows)[0 if after else -1][name]
    a, b = before[-1], after[0]
    return a[name] + (b[name] - a[name]) * (when - a["time"]) / (b["time"] - a["time"])

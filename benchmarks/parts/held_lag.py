"""Training in one process with every sample a fixed number of versions old: the product's engine, buffer and loss.

A batch is sampled with the weights as they are, waits in the trainer's buffer, and is trained ``lag`` steps later, with
the log-probabilities that were recorded when it was sampled. The first ``lag + 1`` batches come from the first weights,
as they do when a mesh starts. All contestants sample and train the same number of batches.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from mesh import config as settings
from mesh.version import Version
from parts.contest import EASY
from parts.corrections import CORRECTIONS, Corrected
from parts.measure import ROOT
from parts.plain_loop import LINEAGE, TERM, PlainLoop
from roles.rollout.tasks.base import Prompt
from roles.starter import ensure
from roles.trainer.buffer import Buffer
from roles.trainer.figures import policy_figures, teaching_figures
from transport.messages import Credit

MASKS = {"fresh": "off", "age": "age", "drift": "drift"}  # trainer.mask_negatives; the others are CORRECTIONS
CONTESTANTS = (*MASKS, *CORRECTIONS)
TASKS = {
    "easy": ("quickstart.toml", []),
    "sort": ("quickstart.toml", []),
    "graded": ("quickstart.toml", ["task.reward=parts.rewards:graded"]),
    "many": ("quickstart.toml", ["task.reward=parts.rewards:smallest_first"]),
    "smollm2": ("smollm2-135m.toml", []),
}
FIGURES = ("ess_token", "ess_sequence", "log_ratio_mean", "entropy", "negative_mass", "failure_masked")
LAST = 5  # evaluations that are averaged
MANY, FEW = 16, 8  # samples of a prompt for distinct right answers, and k of pass@k


@dataclass(frozen=True)
class Cell:
    """One training run."""

    task: str
    contestant: str
    lag: int
    rate: float
    seed: int
    steps: int
    prompts: int  # of an evaluation

    def config(self) -> settings.Config:
        file, more = TASKS[self.task]
        config = settings.load(ROOT / "configs" / file, [*more, f"run.seed={self.seed}"])
        if self.task == "easy":
            config.model.path = str(ensure(EASY, self.seed))
        config.run.steps = self.steps
        config.trainer.learning_rate = self.rate
        config.trainer.mask_negatives = MASKS.get(self.contestant, "off")  # type: ignore[assignment]
        config.trainer.max_lag = self.lag
        return config


class HeldLag(PlainLoop):
    def __init__(self, cell: Cell) -> None:
        super().__init__(cell.config())
        self.cell, self.number, self.batches = cell, 0, 0
        p, t = self.policy, self.config.trainer
        self.policy = Corrected(p.model, p.tokenizer, p.settings, correction=CORRECTIONS.get(cell.contestant))
        self.buffer = Buffer(limit=(cell.lag + 1) * t.groups_per_step, max_lag=cell.lag)
        self.figures: list[dict[str, float]] = []

    def step(self) -> tuple[float, float]:
        began = time.perf_counter()
        while self.batches < min(self.number + self.cell.lag + 1, self.cell.steps):
            self._sample_ahead()
        sampled = time.perf_counter()
        version = Version(TERM, self.number)
        taken, late = self.buffer.take(self.config.trainer.groups_per_step, version, LINEAGE)
        assert not late
        samples = self.samples([t.group for t in taken], version)
        assert {s.lag for s in samples} == {min(self.number, self.cell.lag)}
        scores = self.policy.accumulate(samples, self.threshold)
        assert scores is not None
        self.policy.step(scores.tokens)
        self.number += 1
        self.figures.append(policy_figures(samples, scores) | teaching_figures(samples, scores, []))
        return sampled - began, time.perf_counter() - sampled

    def _sample_ahead(self) -> None:
        version = Version(TERM, self.number)
        for i, group in enumerate(self.groups(version)):
            id = self.batches * self.config.trainer.groups_per_step + i
            size = self.config.trainer.group_size
            self.buffer.put("plain", Credit(id, id, 0, 0, size, version, 0), group)
        self.batches += 1

    def answers(self, prompts: Sequence[Prompt], size: int) -> list[list[tuple[str, bool]]]:
        """For each prompt ``size`` answers of the policy as it is, and whether each is right."""
        answers = []
        for prompt, (tokens, sampled) in zip(prompts, self.sample(prompts, size), strict=True):
            group = self.score(prompt, tokens, sampled, Version(TERM, self.number))
            answers.append(
                [(s.tokens.tobytes().hex(), c.reward == 1.0) for s, c in zip(sampled, group.completions, strict=True)]
            )
        return answers


def train(cell: Cell) -> dict[str, Any]:
    """Run a cell; what a row of the table needs."""
    torch.set_num_threads(1)
    began = time.perf_counter()
    loop = HeldLag(cell)
    heldout = loop.task.heldout[: cell.prompts]
    every = max(1, cell.steps // 20)
    due = {*range(0, cell.steps + 1, 4 * every), *(cell.steps - i * every for i in range(LAST))}
    curve = {}
    for step in range(1, cell.steps + 1):
        loop.step()
        if step in due:
            curve[step] = loop.accuracy(heldout)
    many = loop.answers(heldout[: max(1, cell.prompts // 4)], MANY)
    distinct = [len({answer for answer, ok in group if ok}) for group in many]
    return {
        **asdict(cell),
        "accuracy": float(np.mean(list(curve.values())[-LAST:])),
        "curve": curve,
        "distinct_right": float(np.mean(distinct)),
        f"pass_at_{FEW}": float(np.mean([pass_at(FEW, [ok for _, ok in group]) for group in many])),
        **{name: mean_of(loop.figures[cell.steps // 2 :], name) for name in FIGURES},
        "ess_token_lowest": min((f["ess_token"] for f in loop.figures if "ess_token" in f), default=None),
        "seconds": time.perf_counter() - began,
    }


def mean_of(figures: list[dict[str, float]], name: str) -> float | None:
    values = [f[name] for f in figures if name in f]
    return float(np.mean(values)) if values else None


def pass_at(k: int, right: Sequence[bool]) -> float:
    """The chance that k of these samples, drawn without return, hold a right one (arXiv 2107.03374)."""
    n, wrong = len(right), len(right) - sum(right)
    return 1.0 - float(np.prod([max(0, wrong - i) / (n - i) for i in range(k)]))

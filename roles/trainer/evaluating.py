"""Evaluations on the way: begun by the first of the trainers, noted when they are done, given up when they stand still.

Training goes on meanwhile. Rollouts hear of an evaluation before its version reaches them, so that they do not pass it.
"""

import time

from mesh.version import Version
from roles.trainer.intake import Intake
from roles.trainer.progress import Progress
from transport.evaluation import EvaluationState
from transport.port import Port


class Evaluating:
    """On the trainer's main thread. ``limit_s``: for how long an evaluation may make no progress."""

    def __init__(self, port: Port, intake: Intake, progress: Progress, *, prompts: int, limit_s: float) -> None:
        self._port, self._intake, self._progress = port, intake, progress
        self._prompts, self._limit_s = prompts, limit_s
        self._at: tuple[Version, int] | None = None
        self._moved = time.monotonic()

    def begin(self, version: Version) -> None:
        """Have the held-out prompts answered by this version, unless there are none or an evaluation is under way."""
        if self._prompts and not self.running:
            self._intake.evaluate(version)

    @property
    def running(self) -> bool:
        return self._incomplete() is not None

    def done(self, step: int) -> bool:
        """Whether this step was evaluated, if anything ever is."""
        evaluations = self._progress.evaluations
        return not self._prompts or (bool(evaluations) and evaluations[-1]["eval_version"] == step)

    def note(self, version: Version) -> None:
        """What has come in since, at the trainer's present version."""
        figures = self._intake.evaluated(version)
        if figures is not None:
            self._progress.evaluated(figures)

    def holds(self) -> Version | None:
        """The version at which the evaluation under way holds the engines."""
        evaluation = self._incomplete()
        return evaluation.version if evaluation is not None else None

    def watch(self) -> None:
        """Give up an evaluation that made no progress for ``limit_s``."""
        if (evaluation := self._incomplete()) is None:
            return
        now, at = time.monotonic(), (evaluation.version, evaluation.done)
        if at != self._at or not self._port.live("rollout"):
            self._at, self._moved = at, now
        if now - self._moved > self._limit_s:
            self._intake.abandon_evaluation()
            self._port.note(
                f"the evaluation of {evaluation.version} has {evaluation.done} of {evaluation.total} results, none new "
                f"for {self._limit_s:.0f} s (weights.prove_deadline_s): it is given up",
                "warning",
            )

    def _incomplete(self) -> EvaluationState | None:
        evaluation = self._intake.delivery.evaluation_state()
        return None if evaluation is None or evaluation.complete else evaluation

"""Where delivery, buffer and ledger meet: what arrives at a trainer and what goes out, on the peer's loop.

The main thread asks for a batch, settles it, and starts evaluations; each call runs on the loop and returns. Effects
are executed in the order in which the machines gave them: a record is in the ledger before the act it announces.
"""

import collections
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mesh.config import Config
from mesh.effects import Note, Send
from mesh.identity import PeerId
from mesh.version import Lineage, Version
from roles.trainer.batch import NOT_SAMPLES, malformed
from roles.trainer.buffer import Buffer, Trajectory
from roles.trainer.dataset import Dataset
from roles.trainer.figures import evaluation_figures
from roles.trainer.ledger import Ledger
from transport.credits import TrainerDelivery
from transport.delivery import Dropped, Evaluated, Held, Record
from transport.messages import Ask, Completion, CreditId, Delivery, Group

TICK_S = 0.1
PATIENCE_S = 0.2  # between two looks at whether waiting still makes sense


class Intake:
    """Loop-owned: methods marked *main* are for the trainer's thread, all others run on the loop."""

    def __init__(self, peer: Any, config: Config, data: Dataset, ledger: Ledger, *, first_id: int, vocabulary: int):
        self.peer, self.config, self.data, self.ledger = peer, config, data, ledger
        self.delivery = TrainerDelivery(
            config.trainer, data, seed=config.run.seed, steps=config.run.steps, first_id=first_id
        )
        self.buffer = Buffer(limit=self.delivery.limit, max_lag=config.trainer.max_lag)
        self.vocabulary = vocabulary
        self.evaluation = _Results()
        self.superseded: list[Group] = []
        self.failures: collections.Counter[str] = collections.Counter()
        self.arrived = threading.Condition()
        self.arrivals = 0
        peer.on(Ask, self._message)
        peer.on(Delivery, self._delivery)
        peer.on_members(self._members)
        peer.every(TICK_S, lambda: self._do(self.delivery.tick(time.monotonic())))

    # ------------------------------------------------------------------------------------------------------------------
    # On the loop
    # ------------------------------------------------------------------------------------------------------------------

    def _message(self, sender: PeerId, message: Ask | Delivery) -> None:
        self._do(self.delivery.receive(sender, message, time.monotonic()))

    def _delivery(self, sender: PeerId, message: Delivery) -> None:
        """A group that no loss could be computed from is refused here, and its credit fails with the reason."""
        if message.group is not None and (why := malformed(message.group, self.vocabulary)):
            self.peer.note(f"group of {sender} refused: {why}", "warning")
            message = Delivery(credit=message.credit, group=None, failure=f"malformed: {why}"[:4096])
        self._message(sender, message)

    def _members(self) -> None:
        rollouts = [card.id for card in self.peer.live("rollout")]
        self._do(self.delivery.rollouts(rollouts, time.monotonic()))
        self._wake()

    def _do(self, effects: Sequence[Any]) -> None:
        for effect in effects:
            match effect:
                case Record(entry):
                    self.ledger.append(entry)
                case Send(to, message, _, bulk):
                    self.peer.send(to, message, bulk=bulk)
                case Held(rollout, credit, group):
                    self.buffer.put(rollout, credit, group)
                    self._wake()
                case Dropped(credit, _):
                    self._drop(credit)
                case Evaluated(prompt, version, group):
                    self.evaluation.add(prompt, version, group)
                case Note(text, level):
                    self.peer.note(text, level)

    def _drop(self, credit: CreditId) -> None:
        self.superseded += [t.group for t in self.buffer if t.credit.id == credit]
        self.buffer.drop(credit)

    def _wake(self) -> None:
        with self.arrived:
            self.arrivals += 1
            self.arrived.notify_all()

    # ------------------------------------------------------------------------------------------------------------------
    # Main thread
    # ------------------------------------------------------------------------------------------------------------------

    def batch(self, n: int, version: Version, lineage: Lineage, patience: Callable[[], None]) -> list[Trajectory]:
        """*main*: the ``n`` oldest admissible groups, once there are so many. ``patience`` is called several times a
        second while they are missing; it raises when waiting has become pointless."""
        while True:
            seen = self.arrivals
            taken = self.peer.call(lambda: self._take(n, version, lineage))
            if taken:
                return taken
            patience()
            with self.arrived:
                self.arrived.wait_for(lambda seen=seen: self.arrivals != seen and len(self.buffer) >= n, PATIENCE_S)

    def _take(self, n: int, version: Version, lineage: Lineage) -> list[Trajectory]:
        if self.buffer.ready(version, lineage) < n:
            return []
        taken, stale = self.buffer.take(n, version, lineage)
        now = time.monotonic()
        self._do(self.delivery.supersede(stale, now))
        self._do(self.delivery.take([t.credit.id for t in taken], now))
        for trajectory in taken:
            self.failures.update(trajectory.group.failures)
        return taken

    def advance(
        self,
        version: Version,
        lineage: Lineage,
        *,
        trained: Sequence[CreditId] = (),
        masked: Mapping[CreditId, int] | None = None,
        failed: Mapping[CreditId, int] | None = None,
        waited: float | None = None,
    ) -> None:
        """*main*: the step that trained these groups is applied and the trainer holds ``version``. Verdicts and new
        credits leave at once."""

        def run() -> None:
            if trained:
                self._do(self.delivery.settle(trained, masked, failed))
            self._do(self.delivery.advance(version, lineage, time.monotonic(), waited))

        self.peer.call(run)

    def take_superseded(self) -> list[Group]:
        """*main*: delivered groups that were dropped since the last call."""

        def run() -> list[Group]:
            dropped, self.superseded = self.superseded, []
            return dropped

        return self.peer.call(run)

    def take_failures(self) -> dict[str, int]:
        """*main*: why completions of the groups taken since the last call have no reward, by kind."""

        def run() -> dict[str, int]:
            failures, self.failures = self.failures, collections.Counter()
            return dict(failures)

        return self.peer.call(run)

    def evaluate(self, version: Version) -> None:
        """*main*: have all held-out prompts answered once by ``version``. Results come in while training goes on."""
        prompts = list(range(self.config.task.heldout_prompts))

        def run() -> None:
            self.evaluation = _Results(version)
            self._do(self.delivery.evaluate(prompts, version, time.monotonic()))

        self.peer.call(run)

    def evaluated(self, newest: Version) -> dict[str, float] | None:
        """*main*: the figures of an evaluation that has just become complete, else None. One that no rollout can finish
        any more, because all have passed its version, starts again with ``newest``."""

        def run() -> dict[str, float] | None:
            state = self.delivery.evaluation_state()
            if state is None or self.evaluation.told:
                return None
            if state.stuck:
                self.evaluation = _Results(newest)
                self._do(self.delivery.repin(newest, time.monotonic()))
                return None
            if not state.complete:
                return None
            self.evaluation.told = True
            return self.evaluation.figures()

        return self.peer.call(run)

    def abandon_evaluation(self) -> None:
        """*main*: give up the evaluation under way; rollouts are told to stop working on it."""
        self.peer.call(lambda: self._do(self.delivery.abandon_evaluation(time.monotonic())))

    def evaluating(self) -> bool:
        """*main*: whether an evaluation is under way."""
        state = self.delivery.evaluation_state()
        return state is not None and not state.complete

    def finish(self) -> None:
        """*main*: the run is over; rollouts are told to leave, what is open ends as lost."""
        self.peer.call(lambda: self._do(self.delivery.finish(time.monotonic())))
        self.ledger.sync()


class _Results:
    """Held-out answers under one version. What the model did not bring to an end counts as wrong: leaving it out would
    flatter. An answer that the verifier gave no reward is neither right nor wrong: it is counted apart."""

    def __init__(self, version: Version | None = None):
        self.version = version
        self.right = 0
        self.total = 0
        self.unscored = 0
        self.failures: collections.Counter[str] = collections.Counter()
        self.told = False

    def add(self, prompt: int, version: Version, group: Group | None) -> None:
        if version != self.version:
            return
        completions: list[Completion | None] = list(group.completions) if group else [None]
        unscored = sum(c is not None and c.reward is None and c.finish not in NOT_SAMPLES for c in completions)
        self.unscored += unscored
        self.total += len(completions) - unscored
        self.right += sum(c is not None and c.reward is not None and c.reward >= 1.0 for c in completions)
        if group:
            self.failures.update(group.failures)

    def figures(self) -> dict[str, float]:
        assert self.version is not None
        return {
            **evaluation_figures(self.right, self.total),
            "eval_unscored": float(self.unscored),
            **{f"eval_failures/{kind}": float(n) for kind, n in self.failures.items()},
            "eval_version": float(self.version.number),
        }


def open_ledger(directory: Path, peer: PeerId, run: str, first_id: int) -> Ledger:
    return Ledger(directory / f"{peer}.jsonl", peer=peer, run=run, first_id=first_id)

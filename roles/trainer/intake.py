"""Where delivery, buffer and ledger meet: what arrives at a trainer and what goes out, on the peer's loop.

The main thread asks for a batch, settles it, and starts evaluations; each call runs on the loop and returns. Effects
are executed in the order in which the machines gave them: a record is in the ledger before the act it announces.

One of several trainers calls, in this order:

    opened      a formation has opened: its members share the prompts. Groups of the batch in training whose prompts
                went to others are named: they must not be in the gradient
    batch       ``share`` groups, when that is not 0
    row         what rides with the gradient of that batch
    committed   a step was applied, with the rows of its contributors: before the ``opened`` of a formation that opens
                after it
    put_back    the gradient of a batch was given up; its groups go to the next while they are fresh
    restart     left behind: all that is open is superseded. ``load`` and ``opened`` follow
"""

import collections
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mesh.config import Config
from mesh.effects import Note, Send
from mesh.identity import PeerCard, PeerId
from mesh.version import Lineage, Version
from roles.trainer.batch import NOT_SAMPLES, malformed
from roles.trainer.buffer import Buffer, Trajectory
from roles.trainer.dataset import Dataset
from roles.trainer.figures import evaluation_figures
from roles.trainer.ledger import Ledger
from transport import spans
from transport.accounts import (
    CLOSED_A_ROW,
    WHY_CHARS,
    Closed,
    ClosedPrompt,
    Delivered,
    Ended,
    Issued,
    Row,
    RowGroup,
)
from transport.credits import TrainerDelivery
from transport.delivery import Dropped, Evaluated, Held, Record, tokens_of
from transport.messages import Ask, Completion, CreditId, Delivery, Group

TICK_S = 0.1
MOST_CLOSED = 4096  # prompts given up that wait to be told; of more the others hear when they give up on them


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
        self.taken: dict[CreditId, Trajectory] = {}
        self.ordered: dict[CreditId, tuple[PeerId, float]] = {}  # to whom, and when
        self.closed: dict[tuple[int, int], ClosedPrompt] = {}  # not told to the other trainers yet
        self.superseded: list[Group] = []
        self.failures: collections.Counter[str] = collections.Counter()
        self.arrived: Callable[[], None] = lambda: None  # called when something came that ``take`` may find
        peer.on(Ask, self._message)
        peer.on(Delivery, self._delivery)
        peer.on_members(self._members)
        peer.on_departed(self._departed)
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
        self.arrived()

    def _departed(self, card: PeerCard, dead: bool, reason: str) -> None:
        if not dead:
            self._do(self.delivery.rollout_left(card.id))

    def _do(self, effects: Sequence[Any]) -> None:
        for effect in effects:
            match effect:
                case Record(entry):
                    self.ledger.append(entry)
                    self._note_time(entry)
                    if isinstance(entry, Closed) and len(self.closed) < MOST_CLOSED:
                        closed = ClosedPrompt(entry.epoch, entry.prompt, entry.why[:WHY_CHARS])
                        self.closed[entry.epoch, entry.prompt] = closed
                case Send(to, message, _, bulk):
                    self.peer.send(to, message, bulk=bulk)
                case Held(rollout, credit, group):
                    self.buffer.put(rollout, credit, group)
                    self.arrived()
                case Dropped(credit, _):
                    self._drop(credit)
                case Evaluated(prompt, version, group):
                    self.evaluation.add(prompt, version, group)
                case Note(text, level):
                    self.peer.note(text, level)

    def _note_time(self, entry: Any) -> None:
        match entry:
            case Issued(id=id, to=to) if entry.adopts is None:  # what is adopted was begun before it was ordered
                self.ordered[id] = (to, time.perf_counter())
            case Delivered(id=id) if id in self.ordered:
                spans.credit(id, *self.ordered.pop(id))
            case Ended(ids=ids):
                for id in ids:
                    self.ordered.pop(id, None)

    def _drop(self, credit: CreditId) -> None:
        taken = self.taken.pop(credit, None)
        self.superseded += [taken.group] if taken else [t.group for t in self.buffer if t.credit.id == credit]
        self.buffer.drop(credit)

    # ------------------------------------------------------------------------------------------------------------------
    # Main thread
    # ------------------------------------------------------------------------------------------------------------------

    def take(self, version: Version, lineage: Lineage) -> list[Trajectory]:
        """*main*: this trainer's share of the step from ``version``: its oldest admissible groups, once there are so
        many; empty before."""
        if len(self.buffer) < self.share:
            return []
        return self.peer.call(lambda: self._take(self.share, version, lineage))

    def _take(self, n: int, version: Version, lineage: Lineage) -> list[Trajectory]:
        if self.buffer.ready(version, lineage) < n:
            return []
        taken, stale = self.buffer.take(n, version, lineage)
        now = time.monotonic()
        self._do(self.delivery.supersede(stale, now))
        self._do(self.delivery.take([t.credit.id for t in taken], now))
        for trajectory in taken:
            self.taken[trajectory.credit.id] = trajectory
            self.failures.update(trajectory.group.failures)
        return taken

    @property
    def share(self) -> int:
        """How many groups this trainer puts into a step."""
        return self.delivery.groups_per_step

    def opened(self, members: Sequence[PeerId], me: PeerId, version: Version, lineage: Lineage) -> list[CreditId]:
        """*main*: the trainers ``members``, in the order of their formation, train together from ``version`` on, each
        its share of a batch, on prompts of its own. Returns the groups taken that ended by it: their prompts went to
        others. Where there are more trainers than groups in a batch, the last have none."""
        n, ranks = self.config.trainer.groups_per_step, list(members)
        rank = ranks.index(me)
        share = n // len(ranks) + (rank < n % len(ranks))

        def run() -> list[CreditId]:
            before = list(self.taken)
            self.data.deal(ranks[:n], me)
            self._do(self.delivery.dealt())
            self.delivery.share(share)
            self._do(self.delivery.advance(version, lineage, time.monotonic()))
            return [id for id in before if id not in self.taken]

        return self.peer.call(run)

    def row(
        self,
        batch: Sequence[Trajectory],
        masked: Mapping[CreditId, int] | None = None,
        failed: Mapping[CreditId, int] | None = None,
    ) -> Row:
        """*main*: what the other trainers must know of this batch when the step is applied; an empty one as well."""

        def run() -> Row:
            groups = [
                RowGroup(
                    credit=t.credit.id,
                    epoch=t.credit.epoch,
                    prompt=t.credit.prompt,
                    tokens=tokens_of(t.group),
                    masked=(masked or {}).get(t.credit.id, 0),
                    failed=(failed or {}).get(t.credit.id, 0),
                )
                for t in batch
            ]
            return Row(groups, list(self.closed.values())[:CLOSED_A_ROW])

        return self.peer.call(run)

    def committed(
        self,
        version: Version,
        lineage: Lineage,
        rows: Mapping[PeerId, Row],
        *,
        waited: float | None = None,
    ) -> None:
        """*main*: a step with these rows, by contributor, was applied, and the trainer holds ``version``. One's own
        groups among them are settled; a batch that is not, stays taken: use it again or ``put_back``."""

        def run() -> None:
            me = self.peer.id
            mine = rows.get(me, Row([]))
            for peer, row in rows.items():
                for group in row.groups if peer != me else ():
                    self.data.mark_trained(group.epoch, group.prompt)
                for closed in row.closed if peer != me else ():
                    self.data.mark_closed(closed.epoch, closed.prompt, closed.why)
            self._do(self.delivery.committed(rows, me))
            for group in mine.groups:
                del self.taken[group.credit]
            for closed in mine.closed:
                self.closed.pop((closed.epoch, closed.prompt), None)
            self._do(self.delivery.dealt())
            self._do(self.delivery.advance(version, lineage, time.monotonic(), waited))

        self.peer.call(run)

    def put_back(self, batch: Sequence[Trajectory]) -> None:
        """*main*: the gradient of this batch is given up. Those of its groups that are still taken wait for the next;
        others have ended meanwhile."""

        def run() -> None:
            again = [t for t in batch if self.taken.pop(t.credit.id, None)]
            for trajectory in again:
                self.buffer.put_back(trajectory)
            self._do(self.delivery.put_back([t.credit.id for t in again], time.monotonic()))
            self.arrived()

        self.peer.call(run)

    def restart(self) -> None:
        """*main*: the others have gone on without this trainer. What is open here is superseded, the batch in training
        too; nothing is ordered before ``opened``."""

        def run() -> None:
            self._do(self.delivery.restart(time.monotonic()))
            self.closed.clear()

        self.peer.call(run)

    def load(self, order: dict[str, Any]) -> None:
        """*main*: what was trained and closed, as the trainer says that takes this one in (``Dataset.state_dict``)."""
        self.peer.call(lambda: self.data.load_state_dict(order))

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
                for id in trained:
                    del self.taken[id]
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
        if self.evaluation.told or self.evaluation.version is None:  # nothing is under way: nothing is asked
            return None

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

    def close(self) -> None:
        """*main*: every step is made, and another trainer finishes the run: what is open here is lost."""
        self.peer.call(lambda: self._do(self.delivery.close(time.monotonic())))
        self.ledger.sync()

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

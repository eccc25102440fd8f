"""The trainer as a part of a simulated process: ``roles/trainer/trainer.py`` and ``intake.py`` with the same machines,
and with a wait where the real one computes.

What a restarted trainer finds on its disk: the term file, checkpoints and ledgers. Lines of a ledger that were not
synced may be lost.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mesh.convening import Form
from mesh.identity import PeerId
from mesh.membership import Departed
from mesh.version import Lineage, Version
from roles.trainer.buffer import Buffer, Trajectory
from roles.trainer.dataset import Dataset
from tests.sim.groups import Steps
from tests.sim.node import Node, Part
from tests.sim.weights import Publishes
from transport.accounts import Accounts, AnyEntry, Ended, Opened
from transport.credits import TrainerDelivery
from transport.delivery import Dropped, Evaluated, Held, Record
from transport.messages import Ask, CreditId, Delivery, Member

if TYPE_CHECKING:
    from tests.sim.mesh import Mesh

PATIENCE_S = 0.1


class LedgerFile:
    """The lines of one trainer's record; those up to ``synced`` outlive a loss of power."""

    def __init__(self) -> None:
        self.lines: list[AnyEntry] = []
        self.synced = 0

    def accounts(self) -> Accounts:
        accounts = Accounts()
        for line in self.lines:
            accounts.apply(line)
        return accounts


@dataclass(frozen=True)
class Saved:
    """A checkpoint."""

    version: Version
    lineage: Lineage
    order: dict[str, Any]


@dataclass
class Disk:
    """What trainers of one run leave behind."""

    term: int = 0
    saved: Saved | None = None
    ledgers: dict[PeerId, LedgerFile] = field(default_factory=dict)

    def lose_power(self, share: float) -> list[tuple[PeerId, AnyEntry]]:
        """Of the lines that were not synced only this share is left, from the first on. Returns the others."""
        lost = []
        for peer, ledger in self.ledgers.items():
            end = ledger.synced + round(share * (len(ledger.lines) - ledger.synced))
            lost += [(peer, line) for line in ledger.lines[end:]]
            del ledger.lines[end:]
        return lost


@dataclass(frozen=True)
class Opens:
    """Write the term file."""

    counter: int


@dataclass(frozen=True)
class Syncs:
    """Put the ledger on the disk."""


class Trains(Part):
    takes = (Ask, Delivery)

    def __init__(self, node: Node):
        super().__init__(node)
        self.world: Mesh = node.world  # type: ignore[assignment]
        self.settings = self.world.settings.trainer
        self.disk: Disk = node.disk.setdefault("trainer", Disk())
        self.data = Dataset(name="numbers", size=self.world.prompts, digest="d", seed=self.world.seed)
        self.step, self.lineage = 0, Lineage()
        saved = self.disk.saved
        if saved is not None:
            self.step, self.lineage = saved.version.number, saved.lineage
            self.data.load_state_dict(saved.order)
        first_id = self._close_dead_ledgers()
        self.ledger = self.disk.ledgers[node.id] = LedgerFile()
        self.ledger.lines.append(Opened(peer=node.id, run="sim", first_id=first_id))
        self.delivery = TrainerDelivery(
            self.settings, self.data, seed=self.world.seed, steps=self.world.settings.run.steps, first_id=first_id
        )
        self.buffer = Buffer(limit=self.delivery.limit, max_lag=self.settings.max_lag)
        self.batch: list[Trajectory] = []
        self.term: Any = None
        self.finished = self._unpublished = False
        self._seen: dict[Version, int] = {}  # results of evaluations
        self._restored = saved.version if saved is not None else None

    @property
    def version(self) -> Version:
        return Version(self.lineage.terms[-1][0], self.step)

    @property
    def publisher(self) -> Publishes:
        return next(p for p in self.node.parts if isinstance(p, Publishes))

    # The main thread --------------------------------------------------------------------------------------------------

    def start(self, now: float) -> list[Any]:
        self.node.thread(self._run())
        return []

    def _run(self) -> Steps:
        world = self.world
        yield world.rng.random()  # what is slow to load
        yield from self._open_term()
        self._publish()
        yield self.delivery.advance(self.version, self.lineage, self.node.now)
        yield self._evaluate()
        while self.step < world.settings.run.steps:
            began = self.node.now
            self.batch = yield from self._wait()
            waited = self.node.now - began
            yield world.rng.random() * world.trouble.learn_s
            before, self.step = self.version, self.step + 1
            world.promises.trained(before, self.version, self.batch)
            if self.step % world.settings.evaluation.every_steps == 0:
                yield self._evaluate()
            self._publish()
            yield 0.001
            yield from self._settle(waited / max(1e-6, self.node.now - began))
            if self.step % world.settings.checkpoint.every_steps == 0:
                yield from self._save()
        yield from self._finish_evaluation()
        if self.delivery.evaluation_state().version != self.version:  # type: ignore[union-attr]
            yield self._evaluate()
            yield from self._finish_evaluation()
        yield from self._save()
        self.finished = True
        world.log(self.node, "has done all steps")

    def _open_term(self) -> Steps:
        """Once no other trainer is seen: one that was killed stays for the detection time."""
        while any(c.role == "trainer" and c.id != self.node.id for c in self.node.membership.alive):
            yield PATIENCE_S
        seen = [card.highest_term for card in self.node.membership.alive]
        floor = max([self.disk.term, *seen, *(t.counter for t, _ in self.lineage.terms)])
        machine = self.world.convening(self.node, "gradients")
        machine.raise_floor(floor)
        yield machine.convene([Member(self.node.id)], self.node.now)
        while self.term is None:
            yield PATIENCE_S
        yield [Opens(self.term.counter)]
        self.lineage = self.lineage.open(self.term, self.step)
        self.world.promises.opened(self.version, self._restored)
        self.publisher.open_term(self.lineage)
        yield self.node.membership.update(self.node.now, highest_term=self.term.counter)

    def _publish(self) -> None:
        self._unpublished = True
        self._snapshot()

    def _snapshot(self) -> None:
        if self._unpublished:
            self._unpublished = not self.publisher.snapshot(self.version)
            self.world.log(self.node, f"{'has no buffer for' if self._unpublished else 'publishes'} {self.version}")

    def _wait(self) -> Steps:
        n = self.settings.groups_per_step
        while self.buffer.ready(self.version, self.lineage) < n:
            self._snapshot()
            yield self._note_evaluation()
            yield PATIENCE_S
        taken, stale = self.buffer.take(n, self.version, self.lineage)
        self.batch = taken
        yield self.delivery.supersede(stale, self.node.now)
        yield self.delivery.take([t.credit.id for t in taken], self.node.now)
        return taken

    def _settle(self, waited: float) -> Steps:
        ids = [t.credit.id for t in self.batch]
        self.batch = []
        yield self.delivery.settle(ids)
        yield self.delivery.advance(self.version, self.lineage, self.node.now, waited)
        self.world.log(self.node, f"has trained {ids}, is at {self.version}")

    def _save(self) -> Steps:
        saved = Saved(self.version, self.lineage, self.data.state_dict())
        yield [Syncs()]
        yield self.world.rng.random() * self.world.trouble.save_s
        yield [saved]
        self.world.log(self.node, f"saved {saved.version}")

    def _evaluate(self) -> list[Any]:
        state = self.delivery.evaluation_state()
        if state is not None and not state.complete:
            return []
        self._seen[self.version] = 0
        return self.delivery.evaluate(range(self.world.settings.task.heldout_prompts), self.version, self.node.now)

    def _note_evaluation(self) -> list[Any]:
        state = self.delivery.evaluation_state()
        if state is None or not state.stuck:
            return []
        self._seen[self.version] = 0
        return self.delivery.repin(self.version, self.node.now)

    def _finish_evaluation(self) -> Steps:
        while not (state := self.delivery.evaluation_state()).complete:  # type: ignore[union-attr]
            self._snapshot()
            yield self._note_evaluation()
            yield PATIENCE_S
        assert self._seen[state.version] == state.total, f"an evaluation of {state.total} has other results"

    # The loop ---------------------------------------------------------------------------------------------------------

    def receive(self, sender: PeerId, message: Ask | Delivery, now: float) -> list[Any]:
        return self.delivery.receive(sender, message, now)

    def members(self, now: float) -> list[Any]:
        rollouts = [card.id for card in self.node.membership.alive if card.role == "rollout"]
        return self.delivery.rollouts(rollouts, now)

    def tick(self, now: float) -> list[Any]:
        return self.delivery.tick(now)

    def effect(self, effect: Any, now: float) -> list[Any]:
        match effect:
            case Form(go) if go.kind == "gradients":
                self.term = go.ballot
            case Departed(card, False, _):
                return self.delivery.rollout_left(card.id)
            case Record(entry):
                self.ledger.lines.append(entry)
                self.world.promises.recorded(self.node.id, entry)
            case Held(rollout, credit, group):
                self.buffer.put(rollout, credit, group)
            case Dropped(credit, _):
                self.buffer.drop(credit)
            case Evaluated(_, version, _):
                self._seen[version] += 1
            case Opens(counter):
                self.disk.term = counter
            case Syncs():
                self.ledger.synced = len(self.ledger.lines)
            case Saved():
                self.disk.saved = effect
        return []

    def open_credits(self) -> dict[CreditId, PeerId]:
        """Those that have not ended, each with its rollout."""
        return {id: o.issued.to for id, o in self.delivery.accounts.open.items()}

    def _close_dead_ledgers(self) -> int:
        """Account what earlier trainers left open as lost; the first credit id that none of them used."""
        next_id = 0
        for peer, ledger in self.disk.ledgers.items():
            accounts = ledger.accounts()
            if accounts.open:
                entry = Ended(outcome="lost", ids=list(accounts.open), why="its trainer died")
                ledger.lines.append(entry)
                self.world.promises.recorded(peer, entry)
            ledger.synced = len(ledger.lines)
            next_id = max(next_id, accounts.next_id)
        return next_id

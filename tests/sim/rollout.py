"""The rollout as a part of a simulated process: ``roles/rollout/rollout.py`` and an engine that takes its time."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from mesh.identity import PeerId
from mesh.membership import Departed
from mesh.version import Version
from tests.sim.groups import POST_S, Flat, Steps
from tests.sim.node import TICK_S, Node, Part
from tests.sim.weights import BUCKETS, Receives
from transport.delivery import Abort, RolloutDelivery, RunOver, Start, admits
from transport.evaluation import PASSED
from transport.messages import Answer, Completion, Credit, CreditId, Group, Segment, Span

if TYPE_CHECKING:
    from tests.sim.mesh import Mesh

NOTHING = np.zeros(0, np.float32)


@dataclass
class Work:
    """One credit: it waits for a version it admits, then samples for ``left`` seconds, under each of ``versions`` one
    token, which is what the engine's weights really were."""

    trainer: PeerId
    credit: Credit
    left: float
    versions: list[Version] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    admitted: bool = False

    def group(self) -> Group:
        n = len(self.versions)
        spans = [Span(version, i, i + 1) for i, version in enumerate(self.versions)]
        prompt = Segment(np.array([self.credit.epoch, self.credit.prompt], np.int32), False, NOTHING)
        sampled = Segment(np.array(self.tokens, np.int32), True, np.zeros(n, np.float32), spans)
        return Group([Completion([prompt, sampled], 1.0, "stop")] * self.credit.size, min(self.versions))


class Samples(Part):
    takes = (Answer,)

    def __init__(self, node: Node):
        super().__init__(node)
        self.world: Mesh = node.world  # type: ignore[assignment]
        self.delivery = RolloutDelivery(self.world.rng.randint(1, 5))
        self.version: Version | None = None  # of the engine, proved
        self.weights: list[int] = []  # what it runs on
        self.work: dict[tuple[PeerId, CreditId], Work] = {}
        self.over = ""
        self._pins: dict[Version, int] = {}
        self._failed: dict[Version, None] = {}  # versions whose proof failed once
        self._taking = self._unproven = False
        self._arrived: tuple[Version, Flat] | None = None

    @property
    def receiver(self) -> Receives:
        return next(p for p in self.node.parts if isinstance(p, Receives))

    # The loop ---------------------------------------------------------------------------------------------------------

    def receive(self, sender: PeerId, message: Answer, now: float) -> list[Any]:
        return self.delivery.receive(sender, message, now)

    def members(self, now: float) -> list[Any]:
        trainers = [card.id for card in self.node.membership.alive if card.role == "trainer"]
        return self.delivery.trainers(trainers, now)

    def tick(self, now: float) -> list[Any]:
        if self.over:
            self.node.leave("finished")
            return []
        self._turn()
        return self.delivery.tick(now)

    def effect(self, effect: Any, now: float) -> list[Any]:
        match effect:
            case Start(trainer, credit):
                self._later(lambda: self._start(trainer, credit))
            case Abort(trainer, id):
                self._later(lambda: self._end(trainer, id))
            case RunOver():
                self.over = "the run is over"
            case Departed(card, False, "finished") if card.role == "trainer":
                self.over = f"{card.name} finished the run"
        return []

    def _later(self, do: Any) -> None:
        """From the loop to the threads that work, or back."""
        self.node.after(POST_S, lambda: do() or [])

    # The work ---------------------------------------------------------------------------------------------------------

    def _start(self, trainer: PeerId, credit: Credit) -> None:
        if credit.evaluation:
            self._pins[credit.min_version] = self._pins.get(credit.min_version, 0) + 1
            self._pin()
        left = self.world.rng.random() * self.world.trouble.sample_s
        self.work[trainer, credit.id] = Work(trainer, credit, left)

    def _end(self, trainer: PeerId, id: CreditId) -> None:
        work = self.work.pop((trainer, id), None)
        if work is not None and work.credit.evaluation:
            version = work.credit.min_version
            self._pins[version] -= 1
            if not self._pins[version]:
                del self._pins[version]
            self._pin()

    def _pin(self) -> None:
        self.node.execute(self.receiver.schedule.pin(min(self._pins) if self._pins else None, self.node.now))

    def _fail(self, work: Work, why: str) -> None:
        self._end(work.trainer, work.credit.id)
        self._later(lambda: self.delivery.failed(work.trainer, work.credit.id, why, self.node.now))

    # The engine -------------------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        """A tick's worth of sampling; between two tokens a new version is taken over."""
        if not self._taking:
            self._arrived = self._arrived or self.receiver.offered()
            if self._arrived is not None and not self._held_for_evaluation():
                arrived, self._arrived, self._taking = self._arrived, None, True
                self.node.thread(self._take_over(*arrived))
        for work in list(self.work.values()):
            if not work.admitted:
                self._admit(work)
            elif self.version is not None:
                self._sample(work, self.version)

    def _held_for_evaluation(self) -> bool:
        sampling = [w for w in self.work.values() if w.admitted and w.credit.evaluation]
        return self.version is not None and any(w.credit.min_version == self.version for w in sampling)

    def _take_over(self, version: Version, flat: Flat) -> Steps:
        world = self.world
        self.version = None
        yield world.rng.random() * world.trouble.prove_s
        whole = world.promises.content(version, BUCKETS)
        assert flat.held == whole, f"the engine of {self.node.label} loaded something else than {version}"
        self.weights = list(flat.held)
        broken = self.node.address == world.broken
        proved = not broken and (version in self._failed or not world.chance(world.trouble.proof))
        if proved:
            world.promises.proved(self.node, version)
            self.version = version
        else:
            self._failed[version] = None
        world.log(self.node, f"{'proves' if proved else 'cannot prove'} {version}")
        self._taking = False
        self.receiver.answer(version, proved)
        if not proved:
            self._later(lambda: self.delivery.pause("weights unproven", self.node.now))
        elif self._unproven:
            self._later(lambda: self.delivery.resume(self.node.now))
        self._unproven = not proved
        if proved and version.term.counter > self.node.membership.card.highest_term:
            yield self.node.membership.update(self.node.now, highest_term=version.term.counter)

    def _admit(self, work: Work) -> None:
        version, credit = self.version, work.credit
        _, lineage = self.delivery.standing(work.trainer)
        gone = credit.evaluation and (
            self._unproven or self.receiver.schedule.passed(credit.min_version, self.node.now)
        )
        admitted = admits(credit, version, lineage, gone=gone)
        if admitted is None:
            self._fail(work, PASSED)
        elif admitted and version is not None:
            work.admitted = True
            self._later(lambda: self.delivery.started(work.trainer, credit.id, version))

    def _sample(self, work: Work, version: Version) -> None:
        if work.credit.evaluation and version != work.credit.min_version:
            self._fail(work, PASSED)
            return
        if version not in work.versions:
            work.versions.append(version)
            work.tokens.append(self.weights[0])
        work.left -= TICK_S
        if work.left > 0:
            return
        if self.world.chance(self.world.trouble.returned):
            self._end(work.trainer, work.credit.id)
            self._later(lambda: self.delivery.returned(work.trainer, work.credit.id, "engine dead"))
        elif self.world.chance(self.world.trouble.reward):
            self._fail(work, "the verifier raised")
        else:
            self._end(work.trainer, work.credit.id)
            self._later(lambda: self.delivery.finished(work.trainer, work.credit.id, work.group(), self.node.now))

"""A simulated trainer: the driver of ``Company``, which does what ``roles/trainer/acts.py`` asks of one.

Gradients are sets of batches, the state of the weights is a digest of all that was ever applied. Work takes time, on
threads of its own.
"""

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from mesh.convening import Convening, Form
from mesh.identity import PeerId
from mesh.version import Ballot
from roles.trainer.acts import (
    STEP_MESSAGES,
    Abandon,
    Apply,
    Build,
    Convene,
    Diverged,
    LeftBehind,
    Opened,
    Reduce,
    Transfer,
)
from roles.trainer.company import Company
from roles.trainer.step import Timing
from tests.sim.node import Node, Part
from tests.sim.step_group import Batch, Buffer, Content, Operation, digest
from transport.messages import Accept, Decline, Go, Invite, Member, Place

if TYPE_CHECKING:
    from tests.sim.step import Training

TIMING = Timing(
    step_wait_s=1.0,
    reduce_s=4.0,
    apply_s=4.0,
    split_wait_s=5.0,
    build_s=4.0,
    convene_s=3.0,
    takeover_s=1.5,
    hold_s=6.0,
    admit_interval_s=1.0,
    seek_s=0.5,
    gather_s=2.0,
)
STEP_POINTS = (
    "before ready", "at Go", "in the all-reduce", "before it tells its reduction", "telling its reduction",
    "before the optimizer step", "after the optimizer step", "telling that it applied",
)  # fmt: skip
FORMATION_POINTS = ("building", "standing", "at Opened")
NEWCOMER_POINTS = ("sending a transfer", "loading a transfer", "taken in")
POINTS = (*STEP_POINTS, *FORMATION_POINTS, *NEWCOMER_POINTS)
"""Where a trainer may be killed."""
SAVE_EVERY = 3  # steps


class Convenes(Part):
    takes = (Invite, Accept, Decline, Go)

    def __init__(self, node: Node):
        super().__init__(node)
        self.machine = Convening(node.id, "gradients", node.disk.get("term", 0))

    def receive(self, sender: PeerId, message: Any, now: float) -> Iterable[Any]:
        return self.machine.receive(sender, message, now)

    def tick(self, now: float) -> Iterable[Any]:
        return self.machine.tick(now)

    def members(self, now: float) -> Iterable[Any]:
        self.machine.live([card.id for card in self.node.membership.alive])
        return ()

    def effect(self, effect: Any, now: float) -> Iterable[Any]:
        if not isinstance(effect, Convene):
            return ()
        self.machine.raise_floor(max(effect.above, *(c.highest_term for c in self.node.membership.alive)))
        return self.machine.convene([Member(p) for p in effect.members], now)


class Trains(Part):
    """The driver: weights, gradients, and what an optimizer does."""

    takes = STEP_MESSAGES

    def __init__(self, node: Node):
        super().__init__(node)
        self.world: Training = node.world  # type: ignore[assignment]
        saved: tuple[Place, Content] | None = node.disk.get("saved")
        place, self.trained = saved if saved is not None else (Place(state=digest("base")), frozenset())
        expected = self.world.expected if "started" not in node.disk else 0
        node.disk["started"] = True
        name = self.world.name
        self.company = Company(node.id, place, node.now, timing=TIMING, name=name, expected=expected)
        self.life = 0  # counted up with every departure from a company: it is somebody else then
        self.batches = 0
        self.batch: Batch | None = None  # the groups taken for a step
        self.gradient = 0  # the step for which their gradient is there
        self.learning = (0, 0)  # the step, and the life, for which one is there or on its way
        self.operation: Operation | None = None
        self.transfer: Transfer | None = None
        self.buffers: dict[tuple[Ballot, int], Buffer] = {}
        self.applying = False
        self.pace = 1.0  # of its learning, as a factor of time
        self._id = node.id

    @property
    def running(self) -> bool:
        return self.node.running and self.node.id == self._id

    @property
    def place(self) -> Place:
        return self.company.place

    # Inputs -----------------------------------------------------------------------------------------------------------

    def start(self, now: float) -> Iterable[Any]:
        self._learn()
        return ()

    def receive(self, sender: PeerId, message: Any, now: float) -> Iterable[Any]:
        return self.company.receive(sender, message, now)

    def tick(self, now: float) -> Iterable[Any]:
        return self.company.tick(now)

    def members(self, now: float) -> Iterable[Any]:
        trainers = [card.id for card in self.node.membership.alive if card.role == "trainer"]
        return self.company.live(trainers, now)

    def effect(self, effect: Any, now: float) -> Iterable[Any]:
        match effect:
            case Form(go):
                return self.company.forming(go.ballot, [m.peer for m in go.members], now)
            case Build():
                self.node.disk["term"] = max(self.node.disk.get("term", 0), effect.ballot.counter)
                if not self.world.at_point(self.node, "building"):
                    self.world.groups.build(self, effect)
            case Abandon(ballot):
                if self.operation is not None and self.operation.reduce.ballot == ballot and self.world.chance(0.5):
                    self.node.after(0.02, partial(self.operated, self.operation, "abandoned"))
                self.transfer = None
            case Opened():
                return self._open(effect, now)
            case Reduce():
                self._reduce(effect)
            case Apply():
                self._apply(effect)
            case Transfer():
                self.transfer = effect
                self.node.after(self.world.rng.random() * self.world.trouble.transfer_s, partial(self._send, effect))
            case LeftBehind(reason):
                self.world.log(self.node, f"is left behind: {reason}")
                self.world.left_behind(self)
                self.life += 1
                self.buffers.clear()
                self.batch = None
            case Diverged(text, digests):
                raise AssertionError(f"{text}: {digests}")
        return ()

    # Learning ---------------------------------------------------------------------------------------------------------

    def _learn(self) -> None:
        """Begin the gradient of the next step, unless it is there or on its way."""
        step = self.place.step + 1
        if self.learning == (step, self.life):
            return
        self.learning = (step, self.life)
        learn_s = self.world.rng.random() * self.world.trouble.learn_s * self.pace
        self.node.after(learn_s, partial(self._learned, step, self.life))

    def _learned(self, step: int, life: int, idle: bool = True) -> Iterable[Any]:
        if life != self.life or step != self.place.step + 1 or self.world.at_point(self.node, "before ready"):
            return ()
        if idle and self.world.chance(self.world.trouble.idle):
            self.node.after(self.world.rng.random(), partial(self._learned, step, life, False))
            return self.company.ready(step, 0, 0, self.node.now)
        if self.batch is None:
            self.batches += 1
            self.batch = (self.node.id, self.batches)
        self.gradient = step
        return self.company.ready(step, 2, 100, self.node.now)

    def _open(self, opened: Opened, now: float) -> Iterable[Any]:
        if self.world.at_point(self.node, "at Opened"):
            return ()
        place = opened.place
        self.world.log(self.node, f"opens {opened.ballot} of {len(opened.members)} at step {place.step}")
        self.world.record.opened(opened)
        self.buffers.clear()
        self._learn()
        return self.node.membership.update(now, highest_term=opened.ballot.counter)

    # The collectives --------------------------------------------------------------------------------------------------

    def built(self, ballot: Ballot, fails: bool) -> Iterable[Any]:
        if fails:
            return self.company.broken(ballot, "could not connect", self.node.now)
        if self.company.state == "building" and self.company.ballot == ballot:
            self.world.record.stands(self, ballot)
        effects = self.company.formed(ballot, self.node.now)
        self.world.at_point(self.node, "standing", effects=len(effects))
        return effects

    def _reduce(self, reduce: Reduce) -> None:
        if self.world.at_point(self.node, "at Go"):
            return
        contributes = self.node.id in reduce.contributors
        assert not contributes or self.gradient == reduce.step, "it contributes what it does not have"
        buffer = self.buffers[reduce.ballot, reduce.step] = self.fresh_buffer()
        self.operation = Operation(self, reduce, self.batch if contributes else None, buffer)
        self.world.groups.enter(self.operation)
        self.world.at_point(self.node, "in the all-reduce")

    def fresh_buffer(self) -> Buffer:
        return Buffer()

    def operated(self, operation: Operation, failure: str) -> Iterable[Any]:
        if operation.over or self.world.at_point(self.node, "before it tells its reduction"):
            return ()
        operation.over = True
        ballot, step = operation.reduce.ballot, operation.reduce.step
        if failure:
            return self.company.reduce_failed(ballot, step, failure, self.node.now)
        effects = self.company.reduced(ballot, step, operation.buffer.digest, self.node.now)
        held = self.company.steps.held
        if held is not None and (held.ballot, held.step) == (ballot, step):
            self.world.record.reduced(self, ballot, step, held.digest)
        self.world.at_point(self.node, "telling its reduction", effects=len(effects))
        return effects

    def _apply(self, apply: Apply) -> None:
        if self.world.at_point(self.node, "before the optimizer step"):
            return
        self.world.record.applies(self, apply)
        self.applying = True
        buffer = self.buffers.get((apply.ballot, apply.step))
        assert buffer is not None, f"step {apply.step} is applied, and was not reduced here"
        delay = self.world.rng.random() * self.world.trouble.apply_s
        self.node.after(delay, partial(self._applied, apply, self.company.ballot, buffer, self.life))

    def _applied(self, apply: Apply, ballot: Ballot, buffer: Buffer, life: int) -> Iterable[Any]:
        before, content = self.place.state, buffer.content
        assert content is not None
        mine = self.batch in content
        assert not content & self.trained, f"trained twice: {sorted(content & self.trained)}"
        if life == self.life:  # else it was left behind in the middle of it
            assert mine == (self.node.id in apply.contributors), "what it contributed is not what was reduced"
        self.world.record.applied(self, apply, ballot, before, content)
        self.trained |= content
        if mine:
            self.batch = None
        self.applying = False
        if self.world.at_point(self.node, "after the optimizer step"):
            return ()
        state = digest(before, sorted(content))
        effects = self.company.applied(apply.step, len(self.trained), state, self.node.now)
        self.world.log(self.node, f"applied step {apply.step} of {apply.ballot}: {state}")
        if apply.step % SAVE_EVERY == 0:
            self.node.disk["saved"] = (self.place, self.trained)
        self._learn()
        self.world.at_point(self.node, "telling that it applied", effects=len(effects))
        return effects

    # Newcomers --------------------------------------------------------------------------------------------------------

    def _send(self, transfer: Transfer) -> Iterable[Any]:
        world, now = self.world, self.node.now
        if transfer is not self.transfer or world.at_point(self.node, "sending a transfer"):
            return ()
        there = next((t for t in world.trainers if t.node.id == transfer.newcomer), None)
        if there is None or world.parted(self.node.address, there.node.address) or world.chance(world.trouble.transfer):
            return self.company.transfer_failed(transfer.newcomer, "the link broke", now)
        assert transfer.step == self.place.step, "a transfer in the middle of a step"
        there.node.after(0.0, partial(there.load, transfer, self.place, self.trained))
        if world.chance(world.trouble.transfer):
            return self.company.transfer_failed(transfer.newcomer, "its answer was lost", now)
        return self.company.transferred(transfer.newcomer, now)

    def load(self, transfer: Transfer, place: Place, trained: Content) -> Iterable[Any]:
        if self.world.at_point(self.node, "loading a transfer") or self.company.state != "out":
            return ()
        if self.applying:  # of a company that it has left: first what is under way
            self.node.after(0.1, partial(self.load, transfer, place, trained))
            return ()
        self.trained, self.batch = trained, None
        self.life += 1
        effects = self.company.admitted(transfer.ballot, transfer.members, place, self.node.now)
        self.world.log(self.node, f"is taken in at step {place.step}")
        self._learn()
        self.world.at_point(self.node, "taken in")
        return effects

"""Scenario: trainers that make their steps together, through trouble and into calm; promise 10, and whatever happens no
step twice, none differently, none by some alone.

trouble  trainers die between two effects or at a chosen point of a step, stop and wake, start again or late; links
         part; messages are lost, doubled, overtaken; groups cannot be built; all-reduces complete on some ranks, or
         late, or fail, and what was abandoned still writes; transfers to newcomers break on either side
calm     whoever lives trains in one formation, from one place, and goes on
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from mesh.identity import PeerId
from tests.sim.node import Node
from tests.sim.step_driver import FORMATION_POINTS, POINTS, STEP_POINTS, Convenes, Trains
from tests.sim.step_group import Groups
from tests.sim.step_record import Record, check
from tests.sim.world import CALM, Weather, World
from transport.messages import StepReduced

SETTLE_S = 60.0  # from calm until all train together: sleepers and those left behind are taken in one by one
STEPS_S = 20.0  # for STEPS further steps in calm
STEPS = 3


@dataclass(frozen=True)
class Trouble:
    """Seconds that work takes at most, and probabilities."""

    learn_s: float = 0.3
    reduce_s: float = 0.1
    apply_s: float = 0.1
    build_s: float = 0.1
    transfer_s: float = 0.3
    build: float = 0.0  # one rank cannot connect
    reduce: float = 0.0  # one rank's all-reduce fails, with or without its result
    late: float = 0.0  # one rank's comes up to its deadline late
    transfer: float = 0.0
    idle: float = 0.0  # a trainer has nothing to contribute at first


WORK = Trouble()


class Training(World):
    """A world with what its trainers have in common, and what they did."""

    scenario = "step"

    def __init__(self, seed: int):
        super().__init__(seed)
        self.trouble = WORK
        self.expected = 0
        self.groups = Groups(self)
        self.record = Record()
        self.disks: dict[str, dict[str, Any]] = {}
        self.trap, self.passes = "", 0
        self.victim: Node | None = None
        self.sprung: list[str] = []
        self.invariants.append(check)

    def chance(self, probability: float) -> bool:
        return probability > 0.0 and self.rng.random() < probability

    def start(self, address: str) -> None:
        if address not in self.bound:
            disk = self.disks.setdefault(address, {})
            seeds = ("tcp://sim:0", "tcp://sim:1")
            Node(self, address, role="trainer", seeds=seeds, parts=[Convenes, Trains], disk=disk)

    @property
    def trainers(self) -> list[Trains]:
        return [p for node in self.living for p in node.parts if isinstance(p, Trains)]

    def name(self, peer: PeerId) -> str:
        return next((n.label for n in reversed(self.nodes) if n.id == peer), peer[:4])

    def set_trap(self, point: str, victim: Node | None = None) -> None:
        """The next to come to this point is killed there, or the one after it, or the third; or just this one, of whose
        reductions nobody hears from now on."""
        self.trap, self.victim, self.passes = point, victim, 0 if victim else self.rng.randint(0, 2)

    def send(self, source: Node, to: str, address: str, message: Any, *, bulk: bool = False) -> None:
        if source is not self.victim or not isinstance(message, StepReduced):
            super().send(source, to, address, message, bulk=bulk)

    def at_point(self, node: Node, point: str, *, effects: int = 0) -> bool:
        """Whether the trap goes off here: the process dies now, or between the next ``effects``."""
        if point != self.trap or self.victim not in (None, node):
            return False
        self.passes -= 1
        if self.passes >= 0:
            return False
        self.trap, self.victim = "", None
        self.sprung.append(point)
        self.log(node, f"trap: {point}")
        if not effects:
            node.kill()
            return True
        node.doom(self.rng.randint(0, effects))
        return False

    def left_behind(self, trains: Trains) -> None:
        """Another formation prevails over that of this trainer, whose weights are still what they were."""

    def until(self, done: Callable[[], str], within_s: float, what: str) -> float:
        """Run until ``done`` returns nothing; what it returns else is what is missing. Raises Failure."""
        start = self.now
        while missing := done():
            if self.now - start > within_s:
                raise self.failure(f"{what} within {within_s:.0f} s: {missing}")
            self.run(self.now + 0.1)
        return self.now - start


def together(world: Training) -> str:
    """What is missing until all who live train in one formation."""
    trainers = world.trainers
    for t in trainers:
        if t.company.state != "in" or t.company.steps.phase in ("standing", "holding"):
            return f"{t.node.label} is {t.company.state}, {t.company.steps.phase}"
        if set(t.company.members) != {other.node.id for other in trainers}:
            return f"{t.node.label} is in a formation of {len(t.company.members)} of {len(trainers)}"
    return "" if len({t.company.ballot for t in trainers}) == 1 else "there are several formations"


def steps_further(world: Training, steps: int = STEPS) -> None:
    """All who live make so many more steps together. Raises Failure."""
    goal = max(t.place.step for t in world.trainers) + steps

    def missing() -> str:
        return ", ".join(f"{t.node.label} at {t.place.step}" for t in world.trainers if t.place.step < goal)

    world.until(missing, STEPS_S, f"not at step {goal}")
    world.run(world.now + 2.0)
    world.until(partial(together, world), STEPS_S, "not all train together any more")


def calm(world: Training, addresses: Sequence[str]) -> None:
    world.log(None, "calm")
    world.weather, world.trouble, world.trap, world.victim = CALM, WORK, "", None
    world.heal()
    for node in world.living:
        node.fuse = None
        node.wake()
    for address in addresses[:2]:  # without any seed, those who never met cannot meet
        world.start(address)
    world.until(partial(together, world), SETTLE_S, "not all train together")
    steps_further(world)


def scenario(seed: int) -> Training:
    """One life of a few trainers. Raises Failure."""
    world = Training(seed)
    rng = world.rng
    addresses = [f"tcp://sim:{i}" for i in range(rng.randint(2, 5))]
    world.expected = rng.choice((0, len(addresses)))
    calm_at = rng.uniform(10.0, 25.0)
    for address in addresses:
        late = rng.random() < 0.2
        world.at(rng.uniform(2.0, calm_at) if late else rng.uniform(0.0, 1.0), partial(world.start, address))
    world.weather = Weather(
        delay_s=rng.choice((0.0005, 0.02)),
        jitter_s=rng.choice((0.001, 0.03)),
        loss=rng.choice((0.0, 0.05, 0.2)),
        duplicate=rng.choice((0.0, 0.1)),
        straggler=rng.choice((0.0, 0.02)),
        connect_loss=rng.choice((0.0, 1.0)),
        late_tick=rng.choice((0.0, 0.1)),
    )
    world.trouble = Trouble(
        learn_s=rng.choice((0.3, 2.0)),
        reduce_s=rng.choice((0.05, 0.4)),
        apply_s=rng.choice((0.05, 0.5)),
        build=rng.choice((0.0, 0.1)),
        reduce=rng.choice((0.0, 0.1, 0.3)),
        late=rng.choice((0.0, 0.2, 0.6)),
        transfer=rng.choice((0.0, 0.3)),
        idle=rng.choice((0.0, 0.2)),
    )
    for _ in range(rng.randint(0, 8)):
        world.at(rng.uniform(2.0, calm_at), partial(_misfortune, world, addresses))
    world.run(calm_at)
    calm(world, addresses)
    return world


def seeds_of(point: str, count: int) -> range:
    """Seeds of ``deaths`` whose first death is at this point."""
    return range(POINTS.index(point), len(POINTS) * count, len(POINTS))


def deaths(seed: int) -> Training:
    """Trainers that see each other well, of whom one is killed at a point that the seed counts through, and often
    another soon after. No step of a dead one is ever made differently by those who live. Raises Failure."""
    world = Training(seed)
    world.scenario = "deaths"
    rng, point = world.rng, POINTS[seed % len(POINTS)]
    world.expected = rng.randint(2, 5)
    world.weather = Weather(jitter_s=0.01, loss=rng.choice((0.0, 0.05)), duplicate=0.1)
    world.trouble = Trouble(
        learn_s=rng.choice((0.3, 2.0)),
        apply_s=rng.choice((0.05, 0.4)),
        reduce=rng.choice((0.0, 0.1)),
        late=rng.choice((0.0, 0.3)),
        idle=rng.choice((0.0, 0.2)),
    )
    for i in range(world.expected):
        world.start(f"tcp://sim:{i}")
    world.until(partial(together, world), SETTLE_S, "not all train together")
    world.run(world.now + rng.uniform(0.0, 2.0))
    unheard = point in ("after the optimizer step", "telling that it applied") and rng.random() < 0.5
    world.set_trap(point, rng.choice(world.trainers).node if unheard else None)
    for i in range(world.expected, world.expected + 4):  # newcomers: for points on the way to a new formation
        if world.sprung:
            break
        world.start(f"tcp://sim:{i}")
        world.run(world.now + 4.0)
    world.until(lambda: "" if world.sprung else "it lives", SETTLE_S, f"nobody came to this point: {point}")
    if sum(t.company.steps.opened > 0 for t in world.trainers) > 1 and rng.random() < 0.5:  # one goes on
        world.set_trap(rng.choice((*STEP_POINTS, *FORMATION_POINTS)))
        world.run(world.now + rng.uniform(0.0, 6.0))
    calm(world, ())
    if world.record.forks:
        raise world.failure("a step was made in two ways")
    return world


def _misfortune(world: Training, addresses: list[str]) -> None:
    rng = world.rng
    what = rng.choice(("trap", "trap", "trap", "kill", "doom", "restart", "stop", "nap", "part", "deaf"))
    node = world.bound.get(rng.choice(addresses))
    if what == "trap":
        world.set_trap(rng.choice(POINTS))
    elif node is None:
        world.start(rng.choice(addresses))
    elif what == "kill":
        node.kill()
    elif what == "doom":
        node.doom(rng.randint(0, 40))
        world.after(rng.uniform(0.5, 6.0), partial(world.start, node.address))
    elif what == "restart":
        node.restart()
    elif what in ("stop", "nap"):
        node.stop()
        world.after(rng.uniform(3.5, 8.0) if what == "stop" else rng.uniform(0.1, 2.5), node.wake)
    else:
        some = rng.sample(addresses, rng.randint(1, len(addresses) - 1))
        rest = [a for a in addresses if a not in some]
        world.log(None, f"{'part' if what == 'part' else 'deaf'}: {some} | {rest}")
        world.after(rng.uniform(0.5, 8.0), world.cut(some, rest, both=what == "part"))

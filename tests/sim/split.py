"""Scenario: the network between two halves is cut, and heals; design, section 7.

apart    trainers and rollouts on two sides, or one trainer alone; each side trains on as it may, the smaller perhaps
         faster; one cut off from many waits before it does
healed   all train in one formation again. Nobody gave up its weights for those of others who had trained less. What all
         hold descends from one of the sides, and from nothing that the other trained alone. Nobody started again:
         trainers and rollouts have the ids that they had
"""

from collections.abc import Sequence
from functools import partial

from mesh.presets import LOCAL
from mesh.version import Lineage, Version
from roles.trainer.agreement import last_term
from tests.sim.node import Node
from tests.sim.step import SETTLE_S, Training, Trouble, calm, together
from tests.sim.step_driver import TIMING, Trains
from tests.sim.world import Weather
from transport.messages import Place

ROLLOUTS = 4
GROUPS = 2  # of a trainer in a step
WAITS_S = LOCAL.detection_s(2) + TIMING.split_wait_s - 1.0  # after a cut one that lost most trains nothing for so long


class Split(Training):
    scenario = "split"

    def __init__(self, seed: int):
        super().__init__(seed)
        self.sides: tuple[Sequence[Trains], ...] = ()
        self.forked = False  # both sides trained after the cut
        self.kept: list[bool] = []  # whether what each side had is in the weights of all

    def left_behind(self, trains: Trains) -> None:
        for side in self.sides:
            if trains not in side:
                theirs = best(side).trained
                assert trains.place.trained <= theirs, (
                    f"{trains.node.label} gives up {trains.place.trained} groups, the others have {theirs}"
                )


def best(side: Sequence[Trains]) -> Place:
    return max((trains.place for trains in side), key=lambda place: (place.trained, place.step))


def holds(lineage: Lineage, place: Place) -> bool:
    return lineage.holds(Version(last_term(place.lineage), place.step))


def scenario(seed: int) -> Split:
    """Raises Failure."""
    world = Split(seed)
    rng = world.rng
    world.expected = rng.randint(2, 5)
    world.weather = Weather(jitter_s=0.005, loss=rng.choice((0.0, 0.05)), duplicate=0.1)
    world.trouble = Trouble(learn_s=rng.choice((0.3, 1.0)))
    for i in range(world.expected):
        world.start(f"tcp://sim:{i}")
    rollouts = [Node(world, f"tcp://sim:{10 + i}", seeds=("tcp://sim:0", "tcp://sim:1")) for i in range(ROLLOUTS)]
    world.until(partial(together, world), SETTLE_S, "not all train together")
    world.run(world.now + rng.uniform(0.0, 3.0))

    trainers = rng.sample(world.trainers, world.expected)
    lonely = world.expected > 2 and rng.random() < 0.5
    size, with_them = 1 if lonely else rng.randint(1, world.expected - 1), rng.randint(0, ROLLOUTS)
    world.sides = few, many = trainers[:size], trainers[size:]
    for trains in few:
        trains.pace = rng.choice((1.0, 0.2))
    one = [*(t.node.address for t in few), *(r.address for r in rollouts[:with_them])]
    other = [*(t.node.address for t in many), *(r.address for r in rollouts[with_them:])]
    ids = [node.id for node in world.living]
    world.log(None, f"cut: {one} | {other}")
    heal = world.cut(one, other)
    begun = few[0].place.trained + GROUPS * world.expected  # a step that is under way may be finished
    world.run(world.now + WAITS_S)
    if lonely and few[0].place.trained > begun:
        raise world.failure(f"one cut off from many has trained {few[0].place.trained - begun} groups at once")
    world.run(world.now + rng.uniform(0.0, 35.0))

    apart = [best(side) for side in world.sides]
    world.log(None, "healed")
    heal()
    calm(world, ())
    final = world.trainers[0].place
    if final.trained < max(place.trained for place in apart):
        raise world.failure(f"{final.trained} groups are in the weights of all, and had been more: {apart}")
    world.kept = [holds(final.lineage, place) for place in apart]
    world.forked = not holds(apart[0].lineage, apart[1]) and not holds(apart[1].lineage, apart[0])
    if world.forked and sum(world.kept) != 1:
        raise world.failure(f"of two sides that trained alone, {sum(world.kept)} are in the lineage of all")
    if [node.id for node in world.living] != ids:
        raise world.failure("a peer has another id than before the cut")
    return world

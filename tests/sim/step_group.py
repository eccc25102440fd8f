"""Process groups of simulated trainers: who came to build one, and all-reduces over sets of batches.

They are as unkind as the real ones: a build fails at some ranks and succeeds at others; an all-reduce completes on any
subset of its ranks, and late; it may fail at a rank that has its result; one that was abandoned still writes into its
buffer. The death of a member is noticed by some at once, by the others at the deadline.
"""

import hashlib
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from mesh.identity import PeerId
from mesh.version import Ballot
from roles.trainer.acts import Build, Reduce

if TYPE_CHECKING:
    from tests.sim.step import Training
    from tests.sim.step_driver import Trains

OPERATION_S = 2.0  # an all-reduce's own deadline
RETRY_S = 0.2  # where a link is parted or a process stopped

Batch = tuple[PeerId, int]
Content = frozenset[Batch]
TORN: Content = frozenset({("torn", 0)})  # what an abandoned operation leaves


def digest(*parts: object) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=6).hexdigest()


class Buffer:
    """What an all-reduce writes into."""

    def __init__(self) -> None:
        self.content: Content | None = None

    @property
    def digest(self) -> str:
        return digest(sorted(self.content or ()))


class Operation:
    """One rank's part of an all-reduce."""

    def __init__(self, trains: "Trains", reduce: Reduce, batch: Batch | None, buffer: Buffer):
        self.trains, self.reduce, self.batch, self.buffer = trains, reduce, batch, buffer
        self.deadline = trains.node.world.now + OPERATION_S
        self.over = False

    @property
    def alive(self) -> bool:
        return self.trains.running


@dataclass
class Meeting:
    """The members of one ballot: who came to build the group, and who entered the all-reduce of which step."""

    members: tuple[PeerId, ...]
    here: dict[PeerId, "Trains"] = field(default_factory=dict)
    entered: dict[int, dict[PeerId, Operation]] = field(default_factory=dict)


class Groups:
    """Every group that is or was built, by ballot."""

    def __init__(self, world: "Training"):
        self._world = world
        self._meetings: dict[Ballot, Meeting] = {}

    def build(self, trains: "Trains", build: Build) -> None:
        world = self._world
        meeting = self._meetings.setdefault(build.ballot, Meeting(build.members))
        assert meeting.members == build.members, f"two lists of members for {build.ballot}"
        meeting.here[trains.node.id] = trains
        if len(meeting.here) < len(meeting.members):
            return
        for there in meeting.here.values():
            fails = world.chance(world.trouble.build) or not all(t.running for t in meeting.here.values())
            there.node.after(world.rng.random() * world.trouble.build_s, partial(there.built, build.ballot, fails))

    def enter(self, operation: Operation) -> None:
        """An all-reduce has a result once all ranks have entered; each rank has it, or not, in its own time."""
        world, reduce = self._world, operation.reduce
        meeting = self._meetings[reduce.ballot]
        ranks = meeting.entered.setdefault(reduce.step, {})
        peer = operation.trains.node.id
        assert peer not in ranks, f"{world.name(peer)} enters step {reduce.step} of {reduce.ballot} twice"
        ranks[peer] = operation
        contributors = {o.reduce.contributors for o in ranks.values()}
        assert len(contributors) == 1, f"contributors to step {reduce.step} differ: {contributors}"
        operation.trains.node.after(OPERATION_S, partial(operation.trains.operated, operation, "timed out"))
        if len(ranks) < len(meeting.members):
            return
        result = frozenset(o.batch for o in ranks.values() if o.batch is not None)
        for o in ranks.values():
            late = world.rng.random() * OPERATION_S if world.chance(world.trouble.late) else 0.0
            delay = world.rng.expovariate(1.0) * world.trouble.reduce_s + late
            world.after(delay, partial(self._complete, o, list(ranks.values()), result))

    def _complete(self, o: Operation, ranks: list[Operation], result: Content) -> None:
        world = self._world
        if not o.alive or world.now > o.deadline:
            return
        here = o.trains.node.address
        if any(r.alive and (r.trains.node.stopped or world.parted(here, r.trains.node.address)) for r in ranks):
            world.after(RETRY_S, partial(self._complete, o, ranks, result))
            return
        dead = not all(r.alive for r in ranks)
        fails = world.chance(world.trouble.reduce) or (dead and world.chance(0.5))
        if o.over or not fails or world.chance(0.5):
            o.buffer.content = TORN if o.over else result  # torch cannot be stopped
        o.trains.node.after(0.001, partial(o.trains.operated, o, "failed" if fails else ""))

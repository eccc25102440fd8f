"""Process groups of simulated processes, and the thread that runs their operations: ``transport/formation.py`` and
``transport/weights/mover.py`` with waits instead of torch.

They are as unkind as the real ones: a build fails at some ranks and succeeds at others; a broadcast completes on any
subset of its ranks, and late; it may fail at a rank that has all of its bytes; an operation that was abandoned goes on
until its own deadline and may touch its buffer until then. The death of a member is noticed by some at once, by the
others at the deadline.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from mesh.version import Ballot
from tests.sim.node import Node
from transport.formation import FormationBroken
from transport.messages import Go, Member

if TYPE_CHECKING:
    from tests.sim.mesh import Mesh

POLL_S = 0.05
POST_S = 0.001  # from a thread to the loop
RETRY_S = 0.2  # of a transfer whose link is parted or whose process is stopped
SCRATCH = "scratch memory"

Steps = Generator[Any, None, None]


class Flat:
    """A buffer of weights: what each of its buckets holds. ``guard`` says why it must not be written, when it must
    not."""

    def __init__(self, name: str, buckets: int):
        self.name, self.held, self.guard = name, [0] * buckets, ""
        self._operations: list[Operation] = []

    @property
    def operations(self) -> list["Operation"]:
        """Those that may still read or write it."""
        self._operations = [o for o in self._operations if o.pending]
        return self._operations

    def enter(self, operation: "Operation") -> None:
        self._operations.append(operation)

    def write(self, bucket: int, value: int) -> None:
        assert not self.guard, f"{self.name} is written while it is {self.guard}"
        self.held[bucket] = value

    def fill(self, values: Sequence[int]) -> None:
        """Copy a version in, by the owner of the buffer."""
        assert not self.operations, f"{self.name} is written while an operation may still read or write it"
        for bucket, value in enumerate(values):
            self.write(bucket, value)


class Operation:
    """One rank's part of a broadcast."""

    def __init__(self, node: Node, flat: Flat, bucket: int, deadline: float):
        self.node, self.flat, self.bucket, self.deadline, self.done = node, flat, bucket, deadline, False
        self._id = node.id

    @property
    def alive(self) -> bool:
        return self.node.running and self.node.id == self._id

    @property
    def pending(self) -> bool:
        """Whether it may still touch its buffer."""
        return not self.done and self.alive and self.node.world.now < self.deadline


class Broadcast:
    """One bucket on its way from one rank to all others that enter."""

    def __init__(self, world: "Mesh", size: int):
        self.world, self.size, self.left = world, size, size - 1
        self.operations: dict[int, Operation] = {}

    def enter(self, rank: int, source: int, operation: Operation) -> None:
        self.operations[rank] = operation
        if rank == source:
            self.left = self.size - 1
            for other in [r for r in self.operations if r != source]:
                self._soon(partial(self._read, source, other))
        elif source in self.operations:
            self._soon(partial(self._read, source, rank))

    def _soon(self, do: Callable[[], None]) -> None:
        self.world.after(self.world.rng.expovariate(1.0) * self.world.trouble.transfer_s, do)

    def _read(self, source: int, rank: int) -> None:
        here, there = self.operations[source], self.operations[rank]
        if not (here.pending and there.pending):
            return
        if here.node.stopped or self.world.parted(here.node.address, there.node.address):
            self.world.after(RETRY_S, partial(self._read, source, rank))
            return
        value = here.flat.held[here.bucket]
        if self.world.chance(self.world.trouble.corrupt):
            value ^= 1 << 60
        self.left -= 1
        here.done = self.left == 0
        self._soon(partial(self._write, there, value))

    def _write(self, there: Operation, value: int) -> None:
        if not there.pending:
            return
        if there.node.stopped:
            self.world.after(RETRY_S, partial(self._write, there, value))
            return
        there.flat.write(there.bucket, value)
        there.done = True


@dataclass
class Meeting:
    """Where the members of one ballot meet: who came to its store, and the broadcasts of the group."""

    go: Go
    here: dict[str, Node] = field(default_factory=dict)
    broadcasts: list[Broadcast] = field(default_factory=list)


class Abandon:
    """The event that ends a build or an operation early."""

    def __init__(self) -> None:
        self.on = False


class Formation:
    """One rank's end of a built group."""

    def __init__(self, world: "Mesh", node: Node, meeting: Meeting):
        self.ballot: Ballot = meeting.go.ballot
        self.members = tuple(meeting.go.members)
        self.rank = self.members.index(Member(node.id))
        self._world, self._node, self._meeting = world, node, meeting
        self._broken = ""
        self._calls = 0
        self._operation: Operation | None = None

    def broadcast(self, flat: Flat, bucket: int, source: int, abandon: Abandon) -> Steps:
        """Raises FormationBroken."""
        world, timeout_s = self._world, self._world.settings.weights.op_timeout_s
        if self._broken:
            raise FormationBroken(self._broken)
        if len(self.members) == 1:
            return
        if self._calls == len(self._meeting.broadcasts):
            self._meeting.broadcasts.append(Broadcast(world, len(self.members)))
        self._operation = operation = Operation(self._node, flat, bucket, world.now + timeout_s)
        flat.enter(operation)
        self._meeting.broadcasts[self._calls].enter(self.rank, source, operation)
        self._calls += 1
        fails = world.chance(world.trouble.operation)
        fails_at = world.now + world.rng.random() * timeout_s if world.chance(0.5) else operation.deadline
        notices = world.chance(0.5)
        while not operation.done:
            if abandon.on:
                raise self._break("abandoned")
            if world.now >= operation.deadline or (fails and world.now >= fails_at):
                raise self._break("timed out")
            if notices and any(o.id != peer or not o.running for peer, o in self._meeting.here.items()):
                raise self._break("a member is gone")
            yield POLL_S
        if fails:
            raise self._break("failed")

    def _break(self, why: str) -> FormationBroken:
        self._broken = f"broadcast in {self.ballot} {why}"
        return FormationBroken(self._broken)

    def ended(self) -> bool:
        return self._operation is None or not self._operation.pending


class Groups:
    """Every group that is or was built, by ballot."""

    def __init__(self, world: "Mesh"):
        self._world = world
        self._meetings: dict[Ballot, Meeting] = {}

    def build(self, node: Node, go: Go, abandon: Abandon) -> Generator[Any, None, Formation]:
        """Raises FormationBroken."""
        world = self._world
        meeting = self._meetings.setdefault(go.ballot, Meeting(go))
        deadline = world.now + world.settings.weights.form_timeout_s
        while True:
            store = next((n for n in world.living if n.id == go.ballot.convener), None)
            reached = store is not None and not store.stopped and not world.parted(node.address, store.address)
            if reached:
                meeting.here[node.id] = node
            missing = [m for m in go.members if m.peer not in meeting.here]
            if abandon.on or world.now >= deadline:
                raise FormationBroken("abandoned" if abandon.on else "not all are there", missing)
            if reached and not missing:
                break
            yield POLL_S
        yield world.rng.random() * world.trouble.connect_s
        if world.chance(world.trouble.build):
            raise FormationBroken("could not connect")
        return Formation(world, node, meeting)


class Mover:
    """One job after the other, each a generator that yields waits."""

    def __init__(
        self,
        node: Node,
        formed: Callable[[Formation], Iterable[Any]],
        failed: Callable[[Go, str, Sequence[Member]], Iterable[Any]],
    ):
        self._node, self._formed, self._failed = node, formed, failed
        self._groups: Groups = node.world.groups  # type: ignore[attr-defined]
        self._queue: deque[Steps] = deque()
        self._working = False
        self._wanted: Ballot | None = None
        self._abandon = Abandon()
        self._current: Formation | None = None

    def form(self, go: Go) -> None:
        if self._wanted is None or go.ballot > self._wanted:
            self._abandon.on = True
            self._abandon = Abandon()
            self._wanted = go.ballot
            self.do(self._build(go, self._abandon))

    def disband(self, ballot: Ballot) -> None:
        if self._wanted == ballot:
            self._abandon.on = True
            self.do(self._drop())

    def run(self, ballot: Ballot, job: Callable[[Formation | None, Abandon], Steps]) -> None:
        abandon = self._abandon

        def work() -> Steps:
            here = self._current is not None and self._current.ballot == ballot
            yield from job(self._current if here else None, abandon)

        self.do(work())

    def do(self, work: Steps) -> None:
        self._queue.append(work)
        if not self._working:
            self._working = True
            self._node.thread(self._work())

    def post(self, do: Callable[[], Iterable[Any]]) -> None:
        self._node.after(POST_S, do)

    def _work(self) -> Steps:
        while self._queue:
            yield from self._queue.popleft()
        self._working = False

    def _build(self, go: Go, abandon: Abandon) -> Steps:
        self._current = None
        if abandon.on:
            return
        try:
            formation = yield from self._groups.build(self._node, go, abandon)
        except FormationBroken as e:
            text, at_fault = str(e), e.members
            if not abandon.on:
                self.post(lambda: self._failed(go, text, at_fault))
            return
        if not abandon.on:
            self._current = formation
            self.post(lambda: self._formed(formation))

    def _drop(self) -> Steps:
        self._current = None
        return
        yield

"""Both ends of a publication as parts of a simulated process: ``transport/weights/publisher.py`` and ``receiver.py``
with the same machines, and with waits for copies, digests and proofs."""

from typing import TYPE_CHECKING, Any

import numpy as np

from mesh.convening import Form
from mesh.effects import Send
from mesh.identity import PeerId
from mesh.version import Lineage, Version
from tests.sim.groups import SCRATCH, Abandon, Flat, Formation, Mover, Steps
from tests.sim.node import Node, Part
from transport.formation import FormationBroken
from transport.messages import (
    Announce,
    Begin,
    Go,
    ManifestAsk,
    ManifestTell,
    Member,
    Probe,
    PullAsk,
    PullDecline,
    PullTell,
    Report,
)
from transport.weights.buffers import Leases, Slot
from transport.weights.publisher import BUFFERS
from transport.weights.pull import Check, PullHost, Serve, Write
from transport.weights.reception import Missed, Offer, ReceiverSchedule, Refuse, Released, StartReceive
from transport.weights.schedule import (
    AnnounceTo,
    Disband,
    EnginesDiffer,
    PublisherSchedule,
    Release,
    SatOut,
    StartBroadcast,
)
from transport.weights.shadows import SHADOWS

if TYPE_CHECKING:
    from tests.sim.mesh import Mesh

BUCKETS = 2
BUCKET_BYTES = 8  # one number
PULL_BYTES_PER_S = 200.0
DIGEST = "manifest"
PROBE = Probe(np.zeros(0, np.int32), np.zeros(0, np.float32))


def chunk(world: "Mesh", value: int) -> np.ndarray:
    """A number as it travels by pull, now and then damaged."""
    return np.array([value ^ (1 << 60) if world.chance(world.trouble.corrupt) else value], np.uint64).view(np.uint8)


class _Staged:
    """A snapshot in its buffer."""

    def __init__(self, version: Version, lineage: Lineage, slot: Slot):
        self.version, self.lineage, self.slot = version, lineage, slot


class Publishes(Part):
    """The publisher of a trainer. ``snapshot`` is for the trainer's thread."""

    takes = (Report, ManifestAsk, PullAsk)

    def __init__(self, node: Node):
        super().__init__(node)
        self.world: Mesh = node.world  # type: ignore[assignment]
        self.schedule = PublisherSchedule(Member(node.id), self.world.settings.weights)
        self.mover = Mover(node, self._formed, self._failed)
        self.skipped = 0
        self._leases = Leases(BUFFERS, 1)
        self._flats = [Flat(f"buffer {i} of {node.label}", BUCKETS) for i in range(BUFFERS)]
        self._lineage: Lineage | None = None
        self._pending: _Staged | None = None
        self._kept: _Staged | None = None
        self._host = PullHost(PULL_BYTES_PER_S)

    # The trainer's thread

    def open_term(self, lineage: Lineage) -> None:
        self._lineage = lineage
        self.mover.post(lambda: self.members(self.node.now))

    def snapshot(self, version: Version) -> bool:
        """False when no buffer was free."""
        assert self._lineage is not None
        slot = self._leases.acquire(str(version))
        if slot is None and self._kept is not None:
            self._leases.release(self._kept.slot)
            self._kept, slot = None, self._leases.acquire(str(version))
        if slot is None:
            self.skipped += 1
            return False
        self._flats[slot.index].fill(self.world.promises.content(version, BUCKETS))
        replaced, self._pending = self._pending, _Staged(version, self._lineage, slot)
        if replaced is None:
            self.mover.do(self._digest())
        else:
            self._leases.release(replaced.slot)
        return True

    # The mover

    def _digest(self) -> Steps:
        yield self.world.rng.random() * self.world.trouble.digest_s
        staged, self._pending = self._pending, None
        if staged is not None:
            self.mover.post(lambda: self.schedule.snapshot(staged.version, staged, self.node.now))

    def _broadcast(self, formation: Formation | None, abandon: Abandon, start: StartBroadcast) -> Steps:
        slot: Slot = start.slot.slot
        ok = formation is not None
        try:
            for i in range(BUCKETS if formation is not None else 0):
                assert formation is not None
                yield from formation.broadcast(self._flats[slot.index], i, formation.rank, abandon)
        except FormationBroken:
            assert formation is not None
            ok = False
            self.world.log(self.node, f"broadcast of {start.version} failed")
            self._leases.quarantine(slot, formation.ended)
        self.mover.post(lambda: self.schedule.broadcast_ended(start.version, start.attempt, ok, self.node.now))

    # The loop

    def receive(self, sender: PeerId, message: Report | ManifestAsk | PullAsk, now: float) -> list[Any]:
        match message:
            case ManifestAsk():
                return [Send(sender, ManifestTell(DIGEST, 0, 1, b""), bulk=True)]
            case PullAsk(version):
                chunks = BUCKETS if self._holds(version) else 0
                return self._host.asked(sender, message, BUCKET_BYTES, chunks, now)
        return self.schedule.report(sender, message, now)

    def members(self, now: float) -> list[Any]:
        if self._lineage is None:
            return []
        self._host.live([c.id for c in self.node.membership.alive])
        rollouts = [Member(c.id) for c in self.node.membership.alive if c.role == "rollout"]
        return self.schedule.live(rollouts, now)

    def tick(self, now: float) -> list[Any]:
        if self._kept is not None and not self._host.leased(self._kept.version):
            self._leases.release(self._kept.slot)
            self._kept = None
        return [*self.schedule.tick(now), *self._host.tick(now)]

    def effect(self, effect: Any, now: float) -> list[Any]:
        match effect:
            case AnnounceTo(peer, ballot, version, attempt, staged, holders):
                digests = np.array(self.world.promises.content(version, BUCKETS), np.uint64)
                a = Announce(
                    ballot,
                    version,
                    staged.lineage,
                    DIGEST,
                    BUCKET_BYTES,
                    attempt,
                    digests,
                    digests,
                    PROBE,
                    list(holders),
                )
                return [Send(peer, a, bulk=True)]
            case Serve(peer, version, index):
                held = self._holds(version)
                if held is None:
                    return self._host.gone(version)
                value = self._flats[held.slot.index].held[index]
                return [Send(peer, PullTell(version, index, chunk(self.world, value)), bulk=True)]
            case StartBroadcast(ballot, version, attempt):
                self.world.log(self.node, f"broadcasts {version}, attempt {attempt}, in {ballot}")
                self.mover.run(ballot, lambda formation, abandon: self._broadcast(formation, abandon, effect))
            case Release(staged):
                released: _Staged | None = staged
                if self._host.leased(staged.version):
                    released, self._kept = self._kept, staged
                if released is not None:
                    self._leases.release(released.slot)
            case Disband(ballot):
                self.mover.disband(ballot)
            case SatOut(peer, publications, reason):
                self.world.log(self.node, f"{self.world.name(peer)} sits out {publications}: {reason}")
            case EnginesDiffer(peer, other):
                raise AssertionError(f"engines of {peer} and {other} differ under one version")
            case Form(go) if go.kind == "weights":
                self.mover.form(go)
        return []

    def _holds(self, version: Version) -> _Staged | None:
        return next((s for s in (self.schedule.staged, self._kept) if s is not None and s.version == version), None)

    def _formed(self, formation: Formation) -> list[Any]:
        return self.schedule.formed(formation.ballot, formation.members, self.node.now)

    def _failed(self, go: Go, reason: str, at_fault: Any) -> list[Any]:
        return self.schedule.group_failed(go.ballot, reason, at_fault, self.node.now)


class Receives(Part):
    """The receiver of a rollout. ``offered`` and ``answer`` are for the engine's thread."""

    takes = (Announce, Begin, ManifestTell, PullAsk, PullTell, PullDecline)

    def __init__(self, node: Node):
        super().__init__(node)
        self.world: Mesh = node.world  # type: ignore[assignment]
        self._host = PullHost(PULL_BYTES_PER_S)
        self.schedule = ReceiverSchedule(self._host.leased)
        self.mover = Mover(node, self._formed, self._failed)
        self._shadows = [Flat(f"shadow {i} of {node.label}", BUCKETS) for i in range(SHADOWS)]
        self._learning = False
        self._abandoned: list[tuple[int, Formation]] = []
        self._buckets = 0

    # The engine's thread

    def offered(self) -> tuple[Version, Flat] | None:
        taken = self.schedule.take()
        if taken is None:
            return None
        announce, slot = taken
        self._shadows[slot].guard = "in the engine's hands"
        return announce.version, self._shadows[slot]

    def answer(self, version: Version, proved: bool) -> None:
        why = "" if proved else "probe"
        self.mover.post(
            lambda: self.schedule.applied(
                version, proved, self.node.now, reason=why, build="sim", live_digest=str(version)
            )
        )

    # The mover

    def _receive(self, formation: Formation | None, abandon: Abandon, start: StartReceive, source: PeerId) -> Steps:
        flat = self._shadows[start.slot] if start.slot is not None else Flat(SCRATCH, BUCKETS)
        corrupt, broken, good = "", "" if formation is not None else "its formation is gone", 0
        try:
            for i in range(BUCKETS if formation is not None else 0):
                assert formation is not None
                yield from formation.broadcast(flat, i, formation.members.index(Member(source)), abandon)
                if flat.held[i] != int(start.announce.bucket_digests[i]) and not corrupt:
                    corrupt = f"bucket {i} does not have the digest announced"
                good += not corrupt
                self._buckets = good
        except FormationBroken as e:
            broken = str(e)
        busy = broken != "" and formation is not None and not formation.ended()
        self.mover.post(lambda: self._ended(start, formation, corrupt, broken, busy))

    def _learn(self, digest: str) -> Steps:
        yield self.world.rng.random() * self.world.trouble.digest_s
        self.mover.post(lambda: self.schedule.manifest_known(digest, BUCKETS * BUCKET_BYTES) or [])

    # The loop

    def receive(self, sender: PeerId, message: Any, now: float) -> list[Any]:
        match message:
            case PullTell():
                return self.schedule.told(sender, message, now)
            case PullDecline():
                return self.schedule.declined(sender, message, now)
            case PullAsk(version):
                _, size, chunks = self.schedule.holds(version) or (0, 0, 0)
                return self._host.asked(sender, message, size, chunks, now)
            case Announce():
                return self.schedule.announced(sender, message, now)
            case Begin():
                return self.schedule.began(sender, message, now)
            case ManifestTell(digest) if not self._learning:
                self._learning = True
                self.mover.do(self._learn(digest))
        return []

    def tick(self, now: float) -> list[Any]:
        for slot, formation in self._abandoned:
            if formation.ended():
                self.schedule.freed(slot)
        self._abandoned = [a for a in self._abandoned if not a[1].ended()]
        self.schedule.progress(self._buckets)
        return [*self.schedule.tick(now), *self._host.tick(now)]

    def members(self, now: float) -> list[Any]:
        peers = [c.id for c in self.node.membership.alive]
        self._host.live(peers)
        return self.schedule.live(peers, now)

    def effect(self, effect: Any, now: float) -> list[Any]:
        match effect:
            case StartReceive(ballot, _, _, slot):
                assert slot is None or not self._shadows[slot].operations, f"{self._shadows[slot].name} is used twice"
                source, self._buckets = ballot.convener, 0
                self.mover.run(ballot, lambda formation, abandon: self._receive(formation, abandon, effect, source))
            case Offer(version, slot):
                whole = self.world.promises.content(version, BUCKETS)
                assert self._shadows[slot].held == whole, f"{version} is offered and not whole"
                self._shadows[slot].guard = "offered"
            case Released(slot):
                self._shadows[slot].guard = ""
            case Write(index, payload):
                flat = self._shadows[self.schedule.pull_slot]
                assert not flat.operations, f"{flat.name} is pulled into while an operation may still write into it"
                flat.write(index, int(payload.view(np.uint64)[0]))
            case Check(bucket):
                return self._check(bucket, now)
            case Serve(peer, version, index):
                where = self.schedule.holds(version)
                if where is None:
                    return self._host.gone(version)
                value = self._shadows[where[0]].held[index]
                return [Send(peer, PullTell(version, index, chunk(self.world, value)), bulk=True)]
            case Missed(version, reason):
                self.world.log(self.node, f"gives up pulling {version}: {reason}")
            case Refuse(version, _, reason):
                self.world.log(self.node, f"refuses {version}: {reason}")
            case Form(go) if go.kind == "weights":
                self.mover.form(go)
                return self.schedule.forming(go.ballot, now)
        return []

    def _check(self, bucket: int, now: float) -> list[Any]:
        pull = self.schedule.pull
        if pull is None:
            return []
        found = self._shadows[self.schedule.pull_slot].held[bucket]
        return self.schedule.checked(bucket, found == int(pull.announce.bucket_digests[bucket]), now)

    def _formed(self, formation: Formation) -> list[Any]:
        return self.schedule.formed(formation.ballot, formation.members, self.node.now)

    def _failed(self, go: Go, reason: str, at_fault: Any) -> list[Any]:
        self.world.log(self.node, f"formation {go.ballot} failed: {reason}")
        return []

    def _ended(
        self, start: StartReceive, formation: Formation | None, corrupt: str, broken: str, busy: bool
    ) -> list[Any]:
        if busy and start.slot is not None and formation is not None:
            self._abandoned.append((start.slot, formation))
        self.schedule.progress(self._buckets)
        effects = self.schedule.receive_ended(
            start.version,
            start.attempt,
            not corrupt and not broken,
            self.node.now,
            reason="" if broken else corrupt,
            busy=busy,
        )
        if broken:
            self.world.log(self.node, f"receiving {start.version}, attempt {start.attempt}, failed: {broken}")
            effects += self.schedule.disbanded(start.ballot, self.node.now)
            self.mover.disband(start.ballot)
        return effects

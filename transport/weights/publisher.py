"""The publisher of weights: snapshots on the trainer's thread, everything else beside it.

Three threads meet here. The trainer's own copies its weights into a leased buffer (``publish``) and goes on: that copy
is its whole stall. The mover computes digests and runs broadcasts. The peer's loop runs ``schedule.py``, which decides.
A buffer belongs to ``publish``, then waits in ``_pending`` for the mover, then belongs to the schedule until it says
``Release``. Newest wins at both stations: a pending snapshot is replaced by a newer one, in its very buffer when no
other is free. A released buffer that somebody still pulls from is *kept* as long as the trainer needs no buffer.
"""

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch import Tensor

from mesh.config import Weights
from mesh.effects import Note, Send
from mesh.identity import PeerId
from mesh.version import Lineage, Version
from transport import spans
from transport.formation import Formation, FormationBroken
from transport.messages import Announce, Go, ManifestAsk, ManifestTell, Member, Probe, PullAsk, PullTell, Report
from transport.port import Port
from transport.weights.buffers import Leases, Slot, bucket_digests, chunk_of, copy_in, tensor_digests
from transport.weights.manifest import Manifest
from transport.weights.mover import Build, Mover, peer_name
from transport.weights.pull import PullHost, Serve, chunk_bytes
from transport.weights.schedule import (
    AnnounceTo,
    Convene,
    Disband,
    EnginesDiffer,
    PublisherSchedule,
    Release,
    SatOut,
    StartBroadcast,
)
from transport.weights.told import Told

BUFFERS = 3  # one being sent, the newest, one to copy into
TICK_S = 0.05
PART_BYTES = 1 << 18  # of a manifest, a message


@dataclass
class PublisherStats:
    """Counts since the start; seconds are those of the last one."""

    publications: int = 0  # snapshots taken
    skipped: int = 0  # snapshots not taken because no buffer was free
    replaced: int = 0  # snapshots replaced by a newer one before they were sent
    broadcasts: int = 0  # completed
    broken: int = 0  # broadcasts that failed or were abandoned
    served_bytes: int = 0  # to receivers that pull
    declined: int = 0  # asks of receivers that could not be served
    snapshot_s: float = 0.0
    digest_s: float = 0.0
    broadcast_s: float = 0.0


@dataclass(eq=False)
class _Staged:
    """A snapshot in its buffer, with what an Announce says of it."""

    version: Version
    lineage: Lineage
    probe: Probe
    slot: Slot
    buckets: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint64))
    tensors: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint64))


class Publisher:
    """Make one before the peer starts (it registers handlers), on every trainer; it is idle until ``open_term``.

    ``manifest`` describes what is sent, ``told`` what was, ``build`` makes the group of a Go on the mover's thread."""

    def __init__(self, port: Port, manifest: Manifest, weights: Weights, build: Build) -> None:
        self.manifest = manifest
        self.told = Told()
        self._port = port
        self._weights = weights
        self._bucket_bytes = weights.bucket_mib << 20
        self._leases: Leases | None = None
        self._schedule = PublisherSchedule(Member(port.id), weights)
        self._mover = Mover(port, build, self._formed, self._failed)
        self._stats = PublisherStats()
        self._skipped: Version | None = None  # the trainer's thread alone
        self._host = PullHost(weights.pull_mib_s * 2**20)
        self._changed = threading.Condition()  # guards what the trainer's thread shares: the next six
        self._lineage: Lineage | None = None
        self._last: Version | None = None
        self._pending: _Staged | None = None
        self._digesting = False  # the mover was told of the pending one
        self._kept: _Staged | None = None
        self._proved: dict[PeerId, Version] = {}
        port.on(Report, self._reported)
        port.on(ManifestAsk, self._asked)
        port.on(PullAsk, self._pull_asked)
        port.on_go("weights", self._go)
        port.on_members(self._members)
        port.every(TICK_S, self._tick)

    # ------------------------------------------------------------------------------------------------------------------
    # For the trainer's thread
    # ------------------------------------------------------------------------------------------------------------------

    def open_term(self, lineage: Lineage) -> None:
        """This trainer publishes from now on, under the last term of ``lineage``. The first call makes the buffers."""
        if not lineage.terms:
            raise ValueError("a lineage without a term cannot be published")
        if self._leases is None:  # trainers that never publish keep no buffers
            self._leases = Leases(BUFFERS, self.manifest.nbytes)
            self._port.note(f"weights are sent from {BUFFERS} x {self.manifest.nbytes / 2**20:.1f} MiB of host memory")
        with self._changed:
            self._lineage = lineage
        self._port.post(self._members)

    def retire(self) -> None:
        """Another trainer publishes from now on. Snapshots not yet sent are given up."""
        with self._changed:
            self._lineage = None
            given_up = [s for s in (self._pending, self._kept) if s is not None]
            self._pending = self._kept = None
        for staged in given_up:
            assert self._leases is not None
            self._leases.release(staged.slot)
        self._port.post(lambda: self._run(self._schedule.close()))

    def publish(self, version: Version, tensors: Mapping[str, Tensor], probe: Probe) -> bool:
        """Copy ``tensors`` (every name of the manifest, any device; cast to the wire dtype) and let them be sent.

        Returns as soon as they are copied. False when no buffer was free: skipped and counted, never waited for. It may
        be called again for the same version then.
        Raises ValueError when no term is open, or ``version`` is not of it or not above the last one published."""
        with self._changed:
            lineage, last = self._lineage, self._last
        if lineage is None or self._leases is None:
            raise ValueError(f"{version} cannot be published: open_term comes first")
        if version.term != lineage.terms[-1][0] or not lineage.holds(version):
            raise ValueError(f"{version} is not of the term that is open, {lineage.terms[-1][0]}")
        if last is not None and version <= last:
            raise ValueError(f"{version} is published after {last}: versions only rise")
        began = time.perf_counter()
        slot = self._acquire(str(version))
        if slot is None:
            self._stats.skipped += version != self._skipped
            self._skipped = version
            return False
        try:
            copy_in(self.manifest, tensors, slot.flat)
        except BaseException:
            self._leases.release(slot)
            raise
        with self._changed:
            self._last = version
            replaced, self._pending = self._pending, _Staged(version, lineage, probe, slot)
            told, self._digesting = self._digesting, True
        if replaced is not None:
            self._leases.release(replaced.slot)
            self._stats.replaced += 1
        if not told:
            self._mover.do(self._digest)
        self._stats.publications += 1
        self._stats.snapshot_s = time.perf_counter() - began
        return True

    def _acquire(self, owner: str) -> Slot | None:
        """A free buffer, or else that of a pull, or of a snapshot which this one replaces before it was looked at."""
        assert self._leases is not None
        slot = self._leases.acquire(owner)
        if slot is not None:
            return slot
        with self._changed:
            kept, self._kept = self._kept, None
            if kept is None and self._pending is not None:
                kept, self._pending = self._pending, None
                self._stats.replaced += 1
        if kept is not None:
            self._leases.release(kept.slot)
        return self._leases.acquire(owner)

    def wait_until_proved(self, version: Version, timeout_s: float) -> tuple[PeerId, ...]:
        """The receivers whose engines run ``version`` or a later one, proved, once there is one.

        Raises TimeoutError with a line a receiver: where it is, and why it is no further."""
        with self._changed:
            if self._changed.wait_for(lambda: self._provers(version), timeout_s):
                return self._provers(version)
        lines = self.table()
        raise TimeoutError(
            f"no rollout proved {version} within {timeout_s:g} s: " + ("\n  ".join(["", *lines]) or "none is alive")
        )

    def proved_by(self, version: Version) -> tuple[PeerId, ...]:
        """The live receivers whose engines run ``version`` or a later one, proved. Any thread."""
        with self._changed:
            return self._provers(version)

    def table(self) -> list[str]:
        """A line a receiver: what it verified, proved, refused, and why it is no further. Any thread but the loop's
        own may wait a little for it."""
        return self._port.call(
            lambda: self._schedule.table({card.id: peer_name(self._port, card.id) for card in self._port.live()})
        )

    def stats(self) -> PublisherStats:
        return replace(self._stats, declined=self._host.declined)

    def close(self) -> None:
        """Give up what is on its way and end the mover; returns within seconds. The port may already be closed."""
        self.retire()
        self._mover.close()

    def _provers(self, version: Version) -> tuple[PeerId, ...]:
        return tuple(p for p, v in self._proved.items() if v >= version)

    # ------------------------------------------------------------------------------------------------------------------
    # On the mover
    # ------------------------------------------------------------------------------------------------------------------

    def _digest(self) -> None:
        with self._changed:
            staged, self._pending, self._digesting = self._pending, None, False
        if staged is None:  # given up by retire
            return
        began = time.perf_counter()
        staged.buckets = bucket_digests(staged.slot.flat, self._bucket_bytes)
        staged.tensors = tensor_digests(self.manifest, staged.slot.flat)
        self.told.add(staged.version, staged.tensors)
        self._stats.digest_s = time.perf_counter() - began
        spans.record("digest", began, lane="weights", version=str(staged.version))
        self._port.post(lambda: self._stage(staged))

    def _broadcast(
        self, formation: Formation | None, abandon: threading.Event, start: StartBroadcast, staged: _Staged
    ) -> None:
        began = time.perf_counter()
        error = "its formation is gone" if formation is None else ""
        try:
            for i in range(len(staged.buckets) if formation is not None else 0):
                assert formation is not None
                bucket = staged.slot.flat[i * self._bucket_bytes : (i + 1) * self._bucket_bytes]
                formation.broadcast(bucket, formation.rank, self._weights.op_timeout_s, abandon)
        except FormationBroken as e:
            assert formation is not None
            error = str(e)
            assert self._leases is not None
            self._leases.quarantine(staged.slot, formation.ended)
        seconds = time.perf_counter() - began
        spans.record("broadcast", began, lane="weights", version=str(start.version), error=error)
        self._port.post(lambda: self._ended(start, error, seconds))

    # ------------------------------------------------------------------------------------------------------------------
    # On the loop
    # ------------------------------------------------------------------------------------------------------------------

    def _stage(self, staged: _Staged) -> None:
        with self._changed:
            current = self._lineage is not None and self._lineage.terms[-1][0] == staged.version.term
        if not current:
            self._release(staged)
            return
        self._run(self._schedule.snapshot(staged.version, staged, time.monotonic()))

    def _ended(self, start: StartBroadcast, error: str, seconds: float) -> None:
        if error:
            self._stats.broken += 1
            self._port.note(f"broadcast of {start.version}, attempt {start.attempt}, failed: {error}", "warning")
        else:
            self._stats.broadcasts += 1
            self._stats.broadcast_s = seconds
        effects = self._schedule.broadcast_ended(start.version, start.attempt, not error, time.monotonic())
        self._run(effects)

    def _go(self, go: Go) -> None:
        self._mover.form(go)

    def _formed(self, formation: Formation) -> None:
        self._run(self._schedule.formed(formation.ballot, formation.members, time.monotonic()))

    def _failed(self, go: Go, reason: str, at_fault: Any) -> None:
        self._run(self._schedule.group_failed(go.ballot, reason, at_fault, time.monotonic()))

    def _reported(self, peer: PeerId, report: Report) -> None:
        self._run(self._schedule.report(peer, report, time.monotonic()))
        self._tell_provers()

    def _members(self) -> None:
        with self._changed:
            publishing = self._lineage is not None
        if publishing:
            self._host.live({card.id for card in self._port.live()})
            receivers = [Member(card.id) for card in self._port.live("rollout")]
            self._run(self._schedule.live(receivers, time.monotonic()))
        self._tell_provers()

    def _tick(self) -> None:
        now = time.monotonic()
        self._run([*self._schedule.tick(now), *self._host.tick(now)])
        with self._changed:
            unwanted = self._kept if self._kept is not None and not self._host.leased(self._kept.version) else None
            if unwanted is not None:
                self._kept = None
        if unwanted is not None:
            assert self._leases is not None
            self._leases.release(unwanted.slot)

    def _tell_provers(self) -> None:
        with self._changed:
            self._proved = {p: r.proved for p, r in self._schedule.receivers.items() if r.proved is not None}
            self._changed.notify_all()

    def _asked(self, peer: PeerId, ask: ManifestAsk) -> None:
        if ask.digest != self.manifest.digest:
            return
        payload = self.manifest.encode()
        parts = [payload[i : i + PART_BYTES] for i in range(0, len(payload), PART_BYTES)]
        for i, part in enumerate(parts):
            self._port.send(peer, ManifestTell(ask.digest, i, len(parts), part), bulk=True)

    def _run(self, effects: list[Any]) -> None:
        for effect in effects:
            match effect:
                case Send(to=to, message=message):
                    self._port.send(to, message)
                case Note(text=text, level=level):
                    self._port.note(text, level)
                case Convene(members=members):
                    self._port.convene("weights", members)
                case AnnounceTo():
                    self._announce(effect)
                case Serve():
                    self._serve(effect)
                case StartBroadcast():
                    self._start(effect)
                case Release(slot=staged):
                    self._release(staged)
                case Disband(ballot=ballot):
                    self._mover.disband(ballot)
                case SatOut(peer=peer, publications=count, reason=reason):
                    name = peer_name(self._port, peer)
                    much = "1 publication" if count == 1 else f"{count} publications"
                    self._port.note(f"{name} sits out {much}: {reason}", "warning")
                case EnginesDiffer(peer=peer, other=other, report=report):
                    names = f"{peer_name(self._port, peer)} and {peer_name(self._port, other)}"
                    text = (
                        f"engines of one build ({report.build}) hold different weights under {report.proved}: {names}"
                    )
                    self._port.note(text, "warning")
                case _:
                    raise AssertionError(f"unknown effect {effect}")

    def _release(self, staged: _Staged) -> None:
        """The schedule needs it no more; who pulls it may."""
        released: _Staged | None = staged
        with self._changed:
            if self._lineage is not None and self._host.leased(staged.version):
                released, self._kept = self._kept, staged
        if released is not None:
            assert self._leases is not None
            self._leases.release(released.slot)

    def _pull_asked(self, peer: PeerId, ask: PullAsk) -> None:
        size = chunk_bytes(self._bucket_bytes)
        with self._changed:
            chunks = -(-self.manifest.nbytes // size) if self._holds(ask.version) else 0
        self._run(self._host.asked(peer, ask, size, chunks, time.monotonic()))

    def _holds(self, version: Version) -> _Staged | None:
        """Under the lock: the trainer's thread may take the kept buffer at any moment."""
        newest: _Staged | None = self._schedule.staged
        return next((s for s in (newest, self._kept) if s is not None and s.version == version), None)

    def _serve(self, serve: Serve) -> None:
        with self._changed:
            staged = self._holds(serve.version)
            payload = chunk_of(staged.slot.flat, serve.chunk, chunk_bytes(self._bucket_bytes)) if staged else None
        if payload is None:
            self._run(self._host.gone(serve.version))
        elif self._port.send(serve.peer, PullTell(serve.version, serve.chunk, payload), bulk=True):
            self._stats.served_bytes += len(payload)

    def _start(self, start: StartBroadcast) -> None:
        self._mover.run(start.ballot, lambda formation, abandon: self._broadcast(formation, abandon, start, start.slot))

    def _announce(self, to: AnnounceTo) -> None:
        staged: _Staged = to.slot
        announce = Announce(
            ballot=to.ballot,
            version=to.version,
            lineage=staged.lineage,
            manifest=self.manifest.digest,
            bucket_bytes=self._bucket_bytes,
            attempt=to.attempt,
            bucket_digests=staged.buckets,
            tensor_digests=staged.tensors,
            probe=staged.probe,
            holders=list(to.holders),
        )
        self._port.send(to.peer, announce, bulk=True)

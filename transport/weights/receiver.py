"""The receiver of weights: shadow buffers beside a running engine.

Three threads meet here. The peer's loop runs ``reception.py``, which decides, and writes what is pulled. The mover
takes part in broadcasts and checks each bucket's digest as it arrives. The engine's thread looks at ``offered`` between
two tokens (one attribute read when there is nothing), loads what it gets, proves it and answers with ``took`` or
``refused``; only then is the buffer written again. One lock guards the machine; nothing waits while holding it.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mesh.config import Weights
from mesh.effects import Send
from mesh.identity import PeerId
from mesh.version import Lineage, Version
from transport import spans
from transport.formation import Formation, FormationBroken
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
)
from transport.port import Port
from transport.weights.buffers import bucket_digest, chunk_of, new_flat
from transport.weights.manifest import Manifest
from transport.weights.mover import Build, Mover, peer_name
from transport.weights.proof import Proof
from transport.weights.pull import Check, PullHost, Serve, Write, chunk_bytes
from transport.weights.reception import Missed, Offer, ReceiverSchedule, Refuse, Released, StartReceive
from transport.weights.shadows import SHADOWS
from transport.weights.told import Told

TICK_S = 0.05
MOST_PARTS = 1024  # of a manifest: with parts of half a MiB at most far above what a model has


@dataclass(frozen=True, eq=False)
class Arrived:
    """A verified version. ``flat`` (uint8, (manifest.nbytes,)) and ``tensor_digests`` (uint64, one an entry) are to be
    read until ``took`` or ``refused`` is called, not later: then the buffer is written again."""

    version: Version
    lineage: Lineage
    manifest: Manifest
    flat: Tensor
    tensor_digests: np.ndarray
    probe: Probe


@dataclass
class ReceiverStats:
    """Counts since the start."""

    pulls: int = 0  # versions that were pulled whole
    pulls_given_up: int = 0
    pulled_bytes: int = 0
    adopted: int = 0  # versions whose weights were here already, under the name of an earlier term
    served_bytes: int = 0  # to others that pull from here
    declined: int = 0  # asks of others that could not be served


class Receiver:
    """Make one before the peer starts (it registers handlers), with the engine already loaded.

    ``engine_build`` names what must be alike for two engines to hold identical live tensors; proofs carry it.
    ``new_buffer`` makes a shadow buffer of so many bytes where the engine can read it."""

    def __init__(
        self,
        port: Port,
        weights: Weights,
        build: Build,
        *,
        engine_build: str = "",
        new_buffer: Callable[[int], Tensor] = new_flat,
    ) -> None:
        self.engine_build = engine_build
        self.told = Told()
        self._new_buffer = new_buffer
        self._port = port
        self._weights = weights
        self._mover = Mover(port, build, self._formed, self._failed)
        self._lock = threading.RLock()
        self._host = PullHost(weights.pull_mib_s * 2**20)
        self._schedule = ReceiverSchedule(self._host.leased)
        self._waiting = False  # whether take() may have something
        self._manifest: Manifest | None = None
        self._parts: dict[int, bytes] = {}
        self._shadows: list[Tensor] = []
        self._asked = ""  # the manifest
        self._learning = False
        self._abandoned: list[tuple[int, Formation]] = []
        self._buckets = 0
        self._given_up = self._served_bytes = 0
        port.on(Announce, self._announced)
        port.on(Begin, self._began)
        port.on(ManifestTell, self._told)
        port.on(PullTell, self._pull_told)
        port.on(PullDecline, self._pull_declined)
        port.on(PullAsk, self._pull_asked)
        port.on_go("weights", self._go)
        port.on_members(self._members)
        port.every(TICK_S, self._tick)

    # ------------------------------------------------------------------------------------------------------------------
    # For the engine's thread
    # ------------------------------------------------------------------------------------------------------------------

    def offered(self) -> Arrived | None:
        """The version to take over now, if there is one: load it, prove it, then call ``took`` or ``refused``."""
        if not self._waiting:
            return None
        with self._lock:
            taken = self._schedule.take()
            if taken is None:
                self._waiting = False
                return None
            a, slot = taken
            manifest = self._manifest
            assert manifest is not None
            return Arrived(a.version, a.lineage, manifest, self._shadows[slot], a.tensor_digests, a.probe)

    def took(self, arrived: Arrived, proof: Proof) -> None:
        """The engine runs ``arrived``; whether it is proved is what ``proof`` says. Its buffer is given back."""
        fields = {
            "build": self.engine_build,
            "live_digest": proof.live_digest,
            "difference": proof.difference,
            "floor": proof.floor,
            "power": proof.power,
        }
        if proof.proved:
            self.told.add(arrived.version, arrived.tensor_digests)
        self._answer(arrived.version, proof.proved, proof.reason, fields)

    def refused(self, arrived: Arrived, why: Proof | str) -> None:
        """The engine does not take ``arrived``, or it failed its proof."""
        self._answer(arrived.version, False, why if isinstance(why, str) else why.reason, {})

    def pin(self, version: Version | None) -> None:
        """Hand out only this version until ``pin(None)``, and keep it while it waits: for an evaluation."""
        with self._lock:
            self._run(self._schedule.pin(version, time.monotonic()))
            self._waiting = True

    def forget(self) -> None:
        """The engine was restarted, or is to load and prove afresh: let the newest version come again."""
        self._port.post(lambda: self._do(lambda: self._schedule.forget(time.monotonic())))

    def passed(self, version: Version) -> bool:
        """Whether ``version`` will not come any more: a newer one has been announced, and it is not here."""
        with self._lock:
            return self._schedule.passed(version, time.monotonic())

    @property
    def proved(self) -> Version | None:
        """The version that the engine runs, proved."""
        return self._schedule.proved

    def stats(self) -> ReceiverStats:
        s = self._schedule
        return ReceiverStats(
            s.pulls, self._given_up, s.pulled_bytes, s.adopted, self._served_bytes, self._host.declined
        )

    def close(self) -> None:
        """End the mover; returns within seconds. The port may already be closed."""
        self._mover.close()

    def _answer(self, version: Version, proved: bool, reason: str, fields: dict[str, Any]) -> None:
        now = time.monotonic()
        self._port.post(lambda: self._do(lambda: self._schedule.applied(version, proved, now, reason=reason, **fields)))

    # ------------------------------------------------------------------------------------------------------------------
    # On the mover
    # ------------------------------------------------------------------------------------------------------------------

    def _receive(
        self, formation: Formation | None, abandon: threading.Event, start: StartReceive, source: PeerId
    ) -> None:
        """Take part in every operation of the broadcast even when a bucket is corrupt: the others need this rank."""
        manifest, a = self._manifest, start.announce
        assert manifest is not None
        size, count = a.bucket_bytes, len(a.bucket_digests)
        flat = self._shadows[start.slot] if start.slot is not None else None
        scratch = torch.empty(min(size, manifest.nbytes), dtype=torch.uint8) if flat is None else None
        began = time.perf_counter()
        corrupt, broken, buckets = "", "its formation is gone" if formation is None else "", 0
        try:
            for i in range(count if formation is not None else 0):
                assert formation is not None
                length = min(size, manifest.nbytes - i * size)
                bucket = flat[i * size : i * size + length] if flat is not None else scratch[:length]  # type: ignore[index]
                rank = formation.members.index(Member(source))
                formation.broadcast(bucket, rank, self._weights.op_timeout_s, abandon)
                if not corrupt and bucket_digest(bucket, 0, size) != int(a.bucket_digests[i]):
                    corrupt = (
                        f"bucket {i} of {count} does not have the digest announced by {peer_name(self._port, source)}"
                    )
                buckets += not corrupt
                self._buckets = buckets
        except FormationBroken as e:
            broken = str(e)
        spans.record("receive", began, lane="weights", version=str(start.version), error=corrupt or broken)
        busy = broken != "" and formation is not None and not formation.ended()
        self._port.post(lambda: self._ended(start, formation, corrupt, broken, busy))

    def _learn(self, digest: str, payload: bytes) -> None:
        """Decode a manifest and make the shadow buffers for it: both too slow for the loop."""
        try:
            manifest = Manifest.decode(payload)
            if manifest.digest != digest:
                raise ValueError(f"manifest {digest} arrived as {manifest.digest}")
        except ValueError as e:
            text = f"manifest from {peer_name(self._port, self._schedule.publisher)} is refused: {e}"
            self._port.post(lambda: self._unlearned(text))
            return
        try:
            shadows = [self._new_buffer(manifest.nbytes) for _ in range(SHADOWS)]
        except (MemoryError, RuntimeError, OSError) as e:
            why = str(e).splitlines()[0] if str(e) else type(e).__name__
            text = f"there is no room for {SHADOWS} versions of {manifest.nbytes} bytes each: {why}"
            self._port.post(lambda: self._unlearned(text))
            return
        self._port.post(lambda: self._learned(manifest, shadows))

    # ------------------------------------------------------------------------------------------------------------------
    # On the loop
    # ------------------------------------------------------------------------------------------------------------------

    def _announced(self, publisher: PeerId, a: Announce) -> None:
        objection = self._mismatch(a)
        self._do(lambda: self._schedule.announced(publisher, a, time.monotonic(), objection))

    def _mismatch(self, a: Announce) -> str:
        """What is wrong with an announcement in itself, given the manifest."""
        manifest = self._manifest
        if a.bucket_bytes < 1 or a.bucket_bytes % chunk_bytes(a.bucket_bytes):
            return f"its buckets of {a.bucket_bytes} bytes are not whole numbers of MiB"
        if manifest is None:
            return ""
        if a.manifest != manifest.digest:
            return (
                f"its manifest {a.manifest[:8]} is not the {manifest.digest[:8]} this rollout has buffers for; "
                "trainers of one run must send the same tensors"
            )
        have = (len(a.bucket_digests), len(a.tensor_digests))
        need = (manifest.buckets(a.bucket_bytes), len(manifest.entries))
        return "" if have == need else f"it has {have} digests of buckets and tensors; the manifest says {need}"

    def _told(self, publisher: PeerId, tell: ManifestTell) -> None:
        if (
            self._manifest is not None
            or self._learning
            or tell.digest != self._asked
            or not tell.part < tell.parts <= MOST_PARTS
        ):
            return
        self._parts[tell.part] = tell.payload
        if len(self._parts) == tell.parts:
            payload = b"".join(self._parts[i] for i in sorted(self._parts))
            self._parts, self._learning = {}, True
            self._mover.do(lambda: self._learn(tell.digest, payload))

    def _learned(self, manifest: Manifest, shadows: list[Tensor]) -> None:
        self._manifest, self._shadows = manifest, shadows
        kind = "pinned host memory" if shadows[0].is_pinned() else "host memory"
        self._port.note(f"new weights arrive in {SHADOWS} x {manifest.nbytes / 2**20:.1f} MiB of {kind}")
        self._schedule.manifest_known(manifest.digest, manifest.nbytes)

    def _unlearned(self, text: str) -> None:
        self._learning = False
        self._port.note(text, "warning")

    def _began(self, publisher: PeerId, begin: Begin) -> None:
        self._do(lambda: self._schedule.began(publisher, begin, time.monotonic()))

    def _pull_told(self, peer: PeerId, tell: PullTell) -> None:
        self._do(lambda: self._schedule.told(peer, tell, time.monotonic()))

    def _pull_declined(self, peer: PeerId, decline: PullDecline) -> None:
        self._do(lambda: self._schedule.declined(peer, decline, time.monotonic()))

    def _pull_asked(self, peer: PeerId, ask: PullAsk) -> None:
        _, size, chunks = self._schedule.holds(ask.version) or (0, 0, 0)
        self._do(lambda: self._host.asked(peer, ask, size, chunks, time.monotonic()))

    def _members(self) -> None:
        peers = {card.id for card in self._port.live()}
        self._host.live(peers)
        self._do(lambda: self._schedule.live(peers, time.monotonic()))

    def _formed(self, formation: Formation) -> None:
        self._do(lambda: self._schedule.formed(formation.ballot, formation.members, time.monotonic()))

    def _go(self, go: Go) -> None:
        self._do(lambda: self._schedule.forming(go.ballot, time.monotonic()))
        self._mover.form(go)

    def _failed(self, go: Go, reason: str, at_fault: Sequence[Member]) -> None:
        self._port.note(f"weights formation {go.ballot} failed: {reason}", "warning")

    def _ended(self, start: StartReceive, formation: Formation | None, corrupt: str, broken: str, busy: bool) -> None:
        now = time.monotonic()
        if broken:
            self._port.note(f"receiving {start.version}, attempt {start.attempt}, failed: {broken}", "warning")
        if busy and start.slot is not None and formation is not None:
            self._abandoned.append((start.slot, formation))

        def end() -> list[Any]:
            self._schedule.progress(self._buckets)
            ok = not corrupt and not broken
            effects = self._schedule.receive_ended(
                start.version, start.attempt, ok, now, reason="" if broken else corrupt, busy=busy
            )
            return effects + (self._schedule.disbanded(start.ballot, now) if broken else [])

        self._do(end)
        if broken:
            self._mover.disband(start.ballot)

    def _tick(self) -> None:
        def tick() -> list[Any]:
            for slot, _ in [a for a in self._abandoned if a[1].ended()]:
                self._schedule.freed(slot)
            self._abandoned = [a for a in self._abandoned if not a[1].ended()]
            self._schedule.progress(self._buckets)
            now = time.monotonic()
            return [*self._schedule.tick(now), *self._host.tick(now)]

        self._do(tick)

    def _do(self, step: Any) -> None:
        with self._lock:
            self._run(step())

    def _run(self, effects: list[Any]) -> None:
        """Under the lock: an offered version must be complete before the engine's thread can take it."""
        for effect in effects:
            match effect:
                case Send(to=to, message=message):
                    if isinstance(message, ManifestAsk) and message.digest != self._asked:
                        self._asked, self._parts = message.digest, {}
                    self._port.send(to, message)
                case StartReceive():
                    self._start(effect)
                case Offer():
                    self._waiting = True
                case Released():
                    pass  # nothing lies in a buffer that the schedule does not know of
                case Write(chunk=chunk, payload=payload):
                    self._write(chunk, payload)
                case Check(bucket=bucket):
                    self._check(bucket)
                case Serve():
                    self._serve(effect)
                case Missed(version=version, reason=reason):
                    self._given_up += 1
                    self._port.note(f"pulling {version} was given up: {reason}", "warning")
                case Refuse(version=version, publisher=publisher, reason=reason):
                    text = f"{version} of {peer_name(self._port, publisher)} is refused: {reason}"
                    self._port.note(text, "warning")
                case _:
                    raise AssertionError(f"unknown effect {effect}")

    def _start(self, start: StartReceive) -> None:
        source = start.announce.ballot.convener if start.announce.ballot else ""
        self._buckets = 0
        self._mover.run(start.ballot, lambda formation, abandon: self._receive(formation, abandon, start, source))

    # Pulls: on the loop, under the lock. A chunk is 1 MiB at most, a digest of a bucket takes a few milliseconds.

    def _write(self, chunk: int, payload: np.ndarray) -> None:
        pull = self._schedule.pull
        assert pull is not None
        at = chunk * chunk_bytes(pull.announce.bucket_bytes)
        self._shadows[self._schedule.pull_slot].numpy()[at : at + len(payload)] = payload

    def _check(self, bucket: int) -> None:
        pull = self._schedule.pull
        if pull is None:
            return
        a = pull.announce
        found = bucket_digest(self._shadows[self._schedule.pull_slot], bucket, a.bucket_bytes)
        ok = found == int(a.bucket_digests[bucket])
        self._run(self._schedule.checked(bucket, ok, time.monotonic()))

    def _serve(self, serve: Serve) -> None:
        where = self._schedule.holds(serve.version)
        if where is None:
            self._run(self._host.gone(serve.version))
            return
        slot, size, _ = where
        payload = chunk_of(self._shadows[slot], serve.chunk, size)
        if self._port.send(serve.peer, PullTell(serve.version, serve.chunk, payload), bulk=True):
            self._served_bytes += len(payload)

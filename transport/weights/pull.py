"""Catching up by pull: one receiver fetches a version that it missed from peers that hold it. Both ends, pure.

Theory of operation. The publisher announces a version that will not be broadcast (any more) with its digests and with
the peers that hold it: ``Announce`` without a ballot. So a puller knows from the publisher what it must get, and need
trust no holder. It asks one holder at a time for chunks of at most ``CHUNK_BYTES``, with at most ``IN_FLIGHT`` of them
under way, and asks again for those that do not come. A bucket whose chunks are all there is checked against its digest;
all of a bucket comes from one holder, so it is known who sent a corrupt one. A holder that declines or is silent is
followed by the next, and only what was not checked yet is fetched again. The pull ends when all buckets are verified,
or with a reason: no holder is left, or no bucket was verified for ``STALLED_S``.

A holder serves whatever it holds complete anyway; asking leases that for ``LEASE_S``. A lease is weak: it makes the
holder overwrite something else first if it can, and it ends without warning when the buffer is needed, so that neither
a snapshot nor a broadcast ever waits for a pull. At most ``MOST_LEASES`` peers are served at a time, and all of them
together with ``weights.pull_mib_s``: a broadcast on the same network, and the peer's own messages, must get through.

``Pull`` lives in ``reception.py``; ``PullHost`` in the publisher and in every receiver.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mesh.effects import Send
from mesh.identity import PeerId
from mesh.version import Version
from transport.messages import Announce, PullAsk, PullDecline, PullTell, UInt8s

CHUNK_BYTES = 1 << 20  # one frame of the endpoint
IN_FLIGHT = 8  # chunks: enough for a gigabyte a second over a round trip of 8 ms
ASK_AGAIN_S = 1.0  # for chunks that did not come: lost, or the holder is slow
SILENT_S = 3.0  # then the next holder is asked
STALLED_S = 20.0  # without a verified bucket: the pull is given up
MOST_FAULTS = 3  # of one holder: declined, silent; it is not asked again in this pull
MOST_HOLDERS = 8  # named in one Announce
MOST_LEASES = 4  # peers served at a time
MOST_WANTED = 64  # chunks that wait to be sent to one of them
LEASE_S = 5.0
BURST_S = 0.1  # of the rate


def chunk_bytes(bucket_bytes: int) -> int:
    """A bucket is a whole number of chunks."""
    return min(bucket_bytes, CHUNK_BYTES)


@dataclass(frozen=True)
class Write:
    """Copy ``payload`` into the buffer of the pull, at chunk ``chunk``."""

    chunk: int
    payload: UInt8s = field(compare=False)


@dataclass(frozen=True)
class Check:
    """Compare this bucket of the buffer with its digest, and call ``checked``."""

    bucket: int


@dataclass(frozen=True)
class Pulled:
    """The pull is over: ``reason`` says why it was given up, and is empty when the version is whole."""

    version: Version
    reason: str = ""


@dataclass(frozen=True)
class Serve:
    """Send this chunk of ``version``, or call ``gone``."""

    peer: PeerId
    version: Version
    chunk: int


class Pull:
    """Fetches the version of one announcement. Inputs are methods that return effects; call ``tick`` several times a
    second. After ``Pulled`` it is of no use any more."""

    def __init__(self, announce: Announce, nbytes: int, now: float) -> None:
        self.version = announce.version
        self.announce = announce
        self.bytes = 0  # that arrived
        self.holder: PeerId = ""
        self._size = chunk_bytes(announce.bucket_bytes)
        self._per_bucket = announce.bucket_bytes // self._size
        self._nbytes = nbytes
        self._chunks = -(-nbytes // self._size)
        self._buckets = len(announce.bucket_digests)
        self._have = bytearray(self._chunks)
        self._open: dict[int, int] = {}  # buckets begun and not verified: how many of their chunks are missing
        self._verified = 0
        self._asked: dict[int, float] = {}  # chunks under way: when they were asked for
        self._next = 0  # all below is here, under way or in a bucket begun
        self._faults: dict[PeerId, int] = {}  # the holders, next first
        self._why: dict[PeerId, str] = {}
        self._ask_at = now
        self._heard_at = self._verified_at = now
        self.holders(announce.holders)

    # Inputs -----------------------------------------------------------------------------------------------------------

    def holders(self, peers: Iterable[PeerId]) -> None:
        """Who holds the version, as the publisher sees it now."""
        for peer in peers:
            self._faults.setdefault(peer, 0)

    def live(self, peers: Collection[PeerId], now: float) -> list[Any]:
        for peer in [p for p in self._faults if p not in peers]:
            del self._faults[peer]
        return [] if self.holder in self._faults or not self.holder else self._move("died", now)

    def told(self, peer: PeerId, tell: PullTell, now: float) -> list[Any]:
        if peer != self.holder or tell.version != self.version or tell.chunk not in self._asked:
            return []
        length = min(self._size, self._nbytes - tell.chunk * self._size)
        if len(tell.payload) != length:
            return self._drop(f"sent a chunk of {len(tell.payload)} bytes instead of {length}", now)
        del self._asked[tell.chunk]
        self._have[tell.chunk] = 1
        self._heard_at = now
        self.bytes += length
        bucket = tell.chunk // self._per_bucket
        self._open[bucket] -= 1
        whole = [Check(bucket)] if not self._open[bucket] else []
        return [Write(tell.chunk, tell.payload), *whole, *self._ask(now)]

    def declined(self, peer: PeerId, decline: PullDecline, now: float) -> list[Any]:
        if peer != self.holder or decline.version != self.version:
            return []
        return self._move(decline.reason, now)

    def checked(self, bucket: int, ok: bool, now: float) -> list[Any]:
        """The answer to ``Check``."""
        if self._open.get(bucket) != 0:  # the holder was given up meanwhile
            return []
        if not ok:
            return self._drop(f"sent bucket {bucket} of {self._buckets} with another digest than announced", now)
        del self._open[bucket]
        self._verified += 1
        self._verified_at = now
        if self._verified < self._buckets:
            return []
        return [Send(self.holder, PullAsk(self.version, [])), Pulled(self.version)]

    def tick(self, now: float) -> list[Any]:
        if now - self._verified_at >= STALLED_S:
            return [Pulled(self.version, f"no progress for {STALLED_S:g} s{self._table()}")]
        if not self.holder:
            return self._move("", now) if now >= self._ask_at else []
        if now - self._heard_at >= SILENT_S:
            return self._move(f"silent for {SILENT_S:g} s", now)
        late = [c for c, at in self._asked.items() if now - at >= ASK_AGAIN_S]
        self._asked |= dict.fromkeys(late, now)
        again = [Send(self.holder, PullAsk(self.version, late))] if late else []
        return again + self._ask(now)

    # Rules ------------------------------------------------------------------------------------------------------------

    def _ask(self, now: float) -> list[Any]:
        new = []
        while len(self._asked) < IN_FLIGHT and self._next < self._chunks:
            chunk, self._next = self._next, self._next + 1
            if self._have[chunk] or chunk in self._asked:
                continue
            bucket = chunk // self._per_bucket
            self._open.setdefault(bucket, min(self._per_bucket, self._chunks - bucket * self._per_bucket))
            self._asked[chunk] = now
            new.append(chunk)
        return [Send(self.holder, PullAsk(self.version, new))] if new else []

    def _drop(self, why: str, now: float) -> list[Any]:
        self._faults[self.holder] = MOST_FAULTS
        return self._move(why, now)

    def _move(self, why: str, now: float) -> list[Any]:
        """On to the next holder. What of a bucket has come from this one is forgotten."""
        left, self.holder = self.holder, ""
        if left:
            self._why[left] = why
            if left in self._faults:
                self._faults[left] = self._faults.pop(left) + 1  # to the end
        for bucket in self._open:
            first = bucket * self._per_bucket
            self._next = min(self._next, first)
            last = min(first + self._per_bucket, self._chunks)
            self._have[first:last] = bytes(last - first)
        self._open, self._asked = {}, {}
        ready = [p for p, faults in self._faults.items() if faults < MOST_FAULTS]
        if not ready:
            return [Pulled(self.version, f"no peer to pull from{self._table()}")]
        if left and self._faults[ready[0]]:  # all were tried: a moment, or a busy holder is asked in a loop
            self._ask_at = now + ASK_AGAIN_S
            return []
        self.holder, self._heard_at = ready[0], now
        return self._ask(now)

    def _table(self) -> str:
        lines = [f"{peer} {why}" for peer, why in self._why.items()]
        return ": " + ", ".join(lines) if lines else ""


@dataclass
class _Lease:
    version: Version
    size: int  # of a chunk
    until: float
    wanted: dict[int, None] = field(default_factory=dict)  # chunks, in order


class PullHost:
    """A holder's end. ``Serve`` is to be executed at once: between two effects nothing else changes the buffer."""

    def __init__(self, bytes_per_s: float) -> None:
        self.declined = 0
        self._rate = bytes_per_s
        self._left = bytes_per_s * BURST_S
        self._filled_at = float("-inf")
        self._leases: dict[PeerId, _Lease] = {}

    def leased(self, version: Version) -> bool:
        """Whether somebody is pulling this version from here."""
        return any(lease.version == version for lease in self._leases.values())

    def asked(self, peer: PeerId, ask: PullAsk, size: int, chunks: int, now: float) -> list[Any]:
        """``chunks`` of ``size`` bytes are here of the version asked for; 0: it is not here."""
        self._expire(now)
        if not ask.chunks:
            self._leases.pop(peer, None)
            return []
        if not chunks:
            self._leases.pop(peer, None)
            return self._decline(peer, ask.version, "does not hold it (any more)")
        lease = self._leases.get(peer)
        if lease is None or lease.version != ask.version:
            if lease is None and len(self._leases) >= MOST_LEASES:
                return self._decline(peer, ask.version, f"serves {MOST_LEASES} others")
            lease = self._leases[peer] = _Lease(ask.version, size, now)
        lease.until = now + LEASE_S
        new = [c for c in ask.chunks if c < chunks and c not in lease.wanted]
        lease.wanted |= dict.fromkeys(new[: MOST_WANTED - len(lease.wanted)])
        return self._serve(now)

    def gone(self, version: Version) -> list[Any]:
        """The version is not here any more."""
        peers = [p for p, lease in self._leases.items() if lease.version == version]
        for peer in peers:
            del self._leases[peer]
        return [e for peer in peers for e in self._decline(peer, version, "does not hold it any more")]

    def live(self, peers: Collection[PeerId]) -> None:
        self._leases = {p: lease for p, lease in self._leases.items() if p in peers}

    def tick(self, now: float) -> list[Any]:
        self._expire(now)
        return self._serve(now)

    def _serve(self, now: float) -> list[Any]:
        """A chunk each, in turn, as far as the rate allows: a bit of credit is paid back by waiting."""
        self._left = min(self._rate * BURST_S, self._left + self._rate * max(0.0, now - self._filled_at))
        self._filled_at = now
        effects: list[Any] = []
        while self._left > 0 and (waiting := [p for p, lease in self._leases.items() if lease.wanted]):
            for peer in waiting:
                lease = self._leases[peer]
                chunk = next(iter(lease.wanted))
                del lease.wanted[chunk]
                effects.append(Serve(peer, lease.version, chunk))
                self._left -= lease.size
        return effects

    def _expire(self, now: float) -> None:
        self._leases = {p: lease for p, lease in self._leases.items() if now < lease.until}

    def _decline(self, peer: PeerId, version: Version, reason: str) -> list[Any]:
        self.declined += 1
        return [Send(peer, PullDecline(version, reason))]


def choose_holders(publisher: PeerId | None, provers: Sequence[PeerId], turn: int) -> list[PeerId]:
    """Whom to pull from: rollouts that run the version, beginning with another one each time, and the publisher, who
    holds it for certain, when they have failed: its network is the one that every receiver shares."""
    first = turn % len(provers) if provers else 0
    some = [*provers[first:], *provers[:first]][: MOST_HOLDERS - 1]
    return [*some, publisher] if publisher is not None else some

"""How a newcomer gets weights, optimizer and everything else that trainers have alike. Pure; both ends.

    holder -> newcomer   StateOffer(ballot, step, members, place, bytes, digest)    until it asks
    newcomer -> holder   StateAsk(ballot, chunks)                                   what it lacks, repeated
    holder -> newcomer   StateTell(ballot, chunk, data)
    newcomer -> holder   StateTaken(ballot, reason)                                 loaded, or why not; repeated

The newcomer asks for a few chunks at a time, so that nothing piles up at either end, and checks the digest of the whole
before it loads anything. The holder keeps the bytes until the newcomer has answered or the hold of all steps is over.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from mesh.effects import Send
from mesh.identity import PeerId
from mesh.version import Ballot
from transport.messages import Place, StateAsk, StateOffer, StateTaken, StateTell

CHUNK_BYTES = 1 << 20
AT_ONCE = 8  # chunks asked for and not yet here
REPEAT_S = 0.3
SILENT_S = 5.0  # without a chunk: the holder is gone, or holds no more


@dataclass(frozen=True)
class Loaded:
    """Newcomer: all bytes are here and right. Load them on the thread that owns the policy, then ``taken``."""

    offer: StateOffer
    holder: PeerId
    data: bytes


@dataclass(frozen=True)
class Confirmed:
    """Holder: the newcomer has answered; ``reason`` is empty when it has loaded everything."""

    newcomer: PeerId
    reason: str


class Giving:
    """The holder's end of one transfer."""

    def __init__(
        self, newcomer: PeerId, ballot: Ballot, step: int, members: tuple[PeerId, ...], place: Place, data: bytes
    ):
        self.newcomer = newcomer
        self._data = data
        digest = xxhash.xxh3_64_hexdigest(data)
        self._offer = StateOffer(ballot, step, list(members), place, len(data), digest)
        self._asked = False
        self._repeat_at = float("-inf")
        self._over = False

    def tick(self, now: float) -> list[Any]:
        if self._asked or now < self._repeat_at:
            return []
        self._repeat_at = now + REPEAT_S
        return [Send(self.newcomer, self._offer)]

    def receive(self, sender: PeerId, message: StateAsk | StateTaken) -> list[Any]:
        if sender != self.newcomer or message.ballot != self._offer.ballot or self._over:
            return []
        self._asked = True
        if isinstance(message, StateTaken):
            self._over = True
            return [Confirmed(sender, message.reason)]
        return [self._tell(i) for i in message.chunks[:AT_ONCE] if i * CHUNK_BYTES < len(self._data)]

    def _tell(self, chunk: int) -> Send:
        part = self._data[chunk * CHUNK_BYTES : (chunk + 1) * CHUNK_BYTES]
        return Send(self.newcomer, StateTell(self._offer.ballot, chunk, np.frombuffer(part, np.uint8)), bulk=True)


class Taking:
    """The newcomer's end of one transfer. ``limit`` bounds what is taken: the size that its own state could have."""

    def __init__(self, holder: PeerId, offer: StateOffer, limit: int, now: float):
        self.holder, self.offer = holder, offer
        self.over = False
        self._why = f"{offer.nbytes} bytes are offered, this model has at most {limit}" if offer.nbytes > limit else ""
        count = 0 if self._why else -(-offer.nbytes // CHUNK_BYTES)
        self._buffer = bytearray(0 if self._why else offer.nbytes)
        self._lacks = dict.fromkeys(range(count))
        self._asked: dict[int, float] = {}
        self._heard = now
        self._taken: StateTaken | None = StateTaken(offer.ballot, self._why) if self._why else None
        self._repeat_at = now

    def receive(self, sender: PeerId, message: StateTell, now: float) -> list[Any]:
        chunk, data = message.chunk, message.data
        expected = min(CHUNK_BYTES, self.offer.nbytes - chunk * CHUNK_BYTES)
        known = sender == self.holder and message.ballot == self.offer.ballot and chunk in self._lacks
        if not known or data.nbytes != expected:
            return []
        self._heard = now
        self._buffer[chunk * CHUNK_BYTES : chunk * CHUNK_BYTES + expected] = data.data
        del self._lacks[chunk]
        self._asked.pop(chunk, None)
        if self._lacks:
            return self._ask(now)
        whole = bytes(self._buffer)
        self._buffer = bytearray()
        if xxhash.xxh3_64_hexdigest(whole) != self.offer.digest:
            return self.taken("what arrived is not what was sent (another digest)", now)
        return [Loaded(self.offer, self.holder, whole)]

    def taken(self, reason: str, now: float) -> list[Any]:
        """Everything is loaded, or why it could not be."""
        self._taken = StateTaken(self.offer.ballot, reason)
        self._repeat_at = float("-inf")
        return self.tick(now)

    def tick(self, now: float) -> list[Any]:
        if self._lacks and now - self._heard > SILENT_S:
            self.over = True
        if self.over:
            return []
        if self._taken is None:
            return self._ask(now)
        if now < self._repeat_at:
            return []
        self._repeat_at = now + REPEAT_S
        return [Send(self.holder, self._taken)]

    def _ask(self, now: float) -> list[Any]:
        """For what is lacking: so many at a time, one that does not come again after a moment."""
        waiting = [c for c, at in self._asked.items() if now - at < 4 * REPEAT_S]
        free = AT_ONCE - len(waiting)
        chunks = [c for c in self._lacks if c not in waiting][:free] if free > AT_ONCE // 2 or not waiting else []
        if not chunks:
            return []
        self._asked.update(dict.fromkeys(chunks, now))
        return [Send(self.holder, StateAsk(self.offer.ballot, chunks))]

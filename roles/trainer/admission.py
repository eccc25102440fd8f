"""Newcomers: who asks to be taken in, whose turn it is, and the hold of all steps meanwhile. Pure; part of
``company.py``.

The first of a formation holds at a step boundary: it tells all members, and when each has answered that it stands
there too, weights and optimizer go to the newcomer (``Transfer``). One at a time, and not within ``admit_interval_s``
after the last; one that was tried before waits twice as long each time, so that a newcomer that cannot be taken in does
not hold the others up for ever.
"""

from collections.abc import Sequence
from typing import Any

from mesh.effects import Send
from mesh.identity import PeerId
from roles.trainer.acts import Transfer
from roles.trainer.step import Timing
from transport.messages import StepHold

MOST_TRIES = 4  # doublings of the wait: sixteen intervals at most


class Admission:
    """One trainer's; only that of the first holds anybody up."""

    def __init__(self, me: PeerId, timing: Timing):
        self.me = me
        self.newcomer: PeerId | None = None  # for whom all hold
        self.since = 0.0
        self._t = timing
        self._asking: dict[PeerId, float] = {}  # until when
        self._tries: dict[PeerId, int] = {}
        self._not_before: dict[PeerId, float] = {}
        self._next_at = float("-inf")
        self._missing: list[PeerId] = []
        self._transfer: Transfer | None = None
        self._repeat_at = 0.0

    def ask(self, peer: PeerId, until: float) -> None:
        self._asking[peer] = max(until, self._asking.get(peer, until))

    def asking(self, now: float) -> list[PeerId]:
        self._asking = {p: until for p, until in self._asking.items() if now <= until}
        return list(self._asking)

    def live(self, peers: Sequence[PeerId]) -> None:
        for known in (self._asking, self._tries, self._not_before):
            for gone in [p for p in known if p not in peers]:
                del known[gone]

    def turn(self, members: Sequence[PeerId], now: float) -> PeerId | None:
        """Who is to be taken in now."""
        if self.newcomer is not None or now < self._next_at:
            return None
        waiting = [p for p in self.asking(now) if p not in members and now >= self._not_before.get(p, now)]
        return min(waiting, key=lambda p: self._tries.get(p, 0), default=None)

    def begin(self, transfer: Transfer, now: float) -> None:
        self.since = self._repeat_at = now
        self.newcomer, self._transfer = transfer.newcomer, transfer
        self._missing = [m for m in transfer.members if m != self.me]
        self._asking.pop(transfer.newcomer, None)

    def stands_there(self, member: PeerId) -> None:
        self._missing = [m for m in self._missing if m != member]

    def tick(self, now: float) -> list[Any]:
        """Hold, repeated to those who have not answered; then the transfer, once."""
        transfer = self._transfer
        if transfer is None:
            return []
        if not self._missing:
            self._transfer = None
            return [transfer]
        if now < self._repeat_at:
            return []
        self._repeat_at = now + self._t.repeat_s
        return [Send(m, StepHold(transfer.ballot, transfer.step, transfer.newcomer)) for m in self._missing]

    def end(self, now: float) -> None:
        """The hold is over, one way or the other."""
        if self.newcomer is not None:
            tries = self._tries.get(self.newcomer, 0)
            self._next_at = now + self._t.admit_interval_s
            self._not_before[self.newcomer] = now + self._t.admit_interval_s * 2**tries
            self._tries[self.newcomer] = min(tries + 1, MOST_TRIES)
        self.newcomer = self._transfer = None

    def took_in(self, peers: Sequence[PeerId]) -> None:
        for p in peers:
            self._tries.pop(p, None)
            self._not_before.pop(p, None)

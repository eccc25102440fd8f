"""Convening: how live peers agree on who builds a process group together, and in which order.

Theory of operation. A *formation* is named by a ballot, ``(counter, convener's id)``. The convener takes a counter
above every one it has seen and sends ``Invite`` to all members, again and again, until each has answered or
``gather_s`` is over. A member that accepts *promises*: from now on it answers nothing at or below that counter but this
one ballot. What it declines comes back with its own promise, and the convener tries again above it, a random while
later (two conveners that meet must not meet for ever), at most ``tries`` times. Then the convener decides once:
``Go(ballot, members)`` names those who accepted, and only a Go builds a group.

A lost Go is asked for: a member that accepted repeats its Accept until it has a Go, and the convener answers an Accept
for the ballot it has decided with that Go. Those who were invited and came too late get the Go too and see themselves
left out. When no Go comes within ``go_wait_s`` the convener is presumed gone, and the next in the last formation's
order that is alive convenes the rest; each later one waits ``takeover_s`` longer. Only trainers do so: without its
publisher a formation for weights has nothing to send, and whoever publishes next convenes it itself.

A formation keeps the order of the one before it, as its convener knew it; newcomers go to the end.

Everything that changes the state of a convening lives in this file. What holds, whatever messages do:

1. A convener uses a counter once, so no two formations share a ballot.
2. A ballot is decided once, by its convener alone: all of its Gos carry the same members in the same order.
3. A member emits ``Form`` at most once for a ballot, only for a ballot it promised and for a list it is in, and the
   ballots of its Forms only rise.
4. A convener is a member of what it convenes, and abandons a round as soon as it has promised above it.
5. Every round, wait and repetition ends by itself.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mesh.effects import Note, Send
from mesh.identity import PeerId
from mesh.version import Ballot
from transport.messages import Accept, Decline, Go, Invite, Kind, Member


@dataclass(frozen=True)
class Timing:
    repeat_s: float = 0.2  # of invitations and acceptances: several fit into gather_s, so single losses do not count
    gather_s: float = 1.0  # a live peer answers in milliseconds; who does not within a second takes no part
    go_wait_s: float = 2.5  # above gather_s with two lost Gos
    takeover_s: float = 1.0  # between one successor and the next: time for a whole round
    tries: int = 6  # rounds after declines; with waits that double, about ten seconds


@dataclass(frozen=True)
class Form:
    """Build the group of ``go``; this peer is in its members. Emitted once a ballot."""

    go: Go


@dataclass
class _Round:
    """What a convener gathers. ``again_at`` is set instead of a ballot in use when it waits to try above a decline."""

    ballot: Ballot
    members: tuple[Member, ...]
    began: float
    next_invite: float
    tries: int
    accepted: set[PeerId] = field(default_factory=set)
    again_at: float | None = None


@dataclass
class _Promise:
    """What a member waits for after it accepted."""

    ballot: Ballot
    members: tuple[Member, ...]
    since: float
    next_accept: float
    settled: bool = False


class Convening:
    """One peer's part in the formations of one kind. Give ``live`` the peers alive whenever they change, every message
    to ``receive``, and call ``tick`` several times a second; execute the effects in order."""

    def __init__(
        self,
        me: PeerId,
        kind: Kind,
        floor: int = 0,
        rng: random.Random | None = None,
        timing: Timing | None = None,
    ):
        self.me = me
        self.kind: Kind = kind
        self.order: tuple[Member, ...] = ()
        self._seen = floor
        self._rng = rng or random.Random(me)
        self._timing = timing or Timing()
        self._live: tuple[PeerId, ...] = ()
        self._round: _Round | None = None
        self._promise: _Promise | None = None
        self._decided: tuple[Go, tuple[PeerId, ...]] | None = None

    @property
    def highest(self) -> int:
        """The highest counter seen; goes on the peer's card, so that restarts and newcomers stay above it."""
        return self._seen

    def raise_floor(self, counter: int) -> None:
        """Use no counter up to this one: it was seen on a card, in a checkpoint or in the run's term file."""
        self._seen = max(self._seen, counter)

    def live(self, peers: Sequence[PeerId]) -> None:
        self._live = tuple(peers)

    def convene(self, members: Sequence[Member], now: float) -> list[Any]:
        """Ask ``members`` for a new formation. A round for the same members that is under way goes on instead.

        Raises ValueError when this peer is not among them or a member is given twice."""
        ordered = self._ordered(members)
        if self._round is not None and self._round.members == ordered:
            return []
        return self._begin(ordered, 0, now)

    def receive(self, sender: PeerId, message: Invite | Accept | Decline | Go, now: float) -> list[Any]:
        if message.kind != self.kind:
            return []
        self._seen = max(self._seen, message.ballot.counter)
        match message:
            case Invite():
                return self._invited(sender, message, now)
            case Accept():
                return self._accepted(sender, message.ballot)
            case Decline():
                return self._declined(message, now)
            case Go():
                return self._go(sender, message)

    def tick(self, now: float) -> list[Any]:
        return [*self._tick_round(now), *self._tick_promise(now)]

    # ------------------------------------------------------------------------------------------------------------------
    # As convener
    # ------------------------------------------------------------------------------------------------------------------

    def _ordered(self, members: Sequence[Member]) -> tuple[Member, ...]:
        if len(set(members)) != len(members):
            raise ValueError(f"convening {self.kind}: a member is given twice: {list(members)}")
        if self.me not in {m.peer for m in members}:
            raise ValueError(f"convening {self.kind}: the convener {self.me} must be a member itself")
        return (*(m for m in self.order if m in members), *(m for m in members if m not in self.order))

    def _begin(self, members: tuple[Member, ...], tries: int, now: float) -> list[Any]:
        self._seen += 1
        ballot = Ballot(self._seen, self.me)
        self._promise = _Promise(ballot, members, now, now)
        self._round = _Round(ballot, members, now, now, tries, accepted={self.me})
        return self._tick_round(now)

    def _tick_round(self, now: float) -> list[Any]:
        r, t = self._round, self._timing
        if r is None:
            return []
        if r.again_at is not None:
            return self._begin(r.members, r.tries, now) if now >= r.again_at else []
        if now - r.began >= t.gather_s or len(r.accepted) == len(_peers(r.members)):
            return self._decide(r)
        if now < r.next_invite:
            return []
        r.next_invite = now + t.repeat_s
        invite = Invite(self.kind, r.ballot, list(r.members))
        return [Send(p, invite) for p in _peers(r.members) if p not in r.accepted]

    def _decide(self, r: _Round) -> list[Any]:
        members = tuple(m for m in r.members if m.peer in r.accepted)
        go = Go(self.kind, r.ballot, list(members))
        self._round, self._decided = None, (go, _peers(r.members))
        return [*self._settle(go), *(Send(p, go) for p in _peers(r.members) if p != self.me)]

    def _accepted(self, sender: PeerId, ballot: Ballot) -> list[Any]:
        r = self._round
        if r is not None and r.ballot == ballot and r.again_at is None and sender in _peers(r.members):
            r.accepted.add(sender)
            return self._decide(r) if len(r.accepted) == len(_peers(r.members)) else []
        if self._decided is not None and self._decided[0].ballot == ballot and sender in self._decided[1]:
            return [Send(sender, self._decided[0])]
        return []

    def _declined(self, message: Decline, now: float) -> list[Any]:
        self._seen = max(self._seen, message.highest.counter)
        r = self._round
        if r is None or r.ballot != message.ballot or r.again_at is not None:
            return []
        r.tries += 1
        if r.tries >= self._timing.tries:
            self._round = None
            text = f"gave up convening {self.kind}: declined {r.tries} times, last for {message.highest}"
            return [Note(text, "warning")]
        r.again_at = now + self._rng.uniform(0.0, self._timing.repeat_s * 2 ** (r.tries - 1))
        return []

    # ------------------------------------------------------------------------------------------------------------------
    # As member
    # ------------------------------------------------------------------------------------------------------------------

    def _invited(self, sender: PeerId, message: Invite, now: float) -> list[Any]:
        ballot, p = message.ballot, self._promise
        if sender != ballot.convener or sender == self.me or self.me not in {m.peer for m in message.members}:
            return []
        if p is not None and p.ballot == ballot:
            return [] if p.settled else [Send(sender, Accept(self.kind, ballot))]
        if p is not None and ballot.counter <= p.ballot.counter:
            return [Send(sender, Decline(self.kind, ballot, p.ballot))]
        self._round = None
        self._promise = _Promise(ballot, tuple(message.members), now, now + self._timing.repeat_s)
        return [Send(sender, Accept(self.kind, ballot))]

    def _go(self, sender: PeerId, go: Go) -> list[Any]:
        if sender != go.ballot.convener or sender == self.me:
            return []
        return self._settle(go)

    def _settle(self, go: Go) -> list[Any]:
        p = self._promise
        if p is None or p.ballot != go.ballot or p.settled:
            return []
        p.settled = True
        if self.me not in {m.peer for m in go.members}:
            return []
        self.order = tuple(go.members)
        return [Form(go)]

    def _tick_promise(self, now: float) -> list[Any]:
        """Ask for a Go that does not come; take over when it will not come. A late Go is still good until then."""
        p, t = self._promise, self._timing
        if p is None or p.settled or p.ballot.convener == self.me:
            return []
        waited = now - p.since
        if waited < t.go_wait_s:
            if now < p.next_accept:
                return []
            p.next_accept = now + t.repeat_s
            return [Send(p.ballot.convener, Accept(self.kind, p.ballot))]
        if self.kind != "gradients":
            return []
        rest = tuple(m for m in p.members if m.peer in self._live and m.peer != p.ballot.convener)
        heirs = _peers((*(m for m in self.order if m in rest), *(m for m in rest if m not in self.order)))
        if self.me not in heirs or waited < t.go_wait_s + heirs.index(self.me) * t.takeover_s:
            return []
        alive = tuple(m for m in p.members if m.peer in self._live)
        note = Note(f"no Go for {self.kind} {p.ballot} within {t.go_wait_s} s: convening in its place")
        return [note, *self._begin(self._ordered(alive), 0, now)]


def _peers(members: Sequence[Member]) -> tuple[PeerId, ...]:
    return tuple(dict.fromkeys(m.peer for m in members))

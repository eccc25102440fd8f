"""When a version of the weights is sent, and to whom: the publisher's end of a publication, pure.

Theory of operation. The publisher convenes a formation of itself and the live receivers and *announces* its newest
version to them, again and again. A receiver that has the manifest and a free shadow buffer reports itself *ready*
(``reception.py``). When all receivers of the formation are ready for the same (version, attempt), the publisher tells
them to *begin* and starts the broadcast. So no collective is ever used to wait for anybody: who is not ready within
``ready_wait_s`` sits out (``standing.py``), said by name, and the formation is convened again without it; when all
would sit out, nobody does. Announce, Begin and Report are states that are repeated: any may be lost, doubled or
overtaken.

Newest wins: a version that has not begun is replaced by a newer one and its buffer released. The newest stays leased
until it is replaced, so that whoever missed it gets it. While more than half of the receivers lack it, it is broadcast
(again, under the next attempt number; one that holds it already takes part with one bucket of scratch memory, since a
collective needs all of its ranks). The others, and those that sit out, are told to *pull* it (``pull.py``): from
receivers that have proved it, or from here. So nobody is disturbed for one that joined late. With ``weights.transport =
"endpoint"`` there are no formations, and everybody pulls.

The formation is renewed when the live receivers differ from its members, at most every ``reform_interval_s``; a dead
member ends it at once, and so does one that is not ready in time and says that it is in no such formation: a group may
break, or never come about, at some of its ranks alone. A broadcast that failed ends it too, and the wait doubles with
each failure in a row.

Invariants:

1. A broadcast begins only in the formation whose receivers are all ready for exactly its (version, attempt).
2. One broadcast at a time, and no (version, attempt) twice.
3. A buffer is released once, never while it is sent, and the newest never before a newer one (or the end).

Everything that decides lives here; ``publisher.py`` executes the effects.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mesh.config import Weights
from mesh.effects import Note, Send
from mesh.identity import PeerId
from mesh.version import Ballot, Version
from transport.messages import Begin, Member, Report
from transport.weights.pull import choose_holders
from transport.weights.standing import Standing, differing_engine, table

REPEAT_S = 0.25  # of Announce and Begin: a lost one costs this much, and several fit into an operation's time-out
TELL_S = 1.0  # of an Announce to who pulls
CONVENE_SLACK_S = 5.0  # for the invitations, on top of the time to build the group
PAST = 8  # versions whose digests are remembered, for who needs an older one


@dataclass(frozen=True)
class Convene:
    """Ask for a formation of these members, the publisher first."""

    members: tuple[Member, ...]


@dataclass(frozen=True)
class AnnounceTo:
    """``ballot`` None: it will not come through a formation, but can be pulled from ``holders``. Of ``slot`` only what
    describes it may be read then: it may be released already."""

    peer: PeerId
    ballot: Ballot | None
    version: Version
    attempt: int
    slot: Any
    holders: tuple[PeerId, ...] = ()


@dataclass(frozen=True)
class StartBroadcast:
    ballot: Ballot
    version: Version
    attempt: int
    slot: Any


@dataclass(frozen=True)
class Disband:
    """End what runs in this formation at once and close it."""

    ballot: Ballot


@dataclass(frozen=True)
class SatOut:
    peer: PeerId
    publications: int
    reason: str


@dataclass(frozen=True)
class EnginesDiffer:
    """Two engines of one build do not hold the same live tensors under the version that ``report`` calls proved."""

    peer: PeerId
    other: PeerId
    report: Report


@dataclass(frozen=True)
class Release:
    """Nothing reads or writes this buffer by order of the schedule any more."""

    slot: Any


@dataclass
class _Offer:
    """A version on its way through one formation: ``announced``, then ``sending``, then ``sent`` and awaiting reports.
    ``since`` is when it was sent."""

    ballot: Ballot
    version: Version
    attempt: int
    slot: Any
    repeat_at: float
    phase: str = "announced"
    since: float = 0.0


class PublisherSchedule:
    """Inputs are methods that return effects; call ``tick`` several times a second. ``slot`` is any value."""

    def __init__(self, me: Member, weights: Weights):
        self.me = me
        self.receivers: dict[PeerId, Standing] = {}
        self.publications = 0
        self.newest: Version | None = None
        self.formation: tuple[Ballot, tuple[Member, ...]] | None = None
        self._w = weights
        self._slot: Any = None  # of the newest
        self._attempt = 0  # of the newest
        self._offer: _Offer | None = None
        self._sending: _Offer | None = None  # outlives its formation: the mover may still read the buffer
        self._asked: tuple[tuple[Member, ...], float] | None = None
        self._reform_at = float("-inf")
        self._late_since: float | None = None
        self._broken = 0
        self._past: dict[Version, Any] = {}  # the slots of the last versions: what describes them
        self._told: dict[PeerId, float] = {}  # to pull: when to say so again

    # ------------------------------------------------------------------------------------------------------------------
    # Inputs
    # ------------------------------------------------------------------------------------------------------------------

    def snapshot(self, version: Version, slot: Any, now: float) -> list[Any]:
        """A new version lies in ``slot``. Raises ValueError when it is not above the newest."""
        if self.newest is not None and version <= self.newest:
            raise ValueError(f"version {version} is published after {self.newest}: versions only rise")
        effects = self._release_newest()
        self.newest, self._slot, self._attempt = version, slot, 0
        self._past = dict([*self._past.items(), (version, slot)][-PAST:])
        self._told.clear()
        return effects + self._advance(now)

    def live(self, receivers: Sequence[Member], now: float) -> list[Any]:
        """The members of all live receivers, in a stable order."""
        by_peer: dict[PeerId, list[Member]] = {}
        for m in receivers:
            by_peer.setdefault(m.peer, []).append(m)
        for peer in [p for p in self.receivers if p not in by_peer]:
            del self.receivers[peer]
            self._told.pop(peer, None)
        for peer, members in by_peer.items():
            self.receivers.setdefault(peer, Standing()).members = tuple(members)
        if self._asked is not None and self._gone(self._asked[0]):
            self._asked, self._reform_at = None, now
        return self._drop_if_dead(now) + self._advance(now)

    def formed(self, ballot: Ballot, members: Sequence[Member], now: float) -> list[Any]:
        """The group of this ballot is built. Members that were asked and are not in it did not answer."""
        if self.formation is not None and ballot <= self.formation[0]:
            return []
        effects: list[Any] = []
        for peer in _peers(self._asked[0]) if self._asked is not None else ():
            if peer in self.receivers and peer not in _peers(members):
                effects += self._strike(peer, "did not answer the invitation", now)
        self._asked = self._offer = self._late_since = None
        self.formation = (ballot, tuple(members))
        return effects + self._drop_if_dead(now) + self._advance(now)

    def group_failed(self, ballot: Ballot, reason: str, at_fault: Sequence[Member], now: float) -> list[Any]:
        """The group could not be built; ``at_fault`` are those who never came, where that is known."""
        if self.formation is not None and ballot < self.formation[0]:
            return []
        self.formation = self._offer = self._asked = None
        self._space_out(now)
        effects: list[Any] = [Note(f"weights formation {ballot} failed: {reason}", "warning")]
        for peer in _peers(at_fault):
            if peer in self.receivers:
                effects += self._strike(peer, "did not come to build the group", now)
        return effects

    def report(self, peer: PeerId, report: Report, now: float) -> list[Any]:
        r = self.receivers.get(peer)
        if r is None:
            return []
        r.heard(report)
        other = differing_engine(peer, self.receivers)
        effects: list[Any] = [EnginesDiffer(peer, other, report)] if other is not None else []
        if report.refused is not None and report.refused == self.newest:
            effects += self._failed(peer, report.refused, report.attempt, report.reason, now)
        return effects + self._advance(now)

    def broadcast_ended(self, version: Version, attempt: int, ok: bool, now: float) -> list[Any]:
        """The mover is done with what StartBroadcast asked for, well or not."""
        sent = self._sending
        if sent is None or (sent.version, sent.attempt) != (version, attempt):
            return []
        self._sending = None
        effects: list[Any] = [] if sent.version == self.newest else [Release(sent.slot)]
        if ok and self._offer is sent:
            sent.phase, sent.since, self._broken = "sent", now, 0
        elif self.formation is not None and self.formation[0] == sent.ballot:
            effects += self._disband()
            self._space_out(now)
        return effects + self._advance(now)

    def tick(self, now: float) -> list[Any]:
        return self._advance(now)

    def close(self) -> list[Any]:
        """Stop: end what runs, give the newest back. A buffer being sent is released by ``broadcast_ended``."""
        effects = [*(self._disband() if self.formation is not None else []), *self._release_newest()]
        self.newest = self._asked = None
        self.receivers.clear()
        self._past.clear()
        self._told.clear()
        return effects

    def proved_by(self, version: Version) -> tuple[PeerId, ...]:
        """The live receivers whose engines run ``version`` or a later one, proved."""
        return tuple(p for p, r in self.receivers.items() if r.proved is not None and r.proved >= version)

    @property
    def staged(self) -> Any:
        """The slot of the newest version, which stays leased; None when there is none."""
        return self._slot if self.newest is not None else None

    def table(self, names: Mapping[PeerId, str]) -> list[str]:
        """A line a receiver: where it is, and why it is no further."""
        return table(self.receivers, names)

    # ------------------------------------------------------------------------------------------------------------------
    # Rules
    # ------------------------------------------------------------------------------------------------------------------

    def _advance(self, now: float) -> list[Any]:
        """Whatever is next."""
        effects = [] if self._w.transport == "endpoint" else self._broadcast(now)
        return effects + self._tell(now)

    def _broadcast(self, now: float) -> list[Any]:
        """Repeat Begin, convene, offer, announce, begin."""
        if self._sending is not None and self._sending is self._offer:
            return self._begin(self._sending, now)
        effects: list[Any] = []
        if self._asked is not None:
            if now - self._asked[1] < self._w.form_timeout_s + CONVENE_SLACK_S:
                return []
            self._asked = None
            effects.append(Note("no weights formation came about; convening again", "warning"))
        wanted = self._wanted(now)
        if not wanted:
            return effects + (self._disband() if self.formation is not None else [])
        have = self._formed_receivers()
        if sorted(have) != sorted(wanted) and now >= self._reform_at:
            members = (self.me, *(m for p in wanted for m in self.receivers[p].members))
            self._asked, self._offer, self._reform_at = (members, now), None, now + self._w.reform_interval_s
            return [*effects, Convene(members)]
        if self.formation is None or self._sending is not None or any(p not in wanted for p in have):
            return effects
        return effects + self._offer_newest(self.formation[0], have, now)

    def _offer_newest(self, ballot: Ballot, have: Sequence[PeerId], now: float) -> list[Any]:
        version, offer = self.newest, self._offer
        if version is None:
            return []
        lacking = [p for p in have if self.receivers[p].lacks(version, self.publications, now)]
        if offer is not None and offer.phase == "sent" and offer.version == version:
            silent = [p for p in lacking if not self.receivers[p].failed_in(version, offer.attempt)]
            if silent and now - offer.since < self._w.ready_wait_s:
                return []
            self._offer = None
            effects = [
                e for p in silent for e in self._failed(p, version, offer.attempt, "no report after the broadcast", now)
            ]
            return effects + self._broadcast(now)
        if 2 * len(lacking) <= len(have):
            self._offer = self._late_since = None
            return []
        if offer is None or offer.version != version:
            self._attempt += 1
            offer = self._offer = _Offer(ballot, version, self._attempt, self._slot, now)
            if self._late_since is None:  # a newer version does not give the late more time
                self._late_since = now
        late = [p for p in have if not self._ready(p, offer)]
        if not late:
            return self._start(offer, now)
        if self._late_since is not None and now - self._late_since >= self._w.ready_wait_s:
            self._late_since = now
            text = f"was not ready for {version} within {self._w.ready_wait_s:g} s"
            effects = [e for p in late for e in self._strike(p, text + self._excuse(p), now)]
            if any(self._left(p) for p in late):
                effects += self._disband()
                self._reform_at = now
            return effects + self._broadcast(now)
        if now < offer.repeat_at:
            return []
        offer.repeat_at = now + REPEAT_S
        return [AnnounceTo(p, ballot, version, offer.attempt, offer.slot) for p in late]

    # Pulls ------------------------------------------------------------------------------------------------------------

    def _tell(self, now: float) -> list[Any]:
        """Tell those that lack a version, and will not get it by broadcast, from whom to pull it."""
        effects: list[Any] = []
        pullers = dict.fromkeys(self._pullers(now), self.newest)
        offered = self._offered()
        for peer, r in self.receivers.items():
            wants = r.report.wants if r.report is not None else None
            if wants == self.newest and peer in offered:
                wants = None  # it comes by broadcast; who pulled it meanwhile would be missing there
            choices = [v for v in (wants, pullers.get(peer)) if v in self._past]
            if not choices or now < self._told.get(peer, now):
                continue
            self._told[peer] = now + TELL_S
            for version in choices:  # what it wants may be held by nobody any more: then the newest will do
                provers = [p for p, other in self.receivers.items() if p != peer and other.runs(version)]
                holders = choose_holders(self.me.peer if version == self.newest else None, provers, len(self._told))
                if holders:
                    if r.failed_in(version, self._attempt):
                        self._attempt += 1  # a failure is counted once an attempt
                    slot = self._past[version]
                    effects.append(AnnounceTo(peer, None, version, self._attempt, slot, tuple(holders)))
                    break
        return effects

    def _pullers(self, now: float) -> list[PeerId]:
        """Who lacks the newest version while most others have it, or is left out of formations."""
        version = self.newest
        if version is None:
            return []
        lacking = [p for p, r in self.receivers.items() if r.lacks(version, self.publications, now)]
        if self._w.transport == "endpoint":
            return lacking
        wanted = dict.fromkeys(self._wanted(now))
        few = 2 * sum(p in wanted for p in lacking) <= len(wanted)
        offered = self._offered()
        return [p for p in lacking if p not in offered and (few or p not in wanted)]

    def _offered(self) -> list[PeerId]:
        """Those to whom the newest version comes by broadcast."""
        return self._formed_receivers() if self._offer is not None and self._offer.version == self.newest else []

    def _start(self, offer: _Offer, now: float) -> list[Any]:
        self.publications += offer.attempt == 1
        self._sending, self._late_since = offer, None
        offer.phase, offer.repeat_at = "sending", now
        start = StartBroadcast(offer.ballot, offer.version, offer.attempt, offer.slot)
        return [*self._begin(offer, now), start]

    def _begin(self, offer: _Offer, now: float) -> list[Any]:
        if now < offer.repeat_at:
            return []
        offer.repeat_at = now + REPEAT_S
        begin = Begin(offer.ballot, offer.version, offer.attempt)
        return [Send(p, begin) for p in self._formed_receivers()]

    def _ready(self, peer: PeerId, offer: _Offer) -> bool:
        r = self.receivers[peer].report
        return r is not None and (r.ballot, r.ready_for, r.attempt) == (offer.ballot, offer.version, offer.attempt)

    def _left(self, peer: PeerId) -> bool:
        """Whether its group broke, or never came about at its end: it cannot become ready in this formation."""
        report = self.receivers[peer].report
        return report is not None and self.formation is not None and report.ballot != self.formation[0]

    def _excuse(self, peer: PeerId) -> str:
        r = self.receivers[peer].report
        if r is None:
            return ": it never reported"
        return f": {r.reason}" if r.reason else ""

    def _failed(self, peer: PeerId, version: Version, attempt: int, reason: str, now: float) -> list[Any]:
        """``peer`` refused this attempt. Before the broadcast it would do so again; after it one more is made."""
        o = self._offer
        announced = o is not None and (o.version, o.attempt, o.phase) == (version, attempt, "announced")
        if not self.receivers[peer].failure(version, attempt, reason, final=announced):
            return []
        return self._strike(peer, f"refused {version}: {reason}", now)

    def _strike(self, peer: PeerId, reason: str, now: float) -> list[Any]:
        count = self.receivers[peer].strike(reason, self.publications, now, 2 * self._w.ready_wait_s)
        return [SatOut(peer, count, reason)] if count else []

    def _wanted(self, now: float) -> list[PeerId]:
        """Whom a formation should have."""
        return [p for p in self.receivers if not self._sits_out(p, now)] or list(self.receivers)

    def _sits_out(self, peer: PeerId, now: float) -> bool:
        return self.receivers[peer].sits_out(self.publications, now)

    def _formed_receivers(self) -> list[PeerId]:
        return [p for p in _peers(self.formation[1]) if p != self.me.peer] if self.formation is not None else []

    def _gone(self, members: Sequence[Member]) -> bool:
        known = {m for r in self.receivers.values() for m in r.members}
        return any(m not in known for m in members if m.peer != self.me.peer)

    def _drop_if_dead(self, now: float) -> list[Any]:
        if self.formation is None or not self._gone(self.formation[1]):
            return []
        self._reform_at = now
        return self._disband()

    def _disband(self) -> list[Any]:
        assert self.formation is not None
        ballot = self.formation[0]
        self.formation = self._offer = self._late_since = None
        return [Disband(ballot)]

    def _space_out(self, now: float) -> None:
        """Wait longer after each failure in a row, up to eight intervals."""
        self._reform_at = max(self._reform_at, now + self._w.reform_interval_s * 2 ** min(self._broken, 3))
        self._broken += 1

    def _release_newest(self) -> list[Any]:
        if self.newest is None or (self._sending is not None and self._sending.version == self.newest):
            return []
        return [Release(self._slot)]


def _peers(members: Sequence[Member]) -> tuple[PeerId, ...]:
    return tuple(dict.fromkeys(m.peer for m in members))

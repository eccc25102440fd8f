"""What a peer believes of the others, and how news changes it. Pure; ``mesh.prober`` decides whom to ask and accuse.

Theory of operation. For every peer there is a record: card, incarnation, state. A higher incarnation overrides, and
only its owner raises it: to change its card, to say goodbye (*left*), or to refute. At equal incarnations

* an accusation, "suspect" or "dead", makes a living peer *suspect* and adds its accuser; when the suspicion has lasted
  ``Preset.suspicion_s`` without a refutation the peer is *dead*. Death is no hearsay: "dead" from another peer counts
  as his accusation, so old news from the far side of a healed partition kills nobody, and in every view a peer has a
  whole suspicion's time to refute;
* "alive" about a peer held dead changes nothing but is a *doubt*: that peer is to be asked itself, and may refute.

At a lower incarnation an accusation is out of date, and what is known is told again. The dead are remembered, for an
hour and at most ``MAX_DEAD``, since only who remembers a death can ask for its refutation, and so halves that lost each
other meet again.

Two views are compared by digests, one for each of ``PARTS`` parts of the mesh, and only parts that differ are told: so
comparing costs the same in a mesh of any size. What a newcomer is told by its host is news to nobody, and not spread.

News spreads as SWIM's does: what is fresh rides on messages, about ``6 log10(n)`` times, at most ``NEWS`` pieces each,
joins and deaths before changed cards. What a piece says is read from its record when it is sent. Every message opens
with its sender's own card and tells its receiver what is held against it.

What holds, whatever is heard: a record's incarnation never falls while the peer is remembered; ``Joined`` and
``Departed`` of a peer alternate, and ``living`` is exactly who joined and did not depart.
"""

import heapq
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace
from xxhash import xxh3_64_intdigest

from mesh.effects import Note, Send
from mesh.identity import PeerCard, PeerId
from mesh.presets import CONFIRMATIONS, Preset
from transport.messages import PROTOCOL, Liveness, News

NEWS = 32  # pieces of news in a message, about 12 KiB
RETRANSMIT = 6  # times ceil(log10(n + 1)) sendings of one piece; at memberlist's 4 one of six peers is missed too often
MAX_BUSY_S = 300.0  # longer silence cannot be told from death
REMEMBER_S = 3600.0  # how long the dead are remembered: longer than a switch takes to come back
MAX_DEAD = 10_000  # remembered dead
MAX_LIVING = 10_000
MAX_DOUBTS = 1024
PARTS = 32  # of the mesh, by peer: what differs is exchanged by parts, of a thousand members about 8 KiB each
ALL_PARTS = range(PARTS)
LEFT_TOLD = 256  # of those who left, in a full exchange: reasons are wanted for a while


@dataclass(frozen=True)
class Joined:
    """A member that was not in the view: new, or back from the dead."""

    card: PeerCard


@dataclass(frozen=True)
class Changed:
    """A member's card has changed."""

    card: PeerCard


@dataclass(frozen=True)
class Suspected:
    """A member does not answer; it stays in the view until it refutes or is dead. ``by`` is the accuser's name."""

    card: PeerCard
    by: str


@dataclass(frozen=True)
class Departed:
    """A member is gone: ``dead`` by silence, or left by its own word, with its reason."""

    card: PeerCard
    dead: bool
    reason: str


@dataclass(slots=True)
class Record:
    card: PeerCard
    incarnation: int
    state: Liveness
    since: float  # of the suspicion, or of the departure
    reason: str = ""
    busy_until: float = 0.0
    accusers: list[PeerId] = field(default_factory=list)
    replaced: bool = False  # another process answers at its address


@dataclass(slots=True)
class _Fresh:
    routine: bool
    order: int
    sent: int = 0


def part_of(peer: PeerId) -> int:
    return xxh3_64_intdigest(peer.encode()) % PARTS


def objection(card: PeerCard, me: PeerCard, protocol: int = PROTOCOL) -> str:
    """Why ``card`` cannot be of the mesh of ``me``; empty when it can. Observers do no work: nothing must agree."""
    if protocol == PROTOCOL and card.agreed == me.agreed:
        return ""
    both = f"between {card.name} on {card.host} and {me.name} on {me.host}"
    if protocol != PROTOCOL:
        return f"protocols {protocol} and {PROTOCOL} differ {both}: install the same mesh-node on both"
    if "observer" in (card.role, me.role):
        return ""
    names = sorted({*card.agreed, *me.agreed})
    differ = [name for name in names if card.agreed.get(name) != me.agreed.get(name)]
    if sections := [f"[{name}]" for name in differ if "." not in name]:
        return f"settings differ in {', '.join(sections)} {both}: start both from the same file"[:4096]
    if differ:  # settings alike, but not the files that they name
        return f"{' and '.join(differ)} name files that differ {both}: give both the same ones"[:4096]
    return ""


class Roster:
    """The records of one peer, its own card included. Methods append what happened to ``effects``."""

    def __init__(self, card: PeerCard, preset: Preset, incarnation: int):
        self.card = card
        self.incarnation = incarnation
        self.busy_until = 0.0
        self.living: dict[PeerId, Record] = {}
        self.suspects: dict[PeerId, Record] = {}  # of the living
        self.dead: dict[PeerId, Record] = {}  # also those who left; in the order of their departure
        self.doubts: dict[PeerId, None] = {}
        self.fresh: dict[PeerId, _Fresh] = {}
        self.effects: list[Joined | Changed | Suspected | Departed | Note | Send] = []
        self._preset = preset
        self._order = 0
        self._owners: dict[str, PeerId] = {}  # address -> the last member that joined with it
        self._view: tuple[PeerCard, ...] | None = None

    @property
    def size(self) -> int:
        return 1 + len(self.living)

    @property
    def alive(self) -> tuple[PeerCard, ...]:
        if self._view is None:
            cards = [self.card, *(record.card for record in self.living.values())]
            self._view = tuple(sorted(cards, key=lambda card: card.id))
        return self._view

    def record(self, peer: PeerId) -> Record | None:
        return self.living.get(peer) or self.dead.get(peer)

    def name(self, peer: PeerId) -> str:
        record = self.record(peer)
        return self.card.name if peer == self.card.id else record.card.name if record else peer or "nobody"

    def is_busy(self, peer: PeerId, now: float) -> bool:
        record = self.living.get(peer)
        return record is not None and now < record.busy_until

    def pick(self, rng: random.Random, count: int, but: PeerId = "") -> list[PeerId]:
        """Up to ``count`` random members other than ``but``."""
        others = [peer for peer in self.living if peer != but]
        return rng.sample(others, min(count, len(others)))

    # ------------------------------------------------------------------------------------------------------------------
    # Hearing
    # ------------------------------------------------------------------------------------------------------------------

    def hear(self, news: News, now: float) -> None:
        peer = news.card.id
        record = self.record(peer)
        if peer == self.card.id:
            self._hear_of_self(news)
        elif record is None:
            self._admit(news, now)
        elif news.incarnation > record.incarnation:
            self._renew(record, news, now)
        elif news.incarnation < record.incarnation:
            if news.state != "alive":
                self.spread(peer, again=True)  # somebody accuses a peer that has already refuted
        elif news.state in ("suspect", "dead"):
            self.accuse(record, news.accuser, now)
        elif news.state == "alive" and record.state == "dead" and not record.replaced and len(self.doubts) < MAX_DOUBTS:
            self.doubts[peer] = None

    def _hear_of_self(self, news: News) -> None:
        if news.incarnation < self.incarnation and news.state != "alive":
            self.spread(self.card.id, again=True)
        elif news.incarnation > self.incarnation or (news.incarnation == self.incarnation and news.state != "alive"):
            self._refute(news)

    def _refute(self, news: News) -> None:
        self.incarnation = news.incarnation + 1
        self.spread(self.card.id)
        if news.state == "dead":
            self.effects.append(
                Note(f"{self.card.name} was held dead by others and refutes: was it starved, or cut off?", "warning")
            )

    def _admit(self, news: News, now: float) -> None:
        """A peer never heard of."""
        card = news.card
        if objection(card, self.card) or len(self.living) >= MAX_LIVING:
            return
        record = Record(card, news.incarnation, news.state, now, news.reason, now + min(card.busy_for_s, MAX_BUSY_S))
        if news.state in ("dead", "left"):
            self.depart(record, news.state, now)
            return
        self._join(record, now)
        if news.state == "suspect":
            self.accuse(record, news.accuser, now)

    def _renew(self, record: Record, news: News, now: float) -> None:
        """Newer news of a known peer: it has changed its card, refuted, come back or left; perhaps accused again."""
        before, was = record.card, record.state
        record.card, record.incarnation = news.card, news.incarnation
        record.busy_until = now + min(news.card.busy_for_s, MAX_BUSY_S)
        record.accusers, record.replaced = [], False
        self.suspects.pop(news.card.id, None)
        self._view = None
        if news.state == "left":
            record.reason = news.reason
            self.depart(record, "left", now)
        elif was in ("dead", "left"):
            if news.state != "dead":
                self._join(record, now)
        else:
            record.state = "alive"
            self.spread(news.card.id, routine=was == "alive")
            if news.card != before:
                self.effects.append(Changed(news.card))
        if news.state in ("suspect", "dead"):
            self.accuse(record, news.accuser, now)

    def _join(self, record: Record, now: float) -> None:
        card = record.card
        record.state, record.reason = "alive", ""
        self.dead.pop(card.id, None)
        self.doubts.pop(card.id, None)
        self.living[card.id] = record
        self._view = None
        self.spread(card.id)
        self.effects.append(Joined(card))
        before = self.living.get(self._owners.get(card.address, ""))
        self._owners[card.address] = card.id
        if before and before is not record and before.card.address == card.address:
            self.accuse(before, self.card.id, now)  # an address has one owner: the older one is gone, or will refute

    def accuse(self, record: Record, accuser: PeerId, now: float) -> None:
        """Suspect a living peer, or count another accuser of a suspect; nothing for the departed."""
        if record.state == "alive":
            record.state, record.since, record.accusers = "suspect", now, [accuser]
            self.suspects[record.card.id] = record
            self.effects.append(Suspected(record.card, self.name(accuser)))
        elif record.state == "suspect" and accuser not in record.accusers and len(record.accusers) <= CONFIRMATIONS:
            record.accusers.append(accuser)
        else:
            return
        self.spread(record.card.id)

    def judge(self, now: float) -> None:
        """Suspects whose time has run out are dead."""
        for record in list(self.suspects.values()):
            if now - record.since >= self._preset.suspicion_s(self.size, len(record.accusers) - 1):
                record.reason = f"did not answer {', '.join(self.name(accuser) for accuser in record.accusers)}"
                self.depart(record, "dead", now)

    def excuse(self, gap_s: float) -> None:
        """This peer itself did not run for ``gap_s``: refutations may lie unread, so suspicions last as much longer."""
        for record in self.suspects.values():
            record.since += gap_s

    def depart(self, record: Record, state: Liveness, now: float) -> None:
        peer = record.card.id
        was_living = self.living.pop(peer, None) is not None
        self.suspects.pop(peer, None)
        self.dead.pop(peer, None)
        if self._owners.get(record.card.address) == peer:
            del self._owners[record.card.address]
        self.dead[peer] = record
        record.state, record.since = state, now
        self._view = None
        self.spread(peer)
        if was_living:
            self.effects.append(Departed(record.card, state == "dead", record.reason))
        self.forget(now)

    def forget(self, now: float) -> None:
        """Drop the memory of those who went more than an hour ago, and of the oldest beyond ``MAX_DEAD``."""
        while self.dead:
            peer, record = next(iter(self.dead.items()))
            if len(self.dead) <= MAX_DEAD and now - record.since <= REMEMBER_S:
                return
            for memory in (self.dead, self.fresh, self.doubts):
                memory.pop(peer, None)

    # ------------------------------------------------------------------------------------------------------------------
    # Telling
    # ------------------------------------------------------------------------------------------------------------------

    def spread(self, peer: PeerId, *, routine: bool = False, again: bool = False) -> None:
        """Let the news of ``peer`` ride on messages from now on. ``again``: no news, only for those who missed it."""
        if not again or peer not in self.fresh:
            self._order += 1
            self.fresh[peer] = _Fresh(routine, self._order)

    def hush(self, peers: Sequence[PeerId]) -> None:
        """Do not spread what is known of these: everybody else has heard it."""
        for peer in peers:
            if peer != self.card.id:
                self.fresh.pop(peer, None)

    def news(self, to: PeerId, now: float) -> list[News]:
        """For a message to ``to``: the own card, what is held against ``to``, and what it has likely not heard."""
        told = [self.own(now), *self._against(to, now)]
        limit = RETRANSMIT * math.ceil(math.log10(self.size + 1))
        chosen = heapq.nsmallest(NEWS, self.fresh.items(), key=lambda f: (f[1].routine, f[1].sent, -f[1].order))
        for peer, fresh in chosen:
            record = self.record(peer)
            if record and peer != to:
                told.append(_tell(record, now, fresh.sent))
            fresh.sent += 1
            if fresh.sent >= limit:
                del self.fresh[peer]
        return told

    def everybody(self, to: PeerId, now: float, parts: Sequence[int] = ALL_PARTS) -> list[News]:
        """All that is known to ``to``, of these parts of the mesh. The dead are not told of: that would accuse whoever
        lives elsewhere."""
        left = [record for record in self.dead.values() if record.state == "left"][-LEFT_TOLD:]
        known = [record for record in [*self.living.values(), *left] if record.card.id != to]
        told = [_tell(record, now) for record in known if len(parts) == PARTS or part_of(record.card.id) in parts]
        return [self.own(now), *self._against(to, now), *told]

    def digests(self) -> list[int]:
        """Of who lives, in which incarnation; one a part. Two peers of one view have the same."""
        digests = [0] * PARTS
        incarnations = {peer: record.incarnation for peer, record in self.living.items()}
        for peer, incarnation in {**incarnations, self.card.id: self.incarnation}.items():
            digests[part_of(peer)] ^= xxh3_64_intdigest(peer.encode(), incarnation) >> 12  # 52 bits: a Count
        return digests

    def own(self, now: float) -> News:
        left_s = max(0.0, self.busy_until - now)
        return News(replace(self.card, busy_for_s=left_s), self.incarnation, "alive")

    def change(self, card: PeerCard, now: float) -> None:
        self.card = card
        self.busy_until = now + card.busy_for_s
        self.incarnation += 1
        self._view = None
        self.spread(card.id, routine=True)

    def _against(self, peer: PeerId, now: float) -> Sequence[News]:
        record = self.record(peer)
        return [_tell(record, now)] if record and record.state in ("suspect", "dead") else []


def _tell(record: Record, now: float, turn: int = 0) -> News:
    """A record as news: busy for what is left of it; successive turns name the accusers one after the other."""
    card = record.card
    if card.busy_for_s:
        card = replace(card, busy_for_s=max(0.0, record.busy_until - now))
    accuser = record.accusers[turn % len(record.accusers)] if record.accusers else ""
    return News(card, record.incarnation, record.state, record.reason, accuser)

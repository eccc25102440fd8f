"""Who is alive, as this peer sees it: SWIM with Lifeguard.

Theory of operation. Three machines share the work. ``mesh.prober`` pings one peer after the other, with the help of
others, and accuses the silent. ``mesh.roster`` holds what is believed of each peer, and the rules by which news changes
it: an accused peer is suspect, refutes with a higher incarnation, or is dead when the suspicion has run out. This file
brings them together and carries news: it rides on pings and acks and, while there is any, goes to three random peers a
few times a second; now and then two peers compare digests of their views, and tell each other what differs. What a peer
sends each second does not grow with the mesh; only who is welcomed is told of everybody.

SWIM is Das, Gupta and Motivala 2002; Lifeguard, which guards against accusers that are slow themselves, is Dadgar,
Phillips and Currey 2018 (arXiv:1707.00788). What is added:

* Time in which this peer itself did not run counts against nobody; after a gap as long as the detection time it is
  ``Asleep``: the others hold it dead.
* The dead are pinged now and then, and told that they are held dead; so are the seeds (by ``Hello``). Who hears that
  somebody he holds dead is alive asks that peer itself. So healed halves become one.
* A card may announce ``busy_for_s``: until then silence accuses nobody.
* A new process at a member's address, seen joining or through ``NotMe``, makes the old member suspect at once.
* Settings that a run must have alike are compared at first contact; a misfit is refused, and told what differs.

No sockets, clocks or randomness but what is handed in. ``contact``, ``receive``, ``tick``, ``update`` and ``leave``
return what is to be done, in order. After ``Asleep`` or ``leave`` there is silence for ever: a driver that goes on
takes a new id and a new Membership.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from mesh.effects import Note, Send
from mesh.identity import PeerCard, PeerId
from mesh.presets import LAN, LOCAL, PRESETS, WAN, Preset
from mesh.prober import Prober
from mesh.roster import ALL_PARTS, MAX_BUSY_S, Changed, Departed, Joined, Roster, Suspected, objection
from transport.messages import (
    Ack,
    Compare,
    Hello,
    Liveness,
    Message,
    Nack,
    News,
    NotMe,
    Ping,
    PingReq,
    Refused,
    Sync,
    Welcome,
)  # fmt: skip

__all__ = [
    "LAN", "LOCAL", "PRESETS", "WAN", "Asleep", "Changed", "Contacted", "Departed", "Effect", "Joined", "Membership",
    "Preset", "Refusal", "Suspected",
]  # fmt: skip

FANOUT = 3  # random peers that get fresh news at once: all of a thousand within about seven rounds
SHOUT = 16  # peers told directly of an own change or goodbye; the rest hear it from them
GREET = 3  # seeds greeted at once, of a directory of a thousand: each that answers tells of everybody
ASKS = 4  # doubted dead asked in one round of news
MAX_SEEDS = 1024
CHUNK = 500  # members in one Sync or Welcome, about 200 KiB: a frame holds 1 MiB
CONTACT_S, CONTACT_MAX_S = 0.25, 5.0  # a lone peer repeats its Hello, at first fast, for ever
SEED_REST = 10  # times ``reach_s`` that a seed which answered is left alone


@dataclass(frozen=True)
class Refusal:
    """The peer at ``address`` does not admit this one."""

    address: str
    reason: str


@dataclass(frozen=True)
class Contacted:
    """The first other member is known: this peer is not alone. Emitted once."""


@dataclass(frozen=True)
class Asleep:
    """This peer did not run for ``gap_s``, long enough to be held dead: take a new id, forget what was agreed."""

    gap_s: float


Effect = Send | Note | Joined | Changed | Suspected | Departed | Refusal | Contacted | Asleep


class Membership:
    """One peer's view of the mesh. Times are seconds of one monotonic clock, best one that goes on while the machine
    is suspended (CLOCK_BOOTTIME)."""

    def __init__(self, card: PeerCard, preset: Preset, rng: random.Random, now: float, incarnation: int = 0):
        self.id = card.id
        self.preset = preset
        self.over = False
        self.roster = Roster(card, preset, incarnation)
        self.prober = Prober(self.roster, preset, rng, now, self._send)
        self._rng = rng
        self._now = now
        self._effects: list[Effect] = []
        self._seeds: dict[str, float] = {}  # address -> not to be asked before
        self._asked_seed = ""
        self._host: PeerId = ""  # who told this peer of the mesh when it was alone
        self._contacted = False
        self._contact_wait = CONTACT_S
        self._next_gossip = now
        self._next_sync = now + (0.5 + rng.random()) * preset.sync_s
        self._next_reach = now + (0.5 + rng.random()) * preset.reach_s
        self._next_contact = now + CONTACT_S

    # ------------------------------------------------------------------------------------------------------------------
    # What is known
    # ------------------------------------------------------------------------------------------------------------------

    @property
    def card(self) -> PeerCard:
        return self.roster.card

    @property
    def incarnation(self) -> int:
        return self.roster.incarnation

    @property
    def alive(self) -> tuple[PeerCard, ...]:
        """The cards of all members, suspects and this peer included, ordered by id."""
        return self.roster.alive

    @property
    def departed(self) -> list[Departed]:
        """Who died or left within the hour, in that order."""
        return [Departed(r.card, r.state == "dead", r.reason) for r in self.roster.dead.values()]

    def card_of(self, peer: PeerId) -> PeerCard | None:
        """The last card of a peer that is a member or still remembered."""
        record = self.roster.record(peer)
        return self.card if peer == self.id else record.card if record else None

    def state_of(self, peer: PeerId) -> Liveness | None:
        record = self.roster.record(peer)
        return "alive" if peer == self.id else record.state if record else None

    def reason_of(self, peer: PeerId) -> str:
        """Why a departed peer went, in words; empty for others."""
        record = self.roster.dead.get(peer)
        return record.reason if record else ""

    def asleep(self, now: float) -> bool:
        """Whether this peer did not run for so long that others may hold it dead, or is over already. To be looked at
        before it acts on what it remembers."""
        busy_s = max(0.0, self.roster.busy_until - self._now)
        return self.over or now - self._now > busy_s + self.preset.detection_s(self.roster.size)

    # ------------------------------------------------------------------------------------------------------------------
    # What happens
    # ------------------------------------------------------------------------------------------------------------------

    def contact(self, addresses: Sequence[str], now: float) -> list[Effect]:
        """Keep addresses that are new as seeds, and greet some. ``tick`` goes on with it while nobody answers."""
        self._advance(now)
        here = {card.address for card in self.alive}
        new: list[str] = []
        for address in addresses:
            if address and address not in self._seeds and address not in here and not self.over:
                self._seeds[address] = now
                new.append(address)
        for address in self._rng.sample(new, min(GREET, len(new))):
            self._hello(address)
        while len(self._seeds) > MAX_SEEDS:
            del self._seeds[next(iter(self._seeds))]
        return self._take()

    def receive(self, sender: PeerId, message: Message, now: float, reply: str = "") -> list[Effect]:
        """``reply`` is the envelope's: where a sender whose card is unknown can be answered."""
        self._advance(now)
        if self.over:
            pass
        elif sender == self.id:
            if isinstance(message, Hello) and self._asked_seed:
                self._seeds[self._asked_seed] = math.inf  # a seed that is this peer under another name
        else:
            self._receive(sender, message, reply)
        return self._take()

    def tick(self, now: float) -> list[Effect]:
        """To be called several times a period."""
        self._advance(now)
        if not self.over:
            self.roster.judge(now)
            self.prober.tick(now)
            self._step_gossip()
            self._step_sync()
            self._step_reach()
            self._step_contact()
        return self._take()

    def update(self, now: float, **changes: Any) -> list[Effect]:
        """Change this peer's card and spread it. Raises ValueError for an id, or a ``busy_for_s`` outside [0, 300]."""
        self._advance(now)
        if changes.get("id", self.id) != self.id:
            raise ValueError("a peer's id cannot change: a new id is a new peer")
        if not 0 <= changes.get("busy_for_s", 0) <= MAX_BUSY_S:
            raise ValueError(f"busy_for_s = {changes['busy_for_s']} must be between 0 and {MAX_BUSY_S:.0f}")
        if not self.over:
            self.roster.change(replace(self.roster.own(now).card, **changes), now)
            self._shout(self.roster.own(now))
        return self._take()

    def leave(self, reason: str, now: float) -> list[Effect]:
        """Goodbye to the mesh, with the reason that the others will show. Nothing more comes from this Membership."""
        self._advance(now)
        if not self.over:
            self._shout(News(self.card, self.incarnation + 1, "left", reason[:4096]))
            self.over = True
        return self._take()

    # ------------------------------------------------------------------------------------------------------------------
    # Messages
    # ------------------------------------------------------------------------------------------------------------------

    def _receive(self, sender: PeerId, message: Message, reply: str) -> None:
        match message:
            case Hello():
                self._receive_hello(sender, message)
            case Welcome():
                self._receive_welcome(sender, message.members)
                if self._asked_seed:
                    self._seeds[self._asked_seed] = self._now + SEED_REST * self.preset.reach_s
                    self._asked_seed = ""
            case Refused():
                self._effects.append(Refusal(reply, message.reason))
            case Ping():
                self._hear(message.news, sender)
                self._send(sender, Ack(message.seq, self._news(sender)), reply)
            case Ack():
                self._hear(message.news, sender)
                self.prober.receive_ack(sender, message.seq, self._now)
            case PingReq():
                self._hear(message.news, sender)
                self.prober.receive_request(sender, message.seq, message.target, reply, self._now)
            case Nack():
                self._hear(message.news, sender)
                self.prober.receive_nack(sender, message.seq)
            case Sync():
                self._hear(message.members, sender)
            case Compare():
                self._receive_compare(sender, message, reply)
            case NotMe():
                record = self.roster.record(message.meant)
                if record and reply in ("", record.card.address):
                    record.replaced = True
                    self.roster.accuse(record, self.id, self._now)

    def _receive_hello(self, sender: PeerId, hello: Hello) -> None:
        card = hello.card
        reason = objection(card, self.card, hello.protocol)
        if sender != card.id:
            return
        if reason:
            self._effects.append(Send(sender, Refused(reason), card.address))
            self._effects.append(Note(f"refused {card.name} on {card.host}: {reason}", "warning"))
        else:
            self._hear([News(card, hello.incarnation, "alive")], sender)
            self._tell(sender, card.address, Welcome)

    def _receive_welcome(self, host: PeerId, members: Sequence[News]) -> None:
        if not self.roster.living:
            self._host = host
        spreading = set(self.roster.fresh)
        self._hear(members, host)
        if host == self._host:
            self.roster.hush([n.card.id for n in members if n.card.id not in spreading])

    def _receive_compare(self, sender: PeerId, theirs: Compare, reply: str) -> None:
        mine = self.roster.digests()
        differing = [i for i, (a, b) in enumerate(zip(mine, theirs.digests, strict=False)) if a != b]
        if differing:
            self._tell(sender, reply, Sync, differing)
            if not theirs.reply:
                self._send(sender, Compare(mine, reply=True), reply)

    def _hear(self, news: Sequence[News], sender: PeerId) -> None:
        """Take news to the roster, and see to what follows from it for probing."""
        was_dead, incarnation = sender in self.roster.dead, self.incarnation
        for piece in news:
            self.roster.hear(piece, self._now)
            if piece.card.id == sender and self.roster.record(sender) is None:
                reason = objection(piece.card, self.card)
                if reason:
                    self._effects.append(Send(sender, Refused(reason), piece.card.address))
        self._notice()
        if self.incarnation > incarnation:  # it refuted: who had to be told so is slow itself, or badly connected
            self.prober.slower(+1)
            self._send(sender, Sync([self.roster.own(self._now)]))
        if was_dead and sender in self.roster.living:
            self._compare(sender)  # its half may know others whom this one holds dead

    # ------------------------------------------------------------------------------------------------------------------
    # Time
    # ------------------------------------------------------------------------------------------------------------------

    def was_busy(self, now: float) -> None:
        """This process worked since the last call, too hard to be heard: it is not asleep. If others hold it dead by
        now, it hears so and refutes."""
        self.prober.late()
        self.roster.excuse(max(0.0, now - self._now))
        self._now = max(now, self._now)

    def _advance(self, now: float) -> None:
        gap_s = now - self._now
        if gap_s > self.preset.ack_s and not self.over:
            if self.asleep(now):
                self.over = True
                self._effects.append(Asleep(gap_s))
            else:
                self.prober.late()
                self.roster.excuse(gap_s)
        self._now = max(now, self._now)

    def _step_gossip(self) -> None:
        doubts = self.roster.doubts
        if self._now < self._next_gossip or not (self.roster.fresh or doubts):
            return
        self._next_gossip = self._now + self.preset.gossip_s
        if self.roster.fresh:
            for peer in self.roster.pick(self._rng, FANOUT):
                self._send(peer, Sync(self._news(peer)))
        for peer in self._rng.sample(list(doubts), min(ASKS, len(doubts))):
            del doubts[peer]
            self.prober.ping(peer, self._now)

    def _step_sync(self) -> None:
        if self._now >= self._next_sync:
            self._next_sync = self._now + self.preset.sync_s
            for peer in self.roster.pick(self._rng, 1):
                self._compare(peer)

    def _step_reach(self) -> None:
        """Try one of the dead or one of the seeds, so that halves which lost each other meet again."""
        if self._now < self._next_reach:
            return
        self._next_reach = self._now + self.preset.reach_s
        self.roster.forget(self._now)
        dead = [peer for peer, r in self.roster.dead.items() if r.state == "dead" and not r.replaced]
        here = {card.address for card in self.alive}
        seeds = [a for a, rest in self._seeds.items() if self._now >= rest and a not in here]
        if seeds and self.roster.living and (not dead or self._rng.random() < 0.5):
            self._asked_seed = self._rng.choice(seeds)
            self._hello(self._asked_seed)
        elif dead:
            peer = self._rng.choice(dead)
            self.prober.ping(peer, self._now)

    def _step_contact(self) -> None:
        if self.roster.living or not self._seeds or self._now < self._next_contact:
            return
        self._asked_seed = ""
        self._contact_wait = min(2 * self._contact_wait, CONTACT_MAX_S)
        self._next_contact = self._now + self._contact_wait
        for address in self._rng.sample(list(self._seeds), min(SHOUT, len(self._seeds))):
            self._hello(address)

    # ------------------------------------------------------------------------------------------------------------------
    # Small things
    # ------------------------------------------------------------------------------------------------------------------

    def _notice(self) -> None:
        """Hand on what happened in the roster; who joined is probed within this round."""
        for effect in self.roster.effects:
            self._effects.append(effect)
            if isinstance(effect, Joined):
                self.prober.joined(effect.card.id)
                self._contact_wait = CONTACT_S
                if not self._contacted:
                    self._contacted = True
                    self._effects.append(Contacted())
        self.roster.effects.clear()

    def _take(self) -> list[Effect]:
        self._notice()
        effects, self._effects = self._effects, []
        return effects

    def _news(self, to: PeerId) -> list[News]:
        return self.roster.news(to, self._now)

    def _send(self, to: PeerId, message: Message, address: str = "") -> None:
        record = self.roster.record(to)
        if record or address:
            self._effects.append(Send(to, message, record.card.address if record else address))

    def _tell(
        self, to: PeerId, address: str, kind: type[Sync] | type[Welcome], parts: Sequence[int] = ALL_PARTS
    ) -> None:
        """All that is known of these parts of the mesh, in messages that fit a frame."""
        news = self.roster.everybody(to, self._now, parts)
        for start in range(0, len(news), CHUNK):
            self._send(to, kind(news[start : start + CHUNK]), address)

    def _compare(self, peer: PeerId) -> None:
        self._send(peer, Compare(self.roster.digests()))

    def _shout(self, news: News) -> None:
        for peer in self.roster.pick(self._rng, SHOUT):
            self._send(peer, Sync([news]))

    def _hello(self, address: str) -> None:
        self._effects.append(Send("", Hello(self.roster.own(self._now).card, self.incarnation), address))

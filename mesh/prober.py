"""Asks the others whether they are alive: SWIM's failure detector, slowed by Lifeguard's awareness. Pure.

Every period the next peer of a shuffled round is pinged. After ``ack_s`` of silence three others are asked to ping it
too; each passes an ``Ack`` on, or says ``Nack`` in time when it heard none. When the period ends without an Ack the
peer is accused, and from then on told so every ``ack_s`` until it refutes or is dead: one lost message must not kill.
A new member is put at a random place of the running round.

Awareness (Lifeguard section IV.A) counts signs that it is this peer which is slow: helpers that sent no Nack either, a
refutation it had to make, a clock that ran late. Each makes its periods longer by one, a successful probe shorter.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mesh.identity import PeerId
from mesh.presets import Preset
from mesh.roster import Record, Roster
from transport.messages import Ack, Message, Nack, Ping, PingReq

HELPERS = 3  # asked to ping a silent peer: one good path among three is likely even at 30% loss
AWARENESS_MAX = 3  # a slow peer probes at most four times slower: it must still notice the dead
MAX_RELAYS = 256  # pings made for others, waiting for an answer

Sender = Callable[[PeerId, Message, str], None]
"""Send a message to a peer; the address, if not empty, serves when its card is unknown."""


@dataclass
class _Probe:
    seq: int
    target: PeerId
    incarnation: int
    ask_at: float
    fail_at: float
    helpers: Sequence[PeerId] | None = None
    nacks: int = 0


@dataclass
class _Relay:
    requester: PeerId
    seq: int
    target: PeerId
    nack_at: float
    nacked: bool = False


class Prober:
    def __init__(self, roster: Roster, preset: Preset, rng: random.Random, now: float, send: Sender):
        self.awareness = 0
        self.relays: dict[int, _Relay] = {}
        self._roster, self._preset, self._rng, self._send = roster, preset, rng, send
        self._me = roster.card.id
        self._round: list[PeerId] = []
        self._probe: _Probe | None = None
        self._last_seq = 0
        self._next_probe = now + rng.random() * preset.period_s
        self._next_telling = now

    def joined(self, peer: PeerId) -> None:
        self._round.insert(self._rng.randrange(len(self._round) + 1), peer)

    def late(self) -> None:
        """This peer did not run for a while: the Ack may lie unread, so ask again and accuse nobody."""
        self.slower(+1)
        if self._probe:
            self._round.append(self._probe.target)
            self._probe = None

    def slower(self, change: int) -> None:
        self.awareness = min(AWARENESS_MAX, max(0, self.awareness + change))

    def ping(self, peer: PeerId, now: float) -> int:
        """Ping it, and tell it what is held against it; returns the sequence number."""
        self._last_seq += 1
        self._send(peer, Ping(self._last_seq, self._roster.news(peer, now)), "")
        return self._last_seq

    # What others say --------------------------------------------------------------------------------------------------

    def receive_ack(self, sender: PeerId, seq: int, now: float) -> None:
        probe, relay = self._probe, self.relays.get(seq)
        if probe and seq == probe.seq and (sender == probe.target or sender in (probe.helpers or ())):
            self._probe = None
            self.slower(-1)
        elif relay and sender == relay.target:
            del self.relays[seq]
            self._send(relay.requester, Ack(relay.seq, self._roster.news(relay.requester, now)), "")

    def receive_nack(self, sender: PeerId, seq: int) -> None:
        if self._probe and seq == self._probe.seq and sender in (self._probe.helpers or ()):
            self._probe.nacks += 1

    def receive_request(self, requester: PeerId, seq: int, target: PeerId, reply: str, now: float) -> None:
        if self._roster.record(target) is None:
            self._send(requester, Nack(seq, self._roster.news(requester, now)), reply)
            return
        wait_s = 0.6 * (self._preset.period_s - self._preset.ack_s)  # the Nack must be back before the period ends
        self.relays[self.ping(target, now)] = _Relay(requester, seq, target, now + wait_s)
        if len(self.relays) > MAX_RELAYS:
            del self.relays[next(iter(self.relays))]

    # Time -------------------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        self._step_probe(now)
        self._step_accused(now)
        self._step_relays(now)

    def _step_probe(self, now: float) -> None:
        probe = self._probe
        if probe and now >= probe.fail_at:
            self._probe = None
            self._fail(probe, now)
        elif probe and probe.helpers is None and now >= probe.ask_at and not self._roster.is_busy(probe.target, now):
            probe.helpers = self._roster.pick(self._rng, HELPERS, but=probe.target)
            for helper in probe.helpers:
                self._send(helper, PingReq(probe.seq, probe.target, self._roster.news(helper, now)), "")
        if now < self._next_probe:
            return
        slowly = 1 + self.awareness
        self._next_probe = now + slowly * self._preset.period_s
        target = self._next_target()
        if target:
            seq = self.ping(target.card.id, now)
            ask_at = now + slowly * self._preset.ack_s
            self._probe = _Probe(seq, target.card.id, target.incarnation, ask_at, self._next_probe)

    def _next_target(self) -> Record | None:
        if not self._round:
            self._round = list(self._roster.living)
            self._rng.shuffle(self._round)
        while self._round:
            record = self._roster.living.get(self._round.pop())
            if record:
                return record
        return None

    def _fail(self, probe: _Probe, now: float) -> None:
        record = self._roster.living.get(probe.target)
        if record is None or self._roster.is_busy(probe.target, now):
            return
        self.slower(len(probe.helpers) - probe.nacks if probe.helpers else 1)
        if record.incarnation == probe.incarnation:  # else it has spoken up since
            self._roster.accuse(record, self._me, now)
            self._next_telling = now

    def _step_accused(self, now: float) -> None:
        if now < self._next_telling:
            return
        self._next_telling = now + self._preset.ack_s
        for peer, record in self._roster.suspects.items():
            if self._me in record.accusers:
                self.ping(peer, now)

    def _step_relays(self, now: float) -> None:
        for number, relay in list(self.relays.items()):
            if now >= relay.nack_at + self._preset.period_s:
                del self.relays[number]
            elif now >= relay.nack_at and not relay.nacked:
                relay.nacked = True  # a late Ack is passed on all the same
                self._send(relay.requester, Nack(relay.seq, self._roster.news(relay.requester, now)), "")

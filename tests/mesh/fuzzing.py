"""Nonsense from somebody who holds the right key: messages that are damaged, and sound ones that say absurd things.

``Nonsense`` makes the frames, from one seed. It starts from valid messages of every class, made from the wire types
themselves, with the ids, addresses and ballots of the mesh that is to be confused; half of the frames are then damaged.
Left out is what the others must follow when a member says it (``docs/security.md``: members trust each other): that the
run is finished, that a member has moved to another address, a counter or incarnation near the end of its range.

``Confused`` is a real member of the mesh that sends them.
"""

import random
import time
from collections.abc import Sequence
from typing import Any, get_args

import msgspec
import msgspec.inspect as mi
import numpy as np
import zmq

from mesh.identity import PeerCard
from mesh.peer import Peer
from mesh.secret import Keys
from mesh.version import Ballot, Lineage, Version
from transport import codec
from transport.messages import Announce, Answer, Body, Envelope, Hello, Message, News, Probe, Segment, Span

KINDS: tuple[type[Message], ...] = get_args(Body)
POOL = 12  # valid messages of each class kept to damage; each is replaced now and then
FRESH = 0.02  # how often
TEXTS = ("", "x", "ä" * 300, "0" * 64, "tcp://127.0.0.1:1", "tcp://127.0.0.1:99999", "tcp://[::1]:7", "\0", "a\nb")
HEADS = b"\x90\x91\x9f\xdc\xdd\xc4\xc5\xc6\xd9\xda\xdb\x80\xde\xdf\xcf\xd3\xcb\xca\xc0\xc1\xc2\xc3\xc7\xc9\xd4"
PATIENCE_S = 60.0


class Nonsense:
    def __init__(self, seed: int, run: str, sender: str, reply: str, to: str, cards: Sequence[PeerCard]):
        self.rng = random.Random(seed)
        self.run, self.sender, self.reply, self.to = run, sender, reply, to
        self.cards = list(cards)
        self.ids = [card.id for card in cards]
        self.ballots = [Ballot(n, peer) for n in range(1, 4) for peer in self.ids]
        self._pool: dict[type, list[list[bytes]]] = {kind: [] for kind in KINDS}
        self._types = {kind: mi.type_info(kind) for kind in KINDS}

    def frames(self) -> list[bytes]:
        """One message: as it should be, but absurd, or damaged."""
        while True:
            kind = self.rng.choice(KINDS)
            pool = self._pool[kind]
            if len(pool) < POOL:
                pool.append(self.message(kind))
            elif self.rng.random() < FRESH:
                pool[self.rng.randrange(POOL)] = self.message(kind)
            frames = list(self.rng.choice(pool))
            if self.rng.random() < 0.5:
                for _ in range(self.rng.randint(1, 3)):
                    self.damage(frames)
            if self._fair(frames):
                return frames

    def message(self, kind: type[Message]) -> list[bytes]:
        while True:
            body = self.value(self._types[kind])
            to = self.rng.choice([self.to] * 9 + ["", self.rng.choice(self.ids)])
            reply = self.rng.choice([self.reply] * 9 + [self.rng.choice(TEXTS)])
            run = self.run if self.rng.random() < 0.95 else "another"
            try:
                return [bytes(f) for f in codec.encode(Envelope(run, self.sender, to, reply[:256], body))]
            except ValueError:
                continue  # too much for one message

    # -- what a type admits --------------------------------------------------------------------------------------------

    def value(self, node: mi.Type, extra: dict | None = None) -> Any:
        r = self.rng
        match node:
            case mi.Metadata():
                return self.value(node.type, node.extra)
            case mi.CustomType():
                assert extra, "an array field without a dtype"
                n = r.choice([0, 1, 2, 7, 300, 2_000, codec.FRAME_BYTES // 8 + 3 if r.random() < 0.02 else 5])
                return np.frombuffer(r.randbytes(8 * n), np.uint8)[: n * np.dtype(extra["dtype"]).itemsize].view(
                    extra["dtype"]
                )
            case mi.StructType():
                return self._struct(node)
            case mi.UnionType():
                return self.value(r.choice(node.types))
            case mi.ListType() | mi.VarTupleType():
                most = node.max_length or 1_000
                n = min(most, r.choice([0, 1, 1, 2, 3, 8, most if r.random() < 0.02 else 1]))
                made = [self.value(node.item_type) for _ in range(n)]
                return tuple(made) if isinstance(node, mi.VarTupleType) else made
            case mi.TupleType():
                return tuple(map(self.value, node.item_types))
            case mi.DictType():
                n = r.randrange(4)
                return {self.value(node.key_type): self.value(node.value_type) for _ in range(n)}
            case mi.IntType():
                low = node.ge if node.ge is not None else -(2**63) if node.gt is None else node.gt + 1
                high = node.le if node.le is not None else (2**63 if node.lt is None else node.lt) - 1
                return min(high, max(low, r.choice([0, 1, 2, 3, 8, 64, r.randrange(1 << 16), 1 << 31, low, high])))
            case mi.StrType():
                text = r.choice([r.choice(TEXTS), r.choice(self.ids), r.choice(self.cards).address])
                return text[: node.max_length]
            case mi.BytesType():
                return r.randbytes(r.choice([0, 1, 40, node.max_length or 1_000]))
            case mi.FloatType():
                return r.choice([0.0, -1.0, 1e-300, 1e300, float("inf"), float("-inf"), float("nan"), r.random()])
            case mi.BoolType():
                return r.random() < 0.5
            case mi.NoneType():
                return None
            case mi.LiteralType():
                return r.choice(node.values)
        raise AssertionError(f"the wire has a type that is not known here: {node}")

    def _struct(self, node: mi.StructType) -> Any:
        r = self.rng
        if node.cls is Ballot:
            return r.choice(self.ballots) if r.random() < 0.8 else Ballot(r.randrange(100), r.choice(TEXTS)[:64])
        if node.cls is Lineage and r.random() < 0.8:
            terms = sorted(r.sample(self.ballots, r.randrange(3)))
            return Lineage(tuple((term, i) for i, term in enumerate(terms)))
        made = {f.name: self.value(f.type) for f in node.fields}
        if node.cls is News and r.random() < 0.5:  # of somebody who is there
            made |= {"card": r.choice(self.cards), "incarnation": r.randrange(4)}
        elif node.cls is PeerCard and r.random() < 0.5:
            made |= {"id": self.sender, "agreed": self.cards[0].agreed}
        elif node.cls is Probe:
            made["logprobs"] = np.zeros(max(0, len(made["tokens"]) - 1), np.float32)
        elif node.cls is Segment:
            n = len(made["tokens"]) if made["sampled"] else 0
            spans = [Span(self.value(mi.type_info(Version)), 0, n)] if n else []
            made |= {"logprobs": np.full(n, r.choice([-1.0, np.nan, np.inf]), np.float32), "spans": spans}
        return node.cls(**made)

    # -- damage --------------------------------------------------------------------------------------------------------

    def damage(self, frames: list[bytes]) -> None:
        r = self.rng
        i = r.randrange(len(frames)) if r.random() < 0.2 else 0
        data = bytearray(frames[i])
        at = r.randrange(len(data)) if data else 0
        match r.randrange(12):
            case 0 | 1 if data:
                data[at] ^= 1 << r.randrange(8)
            case 2 if data:
                data[at] = r.randrange(256)
            case 3 | 4 if data:
                data[at] = r.choice(HEADS)  # another type, or a length of four bytes that are none
            case 5:
                data[at : at + 5] = r.choice(HEADS).to_bytes() + r.choice([b"\xff" * 4, b"\xff" * 8, b"\0\0\0\1"])
            case 6:
                del data[at:]
            case 7:
                del data[at : at + r.randrange(1, 9)]
            case 8:
                data[at:at] = data[at : at + r.randrange(1, 64)]
            case 9:
                data[at:at] = r.choice([b"\x91", b"\x81", b"\xdd\0\0\0\1"]) * r.choice([3, 600, 100_000])
            case 10:
                frames[i:i] = [r.randbytes(r.choice([0, 1, 100]))] * r.choice([1, 2, 50])
                return
            case 11 if len(frames) > 1:
                del frames[i]
                return
        frames[i] = bytes(data)

    def _fair(self, frames: list[bytes]) -> bool:
        """Whether it is nothing that the others must follow."""
        try:
            envelope = codec.decode(frames)
        except codec.Malformed:
            return True
        body = envelope.body
        if isinstance(body, Answer) and body.finished:
            return False
        news = [n for n in (*getattr(body, "news", ()), *getattr(body, "members", ())) if isinstance(n, News)]
        told = [(n.card, n.incarnation) for n in news]
        told += [(body.card, body.incarnation)] if isinstance(body, Hello) else []
        at = {card.id: (card.address, card.bulk_address) for card in self.cards}
        for card, incarnation in told:
            if card.id in at and (incarnation > 1_000 or at[card.id] != (card.address, card.bulk_address)):
                return False
        return _highest_counter(body) < 1 << 40


def _highest_counter(value: Any) -> int:
    if isinstance(value, Ballot):
        return value.counter
    if isinstance(value, PeerCard):
        return value.highest_term
    if isinstance(value, msgspec.Struct):
        return max((_highest_counter(getattr(value, name)) for name in value.__struct_fields__), default=0)
    if isinstance(value, list | tuple):
        return max(map(_highest_counter, value), default=0)
    return 0


class Confused:
    """A member that has joined as everybody does, and sends nonsense to ``target`` beside it."""

    def __init__(self, peer: Peer, keys: Keys, target: PeerCard, seed: int):
        self.peer, self.target = peer, target
        cards = [card for card in peer.live() if card.id != target.id] + [target]
        self.nonsense = Nonsense(seed, peer.run, peer.id, peer.address, target.id, cards)
        for kind in ("weights", "gradients"):
            peer.on_go(kind, lambda go: self._learn(go.ballot))
        peer.on(Announce, lambda _, announce: self._learn(announce.ballot))
        peer.on(Answer, lambda _, answer: [self._learn(term) for term, _ in answer.lineage.terms])
        self._context = zmq.Context()
        self._sockets = [self._dealer(address, keys) for address in (target.address, target.bulk_address)]
        self.sent = 0

    def _dealer(self, address: str, keys: Keys) -> zmq.Socket:
        dealer = self._context.socket(zmq.DEALER)
        dealer.linger = 0
        dealer.curve_serverkey = dealer.curve_publickey = keys.public
        dealer.curve_secretkey = keys.private
        dealer.connect(address)
        return dealer

    def _learn(self, ballot: Ballot | None) -> None:
        """Speak of what is there: messages of unknown formations are dropped at the door."""
        if ballot is not None and ballot not in self.nonsense.ballots[-8:]:
            self.nonsense.ballots[-8:] = [*self.nonsense.ballots[-7:], ballot]

    def send(self, count: int) -> None:
        """So many messages, as fast as they are taken."""
        for _ in range(count):
            frames = self.nonsense.frames()
            dealer = self._sockets[self.nonsense.rng.random() < 0.2]
            deadline = time.monotonic() + PATIENCE_S
            while not dealer.poll(100, zmq.POLLOUT):
                assert time.monotonic() < deadline, f"{self.target.name} takes nothing any more"
            dealer.send_multipart(frames)
            self.sent += 1

    def close(self) -> None:
        self._context.destroy(linger=0)

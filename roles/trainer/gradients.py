"""A trainer's part in the gradient formation: drives ``Company`` (``acts.py`` has the contract) in a real peer.

Three threads meet here. The peer's *loop* owns the Company, the handover of state to a newcomer, and every decision.
The *mover* builds the groups and runs the all-reduces, so that none of them waits for a gradient. The trainer's *main*
thread computes gradients and takes optimizer steps; it is told what to do through ``events``, in order, and woken.

What is reduced is a copy: the gradient of this trainer stays with it until the step is applied. With each gradient
rides what its owner brought (``Brought``: which prompts and tokens, for everybody's records), one slot of bytes a
trainer, summed with the zeros of the others. A trainer alone reduces nothing and copies nothing.

Whether a trainer is among the contributors says that it may bring something; what was brought is what was reduced.
"""

import collections
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch
import xxhash
from msgspec import Struct
from torch import Tensor

from mesh.config import Trainer as Settings
from mesh.effects import Note, Send
from mesh.identity import PeerId
from mesh.version import Ballot
from roles.trainer.acts import (
    STEP_MESSAGES,
    Abandon,
    Apply,
    Build,
    Convene,
    Diverged,
    LeftBehind,
    Opened,
    Reduce,
    Transfer,
)
from roles.trainer.company import Company
from roles.trainer.handover import Confirmed, Giving, Loaded, Taking
from roles.trainer.step import Timing
from transport import spans
from transport.accounts import Row
from transport.formation import Formation, FormationBroken
from transport.messages import Go, Member, Place, StateAsk, StateOffer, StateTaken, StateTell, StateTensors
from transport.weights.mover import Build as BuildGroup
from transport.weights.mover import Mover

TICK_S = 0.05
PIECE_BYTES = 64 << 20  # of one all-reduce operation
PIECE_S = 15.0  # its deadline; a member known to be dead ends it at once
SLOT_BYTES, SLOT_BYTES_A_GROUP = 40 << 10, 128  # prompts given up, and figures; a group's part of a row
MOST_NAMES = 1024
ALONE = "alone"  # the digest of a reduction that there was no need to make

Event = Opened | Apply | Transfer | Loaded | LeftBehind | Diverged


class Brought(Struct, frozen=True, array_like=True):
    """What one trainer brings to a step: sampled tokens in the loss's denominator, its groups, and figures whose sums
    over all trainers are the step's."""

    tokens: int
    row: Row
    figures: dict[str, float] = {}


@dataclass(frozen=True)
class Contribution:
    """A gradient that is ready for ``step``: float32 (parameters,), summed over this trainer's samples; None when it is
    alone, and the gradient is where the optimizer looks for it."""

    step: int
    brought: Brought
    gradient: Tensor | None


@dataclass(frozen=True)
class Reduction:
    """What (ballot, step) came to. ``gradient`` is None for a trainer alone, whose own it is."""

    gradient: Tensor | None
    brought: dict[PeerId, Brought]

    @property
    def tokens(self) -> int:
        return sum(b.tokens for b in self.brought.values())


def timing(settings: Settings, pieces: int) -> Timing:
    """Deadlines of a step: above those that its operations have."""
    return Timing(
        step_wait_s=settings.step_wait_s,
        admit_interval_s=settings.admit_interval_s,
        split_wait_s=settings.split_wait_s,
        reduce_s=30.0 + pieces * PIECE_S,
    )


class Gradients:
    """Make it before the peer starts (it registers handlers), ``begin`` after it has joined. Methods marked *main* are
    the trainer's thread's; all else runs on the loop.

    ``size``: parameters in the flat gradient; ``groups``: of a step, over all trainers; ``state_bytes`` bounds what a
    newcomer takes; ``opened_term`` keeps a term's counter on disk, ``wake`` wakes the main thread."""

    def __init__(
        self,
        peer: Any,
        build: BuildGroup,
        *,
        size: int,
        groups: int,
        device: torch.device,
        state_bytes: int,
        highest_term: Callable[[], int],
        opened_term: Callable[[int], None],
        wake: Callable[[], None],
    ):
        self.peer = peer
        self.events: collections.deque[Event] = collections.deque()
        self.company: Company | None = None
        self.tensors: dict[PeerId, StateTensors] = {}  # of those that differ
        self._size, self._device, self._state_bytes = size, device, state_bytes
        self._slot = SLOT_BYTES + SLOT_BYTES_A_GROUP * groups
        self._highest_term, self._opened_term, self._wake = highest_term, opened_term, wake
        self._build = build
        self._mover = Mover(peer, self._built, self._formed, self._failed, name="mesh-gradients")
        self._names: dict[PeerId, str] = {}
        self._go: Go | None = None
        self._contribution: Contribution | None = None
        self._waiting: Reduce | None = None  # for the copy of a gradient that was computed alone
        self._reductions: dict[tuple[Ballot, int], Reduction] = {}
        self._giving: Giving | None = None
        self._taking: Taking | None = None
        for kind in STEP_MESSAGES:
            peer.on(kind, self._step_message)
        peer.on(StateOffer, self._offered)
        peer.on(StateTell, self._told)
        peer.on(StateAsk, self._asked)
        peer.on(StateTaken, self._asked)
        peer.on(StateTensors, self._differs)
        peer.on_go("gradients", self._going)
        peer.on_members(self._members)
        peer.every(TICK_S, self._tick)

    # ------------------------------------------------------------------------------------------------------------------
    # Main thread
    # ------------------------------------------------------------------------------------------------------------------

    def begin(self, place: Place, expected: int) -> None:
        """*main*: look for the other trainers. ``expected`` were announced to start together; 0: nobody knows."""

        def run() -> None:
            pieces = -(-4 * self._size // PIECE_BYTES)
            self.company = Company(
                self.peer.id,
                place,
                time.monotonic(),
                timing=timing(self.peer.config.trainer, pieces),
                name=self.name_of,
                expected=expected,
            )
            self._members()

        self.peer.call(run)

    @property
    def alone(self) -> bool:
        """Whether nobody shares this trainer's formation, nor is being taken in."""
        company = self.company
        return company is not None and len(company.members) <= 1

    @property
    def place(self) -> Place:
        assert self.company is not None
        return self.company.place

    def ready(self, step: int, contribution: Contribution | None) -> None:
        """*main*: the gradient for ``step`` is there, or (None) there is nothing to contribute."""

        def run() -> None:
            self._contribution = contribution
            brought = contribution.brought if contribution is not None else None
            groups, tokens = (len(brought.row.groups), brought.tokens) if brought is not None else (0, 0)
            self._run(self._company.ready(step, groups, tokens, time.monotonic()))
            if self._waiting is not None and (contribution is None or contribution.gradient is not None):
                reduce, self._waiting = self._waiting, None
                self._reduce(reduce)

        self.peer.post(run)

    def reduction(self, apply: Apply) -> Reduction:
        """*main*: what this step applies."""
        return self.peer.call(lambda: self._reductions[apply.ballot, apply.step])

    def applied(self, step: int, trained: int, state: str) -> None:
        """*main*: the optimizer step is taken; ``trained`` counts the groups in the weights, ``state`` is a digest of
        weights and optimizer."""

        def run() -> None:
            self._contribution = None
            self._reductions = {key: r for key, r in self._reductions.items() if key[1] > step}
            self._run(self._company.applied(step, trained, state, time.monotonic()))

        self.peer.call(run)

    def give(self, transfer: Transfer, place: Place, data: bytes) -> None:
        """*main*: the state that this transfer is to carry."""
        giving = Giving(transfer.newcomer, transfer.ballot, transfer.step, transfer.members, place, data)

        def run() -> None:
            if self._company.ballot == transfer.ballot:
                self._giving = giving

        self.peer.call(run)

    def taken(self, loaded: Loaded, reason: str) -> None:
        """*main*: what was handed over is loaded, or why it could not be."""
        offer = loaded.offer

        def run() -> None:
            now = time.monotonic()
            if not reason:
                self._contribution = None
                self._run(self._company.admitted(offer.ballot, offer.members, offer.place, now))
            if self._taking is not None and self._taking.offer.ballot == offer.ballot:
                self._run(self._taking.taken(reason, now))

        self.peer.call(run)

    def tell_tensors(self, message: StateTensors, members: Sequence[PeerId]) -> None:
        """*main*: what each of this trainer's tensors is, to those who differ."""
        self.peer.call(lambda: self._run([Send(m, message) for m in members if m != self.peer.id]))

    def close(self) -> None:
        self._mover.close()

    # ------------------------------------------------------------------------------------------------------------------
    # Messages and time
    # ------------------------------------------------------------------------------------------------------------------

    @property
    def _company(self) -> Company:
        assert self.company is not None, "begin comes first"
        return self.company

    def _step_message(self, sender: PeerId, message: Any) -> None:
        if self.company is not None:
            self._run(self.company.receive(sender, message, time.monotonic()))

    def _members(self) -> None:
        cards = self.peer.live("trainer")
        for card in cards:
            self._names.pop(card.id, None)
            self._names[card.id] = f"{card.name}" if "@" in card.name else f"{card.name}@{card.host}"
        while len(self._names) > MOST_NAMES:
            del self._names[next(iter(self._names))]
        if self.company is None:
            return
        self._run(self.company.live([card.id for card in cards], time.monotonic()))
        higher = max(self.peer.live(), key=lambda card: card.highest_term, default=None)
        ballot = self.company.ballot
        if self.company.first and higher is not None and higher.highest_term > ballot.counter:
            reason = f"{higher.name} has seen term {higher.highest_term}: what is published here would be refused"
            self._run(self.company.broken(ballot, reason, time.monotonic()))

    def name_of(self, peer: PeerId) -> str:
        """``name@host`` of a trainer, also of one that is gone. Any thread."""
        return self._names.get(peer, f"peer {peer}")

    def _tick(self) -> None:
        if self.company is None:
            return
        now = time.monotonic()
        self._run(self.company.tick(now))
        if self._giving is not None:
            self._run(self._giving.tick(now))
        if self._taking is not None:
            self._run(self._taking.tick(now))
            if self._taking.over or self.company.state == "in":
                self._taking = None

    def _going(self, go: Go) -> None:
        if self.company is None:
            return
        self._go = go
        self._run(self.company.forming(go.ballot, [m.peer for m in go.members], time.monotonic()))

    # ------------------------------------------------------------------------------------------------------------------
    # Effects
    # ------------------------------------------------------------------------------------------------------------------

    def _run(self, effects: Sequence[Any]) -> None:
        for effect in effects:
            match effect:
                case Send(to, message, _, bulk):
                    self.peer.send(to, message, bulk=bulk)
                case Note(text, level):
                    self.peer.note(text, level)
                case Convene(members, above):
                    seen = [card.highest_term for card in self.peer.live()]
                    self.peer.convening["gradients"].raise_floor(max(above, self._highest_term(), *seen))
                    self.peer.convene("gradients", [Member(p) for p in members])
                case Build(ballot):
                    assert self._go is not None
                    assert self._go.ballot == ballot
                    self._mover.form(self._go)
                case Abandon(ballot):
                    self._giving = self._waiting = None
                    self._mover.disband(ballot)
                case Reduce():
                    self._reduce(effect)
                case Confirmed(newcomer, reason):
                    self._confirmed(newcomer, reason)
                case Opened():
                    self._reductions.clear()
                    self._tell(effect)
                case Apply() | Transfer() | Loaded() | LeftBehind() | Diverged():
                    self._tell(effect)
                case _:
                    raise AssertionError(f"unknown effect {effect}")

    def _tell(self, event: Event) -> None:
        self.events.append(event)
        self._wake()

    def _confirmed(self, newcomer: PeerId, reason: str) -> None:
        self._giving = None
        now = time.monotonic()
        if reason:
            self._run(self._company.transfer_failed(newcomer, reason, now))
        else:
            self._run(self._company.transferred(newcomer, now))

    # ------------------------------------------------------------------------------------------------------------------
    # Groups and reductions
    # ------------------------------------------------------------------------------------------------------------------

    def _built(self, go: Go, abandon: threading.Event) -> Formation:
        """On the mover. The term is on disk before anything can be published under it."""
        self._opened_term(go.ballot.counter)
        return self._build(go, abandon)

    def _formed(self, formation: Formation) -> None:
        self._run(self._company.formed(formation.ballot, time.monotonic()))

    def _failed(self, go: Go, reason: str, _: Sequence[Member]) -> None:
        self._run(self._company.broken(go.ballot, reason, time.monotonic()))

    def _reduce(self, reduce: Reduce) -> None:
        mine = self._contribution
        if mine is None or mine.step != reduce.step or self.peer.id not in reduce.contributors:
            mine = None
        if mine is not None and mine.gradient is None and len(self._company.members) > 1:
            self._waiting = reduce  # it was computed alone: ``ready`` is called again, with a copy
            return
        if len(self._company.members) == 1:
            brought = {self.peer.id: mine.brought} if mine is not None else {}
            self._reductions[reduce.ballot, reduce.step] = Reduction(None, brought)
            self.peer.post(lambda: self._reduced(reduce, ALONE))
            return
        self._mover.run(reduce.ballot, lambda formation, abandon: self._all_reduce(formation, abandon, reduce, mine))

    def _reduced(self, reduce: Reduce, digest: str) -> None:
        self._run(self._company.reduced(reduce.ballot, reduce.step, digest, time.monotonic()))

    def _reduce_failed(self, reduce: Reduce, reason: str) -> None:
        self._run(self._company.reduce_failed(reduce.ballot, reduce.step, reason, time.monotonic()))

    def _all_reduce(
        self, formation: Formation | None, abandon: threading.Event, reduce: Reduce, mine: Contribution | None
    ) -> None:
        """On the mover. The buffers are new each time: one of an operation that was given up may still be written."""
        if formation is None:
            self.peer.post(lambda: self._reduce_failed(reduce, "its group is gone"))
            return
        began = time.perf_counter()
        try:
            gradient, slots = self._sum(formation, abandon, mine)
            members = [m.peer for m in formation.members]
            brought = unpack(slots, members)
        except (FormationBroken, msgspec.DecodeError) as e:
            reason = str(e)
            self.peer.post(lambda: self._reduce_failed(reduce, reason))
            return
        spans.record("all-reduce", began, lane="gradients", step=reduce.step)
        whole = xxhash.xxh3_64(gradient.cpu().numpy().data)
        whole.update(slots.numpy().data)
        digest = whole.hexdigest()

        def tell() -> None:
            self._reductions[reduce.ballot, reduce.step] = Reduction(gradient, brought)
            self._reduced(reduce, digest)

        self.peer.post(tell)

    def _sum(self, formation: Formation, abandon: threading.Event, mine: Contribution | None) -> tuple[Tensor, Tensor]:
        slots = torch.zeros(formation.size, self._slot, dtype=torch.uint8)
        if mine is not None:
            assert mine.gradient is not None, "a gradient for a step of several trainers was not copied"
            slots[formation.rank] = pack(mine.brought, self._slot)
            gradient = mine.gradient.clone()
        else:
            gradient = torch.zeros(self._size, dtype=torch.float32, device=self._device)
        formation.all_reduce(slots, PIECE_S, abandon)
        for piece in gradient.split(PIECE_BYTES // 4):
            formation.all_reduce(piece, PIECE_S, abandon)
        return gradient, slots

    # ------------------------------------------------------------------------------------------------------------------
    # Newcomers
    # ------------------------------------------------------------------------------------------------------------------

    def _offered(self, sender: PeerId, offer: StateOffer) -> None:
        if self.company is None or self.company.state != "out":
            return
        if self._taking is None or self._taking.offer.ballot < offer.ballot:
            self._taking = Taking(sender, offer, self._state_bytes, time.monotonic())
            much = f"{offer.nbytes / 2**20:.1f} MiB"
            self.peer.note(f"taking {much} of weights and optimizer at step {offer.step} from {self.name_of(sender)}")

    def _told(self, sender: PeerId, message: StateTell) -> None:
        if self._taking is not None:
            self._run(self._taking.receive(sender, message, time.monotonic()))

    def _asked(self, sender: PeerId, message: StateAsk | StateTaken) -> None:
        if self._giving is not None:
            self._run(self._giving.receive(sender, message))

    def _differs(self, sender: PeerId, message: StateTensors) -> None:
        if self.company is not None and sender in self.company.members:
            self.tensors[sender] = message
            self._wake()


def pack(brought: Brought, size: int) -> Tensor:
    """Into one slot: uint8 (size,), the length first. Figures are left out when they do not fit.

    Raises ValueError when the rest does not either."""
    data = msgspec.msgpack.encode(brought)
    if len(data) + 4 > size:
        data = msgspec.msgpack.encode(msgspec.structs.replace(brought, figures={}))
    if len(data) + 4 > size:
        raise ValueError(f"{len(data)} bytes of records for a step do not fit into {size}")
    slot = np.zeros(size, np.uint8)
    slot[:4] = np.frombuffer(np.uint32(len(data)).tobytes(), np.uint8)
    slot[4 : 4 + len(data)] = np.frombuffer(data, np.uint8)
    return torch.from_numpy(slot)


def unpack(slots: Tensor, members: Sequence[PeerId]) -> dict[PeerId, Brought]:
    """``slots`` uint8 (members, size): what each of them brought; who brought nothing is left out."""
    out = {}
    for peer, slot in zip(members, slots.numpy(), strict=True):
        length = int(slot[:4].view("<u4")[0])
        if length:
            out[peer] = msgspec.msgpack.decode(slot[4 : 4 + length].tobytes(), type=Brought)
    return out

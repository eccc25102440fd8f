"""What a receiver of weights takes, and which of its two shadow buffers it lies in: the receiver's end, pure.

Theory of operation. In a formation, an announced version is checked (term and number), its manifest asked for if it
is not known, and a free shadow buffer reserved: the receiver reports itself ready. At ``Begin`` the broadcast runs into
that buffer; when every bucket has verified, the version is *offered* to the engine, which takes it between two tokens,
proves it, and says so. A version that the receiver has already verified is received into scratch memory (``slot``
None): others of the formation lack it, and a collective needs all ranks.

A version that the engine could not prove is gone from here: the receiver lacks it, and may get it once more.

Two buffers, so that one may be offered or in the engine's hands while the other receives. A newer verified version
replaces one that is offered and not yet taken, unless the engine has *pinned* that one (for an evaluation). When no
buffer is free for a newer version, an offered one that is not pinned gives way to it.

Invariants:

1. A term below the highest proved is refused, and within the term a number not above those proved or offered. Only
   an engine that was restarted may take the highest once more.
2. A buffer that is offered or taken is not written until the engine has answered or its Release was emitted; one whose
   operation was abandoned, not before ``freed``.
3. A version is reported as proved only after the engine said so, and as ready only inside a formation.

``receiver.py`` executes the effects. ``take`` may be called by the engine's thread: the driver holds a lock around
every call.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from mesh.effects import Send
from mesh.identity import PeerId
from mesh.version import Ballot, Version
from transport.messages import Announce, Begin, ManifestAsk, Member, Report

REPORT_S = 1.0  # of a Report that did not change
SHADOWS = 2

Use = Literal["free", "reserved", "offered", "taken", "busy"]


@dataclass(frozen=True)
class StartReceive:
    """Take part in the broadcast; ``slot`` None: into scratch memory of one bucket."""

    ballot: Ballot
    version: Version
    attempt: int
    slot: int | None
    announce: Announce = field(compare=False)


@dataclass(frozen=True)
class Offer:
    """A verified version is ready for the engine to take."""

    version: Version
    slot: int


@dataclass(frozen=True)
class Released:
    """What lay in this shadow buffer is given up; it may be written from now on."""

    slot: int


@dataclass(frozen=True)
class Refuse:
    """Tell the user: this version of this publisher is not taken."""

    version: Version
    publisher: PeerId
    reason: str


@dataclass
class _Shadow:
    use: Use = "free"
    version: Version | None = None
    attempt: int = 0


@dataclass
class _Ready:
    announce: Announce
    slot: int | None
    receiving: bool = False

    def is_for(self, m: Announce | Begin) -> bool:
        return (self.announce.version, self.announce.attempt) == (m.version, m.attempt)


class ReceiverSchedule:
    """Inputs are methods that return effects; call ``tick`` several times a second."""

    def __init__(self) -> None:
        self.formation: tuple[Ballot, tuple[Member, ...]] | None = None
        self.publisher: PeerId = ""
        self.verified: Version | None = None
        self.proved: Version | None = None
        self.pinned: Version | None = None
        self._shadows = [_Shadow() for _ in range(SHADOWS)]
        self._manifest = ""
        self._ready: _Ready | None = None
        self._floor: Version | None = None  # highest ever proved: outlives the engine
        self._newest: Version | None = None  # ever announced
        self._buckets = 0
        self._attempt = 0
        self._refused: Version | None = None
        self._reason = ""
        self._proof: dict[str, Any] = {}
        self._sent: Report | None = None
        self._report_at = 0.0

    # ------------------------------------------------------------------------------------------------------------------
    # Inputs
    # ------------------------------------------------------------------------------------------------------------------

    def formed(self, ballot: Ballot, members: Sequence[Member], now: float) -> list[Any]:
        """The group is built; its convener is who publishes."""
        if self.formation is not None and ballot <= self.formation[0]:
            return []
        self._unready()
        self.formation, self.publisher = (ballot, tuple(members)), ballot.convener
        return self._report(now)

    def forming(self, ballot: Ballot, now: float) -> list[Any]:
        """A group of this ballot is being built, and may fail at this end alone: the present one is given up."""
        if self.formation is None or ballot <= self.formation[0]:
            return []
        return self.disbanded(self.formation[0], now)

    def disbanded(self, ballot: Ballot, now: float) -> list[Any]:
        """The formation broke."""
        if self.formation is None or self.formation[0] != ballot:
            return []
        self.formation = None
        self._unready()
        return self._report(now)

    def manifest_known(self, digest: str) -> None:
        """The manifest with this digest has arrived and the buffers for it are there."""
        self._manifest = digest

    def announced(self, publisher: PeerId, a: Announce, now: float, objection: str = "") -> list[Any]:
        """``objection``: what the driver found wrong with the announcement itself; it is then refused for that."""
        self._newest = a.version if self._newest is None else max(self._newest, a.version)
        if self.formation is None:  # whoever it is must hear that this receiver is in no formation
            self.publisher = publisher
        if self.formation is None or a.ballot != self.formation[0] or publisher != self.publisher:
            return self._report(now)
        r = self._ready
        if r is not None and (r.receiving or r.is_for(a)):
            return self._report(now, again=not r.receiving)
        objection = self._objection(a) or objection
        news = (self._refused, self._attempt) != (a.version, a.attempt)
        self._attempt, self._buckets, self._refused, self._reason = a.attempt, 0, None, ""
        if objection:
            self._unready()
            self._refused, self._reason = a.version, objection
            refuse = [Refuse(a.version, publisher, objection)] if news else []
            return [*refuse, *self._report(now, again=True)]
        if a.manifest != self._manifest:
            self._reason = "waiting for the manifest"
            return [Send(publisher, ManifestAsk(a.manifest)), *self._report(now)]
        effects = self._reserve(a)
        return [*effects, *self._report(now, again=True)]

    def began(self, publisher: PeerId, b: Begin, now: float) -> list[Any]:
        r = self._ready
        if r is None or r.receiving or r.announce.ballot != b.ballot or not r.is_for(b):
            return []
        r.receiving = True
        return [StartReceive(b.ballot, b.version, b.attempt, r.slot, r.announce)]

    def progress(self, buckets: int) -> None:
        """So many buckets of the running broadcast have arrived and verified; goes out with the next Report."""
        self._buckets = buckets

    def receive_ended(
        self, version: Version, attempt: int, ok: bool, now: float, *, reason: str = "", busy: bool = False
    ) -> list[Any]:
        """The broadcast is over. ``ok``: every bucket verified. ``reason``: why the version is refused; empty where
        only the transport failed. ``busy``: an abandoned operation may still write into the buffer, until ``freed``."""
        r = self._ready
        if r is None or not r.receiving or (r.announce.version, r.announce.attempt) != (version, attempt):
            return []
        self._ready = None
        effects: list[Any] = []
        if r.slot is not None and ok:
            for i, s in enumerate(self._shadows):
                if s.use == "offered" and s.version != self.pinned:
                    effects.append(self._free(i))
            self._shadows[r.slot].use = "offered"
            self.verified = version
            effects.append(Offer(version, r.slot))
        elif r.slot is not None:
            self._shadows[r.slot] = _Shadow(use="busy" if busy else "free")
        if reason and r.slot is not None:
            self._refused, self._reason = version, reason
            effects.append(Refuse(version, self.publisher, reason))
        return [*effects, *self._report(now)]

    def freed(self, slot: int) -> None:
        """The operation that was abandoned in this buffer has ended."""
        if self._shadows[slot].use == "busy":
            self._shadows[slot] = _Shadow()

    def take(self) -> tuple[Version, int] | None:
        """What the engine should take over now: the newest offered version, or only the pinned one; its buffer is then
        the engine's until ``applied``."""
        offered = [(s.version, i) for i, s in enumerate(self._shadows) if s.use == "offered" and s.version is not None]
        if self.pinned is not None:
            offered = [o for o in offered if o[0] == self.pinned]
        if not offered:
            return None
        version, slot = max(offered)
        self._shadows[slot].use = "taken"
        return version, slot

    def applied(
        self, version: Version, proved: bool, now: float, *, reason: str = "", **proof: str | float
    ) -> list[Any]:
        """The engine's answer to a version it took. ``proof`` has the fields of that name of ``Report``."""
        slots = [i for i, s in enumerate(self._shadows) if s.use == "taken" and s.version == version]
        if not slots:
            return []
        attempt = self._shadows[slots[0]].attempt
        effects: list[Any] = [self._free(slots[0])]
        if proved:
            self.proved = self._floor = version
            self._proof = proof
        else:
            if self.verified == version:  # it is not here any more: it may come again
                self.verified = None
                if self._ready is not None and self._ready.announce.version == version:
                    self._unready()  # for scratch memory
            if self._ready is None:
                self._attempt = attempt
            self._refused, self._reason = version, reason
            effects.append(Refuse(version, self.publisher, reason))
        return [*effects, *self._report(now)]

    def pin(self, version: Version | None) -> list[Any]:
        """Offer only this version until the pin is lifted, and keep it while it is offered."""
        self.pinned = version
        if version is not None:
            return []
        offered = [(s.version, i) for i, s in enumerate(self._shadows) if s.use == "offered" and s.version is not None]
        return [self._free(i) for v, i in offered if v < max(offered)[0]]

    def passed(self, version: Version) -> bool:
        """Whether ``version`` will not come any more: a newer one was announced, and it is not here."""
        here = any(s.version == version for s in self._shadows)
        return not here and self._newest is not None and self._newest > version

    def forget(self, now: float) -> list[Any]:
        """The engine holds nothing any more (it was restarted, or is to load and prove its version afresh): report so,
        and the newest version comes again."""
        self.verified = self.proved = None
        self._proof = {}
        return self._report(now)

    def tick(self, now: float) -> list[Any]:
        return self._report(now)

    # ------------------------------------------------------------------------------------------------------------------
    # Rules
    # ------------------------------------------------------------------------------------------------------------------

    def _objection(self, a: Announce) -> str:
        if a.version == self.verified:
            return ""
        if self._floor is not None and a.version < self._floor:  # an older term, or a lower number within it
            return f"it lies below {self._floor}, which was proved here"
        held = [s.version for s in self._shadows if s.use in ("offered", "taken") and s.version is not None]
        highest = max([*held, *([self.proved] if self.proved is not None else [])], default=None)
        if highest is not None and a.version <= highest:
            return f"it is not above {highest}, which is here"
        return ""

    def _reserve(self, a: Announce) -> list[Any]:
        """A buffer for this version: the one reserved for an older, a free one, or one whose offer gives way."""
        kept = self._ready.slot if self._ready is not None else None
        self._ready = None
        ready = _Ready(a, None)
        if a.version == self.verified:
            if kept is not None:
                self._shadows[kept] = _Shadow()
            self._ready = ready
            return []
        effects: list[Any] = []
        abandoned = any(s.use == "busy" for s in self._shadows)  # free within an operation's time-out: wait for it
        order: list[Use] = ["free"] if abandoned else ["free", "offered"]
        places = [i for use in order for i, s in enumerate(self._shadows) if s.use == use and not self._is_pinned(s)]
        slot = kept if kept is not None else next(iter(places), None)
        if slot is None:
            uses = ", ".join(f"{s.version or 'an abandoned transfer'} {s.use}" for s in self._shadows)
            self._reason = f"no shadow buffer is free ({uses})"
            return []
        if self._shadows[slot].use == "offered":
            effects.append(self._free(slot))
        self._shadows[slot] = _Shadow("reserved", a.version, a.attempt)
        ready.slot, self._ready = slot, ready
        return effects

    def _is_pinned(self, s: _Shadow) -> bool:
        return s.version is not None and s.version == self.pinned

    def _unready(self) -> None:
        if self._ready is not None and self._ready.slot is not None and not self._ready.receiving:
            self._shadows[self._ready.slot] = _Shadow()
        if self._ready is not None and not self._ready.receiving:
            self._ready = None

    def _free(self, slot: int) -> Released:
        self._shadows[slot] = _Shadow()
        return Released(slot)

    def _report(self, now: float, again: bool = False) -> list[Any]:
        """Send where this receiver is: on change, every second, and ``again`` to answer what was repeated."""
        if not self.publisher:
            return []
        r = self._ready
        report = Report(
            ballot=self.formation[0] if self.formation is not None else None,
            ready_for=r.announce.version if r is not None else None,
            attempt=self._attempt,
            buckets=self._buckets,
            verified=self.verified,
            proved=self.proved,
            refused=self._refused,
            reason=self._reason,
            **self._proof,
        )
        if report == self._sent and not again and now < self._report_at:
            return []
        self._sent, self._report_at = report, now + REPORT_S
        return [Send(self.publisher, report)]

"""What a receiver of weights takes, and which of its two shadow buffers it lies in: the receiver's end, pure.

Theory of operation. In a formation, an announced version is checked (term and number), its manifest asked for if it
is not known, and a shadow buffer reserved: the receiver reports itself ready. At ``Begin`` the broadcast runs into that
buffer; when every bucket has verified, the version is *offered* to the engine, which takes it between two tokens,
proves it, and says so. A version that the receiver has already verified is received into scratch memory (``slot``
None): others of the formation lack it, and a collective needs all ranks.

A version announced outside of any formation is *pulled* (``pull.py``) into a shadow buffer, beside whatever the
formation does; a broadcast of newer weights that needs the buffer ends the pull. A pull that was begun is finished even
when a newer version is announced meanwhile: else a publisher that is faster than the pull would be followed by nobody.

Weights that are here already under another name, whole and verified, are offered under the new one without any
transfer: a new term publishes what it holds, which is what the last one published.

A version that the engine could not prove is gone from here: the receiver lacks it, and may get it once more.

The receiver follows the publisher of the highest term it has heard of, as long as that one lives.

Two buffers (``shadows.py``), so that one may be offered or in the engine's hands while the other receives. A newer
verified version replaces one that is offered and not yet taken, unless the engine has *pinned* that one (for an
evaluation). When no buffer is free for a newer version, an offered one that is not pinned gives way to it.

Invariants:

1. A term below the highest proved is refused, and within the term a number not above those proved or offered. Only
   an engine that was restarted may take the highest once more.
2. A buffer that is offered or taken is not written until the engine has answered or its Release was emitted; one whose
   operation was abandoned, not before ``freed``.
3. A version is reported as proved only after the engine said so, and as ready only inside a formation.

``receiver.py`` executes the effects. ``take`` may be called by the engine's thread: the driver holds a lock around
every call.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from mesh.effects import Send
from mesh.identity import PeerId
from mesh.version import Ballot, Version
from transport.messages import Announce, Begin, ManifestAsk, Member, PullDecline, PullTell, Report
from transport.weights.pull import Pull, Pulled, chunk_bytes
from transport.weights.shadows import WHOLE, Shadows

REPORT_S = 1.0  # of a Report that did not change
PULL_AGAIN_S = 2.0  # after a pull that was given up
WANT_S = 2.0  # for the publisher to name somebody who holds a version that an evaluation is pinned to


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


@dataclass(frozen=True)
class Missed:
    """Tell the user: a pull was given up."""

    version: Version
    reason: str


@dataclass
class _Ready:
    announce: Announce
    slot: int | None
    receiving: bool = False

    def is_for(self, m: Announce | Begin) -> bool:
        return (self.announce.version, self.announce.attempt) == (m.version, m.attempt)


class ReceiverSchedule:
    """Inputs are methods that return effects; call ``tick`` several times a second. ``leased`` tells whether somebody
    pulls a version from here."""

    def __init__(self, leased: Callable[[Version], bool] = lambda version: False) -> None:
        self.formation: tuple[Ballot, tuple[Member, ...]] | None = None
        self.publisher: PeerId = ""
        self.verified: Version | None = None
        self.proved: Version | None = None
        self.pull: Pull | None = None
        self.pull_slot = 0
        self.pulls = self.adopted = 0
        self.pulled_bytes = 0
        self._leased = leased
        self._shadows = Shadows()
        self._manifest = ""
        self._nbytes = 0
        self._ready: _Ready | None = None
        self._floor: Version | None = None  # highest ever proved: outlives the engine
        self._newest: Version | None = None  # ever announced
        self._term: Ballot | None = None  # of the newest announced by the publisher that is followed
        self._lost = False  # the publisher is gone
        self._pull_at = float("-inf")
        self._wanted_at = float("-inf")
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

    def live(self, peers: Collection[PeerId], now: float) -> list[Any]:
        """Who is alive."""
        self._lost = self.publisher not in peers
        return self._pulling(lambda pull: pull.live(peers, now), now)

    def formed(self, ballot: Ballot, members: Sequence[Member], now: float) -> list[Any]:
        """The group is built; its convener is who publishes."""
        if self.formation is not None and ballot <= self.formation[0]:
            return []
        self._unready()
        self.formation, self.publisher, self._lost = (ballot, tuple(members)), ballot.convener, False
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

    def manifest_known(self, digest: str, nbytes: int) -> None:
        """The manifest with this digest has arrived and the buffers for it are there."""
        self._manifest, self._nbytes = digest, nbytes

    def announced(self, publisher: PeerId, a: Announce, now: float, objection: str = "") -> list[Any]:
        """``objection``: what the driver found wrong with the announcement itself; it is then refused for that."""
        if not self._follows(publisher, a.version.term):
            return []
        self._newest = a.version if self._newest is None else max(self._newest, a.version)
        if a.ballot is None:
            return self._announced_to_pull(a, now, objection)
        if self.formation is None or a.ballot != self.formation[0]:
            return self._report(now)
        r = self._ready
        if r is not None and (r.receiving or r.is_for(a)):
            return self._report(now, again=not r.receiving)
        refused = self._checked(a, objection)
        if refused is not None:
            return [*refused, *self._report(now, again=True)]
        effects = [*self._adopt(a), *self._reserve(a)]
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
        self._attempt = attempt
        effects: list[Any] = []
        if r.slot is not None and ok:
            effects += self._offer(r.slot, r.announce)
        elif r.slot is not None:
            self._shadows.put(r.slot, "busy" if busy else "free")
        if reason and r.slot is not None:
            self._refused, self._reason = version, reason
            effects.append(Refuse(version, self.publisher, reason))
        return [*effects, *self._report(now)]

    def freed(self, slot: int) -> None:
        """The operation that was abandoned in this buffer has ended."""
        if self._shadows[slot].use == "busy":
            self._shadows.put(slot, "free")

    def told(self, peer: PeerId, tell: PullTell, now: float) -> list[Any]:
        return self._pulling(lambda pull: pull.told(peer, tell, now), now)

    def declined(self, peer: PeerId, decline: PullDecline, now: float) -> list[Any]:
        return self._pulling(lambda pull: pull.declined(peer, decline, now), now)

    def checked(self, bucket: int, ok: bool, now: float) -> list[Any]:
        """The answer to ``Check``, in which nothing else came between."""
        return self._pulling(lambda pull: pull.checked(bucket, ok, now), now)

    def take(self) -> tuple[Announce, int] | None:
        """What the engine should take over now: the newest offered version, or only the pinned one; its buffer is then
        the engine's until ``applied``."""
        offered = self._shadows.offered()
        if self.pinned is not None:
            offered = [o for o in offered if o[0] == self.pinned]
        if not offered:
            return None
        _, slot = max(offered)
        announce = self._shadows[slot].announce
        assert announce is not None
        self._shadows.put(slot, "taken", announce)
        return announce, slot

    def applied(
        self, version: Version, proved: bool, now: float, *, reason: str = "", **proof: str | float
    ) -> list[Any]:
        """The engine's answer to a version it took. ``proof`` has the fields of that name of ``Report``."""
        slot = self._shadows.find(version, "taken")
        if slot is None:
            return []
        announce = self._shadows[slot].announce
        assert announce is not None
        effects: list[Any] = [self._free(slot)]
        if proved:
            self._shadows.put(slot, "kept", announce)
            self.proved = self._floor = version
            self._proof = proof
        else:
            if self.verified == version:  # it is not here any more: it may come again
                self.verified = None
                if self._ready is not None and self._ready.announce.version == version:
                    self._unready()  # for scratch memory
            self._attempt = announce.attempt
            self._refused, self._reason = version, reason
            effects.append(Refuse(version, self.publisher, reason))
        return [*effects, *self._report(now)]

    @property
    def pinned(self) -> Version | None:
        return self._shadows.pinned

    def pin(self, version: Version | None, now: float) -> list[Any]:
        """Offer only this version until the pin is lifted, and keep it while it is offered. When it has passed here
        already, the publisher may know who holds it."""
        if version != self.pinned:
            self._wanted_at = now
        self._shadows.pinned = version
        if version is not None:
            return []
        offered = self._shadows.offered()
        return [self._free(i) for v, i in offered if v < max(offered)[0]]

    def passed(self, version: Version, now: float) -> bool:
        """Whether ``version`` will not come any more: a newer one was announced, and it is not here, nor pulled."""
        if self._newest is None or self._newest <= version or self._is_coming(version):
            return False
        return version != self.pinned or now - self._wanted_at >= WANT_S

    def holds(self, version: Version) -> tuple[int, int, int] | None:
        """Where ``version`` lies whole, for who pulls it: its buffer, the bytes of a chunk, and how many there are."""
        slot = self._shadows.find(version, *WHOLE)
        if slot is None:
            return None
        announce = self._shadows[slot].announce
        assert announce is not None
        size = chunk_bytes(announce.bucket_bytes)
        return slot, size, -(-self._nbytes // size)

    def forget(self, now: float) -> list[Any]:
        """The engine holds nothing any more (it was restarted, or is to load and prove its version afresh): report so,
        and the newest version comes again, from the buffer it lies in or else from the publisher."""
        self.verified = self.proved = None
        self._proof = {}
        newest = self._shadows.given_back()
        effects = self._offer(*newest) if newest is not None else []
        return [*effects, *self._report(now)]

    def tick(self, now: float) -> list[Any]:
        return [*self._pulling(lambda pull: pull.tick(now), now), *self._report(now)]

    # ------------------------------------------------------------------------------------------------------------------
    # Rules
    # ------------------------------------------------------------------------------------------------------------------

    def _follows(self, publisher: PeerId, term: Ballot) -> bool:
        """Whether ``publisher`` is the one to follow. It must hear of this receiver even when that is in no formation,
        and one of a lower term must not, while the higher one lives."""
        if publisher != self.publisher:
            if self.publisher and not self._lost and (self._term is None or term <= self._term):
                return False
            self.publisher, self._sent, self._lost = publisher, None, False
            if self.formation is not None:
                self.formation = None
                self._unready()
        self._term = term if self._term is None else max(self._term, term)
        return True

    def _checked(self, a: Announce, objection: str) -> list[Any] | None:
        """None when ``a`` is acceptable; else what follows from that it is not, or not yet."""
        objection = self._objection(a) or objection
        news = (self._refused, self._attempt) != (a.version, a.attempt)
        self._attempt, self._buckets, self._refused, self._reason = a.attempt, 0, None, ""
        if objection:
            self._unready()
            self._refused, self._reason = a.version, objection
            return [Refuse(a.version, self.publisher, objection)] if news else []
        if a.manifest != self._manifest:
            self._reason = "waiting for the manifest"
            return [Send(self.publisher, ManifestAsk(a.manifest))]
        return None

    def _objection(self, a: Announce) -> str:
        if a.version == self.verified:
            return ""
        if self._floor is not None and a.version < self._floor:  # an older term, or a lower number within it
            return f"it lies below {self._floor}, which was proved here"
        held = self.proved
        if a.version != self.pinned:
            held = max((v for v in (held, self._shadows.highest()) if v is not None), default=None)
        return f"it is not above {held}, which is here" if held is not None and a.version <= held else ""

    # Broadcasts -------------------------------------------------------------------------------------------------------

    def _reserve(self, a: Announce) -> list[Any]:
        """A buffer for this version: the one reserved for an older, a free one, or one whose content gives way."""
        kept = self._ready.slot if self._ready is not None else None
        self._ready = None
        if a.version == self.verified:
            if kept is not None:
                self._shadows.put(kept, "free")
            self._ready = _Ready(a, None)
            return []
        if self.pull is not None and self.pull.version == a.version:
            self._end_pull()
        slot = kept if kept is not None else self._shadows.place_to_receive(self._leased)
        if slot is None:
            self._reason = f"no shadow buffer is free ({self._shadows})"
            return []
        effects: list[Any] = [self._free(slot)] if self._shadows[slot].use == "offered" else []
        if self._shadows[slot].use == "pulling":
            self._end_pull()
        self._shadows.put(slot, "reserved", a)
        self._ready = _Ready(a, slot)
        return effects

    def _unready(self) -> None:
        if self._ready is not None and self._ready.slot is not None and not self._ready.receiving:
            self._shadows.put(self._ready.slot, "free")
        if self._ready is not None and not self._ready.receiving:
            self._ready = None

    # Pulls ------------------------------------------------------------------------------------------------------------

    def _announced_to_pull(self, a: Announce, now: float, objection: str) -> list[Any]:
        if self.pull is not None and a.version.term > self.pull.version.term:
            self._end_pull()
        if self.pull is not None:
            if self.pull.version == a.version:
                self.pull.holders(a.holders)
            return self._report(now, again=True)
        r = self._ready
        if a.version == self.verified or (r is not None and r.receiving):
            return self._report(now, again=True)
        if r is not None and r.announce.version == a.version:  # it was to come by broadcast, and enough others have it
            self._unready()
        refused = self._checked(a, objection)
        if refused is not None:
            return [*refused, *self._report(now, again=True)]
        if effects := self._adopt(a):
            return [*effects, *self._report(now, again=True)]
        slot = self._shadows.place_to_pull(self._leased)
        if slot is None:
            self._reason = f"no shadow buffer is free ({self._shadows})"
        elif now >= self._pull_at:
            self._shadows.put(slot, "pulling", a)
            self.pull, self.pull_slot = Pull(a, self._nbytes, now), slot
            self._reason = f"pulling {a.version}"
            effects = self._pulling(lambda pull: pull.tick(now), now)
        return [*effects, *self._report(now, again=True)]

    def _pulling(self, step: Callable[[Pull], list[Any]], now: float) -> list[Any]:
        """Let the pull make a step, and see to its end."""
        pull = self.pull
        if pull is None:
            return []
        effects: list[Any] = []
        for effect in step(pull):
            if not isinstance(effect, Pulled):
                effects.append(effect)
                continue
            self._end_pull()
            self._attempt = pull.announce.attempt
            if effect.reason:
                self._pull_at = now + PULL_AGAIN_S
                self._reason = f"the pull of {pull.version} was given up: {effect.reason}"
                effects.append(Missed(pull.version, effect.reason))
            elif not self._objection(pull.announce):
                self.pulls += 1
                self._reason = ""
                effects += self._offer(self.pull_slot, pull.announce)
            effects += self._report(now)
        return effects

    def _end_pull(self) -> None:
        assert self.pull is not None
        self.pulled_bytes += self.pull.bytes
        self.pull = None
        self._shadows.put(self.pull_slot, "free")

    def _adopt(self, a: Announce) -> list[Any]:
        """Offer the same weights under their new name, if they are here."""
        slot = self._shadows.alike(a) if a.version != self.verified else None
        if slot is None:
            return []
        self.adopted += 1
        return self._offer(slot, a)

    def _is_coming(self, version: Version) -> bool:
        return self._shadows.find(version, "reserved", "pulling", "offered", "taken") is not None

    # What lies here ---------------------------------------------------------------------------------------------------

    def _offer(self, slot: int, a: Announce) -> list[Any]:
        """``a`` is whole: what is older and waits for the engine gives way to it."""
        older = [i for v, i in self._shadows.offered() if v < a.version and v != self.pinned and i != slot]
        effects: list[Any] = [self._free(i) for i in older]
        self._shadows.put(slot, "offered", a)
        self.verified = a.version if self.verified is None else max(self.verified, a.version)
        return [*effects, Offer(a.version, slot)]

    def _free(self, slot: int) -> Released:
        self._shadows.put(slot, "free")
        return Released(slot)

    def _report(self, now: float, again: bool = False) -> list[Any]:
        """Send where this receiver is: on change, every second, and ``again`` to answer what was repeated."""
        if not self.publisher:
            return []
        r, pinned = self._ready, self.pinned
        behind = pinned is not None and (self.proved is None or self.proved < pinned) and not self._is_coming(pinned)
        report = Report(
            ballot=self.formation[0] if self.formation is not None else None,
            ready_for=r.announce.version if r is not None else None,
            attempt=r.announce.attempt if r is not None else self._attempt,
            buckets=self._buckets,
            verified=self.verified,
            proved=self.proved,
            refused=self._refused,
            reason=self._reason,
            wants=pinned if behind else None,
            **self._proof,
        )
        if report == self._sent and not again and now < self._report_at:
            return []
        self._sent, self._report_at = report, now + REPORT_S
        return [Send(self.publisher, report)]

"""How orders reach rollouts and groups reach trainers: the protocol, and the rollout's end of it, pure.

The trainer's end is ``transport/credits.py``.

Theory of operation
===================

::

    rollout -> trainer   Ask(seq, answered, free, held, kept, orphans)   every second and on change
    trainer -> rollout   Answer(seq, credits, revoked, verdicts)         to every Ask, and after each step
    rollout -> trainer   Delivery(credit, group)                         once, and again when asked

A **credit** is a trainer's order for one group. It is *out* from the Answer that carries it until its group arrives,
then *held*, then *taken* into the batch in training, and it ends in exactly one account: trained, superseded, failed or
lost (evaluated, if it was for evaluation). ``transport/accounts.py`` keeps the accounts; every change is a record that
is emitted before the effect it announces.

**Everything repeats.** No message is resent for its own sake; both ends compare what the other last said with what they
know, and say again what differs:

* A credit sent in Answer ``s`` that is in neither ``held`` nor ``kept`` of an Ask with ``answered >= s`` is not at the
  rollout: the Answer was lost or overtaken (a rollout ignores Answers older than the last), or the rollout gave it
  back. It is lost, and its prompt is dealt again.
* A held credit that is not open at the trainer is revoked, in every Answer until the rollout holds it no more.
* A kept group gets its verdict in every Answer until it is kept no more; one whose Delivery has not come although it
  has been kept for a while (bulk is slower than control) is asked for again.
* An Ask not newer than the last changes nothing.
* The credits of a rollout that is taken for dead stay open, *missing*, while their prompts are dealt again. When its
  Ask shows that it lives and has one, and the prompt is still free, that credit is out again.

**The bound.** credits out + groups held + groups taken <= (max_lag + 1) * groups_per_step. The p-th of these places is
used in step v + p // groups_per_step, so its credit must start from that step minus max_lag or newer. ``window.py``
keeps the number in use as small as keeps the trainer busy. Free places a rollout reported are debited by what it was
sent since, so an Ask that crosses an Answer is not served twice.

**Superseding.** When the trainer takes a batch or advances, credits and groups that no longer can be trained in time
(by what the rollouts said they started from) end at once and their prompts are dealt again; a prompt that was
superseded by age or failed more than ``retries`` times is closed for the epoch. Death of a rollout, loss of a message
and a change of lineage are not the prompt's fault and count for nothing; with the same attempt comes the same seed.

**Several trainers.** Every prompt of an epoch has one owner among those who train together, and only the owner orders
it (``roles/trainer/dataset.py``). A rollout offers its free places to trainers in proportion to their share of a batch.
When a trainer is gone, its credits in progress are aborted, and the groups it has not given a verdict on become
**orphans**: the rollout names them in its Asks to all trainers. The prompt's new owner *adopts* one by a credit
that names it, if its versions can still be trained and the prompt is neither trained, closed nor out; before any new
prompt. The rollout then delivers the group under that credit at once. What its trainer trained before it went is in the
bits of its owner, who got them with that step, so such a group is not adopted, whatever became of the verdict. Orphans
are bounded in number, and dropped when no trainer could train them any more, or none has for ``ORPHAN_S``. A trainer
that was only taken for gone gets its groups back.

Iteration is over dicts in insertion order and sorted lists only, so a run of either machine repeats exactly.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mesh.effects import Send
from mesh.identity import PeerId
from mesh.version import Lineage, Version
from transport.accounts import AnyEntry
from transport.messages import (
    MAX_ORPHANS,
    Answer,
    Ask,
    Credit,
    CreditId,
    Delivery,
    Group,
    HeldCredit,
    Orphan,
    OrphanName,
)

EVALUATIONS = 256
"""Credits of evaluation that one rollout gets at a time. They are single completions and take none of its places."""

ASK_PERIOD_S = 1.0
ORPHAN_S = 120.0  # for trainers to find together again, or to start again from a checkpoint
ASK_GAP_S = 0.02  # between two Asks on change: what happens together is told together

# ----------------------------------------------------------------------------------------------------------------------
# Effects, and the rules that both ends and the buffer share
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Start:
    """Rollout: generate a group for this credit. ``(trainer, credit.id)`` names it."""

    trainer: PeerId
    credit: Credit


@dataclass(frozen=True)
class Abort:
    """Rollout: stop working on this credit; whatever it would yield is not wanted."""

    trainer: PeerId
    credit: CreditId


@dataclass(frozen=True)
class RunOver:
    """Rollout: the trainer says that the run has finished; leave."""

    trainer: PeerId


@dataclass(frozen=True)
class Record:
    """Trainer: append this to the ledger before any effect that follows."""

    entry: AnyEntry


@dataclass(frozen=True)
class Held:
    """Trainer: put this group into the buffer."""

    rollout: PeerId
    credit: Credit
    group: Group


@dataclass(frozen=True)
class Dropped:
    """Trainer: remove this group from the buffer; its credit has ended."""

    credit: CreditId
    why: str


@dataclass(frozen=True)
class Evaluated:
    """Trainer: a result of the evaluation at ``version``; ``group`` is None where the prompt failed every attempt."""

    prompt: int
    version: Version
    group: Group | None


def versions_of(group: Group) -> tuple[Version, ...]:
    """The versions that produced its tokens, oldest first, ``started`` among them."""
    found = {group.started}
    for completion in group.completions:
        for segment in completion.segments:
            found.update(span.version for span in segment.spans)
    return tuple(sorted(found))


def tokens_of(group: Group) -> int:
    """Its sampled tokens."""
    return sum(len(s.tokens) for c in group.completions for s in c.segments if s.sampled)


def superseded(versions: Sequence[Version], number: int, lineage: Lineage, max_lag: int) -> str | None:
    """Why a group sampled from ``versions`` (oldest first) cannot be trained on version ``number`` of ``lineage``:
    "lineage", "age", or None when it can."""
    if not all(lineage.holds(v) for v in versions):
        return "lineage"
    return "age" if number - min(v.number for v in versions) > max_lag else None


def admits(credit: Credit, version: Version | None, lineage: Lineage, *, gone: bool) -> bool | None:
    """Whether an engine that runs ``version``, proved, may begin this credit of a trainer with this ``lineage``. None:
    it never will. ``gone``: the version that a credit of evaluation is pinned to will not come to this engine."""
    if credit.evaluation:
        passed = gone or (version is not None and version > credit.min_version)
        return version == credit.min_version or (None if passed else False)
    return version is not None and lineage.holds(version) and version.number >= credit.min_version.number


def seed_of(run_seed: int, kind: str, epoch: int, prompt: int, attempt: int) -> int:
    """The seed of a credit, 53 bits: the same for the same try of the same prompt in every run with this seed."""
    digest = hashlib.blake2b(f"{run_seed}/{kind}/{epoch}/{prompt}/{attempt}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 11


# ----------------------------------------------------------------------------------------------------------------------
# The rollout's end
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Kept:
    """What was delivered, or said of a credit, and may have to be said again."""

    credit: Credit
    delivery: Delivery


@dataclass(frozen=True)
class _Orphan:
    kept: _Kept
    versions: tuple[Version, ...]
    until: float

    def offer(self, name: OrphanName) -> Orphan:
        credit = self.kept.credit
        return Orphan(name, credit.epoch, credit.prompt, credit.size, self.versions[0])


@dataclass
class _Trainer:
    """What a rollout knows of one trainer. A credit is in ``held`` from its Answer until it ends, then, unless aborted
    or returned, in ``kept`` until its verdict. ``started`` has the versions of those held that were begun."""

    answered: int = 0
    held: dict[CreditId, Credit] = field(default_factory=dict)
    started: dict[CreditId, Version] = field(default_factory=dict)
    kept: dict[CreditId, _Kept] = field(default_factory=dict)
    returned: dict[str, int] = field(default_factory=dict)
    current: Version | None = None
    lineage: Lineage = field(default_factory=Lineage)
    share: int = 0

    def end(self, id: CreditId) -> Credit:
        self.started.pop(id, None)
        return self.held.pop(id)

    def working(self) -> int:
        """Credits that take a place: those of training."""
        return sum(not credit.evaluation for credit in self.held.values())

    def trains(self, versions: Sequence[Version], max_lag: int) -> bool:
        """Whether it could, as far as is known."""
        return self.current is None or superseded(versions, self.current.number, self.lineage, max_lag) is None


class RolloutDelivery:
    """A rollout's end. Loop only; call ``tick`` after every batch of events and at least ten times a second.

    ``places`` is how many groups this rollout works on at a time (``rollout.groups_in_flight``); 0 takes no more.
    Groups kept for their verdicts are bounded by what trainers may have on order, those of trainers that are gone by
    ``MAX_ORPHANS``. With ``max_lag`` it knows which of these are too old for everybody.
    """

    def __init__(self, places: int, *, max_lag: int = 64) -> None:
        self.places = places
        self.run_over = False
        acts = ("started", "delivered", "failed", "returned", "aborted", "adopted", "dropped")
        self.counts = dict.fromkeys(acts, 0)
        self._max_lag = max_lag
        self._trainers: dict[PeerId, _Trainer] = {}
        self._orphans: dict[OrphanName, _Orphan] = {}
        self._paused = ""
        self._seq = 0
        self._asked_at = float("-inf")
        self._dirty = True

    @property
    def held(self) -> int:
        """Credits that take a place of this rollout: those of training."""
        return sum(t.working() for t in self._trainers.values())

    @property
    def kept(self) -> int:
        return sum(len(t.kept) for t in self._trainers.values())

    @property
    def orphans(self) -> int:
        return len(self._orphans)

    def keeps(self, trainer: PeerId, credit_id: CreditId) -> bool:
        """Whether this group still waits for its verdict."""
        t = self._trainers.get(trainer)
        return t is not None and credit_id in t.kept

    def standing(self, trainer: PeerId) -> tuple[Version | None, Lineage]:
        """The trainer's version and lineage by its last Answer."""
        t = self._trainers.get(trainer) or _Trainer()
        return t.current, t.lineage

    def trainers(self, live: Sequence[PeerId], now: float) -> list[Any]:
        """These trainers are alive; call on every change of membership."""
        effects: list[Any] = []
        for peer in [p for p in self._trainers if p not in live]:
            effects += self.trainer_gone(peer, now)
        for peer in live:
            if peer not in self._trainers:
                self._trainers[peer] = _Trainer(kept=self._returned_to(peer))
                self._dirty = True
        return effects + self.tick(now)

    def trainer_gone(self, trainer: PeerId, now: float) -> list[Any]:
        """Its open credits are aborted; the groups it has given no verdict on are orphans."""
        t = self._trainers.pop(trainer, None)
        if t is None:
            return []
        self._dirty = True
        self.counts["aborted"] += len(t.held)
        for id, kept in t.kept.items():
            if kept.delivery.group is not None and not kept.credit.evaluation:
                versions = versions_of(kept.delivery.group)
                self._orphans[trainer, id] = _Orphan(kept, versions, now + ORPHAN_S)
        while len(self._orphans) > MAX_ORPHANS:
            self._drop(min(self._orphans, key=lambda name: self._orphans[name].versions[0].number))
        return [Abort(trainer, id) for id in t.held]

    def _returned_to(self, trainer: PeerId) -> dict[CreditId, _Kept]:
        """The groups of a trainer that was taken for gone, and is not."""
        mine = [name for name in self._orphans if name[0] == trainer]
        return {name[1]: self._orphans.pop(name).kept for name in mine}

    def _drop(self, orphan: OrphanName) -> None:
        del self._orphans[orphan]
        self.counts["dropped"] += 1

    def _sift(self, now: float) -> None:
        """Drop the orphans that nobody can train, or has adopted in time."""
        trainers = list(self._trainers.values())
        for name, orphan in list(self._orphans.items()):
            late = now >= orphan.until
            if late or (trainers and not any(t.trains(orphan.versions, self._max_lag) for t in trainers)):
                self._drop(name)

    def tick(self, now: float) -> list[Any]:
        """An Ask to every trainer, each second and soon after a change."""
        since = now - self._asked_at
        if not (since >= ASK_PERIOD_S or (self._dirty and since >= ASK_GAP_S)):
            return []
        self._asked_at, self._dirty = now, False
        self._seq += 1
        self._sift(now)
        orphans = [orphan.offer(name) for name, orphan in self._orphans.items()]
        effects: list[Any] = []
        for (peer, t), free in zip(self._trainers.items(), self._free(), strict=True):
            ask = Ask(
                seq=self._seq,
                answered=t.answered,
                free=free,
                held=[HeldCredit(id=id, started=t.started.get(id)) for id in t.held],
                kept=list(t.kept),
                returned=dict(t.returned),
                orphans=orphans,
            )
            effects.append(Send(peer, ask))
        return effects

    def _free(self) -> list[int]:
        """Free places for each trainer, in proportion to what it puts into a step; equal while nobody has said so."""
        shares = [t.share for t in self._trainers.values()]
        shares = shares if any(shares) else [1] * len(shares)
        free = 0 if self._paused else max(0, self.places - self.held)
        places = [free * share // max(1, sum(shares)) for share in shares]
        takers = [i for i, share in enumerate(shares) if share]
        for i in range(free - sum(places) if takers else 0):  # the odd places go round
            places[takers[(i - self._seq) % len(takers)]] += 1
        return places

    def changed(self, now: float) -> list[Any]:
        """Something a trainer should know at once, such as another number of ``places``."""
        self._dirty = True
        return self.tick(now)

    def receive(self, trainer: PeerId, answer: Answer, now: float) -> list[Any]:
        t = self._trainers.get(trainer)
        if t is None or answer.seq <= t.answered:
            return []
        t.answered, t.current, t.lineage, t.share = answer.seq, answer.current, answer.lineage, answer.share
        effects: list[Any] = []
        for id in answer.revoked:
            if id in t.held:
                t.end(id)
                self.counts["aborted"] += 1
                self._dirty = True
                effects.append(Abort(trainer, id))
        for verdict in answer.verdicts:
            if t.kept.pop(verdict.id, None):
                self._dirty = True
        effects += [Send(trainer, t.kept[id].delivery, bulk=True) for id in answer.again if id in t.kept]
        for credit in answer.credits:
            self._dirty = True
            if credit.id in t.held or credit.id in t.kept:
                continue
            if credit.adopts is not None:
                effects += self._adopted(trainer, t, credit)
                continue
            full = bool(self._paused) or self.held >= self.places  # several trainers may fill the same odd place
            if full and not credit.evaluation:
                self._return(t, self._paused or "no place")
                continue
            t.held[credit.id] = credit
            self.counts["started"] += 1
            effects.append(Start(trainer, credit))
        if answer.finished and not self.run_over:
            self.run_over = True
            effects.append(RunOver(trainer))
        return effects + self.tick(now)

    def _adopted(self, trainer: PeerId, t: _Trainer, credit: Credit) -> list[Any]:
        """Deliver an orphan under its new credit. One that was dropped meanwhile is simply not held."""
        assert credit.adopts is not None
        orphan = self._orphans.pop(credit.adopts, None)
        if orphan is None:
            self._return(t, "the group is gone")
            return []
        self.counts["adopted"] += 1
        delivery = Delivery(credit=credit.id, group=orphan.kept.delivery.group)
        t.kept[credit.id] = _Kept(credit, delivery)
        return [Send(trainer, delivery, bulk=True)]

    def started(self, trainer: PeerId, credit_id: CreditId, version: Version) -> None:
        """The engine began this group with ``version``; the trainer learns with the next Ask."""
        t = self._trainers.get(trainer)
        if t and credit_id in t.held:
            t.started[credit_id] = version
            self._dirty = True

    def finished(self, trainer: PeerId, credit_id: CreditId, group: Group, now: float) -> list[Any]:
        return self._deliver(trainer, Delivery(credit=credit_id, group=group), now)

    def failed(self, trainer: PeerId, credit_id: CreditId, reason: str, now: float) -> list[Any]:
        """No group can be made of this credit; ``transport.evaluation.PASSED`` for one pinned to a version that the
        engine has left behind."""
        return self._deliver(trainer, Delivery(credit=credit_id, group=None, failure=reason or "no reason given"), now)

    def returned(self, trainer: PeerId, credit_id: CreditId, why: str) -> None:
        """This rollout will not do it (weights unproven, leaving); another may."""
        t = self._trainers.get(trainer)
        if t and credit_id in t.held:
            t.end(credit_id)
            self._return(t, why)

    def pause(self, why: str, now: float) -> list[Any]:
        """This rollout can do nothing for now (weights unproven): others get what it holds for training, and it takes
        no more until ``resume``. A trainer that waited for these groups would make no version that ends the pause."""
        self._paused = why
        held = [(peer, id) for peer, t in self._trainers.items() for id, c in t.held.items() if not c.evaluation]
        for peer, id in held:
            self.returned(peer, id, why)
        return [*(Abort(peer, id) for peer, id in held), *self.changed(now)]

    def resume(self, now: float) -> list[Any]:
        self._paused = ""
        return self.changed(now)

    def _return(self, t: _Trainer, why: str) -> None:
        t.returned[why] = t.returned.get(why, 0) + 1
        self.counts["returned"] += 1
        self._dirty = True

    def _deliver(self, trainer: PeerId, delivery: Delivery, now: float) -> list[Any]:
        t = self._trainers.get(trainer)
        if t is None or delivery.credit not in t.held:
            return []  # aborted while the engine finished it
        t.kept[delivery.credit] = _Kept(t.end(delivery.credit), delivery)
        self.counts["delivered" if delivery.group else "failed"] += 1
        self._dirty = True
        return [Send(trainer, delivery, bulk=True), *self.tick(now)]

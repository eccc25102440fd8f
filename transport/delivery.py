"""How orders reach rollouts and groups reach trainers: the protocol, and the rollout's end of it, pure.

The trainer's end is ``transport/credits.py``.

Theory of operation
===================

::

    rollout -> trainer   Ask(seq, answered, free, held, kept)      every second and on change
    trainer -> rollout   Answer(seq, credits, revoked, verdicts)   to every Ask, and after each step
    rollout -> trainer   Delivery(credit, group)                   once, and again when asked

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

**The bound.** credits out + groups held + groups taken <= (max_lag + 1) * groups_per_step. The p-th of these places is
used in step v + p // groups_per_step, so its credit must start from that step minus max_lag or newer. ``window.py``
keeps the number in use as small as keeps the trainer busy. Free places a rollout reported are debited by what it was
sent since, so an Ask that crosses an Answer is not served twice.

**Superseding.** When the trainer takes a batch or advances, credits and groups that no longer can be trained in time
(by what the rollouts said they started from) end at once and their prompts are dealt again; a prompt that was
superseded by age or failed more than ``retries`` times is closed for the epoch. Death of a rollout, loss of a message
and a change of lineage are not the prompt's fault and count for nothing; with the same attempt comes the same seed.

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
from transport.messages import Answer, Ask, Credit, CreditId, Delivery, Group, HeldCredit

EVALUATIONS = 256
"""Credits of evaluation that one rollout gets at a time. They are single completions and take none of its places."""

ASK_PERIOD_S = 1.0
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


@dataclass
class _Trainer:
    """What a rollout knows of one trainer. A credit is in ``held`` from its Answer until it ends, then, unless aborted
    or returned, in ``kept`` until its verdict."""

    answered: int = 0
    held: dict[CreditId, Version | None] = field(default_factory=dict)
    evaluations: dict[CreditId, None] = field(default_factory=dict)
    kept: dict[CreditId, Delivery] = field(default_factory=dict)
    returned: dict[str, int] = field(default_factory=dict)
    current: Version | None = None
    lineage: Lineage = field(default_factory=Lineage)

    def end(self, id: CreditId) -> None:
        del self.held[id]
        self.evaluations.pop(id, None)


class RolloutDelivery:
    """A rollout's end. Loop only; call ``tick`` after every batch of events and at least ten times a second.

    ``places`` is how many groups this rollout works on at a time (``rollout.groups_in_flight``); 0 takes no more.
    Groups kept for their verdicts are bounded by what trainers may have on order.
    """

    def __init__(self, places: int) -> None:
        self.places = places
        self.run_over = False
        self.counts = {"started": 0, "delivered": 0, "failed": 0, "returned": 0, "aborted": 0, "dropped": 0}
        self._trainers: dict[PeerId, _Trainer] = {}
        self._paused = ""
        self._seq = 0
        self._asked_at = float("-inf")
        self._dirty = True

    @property
    def held(self) -> int:
        """Credits that take a place of this rollout: those of training."""
        return sum(len(t.held) - len(t.evaluations) for t in self._trainers.values())

    @property
    def kept(self) -> int:
        return sum(len(t.kept) for t in self._trainers.values())

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
            effects += self.trainer_gone(peer)
        for peer in live:
            if peer not in self._trainers:
                self._trainers[peer] = _Trainer()
                self._dirty = True
        return effects + self.tick(now)

    def trainer_gone(self, trainer: PeerId) -> list[Any]:
        """Its open credits are aborted and its kept groups dropped; this is the one place where groups are given up
        that another trainer could adopt."""
        t = self._trainers.pop(trainer, None)
        if t is None:
            return []
        self._dirty = True
        self.counts["aborted"] += len(t.held)
        self.counts["dropped"] += len(t.kept)
        return [Abort(trainer, id) for id in t.held]

    def tick(self, now: float) -> list[Any]:
        """An Ask to every trainer, each second and soon after a change."""
        since = now - self._asked_at
        if not (since >= ASK_PERIOD_S or (self._dirty and since >= ASK_GAP_S)):
            return []
        self._asked_at, self._dirty = now, False
        self._seq += 1
        places = 0 if self._paused else self.places
        share, rest = divmod(max(0, places - self.held), max(1, len(self._trainers)))
        effects: list[Any] = []
        for i, (peer, t) in enumerate(self._trainers.items()):
            odd = (i + self._seq) % len(self._trainers) < rest  # the odd places go round
            ask = Ask(
                seq=self._seq,
                answered=t.answered,
                free=share + odd,
                held=[HeldCredit(id=id, started=started) for id, started in t.held.items()],
                kept=list(t.kept),
                returned=dict(t.returned),
            )
            effects.append(Send(peer, ask))
        return effects

    def changed(self, now: float) -> list[Any]:
        """Something a trainer should know at once, such as another number of ``places``."""
        self._dirty = True
        return self.tick(now)

    def receive(self, trainer: PeerId, answer: Answer, now: float) -> list[Any]:
        t = self._trainers.get(trainer)
        if t is None or answer.seq <= t.answered:
            return []
        t.answered, t.current, t.lineage = answer.seq, answer.current, answer.lineage
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
        effects += [Send(trainer, t.kept[id], bulk=True) for id in answer.again if id in t.kept]
        for credit in answer.credits:
            self._dirty = True
            if credit.id in t.held or credit.id in t.kept:
                continue
            full = bool(self._paused) or self.held >= self.places  # several trainers may fill the same odd place
            if full and not credit.evaluation:
                self._return(t, self._paused or "no place")
                continue
            t.held[credit.id] = None
            if credit.evaluation:
                t.evaluations[credit.id] = None
            self.counts["started"] += 1
            effects.append(Start(trainer, credit))
        if answer.finished and not self.run_over:
            self.run_over = True
            effects.append(RunOver(trainer))
        return effects + self.tick(now)

    def started(self, trainer: PeerId, credit_id: CreditId, version: Version) -> None:
        """The engine began this group with ``version``; the trainer learns with the next Ask."""
        t = self._trainers.get(trainer)
        if t and credit_id in t.held:
            t.held[credit_id] = version
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
        held = [(peer, id) for peer, t in self._trainers.items() for id in t.held if id not in t.evaluations]
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
        t.end(delivery.credit)
        t.kept[delivery.credit] = delivery
        self.counts["delivered" if delivery.group else "failed"] += 1
        self._dirty = True
        return [Send(trainer, delivery, bulk=True), *self.tick(now)]

"""The trainer's end of delivery: orders out, groups in, and one account for each. Theory in ``transport/delivery.py``.

A credit is *out*, then *held*, then *taken*; every way out of these leads through ``_end`` or ``settle``, which write
the record, remember the verdict and see to the prompt.

One of several trainers orders only prompts that are its own, and its **share** of a batch: ``groups_per_step`` over all
of them. When the members change its data is dealt anew (``dealt``): credits whose prompts went to others end. What the
others trained arrives with each step (``committed``), so that a prompt is trained once whoever owned it meanwhile.

**Busy is not dead.** A rollout that is not seen any more may only be silent. Nobody waits for it: the prompts that are
out there are given back and dealt again. But its credits stay open, **missing**, and take no place. Whichever is first
decides: the rollout is back and has the credit, its prompt is free and there is a place, then it is out again; or its
prompt is issued under another credit, or not wanted here any more, or ``MISSING_S`` have passed, then it is lost. A
rollout that said goodbye is not waited for.
"""

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mesh.config import Trainer
from mesh.effects import Send
from mesh.identity import PeerId
from mesh.version import Lineage, Version
from transport.accounts import (
    Accounts,
    AnyEntry,
    Closed,
    Committed,
    Delivered,
    Descends,
    Ended,
    Ending,
    Issued,
    Row,
    Trained,
)
from transport.delivery import (
    EVALUATIONS,
    Dropped,
    Evaluated,
    Held,
    Record,
    seed_of,
    superseded,
    tokens_of,
    versions_of,
)
from transport.evaluation import PASSED, Evaluation, EvaluationState
from transport.messages import Ask, Credit, CreditId, Delivery, Orphan, Outcome
from transport.prompts import TOO_SLOW, PromptRef, PromptSource, Retries
from transport.view import RolloutView
from transport.window import Window

DEADLINE_CHECK_S = 0.5
MISSING_S = 120.0  # a process that holds its interpreter for a minute is not seen for about that long
GONE = "its rollout is gone"


@dataclass
class _Open:
    """A credit that has not ended. ``started`` is the version it began with, by the last Ask; ``seen`` whether an Ask
    showed it; ``versions`` those of its group once that is here; ``since`` when it went missing. ``ref`` is None for
    evaluation."""

    credit: Credit
    ref: PromptRef | None
    rollout: PeerId
    at: float
    state: Literal["out", "missing", "held", "taken"] = "out"
    seen: bool = False
    started: Version | None = None
    versions: tuple[Version, ...] = ()
    since: float = 0.0


class TrainerDelivery:
    """A trainer's end. Loop only; the main thread goes through ``port.call``.

    Nothing is issued before the first ``advance``. ``steps`` is the run's number of optimizer steps: no order is made
    for a step that will not come. ``first_id`` must lie above all credit ids of earlier processes of the run.
    """

    def __init__(
        self, settings: Trainer, prompts: PromptSource, *, seed: int, steps: int | None = None, first_id: int = 0
    ) -> None:
        self.groups_per_step = settings.groups_per_step  # this trainer's share
        self.window = Window(settings.groups_per_step, settings.max_lag, settings.wait_target)
        self.accounts = Accounts(next_id=first_id)
        self.finished = False
        self.version: Version | None = None
        self.lineage = Lineage()
        self.counts = {"duplicates": 0, "late": 0, "adopted": 0}
        self._settings = settings
        self._prompts = prompts
        self._retries = Retries(prompts, settings.retries)
        self._seed = seed
        self._steps = steps
        self._open: dict[CreditId, _Open] = {}
        self._taken: dict[CreditId, None] = {}
        self._missing: dict[tuple[int, int], CreditId] = {}  # by epoch and prompt
        self._rollouts: dict[PeerId, RolloutView] = {}
        self._verdicts: OrderedDict[CreditId, Outcome] = OrderedDict()
        self._evaluation: Evaluation | None = None
        self._limited = False
        self._checked = float("-inf")

    # -- what the driver and the main thread call ----------------------------------------------------------------------

    @property
    def load(self) -> int:
        """Credits out + groups held + groups taken, of training. Over ``limit`` only after the share has shrunk."""
        return self.accounts.groups["in_flight"] - len(self._missing)

    @property
    def limit(self) -> int:
        return self.window.ceiling

    def share(self, groups: int) -> None:
        """This trainer puts ``groups`` into a step; ``advance`` follows."""
        self.groups_per_step = groups
        self.window.resize(groups)

    def dealt(self) -> list[Any]:
        """The prompts were dealt anew, or others say what they trained: credits whose prompt is not to be answered here
        any more end, those of groups taken included. ``advance`` follows."""
        by_reason: dict[tuple[Ending, str], list[CreditId]] = {}
        for id, c in self._open.items():
            if c.ref is not None and (why := self._prompts.unwanted(c.ref)):
                end: tuple[Ending, str] = ("lost", GONE) if c.state == "missing" else ("superseded", why)
                by_reason.setdefault(end, []).append(id)
        return [e for (outcome, why), ids in by_reason.items() for e in self._end(ids, outcome, why)]

    def put_back(self, ids: Sequence[CreditId], now: float) -> list[Any]:
        """The gradient of these taken groups is given up: they are held again, while they are fresh."""
        for id in ids:
            assert self._open[id].state == "taken", f"group {id} is {self._open[id].state}, not taken"
            self._open[id].state = "held"
            del self._taken[id]
        effects, tell = self._sweep(ids)
        return effects + self._serve(now, tell)

    def restart(self, now: float) -> list[Any]:
        """This trainer was left behind: what is open comes from weights of another lineage than those it will get.
        Nothing is issued before the ``advance`` to them."""
        effects = self._end(list(self._open), "superseded", "lineage")
        self._evaluation = None
        self.share(0)
        effects += self._serve(now, list(self._rollouts))
        self.version = None
        return effects

    def receive(self, rollout: PeerId, message: Ask | Delivery, now: float) -> list[Any]:
        """Of a rollout that is not among the live ones nothing is taken: it will ask again."""
        r = self._rollouts.get(rollout)
        if r is None:
            self.counts["late"] += 1
            return []
        if not isinstance(message, Ask):
            return self._deliver(rollout, r, message, now)
        return self._ask(rollout, r, message, now)

    def rollouts(self, live: Sequence[PeerId], now: float) -> list[Any]:
        """These rollouts are alive; call on every change of membership. Of the others the prompts that are out are
        dealt again, and the credits missing; groups that they delivered stay."""
        effects: list[Any] = []
        alive = frozenset(live)
        for peer in [p for p in self._rollouts if p not in alive]:
            effects += self._miss(self._rollouts.pop(peer), now) + self._serve(now)
        for peer in live:
            self._rollouts.setdefault(peer, RolloutView())
        return effects

    def rollout_left(self, rollout: PeerId) -> list[Any]:
        """It has said goodbye and does not come back: call after ``rollouts``."""
        return self._end(self._missing_at(rollout), "lost", GONE)

    def tick(self, now: float) -> list[Any]:
        """Credits past their deadline fail; those missing for too long are lost."""
        if now - self._checked < DEADLINE_CHECK_S:
            return []
        self._checked = now
        deadline = self._settings.credit_deadline_s
        missing = [(id, self._open[id]) for id in self._missing.values()]
        gone = [id for id, c in missing if now - c.at > deadline or now - c.since > MISSING_S]
        effects = self._end(gone, "lost", GONE)
        late = [id for id, c in self._open.items() if c.state == "out" and now - c.at > deadline]
        if not late:
            return effects
        tell = [self._open[id].rollout for id in late]
        effects += self._end(late, "failed", f"not delivered within {deadline:g} s")
        return effects + self._serve(now, tell)

    def take(self, ids: Sequence[CreditId], now: float) -> list[Any]:
        """These held groups are the batch of the step from the present version. What only the step after could have
        used, and cannot, ends now."""
        for id in ids:
            assert self._open[id].state == "held", f"group {id} is {self._open[id].state}, not held"
            self._open[id].state = "taken"
            self._taken[id] = None
        effects, tell = self._sweep()
        return effects + self._serve(now, tell)

    def supersede(self, stale: Sequence[tuple[CreditId, str]], now: float) -> list[Any]:
        """Groups that the buffer put aside, with the reason; those that have ended here as well are passed over."""
        effects: list[Any] = []
        for id, why in stale:
            if id in self._open:
                effects += self._end([id], "superseded", why)
        return effects + self._serve(now)

    def settle(
        self,
        ids: Sequence[CreditId],
        masked: Mapping[CreditId, int] | None = None,
        failed: Mapping[CreditId, int] | None = None,
    ) -> list[Any]:
        """The step that trained these groups was applied; ``masked`` has the tokens of each that got no gradient,
        ``failed`` those of completions without a reward. The
        verdicts leave with the Answers of the ``advance`` that follows."""
        assert self.version is not None
        for id in ids:
            assert id in self._taken, f"group {id} was not taken"
        entry = Trained(
            ids=list(ids),
            version=self.version,
            masked=[(masked or {}).get(id, 0) for id in ids],
            failed=[failed.get(id, 0) for id in ids] if failed else [],
        )
        effects = [self._record(entry)]
        for id in ids:
            ref = self._open.pop(id).ref
            assert ref is not None
            del self._taken[id]
            self._prompts.done(ref)
            self._remember(id, "trained")
        return effects

    def committed(self, rows: Mapping[PeerId, Row], me: PeerId) -> list[Any]:
        """The step from the present version was applied, with these rows: record it for all, and settle what is one's
        own. ``advance`` follows."""
        assert self.version is not None
        effects = [self._record(Committed(version=self.version, rows=dict(rows)))]
        mine = rows[me].groups if me in rows else []
        if mine:
            masked = {g.credit: g.masked for g in mine}
            effects += self.settle(list(masked), masked, {g.credit: g.failed for g in mine if g.failed})
        return effects

    def advance(self, version: Version, lineage: Lineage, now: float, waited: float | None = None) -> list[Any]:
        """The trainer holds ``version`` of ``lineage``; ``waited`` is the part of the step it waited for groups. Every
        rollout gets an Answer."""
        effects: list[Any] = []
        if lineage != self.lineage:
            effects.append(self._record(Descends(lineage=lineage)))
        self.version, self.lineage = version, lineage
        if waited is not None:
            self.window.step(waited, self._limited)
        self._limited = False
        effects += self._sweep()[0]
        return effects + self._serve(now, list(self._rollouts))

    def close(self, now: float) -> list[Any]:
        """Every step is made: what is open is lost. Rollouts stay, for the trainer that finishes the run."""
        return self._end(list(self._open), "lost", "the run is over") + self._serve(now, list(self._rollouts))

    def finish(self, now: float) -> list[Any]:
        """The run is over: what is open is lost, every rollout is told to leave, now and whenever it asks."""
        self.finished = True
        self._evaluation = None
        return self._end(list(self._open), "lost", "the run is over") + self._serve(now, list(self._rollouts))

    def evaluate(self, prompts: Sequence[int], version: Version, now: float, *, size: int = 1) -> list[Any]:
        """Have these held-out prompts answered by exactly ``version``, ``size`` completions each, before any training
        credit is handed out. Results come as ``Evaluated``; watch ``evaluation_state``."""
        state = self.evaluation_state()
        if state is not None and not state.complete:
            raise ValueError(
                f"the evaluation of {state.version} has {state.done} of {state.total} results: wait for it"
            )
        self._evaluation = Evaluation(prompts, version, size=size, seed=self._seed, retries=self._settings.retries)
        return self._serve(now)

    def evaluation_state(self) -> EvaluationState | None:
        return self._evaluation.state(self._rollouts) if self._evaluation else None

    def abandon_evaluation(self, now: float) -> list[Any]:
        """Give up the evaluation under way; its credits are revoked, its results void."""
        ids = [id for id, c in self._open.items() if c.credit.evaluation]
        tell = [self._open[id].rollout for id in ids]
        effects = self._end(ids, "superseded", "the evaluation is given up")
        self._evaluation = None
        return effects + self._serve(now, tell)

    def repin(self, version: Version, now: float) -> list[Any]:
        """Start the evaluation again with ``version``; the results so far are void."""
        assert self._evaluation is not None
        ids = [id for id, c in self._open.items() if c.credit.evaluation]
        tell = [self._open[id].rollout for id in ids]
        effects = self._end(ids, "superseded", "pinned to a newer version")
        self._evaluation.repin(version)
        return effects + self._serve(now, tell)

    def state_dict(self) -> dict[str, int]:
        """What a checkpoint keeps beside the data's own state: hand ``next_id`` to the next process as ``first_id``."""
        return {"next_id": self.accounts.next_id, "window": self.window.size}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.accounts.next_id = max(self.accounts.next_id, state["next_id"])
        self.window.size = min(max(self.window.size, state["window"]), self.limit)

    def metrics(self) -> dict[str, float]:
        a = self.accounts
        returned: dict[str, int] = {}
        for r in self._rollouts.values():
            for why, n in r.returned.items():
                returned[why] = returned.get(why, 0) + n
        return {
            **{f"groups/{name}": n for name, n in a.groups.items()},
            **{f"tokens/{name}": n for name, n in a.tokens.items()},
            **{f"evaluation/{name}": n for name, n in a.evaluation.items()},
            **{f"reasons/{name}": n for name, n in a.reasons.items()},
            **{f"delivery/{name}": n for name, n in self.counts.items()},
            **{f"returned/{why}": n for why, n in returned.items()},
            "delivery/window": self.window.size,
            "delivery/out": sum(len(r.out) for r in self._rollouts.values()),
            "delivery/missing": len(self._missing),
            "delivery/taken": len(self._taken),
        }

    # -- messages ------------------------------------------------------------------------------------------------------

    def _ask(self, rollout: PeerId, r: RolloutView, ask: Ask, now: float) -> list[Any]:
        if ask.seq <= r.ask:
            return []
        absent = r.hear(ask, now)
        missing = self._missing_at(rollout)
        absent += [id for id in missing if not r.has(id)]
        effects = self._end(absent, "lost", "not at its rollout")
        here = [id for id in r.held if id in r.out or id in missing]
        for id in here:
            self._open[id].seen, self._open[id].started = True, r.held[id]
        effects += self._sweep(here)[0]
        return effects + self._serve(now, [rollout], among=[rollout])

    def _deliver(self, rollout: PeerId, r: RolloutView, delivery: Delivery, now: float) -> list[Any]:
        id = delivery.credit
        if id not in r.out:
            self.counts["duplicates" if id in self._open or id in self._verdicts else "late"] += 1
            return []
        c = self._open[id]
        r.delivered(id, now)
        group, why = delivery.group, delivery.failure
        if group is not None and len(group.completions) != c.credit.size:
            why = f"{len(group.completions)} completions instead of {c.credit.size}"
        if group is None or why:
            outcome: Ending = "superseded" if c.credit.evaluation and why == PASSED else "failed"
            return self._end([id], outcome, why or "no reason given") + self._serve(now, [rollout])
        c.versions = versions_of(group)
        if c.credit.evaluation and c.versions != (c.credit.min_version,):
            return self._end([id], "superseded", PASSED) + self._serve(now, [rollout])
        effects: list[Any] = [self._record(Delivered(id=id, tokens=tokens_of(group)))]
        if c.credit.evaluation:
            effects += self._end([id], "evaluated", "")
            effects.append(Evaluated(c.credit.prompt, c.credit.min_version, group))
            return effects + self._serve(now, [rollout])
        stale = superseded(c.versions, self._next_number(), self.lineage, self._settings.max_lag)
        if stale:
            return effects + self._end([id], "superseded", stale) + self._serve(now, [rollout])
        c.state = "held"
        r.ended(id)
        effects.append(Held(rollout, c.credit, group))
        return effects

    # -- how credits begin ---------------------------------------------------------------------------------------------

    def _serve(self, now: float, tell: Sequence[PeerId] = (), among: Sequence[PeerId] | None = None) -> list[Any]:
        """Deal what may be ordered among the rollouts with room, the emptiest first; answer those and ``tell``."""
        if self.version is None:
            return []
        effects: list[Any] = []
        credits: dict[PeerId, list[Credit]] = {peer: [] for peer in tell if peer in self._rollouts}
        peers = self._rollouts if among is None else among
        self._resume(peers)
        effects += self._adopt(peers, credits, now)
        places = self._places()
        if self._evaluation is not None:
            for peer in peers:
                r = self._rollouts[peer]
                while r.ask and self._evaluation.offers(peer) and len(r.evaluations) < EVALUATIONS:
                    effects += self._issue(peer, None, credits, now)
        rooms = [(-self._rollouts[p].room, p) for p in peers if self._rollouts[p].room > 0 and not self.finished]
        heapq.heapify(rooms)
        while rooms:
            room, peer = heapq.heappop(rooms)
            if places and (ref := self._prompts.take()):
                places -= 1
                effects += self._issue(peer, ref, credits, now)
            else:
                self._limited = self._limited or self.load >= self.window.size
                continue
            if room < -1:
                heapq.heappush(rooms, (room + 1, peer))
        return effects + [self._answer(peer, new, now) for peer, new in credits.items()]

    def _places(self) -> int:
        """How many more groups may be ordered for training now."""
        assert self.version is not None
        most = min(self.window.size, self.limit)
        if self._steps is not None:
            most = min(most, (self._steps - self.version.number) * self.groups_per_step)
        return max(0, most - self.load)

    def _miss(self, r: RolloutView, now: float) -> list[Any]:
        """What is out at a rollout that is not seen any more. Those of evaluation are ordered again at once."""
        effects = self._end(list(r.evaluations), "lost", GONE)
        for id in [id for id in r.out if id in self._open]:
            c = self._open[id]
            assert c.ref is not None
            c.state, c.since = "missing", now
            self._missing[c.ref.epoch, c.ref.prompt] = id
            self._prompts.give_back(c.ref)
        return effects

    def _missing_at(self, rollout: PeerId) -> list[CreditId]:
        return [id for id in self._missing.values() if self._open[id].rollout == rollout]

    def _resume(self, peers: Iterable[PeerId]) -> None:
        """Missing credits whose rollout is back and has them are out again: before any new prompt."""
        for peer in peers if self._missing else ():
            r = self._rollouts[peer]
            for id in self._missing_at(peer):
                c = self._open[id]
                if r.has(id) and self._places() and (ref := self._prompts.claim(c.credit.epoch, c.credit.prompt)):
                    del self._missing[ref.epoch, ref.prompt]
                    c.ref, c.state = ref, "out"
                    r.resumed(id)

    def _adopt(self, peers: Iterable[PeerId], credits: dict[PeerId, list[Credit]], now: float) -> list[Any]:
        """Groups of trainers that are gone, while they can be trained: before any new prompt. One that has been adopted
        is offered until the rollout knows; its prompt is out then, and cannot be claimed."""
        effects: list[Any] = []
        for peer in peers:
            for orphan in self._rollouts[peer].orphans:
                if self.finished or not self._places():
                    return effects
                stale = superseded((orphan.oldest,), self._next_number(), self.lineage, self._settings.max_lag)
                if stale or orphan.size != self._settings.group_size:
                    continue
                if ref := self._prompts.claim(orphan.epoch, orphan.prompt):
                    self.counts["adopted"] += 1
                    effects += self._issue(peer, ref, credits, now, orphan)
        return effects

    def _issue(
        self,
        peer: PeerId,
        ref: PromptRef | None,
        credits: dict[PeerId, list[Credit]],
        now: float,
        orphan: Orphan | None = None,
    ) -> list[Any]:
        """A credit for this prompt, or for the next of the evaluation, in the next Answer to ``peer``."""
        id = self.accounts.next_id
        effects: list[Any] = []
        if ref is None:
            assert self._evaluation is not None
            credit = self._evaluation.order(id)
        else:
            if (missing := self._missing.get((ref.epoch, ref.prompt))) is not None:
                effects = self._end([missing], "lost", GONE)
            credit = self._training_credit(id, ref, orphan)
        started = orphan.oldest if orphan else None
        self._open[id] = _Open(credit=credit, ref=ref, rollout=peer, at=now, started=started)
        self._rollouts[peer].order(credit)
        credits.setdefault(peer, []).append(credit)
        entry = Issued(
            id=id,
            to=peer,
            epoch=credit.epoch,
            prompt=credit.prompt,
            attempt=credit.attempt,
            evaluation=credit.evaluation,
            adopts=credit.adopts,
        )
        return [*effects, self._record(entry)]

    def _training_credit(self, id: CreditId, ref: PromptRef, orphan: Orphan | None) -> Credit:
        """It takes the next place, and must start from a version that is fresh enough when that place is trained."""
        assert self.version is not None
        assert self.load < self.limit, "more credits than the bound allows"
        step = self.version.number + self.load // self.groups_per_step
        return Credit(
            id=id,
            prompt=ref.prompt,
            epoch=ref.epoch,
            attempt=ref.attempt,
            size=self._settings.group_size,
            min_version=orphan.oldest if orphan else self.lineage.at(step - self._settings.max_lag),
            seed=seed_of(self._seed, "training", ref.epoch, ref.prompt, ref.attempt),
            adopts=orphan.name if orphan else None,
        )

    def _answer(self, peer: PeerId, credits: list[Credit], now: float) -> Send:
        assert self.version is not None
        answer = self._rollouts[peer].answer(
            credits,
            open=self._open,
            verdicts=self._verdicts,
            current=self.version,
            lineage=self.lineage,
            finished=self.finished,
            share=self.groups_per_step,
            now=now,
        )
        return Send(peer, answer)

    # -- how credits end -----------------------------------------------------------------------------------------------

    def _next_number(self) -> int:
        """The version the next batch will be trained on."""
        assert self.version is not None
        return self.version.number + (1 if self._taken else 0)

    def _hopeless(self, c: _Open) -> str | None:
        """Why this credit cannot be trained any more, by what is known of it."""
        if c.credit.evaluation or c.state == "taken":
            return None
        if c.state == "held" or c.started is not None:
            versions = c.versions if c.state == "held" or c.started is None else (c.started,)
            return superseded(versions, self._next_number(), self.lineage, self._settings.max_lag)
        oldest = c.credit.min_version
        if not self.lineage.holds(oldest):
            return "lineage"
        late = c.seen and self._next_number() - oldest.number > self._settings.max_lag
        return "not started in time" if late else None

    def _sweep(self, ids: Iterable[CreditId] | None = None) -> tuple[list[Any], list[PeerId]]:
        """End what is hopeless; also the rollouts that must hear of it."""
        by_reason: dict[str, list[CreditId]] = {}
        tell: list[PeerId] = []
        for id in self._open if ids is None else ids:
            why = self._hopeless(self._open[id])
            if why:
                by_reason.setdefault(why, []).append(id)
                tell.append(self._open[id].rollout)
        return [e for why, stale in by_reason.items() for e in self._end(stale, "superseded", why)], tell

    def _end(self, ids: Sequence[CreditId], outcome: Ending, why: str) -> list[Any]:
        """The one way out but training. The record comes first."""
        if not ids:
            return []
        effects: list[Any] = [self._record(Ended(outcome=outcome, ids=list(ids), why=why))]
        for id in ids:
            c = self._open.pop(id)
            self._taken.pop(id, None)
            if c.rollout in self._rollouts:
                self._rollouts[c.rollout].ended(id)
            if outcome != "lost":
                self._remember(id, outcome)
            if c.state in ("held", "taken"):
                effects.append(Dropped(id, why))
            if c.state == "missing":  # its prompt is not out, or under another credit
                del self._missing[c.credit.epoch, c.credit.prompt]
            elif c.ref is None:
                if self._evaluation:
                    effects += self._evaluation.end(c.rollout, c.credit.prompt, outcome, why)
            elif not (outcome == "failed" or why == "age"):
                self._prompts.give_back(c.ref)
            elif not self._retries.last(c.ref):
                self._retries.again(c.ref)
            else:
                reason = TOO_SLOW if why == "age" else why
                effects.append(self._record(Closed(epoch=c.ref.epoch, prompt=c.ref.prompt, why=reason)))
                effects += self._retries.close(c.ref, reason)
        return effects

    def _remember(self, id: CreditId, outcome: Outcome) -> None:
        """For rollouts that still keep the group; one they ask for after this memory has passed is called failed."""
        self._verdicts[id] = outcome
        while len(self._verdicts) > 4096 + 4 * (self._settings.max_lag + 1) * self._settings.groups_per_step:
            self._verdicts.popitem(last=False)

    def _record(self, entry: AnyEntry) -> Record:
        self.accounts.apply(entry)
        return Record(entry)

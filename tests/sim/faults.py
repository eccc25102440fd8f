"""Faults planted in the shipped classes, each of which the simulator must find.

A fault is a patch: a method of a shipped class (or a rule that it uses) is replaced by one that breaks a promise
(design, section 9) in a way that is easy to write by mistake. ``FAULTS`` is the table: what is wrong, the promise that
it breaks, the scenario and the seeds within which it must be found, and what the simulator must say. Nothing in the
shipped code knows of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest

from mesh.convening import Convening
from mesh.membership import Membership
from mesh.prober import Prober
from mesh.roster import Roster
from mesh.version import Ballot, Lineage
from roles.trainer import agreement
from roles.trainer.agreement import Agreement, agree
from roles.trainer.company import Company
from roles.trainer.dataset import Dataset
from roles.trainer.step import Steps
from tests.sim import membership, mesh, split, step, trainers
from tests.sim.step_driver import Trains
from tests.sim.step_group import Buffer
from tests.sim.trainer import Disk
from tests.sim.world import Failure
from transport import credits
from transport.credits import TrainerDelivery
from transport.delivery import RolloutDelivery
from transport.messages import Held, StepHere
from transport.view import RolloutView
from transport.weights.reception import ReceiverSchedule
from transport.weights.schedule import PublisherSchedule, Release

Plant = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Fault:
    name: str
    promise: int
    scenario: Callable[[int], object]
    seeds: Sequence[int]
    says: str  # a pattern
    plant: Plant


FAULTS: list[Fault] = []


def fault(name: str, promise: int, scenario: Callable[[int], object], seeds: int | Sequence[int], says: str):
    def enter(plant: Plant) -> Plant:
        FAULTS.append(Fault(name, promise, scenario, range(seeds) if isinstance(seeds, int) else seeds, says, plant))
        return plant

    return enter


def find(planted: Fault) -> str:
    """What the simulator says of the first seed that fails; empty when none does."""
    for seed in planted.seeds:
        try:
            planted.scenario(seed)
        except Failure as failure:
            return str(failure)
    return ""


# Membership -----------------------------------------------------------------------------------------------------------


@fault("a suspicion is never refuted", 1, membership.scenario, 40, "does not see")
def _(patch):
    patch.setattr(Roster, "_refute", lambda self, news: None)


@fault("a dead peer is believed alive for ever", 1, membership.scenario, 20, "still sees")
def _(patch):
    patch.setattr(Roster, "judge", lambda self, now: None)


@fault("news of a death is believed whatever its incarnation", 1, membership.scenario, 40, "for dead")
def _(patch):
    hear = Roster.hear

    def careless(self, news, now):
        record = self.living.get(news.card.id)
        if record and news.state == "dead":
            self.depart(record, "dead", now)
        else:
            hear(self, news, now)

    patch.setattr(Roster, "hear", careless)


@fault("the dead are forgotten, and halves never meet again", 1, membership.scenario, 60, "does not see")
def _(patch):
    patch.setattr(Membership, "_step_reach", lambda self: None)


@fault("the incarnation of another is raised", 1, membership.scenario, 20, "raised the incarnation")
def _(patch):
    accuse = Roster.accuse

    def forging(self, record, accuser, now):
        record.incarnation += 1
        accuse(self, record, accuser, now)

    patch.setattr(Roster, "accuse", forging)


@fault("one silence is taken for death", 1, membership.scenario, 20, "without suspicion")
def _(patch):
    def hasty(self, probe, now):
        record = self._roster.living.get(probe.target)
        if record:
            self._roster.depart(record, "dead", now)

    patch.setattr(Prober, "_fail", hasty)


# Convening ------------------------------------------------------------------------------------------------------------


@fault("a member accepts two conveners at one counter", 5, mesh.scenario, 100, "accepts two conveners")
def _(patch):
    invited = Convening._invited

    def faithless(self, sender, message, now):
        p = self._promise
        if p is not None and p.ballot.counter == message.ballot.counter and p.ballot != message.ballot:
            self._promise = None
        return invited(self, sender, message, now)

    patch.setattr(Convening, "_invited", faithless)


@fault("a ballot is decided again for each that comes late", 5, mesh.scenario, 10, "decided twice")
def _(patch):
    def hasty(self, sender, ballot):
        r = self._round
        if r is not None and r.ballot == ballot:
            r.accepted.add(sender)
            decided = self._decide(r)
            self._round = r
            return decided
        return []

    patch.setattr(Convening, "_accepted", hasty)


@fault("ballots are compared by their counters alone", 10, step.scenario, 20, "two lists of members for")
def _(patch):
    patch.setattr(Ballot, "__eq__", lambda self, other: other is not None and self.counter == other.counter)
    patch.setattr(Ballot, "__hash__", lambda self: hash(self.counter))
    patch.setattr(Ballot, "__lt__", lambda self, other: self.counter < other.counter)
    patch.setattr(Ballot, "__le__", lambda self, other: self.counter <= other.counter)
    patch.setattr(Ballot, "__gt__", lambda self, other: self.counter > other.counter)
    patch.setattr(Ballot, "__ge__", lambda self, other: self.counter >= other.counter)


# Trajectories ---------------------------------------------------------------------------------------------------------


@fault("a verdict is forgotten", 3, mesh.scenario, 3, "keeps")
def _(patch):
    answer = RolloutView.answer

    def forgetful(self, *args, **more):
        whole = answer(self, *args, **more)
        return type(whole)(**{f: getattr(whole, f) for f in whole.__struct_fields__} | {"verdicts": []})

    patch.setattr(RolloutView, "answer", forgetful)


@fault("a credit that its rollout does not know is leaked", 3, mesh.scenario, 100, "not done|does not come to rest")
def _(patch):
    hear = RolloutView.hear
    patch.setattr(RolloutView, "hear", lambda self, ask, now: hear(self, ask, now)[:0])


@fault("lag is computed across lineages", 4, mesh.scenario, 100, "of another lineage")
def _(patch):
    patch.setattr(Lineage, "holds", lambda self, version: True)


@fault("lag is not looked at", 4, mesh.scenario, 100, "is trained with lag")
def _(patch):
    patch.setattr(credits, "superseded", lambda *args: None)
    patch.setattr("roles.trainer.buffer.superseded", lambda *args: None)


@fault("a prompt is dealt again after it was trained", 3, mesh.scenario, 3, "trained twice in epoch")
def _(patch):
    patch.setattr(Dataset, "done", lambda self, ref: self.give_back(replace(ref, attempt=0)))


@fault("the prompt of a missing credit is given back twice", 3, trainers.scenario, 10, "is not out")
def _(patch):
    end = TrainerDelivery._end

    def twice(self, ids, outcome, why):
        for id in ids:
            if self._open[id].state == "missing":
                self._open[id].state = "out"
                del self._missing[self._open[id].credit.epoch, self._open[id].credit.prompt]
        return end(self, ids, outcome, why)

    patch.setattr(TrainerDelivery, "_end", twice)


@fault("a missing credit outlives the order for its prompt", 3, trainers.scenario, 10, "missing, and its prompt")
def _(patch):
    issue = TrainerDelivery._issue

    def generous(self, *args):
        missing, self._missing = self._missing, {}
        effects = issue(self, *args)
        self._missing = missing
        return effects

    patch.setattr(TrainerDelivery, "_issue", generous)


@fault("a credit is missing for ever", 3, trainers.scenario, 40, "is missing for ever")
def _(patch):
    tick = TrainerDelivery.tick
    patch.setattr(TrainerDelivery, "tick", lambda self, now: [] if self._missing else tick(self, now))


@fault("more is on order than the bound allows", 2, mesh.scenario, 3, "more credits than the bound allows")
def _(patch):
    patch.setattr(TrainerDelivery, "_places", lambda self: 1000)


# Weights --------------------------------------------------------------------------------------------------------------


@fault("a receiver reports before the proof", 5, mesh.scenario, 3, "as proved, and it is not")
def _(patch):
    ended = ReceiverSchedule.receive_ended

    def hasty(self, version, attempt, ok, now, **more):
        self.proved = version if ok else self.proved
        return ended(self, version, attempt, ok, now, **more)

    patch.setattr(ReceiverSchedule, "receive_ended", hasty)


@fault("a buffer is released while it is sent", 6, mesh.scenario, 200, "buffer")
def _(patch):
    def careless(self):
        return [] if self.newest is None else [Release(self._slot)]

    patch.setattr(PublisherSchedule, "_release_newest", careless)


@fault("a buffer is reused while an abandoned operation still writes", 6, mesh.scenario, 100, "used twice|still write")
def _(patch):
    ended = ReceiverSchedule.receive_ended
    patch.setattr(ReceiverSchedule, "receive_ended", lambda self, *a, **more: ended(self, *a, **more | {"busy": False}))


@fault("a group is handed over under the credit of another", 6, mesh.scenario, 10, "under the credit of prompt")
def _(patch):
    finished, last = RolloutDelivery.finished, {}

    def mixed(self, trainer, id, group, now):
        group, last[id, trainer] = last.get((id - 1, trainer), group), group
        return finished(self, trainer, id, group, now)

    patch.setattr(RolloutDelivery, "finished", mixed)


@fault("a shadow is written in the engine's hands", 6, mesh.scenario, 100, "engine")
def _(patch):
    take = ReceiverSchedule.take

    def careless(self):
        taken = take(self)
        if taken:
            self._shadows[taken[1]].use = "free"
        return taken

    patch.setattr(ReceiverSchedule, "take", careless)


@fault("a term is opened below the highest applied", 5, mesh.scenario, 100, "is not the highest")
def _(patch):
    patch.setattr(Disk, "term", property(lambda self: 0, lambda self, counter: None), raising=False)
    patch.setattr(Lineage, "open", lambda self, term, number: Lineage((*self.terms, (term, number))))


# Steps of several trainers --------------------------------------------------------------------------------------------


@fault("the optimizer steps before the barrier", 10, step.scenario, 20, r"applies step \d+ .* before .* has reduced it")
def _(patch):
    def hasty(self, now):
        return self._apply(self.held, now) if self.phase == "reduced" else []

    patch.setattr(Steps, "_barrier", hasty)


@fault(
    "a step is made again although the dead may have applied it", 10,
    step.deaths, step.seeds_of("after the optimizer step", 40), "differently from the company of",
)  # fmt: skip
def _(patch):
    def forgetful(standings):
        found = agree(standings)
        level = len({s.place.step for s in standings.values()}) == 1
        return replace(found, apply=None, step=found.step - 1) if found.apply is not None and level else found

    patch.setattr(agreement, "agree", forgetful)


@fault(
    "a step is made again although one who lives has applied it", 10,
    step.deaths, step.seeds_of("telling its reduction", 80), "opens at .* and at",
)  # fmt: skip
def _(patch):
    as_it_is = Steps._agree

    def heedless(self, now):
        found = self._standings.agreement()
        if found is None or found.step == self.place.step or self.held is None or not found.apply:
            return as_it_is(self, now)
        if all(s.place.step == self.place.step for s in self._standings._said.values()):
            return as_it_is(self, now)
        return self._open(Agreement(step=self.place.step, lineage=self.place.lineage), now)

    patch.setattr(Steps, "_agree", heedless)


@fault("a gradient buffer is reused while an abandoned one still writes", 10, step.scenario, 200, "was written to")
def _(patch):
    buffers: dict[int, Buffer] = {}
    patch.setattr(Trains, "fresh_buffer", lambda self: buffers.setdefault(id(self), Buffer()))


@fault("a result is taken after the end of its formation", 10, step.scenario, 100, r"Held\(")
def _(patch):
    as_it_is = Steps.reduced

    def credulous(self, ballot, step, digest, now):
        effects = as_it_is(self, ballot, step, digest, now)
        if self.held is None and not effects:
            self.held = Held(ballot, step, digest)
        return effects

    patch.setattr(Steps, "reduced", credulous)


@fault("a step begins in a hold", 10, step.scenario, 20, ".")
def _(patch):
    patch.setattr(Steps, "hold", lambda self, now: self.phase == "open")


# Two halves -----------------------------------------------------------------------------------------------------------


@fault("the later term prevails, not the one with more groups trained", 3, split.scenario, 40, "gives up .* groups")
def _(patch):
    patch.setattr(Company, "_here", lambda self: StepHere(self._stood, list(self.heirs), 1000 * self._stood.counter))


@fault("one cut off from many trains on at once", 3, split.scenario, 40, "cut off from many has trained")
def _(patch):
    patch.setattr(agreement, "agree", lambda standings: replace(agree(standings), lost=0))


@fault("two halves that trained alone both go on", 1, split.scenario, 20, "not all train together")
def _(patch):
    patch.setattr(Company, "_heard_here", lambda self, sender, there, now: [])

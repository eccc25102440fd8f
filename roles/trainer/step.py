"""How the trainers of one formation make a step together: all of them, or none of them. Pure.

Theory of operation. Step ``n`` is the one by which the weights get number ``n``. In a formation, named by its ballot, a
trainer goes through these phases; the first of the order leads:

    standing   all say where they stand, and go on from one place by the rule of ``agreement.py``
    open       members tell the first that they stand before step n, and when their gradient is ready. When all are, or
               ``step_wait_s`` after the first was, it says Go with those who contribute. Nobody enters a collective to
               wait for samples, nor for a peer that still applies the step before
    reducing   gradients, rows and ids are all-reduced on a copy; those who are not ready take part with zeros
    reduced    this trainer holds the result and tells its digest to all. This is the barrier: when all members hold the
               same, it applies. Different digests are an error that names the trainers
    applying   the optimizer step; then ``open`` again. Publication, records and verdicts come after it
    holding    instead of Go: a newcomer is taken in, and the next step is made in the next formation

When a member dies, a collective breaks or a deadline passes, the formation is over, for one and so for all. What was
reduced is kept until the next formation has agreed: those who stand in it apply it or void it together. A gradient that
was not applied stays with its owner, untouched, and is contributed again.

Everything that changes a step's state lives in this file. The driver speaks to ``company.py``, and finds in ``acts.py``
what it is to do.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from msgspec.structs import replace

from mesh.effects import Note, Send
from mesh.identity import PeerId
from mesh.version import Ballot
from roles.trainer.acts import Abandon, Apply, Diverged, Opened, Reduce
from roles.trainer.agreement import Agreement, Standings, last_term
from transport.messages import Held, Message, Place, StepGo, StepReady, StepReduced, StepStanding

Phase = Literal["apart", "standing", "open", "holding", "reducing", "reduced", "applying"]


@dataclass(frozen=True)
class Timing:
    repeat_s: float = 0.2  # of what somebody lacks: lost messages cost this much
    step_wait_s: float = 10.0  # once one trainer is ready, for the others' groups; then the step is made without them
    reduce_s: float = 60.0  # for an all-reduce, above the deadline that the operation itself has
    apply_s: float = 60.0  # for the others to apply the step before: an optimizer step and what it has to wait for
    split_wait_s: float = 20.0  # who has lost more than half: time for the greater part to be found again
    build_s: float = 15.0  # to build the group, above the time-out that building has
    convene_s: float = 5.0  # for a formation to come about, with a few declines
    takeover_s: float = 1.5  # between one convener and the next: time for a whole round
    hold_s: float = 120.0  # to take in a newcomer: weights and optimizer through the network
    admit_interval_s: float = 10.0  # between two newcomers: each holds all trainers up
    seek_s: float = 1.0  # between two askings of those in no formation
    gather_s: float = 5.0  # for trainers that start at the same time, where their number was not announced

    @property
    def go_s(self) -> float:
        """For the first to say Go to a member that is ready."""
        return self.apply_s + self.step_wait_s + 5.0


@dataclass(frozen=True)
class Broken:
    """To the company: this formation is over for me; the next is to be made ``without`` these."""

    reason: str
    without: tuple[PeerId, ...] = ()


@dataclass(frozen=True)
class Behind:
    """To the company: the others stand where this trainer cannot follow."""

    reason: str


class Steps:
    """One trainer's part in the steps of the formation it is in. Inputs are methods that return effects."""

    def __init__(self, me: PeerId, place: Place, timing: Timing, name: Callable[[PeerId], str]):
        self.me = me
        self.place = place
        self.phase: Phase = "apart"
        self.ballot = Ballot(0, "")
        self.members: tuple[PeerId, ...] = ()
        self.opened = 0  # size of the last formation that opened, since this trainer was taken in
        self.held: Held | None = None
        self.highest = 0  # counter of a term on anybody's lineage
        self._t, self._name = timing, name
        self._contributors: tuple[PeerId, ...] = ()  # to what is held
        self._mine: tuple[int, int, int] | None = None  # the step this trainer is ready for, groups, tokens
        self._ready_at = 0.0
        self._applying: Apply | None = None
        self._since = 0.0
        self._repeat_at = 0.0
        self._forget()

    def _forget(self) -> None:
        """What belongs to one formation."""
        self._standings = Standings(self.me, self.members)
        self._agreed: Agreement | None = None
        self._split_noted = False
        self._ready: dict[PeerId, StepReady] = {}
        self._first_ready: float | None = None
        self._go: StepGo | None = None
        self._reports: dict[PeerId, StepReduced] = {}
        self._told: StepReduced | None = None

    @property
    def first(self) -> bool:
        return self.phase != "apart" and self.members[0] == self.me

    @property
    def since(self) -> float:
        """When the phase began."""
        return self._since

    # ------------------------------------------------------------------------------------------------------------------
    # Inputs
    # ------------------------------------------------------------------------------------------------------------------

    def join(self, ballot: Ballot, members: Sequence[PeerId], now: float) -> list[Any]:
        self.ballot, self.members = ballot, tuple(members)
        self._forget()
        self._enter("standing", now)
        return self._stand(now)

    def part(self) -> list[Any]:
        """The formation is over. What is held stays; a result that comes from now on is void."""
        if self.phase == "apart":
            return []
        self.phase = "apart"
        return [Abandon(self.ballot)]

    def leave(self) -> list[Any]:
        """This trainer does not belong to the others any more, nor what it holds."""
        effects = self.part()
        self.take(self.place)
        return effects

    def take(self, place: Place) -> None:
        """Stand at ``place`` by transfer: what was ready or held before is void."""
        self.place, self.held, self._mine, self.opened = place, None, None, 0

    def hold(self, now: float) -> bool:
        """Make no further step in this formation. False when one is under way."""
        if self.phase == "open":
            self._enter("holding", now)
        return self.phase == "holding"

    def ready(self, step: int, groups: int, tokens: int, now: float) -> list[Any]:
        if step != self.place.step + 1:
            return []
        self._mine, self._ready_at = (step, groups, tokens), now
        return self._tell_ready(now) if self.phase == "open" else []

    def reduced(self, ballot: Ballot, step: int, digest: str, now: float) -> list[Any]:
        if not self._reducing(ballot, step):
            return []
        assert self._go is not None
        self.held, self._contributors = Held(ballot, step, digest), tuple(self._go.contributors)
        self._told = self._reports[self.me] = StepReduced(ballot, step, digest, self.place.state)
        self._enter("reduced", now)
        return [*self._tell(self._told), *self._barrier(now)]

    def reduce_failed(self, ballot: Ballot, step: int, reason: str) -> list[Any]:
        return [Broken(f"step {step}: {reason}")] if self._reducing(ballot, step) else []

    def applied(self, step: int, trained: int, state: str, now: float) -> list[Any]:
        """Apply is done. A formation that was formed meanwhile hears only now where this trainer stands."""
        assert self._applying is not None, "a step was applied that was not to be"
        assert step == self._applying.step == self.place.step + 1, f"step {step} was applied at {self.place.step}"
        self._applying = self.held = self._mine = None
        self._reports = {}
        self.place = Place(step, self.place.lineage, trained, state)
        if self.phase == "standing":
            return self._stand(now)
        if self.phase == "applying":
            return self._begin(now) if self._agreed is None else self._open(self._agreed, now)
        return []

    def receive(self, sender: PeerId, message: Message, now: float) -> list[Any]:
        """A message of this ballot."""
        match message:
            case StepStanding():
                return self._heard_standing(sender, message, now)
            case StepReady():
                return self._heard_ready(sender, message, now)
            case StepGo():
                if self.phase == "open" and message.step == self.place.step + 1:
                    return self._reduce(message, now)
            case StepReduced():
                return self._heard_reduced(sender, message, now)
        return []

    def tick(self, now: float) -> list[Any]:
        match self.phase:
            case "standing":
                return self._tick_standing(now)
            case "open":
                return self._tick_open(now)
            case "reducing" | "reduced":
                return self._tick_reduce(now)
        return []

    # ------------------------------------------------------------------------------------------------------------------
    # Standing
    # ------------------------------------------------------------------------------------------------------------------

    def _stand(self, now: float) -> list[Any]:
        if self._applying is not None:
            return []
        self._repeat_at = now + self._t.repeat_s
        said = self._standings.say(StepStanding(self.ballot, self.place, self.held, self.opened))
        return [*said, *self._agree(now)]

    def _heard_standing(self, sender: PeerId, message: StepStanding, now: float) -> list[Any]:
        answer = self._standings.hear(sender, message)
        return [*answer, *self._agree(now)] if self.phase == "standing" else answer

    def _agree(self, now: float) -> list[Any]:
        a = self._standings.agreement()
        if a is None:
            return []
        if a.differ:
            return [Diverged(f"after step {self.place.step} weights or optimizer differ", a.differ)]
        if self.me in a.behind:
            return [Behind(f"at step {self.place.step}, where the others cannot be followed to step {a.step}")]
        if a.behind:
            return [Broken(f"standing elsewhere: {self._names(a.behind)}", a.behind)]
        self.highest = max(self.highest, last_term(a.lineage).counter)
        if last_term(a.lineage) >= self.ballot:
            return [Broken(f"the lineage has term {last_term(a.lineage)} already")]
        if 2 * a.lost > a.of and now - self._since < self._t.split_wait_s:
            first, self._split_noted = not self._split_noted, True
            text = f"{a.lost} of {a.of} trainers are lost at once: waiting {self._t.split_wait_s:g} s for them"
            return [Note(text, "warning")] if first else []
        self._agreed = a
        if self.place.step == a.step:
            return self._open(a, now)
        assert self.held is not None
        return self._apply(self.held, now)

    def _open(self, a: Agreement, now: float) -> list[Any]:
        assert self.place.step == a.step, f"at step {self.place.step}, agreed on {a.step}"
        self._agreed = self.held = None
        self.opened = len(self.members)
        self.place = replace(self.place, lineage=a.lineage.open(self.ballot, a.step))
        return [Opened(self.ballot, self.members, self.place), *self._begin(now)]

    def _tick_standing(self, now: float) -> list[Any]:
        missing = self._standings.missing
        if not missing:
            return self._agree(now)
        if self.me in missing:  # an optimizer step is under way: the others wait for this trainer
            return []
        if now - self._since >= self._t.apply_s:
            reason = f"did not say within {self._t.apply_s:g} s where they stand: {self._names(missing)}"
            return [Broken(reason, tuple(missing))]
        if not self._due(now):
            return []
        self._repeat_at = now + self._t.repeat_s
        return self._standings.repeat()

    # ------------------------------------------------------------------------------------------------------------------
    # Ready and Go
    # ------------------------------------------------------------------------------------------------------------------

    def _begin(self, now: float) -> list[Any]:
        self._enter("open", now)
        self._ready, self._first_ready, self._go = {}, None, None
        return self._tell_ready(now)

    def _tell_ready(self, now: float) -> list[Any]:
        step, groups, tokens = self._mine or (0, 0, 0)
        message = StepReady(self.ballot, self.place.step + 1, bool(step), groups, tokens)
        if self.first:
            return self._heard_ready(self.me, message, now)
        self._repeat_at = now + self._t.repeat_s
        return [Send(self.members[0], message)]

    def _heard_ready(self, sender: PeerId, message: StepReady, now: float) -> list[Any]:
        if not self.first or self.phase != "open" or message.step != self.place.step + 1:
            return []
        old = self._ready.get(sender)
        if old is None or (old.ready, old.groups) < (message.ready, message.groups):
            self._ready[sender] = message
        if message.groups and self._first_ready is None:
            self._first_ready = now
        return self._try_go(now)

    def _try_go(self, now: float) -> list[Any]:
        if self._first_ready is None or len(self._ready) < len(self.members):
            return []
        all_ready = all(r.ready for r in self._ready.values())
        if not all_ready and now - self._first_ready < self._t.step_wait_s:
            return []
        contributors = [m for m in self.members if self._ready[m].groups]
        go = StepGo(self.ballot, self.place.step + 1, contributors)
        return [*self._tell(go), *self._reduce(go, now)]

    def _tick_open(self, now: float) -> list[Any]:
        waited = now - self._since
        if self.first:
            missing = [m for m in self.members if m not in self._ready]
            if missing and waited >= self._t.apply_s:
                what = f"did not apply step {self.place.step} within {self._t.apply_s:g} s"
                return [Broken(f"{what}: {self._names(missing)}")]
            return self._try_go(now)
        if self._mine is not None and self._mine[1] and min(waited, now - self._ready_at) >= self._t.go_s:
            return [Broken(f"{self._name(self.members[0])} did not say Go within {self._t.go_s:g} s")]
        return self._tell_ready(now) if self._due(now) else []

    # ------------------------------------------------------------------------------------------------------------------
    # Reduction, barrier, application
    # ------------------------------------------------------------------------------------------------------------------

    def _reduce(self, go: StepGo, now: float) -> list[Any]:
        self._go = go
        self._repeat_at = now + self._t.repeat_s
        self._enter("reducing", now)
        return [Reduce(self.ballot, go.step, tuple(go.contributors))]

    def _reducing(self, ballot: Ballot, step: int) -> bool:
        return self.phase == "reducing" and ballot == self.ballot and self._go is not None and step == self._go.step

    def _heard_reduced(self, sender: PeerId, message: StepReduced, now: float) -> list[Any]:
        effects: list[Any] = []
        if message.step == self.place.step + 1:
            self._reports.setdefault(sender, message)
            effects = self._barrier(now)
        told = self._told
        if not message.reply and told is not None and told.step == message.step and self.phase != "reduced":
            effects.append(Send(sender, replace(told, reply=True)))
        return effects

    def _barrier(self, now: float) -> list[Any]:
        if self.phase != "reduced" or len(self._reports) < len(self.members):
            return []
        assert self.held is not None
        for what in ("state", "digest"):
            found = tuple((m, getattr(self._reports[m], what)) for m in self.members)
            if len({digest for _, digest in found if digest}) > 1:
                text = f"weights or optimizer differ before step {self.held.step}"
                return [Diverged(text if what == "state" else f"step {self.held.step} was reduced differently", found)]
        return self._apply(self.held, now)

    def _apply(self, held: Held, now: float) -> list[Any]:
        self._enter("applying", now)
        self._applying = Apply(held.ballot, held.step, self._contributors)
        return [self._applying]

    def _tick_reduce(self, now: float) -> list[Any]:
        assert self._go is not None
        missing = [m for m in self.members if m not in self._reports]
        if now - self._since >= self._t.reduce_s:
            return [Broken(f"step {self._go.step} was not reduced by {self._names(missing)}")]
        if not self._due(now):
            return []
        self._repeat_at = now + self._t.repeat_s
        effects: list[Any] = [Send(m, self._go) for m in missing if m != self.me] if self.first else []
        return effects + (self._tell(self._told) if self.phase == "reduced" and self._told is not None else [])

    # ------------------------------------------------------------------------------------------------------------------
    # Small things
    # ------------------------------------------------------------------------------------------------------------------

    def _enter(self, phase: Phase, now: float) -> None:
        self.phase, self._since = phase, now

    def _due(self, now: float) -> bool:
        return now >= self._repeat_at

    def _tell(self, message: Message) -> list[Any]:
        return [Send(m, message) for m in self.members if m != self.me]

    def _names(self, peers: Sequence[PeerId]) -> str:
        return ", ".join(map(self._name, peers))

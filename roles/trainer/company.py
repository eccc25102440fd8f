"""Who trains together: how the gradient formations of a run follow each other. Pure; what a trainer's driver speaks to
(``acts.py`` has their contract).

Theory of operation. A trainer is *out*, or in a formation with others (``step.py``: standing, steps), or its formation
is *over* and the next is to come.

* Out: it asks all trainers to be taken in (``StepSeek``). Whoever is in a formation answers with it (``StepHere``).
  Where nobody does, those who are out begin together: at once when as many are there as were announced, else after
  ``gather_s``; the lowest id convenes. Who has heard of a formation waits ``split_wait_s`` for it to be heard again.
* Over: a member died, a collective failed, a deadline passed, or the formation is made anew to take somebody in. Who
  notices tells the others (``StepOver``). The first of the order who lives convenes those who live, each later one
  ``takeover_s`` after; ``mesh.convening`` does the rest. Nobody follows into a formation with *strangers*: its members
  must come from the last formation in which this trainer said where it stands, besides the newcomer being taken in. So
  whoever was left out of one formation is not in the next, and ``agreement.py`` may trust what its members hold.
* Left out, by mistake or by a parted network: the first of a formation tells it to all trainers that are not in it,
  once a second. Of two formations the one prevails that has trained more groups, then the larger, then the later; who
  is in the other is *left behind*: out, and taken in anew. Whoever has lost more than half of its formation at once
  decides and trains nothing for ``split_wait_s``, so that one trainer cut off from many does not run ahead of them.
* A newcomer is taken in between two steps (``admission.py``): the first says Hold instead of Go, all members stand at
  that step, weights and optimizer go to the newcomer, and the next formation has it at its end. A hold ends the
  formation whatever comes of the transfer, so a newcomer that breaks is dropped, and the step is not.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

from mesh.effects import Note, Send
from mesh.identity import PeerId
from mesh.version import Ballot
from roles.trainer.acts import Abandon, Build, Convene, Diverged, LeftBehind, Transfer
from roles.trainer.admission import Admission
from roles.trainer.agreement import NO_BALLOT, last_term
from roles.trainer.step import Behind, Broken, Steps, Timing
from transport.messages import Message, Place, StepHere, StepHold, StepOver, StepSeek

SILENT = 3.0  # times ``seek_s``: who has not asked for so long does not ask any more

State = Literal["out", "building", "in", "over", "diverged"]


class Company:
    """One trainer's part in training together. ``expected`` trainers were announced to start at once; 0: nobody knows.
    ``place`` is where its weights stand: base weights, or a checkpoint's."""

    def __init__(
        self,
        me: PeerId,
        place: Place,
        now: float,
        *,
        timing: Timing | None = None,
        name: Callable[[PeerId], str] = str,
        expected: int = 0,
    ):
        self.me = me
        self.state: State = "out"
        self.members: tuple[PeerId, ...] = ()  # of the formation that is built, in, or over
        self.ballot = NO_BALLOT  # its ballot, and the highest this trainer has followed
        self.heirs: tuple[PeerId, ...] = ()  # who may be in the next formation, in order
        self._t = timing or Timing()
        self._name, self._expected = name, expected
        self.steps = Steps(me, place, self._t, name)
        self._stood = NO_BALLOT  # the last formation in which this trainer said where it stands
        self._guest: PeerId | None = None  # the newcomer that is being taken in
        self._joining = False  # this trainer was taken in, and has not stood with the others yet
        self._live: tuple[PeerId, ...] = (me,)
        self._reason = ""
        self._admission = Admission(me, self._t)
        self._since = self._repeat_at = self._convene_at = self._greet_at = now
        self._convened = self._heard = float("-inf")

    @property
    def place(self) -> Place:
        return self.steps.place

    @property
    def first(self) -> bool:
        """Whether this trainer leads, and publishes."""
        return self.state == "in" and self.steps.first

    # ------------------------------------------------------------------------------------------------------------------
    # Inputs: the mesh
    # ------------------------------------------------------------------------------------------------------------------

    def live(self, trainers: Sequence[PeerId], now: float) -> list[Any]:
        """The live trainers, this one included."""
        self._live = (self.me, *(p for p in trainers if p != self.me))
        self._admission.live(self._live)
        gone = [m for m in self.members if m not in self._live]
        if gone and self.state in ("building", "in"):
            return self._end(f"{self._names(gone)} gone", now)
        if self.state == "over":
            self._convene_at = min(self._convene_at, self._turn(now))
        newcomer = self._admission.newcomer
        if newcomer is not None and newcomer not in self._live:
            return self._end(f"{self._name(newcomer)}, to be taken in, is gone", now)
        return []

    def forming(self, ballot: Ballot, members: Sequence[PeerId], now: float) -> list[Any]:
        """A Go came. Without ``Build`` among the effects this trainer stays where it is."""
        if self.state == "diverged" or ballot <= self.ballot or self.me not in members:
            return []
        if why := self._objection(members, now):
            others = [m for m in members if m != self.me]
            mine = StepSeek(ballot) if self.state == "out" else self._here()
            return [
                Note(f"no part in {ballot}: {why}", "debug"),
                *(Send(m, e) for m in others for e in (StepOver(ballot, why), mine)),
            ]
        effects = self._part(now)
        self.state, self.ballot, self.members, self._since = "building", ballot, tuple(members), now
        return [*effects, Build(ballot, self.members)]

    def _objection(self, members: Sequence[PeerId], now: float) -> str:
        """Why this trainer does not follow into a formation of these; empty when it does."""
        if self.state == "out":
            return f"{self._name(self.me)} must be taken in first" if self._told_lately(now) else ""
        strangers = [m for m in members if self.heirs and m not in self.heirs and m != self._guest]
        if self._joining and len(members) == 1:
            strangers = [self.me]  # it would be a fork of what it was taken into
        return f"{self._names(strangers)} must be taken in first" if strangers else ""

    def formed(self, ballot: Ballot, now: float) -> list[Any]:
        if self.state != "building" or ballot != self.ballot:
            return []
        self.state, self.heirs, self._stood = "in", self.members, ballot
        self._guest, self._joining = None, False
        self._admission.took_in(self.members)
        return self._after(self.steps.join(ballot, self.members, now), now)

    def broken(self, ballot: Ballot, reason: str, now: float) -> list[Any]:
        """The group could not be built, or is known not to work any more."""
        return self._end(reason, now) if self._in(ballot) else []

    def receive(self, sender: PeerId, message: Message, now: float) -> list[Any]:
        if self.state == "diverged":
            return []
        match message:
            case StepSeek():
                return self._heard_seek(sender, message.ballot, now)
            case StepHere():
                return self._heard_here(sender, message, now)
            case _ if message.ballot < self._stood:
                return [Send(sender, self._here())]
            case StepOver():
                return self._end(_said(self._name(sender), message.reason), now) if self._in(message.ballot) else []
            case _ if self.state != "in" or message.ballot != self.ballot:
                return []
            case StepHold():
                return self._heard_hold(sender, message, now)
        return self._after(self.steps.receive(sender, message, now), now)

    def tick(self, now: float) -> list[Any]:
        match self.state:
            case "out":
                return self._tick_out(now)
            case "building" if now - self._since >= self._t.build_s:
                return self._end(f"no group within {self._t.build_s:g} s", now)
            case "in":
                return self._tick_in(now)
            case "over":
                return self._tick_over(now)
        return []

    # ------------------------------------------------------------------------------------------------------------------
    # Inputs: the steps
    # ------------------------------------------------------------------------------------------------------------------

    def ready(self, step: int, groups: int, tokens: int, now: float) -> list[Any]:
        return self._after(self.steps.ready(step, groups, tokens, now), now)

    def reduced(self, ballot: Ballot, step: int, digest: str, now: float) -> list[Any]:
        return self._after(self.steps.reduced(ballot, step, digest, now), now)

    def reduce_failed(self, ballot: Ballot, step: int, reason: str, now: float) -> list[Any]:
        return self._after(self.steps.reduce_failed(ballot, step, reason), now)

    def applied(self, step: int, trained: int, state: str, now: float) -> list[Any]:
        """``trained``: groups in the weights now; ``state``: digest of weights and optimizer, empty for none."""
        return self._after(self.steps.applied(step, trained, state, now), now)

    # ------------------------------------------------------------------------------------------------------------------
    # Inputs: newcomers
    # ------------------------------------------------------------------------------------------------------------------

    def hold(self, newcomer: PeerId, now: float) -> list[Any]:
        """Take this one in at the next boundary, however long that takes."""
        self._admission.ask(newcomer, float("inf"))
        return self._admit(now)

    def transferred(self, newcomer: PeerId, now: float) -> list[Any]:
        if self._admission.newcomer != newcomer:
            return []
        self.heirs = (*self.heirs, newcomer)
        return self._end(f"{self._name(newcomer)} is taken in", now)

    def transfer_failed(self, newcomer: PeerId, reason: str, now: float) -> list[Any]:
        if self._admission.newcomer != newcomer:
            return []
        return self._end(f"{self._name(newcomer)} could not be taken in: {reason}", now)

    def admitted(self, ballot: Ballot, members: Sequence[PeerId], place: Place, now: float) -> list[Any]:
        """On the newcomer: it holds what the members of ``ballot`` held at a boundary, and waits for the next
        formation. Ignored when it is not out."""
        if self.state != "out":
            return []
        self.steps.take(place)
        self.heirs = (*members, self.me)
        self.state, self.members, self._stood, self._joining = "over", (), ballot, True
        self._since = now
        return []

    # ------------------------------------------------------------------------------------------------------------------
    # Out
    # ------------------------------------------------------------------------------------------------------------------

    def _tick_out(self, now: float) -> list[Any]:
        effects: list[Any] = []
        others = [p for p in self._live if p != self.me]
        if now >= self._greet_at:
            self._greet_at = now + self._t.seek_s
            effects += [Send(p, StepSeek(self.ballot)) for p in others]
        seekers = self._admission.asking(now)
        company = sorted([self.me, *(p for p in others if p in seekers)])
        complete = self._expected and len(company) >= max(self._expected, len(self._live))
        gather_s = 0.0 if complete else self._t.gather_s
        turn = self._since + gather_s + company.index(self.me) * self._t.takeover_s
        if now >= max(turn, self._convene_at) and not self._told_lately(now):
            self._convene_at = now + self._t.convene_s
            effects.append(self._convene(company, now))
        return effects

    def _told_lately(self, now: float) -> bool:
        """Whether there is a formation to be taken into, as far as this trainer knows."""
        return now - self._heard < self._t.split_wait_s

    def _leave(self, reason: str, now: float) -> list[Any]:
        effects = [*self._part(now), *self.steps.leave(), LeftBehind(reason)]
        self.state, self.members, self.heirs, self._stood = "out", (), (), NO_BALLOT
        self._guest, self._joining = None, False
        self._since = self._heard = self._greet_at = self._convene_at = now
        return effects

    # ------------------------------------------------------------------------------------------------------------------
    # In a formation
    # ------------------------------------------------------------------------------------------------------------------

    def _tick_in(self, now: float) -> list[Any]:
        effects = self._after(self.steps.tick(now), now)
        if self.state != "in":
            return effects
        if self.first and now >= self._greet_at:
            self._greet_at = now + self._t.seek_s
            effects += [Send(p, self._here()) for p in self._live if p not in self.members]
        return effects + self._tick_hold(now)

    def _admit(self, now: float) -> list[Any]:
        """Take somebody in, if this is the moment."""
        if not self.first or self.steps.phase != "open":
            return []
        newcomer = self._admission.turn(self.members, now)
        if newcomer is None or newcomer not in self._live:
            return []
        self.steps.hold(now)
        self._guest = newcomer
        self._admission.begin(Transfer(self.ballot, self.place.step, newcomer, self.members), now)
        note = Note(f"holding at step {self.place.step} to take in {self._name(newcomer)}")
        return [note, *self._admission.tick(now)]

    def _tick_hold(self, now: float) -> list[Any]:
        if self.steps.phase != "holding":
            return []
        hold_s = self._t.hold_s if self.first else self._t.hold_s + self._t.apply_s
        if now - self.steps.since >= hold_s:
            return self._end(f"nobody was taken in within {hold_s:g} s", now)
        return self._admission.tick(now)

    def _heard_hold(self, sender: PeerId, message: StepHold, now: float) -> list[Any]:
        if self.first:
            self._admission.stands_there(sender)
            return self._admission.tick(now)
        if message.step != self.place.step or not self.steps.hold(now):
            return []
        self._guest = message.newcomer
        return [Send(sender, message)]

    # ------------------------------------------------------------------------------------------------------------------
    # Between two formations
    # ------------------------------------------------------------------------------------------------------------------

    def _after(self, effects: Sequence[Any], now: float) -> list[Any]:
        """What the steps say of the formation as a whole is dealt with here; all else is for the driver."""
        out: list[Any] = []
        for effect in effects:
            match effect:
                case Broken(reason, without):
                    self.heirs = tuple(h for h in self.heirs if h not in without)
                    out += self._end(reason, now)
                case Behind(reason):
                    out += self._leave(reason, now)
                case Diverged():
                    out += [*self._part(now), effect]
                    self.state = "diverged"
                case _:
                    out.append(effect)
        return out + self._admit(now)

    def _end(self, reason: str, now: float) -> list[Any]:
        """This formation is over: say so, and see to the next. One that nobody stood in leaves who was out, out."""
        effects = self._part(now)
        self._since = self._repeat_at = now
        self._reason = reason
        self.state = "over" if self.heirs else "out"
        if self.state == "out":
            effects += [Send(m, StepOver(self.ballot, reason)) for m in self.members if m != self.me]
            self.members, self._convene_at = (), now + self._t.takeover_s
            return effects
        self._convene_at = self._turn(now)
        note = Note(f"gradient formation {self.ballot} is over: {reason}")
        return [*effects, note, *self._tick_over(now)]

    def _part(self, now: float) -> list[Any]:
        self._admission.end(now)
        return [Abandon(self.ballot)] if self.state == "building" else self.steps.part()

    def _tick_over(self, now: float) -> list[Any]:
        effects: list[Any] = []
        if now >= self._repeat_at:
            self._repeat_at = now + self._t.repeat_s
            effects += [Send(m, StepOver(self.ballot, self._reason)) for m in self.members if m != self.me]
        if self._joining:
            late = now - self._since >= self._t.hold_s
            return effects + (self._leave(f"not taken in within {self._t.hold_s:g} s", now) if late else [])
        if now >= self._convene_at:
            self._convene_at = now + self._t.convene_s + self._rank * self._t.takeover_s
            effects.append(self._convene(self._living, now))
        return effects

    def _turn(self, now: float) -> float:
        """When this trainer is to convene: in its turn, and not twice in the time of a round."""
        return max(now + self._rank * self._t.takeover_s, self._convened + self._t.takeover_s)

    def _convene(self, members: Sequence[PeerId], now: float) -> Convene:
        self._convened = now
        above = max(self.ballot.counter, self.steps.highest, last_term(self.place.lineage).counter)
        return Convene(tuple(members), above)

    @property
    def _living(self) -> list[PeerId]:
        return [h for h in self.heirs if h in self._live]

    @property
    def _rank(self) -> int:
        return self._living.index(self.me)

    def _in(self, ballot: Ballot) -> bool:
        return self.state in ("building", "in") and ballot == self.ballot

    # ------------------------------------------------------------------------------------------------------------------
    # Other formations
    # ------------------------------------------------------------------------------------------------------------------

    def _here(self) -> StepHere:
        return StepHere(self._stood, list(self.heirs), self.place.trained)

    def _heard_seek(self, sender: PeerId, ballot: Ballot, now: float) -> list[Any]:
        self._admission.ask(sender, now + SILENT * self._t.seek_s)
        if (sender in self.heirs and ballot >= self._stood) or (sender in self.members and ballot >= self.ballot):
            return self._drop([sender], f"{self._name(sender)} is out", now)
        return [Send(sender, self._here())] if self._stood > NO_BALLOT else []

    def _heard_here(self, sender: PeerId, there: StepHere, now: float) -> list[Any]:
        if self.state == "out":
            self._heard = now
            return []
        known = sender in self.heirs and sender != self._guest
        if sender not in self._live or (known and there.ballot < self._stood):
            return []
        gone_on = f"{self._name(sender)} has gone on to {there.ballot}"
        if self.me in there.members:
            strangers = [h for h in self.heirs if h not in there.members]
            if there.ballot > self.ballot or (strangers and there.ballot >= self._stood):
                return self._drop(strangers, gone_on, now)
            return []
        rest = [h for h in self._living if h not in there.members]
        if (there.trained, len(there.members), there.ballot) > (self.place.trained, len(rest), self._stood):
            return self._leave(f"{self._names(there.members)} have gone on to {there.ballot} without it", now)
        return self._drop([h for h in self.heirs if h in there.members], gone_on, now) if sender in self.heirs else []

    def _drop(self, peers: Sequence[PeerId], reason: str, now: float) -> list[Any]:
        """These are not of this company any more; what it is in, or builds, is over."""
        self.heirs = tuple(h for h in self.heirs if h not in peers)
        return self._end(reason, now) if self.state in ("building", "in") else []

    def _names(self, peers: Sequence[PeerId]) -> str:
        return ", ".join(map(self._name, peers))


def _said(name: str, reason: str) -> str:
    """``reason`` as another trainer gave it; not as it heard it from a third."""
    return f"{reason.partition(' (says ')[0]} (says {name})"

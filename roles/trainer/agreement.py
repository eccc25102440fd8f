"""Where the trainers of a new formation stand, and from where they go on. Pure, and the same on every member.

Each member says once for a formation where its weights stand and which reduced gradient it holds (``StepStanding``).
Two may be a step apart, when one has applied what the others only hold. The rule:

1. If anybody has applied step ``s``, all apply it. They can: it was applied after a barrier, so everybody held it.
2. If all hold the same reduced gradient of step ``s``, all apply it. One who is gone may have applied and published it.
3. Otherwise nobody can have applied step ``s``: it is made again, from the untouched gradients.

Only those have a say in 2 who have trained in a formation since they were taken in: a newcomer holds nothing, and that
proves nothing. Who stands elsewhere (another lineage, other steps) is *behind* the one that has trained most, and has
to be taken in anew.

Why no step is applied twice, differently, or by some alone. Let somebody have applied reduction R of formation F, by
the barrier of F or by an agreement in a later formation. Then every member of that formation has said that it holds R
or has applied it. The next formation of any of them has members of this one only (``company.py`` sees to it), and
besides newcomers, who have no say; so all who have a say hold R, and the rule applies it. For this it matters that

a. nobody reports a reduction after it said that it holds none: results that come after the end of a formation are void;
b. a standing does not change within a ballot, and waits for an optimizer step that is under way;
c. a hold ends a formation: no newcomer comes while a reduction is in flight.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from mesh.effects import Send
from mesh.identity import PeerId
from mesh.version import Ballot, Lineage, Version
from transport.messages import Held, Place, StepStanding

NO_BALLOT = Ballot(0, "")


@dataclass(frozen=True)
class Agreement:
    """``step`` is where all stand after those who have not yet applied ``apply``. ``lost`` of the ``of`` members of the
    formation before are not here. ``differ``: digests of weights that should be alike and are not."""

    step: int
    lineage: Lineage
    apply: Held | None = None
    behind: tuple[PeerId, ...] = ()
    lost: int = 0
    of: int = 0
    differ: tuple[tuple[PeerId, str], ...] = ()


def last_term(lineage: Lineage) -> Ballot:
    return lineage.terms[-1][0] if lineage.terms else NO_BALLOT


def agree(standings: Mapping[PeerId, StepStanding]) -> Agreement:
    """``standings`` has one of every member, in the order of the formation."""
    best = max(standings.values(), key=_merit)
    there = [p for p, s in standings.items() if _is_at(s.place, best.place)]
    catching_up = [p for p, s in standings.items() if s.held is not None and _leads_to(s.place, s.held, best.place)]
    apply, step = None, best.place.step
    if catching_up:
        apply = standings[catching_up[0]].held
    else:
        voters = [p for p in there if standings[p].opened] or there
        held = standings[voters[0]].held
        if _follows(held, best.place) and all(standings[p].held == held for p in voters):
            apply, step = held, step + 1
            there = [p for p in there if standings[p].held == held]
    here = {*there, *catching_up}
    states = {p: standings[p].place.state for p in there}
    wrong = [p for p, state in states.items() if state and best.place.state and state != best.place.state]
    impaired = [p for p in wrong if not standings[p].opened]  # what was transferred to it is not what was sent
    return Agreement(
        step=step,
        lineage=best.place.lineage,
        apply=apply,
        behind=tuple(p for p in standings if p not in here or p in impaired),
        lost=best.opened - sum(1 for p in here if standings[p].opened),
        of=best.opened,
        differ=tuple(states.items()) if len(wrong) > len(impaired) else (),
    )


def _merit(s: StepStanding) -> tuple[int, int, Ballot, int, str]:
    return s.place.trained, s.place.step, last_term(s.place.lineage), s.opened, s.place.state


def _is_at(place: Place, best: Place) -> bool:
    """Whether these are the weights of ``best``. Where nothing was ever trained, there is no term yet."""
    if place.step != best.step:
        return False
    return not place.lineage.terms or best.lineage.holds(Version(last_term(place.lineage), place.step))


def _leads_to(place: Place, held: Held, best: Place) -> bool:
    """Whether ``place`` is one step behind ``best`` and holds that step."""
    return place.step + 1 == held.step == best.step and best.lineage.holds(Version(held.ballot, held.step))


def _follows(held: Held | None, best: Place) -> bool:
    """A gradient of an earlier formation is void once another has gone on without it."""
    return held is not None and held.step == best.step + 1 and held.ballot == last_term(best.lineage)


class Standings:
    """The exchange: everybody's standing for one ballot. One's own is repeated until all are there, then on demand."""

    def __init__(self, me: PeerId, members: Sequence[PeerId]):
        self.me, self.members = me, tuple(members)
        self._said: dict[PeerId, StepStanding] = {}

    @property
    def missing(self) -> list[PeerId]:
        return [m for m in self.members if m not in self._said]

    def say(self, mine: StepStanding) -> list[Any]:
        """Only the first is taken: what was once said for a ballot holds."""
        self._said.setdefault(self.me, mine)
        return self.repeat()

    def repeat(self) -> list[Any]:
        mine = self._said.get(self.me)
        return [Send(m, mine) for m in self.members if m != self.me] if mine is not None else []

    def hear(self, sender: PeerId, message: StepStanding) -> list[Any]:
        self._said.setdefault(sender, message)
        if message.reply or self.missing:
            return []
        return [Send(sender, replace(self._said[self.me], reply=True))]

    def agreement(self) -> Agreement | None:
        return None if self.missing else agree({m: self._said[m] for m in self.members})

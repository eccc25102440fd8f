"""Whether enough peers are here to go on: ``min_trainers`` and ``min_rollouts``. Pure.

Theory of operation. Every working peer counts for itself who is alive, by role. Below a minimum it waits for
replacements, and says so at once and now and then; a minimum missed for ``grace_s`` without a break ends the peer,
which leaves with exit code 75 for a scheduler to start it again. Time counts from the moment the peer came to the mesh:
so a mesh that starts waits for its minimum in the same way. When somebody left because the run is finished, nobody is
missed any more.

Who went, when and how is remembered for the line that says who is missing, until a peer of that name is back.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mesh.identity import PeerCard, Role

FINISHED = "finished"  # the reason with which peers leave a run that is over
SAY_AFTER_S = 1.0  # a peer restarted at once is not worth a line
SAY_EVERY_S = 15.0
REMEMBERED = 8  # of the last to go, for each role
NAMED = 3  # of them in a line


@dataclass(frozen=True)
class Shortage:
    """Fewer peers than needed. ``text`` says which, in one line; ``due`` whether it is time to say so (again); ``over``
    that ``grace_s`` has passed: save and leave."""

    text: str
    due: bool = False
    over: bool = False


@dataclass(frozen=True)
class _Gone:
    at: float
    name: str
    how: str
    why: str

    def __str__(self) -> str:
        return f"{self.name} {self.how}"


class Quorum:
    """``minimum`` peers of each role, this one included. All calls from one thread, with one clock."""

    def __init__(self, minimum: Mapping[Role, int], grace_s: float, now: float):
        self._minimum = dict(minimum)
        self._grace_s = grace_s
        self._below_since: dict[Role, float] = dict.fromkeys(minimum, now)
        self._gone: dict[Role, list[_Gone]] = {role: [] for role in minimum}
        self._say_at = now + SAY_AFTER_S
        self._finished = False

    def departed(self, card: PeerCard, dead: bool, reason: str, now: float) -> None:
        """A peer died or left."""
        self._finished |= not dead and reason == FINISHED
        gone = self._gone.get(card.role)
        if gone is not None:
            name = card.name if card.host in card.name else f"{card.name} on {card.host}"
            gone.append(_Gone(now, name, "died" if dead else "left", reason))
            del gone[:-REMEMBERED]

    def check(self, live: Sequence[PeerCard], now: float) -> Shortage | None:
        """What is missing of these living peers; None when nothing is."""
        lacking: dict[Role, int] = {}
        for role, least in self._minimum.items():
            here = [card for card in live if card.role == role]
            names = {card.name for card in here}
            self._gone[role] = [g for g in self._gone[role] if g.name.partition(" on ")[0] not in names]
            if len(here) < least:
                lacking[role] = least - len(here)
            else:
                self._below_since[role] = now
        if not lacking or self._finished:
            self._say_at = now + SAY_AFTER_S
            return None
        left_s = min(self._below_since[role] for role in lacking) + self._grace_s - now
        if left_s <= 0:
            return Shortage(self._parting(lacking, now), due=True, over=True)
        due = now >= self._say_at
        if due:
            self._say_at = now + SAY_EVERY_S
        missing = " and ".join(self._missing(role, n, now) for role, n in lacking.items())
        return Shortage(f"waiting for {missing}; leaves in {left_s:.0f} s", due)

    def _missing(self, role: Role, count: int, now: float) -> str:
        last = self._last(role, now)
        return f"{count} more {role}{'s' if count > 1 else ''}{f' ({last})' if last else ''}"

    def _last(self, role: Role, now: float, *, why: bool = False) -> str:
        """Who went last, newest first."""
        newest = self._gone[role][: -NAMED - 1 : -1]
        told = [f"{g} {now - g.at:.0f} s ago{f': {g.why}' if why and g.why else ''}" for g in newest]
        return ", ".join(told)

    def _parting(self, lacking: Mapping[Role, int], now: float) -> str:
        said = []
        for role, count in lacking.items():
            least, last = self._minimum[role], self._last(role, now, why=True)
            said.append(
                f"{least - count} of {least} {role}{'s' if least > 1 else ''} (mesh.min_{role}s) for "
                f"{now - self._below_since[role]:.0f} s (mesh.grace_s)"
                f"{f', last seen: {last}' if last else ', no other came'}"
            )
        return f"only {', and '.join(said)}"

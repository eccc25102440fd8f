"""What simulated trainers did, and what must hold of it: promise 10, and no step twice, differently or by some."""

from typing import TYPE_CHECKING

from mesh.identity import PeerId
from mesh.version import Ballot, Version
from roles.trainer.acts import Apply, Opened
from tests.sim.step_driver import Trains
from tests.sim.step_group import Content, digest
from transport.messages import Place

if TYPE_CHECKING:
    from tests.sim.world import World


class Record:
    """What was done, by whom, and what must hold of it. A trainer that left a company and came back is another."""

    def __init__(self) -> None:
        self.forks = 0
        self.steps = 0
        self._stood: dict[Ballot, dict[PeerId, int]] = {}
        self._opened: dict[Ballot, Place] = {}
        self._reduced: dict[tuple[Ballot, int], dict[PeerId, str]] = {}
        self._versions: dict[Version, str] = {}
        self._next: dict[str, dict[Content, list[frozenset[tuple[PeerId, int]]]]] = {}

    def stands(self, trains: Trains, ballot: Ballot) -> None:
        self._stood.setdefault(ballot, {})[trains.node.id] = trains.life

    def opened(self, opened: Opened) -> None:
        place = self._opened.setdefault(opened.ballot, opened.place)
        assert place == opened.place, f"{opened.ballot} opens at {place} and at {opened.place}"

    def reduced(self, trains: Trains, ballot: Ballot, step: int, digest: str) -> None:
        self._reduced.setdefault((ballot, step), {})[trains.node.id] = digest

    def applies(self, trains: Trains, apply: Apply) -> None:
        """An optimizer step begins: every member of the formation that decided it has the reduced gradient."""
        ballot = trains.company.ballot
        held = self._reduced.get((apply.ballot, apply.step), {})
        for member in trains.company.members:
            assert member in held, (
                f"{trains.node.label} applies step {apply.step} of {apply.ballot} in {ballot} before "
                f"{trains.world.name(member)} has reduced it"
            )
        assert len(set(held.values())) == 1, f"step {apply.step} of {apply.ballot} was reduced differently"

    def applied(self, trains: Trains, apply: Apply, ballot: Ballot, before: str, content: Content) -> None:
        state = digest(before, sorted(content))
        version = Version(apply.ballot, apply.step)
        assert self._versions.setdefault(version, state) == state, f"{version} has two states"
        company = frozenset((peer, life) for peer, life in self._stood[ballot].items())
        others = self._next.setdefault(before, {})
        if content not in others:
            self.forks += bool(others)
            self.steps += 1
        for other, companies in others.items():
            for theirs in companies if other != content else ():
                both = [trains.world.name(peer) for peer, _ in sorted(theirs & company)]
                assert not both, f"{trains.node.label} applies step {apply.step} differently from the company of {both}"
        others.setdefault(content, []).append(company)


def check(world: "World") -> None:
    """After every event, of the trainer that acted."""
    node = world.touched
    if node is None or not node.running or len(node.parts) < 2:
        return
    trains = node.parts[1]
    assert isinstance(trains, Trains)
    company, place = trains.company, trains.place
    if not trains.applying:
        assert place.trained == len(trains.trained), f"{place.trained} groups are said to be in the weights"
    assert not company.heirs or node.id in company.heirs
    if company.state == "in":
        assert company.heirs[: len(company.members)] == company.members
    held = company.steps.held
    if held is not None and not trains.applying:
        buffer = trains.buffers.get((held.ballot, held.step))
        assert buffer is not None, f"{held} has no buffer"
        assert buffer.digest == held.digest, f"the buffer of {held} was written to"
        assert held.step == place.step + 1

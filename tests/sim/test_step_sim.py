"""Several trainers on the simulated network: whatever happens, no step is made twice, differently or by some alone, and
whoever lives goes on together. And faults planted for the simulator to find."""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from mesh.version import Ballot
from roles.trainer import agreement
from roles.trainer.agreement import Agreement, agree
from roles.trainer.step import Steps
from tests.sim.step import deaths, scenario
from tests.sim.step_driver import POINTS, Trains
from tests.sim.step_group import Buffer
from tests.sim.world import Failure
from transport.messages import Held


def seeds_of(point: str, count: int) -> range:
    return range(POINTS.index(point), len(POINTS) * count, len(POINTS))


@pytest.mark.parametrize("first", range(0, 300, 50))
def test_trainers_go_on_together_after_any_trouble(first):
    for seed in range(first, first + 50):
        scenario(seed)


@pytest.mark.parametrize("point", POINTS)
def test_a_death_at_any_point_of_a_step_costs_no_step_and_changes_none(point):
    for seed in seeds_of(point, 12):
        assert deaths(seed).sprung[0] == point


def test_a_seed_replays_exactly():
    one, other = scenario(3), scenario(3)
    assert one.lines == other.lines
    assert (one.events, one.sent) == (other.events, other.sent)
    assert one.lines != scenario(4).lines


def test_the_seeds_are_no_calm_ones(monkeypatch):
    rules: Counter[str] = Counter()

    def counting(standings):
        found = agree(standings)
        steps = {s.place.step for s in standings.values()}
        held = [s.held is not None for s in standings.values()]
        rules["applied by some"] += found.apply is not None and len(steps) > 1
        rules["held by all"] += found.apply is not None and len(steps) == 1
        rules["held by some"] += found.apply is None and any(held)
        rules["behind"] += bool(found.behind)
        return found

    monkeypatch.setattr(agreement, "agree", counting)
    worlds = [scenario(seed) for seed in range(80)] + [deaths(seed) for seed in seeds_of("telling its reduction", 20)]
    lines = [line for world in worlds for line in world.lines]
    for what in ("slept", "part:", "timed out", "is left behind", "are lost at once", "no part in", "is taken in at"):
        assert any(what in line for line in lines), what
    assert all(rules[rule] > 0 for rule in ("applied by some", "held by all", "held by some", "behind")), rules
    assert len({point for world in worlds for point in world.sprung}) > 8


# Faults that were planted for the simulator to find ------------------------------------------------------------------


def found_within(seeds: int | range, run: Callable[[int], object] = scenario) -> str:
    """What the simulator says of the first seed that fails; empty when none does."""
    for seed in range(seeds) if isinstance(seeds, int) else seeds:
        try:
            run(seed)
        except Failure as failure:
            return str(failure).splitlines()[0]
    return ""


def test_an_optimizer_step_before_the_barrier_is_found(monkeypatch):
    def hasty(self, now):
        return self._apply(self.held, now) if self.phase == "reduced" else []

    monkeypatch.setattr(Steps, "_barrier", hasty)
    assert re.search(r"applies step \d+ .* before .* has reduced it", found_within(20))


def test_a_step_made_again_although_the_dead_one_may_have_applied_it_is_found(monkeypatch):
    def forgetful(standings):
        found = agree(standings)
        level = len({s.place.step for s in standings.values()}) == 1
        return replace(found, apply=None, step=found.step - 1) if found.apply is not None and level else found

    monkeypatch.setattr(agreement, "agree", forgetful)
    assert "differently from the company of" in found_within(seeds_of("after the optimizer step", 40), deaths)


def test_a_step_made_again_although_one_who_lives_has_applied_it_is_found(monkeypatch):
    as_it_is = Steps._agree

    def heedless(self, now):
        found = self._standings.agreement()
        if found is None or found.step == self.place.step or self.held is None or not found.apply:
            return as_it_is(self, now)
        if all(s.place.step == self.place.step for s in self._standings._said.values()):
            return as_it_is(self, now)
        return self._open(Agreement(step=self.place.step, lineage=self.place.lineage), now)

    monkeypatch.setattr(Steps, "_agree", heedless)
    assert re.search(r"opens at .* and at", found_within(seeds_of("telling its reduction", 80), deaths))


def test_a_buffer_reused_while_an_abandoned_operation_still_writes_is_found(monkeypatch):
    buffers: dict[int, Buffer] = {}
    monkeypatch.setattr(Trains, "fresh_buffer", lambda self: buffers.setdefault(id(self), Buffer()))
    assert "was written to" in found_within(200)


def test_a_result_taken_after_the_end_of_its_formation_is_found(monkeypatch):
    as_it_is = Steps.reduced

    def credulous(self, ballot, step, digest, now):
        effects = as_it_is(self, ballot, step, digest, now)
        if self.held is None and not effects:
            self.held = Held(ballot, step, digest)
        return effects

    monkeypatch.setattr(Steps, "reduced", credulous)
    assert "Held(" in found_within(100)


def test_ballots_compared_by_counter_alone_are_found(monkeypatch):
    monkeypatch.setattr(Ballot, "__eq__", lambda self, other: other is not None and self.counter == other.counter)
    monkeypatch.setattr(Ballot, "__hash__", lambda self: hash(self.counter))
    monkeypatch.setattr(Ballot, "__lt__", lambda self, other: self.counter < other.counter)
    monkeypatch.setattr(Ballot, "__le__", lambda self, other: self.counter <= other.counter)
    monkeypatch.setattr(Ballot, "__gt__", lambda self, other: self.counter > other.counter)
    monkeypatch.setattr(Ballot, "__ge__", lambda self, other: self.counter >= other.counter)
    assert "two lists of members for" in found_within(20)


def test_a_step_begun_in_a_hold_is_found(monkeypatch):
    monkeypatch.setattr(Steps, "hold", lambda self, now: self.phase == "open")
    assert found_within(20)

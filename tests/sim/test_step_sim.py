"""Several trainers on the simulated network: whatever happens, no step is made twice, differently or by some alone, and
whoever lives goes on together."""

from collections import Counter

import pytest

from roles.trainer import agreement
from roles.trainer.agreement import agree
from tests.sim.step import deaths, scenario, seeds_of
from tests.sim.step_driver import POINTS


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

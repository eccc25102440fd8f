"""What tells that something got slower."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from check import one_sided, slower
from parts.measure import by_turns, compare
from parts.paced_mesh import BLOCK, Waits


def ratios(mesh: list[float], more_is_better: bool = False, name: str = "a step") -> dict:
    result = compare(name, "s", mesh, [1.0] * len(mesh), "ideal", more_is_better=more_is_better)
    return {f"{name}, against ideal": result.as_dict()}


def test_only_what_is_worse_than_the_baseline_and_a_margin_got_slower():
    before = ratios([1.0, 1.1, 1.2])
    assert slower(before, ratios([1.6])) == []
    assert slower(before, ratios([0.1])) == []
    assert slower(before, ratios([1.8])) == ["a step, against ideal: 1.8 times the reference, was 1.05 to 1.15"]


def test_of_a_throughput_less_is_worse():
    before = ratios([1.0, 1.1, 1.2], more_is_better=True)
    assert slower(before, ratios([9.0])) == []
    assert len(slower(before, ratios([0.5]))) == 1


def test_a_ratio_that_only_one_of_both_has_is_said_and_not_compared():
    before, now = ratios([1.0], name="old"), ratios([9.0], name="new")
    assert slower(before, now) == []
    assert len(one_sided(before, now)) == 2


def test_contestants_begin_by_turns():
    order: list[str] = []
    found = by_turns({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 3)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert len(found["a"]) == 3


def test_a_paced_run_waits_as_long_as_it_says_on_average_though_the_tail_is_cut():
    waits = Waits("heavy-tailed", generate_s=0.5, train_s=0.5, sigma=1.0)
    draws = waits.draws(seed=3, rollout=1)
    first = [next(draws) for _ in range(BLOCK)]
    assert sum(first) / BLOCK == pytest.approx(0.5, rel=0.01)
    assert max(first) <= waits.most * 0.5 * 1.001
    again = waits.draws(seed=3, rollout=1)
    assert first == [next(again) for _ in range(BLOCK)]

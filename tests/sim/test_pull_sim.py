"""Pulls on the simulated network, and faults planted for it to find."""

import pytest

from tests.sim.pull import scenario
from tests.sim.world import Failure
from transport.weights import pull
from transport.weights.pull import Pull, PullHost


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_everybody_gets_the_version_or_says_why_not(first):
    for seed in range(first, first + 50):
        scenario(seed)


def test_a_seed_replays_exactly():
    one, other = scenario(5), scenario(5)
    assert (one.lines, one.events) == (other.lines, other.events)
    assert one.lines != scenario(6).lines


def test_the_seeds_are_no_calm_ones():
    lines = [line for seed in range(60) for line in scenario(seed).lines]
    for what in ("has all of it", "dies", "needs its buffer", "another digest than announced", "no peer to pull from"):
        assert any(what in line for line in lines), what


def found() -> str:
    """What is said of the first seed that fails; empty when none does."""
    for seed in range(100):
        try:
            scenario(seed)
        except Failure as failure:
            return str(failure).splitlines()[0]
    return ""


def test_a_corrupt_bucket_that_is_taken_is_found(monkeypatch):
    checked = Pull.checked
    monkeypatch.setattr(Pull, "checked", lambda self, bucket, ok, now: checked(self, bucket, True, now))
    assert "not whole" in found()


def test_a_chunk_that_is_never_asked_for_again_is_found(monkeypatch):
    monkeypatch.setattr(pull, "ASK_AGAIN_S", 1e9)
    monkeypatch.setattr(pull, "SILENT_S", 1e9)
    monkeypatch.setattr(pull, "STALLED_S", 1e9)
    assert "still pull" in found()


def test_a_host_that_does_not_count_what_it_sends_is_found(monkeypatch):
    asked = PullHost.asked
    monkeypatch.setattr(PullHost, "asked", lambda self, peer, ask, size, *rest: asked(self, peer, ask, 0, *rest))
    assert "sends" in found()


def test_more_chunks_under_way_than_allowed_are_found(monkeypatch):
    monkeypatch.setattr(pull, "IN_FLIGHT", 40)
    assert "asks for" in found()

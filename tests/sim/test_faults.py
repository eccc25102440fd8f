"""The simulator bites: it finds every fault of ``faults.py`` within the seeds given, and says what it is."""

import re

import pytest

from tests.sim.faults import FAULTS, Fault, find


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.name.replace(" ", "_"))
def test_a_planted_fault_is_found(fault: Fault, monkeypatch):
    fault.plant(monkeypatch)
    said = find(fault)
    assert said, f"nobody finds that {fault.name}"
    assert re.search(fault.says, said.splitlines()[0]), said


def test_a_failure_tells_the_promise_the_events_and_how_to_replay_it(monkeypatch):
    [fault] = [f for f in FAULTS if f.name == "a dead peer is believed alive for ever"]
    fault.plant(monkeypatch)
    first, *events, replay = find(fault).splitlines()
    assert first.startswith("seed ")
    assert any("starts at tcp:" in line or "accused by" in line for line in events)
    assert "python -m tests.sim" in replay


def test_no_fault_is_listed_twice_and_most_promises_have_one():
    assert len({f.name for f in FAULTS}) == len(FAULTS)
    assert {f.promise for f in FAULTS} >= {1, 2, 3, 4, 5, 6, 10}

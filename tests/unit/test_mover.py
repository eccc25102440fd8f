"""The thread that builds formations, with groups that are values."""

import threading
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from mesh.version import Ballot
from roles.formations import group_builder
from transport.formation import FormationBroken
from transport.messages import Go, Member
from transport.weights import mover as mover_module
from transport.weights.mover import Mover

ME = "a" * 16
PATIENCE_S = 30.0


@dataclass
class Built:
    ballot: Ballot
    closed: threading.Event = field(default_factory=threading.Event)

    def close(self) -> None:
        self.closed.set()


def go(counter: int, *members: Member) -> Go:
    return Go("weights", Ballot(counter, "b" * 16), list(members))


def test_a_flood_of_calls_builds_the_newest_and_fills_no_queue():
    entered, on, formed = threading.Event(), threading.Event(), threading.Event()
    begun: list[int] = []
    here: list[Any] = []

    def build(called: Go, abandon: threading.Event) -> Any:
        begun.append(called.ballot.counter)
        entered.set()
        assert on.wait(PATIENCE_S)
        if abandon.is_set():
            raise FormationBroken("abandoned")
        return Built(called.ballot)

    def posted(fn: Any) -> None:
        fn()
        formed.set()

    mover = Mover(SimpleNamespace(post=posted), build, here.append, lambda *_: None)  # type: ignore[arg-type]
    try:
        mover.form(go(1))
        assert entered.wait(PATIENCE_S)
        last = 4 * mover_module.MOST_QUEUED
        for counter in range(2, last + 1):
            mover.form(go(counter))
        on.set()
        assert formed.wait(PATIENCE_S)
    finally:
        mover.close()
    assert begun == [1, last]
    assert [built.ballot.counter for built in here] == [last]
    assert here[0].closed.is_set()


@pytest.mark.parametrize("members", [[Member(ME, 7)], [Member(ME), Member(ME)], [Member("b" * 16)]])
def test_a_convener_that_names_impossible_ranks_is_at_fault_and_ends_no_mover(members):
    peer = SimpleNamespace(id=ME, ip="127.0.0.1", request_store=None, config=SimpleNamespace(weights=SimpleNamespace()))
    with pytest.raises(FormationBroken, match="names no possible ranks") as broken:
        group_builder(peer)(go(1, *members), threading.Event())
    assert broken.value.members == (Member("b" * 16),)

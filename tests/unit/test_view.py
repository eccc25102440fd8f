"""The live view: whatever peers are called and say, the numbers are whole at 80 columns."""

import pytest
from rich.console import Console

from mesh import view
from mesh.identity import PeerCard
from mesh.version import Ballot, Version
from transport.messages import Status

FIGURES = {"tokens_per_s": 12345.0, "groups": 128.0, "probe_difference": 3.6e-7, "step": 7.0, "time/step_s": 2.0,
           "time/learn_s": 1.0, "ledger/issued": 9.0}  # fmt: skip


def seen_of(*peers: tuple[str, str]) -> view.Seen:
    seen = view.Seen("run", 200)
    for name, state in peers:
        role = "trainer" if name.startswith("trainer") else "rollout"
        seen.cards[name] = PeerCard(name, name, role, "host", "tcp://h:1", "tcp://h:2")
        status = Status(seq=0, state=state, version=Version(Ballot(1, "aa"), 1234), figures=FIGURES, texts={})
        seen.status[name] = (0.0, status)
    return seen


def drawn(seen: view.Seen, width: int) -> str:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(view.draw(seen, width))
    return capture.get()


@pytest.mark.parametrize("width", [80, 120])
def test_a_long_name_or_state_gives_way_to_the_numbers(width):
    seen = seen_of(("trainer-0@a", "training"), ("rollout-17@a-host-with-a-very-long-name-of-its-own", "w" * 90))
    seen.gone["rollout-3@a-host-with-a-very-long-name"] = "exit 1: " + "because " * 20
    lines = drawn(seen, width).splitlines()
    assert max(map(len, lines)) <= width
    for name in ("trainer-0@a", "rollout-17@a-host"):
        [line] = [line for line in lines if name in line]
        assert "v1234@1" in line
        assert "12,345" in line
        assert "128" in line
        assert "3.6e-07" in line


def test_where_the_time_goes_and_what_became_of_groups_is_shown():
    text = drawn(seen_of(("trainer-0@a", "training")), 80)
    assert "step 2.00 s: learn 50%" in text
    assert "issued 9" in text


def test_a_name_that_tells_neither_role_nor_host_is_completed():
    assert "guest@host (rollout)" in drawn(seen_of(("guest", "sampling")), 80)

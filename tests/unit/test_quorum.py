import random

import pytest

from mesh.identity import PeerCard
from mesh.quorum import SAY_AFTER_S, SAY_EVERY_S, Quorum

GRACE_S = 60.0


def card(name: str, host: str = "h1") -> PeerCard:
    role = "trainer" if name.startswith("trainer") else "observer" if name.startswith("view") else "rollout"
    return PeerCard(name.ljust(16, "0"), f"{name}@{host}", role, host, "tcp://h:1", "tcp://h:2")


def quorum(trainers: int = 1, rollouts: int = 2, now: float = 0.0) -> Quorum:
    return Quorum({"trainer": trainers, "rollout": rollouts}, GRACE_S, now)


TRAINER, ONE, TWO = card("trainer"), card("rollout-1"), card("rollout-2")


def test_nothing_is_missing_of_a_whole_mesh() -> None:
    assert quorum().check([TRAINER, ONE, TWO], 1000.0) is None


def test_an_observer_is_no_peer_that_works() -> None:
    assert quorum().check([TRAINER, ONE, card("view")], 1.0) is not None


def test_a_mesh_that_waits_says_for_whom_and_how_long() -> None:
    q = quorum()
    assert q.check([TRAINER, ONE, TWO], 100.0) is None
    q.departed(TWO, True, "did not answer trainer", 101.0)
    short = q.check([TRAINER, ONE], 113.0)
    assert short is not None
    assert short.text == "waiting for 1 more rollout (rollout-2@h1 died 12 s ago); leaves in 47 s"
    assert not short.over


def test_a_mesh_that_starts_waits_for_its_minimum() -> None:
    q = quorum(trainers=2)
    short = q.check([TRAINER], 10.0)
    assert short is not None
    assert short.text == "waiting for 1 more trainer and 2 more rollouts; leaves in 50 s"
    late = q.check([TRAINER], GRACE_S)
    assert late is not None
    assert late.text == (
        "only 1 of 2 trainers (mesh.min_trainers) for 60 s (mesh.grace_s), no other came, and "
        "0 of 2 rollouts (mesh.min_rollouts) for 60 s (mesh.grace_s), no other came"
    )
    assert q.check([TRAINER, card("trainer-2"), ONE, TWO], 61.0) is None


def test_it_is_said_soon_and_then_now_and_then() -> None:
    q = quorum()
    assert q.check([TRAINER, ONE, TWO], 0.0) is None
    said = [t / 10 for t in range(500) if (short := q.check([TRAINER, ONE], t / 10)) and short.due]
    assert said == [SAY_AFTER_S + i * SAY_EVERY_S for i in range(4)]


def test_a_peer_back_at_once_is_not_worth_a_line() -> None:
    q = quorum()
    assert q.check([TRAINER, ONE, TWO], 0.0) is None
    short = q.check([TRAINER, ONE], 0.5 * SAY_AFTER_S)
    assert short is not None
    assert not short.due
    assert q.check([TRAINER, ONE, TWO], 0.6 * SAY_AFTER_S) is None
    again = q.check([TRAINER, ONE], 1.1 * SAY_AFTER_S)
    assert again is not None
    assert not again.due


def test_after_the_grace_it_is_over_and_the_line_names_who_is_missing_and_why() -> None:
    q = quorum()
    assert q.check([TRAINER, ONE, TWO], 0.0) is None
    q.departed(ONE, False, "stopped", 5.0)
    q.departed(TWO, True, "did not answer trainer@h1", 10.0)
    short = q.check([TRAINER], 5.0 + GRACE_S)
    assert short is not None
    assert short.over
    assert short.due
    assert short.text == (
        "only 0 of 2 rollouts (mesh.min_rollouts) for 65 s (mesh.grace_s), last seen: "
        "rollout-2@h1 died 55 s ago: did not answer trainer@h1, rollout-1@h1 left 60 s ago: stopped"
    )


def test_a_shortage_that_ends_within_the_grace_is_forgotten() -> None:
    q = quorum()
    for start in range(0, 1000, 50):
        assert q.check([TRAINER, ONE, TWO], start) is None
        short = q.check([TRAINER, ONE], start + 49)
        assert short is not None
        assert not short.over


def test_each_role_has_a_grace_of_its_own() -> None:
    q = quorum(trainers=1, rollouts=1)
    for t, live in ((0.0, [TRAINER, ONE]), (40.0, [ONE]), (80.0, [TRAINER]), (130.0, [ONE])):
        short = q.check(live, t)
        assert short is None or not short.over, t
    short = q.check([TRAINER], 191.0)
    assert short is not None
    assert short.over, "no rollout since 130"
    assert "mesh.min_rollouts" in short.text


def test_who_is_back_is_missed_no_more() -> None:
    q = quorum()
    q.departed(ONE, True, "", 1.0)
    q.departed(TWO, True, "", 2.0)
    back = PeerCard("f" * 16, TWO.name, "rollout", "h1", "tcp://h:3", "tcp://h:4")
    short = q.check([TRAINER, back], 3.0)
    assert short is not None
    assert "rollout-1@h1" in short.text
    assert "rollout-2@h1" not in short.text


def test_a_name_without_its_host_is_told_with_it() -> None:
    q = quorum()
    mine = PeerCard("a" * 16, "mine", "rollout", "h7", "tcp://h:3", "tcp://h:4")
    q.departed(mine, True, "", 1.0)
    short = q.check([TRAINER, ONE], 3.0)
    assert short is not None
    assert "(mine on h7 died 2 s ago)" in short.text
    assert q.check([TRAINER, ONE, mine], 3.0) is None
    short = q.check([TRAINER, ONE], 4.0)
    assert short is not None
    assert "mine" not in short.text


def test_who_leaves_a_finished_run_is_missed_by_nobody() -> None:
    q = quorum()
    assert q.check([TRAINER, ONE, TWO], 0.0) is None
    q.departed(ONE, False, "finished", 1.0)
    assert q.check([TRAINER], 1000.0) is None


@pytest.mark.parametrize("seed", range(20))
def test_it_is_over_exactly_when_the_minimum_was_missed_for_the_grace(seed: int) -> None:
    rng = random.Random(seed)
    q, now, enough_at = quorum(rollouts=3), 0.0, 0.0
    peers = [card(f"rollout-{i}") for i in range(5)]
    for _ in range(300):
        now += rng.random() * 10
        live = [TRAINER, *rng.sample(peers, rng.choice((2, 2, 2, 2, 2, 2, 3, 4)))]
        short = q.check(live, now)
        if len(live) > 3:
            enough_at = now
            assert short is None
        else:
            assert short is not None
            assert short.over == (now - enough_at >= GRACE_S)

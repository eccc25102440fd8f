"""All pure machines together on the simulated network: one trainer, a few rollouts, any trouble; promises 2 to 6 after
every event, and training to the last step once the network is calm."""

import pytest

from roles.trainer.ledger import Ledger, replay
from tests.sim.mesh import calm_scenario, scenario
from transport.accounts import Accounts, Opened


@pytest.mark.parametrize("first", range(0, 200, 25))
def test_training_goes_on_to_its_last_step_and_every_promise_holds(first):
    for seed in range(first, first + 25):
        scenario(seed)


def test_without_trouble_no_broadcast_fails():
    """Whoever said it is ready takes part, also when an evaluation wants that very version at once."""
    for seed in range(40):
        lines = calm_scenario(seed).lines
        assert [line for line in lines if "broadcast of" in line] == [], seed
        assert any("broadcasts v" in line for line in lines)


def test_a_version_that_nobody_holds_any_more_is_waited_for_by_nobody():
    scenario(1070)


def test_a_seed_replays_exactly():
    one, other = scenario(3), scenario(3)
    assert one.lines == other.lines
    assert (one.events, one.sent) == (other.events, other.sent)
    assert one.lines != scenario(4).lines


def test_the_seeds_are_no_calm_ones():
    worlds = [scenario(seed) for seed in range(20)]
    lines = [line for world in worlds for line in world.lines]
    for what in ("is killed", "slept", "part:", "cannot prove", "sits out", "formation", "refuses"):
        assert any(what in line for line in lines), what
    assert sum(len(world.promises.terms) > 1 for world in worlds) > 5  # trainers that were replaced
    outcomes = [outcome for world in worlds for outcome in world.promises.credits.values()]
    assert {"trained", "superseded", "failed", "lost", "evaluated"} == set(outcomes)


@pytest.mark.parametrize("seed", [0, 7, 12])
def test_the_ledgers_of_a_run_replay_to_the_accounts_it_kept(seed, tmp_path):
    world = scenario(seed)
    [disk] = [d["trainer"] for d in world.disks.values() if "trainer" in d]
    kept = Accounts()
    for peer, lines in disk.ledgers.items():
        opened, *rest = lines.lines
        assert isinstance(opened, Opened)
        ledger = Ledger(tmp_path / f"{peer}.jsonl", peer=peer, run=opened.run, first_id=opened.first_id)
        for line in rest:
            ledger.append(line)
        ledger.close()
        kept.add(lines.accounts())
    result = replay(tmp_path.glob("*.jsonl"))
    assert result.closes()
    assert (result.groups, result.tokens) == (kept.groups, kept.tokens)
    assert result.groups["in_flight"] == 0

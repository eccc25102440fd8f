"""Nothing grows while a trainer stands still and its rollouts could go on."""

import os
import time

import pytest
from processes import Mesh, Process, soon

PAUSE_S = float(os.environ.get("PAUSE_S", 15.0))  # over which nothing may grow; minutes show no more
MEMORY_MIB = 24  # of a process, in that time
LIMIT = 3 * 8  # (max_lag + 1) x groups_per_step
STEPS = 8  # before and after


def open_groups(mesh: Mesh) -> tuple[int, int]:
    """Groups ordered so far and those of them that have not ended, by the ledger."""
    groups = mesh.accounts().groups
    assert groups["in_flight"] <= LIMIT, groups
    return groups["issued"], groups["in_flight"]


@pytest.mark.timeout(600)
def test_memory_and_groups_stay_flat_while_the_trainer_is_paused_and_work_goes_on_at_once(mesh: Mesh):
    settings = {"run.steps": 100_000}
    trainer = mesh.start("trainer", set=settings, fault="pauses")
    peers = [trainer, *(mesh.start("rollout", name=name, set=settings) for name in ("one", "two"))]
    mesh.reaches(STEPS)
    (mesh.gate / "paused").touch()
    soon((mesh.gate / "stands").exists, "the trainer stands still")
    with mesh.watched() as seen:
        soon(lambda: idle(seen), "the rollouts have done what was ordered")
        step, ordered = mesh.step(), open_groups(mesh)
        before = [peer.memory() for peer in peers]
        until = time.monotonic() + PAUSE_S
        while time.monotonic() < until:
            assert open_groups(mesh) == ordered, "the trainer orders more than it can hold"
            assert [peer.code for peer in peers] == [None] * 3
            assert grown(peers, before) < MEMORY_MIB
            time.sleep(0.2)
        assert idle(seen)
        assert {"trainer", "one", "two"} <= seen.keys()
    assert mesh.step() == step, "it was paused"
    (mesh.gate / "paused").unlink()
    mesh.reaches(step + STEPS)
    issued, _ = open_groups(mesh)
    assert issued > ordered[0]
    for peer in peers:
        peer.interrupt()
    assert [peer.ends() for peer in peers] == [130] * 3
    assert "died" not in "".join(peer.said for peer in peers), "a paused trainer is alive"


def idle(seen: dict) -> bool:
    """Whether both rollouts wait for credit, with a proved version."""
    return all(name in seen and seen[name].state == "waiting for credit" for name in ("one", "two"))


def grown(peers: list[Process], before: list[int]) -> int:
    return max((peer.memory() - memory) >> 20 for peer, memory in zip(peers, before, strict=True))

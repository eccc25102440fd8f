"""Signals: the first lets a peer leave cleanly within seconds, the second ends it at once, and no child is left."""

import os
import signal

import psutil
import pytest
from processes import soon

GONE_S = 10.0
LONG = {"run.steps": 1000}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_rollout_gives_its_credits_back_and_says_goodbye(mesh, number):
    trainer, rollout = mesh.start("trainer", set=LONG), mesh.start("rollout", set=LONG)
    mesh.reaches(2)
    mesh.hold()
    me = mesh.peer_id("rollout")
    soon(lambda: [c for c in mesh.accounts().open.values() if c.issued.to == me], "it has credits")
    os.kill(rollout.pid, number)
    assert rollout.ends(GONE_S) == 130
    assert f"stopped by {number.name}" in rollout.said
    trainer.says("rollout left: stopped")
    soon(lambda: not [c for c in mesh.accounts().open.values() if c.tokens is None], "no order is left with it")
    assert trainer.code is None


def test_a_rollout_that_comes_when_all_is_over_says_so_and_leaves(mesh):
    peers = [mesh.start(role, set={"run.steps": 1}) for role in ("trainer", "rollout")]
    assert [peer.ends() for peer in peers] == [0, 0]
    late = mesh.start("rollout", name="late", fault="soon_late", set={"run.steps": 1})
    assert late.ends() == 0
    assert "holds a run that has finished, and no trainer has taken it up again" in late.said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_trainer_saves_and_says_goodbye(mesh, number):
    trainer, rollout = mesh.start("trainer", set=LONG), mesh.start("rollout", set=LONG)
    mesh.reaches(2)
    os.kill(trainer.pid, number)
    assert trainer.ends(GONE_S) == 130
    rollout.says("trainer left: stopped")
    rollout.says("waiting for 1 more trainer (trainer on ")
    [saved] = (mesh.run / "checkpoints").iterdir()
    assert int(saved.name.split("-")[0]) >= mesh.step()
    rollout.interrupt()
    assert rollout.ends(GONE_S) == 130
    mesh.leaves_nothing_running()


@pytest.mark.parametrize("role", ["trainer", "rollout"])
def test_a_second_signal_ends_a_peer_at_once(mesh, role):
    peer = mesh.start(role, fault="never_leaves")
    peer.joins(mesh)
    peer.interrupt()
    peer.says("leaving: stopped")
    assert peer.code is None
    peer.interrupt()
    assert peer.ends(GONE_S) == 130
    mesh.leaves_nothing_running()


def test_a_peer_that_still_loads_leaves_by_the_first_signal(mesh):
    rollout = mesh.start("rollout", fault="loads_for_ever")
    rollout.says("loading")
    rollout.interrupt()
    assert rollout.ends(GONE_S) == 130
    assert "stopped by SIGINT" in rollout.said
    assert "Traceback" not in rollout.said


def test_a_peer_that_waits_for_its_rendezvous_leaves_by_the_first_signal(mesh):
    rollout = mesh.start("rollout", set={"mesh.rendezvous": "tcp://127.0.0.1:9", "mesh.join_timeout_s": 600})
    soon(lambda: [p for p in children(rollout.pid) if "reward_worker" in " ".join(p.cmdline())], "it is about to join")
    rollout.interrupt()
    assert rollout.ends(GONE_S) == 130
    mesh.leaves_nothing_running()


def test_a_local_mesh_leaves_whole(mesh):
    """By SIGTERM; ``test_peers_come_and_go.py`` has Ctrl-C and kill."""
    up = mesh.up("--rollouts", "2", set=LONG)
    mesh.reaches(2)
    assert len(children(up.pid)) >= 5, "a trainer, and two rollouts with a reward worker each"
    os.kill(up.pid, signal.SIGTERM)
    assert up.ends(2 * GONE_S) == 130
    mesh.leaves_nothing_running()
    assert len(list((mesh.run / "checkpoints").iterdir())) == 1


def test_no_child_survives_a_peer_that_is_killed(mesh):
    rollout = mesh.start("rollout", fault="engine_process")
    rollout.joins(mesh)
    soon((mesh.gate / "engine").exists, "the engine's process has started")
    started = children(rollout.pid)
    assert len(started) == 2, "a reward worker and the engine's process"
    rollout.kill()
    soon(lambda: not [p for p in started if alive(p)], "both have ended with it", GONE_S)


def children(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False

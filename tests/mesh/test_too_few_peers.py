"""Fewer peers than the mesh needs: it waits, says for whom, and leaves with exit code 75 after saving."""

import re

import pytest
from processes import soon

NEEDS = {"run.steps": 1000, "mesh.min_rollouts": 2}


@pytest.mark.parametrize(("role", "missing"), [("trainer", "rollout"), ("rollout", "trainer")])
def test_a_peer_that_stays_alone_asks_to_be_tried_again(mesh, role, missing):
    alone = mesh.start(role, set={"mesh.grace_s": 2})
    assert alone.ends() == 75
    assert f"waiting for 1 more {missing}; leaves in 1 s" in alone.said
    line = alone.said.splitlines()[-1]
    for text in (f"only 0 of 1 {missing} (mesh.min_{missing}s) for 2 s (mesh.grace_s)", f"--run {mesh.run}"):
        assert text in line
    assert "Traceback" not in alone.said
    mesh.leaves_nothing_running()


def test_a_mesh_waits_for_its_minimum_at_the_start_and_for_replacements(mesh):
    trainer, first = mesh.start("trainer", set=NEEDS), mesh.start("rollout", name="first", set=NEEDS)
    with mesh.watched() as seen:
        soon(lambda: "first" in seen and seen["first"].version is not None, "the first rollout has proved weights")
        waiting = "waiting for 1 more rollout; leaves in "
        soon(lambda: all(seen[name].state.startswith(waiting) for name in ("trainer", "first")), "both say so")
        assert not mesh.accounts().open, "nothing is ordered before all are here"
        second = mesh.start("rollout", name="second", set=NEEDS)
        mesh.reaches(3)
        second.kill()
        for process in (trainer, first):
            process.says("waiting for 1 more rollout (second on ")
        mesh.start("rollout", name="third", set=NEEDS)
        soon(lambda: not any(s.state.startswith("waiting for 1 more") for s in seen.values()), "enough are here again")
        mesh.reaches(mesh.step() + 3)


def test_a_mesh_that_lost_a_peer_for_good_saves_and_leaves(mesh):
    settings = NEEDS | {"mesh.grace_s": 10}
    trainer, first, second = (
        mesh.start("trainer" if name == "trainer" else "rollout", name=name, set=settings)
        for name in ("trainer", "first", "second")
    )
    mesh.reaches(3)
    second.kill()
    for process in (trainer, first):
        assert process.ends() == 75, process.said
        line = process.said.splitlines()[-1]
        for text in ("only 1 of 2 rollouts (mesh.min_rollouts) for 1", "last seen: second on ", " died "):
            assert text in line
    step = re.search(r"saved at step (\d+)", trainer.said)[1]
    assert [path.name.split("-")[0] for path in (mesh.run / "checkpoints").iterdir()] == [step]
    mesh.leaves_nothing_running()

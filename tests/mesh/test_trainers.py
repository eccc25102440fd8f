"""Several trainers of one policy: they die at every point of a step, come late, stop, and all of them die."""

import signal

import pytest
from faults import POINTS
from processes import soon

from mesh.version import Lineage
from roles.trainer import checkpoint, ledger

GROUPS = 8  # a step
ENDLESS = {"run.steps": 100_000, "trainer.admit_interval_s": 0.3, "checkpoint.every_steps": 20}


def ends_well(mesh, *survivors):
    """Interrupt the survivors; then what is true of their records, whatever happened before."""
    for process in survivors:
        process.interrupt()
    for process in survivors:
        assert process.ends(20.0) == 130, process.said
    found = checkpoint.newest(mesh.run / "checkpoints")
    return nothing_is_trained_twice(mesh, found.state.lineage, found.state.groups_trained)


def nothing_is_trained_twice(mesh, lineage: Lineage, trained: int):
    """By the records of all trainers, dead and alive; returns what they come to."""
    paths = sorted((mesh.run / "ledger").glob("*.jsonl"))
    for path in paths:
        ledger.close_dead(path)
    replayed = ledger.replay(paths, lineage)  # raises on a prompt that was trained twice
    assert replayed.closes()
    assert replayed.groups["in_flight"] == 0
    assert replayed.groups["trained"] == trained
    return replayed


def steps_of(mesh, name):
    return [row["step"] for row in mesh.rows(name)]


def makes_steps(mesh, name, more):
    """Wait until this trainer has made so many more steps."""
    before = len(steps_of(mesh, name))
    soon(lambda: len(steps_of(mesh, name)) >= before + more, f"{name} makes {more} more steps")


@pytest.mark.parametrize("who", ["publisher", "follower"])
def test_trainers_die_at_every_point_of_a_step_and_the_others_make_exactly_that_step(mesh, who):
    rollout = mesh.start("rollout", set=ENDLESS)
    together = ["--trainers", str(len(POINTS))] if who == "publisher" else []
    if who == "follower":
        survivor = mesh.start("trainer", name="survivor", set=ENDLESS)
        makes_steps(mesh, "survivor", 1)
    victims = []
    for i, point in enumerate(POINTS):
        env = {"DIES": point, "DIES_FIRST": "1" if who == "publisher" else "0"}
        victims.append(mesh.start("trainer", *together, name=f"victim-{i}", fault="dies", env=env, set=ENDLESS))
    if who == "publisher":  # newcomers go to the end of the order
        makes_steps(mesh, "victim-0", 1)
        survivor = mesh.start("trainer", name="survivor", set=ENDLESS)
    for victim, point in zip(victims, POINTS, strict=True):
        assert victim.ends() == -signal.SIGKILL, f"{point}: {victim.said}"
    makes_steps(mesh, survivor.name, 3)
    ends_well(mesh, survivor, rollout)
    names = [survivor.name, *(victim.name for victim in victims)]
    made = {name: steps_of(mesh, name) for name in names}
    for name, steps in made.items():
        assert steps == list(range(steps[0], steps[0] + len(steps))), f"{name} left a step out, or made one twice"
    reached = max(made[survivor.name])
    assert {step for steps in made.values() for step in steps} == set(range(1, reached + 1))

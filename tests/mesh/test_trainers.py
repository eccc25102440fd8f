"""Several trainers of one policy: they die at every point of a step, come late, stop, and all of them die."""

import signal
import time

import pytest
from faults import POINTS
from processes import soon

from mesh.presets import PRESETS
from mesh.version import Lineage
from roles.trainer import checkpoint, ledger

GROUPS = 8  # a step
ENDLESS = {"run.steps": 100_000, "trainer.admit_interval_s": 0.3, "checkpoint.every_steps": 20}


def ends_well(mesh, *survivors):
    """Interrupt the survivors, one after the other: the last trainer saves the last step. Then what is true of their
    records, whatever happened before."""
    for process in survivors:
        process.interrupt()
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
    rows = mesh.rows(name)
    assert all(row["groups"] > 0 for row in rows), "a step was made of nothing"
    return [row["step"] for row in rows]


def makes_steps(mesh, name, more):
    """Wait until this trainer has made so many more steps."""
    before = len(steps_of(mesh, name))
    soon(lambda: len(steps_of(mesh, name)) >= before + more, f"{name} makes {more} more steps")


@pytest.mark.parametrize(("who", "points"), [("publisher", POINTS), ("follower", POINTS[1:5:2])])
def test_trainers_die_at_every_point_of_a_step_and_the_others_make_exactly_that_step(mesh, who, points):
    rollout = mesh.start("rollout", set=ENDLESS)
    together = ["--trainers", str(len(points))] if who == "publisher" else []
    if who == "follower":
        survivor = mesh.start("trainer", name="survivor", set=ENDLESS)
        makes_steps(mesh, "survivor", 1)
    victims = []
    for i, point in enumerate(points):
        env = {"DIES": point, "DIES_FIRST": "1" if who == "publisher" else "0"}
        victims.append(mesh.start("trainer", *together, name=f"victim-{i}", fault="dies", env=env, set=ENDLESS))
    if who == "publisher":  # newcomers go to the end of the order
        makes_steps(mesh, "victim-0", 1)
        survivor = mesh.start("trainer", name="survivor", set=ENDLESS)
    for victim, point in zip(victims, points, strict=True):
        assert victim.ends() == -signal.SIGKILL, f"{point}: {victim.said}"
    makes_steps(mesh, survivor.name, 3)
    ends_well(mesh, survivor, rollout)
    names = [survivor.name, *(victim.name for victim in victims)]
    made = {name: steps_of(mesh, name) for name in names}
    for name, steps in made.items():
        assert steps == list(range(steps[0], steps[0] + len(steps))), f"{name} left a step out, or made one twice"
    reached = max(made[survivor.name])
    assert {step for steps in made.values() for step in steps} == set(range(1, reached + 1))


STEPS = 40
WHOLE = {"run.steps": STEPS, "trainer.admit_interval_s": 0.3, "checkpoint.every_steps": 5}


def ended_well(mesh, *processes):
    """The run came to its end; returns its summary."""
    assert [p.ends() for p in processes] == [0] * len(processes), "\n".join(p.said for p in processes)
    summary = mesh.summary()
    assert summary["steps"] == STEPS
    assert summary["ledger_closed"]
    state = checkpoint.newest(mesh.run / "checkpoints").state
    assert state.version.number == STEPS
    replayed = nothing_is_trained_twice(mesh, state.lineage, state.groups_trained)
    assert summary["ledger"] == replayed.groups
    return summary


def test_two_trainers_train_one_policy_and_a_third_comes_late(mesh):
    mesh.hold()
    rollouts = [mesh.start("rollout", name=f"rollout-{i}", set=WHOLE) for i in range(2)]
    trainers = [mesh.start("trainer", "--trainers", "2", name=f"trainer-{i}", set=WHOLE) for i in range(2)]
    for trainer in trainers:
        trainer.says("of 2 trainers opens at step 0")
    mesh.hold_after(10 * GROUPS)
    mesh.let_go()
    soon((mesh.gate / "closed").exists, "the gate is closed")
    makes_steps(mesh, "trainer-0", 0)
    late = mesh.start("trainer", name="late", set=WHOLE)
    late.says("of 3 trainers opens at step")
    mesh.let_go()
    ended_well(mesh, *trainers, late, *rollouts)

    assert sum("published here" in t.said for t in trainers) >= 1
    assert "published here" not in late.said
    rows = {name: {r["step"]: r for r in mesh.rows(name)} for name in ("trainer-0", "trainer-1", "late")}
    assert set(rows["trainer-0"]) == set(rows["trainer-1"]) == set(range(1, STEPS + 1))
    assert max(rows["late"]) == STEPS
    for step, row in rows["trainer-0"].items():
        for other in rows.values():
            assert step not in other or other[step]["loss"] == row["loss"], "what a step sums is the same for all"
    assert rows["trainer-0"][STEPS]["trainers"] == 3
    assert rows["trainer-0"][2]["groups"] == GROUPS, "groups_per_step is of all trainers together"


def test_all_trainers_die_and_new_ones_go_on_from_the_checkpoint(mesh):
    rollout = mesh.start("rollout", set=WHOLE)
    trainers = [mesh.start("trainer", "--trainers", "2", name=f"trainer-{i}", set=WHOLE) for i in range(2)]
    mesh.hold_after(13 * GROUPS)
    soon((mesh.gate / "closed").exists, "the gate is closed")
    before = mesh.peer_id("rollout")
    for trainer in trainers:
        trainer.kill()
    rollout.says("trainer-0 died")
    rollout.says("trainer-1 died")
    new = [mesh.start("trainer", "--resume", "--trainers", "2", name=f"new-{i}", set=WHOLE) for i in range(2)]
    for trainer in new:
        trainer.says("resumed from")
        trainer.says("of 2 trainers opens at step")
    mesh.let_go()
    assert mesh.peer_id("rollout") == before, "the rollout is the same peer"
    summary = ended_well(mesh, *new, rollout)
    assert summary["ledger"]["trained"] == STEPS * GROUPS


def test_a_stopped_trainer_starts_again_as_a_new_one_and_is_taken_in(mesh):
    settings = WHOLE | {"run.steps": 100_000}
    rollout = mesh.start("rollout", set=settings)
    trainers = [mesh.start("trainer", "--trainers", "2", name=f"trainer-{i}", set=settings) for i in range(2)]
    makes_steps(mesh, "trainer-0", 5)
    [publisher] = [t for t in trainers if "published here" in t.said]
    [other] = [t for t in trainers if t is not publisher]
    publisher.send(signal.SIGSTOP)
    stopped = time.monotonic()
    other.says(f"{publisher.name} died")
    makes_steps(mesh, other.name, 3)
    longer = 2 * PRESETS["local"].detection_s()  # one that slept for less refutes its death, and is taken in as it is
    soon(lambda: time.monotonic() - stopped > longer, "it slept for long enough to know")
    publisher.send(signal.SIGCONT)
    publisher.says("starting again as a new peer")
    publisher.says("taken in at step")
    makes_steps(mesh, publisher.name, 3)
    ends_well(mesh, *trainers, rollout)


def test_trainers_that_differ_stop_and_name_the_first_tensor(mesh):
    mesh.start("rollout", set=WHOLE)
    sound = mesh.start("trainer", "--trainers", "2", name="sound", set=WHOLE)
    spoiled = mesh.start("trainer", "--trainers", "2", name="spoiled", fault="flips_a_bit", set=WHOLE)
    assert (sound.ends(), spoiled.ends()) == (1, 1)
    for trainer in (sound, spoiled):
        assert "weights or optimizer differ before step 4" in trainer.error
        assert "sound@" in trainer.error
        assert "spoiled@" in trainer.error
        assert "the first tensor that differs is weight/model.norm.weight" in trainer.error
    assert max(steps_of(mesh, "sound")) == max(steps_of(mesh, "spoiled")) == 3

"""The engine's own process ends inside a rollout that lives: it is started again, or the rollout says so and leaves."""

import os
import signal

from processes import soon

from transport.accounts import Delivered, Issued


def engine_process(mesh, other_than=None):
    def look():
        file = mesh.gate / "engine"
        process = file.read_text() if file.exists() else ""
        return int(process) if process and int(process) != other_than else 0

    return soon(look, "the engine's process has started")


def test_an_engine_that_is_killed_is_started_again_with_the_newest_weights(mesh):
    """Once; the second time is one too often."""
    settings = {"run.steps": 100000, "rollout.groups_in_flight": 4, "rollout.engine_restarts": 1}
    trainer = mesh.start("trainer", name="trainer", set=settings)
    rollout = mesh.start("rollout", name="broken", set=settings, fault="engine_process")
    mesh.reaches(3)
    first = engine_process(mesh)
    os.kill(first, signal.SIGKILL)
    rollout.says(f"its process {first} was ended by SIGKILL; it is started again, 1 of 1")
    second = engine_process(mesh, other_than=first)
    before = len(mesh.entries())
    soon(lambda: [e for e in mesh.entries()[before:] if isinstance(e, Delivered)], "it samples again")

    os.kill(second, signal.SIGKILL)
    assert rollout.ends() == 1
    assert f"its process {second} was ended by SIGKILL; start this rollout again" in rollout.error
    trainer.interrupt()
    trainer.ends()
    mesh.leaves_nothing_running()


def test_a_rollout_whose_engine_process_is_killed_says_so_and_leaves(mesh):
    settings = {"run.steps": 16, "rollout.groups_in_flight": 4, "rollout.engine_restarts": 0}
    trainer, sound, broken = (
        mesh.start("trainer" if name == "trainer" else "rollout", name=name, set=settings, fault=fault)
        for name, fault in (("trainer", ""), ("sound", ""), ("broken", "engine_process"))
    )
    mesh.reaches(3)
    dead = mesh.peer_id("broken")
    mesh.hold()
    soon(lambda: [c for c in mesh.accounts().open.values() if c.issued.to == dead], "it has credits")
    process = engine_process(mesh)
    os.kill(process, signal.SIGKILL)

    # one line with its name, its host and what to do, on its own screen and on the trainer's
    assert broken.ends() == 1
    for text in ("the engine of broken on ", f"its process {process} was ended by SIGKILL", "start this rollout again"):
        assert text in broken.error
        trainer.says(text)
    trainer.says("broken left: EngineDead: the engine of broken on ")

    # nothing of it comes after, and the others do its work
    entries = mesh.entries()
    mesh.let_go()
    assert (trainer.ends(), sound.ends()) == (0, 0), trainer.said + sound.said
    after = mesh.entries()[len(entries) :]
    issued = {e.id: e for e in mesh.entries() if isinstance(e, Issued)}
    assert dead not in {issued[e.id].to for e in after if isinstance(e, Delivered)}
    assert dead not in {e.to for e in after if isinstance(e, Issued)}
    assert mesh.summary()["steps"] == 16
    assert mesh.summary()["ledger_closed"]
    mesh.leaves_nothing_running()


def test_an_engine_process_that_dies_idle_is_noticed_too(mesh):
    rollout = mesh.start("rollout", set={"rollout.engine_restarts": 0}, fault="engine_process")
    rollout.joins(mesh)
    process = engine_process(mesh)
    os.kill(process, signal.SIGKILL)
    assert rollout.ends(10.0) == 1
    assert f"its process {process} was ended by SIGKILL" in rollout.error

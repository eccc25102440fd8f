"""Rollouts started by hand, killed, joined and interrupted, while the run goes on to its end."""

from processes import soon

from transport.accounts import Ended, Issued, Trained

STEPS = 30
SETTINGS = {"run.steps": STEPS, "rollout.groups_in_flight": 4}  # two rollouts hold a batch between them


def test_rollouts_die_join_and_leave_and_the_run_goes_on(mesh):
    first, dying, trainer = (
        mesh.start(role, name=name, set=SETTINGS)
        for role, name in (("rollout", "first"), ("rollout", "dying"), ("trainer", "trainer"))
    )
    mesh.reaches(4)

    # killed with work in hand
    mesh.hold()
    dead = mesh.peer_id("dying")
    holds_credits(mesh, dead)
    dying.kill()
    trainer.says("dying died")
    late = mesh.start("rollout", name="late", set=SETTINGS)
    joined = mesh.peer_id("late")
    holds_credits(mesh, joined)
    mesh.hold_after(6 * 8)
    before = mesh.step()
    mesh.let_go()

    # interrupted with work in hand: it leaves within seconds, and the late one goes on alone
    mesh.is_held(before + 4)
    left = mesh.peer_id("first")
    first.interrupt()
    assert first.ends(10.0) == 130
    trainer.says("first left")
    mesh.let_go()
    assert (trainer.ends(), late.ends()) == (0, 0), trainer.said + late.said

    assert [text for kind, text in mesh.events() if kind in ("died", "joined", "left")] == [
        "dying died", "late joined", "first left",
    ]  # fmt: skip
    summary = mesh.summary()
    assert summary["steps"] == STEPS
    assert summary["ledger"]["trained"] == STEPS * 8
    assert summary["ledger_closed"]
    work_of_the_gone_is_ordered_again(mesh, dead, left)
    issued = {e.id: e for e in mesh.entries() if isinstance(e, Issued)}
    trained = [issued[id] for e in mesh.entries() if isinstance(e, Trained) for id in e.ids]
    assert sum(order.to == joined for order in trained) > 8
    assert len({order.id for order in trained}) == len({(o.epoch, o.prompt) for o in trained}) == len(trained)


def holds_credits(mesh, peer):
    """Wait until groups are on order at ``peer``: they stay there while the gate is closed."""
    soon(lambda: [c for c in mesh.accounts().open.values() if c.issued.to == peer and c.tokens is None], "credits")


def work_of_the_gone_is_ordered_again(mesh, *gone):
    """What they had on order when they went is lost, and each of those prompts is dealt to others."""
    entries = mesh.entries()
    issued = {e.id: e for e in entries if isinstance(e, Issued)}
    ends = [
        (i, id)
        for i, e in enumerate(entries)
        if isinstance(e, Ended) and e.why == "its rollout is gone"
        for id in e.ids
        if e.outcome == "lost"
    ]
    assert {issued[id].to for _, id in ends} == set(gone)
    for at, id in ends:
        lost = issued[id]
        after = [e for e in entries[at:] if isinstance(e, Issued)]
        assert lost.to not in {e.to for e in after}
        again = next(e for e in after if (e.epoch, e.prompt) == (lost.epoch, lost.prompt))
        assert again.attempt == lost.attempt, "that its rollout went is not the prompt's fault"


def test_a_local_mesh_ends_whole_by_ctrl_c_and_by_kill(mesh):
    mesh.hold_after(4 * 8)
    up = mesh.up("--rollouts", "1")
    mesh.is_held(2)
    up.interrupt()
    assert up.ends(20.0) == 130, up.said
    mesh.leaves_nothing_running()
    saved = max(int(path.name.split("-")[0]) for path in (mesh.run / "checkpoints").iterdir())
    assert saved == mesh.step()

    mesh.hold_after(4 * 8)
    mesh.let_go()
    up = mesh.up("--rollouts", "1", "--resume")
    mesh.is_held(saved + 2)
    assert len(mesh.running()) >= 4, "itself, a trainer, and a rollout with a reward worker"
    up.kill()
    mesh.leaves_nothing_running()

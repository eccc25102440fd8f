"""Faults put into running peers are refused by name, and the mesh goes on with the next good version."""

import re

from processes import soon

V = r"v(\d+)@1"


def test_a_corrupt_bucket_is_refused_and_the_next_good_version_is_taken(mesh):
    trainer = mesh.start("trainer", fault="corrupt_bucket")
    rollout = mesh.start("rollout")
    assert (trainer.ends(), rollout.ends()) == (0, 0), trainer.said + rollout.said
    refused = re.findall(rf"{V} of trainer@\S+ is refused: (.*)", rollout.said)
    [(version, why)] = set(refused)
    assert int(version) >= 3
    assert why.startswith("bucket 0 of 1 does not have the digest announced by trainer@")
    summary = mesh.summary()
    assert summary["steps"] == 16  # which takes versions of at least 13
    assert summary["versions_proved"] < summary["versions_published"]
    assert summary["ledger_closed"]


def test_a_rollout_with_a_wrong_probe_samples_nothing_until_a_good_version_comes(mesh):
    settings = {"run.steps": 30, "trainer.max_lag": 0}
    mesh.hold()
    trainer = mesh.start("trainer", set=settings)
    sound = mesh.start("rollout", name="sound", set=settings)
    wrong = mesh.start("rollout", name="wrong", fault="wrong_scores", set=settings)
    with mesh.watched() as seen:
        soon(lambda: {"sound", "wrong"} <= seen.keys() and seen["wrong"].version, "both have proved a version")
        (mesh.gate / "wrong").touch()
        mesh.hold_after(10 * 8)
        mesh.let_go()

        # the other one does all the work, and everybody can see why
        mesh.is_held(8)
        soon(
            lambda: seen["wrong"].state.startswith("unproven") and not seen["wrong"].figures["tokens_per_s"], "unproven"
        )
        assert seen["wrong"].version is None
        assert seen["sound"].version.number >= 8
        differences = re.findall(
            rf"{V} of trainer@\S+ is refused: log-probabilities differ .* by (\S+) nat .* allowed are 0.001", wrong.said
        )
        assert differences
        assert all(int(version) > 0 and 0.45 < float(nat) < 0.55 for version, nat in differences)

        (mesh.gate / "wrong").unlink()
        mesh.hold_after(10 * 8)
        mesh.let_go()
        mesh.is_held(18)
        soon(lambda: seen["wrong"].version, "the rollout has proved another version")
        assert not seen["wrong"].state.startswith("unproven")
        refusals = wrong.said.count(" is refused: log-probabilities")
    mesh.let_go()
    assert (trainer.ends(), sound.ends(), wrong.ends()) == (0, 0, 0), trainer.said + wrong.said
    assert wrong.said.count(" is refused: log-probabilities") == refusals
    summary = mesh.summary()
    assert summary["ledger_closed"]
    assert summary["ledger"]["trained"] == 30 * 8


def test_a_rollout_of_other_settings_is_not_let_in(mesh, other_model):
    trainer = mesh.start("trainer")
    trainer.joins(mesh)
    rollout = mesh.start("rollout", set={"model.path": other_model, "trainer.max_lag": 1})
    assert rollout.ends() == 1
    assert "settings differ in [model], [trainer] between rollout on " in rollout.error
    assert " and trainer on " in rollout.error
    assert "start both from the same file" in rollout.error
    trainer.says("refused rollout on ")
    assert trainer.code is None


def test_a_model_of_other_names_is_refused_by_name_and_the_trainer_says_who_proves_nothing(mesh, other_model):
    settings = {"weights.prove_deadline_s": 4}
    trainer = mesh.start("trainer", set=settings)
    trainer.joins(mesh)  # a rollout that comes later has all of the deadline
    rollout = mesh.start("rollout", fault="other_model", env={"OTHER_MODEL": other_model}, set=settings)
    assert trainer.ends() == 1
    unknown = "model.layers.1.self_attn.q_proj.weight: sent by the trainer, unknown at the engine"
    for text in ("weights.prove_deadline_s", "rollout@", "proved nothing", unknown):
        assert text in trainer.error
    rollout.says("trainer left")
    assert re.search(
        rf"v0@1 of trainer@\S+ is refused: weights do not fit the engine: {re.escape(unknown)}", rollout.said
    )
    rollout.interrupt()
    assert rollout.ends(10.0) == 130


def test_a_completion_that_the_engine_loses_is_sampled_again_and_its_siblings_go_on(mesh):
    trainer, rollout = mesh.start("trainer"), mesh.start("rollout", fault="loses_completions")
    assert (trainer.ends(), rollout.ends()) == (0, 0), trainer.said + rollout.said
    assert mesh.rows("rollout")[-1]["completions_sampled_again"] > 10
    summary = mesh.summary()
    assert summary["ledger"]["trained"] == 16 * 8
    assert summary["ledger"]["failed"] == 0

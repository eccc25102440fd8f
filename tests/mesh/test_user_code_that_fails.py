"""A reward or a rollout of the user's that always fails: the run ends, and one line says why."""

from processes import PATIENCE_S

SMALL = {"task.heldout_prompts": 4, "trainer.groups_per_step": 2}


def test_a_reward_that_always_fails_ends_the_run_and_no_accuracy_is_told(mesh):
    up = mesh.up("--rollouts", "1", set=SMALL | {"run.steps": 1000, "task.reward": "broken:reward"})
    assert up.ends(2 * PATIENCE_S) == 1, up.said
    for text in ("no completion of the last 5 steps has a reward", "exception 40", 'task.reward = "broken:reward"'):
        assert text in up.error
    assert mesh.step() == 5
    assert {row["failures/exception"] for row in mesh.rows()} == {8.0}
    [evaluation] = mesh.evaluations()
    assert "eval_accuracy" not in evaluation
    assert (evaluation["eval_samples"], evaluation["eval_unscored"]) == (0, 4)
    warnings = [text for kind, text in mesh.events() if kind == "warning"]
    assert any("held-out answers at step 0 have no reward" in text for text in warnings)
    assert any("completions of the last 1 step have no reward" in text for text in warnings)
    mesh.leaves_nothing_running()


def test_a_rollout_that_always_fails_ends_its_peer_without_flooding_the_log(mesh):
    up = mesh.up("--rollouts", "1", set=SMALL | {"task.rollout": "broken:rollout"})
    assert up.ends(2 * PATIENCE_S) == 1, up.said
    for text in ("no rollout is left", "credits failed here", "KeyError: 'hint'"):
        assert text in up.error
    [log] = (mesh.run / "logs").glob("rollout-0*.log")
    said = log.read_text()
    assert said.count("Traceback") <= 4, "of the first credit, the tenth, the hundredth, and the end"
    assert "waiting for a trainer" in said or f"run directory {mesh.run}" in said
    [row] = mesh.rows("rollout-0")[-1:]
    assert row["groups/failed_in_a_row"] >= 64, "a last row is written at the end"
    mesh.leaves_nothing_running()

import json
import math

import numpy as np
import pytest
from made_groups import LINEAGE, NOW, completion, group, policy, settings
from matplotlib.image import imread

from roles.metrics import MetricsWriter, process_figures, read_rows
from roles.plot import plot_run
from roles.trainer.batch import samples_of
from roles.trainer.figures import Unrewarded, Watch, effective_share, evaluation_figures, step_figures
from roles.trainer.losses import DriftThreshold


@pytest.fixture
def made():
    """One group that teaches (a success, a drifted failure, a kept one, one without reward), one of equal rewards."""
    rng = np.random.default_rng(1)
    return [
        group(
            completion(rng, 1.0, sampled=(4,)),
            completion(rng, 0.0, sampled=(6,), lag=1, logprobs=[5.0] * 6),
            completion(rng, 0.0, sampled=(2,), logprobs=[-90.0] * 2),
            completion(rng, None, sampled=(8,)),
            lag=1,
        ),
        group(completion(rng, 1.0, tokens=[1, 1, 1, 1], finish="length"), completion(rng, 1.0, tokens=[2] * 4)),
    ]


def figures_of(groups, superseded=(), **trainer):
    samples = samples_of(groups, LINEAGE, NOW)
    scores = policy(config=settings(**trainer)).accumulate(samples, DriftThreshold(0.5))
    return step_figures(samples, scores, max_lag=2, superseded=superseded), samples, scores


def test_rewards_lags_and_groups_are_counted_over_samples_that_have_a_reward(made):
    f, _, _ = figures_of(made)
    assert f["samples"] == 6
    assert f["unrewarded"] == 1
    assert f["reward"] == f["train_accuracy"] == pytest.approx(3 / 5)
    assert (f["lag_0"], f["lag_1"], f["lag_2"]) == (0.8, 0.2, 0.0)
    assert (f["reward_lag_0"], f["reward_lag_1"]) == (0.75, 0.0)
    assert "reward_lag_2" not in f
    assert f["zero_variance_share"] == 0.5
    assert f["distinct_correct"] == 1.5
    assert f["truncated_share"] == pytest.approx(1 / 6)


def test_tokens_end_in_exactly_one_account(made):
    f, samples, scores = figures_of(made)
    parts = (f["tokens_trained"], f["tokens_masked"], f["tokens_failed"])
    assert parts == (4 + 2 + 4 + 4, 6, 8)
    assert sum(parts) == sum(s.sampled_tokens for s in samples)
    assert parts[0] + parts[1] == scores.tokens


def test_successes_and_failures_are_followed_to_training_masking_and_superseding(made):
    rng = np.random.default_rng(2)
    late = [group(completion(rng, 1.0, sampled=(10,)), completion(rng, 0.0, sampled=(30,)))]
    f, _, _ = figures_of(made, superseded=late)
    assert (f["success_trained"], f["success_masked"], f["success_superseded"]) == (0.5, 0.0, 0.5)
    assert (f["failure_trained"], f["failure_masked"], f["failure_superseded"]) == (
        pytest.approx(1 / 3),
        pytest.approx(1 / 3),
        pytest.approx(1 / 3),
    )
    assert f["negative_mass"] == pytest.approx((2 * 1 / 3) / (4 * 2 / 3))
    assert f["length_kept"] == pytest.approx(28 / 6)
    assert f["length_generated"] == pytest.approx(68 / 8)
    assert f["superseded_tokens"] == 40


def test_log_ratios_are_recorded_minus_current_over_scored_samples(made):
    f, samples, scores = figures_of(made)
    tokens = np.concatenate([samples[i].recorded - scores.current[i] for i in (0, 1, 2)])
    assert f["log_ratio_mean"] == pytest.approx(tokens.mean(), rel=1e-5)
    assert f["log_ratio_largest"] == pytest.approx(np.abs(tokens).max(), rel=1e-5)
    assert f["log_ratio_tail_share"] == pytest.approx(np.mean(np.abs(tokens) > 1))
    fresh = np.concatenate([samples[i].recorded - scores.current[i] for i in (0, 2)])
    assert f["log_ratio_abs_lag_0"] == pytest.approx(np.abs(fresh).mean(), rel=1e-5)
    assert 0 < f["entropy"] < math.log(23)


def test_scores_that_equal_the_record_are_a_full_effective_sample():
    rng = np.random.default_rng(3)
    samples = samples_of([group(completion(rng, 1.0), completion(rng, 0.0))], LINEAGE, NOW)
    scores = policy().accumulate(samples, DriftThreshold(9))
    for s, current in zip(samples, scores.current, strict=True):
        s.recorded[:] = current
    f = step_figures(samples, scores, max_lag=0)
    assert f["ess_token"] == f["ess_sequence"] == 1.0
    assert f["log_ratio_abs"] == 0.0


def test_the_effective_share_survives_huge_weights():
    assert effective_share(np.array([0.0, 0.0])) == 1.0
    assert effective_share(np.array([5000.0, 0.0, 0.0, 0.0])) == 0.25
    assert effective_share(np.log([1.0, 3.0])) == pytest.approx(16 / 20)


@pytest.mark.parametrize("rewards", [(None, None), (1.0, 1.0)])
def test_figures_of_a_batch_that_teaches_nothing_are_finite(rewards):
    rng = np.random.default_rng(0)
    f, _, _ = figures_of([group(*(completion(rng, r) for r in rewards))])
    assert all(math.isfinite(v) for v in f.values())
    assert f["zero_variance_share"] == 1.0
    assert f["entropy_sampled"] == pytest.approx(math.log(23)), "as recorded: nothing was scored"
    assert "entropy" not in f


def test_figures_of_no_sample_at_all_are_finite():
    f, _, _ = figures_of([])
    assert f["samples"] == 0
    assert all(math.isfinite(v) for v in f.values())


def test_an_accuracy_comes_with_its_interval_and_sample_count():
    f = evaluation_figures(90, 100)
    assert f["eval_accuracy"] == 0.9
    assert (f["eval_low"], f["eval_high"]) == (pytest.approx(0.8256, abs=1e-4), pytest.approx(0.9448, abs=1e-4))
    assert evaluation_figures(0, 50)["eval_low"] == 0.0
    assert evaluation_figures(50, 50)["eval_high"] == 1.0
    assert evaluation_figures(0, 0) == {"eval_samples": 0.0}


# ---- warnings --------------------------------------------------------------------------------------------------------

SOUND = {"entropy_sampled": 1.0, "ess_token": 0.95, "negative_mass": 0.9, "train_accuracy": 0.3, "skipped_steps": 0.0}


def warnings_of(change, steps=10):
    watch = Watch(window=5)
    assert [w for _ in range(10) for w in watch.see(SOUND)] == []
    return [w for _ in range(steps) for w in watch.see(SOUND | change)]


@pytest.mark.parametrize(
    ("change", "setting"),
    [
        ({"entropy_sampled": 0.05}, "learning_rate"),
        ({"ess_token": 0.2}, "max_lag"),
        ({"negative_mass": 0.05}, "negative_max_drift"),
        ({"skipped_steps": 1.0}, "learning_rate"),
    ],
)
def test_each_danger_is_said_and_names_the_setting_to_change(change, setting):
    said = warnings_of(change)
    assert said
    assert all(setting in line and "\n" not in line for line in said)
    assert len(said) <= 3


def test_low_entropy_at_full_accuracy_is_what_learning_means():
    assert warnings_of({"entropy_sampled": 0.05, "train_accuracy": 0.97}) == []


def test_a_single_odd_step_warns_of_nothing():
    assert warnings_of({"negative_mass": 0.3, "entropy_sampled": 0.4}, steps=1) == []


def test_a_warning_is_said_again_after_it_had_passed():
    watch = Watch(window=2)
    said = [bool(watch.see({"negative_mass": m})) for m in (1, 1, 0, 0, 0, 1, 1, 0, 0)]
    assert said.count(True) == 2


# ---- completions without a reward -----------------------------------------------------------------------------------


def test_a_quarter_without_a_reward_is_borne_and_more_is_said_once_until_it_has_passed():
    watch = Unrewarded("my:reward", window=4)
    assert [watch.see(8, 2, {"timeout": 2}) for _ in range(6)] == [""] * 6
    line = watch.see(8, 3, {"exception": 3})
    assert line.startswith("9 of the 32 completions of the last 4 steps have no reward: timeout 6, exception 3: ")
    assert 'task.reward = "my:reward"' in line
    assert watch.see(8, 3, {"exception": 3}) == ""
    assert [watch.see(8, 0, {}) for _ in range(4)] == [""] * 4
    assert watch.see(8, 8, {"exception": 8}) == "", "a quarter"
    assert watch.see(8, 1, {"exception": 1})


def test_five_steps_without_a_single_reward_are_hopeless_and_one_reward_is_hope():
    watch = Unrewarded("my:reward")
    for missing in (48, 48, 48, 48, 47, 48, 48, 48, 48):
        watch.see(48, missing, {"exception": missing})
        assert watch.hopeless() == ""
    watch.see(0, 0, {})
    assert watch.hopeless() == "", "a step without a completion says nothing"
    watch.see(48, 48, {"exception": 40, "none": 8})
    assert watch.hopeless().startswith(
        'no completion of the last 5 steps has a reward: exception 232, none 8: check task.reward = "my:reward"'
    )


# ---- where figures go ------------------------------------------------------------------------------------------------


def test_rows_are_strict_json_and_go_on_after_a_restart(tmp_path):
    for step in (1, 2):
        writer = MetricsWriter(tmp_path, "trainer-0@host", tensorboard=False, clock=lambda: 5.0)
        writer.row(step, {"reward": 0.5, "odd": float("nan")})
        writer.event(step, "joined", "rollout-1 joined")
        writer.close()
    rows = list(read_rows(tmp_path / "metrics" / "trainer-0@host.jsonl"))
    assert rows[0] == {"time": 5.0, "step": 1, "reward": 0.5, "odd": None}
    assert rows[3] == {"time": 5.0, "step": 2, "event": "joined", "text": "rollout-1 joined"}


def test_a_half_written_last_row_is_passed_over(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"step": 1}) + '\n{"step": 2, "rew')
    assert list(read_rows(file)) == [{"step": 1}]


def test_tensorboard_gets_the_figures(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    writer = MetricsWriter(tmp_path, "t")
    writer.row(3, {"reward": 0.25, "odd": float("inf")})
    writer.close()
    events = EventAccumulator(str(tmp_path / "metrics" / "tensorboard" / "t")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward")] == [(3, 0.25)]
    assert events.Tags()["scalars"] == ["reward"]


def test_a_disk_that_fails_is_said_once_and_training_goes_on(tmp_path):
    (tmp_path / "metrics").write_text("in the way")
    said = []
    writer = MetricsWriter(tmp_path, "t", tensorboard=False, on_error=said.append)
    writer.row(1, {"reward": 1.0})
    writer.row(2, {"reward": 1.0})
    writer.close()
    assert len(said) == 1
    assert "training goes on" in said[0]
    assert writer.lost == 3


def test_the_process_is_measured():
    f = process_figures()
    assert f["rss_mib"] > 10
    assert f["threads"] >= 1


def test_the_curve_of_a_run_becomes_a_picture(tmp_path):
    writer = MetricsWriter(tmp_path, "trainer", tensorboard=False)
    for step in range(1, 41):
        writer.row(step, {"reward": step / 40})
        if step % 20 == 0:
            writer.row(step, evaluation_figures(step, 40))
    writer.event(12, "killed", "rollout-1 killed")
    writer.close()
    path = plot_run(tmp_path)
    assert path == tmp_path / "reward.png"
    assert imread(path).shape[0] > 300
    with pytest.raises(ValueError, match="no figures to draw"):
        plot_run(tmp_path / "empty")

"""What ``mesh up`` says at its end."""

from mesh.local import _summary_text
from mesh.rundir import RunDir


def summary(**changes):
    return {
        "steps": 3,
        "wall_s": 1.5,
        "accuracy_before": 0.01,
        "accuracy_after": 0.5,
        "accuracy_after_low": 0.4,
        "accuracy_after_high": 0.6,
        "accuracy_samples": 100,
        "versions_published": 4,
        "versions_proved": 4,
        "max_lag_allowed": 2,
        "max_lag_trained": 1,
        "tokens_per_s": 1000.0,
        "trainer_wait_share": 0.125,
        "ledger": {"issued": 96, "trained": 96},
        "ledger_tokens": {"delivered": 10, "trained": 10},
        "ledger_closed": True,
        **changes,
    }


def test_the_summary_says_what_was_learned_and_waited(tmp_path):
    text = _summary_text(summary(), RunDir(tmp_path), 1.0)
    assert "accuracy   0.010 -> 0.500" in text
    assert "on 100 held-out prompts, 95% 0.400-0.600" in text
    assert "trainer waiting 12.5%" in text


def test_a_run_without_an_evaluation_has_a_summary_too(tmp_path):
    none = dict.fromkeys(("accuracy_before", "accuracy_after", "accuracy_after_low", "accuracy_after_high"))
    assert "accuracy   not measured" in _summary_text(summary(**none, accuracy_samples=0), RunDir(tmp_path), 1.0)

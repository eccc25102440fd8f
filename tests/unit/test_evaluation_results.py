"""What an evaluation comes to: right, wrong, and answers that the verifier gave no reward."""

import numpy as np
from made_groups import NOW, TERM, completion
from msgspec.structs import replace

from mesh.version import Version
from roles.trainer.intake import _Results
from transport.messages import Group

VERSION = Version(TERM, NOW)


def figures_of(*answers, failures):
    results = _Results(VERSION)
    for i, answer in enumerate(answers):
        group = Group([answer], VERSION, failures=failures if answer.reward is None else {}) if answer else None
        results.add(i, VERSION, group)
    return results.figures()


def test_an_answer_without_a_reward_is_neither_right_nor_wrong():
    rng = np.random.default_rng(0)
    right, wrong, unscored = [completion(rng, reward) for reward in (1.0, 0.0, None)]
    broken_off = replace(unscored, finish="abort")
    f = figures_of(right, wrong, unscored, unscored, broken_off, None, failures={"exception": 1})
    assert f["eval_samples"] == 4, "right, wrong, broken off, and one that no rollout could bring"
    assert f["eval_accuracy"] == 0.25
    assert f["eval_unscored"] == 2
    assert f["eval_failures/exception"] == 3


def test_of_answers_that_were_all_not_scored_there_is_no_accuracy():
    unscored = completion(np.random.default_rng(0), None)
    assert figures_of(unscored, unscored, failures={"timeout": 1}) == {
        "eval_samples": 0.0,
        "eval_unscored": 2.0,
        "eval_failures/timeout": 2.0,
        "eval_version": NOW,
    }


def test_answers_of_another_version_do_not_count():
    results = _Results(VERSION)
    results.add(0, Version(TERM, NOW - 1), None)
    assert results.figures()["eval_samples"] == 0

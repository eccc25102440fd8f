"""``max_lag = 0`` is synchronous training: generation and training take turns, by the same code."""

import itertools


def test_every_trained_token_has_lag_0(synchronous):
    rows = synchronous.rows()
    assert len(rows) == synchronous.summary()["steps"] == 24
    assert {(row["lag_max"], row["lag_mean"], row["lag_0"], row["token_lag_mean"]) for row in rows} == {(0, 0, 1, 0)}
    summary = synchronous.summary()
    assert summary["max_lag_allowed"] == summary["max_lag_trained"] == 0
    assert summary["ledger_closed"]
    assert summary["ledger"]["trained"] == 24 * 8
    assert summary["ledger"]["superseded"] == 0


def test_nothing_was_generated_while_the_trainer_was_training(synchronous):
    free_from = 0.0
    for row in synchronous.rows():
        generated, trained = (
            (row["at/generate_first"], row["at/generate_last"]),
            (row["at/train_start"], row["at/train_stop"]),
        )
        assert free_from <= generated[0] < generated[1] <= trained[0] < trained[1]
        free_from = trained[1]


def test_more_lag_does_overlap(finished):
    """The test above would pass on anything if the times meant nothing."""
    pairs = itertools.pairwise(finished.rows())
    assert any(after["at/generate_first"] < before["at/train_stop"] for before, after in pairs)
    assert finished.summary()["max_lag_trained"] > 0

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roles.trainer.advantages import group_advantages


def test_an_advantage_is_the_reward_minus_the_mean_of_the_group():
    np.testing.assert_array_equal(group_advantages([1, 0, 0, 1]), [0.5, -0.5, -0.5, 0.5])


def test_division_by_the_standard_deviation_is_a_choice():
    np.testing.assert_allclose(group_advantages([3, 1], divide_by_std=True), [1, -1], rtol=1e-5)


@pytest.mark.parametrize("bad", [None, float("nan"), float("inf"), -float("inf")])
def test_a_completion_without_a_finite_reward_takes_no_part(bad):
    advantages = group_advantages([1.0, bad, 0.0, bad])
    np.testing.assert_array_equal(advantages[[0, 2]], [0.5, -0.5])
    assert np.isnan(advantages[[1, 3]]).all()


def test_a_group_without_any_reward_has_no_advantages():
    assert np.isnan(group_advantages([None, float("nan")])).all()


@pytest.mark.parametrize("divide", [False, True])
def test_equal_rewards_give_exactly_zero_though_their_mean_is_rounded(divide):
    rewards = [0.1] * 3 + [None]
    assert np.mean([0.1] * 3) != 0.1
    assert group_advantages(rewards, divide_by_std=divide)[:3].tolist() == [0.0, 0.0, 0.0]


def test_a_single_sample_teaches_nothing():
    assert group_advantages([None, 1.0, None])[1] == 0.0


def test_rewards_of_numpy_and_bool_are_numbers():
    np.testing.assert_array_equal(group_advantages([np.float32(1), True, np.int64(0), False]), [0.5, 0.5, -0.5, -0.5])


@pytest.mark.parametrize("wrong", ["1.0", [1.0], {}])
def test_a_reward_of_another_type_is_named(wrong):
    with pytest.raises(ValueError, match=r"reward 1 .*must be a number"):
        group_advantages([0.0, wrong])


@given(st.lists(st.one_of(st.none(), st.floats(-1e3, 1e3)), min_size=1, max_size=12), st.booleans())
def test_advantages_of_any_group_sum_to_zero_and_keep_the_order_of_rewards(rewards, divide):
    a = group_advantages(rewards, divide_by_std=divide)
    kept = [(r, x) for r, x in zip(rewards, a, strict=True) if r is not None]
    assert np.isnan(a).tolist() == [r is None for r in rewards]
    assert abs(sum(x for _, x in kept)) < 1e-6
    ordered = [x for _, x in sorted(kept)]
    assert all(p <= q + 1e-9 for p, q in itertools.pairwise(ordered))

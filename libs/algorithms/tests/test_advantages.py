"""Properties of advantages that every input must have; their formulas: test_advantage_table.py."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flotilla_algorithms import NonFiniteRewardError, group_advantages, shuffled_rewards

FINITE = st.floats(-1e6, 1e6, allow_nan=False)
GROUPS = st.lists(st.lists(FINITE, min_size=1, max_size=9), min_size=1, max_size=9)


def flat(groups: list[list[float]]) -> tuple[list[float], list[int]]:
    return [reward for group in groups for reward in group], [len(group) for group in groups]


@given(GROUPS)
def test_every_group_sums_to_zero(groups: list[list[float]]) -> None:
    rewards, sizes = flat(groups)
    advantages = group_advantages(rewards, sizes)
    for part in np.split(advantages, np.cumsum(sizes)[:-1]):
        assert abs(part.sum()) <= 1e-9 * (1 + np.abs(rewards).max())


@given(st.lists(st.tuples(FINITE, st.integers(1, 9)), min_size=1, max_size=9), st.booleans())
def test_equal_rewards_teach_exactly_nothing(groups: list[tuple[float, int]], normalize_std: bool) -> None:
    rewards, sizes = flat([[reward] * size for reward, size in groups])
    assert not group_advantages(rewards, sizes, normalize_std=normalize_std).any()


@given(GROUPS, st.floats(-100, 100))
def test_a_bonus_for_everybody_changes_nothing(groups: list[list[float]], bonus: float) -> None:
    rewards, sizes = flat(groups)
    before = group_advantages(rewards, sizes)
    after = group_advantages(np.asarray(rewards) + bonus, sizes)
    np.testing.assert_allclose(after, before, atol=1e-9 * (1 + np.abs(rewards).max()))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_reward_that_is_not_finite_is_named(value: float) -> None:
    with pytest.raises(NonFiniteRewardError) as caught:
        group_advantages([0.0, 1.0, value, 1.0], [2, 2])
    assert caught.value.index == 2


@pytest.mark.parametrize("sizes", [[3], [2, 3], [4, 0], [[2, 2]]])
def test_sizes_that_do_not_cut_the_rewards_are_refused(sizes: list[int]) -> None:
    with pytest.raises(ValueError, match="do not cut"):
        group_advantages([0.0, 1.0, 0.0, 1.0], sizes)


@given(st.lists(FINITE, max_size=50), st.integers(0, 2**63 - 1))
def test_shuffling_keeps_the_rewards_and_repeats_by_seed(rewards: list[float], seed: int) -> None:
    shuffled = shuffled_rewards(rewards, seed)
    assert sorted(shuffled) == sorted(rewards)
    np.testing.assert_array_equal(shuffled, shuffled_rewards(rewards, seed))


def test_another_seed_gives_another_order() -> None:
    rewards = np.arange(64.0)
    assert (shuffled_rewards(rewards, 1) != shuffled_rewards(rewards, 2)).any()
    assert (shuffled_rewards(rewards, 1) != rewards).any()

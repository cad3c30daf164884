"""Weights of samples: by their definitions written out, and as samples that are in an update more often."""

from __future__ import annotations

import statistics

import numpy as np
import pytest

from flotilla_algorithms import (
    counted_units,
    difficulty_weights,
    length_weights,
    reward_weights,
    token_weights,
)

RNG = np.random.default_rng(3)
GROUPS = [[1.0, 0.0, 0.5, 0.0], [2.0, 2.0, -1.0], [0.25, 0.25], [3.0]]
REWARDS, SIZES = np.array([r for group in GROUPS for r in group]), np.array([len(g) for g in GROUPS])
LENGTHS = np.array([3, 1, 4, 2, 5, 1, 3, 2, 6, 4])
COUNTED = RNG.random(LENGTHS.sum()) < 0.8
COUNTED[3] = False  # the second response is context alone
TIMES = np.array([2, 1, 0, 3, 1, 1, 2, 0, 4, 1])
AGGREGATIONS = [
    "token_mean",
    "sequence_mean_of_token_sum",
    "sequence_mean_of_token_mean",
    "constant",
    "token_sum",
]


def by_definition(kind: str, power: float) -> list[float]:
    found = []
    for group in GROUPS:
        best, worst, n = max(group), min(group), len(group)
        others = [r for r in group if (r == worst if kind == "max_min" else r != best)]
        for reward in group:
            if kind == "pow":
                found.append(abs(reward) ** power)
            elif best == worst:
                found.append(1.0)
            else:
                weight = n / (2 * group.count(best)) if reward == best else 0.0
                found.append(weight + (n / (2 * len(others)) if reward in others else 0.0))
    return found


@pytest.mark.parametrize(
    ("kind", "power"), [("pow", 2.0), ("pow", 0.5), ("max_min", 2.0), ("max_random", 2.0)]
)
def test_weights_by_reward_are_the_shares_that_policy_filtration_draws_with(kind: str, power: float) -> None:
    found = reward_weights(REWARDS, SIZES, kind=kind, power=power)
    np.testing.assert_allclose(found, by_definition(kind, power), rtol=1e-12)
    if kind != "pow":  # No group weighs more than another for its rewards.
        np.testing.assert_allclose(np.add.reduceat(found, np.cumsum(SIZES) - SIZES), SIZES)


def test_weights_by_difficulty_lie_on_a_line_between_all_and_none_solved() -> None:
    expected = [2.0 - 1.5 * min(max(statistics.fmean(group), 0.0), 1.0) for group in GROUPS for _ in group]
    found = difficulty_weights(REWARDS, SIZES, easiest=0.5, hardest=2.0)
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_weights_by_length_lie_on_a_line_between_the_lengths_of_the_update() -> None:
    expected = [1.5 - (n - 1) / 5 for n in LENGTHS.tolist()]
    np.testing.assert_allclose(length_weights(LENGTHS, shortest=1.5, longest=0.5), expected, rtol=1e-12)
    assert length_weights(np.array([4, 4]), shortest=1.5, longest=0.5).tolist() == [1.5, 1.5]


def repeated(times: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The update in which sample i stands times[i] times; and of which sample each token is."""
    order = np.repeat(np.arange(LENGTHS.size), times)
    places = np.split(np.arange(LENGTHS.sum()), np.cumsum(LENGTHS)[:-1])
    tokens = np.concatenate([places[i] for i in order])
    return LENGTHS[order], COUNTED[tokens], tokens


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_sample_that_weighs_k_counts_as_one_that_is_there_k_times(aggregation: str) -> None:
    losses = RNG.normal(0, 1, LENGTHS.sum())
    lengths, counted, tokens = repeated(TIMES)
    expected = token_weights(aggregation, lengths, counted, 7) @ losses[tokens]
    found = token_weights(aggregation, LENGTHS, COUNTED, 7, TIMES.astype(np.float64)) @ losses
    assert found == pytest.approx(expected, rel=1e-12)
    units = counted_units(aggregation, LENGTHS, COUNTED, TIMES.astype(np.float64))
    assert units == pytest.approx(counted_units(aggregation, lengths, counted))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_weights_that_are_all_alike_or_all_zero_are_no_weights_and_nothing(aggregation: str) -> None:
    plain = token_weights(aggregation, LENGTHS, COUNTED, 7)
    same = token_weights(aggregation, LENGTHS, COUNTED, 7, np.ones(LENGTHS.size))
    np.testing.assert_array_equal(same, plain)
    assert not token_weights(aggregation, LENGTHS, COUNTED, 7, np.zeros(LENGTHS.size)).any()

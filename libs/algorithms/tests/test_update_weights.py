"""Aggregations, shaping, divergence and selection: against formulas written out, and their invariants."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest

from flotilla_algorithms import (
    Outcomes,
    adapted_coefficient,
    counted_units,
    covariances,
    divergence,
    drawn_between,
    highest,
    kept_groups,
    overlong_penalties,
    token_weights,
)

RNG = np.random.default_rng(5)
LENGTHS = np.array([3, 1, 7, 2, 5, 11, 13])
COUNTED = RNG.random(LENGTHS.sum()) < 0.7
COUNTED[3] = False  # the whole second sequence is context
LOSSES = RNG.normal(0, 1, LENGTHS.sum())


def rows(values: np.ndarray) -> list[list[float]]:
    parts = np.split(values, np.cumsum(LENGTHS)[:-1])
    masks = np.split(COUNTED, np.cumsum(LENGTHS)[:-1])
    return [part[mask].tolist() for part, mask in zip(parts, masks, strict=True) if mask.any()]


MEANS = {
    "token_mean": lambda losses: statistics.fmean(x for row in losses for x in row),
    "sequence_mean_of_token_sum": lambda losses: statistics.fmean(sum(row) for row in losses),
    "sequence_mean_of_token_mean": lambda losses: statistics.fmean(statistics.fmean(row) for row in losses),
    "constant": lambda losses: statistics.fmean(sum(row) / 64 for row in losses),
    "token_sum": lambda losses: sum(x for row in losses for x in row),
}


@pytest.mark.parametrize("aggregation", MEANS)
def test_weighted_sums_are_the_means_that_they_stand_for(aggregation: str) -> None:
    weights = token_weights(aggregation, LENGTHS, COUNTED, constant_tokens=64)
    assert not weights[~COUNTED].any()
    assert (weights * LOSSES).sum() == pytest.approx(MEANS[aggregation](rows(LOSSES)), abs=1e-12)


@pytest.mark.parametrize("aggregation", MEANS)
def test_an_update_without_counted_tokens_weighs_nothing(aggregation: str) -> None:
    weights = token_weights(aggregation, LENGTHS, np.zeros(LENGTHS.sum(), bool), constant_tokens=64)
    assert not weights.any()


def test_an_unknown_aggregation_is_refused() -> None:
    with pytest.raises(ValueError, match="choose from token_mean"):
        token_weights("mean", LENGTHS, COUNTED, constant_tokens=1)


@pytest.mark.parametrize("aggregation", MEANS)
def test_the_mean_of_an_update_is_the_sum_of_its_parts_over_the_sum_of_their_units(aggregation: str) -> None:
    total = units = 0.0
    ends = np.cumsum(LENGTHS)
    for first, last in ((0, 2), (2, 3), (3, len(LENGTHS))):
        tokens = slice(ends[first] - LENGTHS[first], ends[last - 1])
        lengths, counted = LENGTHS[first:last], COUNTED[tokens]
        weights = token_weights(aggregation, lengths, counted, constant_tokens=64)
        part = counted_units(aggregation, lengths, counted)
        total += part * float(weights @ LOSSES[tokens])
        # A sum is over one unit, however many parts it has.
        units = max(units, part) if aggregation == "token_sum" else units + part
    assert total / units == pytest.approx(MEANS[aggregation](rows(LOSSES)), rel=1e-12)


def test_overlong_responses_are_punished_in_a_line_up_to_the_limit() -> None:
    penalties = overlong_penalties([1, 80, 85, 90, 100, 120], limit=100, buffer_tokens=20, penalty=2.0)
    np.testing.assert_allclose(penalties, [0.0, 0.0, -0.5, -1.0, -2.0, -2.0])


def test_uniform_groups_and_those_outside_the_band_are_left_out() -> None:
    outcomes = Outcomes.of([1, 1, 0, 1, 1, 0, 0, 1, 0], [2, 3, 2, 2])

    def kept(**limits: float | bool | None) -> list[bool]:
        defaults = {"drop_uniform": False, "mean_above": None, "mean_below": None}
        return kept_groups(outcomes, **(defaults | limits)).tolist()

    assert kept() == [True] * 4
    assert kept(drop_uniform=True) == [False, True, False, True]
    assert kept(mean_above=0.0) == [True, True, False, True]
    assert kept(mean_above=0.0, mean_below=0.6) == [False, False, False, True]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs"])
def test_divergence_equals_the_formula(estimator: str) -> None:
    policy, reference = RNG.normal(-2, 1, 50), RNG.normal(-2, 1, 50)
    formulas = {
        "k1": lambda p, q: p - q,
        "k2": lambda p, q: (p - q) ** 2 / 2,
        "k3": lambda p, q: math.exp(q - p) - (q - p) - 1,
        "abs": lambda p, q: abs(p - q),
    }
    expected = [formulas[estimator](p, q) for p, q in zip(policy, reference, strict=True)]
    np.testing.assert_allclose(divergence(estimator, policy, reference), expected, rtol=1e-12)


def test_k1_and_k3_estimate_the_same_divergence() -> None:
    old, new = np.array([0.2, 0.5, 0.3]), np.array([0.3, 0.3, 0.4])
    exact = (new * np.log(new / old)).sum()
    for estimator in ("k1", "k3"):
        assert (new * divergence(estimator, np.log(new), np.log(old))).sum() == pytest.approx(exact)


def test_an_adaptive_coefficient_moves_towards_its_target_in_bounded_steps() -> None:
    limits = {"target": 0.1, "horizon_samples": 1000.0, "samples": 100}
    assert adapted_coefficient(0.5, 9.0, **limits) == pytest.approx(0.5 * 1.02)
    assert adapted_coefficient(0.5, 0.0, **limits) == pytest.approx(0.5 * 0.98)
    assert adapted_coefficient(0.5, 0.11, **limits) == pytest.approx(0.5 * 1.01)
    assert adapted_coefficient(0.5, 0.1, **limits) == 0.5


def test_selection_follows_the_covariance_over_the_whole_update() -> None:
    logprobs, advantages = RNG.normal(-2, 1, 1000), RNG.normal(0, 1, 1000)
    counted = RNG.random(1000) < 0.8
    covariance = covariances(logprobs, advantages, counted)
    mean_l, mean_a = logprobs[counted].mean(), advantages[counted].mean()
    expected = [(p - mean_l) * (a - mean_a) for p, a in zip(logprobs, advantages, strict=True)]
    np.testing.assert_allclose(covariance[counted], np.array(expected)[counted])
    number = int(0.02 * counted.sum())

    top = highest(covariance, 0.02)
    assert (top.sum(), top[~counted].any()) == (number, False)
    assert covariance[top].min() >= covariance[~top].max()

    drawn = drawn_between(covariance, 0.5, 2.0, 0.02, seed=3)
    assert drawn.sum() == number
    assert ((covariance[drawn] > 0.5) & (covariance[drawn] < 2.0)).all()
    np.testing.assert_array_equal(drawn, drawn_between(covariance, 0.5, 2.0, 0.02, seed=3))
    assert (drawn != drawn_between(covariance, 0.5, 2.0, 0.02, seed=4)).any()


def test_nothing_is_selected_where_nothing_counts() -> None:
    covariance = covariances(np.zeros(4), np.ones(4), np.zeros(4, bool))
    assert not highest(covariance, 0.5).any()
    assert not drawn_between(covariance, 0.0, 1.0, 0.5, seed=0).any()


@pytest.mark.parametrize(
    "broken",
    [
        {"response_lengths": [1, 2]},
        {"response_lengths": [0, 1, 1]},
        {"trained": [True]},
        {"penalties": [1.0]},
    ],
)
def test_outcomes_that_do_not_fit_together_are_refused(broken: dict[str, list[float]]) -> None:
    with pytest.raises(ValueError, match="do not belong"):
        Outcomes.of([1.0, 2.0, 3.0], [3], **broken)

"""A baseline for every token that makes the variance of the gradient small (optimal token baseline).

Invariant: a place's baseline is the mean of what its group still earned there, weighted by the squared length that the
gradient of each sample has come to by then; tokens of equal returns cancel exactly.
"""

from __future__ import annotations

import numpy as np

from flotilla_algorithms.outcomes import Floats, Ints, Outcomes
from flotilla_algorithms.reinforce import reinforce


def optimal_token_baseline(outcomes: Outcomes, *, lone_tail: str) -> Floats:
    """Return what is earned from each token on, less the baseline of its place in the response."""
    starts = np.cumsum(outcomes.response_lengths) - outcomes.response_lengths
    places = np.arange(outcomes.trained.size) - np.repeat(starts, outcomes.response_lengths)
    return _beyond_baselines(outcomes, places[outcomes.trained], lone_tail)


def tir_optimal_token_baseline(outcomes: Outcomes, *, lone_tail: str) -> Floats:
    """Return the same with places counted by trained tokens alone, for responses with context in between."""
    lengths = outcomes.trained_lengths
    places = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return _beyond_baselines(outcomes, places, lone_tail)


def _beyond_baselines(outcomes: Outcomes, places: Ints, lone_tail: str) -> Floats:
    """Return one a token; `places` has that of every trained token.

    Where no other sample of the group has a token, `lone_tail` decides: silent compares the token with itself, so that
    it says nothing, and return compares it with nothing.
    """
    if outcomes.score_squares is None:
        raise ValueError("an optimal token baseline needs the policy's distribution at each token")
    own, lengths = outcomes.trained, outcomes.trained_lengths
    returns = reinforce(outcomes, gamma=1.0)[own]
    energy = _sums_so_far(outcomes.score_squares[own], lengths)
    groups = np.repeat(np.arange(outcomes.group_sizes.size), outcomes.group_sizes)
    width = int(places.max(initial=0)) + 1
    _, first, part = np.unique(
        np.repeat(groups, lengths) * width + places, return_index=True, return_inverse=True
    )
    count = np.bincount(part)
    # From the first return of each place on, so that equal returns cancel exactly.
    relative = returns - returns[first][part]
    weight, weighted = np.bincount(part, energy), np.bincount(part, energy * relative)
    plain = np.bincount(part, relative) / np.maximum(count, 1)
    # Where the policy was sure of every token so far, no gradient has a length and all weigh alike.
    baseline = np.where(weight > 0, weighted / np.where(weight > 0, weight, 1.0), plain)
    beyond = relative - baseline[part]
    advantages = np.zeros(own.size)
    advantages[own] = np.where(count[part] == 1, returns, beyond) if lone_tail == "return" else beyond
    return advantages


def _sums_so_far(values: Floats, lengths: Ints) -> Floats:
    """Return the sum of each sample's values up to each of its places."""
    total = np.cumsum(values)
    before = np.concatenate([[0.0], total])[np.cumsum(lengths) - lengths]
    sums: Floats = total - np.repeat(before, lengths)
    return sums

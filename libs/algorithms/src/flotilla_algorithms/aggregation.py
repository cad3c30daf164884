"""How much the loss of each token counts: the mean over an update, as weights.

Invariants: the weights already hold the denominator, counted over the whole update, so what is left to do is a plain
sum: it does not depend on how the update is cut, over how many ranks it is spread or in which order it comes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flotilla_algorithms.outcomes import Floats, Ints, segment_sums


def token_weights(
    aggregation: str,
    response_lengths: Ints,
    counted: NDArray[np.bool_],
    constant_tokens: int,
    sample_weights: Floats | None = None,
) -> Floats:
    """Return one a token, zero where it is not counted; with weights of the samples every mean is a weighted one.

    token_mean: every token alike. sequence_mean_of_token_sum: every sequence counts by its summed tokens.
    sequence_mean_of_token_mean: every sequence alike. constant: as the sum, over a fixed number of tokens. token_sum:
    every token by itself, over nothing.
    """
    tokens = segment_sums(counted.astype(np.float64), response_lengths)
    shares = np.ones(tokens.size) if sample_weights is None else sample_weights
    # Nothing counts where these are zero, and nothing is divided.
    sequences = float(shares[tokens > 0].sum()) or 1.0
    denominators: dict[str, float | Floats] = {
        "token_mean": float(shares @ tokens) or 1.0,
        "sequence_mean_of_token_sum": sequences,
        "sequence_mean_of_token_mean": sequences * np.repeat(np.maximum(tokens, 1.0), response_lengths),
        "constant": sequences * constant_tokens,
        "token_sum": 1.0,
    }
    if aggregation not in denominators:
        raise ValueError(f"there is no aggregation {aggregation!r}: choose from {', '.join(denominators)}")
    share = np.repeat(shares, response_lengths)
    weights: Floats = np.where(counted, share / denominators[aggregation], 0.0)
    return weights


def counted_units(
    aggregation: str,
    response_lengths: Ints,
    counted: NDArray[np.bool_],
    sample_weights: Floats | None = None,
) -> float:
    """Return what the weights of an update share: its tokens for token_mean, else its sequences with a counted one.

    Weights times their units depend on nothing else in the update, so parts of it add up; the sum over the sum of their
    units is the whole. The parts of a token_sum add up as they are: it is one unit, however many parts there are.
    """
    if aggregation == "token_sum":
        return float(counted.any())
    tokens = segment_sums(counted.astype(np.float64), response_lengths)
    shares = np.ones(tokens.size) if sample_weights is None else sample_weights
    return float(shares @ tokens) if aggregation == "token_mean" else float(shares[tokens > 0].sum())

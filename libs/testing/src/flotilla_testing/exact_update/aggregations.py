"""How the losses of tokens become one number: the mean that each name promises, as weights of tokens."""

from __future__ import annotations

import numpy as np

from flotilla_core.config.algorithm import AggregationConfig
from flotilla_testing.exact_update.rollouts import Bools, Floats, Rollouts


def weights(
    aggregation: AggregationConfig,
    rollouts: Rollouts,
    counted: Bools,
    of_sample: Floats,
    *,
    max_response_tokens: int,
) -> Floats:
    """One a token; the weighted sum over the counted ones is the mean in which a sample counts by its weight."""
    weight = np.zeros(len(counted))
    rows = {
        sample: own[counted[own]]
        for sample, own in enumerate(rollouts.own_tokens)
        if counted[own].any() and of_sample[sample] > 0
    }
    samples = sum(of_sample[sample] for sample in rows)
    tokens = sum(of_sample[sample] * len(row) for sample, row in rows.items())
    for sample, row in rows.items():
        share = {
            "token_mean": 1 / tokens,
            "sequence_mean_of_token_sum": 1 / samples,
            "sequence_mean_of_token_mean": 1 / samples / len(row),
            "constant": 1 / samples / (aggregation.constant_tokens or max_response_tokens),
            "token_sum": 1.0,
        }[aggregation.type]
        weight[row] = of_sample[sample] * share
    return weight

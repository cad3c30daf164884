"""The distance of sampled tokens from a reference: estimators of the KL divergence, as penalties on rewards."""

from __future__ import annotations

import numpy as np

from flotilla_algorithms.outcomes import Floats

MAX_LOG_RATIO = 20.0
"""The log ratio from which on k3 no longer grows, however much likelier the reference finds a token."""
MAX_STEP = 0.2
"""Largest relative change of an adaptive coefficient, before it is spread over the horizon."""


def divergence(estimator: str, logprobs: Floats, reference: Floats) -> Floats:
    """One a token, of samples of the policy: k1, k2 (square), k3 (unbiased, never negative) or abs."""
    difference = logprobs - reference
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return 0.5 * difference**2
    if estimator == "k3":
        bounded: Floats = np.maximum(difference, -MAX_LOG_RATIO)
        k3: Floats = np.expm1(-bounded) + bounded
        return k3
    if estimator == "abs":
        return np.abs(difference)
    raise ValueError(f"there is no estimator {estimator!r}: choose from k1, k2, k3, abs")


def adapted_coefficient(
    coefficient: float, measured: float, *, target: float, horizon_samples: float, samples: int
) -> float:
    """Return the next coefficient: larger where the measured divergence is above its target, smaller below."""
    error = min(max(measured / target - 1.0, -MAX_STEP), MAX_STEP)
    return coefficient * (1.0 + error * samples / horizon_samples)

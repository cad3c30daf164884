"""Tokens whose probability and advantage rise together, which are those that use up entropy.

Invariants: covariances are taken over the whole update; what is chosen depends on the update and its seed alone.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flotilla_algorithms.outcomes import Floats

Mask = NDArray[np.bool_]


def covariances(logprobs: Floats, advantages: Floats, counted: Mask) -> Floats:
    """One a token: its share of the covariance of log-probability and advantage; -inf where it is not counted."""
    if not counted.any():
        return np.full(logprobs.size, -np.inf)
    products = (logprobs - logprobs[counted].mean()) * (advantages - advantages[counted].mean())
    return np.where(counted, products, -np.inf)


def drawn_between(covariance: Floats, low: float, high: float, share: float, seed: int) -> Mask:
    """`share` of all counted tokens, drawn at random from those whose covariance lies between the limits (Clip-Cov)."""
    candidates = np.flatnonzero((covariance > low) & (covariance < high))
    count = min(int(share * np.isfinite(covariance).sum()), candidates.size)
    chosen = np.zeros(covariance.size, np.bool_)
    chosen[np.random.default_rng(seed).choice(candidates, count, replace=False)] = True
    return chosen


def highest(covariance: Floats, share: float) -> Mask:
    """`share` of all counted tokens: those with the highest covariance (KL-Cov)."""
    count = int(share * np.isfinite(covariance).sum())
    chosen = np.zeros(covariance.size, np.bool_)
    chosen[np.argsort(-covariance, kind="stable")[:count]] = True
    return chosen

"""Importance weights of a whole update, for what has to be known of them before the first gradient.

Invariant: these are the weights that the ranks take, in float64; a token, a stretch or a sequence is one weight,
however many tokens it has.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flotilla_algorithms.outcomes import Floats, Ints

LARGEST_LOG = 700.0
"""Above every cap, and still a float."""


def mean_importance(
    log_ratio: Floats, units: Ints, counted: NDArray[np.bool_], *, cap: float, floor: float | None
) -> float:
    """Return the mean of the weights of all units with a counted token; 1 where there are none, or all are 0.

    `units` numbers what has one weight: the product of the ratios of its counted tokens. With a floor it is 0 beyond
    the limits, without one at most `cap`.
    """
    _, numbers = np.unique(units[counted], return_inverse=True)
    sums = np.bincount(numbers, weights=log_ratio[counted])
    ratios = np.exp(np.minimum(sums, LARGEST_LOG))
    beyond = 0.0 if floor is not None else cap
    weights = np.where((ratios >= (floor or 0.0)) & (ratios <= cap), ratios, beyond)
    mean = float(weights.mean()) if weights.size else 0.0
    return mean or 1.0

"""Whitening: mean zero and deviation one over all trained tokens of an update."""

from __future__ import annotations

import numpy as np

from flotilla_algorithms.outcomes import Floats, Outcomes

VARIANCE_EPSILON = 1e-8


def whitened(advantages: Floats, outcomes: Outcomes) -> Floats:
    """Advantages of tokens, centred and scaled by the sample deviation (n - 1); untrained tokens get the same shift."""
    trained = advantages[outcomes.trained]
    if not trained.size:
        return advantages
    # From the first one on, so that equal advantages become exact zeros.
    relative = advantages - trained[0]
    centred = relative - (trained - trained[0]).mean()
    variance = (centred[outcomes.trained] ** 2).sum() / max(trained.size - 1, 1)
    white: Floats = centred / np.sqrt(variance + VARIANCE_EPSILON)
    return white

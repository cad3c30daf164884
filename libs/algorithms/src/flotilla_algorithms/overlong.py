"""Soft punishment of responses that come near the length limit (DAPO)."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from flotilla_algorithms.outcomes import Floats


def overlong_penalties(
    response_lengths: ArrayLike, *, limit: int, buffer_tokens: int, penalty: float
) -> Floats:
    """To add to the rewards: 0 up to `limit - buffer_tokens`, then falling in a line to -penalty at the limit."""
    into_buffer = np.asarray(response_lengths, dtype=np.float64) - (limit - buffer_tokens)
    fall: Floats = -penalty * np.clip(into_buffer / buffer_tokens, 0.0, 1.0)
    return fall

"""An advantage and a loss as a user writes them; the test of option pairs names them by this file's path."""

from __future__ import annotations

import numpy as np


def powered(outcomes, *, power=1.0):
    """The reward to a power, with its sign."""
    return np.sign(outcomes.totals) * np.abs(outcomes.totals) ** power


def soft(tokens, *, power=1.0):
    """Less for tokens that are nearly certain, and for those that the policy has moved away from."""
    return -tokens.advantages * (1 - (1 - tokens.logprobs.exp()) ** power) * tokens.log_ratio.detach().exp()

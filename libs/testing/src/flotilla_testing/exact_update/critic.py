"""What a critic learns in an update: half the squared distance from the returns, clipped as in PPO."""

from __future__ import annotations

import numpy as np
import torch

from flotilla_core.config import CriticConfig
from flotilla_testing.exact_update.rollouts import Bools, Floats, Rollouts


def critic_loss(
    critic: CriticConfig, rollouts: Rollouts, advantages: Floats, values: torch.Tensor, inside: Bools
) -> torch.Tensor:
    """The mean over the trained tokens inside; a return is the advantage by `gae` and what was expected."""
    own = torch.from_numpy(np.flatnonzero(rollouts.trained & inside))
    old = torch.from_numpy(rollouts.values)[own]
    returns = torch.from_numpy(advantages)[own] + old
    squares = (values[own] - returns) ** 2
    if critic.value_clip is not None:
        near = torch.max(torch.min(values[own], old + critic.value_clip), old - critic.value_clip)
        squares = torch.max(squares, (near - returns) ** 2)
    return squares.mean() / 2

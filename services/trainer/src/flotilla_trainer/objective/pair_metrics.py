"""What an update of pairs says about itself, whatever it is that rewards an answer."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def pair_metrics(losses: Floats, rewards: Floats) -> dict[str, float]:
    """From the loss of each pair and the reward of each answer, the preferred one of a pair first."""
    chosen, rejected = rewards[0::2], rewards[1::2]
    margins: Floats = chosen - rejected
    return {
        "loss": float(losses.mean()),
        "preference/accuracy": _preferred_share(margins),
        "preference/margin": float(margins.mean()),
        "preference/chosen_reward": float(chosen.mean()),
        "preference/rejected_reward": float(rejected.mean()),
    }


def _preferred_share(margins: Floats) -> float:
    """Share of pairs whose preferred answer is ahead; one without a difference counts half."""
    return float(np.mean((margins > 0) + 0.5 * (margins == 0)))

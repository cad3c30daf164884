"""From outcomes to the advantage of every token: the one place where an advantage function is called."""

from __future__ import annotations

from typing import Any

import numpy as np

from flotilla_algorithms.outcomes import Floats, Outcomes
from flotilla_algorithms.table import AdvantageFunction
from flotilla_algorithms.whitening import whitened


def token_advantages(
    function: AdvantageFunction,
    outcomes: Outcomes,
    parameters: dict[str, Any],
    *,
    whiten: bool = False,
    clip: float | None = None,
) -> Floats:
    """What the function says of each sample or token, as one finite number a token, whitened and then clipped."""
    given = np.asarray(function(outcomes, **parameters), dtype=np.float64)
    samples, tokens = outcomes.rewards.shape, outcomes.trained.shape
    if given.shape not in (samples, tokens):
        raise ValueError(
            f"the advantages have shape {list(given.shape)}, not one a sample {list(samples)} or a token {list(tokens)}"
        )
    advantages = given if given.shape == tokens else outcomes.to_tokens(given)
    if not np.isfinite(advantages).all():
        raise ValueError("an advantage is not finite")
    if whiten:
        advantages = whitened(advantages, outcomes)
    return advantages if clip is None else np.clip(advantages, -clip, clip)

"""Every advantage that a run can name, and the one place where an advantage function is called.

Invariants: each advantage takes the outcomes and its parameters by keyword, and gives one number a sample or one a
token; a sample that is left out counts nowhere: no mean, deviation, baseline or scale includes it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flotilla_algorithms.advantages import (
    distill,
    gae_of_values,
    gdpo_of_terms,
    gpg,
    grpo,
    grpo_passk,
    opo,
    optimal_token_baseline,
    pass_at_k,
    reinforce,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    remax_of_greedy_rewards,
    rloo,
    tir_optimal_token_baseline,
    whitened,
)
from flotilla_algorithms.outcomes import Floats, Outcomes
from flotilla_algorithms.steps import gigpo_of_turns, step_reinforce_of_turns

AdvantageFunction = Callable[..., Floats]

ADVANTAGES: dict[str, AdvantageFunction] = {
    "grpo": grpo,
    "rloo": rloo,
    "reinforce": reinforce,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "opo": opo,
    "gpg": gpg,
    "pass_at_k": pass_at_k,
    "grpo_passk": grpo_passk,
    "step_reinforce": step_reinforce_of_turns,
    "gigpo": gigpo_of_turns,
    "optimal_token_baseline": optimal_token_baseline,
    "tir_optimal_token_baseline": tir_optimal_token_baseline,
    "gae": gae_of_values,
    "distill": distill,
    "gdpo": gdpo_of_terms,
    "remax": remax_of_greedy_rewards,
}


def token_advantages(
    function: AdvantageFunction,
    outcomes: Outcomes,
    parameters: dict[str, Any],
    *,
    kept: NDArray[np.bool_] | None = None,
    whiten: bool = False,
    clip: float | None = None,
) -> Floats:
    """Return what the function says of each sample or token, as one finite number a token, whitened and then clipped.

    `kept` has one flag a sample; the function sees the samples that are kept alone, the others get zeros.
    """
    if kept is not None and not kept.all():
        advantages = np.zeros(outcomes.trained.size)
        if kept.any():
            left = outcomes.only(kept)
            of_kept = token_advantages(function, left, parameters, whiten=whiten, clip=clip)
            advantages[np.repeat(kept, outcomes.response_lengths)] = of_kept
        return advantages
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

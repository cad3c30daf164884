"""Clipped policy gradient on given advantages."""

from __future__ import annotations

import torch

from flotilla_trainer.losses.terms import LossTerms


def grpo_loss(
    logprobs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    clip_low: float,
    clip_high: float,
) -> LossTerms:
    """The pessimistic minimum of the plain and the clipped objective, negated and summed over tokens.

    `rollout_logprobs` are those of the policy that sampled the tokens; where it is this policy the ratio is 1 and the
    gradient that of REINFORCE with these advantages.
    """
    ratio = torch.exp(logprobs - rollout_logprobs)
    plain = ratio * advantages
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    return LossTerms(
        loss=-torch.minimum(plain, clipped).sum(),
        clipped=(clipped < plain).sum(),
        ratio=ratio.detach().sum(),
    )

"""Clip-Cov: PPO whose tokens of high covariance give no gradient, so that entropy lasts longer."""

from __future__ import annotations

import torch

from flotilla_trainer.losses.policy_tokens import PolicyTokens, TokenLosses
from flotilla_trainer.losses.ppo import ppo


def clip_cov(tokens: PolicyTokens, *, clip_low: float, clip_high: float) -> TokenLosses:
    """The clipped loss, zero where the front selected the token by its covariance."""
    assert tokens.selected is not None, "the front selects tokens for this loss"
    loss, clipped = ppo(tokens, clip_low=clip_low, clip_high=clip_high, dual_clip=None)
    return TokenLosses(torch.where(tokens.selected, 0.0, loss), clipped | tokens.selected)

"""RAFT++: reward-ranked fine-tuning on good samples alone, with importance ratios and the clip of PPO."""

from __future__ import annotations

import torch

from flotilla_trainer.losses.policy_tokens import PolicyTokens, TokenLosses
from flotilla_trainer.losses.ppo import ppo


def raft_plus_plus(tokens: PolicyTokens, *, clip_low: float, clip_high: float) -> TokenLosses:
    """The clipped loss where A > 0, and 0 elsewhere: bad samples are not unlearnt."""
    loss, clipped = ppo(tokens, clip_low=clip_low, clip_high=clip_high, dual_clip=None)
    good = tokens.advantages > 0
    return TokenLosses(torch.where(good, loss, 0.0), clipped & good)

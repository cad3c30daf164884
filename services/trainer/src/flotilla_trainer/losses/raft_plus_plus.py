"""RAFT++: reward-ranked fine-tuning on good samples alone, with importance ratios and the clip of PPO."""

from __future__ import annotations

import torch

from flotilla_trainer.losses.policy_tokens import PolicyTokens, TokenLosses


def raft_plus_plus(tokens: PolicyTokens, *, clip_high: float) -> TokenLosses:
    """-min(r, 1 + high) A where A > 0, and 0 elsewhere: bad samples are not unlearnt, so no floor is needed."""
    good, ratio = tokens.advantages > 0, tokens.ratio
    bounded = ratio.clamp(max=1.0 + clip_high)
    return TokenLosses(torch.where(good, -bounded * tokens.advantages, 0.0), good & (bounded < ratio))

"""GSPO: one ratio a sequence, the geometric mean of its tokens' ratios."""

from __future__ import annotations

import torch

from flotilla_trainer.losses.policy_tokens import PolicyTokens, TokenLosses


def gspo(tokens: PolicyTokens, *, clip_low: float, clip_high: float) -> TokenLosses:
    """-min(s A, clip(s, 1 - low, 1 + high) A) with s = exp(mean log r)."""
    ratio = tokens.sequence_ratio(tokens.log_ratio)
    plain = ratio * tokens.advantages
    bounded = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * tokens.advantages
    return TokenLosses(-torch.minimum(plain, bounded), bounded < plain)

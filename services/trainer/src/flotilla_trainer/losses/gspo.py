"""GSPO: one ratio a sequence, or a turn of it, the geometric mean of its tokens' ratios."""

from __future__ import annotations

import torch

from flotilla_trainer.losses.policy_tokens import PolicyTokens, TokenLosses


def gspo(tokens: PolicyTokens, *, clip_low: float, clip_high: float, over: str) -> TokenLosses:
    """-min(s A, clip(s, 1 - low, 1 + high) A) with s = exp(mean log r), over the `sequence` or over each `segment`."""
    if over == "segment":
        assert tokens.segments is not None, "the front cuts sequences for this loss"
        tokens = tokens._replace(sequences=tokens.segments)
    ratio = tokens.sequence_ratio(tokens.log_ratio)
    plain = ratio * tokens.advantages
    bounded = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * tokens.advantages
    return TokenLosses(-torch.minimum(plain, bounded), bounded < plain)

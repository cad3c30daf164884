"""GMPO: the geometric mean of clipped token ratios, which single tokens cannot rule."""

from __future__ import annotations

import torch

from flotilla_trainer.losses.policy_tokens import PolicyTokens, TokenLosses


def gmpo(tokens: PolicyTokens, *, clip_low: float, clip_high: float) -> TokenLosses:
    """-A exp(mean of clipped log r): at most +high where A > 0, at least -low where A < 0 (limits of the log)."""
    log_ratio = tokens.log_ratio
    bounded = torch.where(
        tokens.advantages > 0, log_ratio.clamp(max=clip_high), log_ratio.clamp(min=-clip_low)
    )
    return TokenLosses(-tokens.advantages * tokens.sequence_ratio(bounded), bounded != log_ratio)

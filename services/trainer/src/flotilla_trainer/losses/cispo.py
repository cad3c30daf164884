"""CISPO: importance weights are clipped, gradients of tokens never are."""

from __future__ import annotations

from flotilla_trainer.losses.policy_tokens import PolicyTokens, TokenLosses


def cispo(tokens: PolicyTokens, *, clip_low: float, clip_high: float) -> TokenLosses:
    """-w A log p with the constant w = clip(r, 1 - low, 1 + high); a token at the limit still teaches."""
    ratio = tokens.ratio.detach()
    weight = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return TokenLosses(-weight * tokens.advantages * tokens.logprobs, weight != ratio)

"""KL-Cov: the plain surrogate, with a penalty on tokens of high covariance, so that entropy lasts longer."""

from __future__ import annotations

import torch

from flotilla_trainer.losses.policy_tokens import PolicyTokens, TokenLosses, not_one


def kl_cov(tokens: PolicyTokens, *, penalty: float) -> TokenLosses:
    """-r A, and penalty |log r| more where the front selected the token by its covariance."""
    assert tokens.selected is not None, "the front selects tokens for this loss"
    surrogate = -tokens.ratio * tokens.advantages
    distance = penalty * tokens.log_ratio.abs()
    return TokenLosses(surrogate + torch.where(tokens.selected, distance, 0.0), not_one(tokens))

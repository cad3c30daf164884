"""TOPR: tapered off-policy REINFORCE."""

from __future__ import annotations

import torch

from flotilla_trainer.losses.policy_tokens import PolicyTokens, TokenLosses


def topr(tokens: PolicyTokens, *, negative_cap: float) -> TokenLosses:
    """-w A log p; w is 1 for good sequences, and the sequence's whole ratio, at most `negative_cap`, for bad ones.

    What is good is learned at full strength however unlikely it has become; what is bad is forgotten only as far as
    the policy would still say it.
    """
    ratio = tokens.sequence_sums(tokens.log_ratio.detach()).exp()
    good = tokens.advantages >= 0
    weight = torch.where(good, 1.0, ratio.clamp(max=negative_cap))
    return TokenLosses(-weight * tokens.advantages * tokens.logprobs, ~good & (ratio > negative_cap))

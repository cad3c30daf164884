"""SAPO: a soft gate in place of the clip."""

from __future__ import annotations

import torch

from flotilla_trainer.losses.policy_tokens import PolicyTokens, TokenLosses, not_one


def sapo(tokens: PolicyTokens, *, tau_positive: float, tau_negative: float) -> TokenLosses:
    """-(4 / tau) sigmoid(tau (r - 1)) A, whose gradient fades with distance; tau by the sign of A."""
    tau = torch.full_like(tokens.advantages, tau_positive)
    tau = torch.where(tokens.advantages > 0, tau, torch.full_like(tau, tau_negative))
    gate = torch.sigmoid(tau * (tokens.ratio - 1.0)) * 4.0 / tau
    return TokenLosses(-gate * tokens.advantages, not_one(tokens))

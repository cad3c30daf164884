"""DPPO: trust region by the divergence of the two policies, in place of the ratio."""

from __future__ import annotations

import torch

from flotilla_trainer.losses.policy_tokens import PolicyTokens, TokenLosses


def dppo_tv(tokens: PolicyTokens, *, limit: float) -> TokenLosses:
    """-r A, masked where the token's probability has moved by more than `limit` in the direction of A."""
    moved = (tokens.logprobs.detach().exp() - tokens.old_logprobs.exp()).abs()
    return _masked(tokens, moved > limit)


def dppo_kl(tokens: PolicyTokens, *, limit: float) -> TokenLosses:
    """The same, by the KL divergence between "this token" and "another one", then against now."""
    now, then = tokens.logprobs.detach(), tokens.old_logprobs
    divergence = then.exp() * (then - now) + _other(then).exp() * (_other(then) - _other(now))
    return _masked(tokens, divergence > limit)


def _other(logprobs: torch.Tensor) -> torch.Tensor:
    """Log-probability of every other token together; kept finite where the token is certain."""
    return torch.log1p(-logprobs.exp().clamp(max=1.0 - 1e-7))


def _masked(tokens: PolicyTokens, far: torch.Tensor) -> TokenLosses:
    ratio = tokens.ratio
    stopped = far & ((ratio.detach() - 1.0) * tokens.advantages > 0)
    return TokenLosses(torch.where(stopped, 0.0, -ratio * tokens.advantages), stopped)

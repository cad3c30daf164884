"""DPPO: trust region by the divergence of the two policies, in place of the ratio."""

from __future__ import annotations

import torch

from flotilla_trainer.losses.policy_tokens import PolicyTokens, TokenLosses


def dppo_tv(
    tokens: PolicyTokens, *, limit: float, limit_low: float | None, ratio_cap: float | None
) -> TokenLosses:
    """-r A, masked where the token's probability has moved by more than the limit in the direction of A."""
    moved = (tokens.logprobs.detach().exp() - tokens.old_logprobs.exp()).abs()
    return _masked(tokens, moved > _limits(tokens, limit, limit_low), ratio_cap)


def dppo_kl(
    tokens: PolicyTokens, *, limit: float, limit_low: float | None, ratio_cap: float | None
) -> TokenLosses:
    """The same, by the KL divergence between "this token" and "another one", then against now."""
    now, then = tokens.logprobs.detach(), tokens.old_logprobs
    divergence = then.exp() * (then - now) + _other(then).exp() * (_other(then) - _other(now))
    return _masked(tokens, divergence > _limits(tokens, limit, limit_low), ratio_cap)


def _limits(tokens: PolicyTokens, limit: float, limit_low: float | None) -> torch.Tensor:
    """One a token: `limit_low` where the advantage is not positive."""
    limits = torch.full_like(tokens.advantages, limit)
    return limits if limit_low is None else torch.where(tokens.advantages > 0, limits, limit_low)


def _other(logprobs: torch.Tensor) -> torch.Tensor:
    """Log-probability of every other token together; kept finite where the token is certain."""
    return torch.log1p(-logprobs.exp().clamp(max=1.0 - 1e-7))


def _masked(tokens: PolicyTokens, far: torch.Tensor, ratio_cap: float | None) -> TokenLosses:
    ratio = tokens.ratio
    stopped = far & ((ratio.detach() - 1.0) * tokens.advantages > 0)
    if ratio_cap is not None:
        # The truncated ratio is a constant weight: beyond the cap a token goes on learning, at that strength.
        ratio = ratio.detach().clamp(max=ratio_cap) * (1.0 + (tokens.logprobs - tokens.logprobs.detach()))
    return TokenLosses(torch.where(stopped, 0.0, -ratio * tokens.advantages), stopped)

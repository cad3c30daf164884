"""How far a policy is from the reference: Schulman's estimators on sampled tokens, or the divergence itself."""

from __future__ import annotations

import torch


def estimated(estimator: str, logprobs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """One a token, of tokens that the policy p drew, with the ratio q / p of the reference q."""
    log_ratio = reference - logprobs
    ratio = torch.exp(log_ratio)
    return {
        "k1": -log_ratio,
        "k2": log_ratio**2 / 2,
        "k3": ratio - 1 - log_ratio,
        "abs": log_ratio.abs(),
    }[estimator]


def whole(logits: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """One a token: the expectation under p of log p - log q."""
    p, q = torch.softmax(logits, dim=-1), torch.softmax(reference, dim=-1)
    return (p * (torch.log(p) - torch.log(q))).sum(-1)


def adapted(
    coefficient: float, measured: float, *, target: float, horizon_samples: int, samples: int
) -> float:
    """The proportional controller of Ziegler et al.: the error is bounded to a fifth either way."""
    error = max(-0.2, min(0.2, measured / target - 1))
    return coefficient * (1 + error * samples / horizon_samples)

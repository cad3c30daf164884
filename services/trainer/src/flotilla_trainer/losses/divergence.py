"""The KL divergence from a reference, with a gradient: estimated on sampled tokens, or of the whole distributions."""

from __future__ import annotations

import torch

MAX_LOG_RATIO = 20.0
"""From where on a reference that finds a token likelier changes k3 no more."""


def divergence(estimator: str, logprobs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """One a token, of samples of the policy: k1, k2 (square), k3 (never negative) or abs."""
    difference = logprobs - reference
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return 0.5 * difference.square()
    if estimator == "k3":
        bounded = difference.clamp(min=-MAX_LOG_RATIO)
        return torch.expm1(-bounded) + bounded
    if estimator == "abs":
        return difference.abs()
    raise ValueError(f"there is no estimator {estimator!r}")


def full_divergence(logits: torch.Tensor, reference_logits: torch.Tensor) -> torch.Tensor:
    """One a row: the sum over the vocabulary of p (log p - log q)."""
    logprobs = torch.log_softmax(logits, dim=-1)
    distance: torch.Tensor = logprobs - torch.log_softmax(reference_logits, dim=-1)
    return (logprobs.exp() * distance).sum(-1)

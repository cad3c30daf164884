"""Weights that make up for the difference between the engine that sampled and the trainer that learns.

Invariants: pure functions of log(p_trainer / p_rollout), detached; a weight of zero takes a token out of the loss and
leaves the denominators of the update as they are.
"""

from __future__ import annotations

import torch

from flotilla_trainer.losses.policy_tokens import sequence_means, sequence_sums


def truncated_token_weights(log_ratio: torch.Tensor, *, cap: float) -> torch.Tensor:
    """Truncated importance sampling by token: min(r, cap)."""
    return log_ratio.exp().clamp(max=cap)


def truncated_sequence_weights(
    log_ratio: torch.Tensor, sequences: torch.Tensor, *, cap: float
) -> torch.Tensor:
    """Truncated importance sampling by sequence: min(product of r, cap) for all its tokens."""
    return sequence_sums(log_ratio, sequences).exp().clamp(max=cap)


def icepop_weights(log_ratio: torch.Tensor, *, low: float, high: float) -> torch.Tensor:
    """IcePop: r where it lies between the limits, 0 where it does not."""
    ratio = log_ratio.exp()
    return torch.where((ratio >= low) & (ratio <= high), ratio, 0.0)


def geometric_mask(
    log_ratio: torch.Tensor, sequences: torch.Tensor, *, low: float, high: float
) -> torch.Tensor:
    """1 for tokens of sequences whose geometric mean of r lies between the limits, 0 for the others."""
    mean = sequence_means(log_ratio, sequences).exp()
    return ((mean >= low) & (mean <= high)).to(log_ratio.dtype)

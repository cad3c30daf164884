"""Weights that correct for the difference between the engine that sampled and the trainer that learns.

Invariants: pure functions of log(p_trainer / p_rollout), detached; a weight of zero takes a token out of the loss and
leaves the denominators of the update as they are.
"""

from __future__ import annotations

import torch

from flotilla_trainer.losses.policy_tokens import sequence_means, sequence_sums


def truncated_token_weights(log_ratio: torch.Tensor, *, cap: float) -> torch.Tensor:
    """Return the weights of truncated importance sampling by token: min(r, cap)."""
    return log_ratio.exp().clamp(max=cap)


def truncated_sequence_weights(
    log_ratio: torch.Tensor, sequences: torch.Tensor, *, cap: float
) -> torch.Tensor:
    """Return the weights of truncated importance sampling by sequence: min(product of r, cap) for all its tokens."""
    return sequence_sums(log_ratio, sequences).exp().clamp(max=cap)


def icepop_weights(log_ratio: torch.Tensor, *, low: float, high: float) -> torch.Tensor:
    """Return the weights of IcePop: r where it is between the limits, 0 where it is not."""
    ratio = log_ratio.exp()
    return torch.where((ratio >= low) & (ratio <= high), ratio, 0.0)


def within(
    trainer: torch.Tensor,
    rollout: torch.Tensor,
    sequences: torch.Tensor,
    *,
    measure: str,
    over: str,
    low: float | None,
    high: float | None,
) -> torch.Tensor:
    """Return the mask of the tokens that are within the limits, or in a sequence that is.

    k1 is compared as a ratio: r, the product of r, its geometric mean. `sequence_max` asks every token of a sequence
    to be within the limits.
    """
    values = _measured(trainer, rollout, measure)
    if over == "sequence_sum":
        values = sequence_sums(values, sequences)
    elif over == "sequence_mean":
        values = sequence_means(values, sequences)
    if measure == "k1":
        values = values.exp()
    kept = torch.ones_like(values, dtype=torch.bool)
    if low is not None:
        kept &= values >= low
    if high is not None:
        kept &= values <= high
    if over == "sequence_max":
        kept = sequence_sums((~kept).to(values.dtype), sequences) == 0
    return kept


def _measured(trainer: torch.Tensor, rollout: torch.Tensor, measure: str) -> torch.Tensor:
    """Return the measure of each token; k1 stays the log of the ratio."""
    log_ratio = trainer - rollout
    if measure == "k2":
        return 0.5 * log_ratio.square()
    if measure == "k3":
        return torch.expm1(log_ratio) - log_ratio
    if measure == "difference":
        return trainer.exp() - rollout.exp()
    return log_ratio


def geometric_mask(
    log_ratio: torch.Tensor, sequences: torch.Tensor, *, low: float, high: float
) -> torch.Tensor:
    """Return 1 for tokens of sequences whose geometric mean of r is between the limits, 0 for the others."""
    mean = sequence_means(log_ratio, sequences).exp()
    return ((mean >= low) & (mean <= high)).to(log_ratio.dtype)

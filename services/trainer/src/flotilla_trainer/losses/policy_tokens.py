"""What a policy loss is a function of, and what it gives back.

Invariants: one row a trained token; a sequence lies in one piece and whole in its micro-batch, so whatever is summed or
averaged over it does not depend on the cuts; only `logprobs` carries a gradient.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class PolicyTokens(NamedTuple):
    """The trained tokens of a micro-batch."""

    logprobs: torch.Tensor
    """Under the policy that is trained."""
    old_logprobs: torch.Tensor
    """Under the policy that the ratio compares with."""
    advantages: torch.Tensor
    sequences: torch.Tensor
    """For each token the number of its sequence, counted from 0 within the micro-batch."""
    selected: torch.Tensor | None = None
    """Tokens that the front chose, for losses that treat some differently."""

    @property
    def log_ratio(self) -> torch.Tensor:
        """Log of the probability now over the probability then."""
        return self.logprobs - self.old_logprobs

    def sequence_sums(self, values: torch.Tensor) -> torch.Tensor:
        """For each token the sum of `values` over its sequence."""
        return sequence_sums(values, self.sequences)

    def sequence_means(self, values: torch.Tensor) -> torch.Tensor:
        """For each token the mean of `values` over the trained tokens of its sequence."""
        return sequence_means(values, self.sequences)


class TokenLosses(NamedTuple):
    """One row a token, neither weighted nor averaged."""

    loss: torch.Tensor
    clipped: torch.Tensor
    """Tokens whose gradient a clip or a mask removed."""


def sequence_sums(values: torch.Tensor, sequences: torch.Tensor) -> torch.Tensor:
    """For each token the sum of `values` over its sequence."""
    # A micro-batch may hold context alone.
    count = int(sequences[-1]) + 1 if sequences.numel() else 0
    return values.new_zeros(count).index_add(0, sequences, values)[sequences]


def sequence_means(values: torch.Tensor, sequences: torch.Tensor) -> torch.Tensor:
    """For each token the mean of `values` over its sequence."""
    return sequence_sums(values, sequences) / sequence_sums(torch.ones_like(values), sequences)


def not_one(tokens: PolicyTokens) -> torch.Tensor:
    """No token at all, for losses that clip nothing."""
    return torch.zeros_like(tokens.logprobs, dtype=torch.bool)

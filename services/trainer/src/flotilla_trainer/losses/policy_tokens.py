"""The input and the output of a policy loss.

Invariants: one row for each trained token; a sequence is in one piece and whole in its micro-batch, so sums and means
over it do not depend on the cuts; only `logprobs` carries a gradient; a token that does not count adds nothing to its
sequence, and no ratio is larger than a float can multiply.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

MAX_LOG_RATIO = 20.0
"""The limit for one token; beyond it the ratio is constant and carries no gradient."""
MAX_MEAN_LOG_RATIO = 10.0
"""The limit for the mean over a sequence."""


class PolicyTokens(NamedTuple):
    """The trained tokens of a micro-batch."""

    logprobs: torch.Tensor
    """Log-probabilities under the policy that is trained."""
    old_logprobs: torch.Tensor
    """Log-probabilities under the policy that the ratio compares with."""
    advantages: torch.Tensor
    sequences: torch.Tensor
    """The number of the sequence of each token, counted from 0 within the micro-batch."""
    selected: torch.Tensor | None = None
    """The tokens that the front chose, for losses that treat some tokens differently."""
    counted: torch.Tensor | None = None
    """The tokens with a weight above 0; None counts all of them. Both log-probabilities of the others are 0."""
    segments: torch.Tensor | None = None
    """The number of the turn of each token: a part of a sequence that the policy wrote without context in between. None
    unless the loss or a correction asks for it."""

    @property
    def log_ratio(self) -> torch.Tensor:
        """The log of the probability now over the probability then, without a limit."""
        return self.logprobs - self.old_logprobs

    @property
    def ratio(self) -> torch.Tensor:
        """The probability now over the probability then, at most exp(20)."""
        return self.log_ratio.clamp(max=MAX_LOG_RATIO).exp()

    def sequence_ratio(self, log_ratio: torch.Tensor) -> torch.Tensor:
        """Return exp of the mean of `log_ratio` over the sequence of each token, at most exp(10).

        Each token carries the value of its sequence and its own share of the gradient, so that its weight scales its
        own gradient, and tokens of one sequence may differ in advantage. Where they do not, the mean over the sequence
        is the sequence's own loss and gradient.
        """
        constant = log_ratio.detach()
        mean = self.sequence_means(constant)
        return (mean + (log_ratio - constant)).clamp(max=MAX_MEAN_LOG_RATIO).exp()

    def sequence_sums(self, values: torch.Tensor) -> torch.Tensor:
        """Return for each token the sum of `values` over the counted tokens of its sequence."""
        counted = values if self.counted is None else torch.where(self.counted, values, 0.0)
        return sequence_sums(counted, self.sequences)

    def sequence_means(self, values: torch.Tensor) -> torch.Tensor:
        """Return for each token the mean of `values` over the counted tokens of its sequence."""
        counts = self.sequence_sums(torch.ones_like(values))
        return self.sequence_sums(values) / counts.clamp(min=1.0)


class TokenLosses(NamedTuple):
    """The losses of a micro-batch: one row for each token, neither weighted nor averaged."""

    loss: torch.Tensor
    clipped: torch.Tensor
    """The tokens whose gradient a clip or a mask removed."""


def sequence_sums(values: torch.Tensor, sequences: torch.Tensor) -> torch.Tensor:
    """Return for each token the sum of `values` over its sequence."""
    # There are no more sequences than tokens; to ask a GPU for their number would wait for it.
    return torch.zeros_like(values).index_add(0, sequences, values).index_select(0, sequences)


def sequence_means(values: torch.Tensor, sequences: torch.Tensor) -> torch.Tensor:
    """Return for each token the mean of `values` over its sequence."""
    return sequence_sums(values, sequences) / sequence_sums(torch.ones_like(values), sequences)


def not_one(tokens: PolicyTokens) -> torch.Tensor:
    """Return a mask that is False everywhere, for losses that clip nothing."""
    return torch.zeros_like(tokens.logprobs, dtype=torch.bool)

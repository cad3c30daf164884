"""Supervised training: next-token cross-entropy on the response."""

from __future__ import annotations

import torch

from flotilla_trainer.losses.terms import LossTerms


def sft_loss(logprobs: torch.Tensor) -> LossTerms:
    """Negative log-likelihood, summed."""
    nothing = logprobs.new_zeros(())
    return LossTerms(loss=-logprobs.sum(), clipped=nothing, ratio=nothing + logprobs.numel())

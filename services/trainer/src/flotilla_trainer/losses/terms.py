"""What an objective says about one micro-batch."""

from __future__ import annotations

from typing import NamedTuple

import torch


class LossTerms(NamedTuple):
    """`loss` carries the gradient; sums and maxima over its tokens are added up over micro-batches and ranks."""

    loss: torch.Tensor
    sums: dict[str, torch.Tensor]
    maxima: dict[str, torch.Tensor]


def weighted_sum(weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The sum of weights times values, to which a weight of zero adds nothing, whatever its value is."""
    return (weights * torch.where(weights != 0, values, 0.0)).sum()

"""What an objective says about one micro-batch."""

from __future__ import annotations

from typing import NamedTuple

import torch


class LossTerms(NamedTuple):
    """`loss` carries the gradient; sums and maxima over its tokens are added up over micro-batches and ranks."""

    loss: torch.Tensor
    sums: dict[str, torch.Tensor]
    maxima: dict[str, torch.Tensor]

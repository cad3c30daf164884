"""What a loss gives back for one micro-batch."""

from __future__ import annotations

from typing import NamedTuple

import torch


class LossTerms(NamedTuple):
    """Sums over the tokens of a micro-batch; only `loss` carries a gradient."""

    loss: torch.Tensor
    clipped: torch.Tensor
    """Tokens whose gradient the clip removed."""
    ratio: torch.Tensor
    """Probability under the policy over probability at sampling time."""

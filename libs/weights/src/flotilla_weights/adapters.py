"""Low-rank adapters of the weights of a model, under the names and by the sum that both ends of a sync share.

Invariants: the adapters of `x.weight` are `x.lora_A.weight` and `x.lora_B.weight`; the sum is made in float32 and
rounded once, to the type of the weight, so a reader that merges the same three tensors holds the same weight.
"""

from __future__ import annotations

from typing import NamedTuple, Self

import torch

WEIGHT = ".weight"


class AdapterNames(NamedTuple):
    """The two adapters of one weight."""

    a: str
    b: str

    @classmethod
    def of(cls, weight: str) -> Self:
        """Return the names of the adapters of `x.weight`."""
        module = weight.removesuffix(WEIGHT)
        return cls(f"{module}.lora_A.weight", f"{module}.lora_B.weight")


@torch.no_grad()
def merged(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """W + scale * B A, in the type of W."""
    return torch.addmm(weight.float(), b.float(), a.float(), alpha=scale).to(weight.dtype)

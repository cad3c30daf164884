"""Low-rank adapters of the weights of a model, under the names and by the sum that both ends of a sync share.

Invariants: the adapters of `x.weight` are `x.lora_A.weight` and `x.lora_B.weight`; the sum is made in float32 and
rounded once, to the type of the weight, so a reader that merges the same three tensors holds the same weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Self

import torch

from flotilla_core.errors import InvalidRequest

if TYPE_CHECKING:
    from flotilla_weights.manifest import Manifest

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


@dataclass(frozen=True)
class Adapters:
    """The changing part of a model whose weights stay frozen."""

    manifest: Manifest
    scale: float

    def checked(self, base: Manifest) -> Self:
        """Refuse adapters of a weight that `base` has not, and those that do not fit theirs."""
        given = {spec.name: spec.shape for spec in self.manifest.tensors}
        for spec in base.tensors:
            a, b = (given.pop(name, None) for name in AdapterNames.of(spec.name))
            if a is None and b is None:
                continue
            if a is None or b is None or (b[0], a[-1]) != spec.shape or a[0] != b[-1]:
                raise InvalidRequest(
                    "the adapters of a weight do not fit it",
                    where=spec.name,
                    why=f"A is {a}, B is {b}, the weight is {spec.shape}",
                )
        if given:
            raise InvalidRequest("an adapter belongs to no weight of the manifest", where=next(iter(given)))
        return self


@torch.no_grad()
def merged(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """W + scale * B A, in the type of W."""
    return torch.addmm(weight.float(), b.float(), a.float(), alpha=scale).to(weight.dtype)

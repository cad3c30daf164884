"""Adapters of linear layers: the model is frozen, and only the matrices that add to its layers' outputs learn.

Invariants: adapters are plain float32 parameters, whole and equal on every rank; A comes from the run's seed and the
name of its layer, so neither ranks nor other layers change it; with B at zero the model gives the same numbers as
without adapters, bit by bit; the model's own parameters are neither changed nor renamed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Literal

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from flotilla_core import ids
from flotilla_core.config import LoraConfig
from flotilla_core.errors import InvalidRequest
from flotilla_weights.adapters import WEIGHT, AdapterNames, merged

NAMED = 8
"""The most layers that an error message lists."""


class Adapters:
    """One pair of matrices for each target; they take part in every forward pass until they are removed."""

    def __init__(
        self, causal_lm: PreTrainedModel, settings: LoraConfig, seed: int, device: torch.device
    ) -> None:
        self.scale = settings.alpha / settings.rank
        self.settings = settings
        self._parameters: dict[str, nn.Parameter] = {}
        layers = _targets(causal_lm, settings.targets)
        for name, layer in layers.items():
            names = AdapterNames.of(name + WEIGHT)
            self._parameters[names.a] = nn.Parameter(_first_a(names.a, layer, settings.rank, seed).to(device))
            zeros = torch.zeros(layer.out_features, settings.rank, device=device)
            self._parameters[names.b] = nn.Parameter(zeros)
        self._hooks = [
            layer.register_forward_hook(partial(self._add, *self._pair(name + WEIGHT)))
            for name, layer in layers.items()
        ]

    def remove(self) -> None:
        """Detach the adapters from the model."""
        for hook in self._hooks:
            hook.remove()

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Return A and B of every layer, by the names that they have in a weight sync."""
        return dict(self._parameters)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return A and B of every layer, detached from gradients."""
        return {name: parameter.detach() for name, parameter in self._parameters.items()}

    def target_names(self) -> list[str]:
        """Return the targets as suffixes of layer names: the given ones, or the last part of every name."""
        if self.settings.targets != "all-linear":
            return list(self.settings.targets)
        return sorted({name.split(".")[-3] for name in self._parameters})

    def set(self, tensors: dict[str, torch.Tensor]) -> None:
        """Copy these tensors into the adapters."""
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(tensors[name])

    def merged_into(self, named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights of the model, with the adapters merged into those of the targets."""
        for name, weight in named:
            if AdapterNames.of(name).a in self._parameters:
                yield name, merged(weight, *self._pair(name), self.scale)
            else:
                yield name, weight

    def _pair(self, weight: str) -> tuple[nn.Parameter, nn.Parameter]:
        a, b = AdapterNames.of(weight)
        return self._parameters[a], self._parameters[b]

    def _add(
        self,
        a: nn.Parameter,
        b: nn.Parameter,
        layer: nn.Module,
        inputs: tuple[torch.Tensor],
        output: torch.Tensor,
    ) -> torch.Tensor:
        kind = output.dtype
        inner = functional.linear(inputs[0], a.to(kind))
        return output + functional.linear(inner, b.to(kind)) * self.scale


def _targets(
    causal_lm: PreTrainedModel, wanted: tuple[str, ...] | Literal["all-linear"]
) -> dict[str, nn.Linear]:
    """Return the layers that get adapters, by name."""
    linear = {name: module for name, module in causal_lm.named_modules() if isinstance(module, nn.Linear)}
    output_embeddings: Callable[[], nn.Module | None] = causal_lm.get_output_embeddings  # without types
    head = output_embeddings()
    if wanted == "all-linear":
        return {name: module for name, module in linear.items() if module is not head}
    for target in wanted:
        if not any(_ends_with(target)(name) for name in linear):
            ends = sorted({name.rpartition(".")[2] for name in linear})
            raise InvalidRequest(
                f"the model has no linear layer {target!r}",
                where="lora.targets",
                why=f"its linear layers are called {', '.join(ends[:NAMED])}",
                next_step="name some of these, or take all-linear",
            )
    chosen = {name: module for name, module in linear.items() if any(_ends_with(t)(name) for t in wanted)}
    embedding = causal_lm.get_input_embeddings().weight
    if any(module.weight is embedding for module in chosen.values()):
        raise InvalidRequest(
            "the head cannot have adapters",
            where="lora.targets",
            why="its weights are those of the embeddings, which would change with them",
            next_step="leave the head out of lora.targets",
        )
    return chosen


def _ends_with(target: str) -> Callable[[str], bool]:
    """Return a test for names that end with whole parts of `target`: proj does not match q_proj."""
    return lambda name: name == target or name.endswith("." + target)


def _first_a(name: str, layer: nn.Linear, rank: int, seed: int) -> torch.Tensor:
    """Draw A uniformly within torch's limit for a new layer; on the host, so that it is equal on every rank."""
    random = torch.Generator().manual_seed(ids.derive_seed("lora", seed, name))
    limit = 1 / math.sqrt(layer.in_features)
    return torch.empty(rank, layer.in_features).uniform_(-limit, limit, generator=random)

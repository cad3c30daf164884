"""The adapters that a run would train, as far as the shapes of its model tell.

Invariant: follows the trainer's rule of which layers get adapters: `all-linear` is every matrix of a repeated layer
that is no expert, names are ends of whole parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from flotilla_coordinator.plan.model_facts import ModelFacts
from flotilla_core.config import LoraConfig

PEFT_CONFIG = "adapter_config.json"


@dataclass(frozen=True)
class AdapterFacts:
    """Where adapters are, and how large."""

    rank: int
    names: tuple[str, ...]
    """The last parts of the names of the layers, each once."""
    layers: int
    """Linear layers with a pair of adapters."""
    parameters: int
    """Numbers that learn."""

    @classmethod
    def of(cls, model: ModelFacts, lora: LoraConfig) -> Self:
        """Those of a run on this model."""
        shapes = {name: shape for name, shape in model.matrices.items() if _gets_adapters(name, lora, model)}
        return cls(
            rank=lora.rank,
            names=tuple(sorted({_last_part(name) for name in shapes})),
            layers=len(shapes),
            parameters=sum(lora.rank * (rows + columns) for rows, columns in shapes.values()),
        )


def adapter_errors(model: ModelFacts, lora: LoraConfig) -> list[str]:
    """What the trainer would refuse, told before anything starts."""
    errors = [
        f"lora.targets: the model has no linear layer {target!r}; its layers have "
        f"{', '.join(sorted({_last_part(name) for name in model.inner_matrices()}))}"
        for target in (() if lora.targets == "all-linear" else lora.targets)
        if not any(_ends_with(name, target) for name in model.matrices)
    ]
    if lora.adapter is not None and not (lora.adapter / PEFT_CONFIG).is_file():
        errors.append(
            f"lora.adapter: {lora.adapter} has no {PEFT_CONFIG}: give a folder in the layout of peft"
        )
    return errors


def _gets_adapters(name: str, lora: LoraConfig, model: ModelFacts) -> bool:
    if lora.targets == "all-linear":
        return name in model.inner_matrices()
    return any(_ends_with(name, target) for target in lora.targets)


def _ends_with(name: str, target: str) -> bool:
    return f".{name}".endswith(f".{target}")


def _last_part(name: str) -> str:
    return name.rpartition(".")[2]

"""What a session asks of the ranks.

Invariant: made by the front from the run's specification and equal on all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flotilla_trainer.rank.lora_settings import LoraSettings
from flotilla_trainer.rank.objective_settings import ObjectiveSettings


@dataclass(frozen=True)
class SessionSettings:
    """Objective, optimizer and memory limits of one session."""

    objective: ObjectiveSettings
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float
    max_grad_norm: float
    chunk_tokens: int
    activation_checkpointing: bool
    activation_offload: bool
    offload: bool
    seed: int
    lora: LoraSettings | None = None
    """None trains all weights."""

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> SessionSettings:
        """Read the fields of the command that opens a session."""
        lora = fields["lora"]
        objective = ObjectiveSettings(**fields["objective"])
        return cls(**{**fields, "objective": objective, "lora": LoraSettings(**lora) if lora else None})

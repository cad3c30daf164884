"""`lora` of run.yaml: only small matrices beside the weights learn, the weights stay."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from flotilla_core.config.model import ConfigModel


class LoraConfig(ConfigModel):
    """Low-rank adapters: a linear layer W becomes W + alpha / rank * B A, and B and A alone learn."""

    rank: int = Field(default=16, ge=1, le=65_536)
    """Rows of A and columns of B."""
    alpha: float = Field(default=32.0, gt=0, le=1e6)
    """Weight of the adapters, as `lora_alpha` in peft."""
    targets: Literal["all-linear"] | Annotated[tuple[str, ...], Field(max_length=1000)] = "all-linear"
    """Linear layers by the end of their names, as q_proj; `all-linear`: every one but the head."""
    adapter: Path | None = None
    """Folder in peft's layout to go on from, of the same rank, alpha and targets; empty: B starts at zero."""

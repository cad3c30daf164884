"""Section `checkpoint` of `run.yaml`: what a run can go on from."""

from __future__ import annotations

from pydantic import Field

from flotilla_core.config.model import ConfigModel


class CheckpointConfig(ConfigModel):
    """Sealed states of the run that it, or a later one, goes on from."""

    every_steps: int = Field(default=20, ge=0, le=10_000_000)
    """Steps between two; a lost trainer repeats the updates since the newest, on recorded samples. 0: none is made."""
    keep: int = Field(default=2, ge=1, le=10_000)
    """Newest ones that stay; the one before is used where the newest is damaged."""

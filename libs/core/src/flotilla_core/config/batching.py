"""Section `batching` of `run.yaml`: memory, never the result."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from flotilla_core.config.model import ConfigModel


class BatchingConfig(ConfigModel):
    """How an update is cut for memory. Never changes the result."""

    tokens_per_microbatch: int = Field(default=8192, ge=1, le=10_000_000)
    """Tokens of one forward pass on one rank, padding included."""
    packing: Literal["auto", "on", "off"] = "auto"
    """Sequences one after the other in one row, without padding; `auto`: on GPUs, where the model allows it."""
    activation_checkpointing: bool = False
    """Keep only the inputs of the layers and compute the rest again backward: less memory, a third more work."""
    activation_offload: bool = False
    """With `activation_checkpointing`: these inputs lie in host memory until the backward pass (GPU only)."""
    logprob_chunk_tokens: int = Field(default=2048, ge=1, le=10_000_000)
    """Tokens whose logits exist at one time."""

    @model_validator(mode="after")
    def _offloads_what_is_kept(self) -> BatchingConfig:
        if self.activation_offload and not self.activation_checkpointing:
            raise ValueError(
                "batching.activation_offload moves the inputs that activation_checkpointing keeps: set both to true"
            )
        return self

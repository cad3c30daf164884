"""How a model is trained and its weights leave the trainer: optimizer, batching, LoRA, checkpoints and weight sync."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from flotilla_core.config.model import ConfigModel

MomentDecay = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(ConfigModel):
    """AdamW and its schedule."""

    learning_rate: float = Field(default=1e-6, gt=0, le=1)
    """Peak."""
    schedule: Literal["constant", "linear", "cosine"] = "linear"
    """Shape after the warm-up."""
    warmup_updates: int = Field(default=0, ge=0, le=10_000_000)
    """Updates of linear warm-up."""
    final_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """Learning rate at the end, as a share of the peak."""
    betas: tuple[MomentDecay, MomentDecay] = (0.9, 0.999)
    """Moment decays."""
    epsilon: float = Field(default=1e-8, gt=0, le=1)
    """Added to the denominator."""
    weight_decay: float = Field(default=0.0, ge=0, le=10)
    """Decoupled."""
    max_grad_norm: float = Field(default=1.0, ge=0, le=1e9)
    """Global clip; 0 is off."""
    max_skipped_updates: int = Field(default=3, ge=1, le=10_000_000)
    """Non-finite updates in a row before the run fails."""
    steps_per_update: int = Field(default=1, ge=1, le=10_000)
    """Optimizer steps of one pass over an update, each on a mini-batch of whole groups with a mean of its own."""
    epochs_per_update: int = Field(default=1, ge=1, le=1000)
    """Passes over the samples of an update. The schedule counts updates, whatever their steps."""
    offload: bool = False
    """Keep AdamW's moments in host memory between updates: frees 8 bytes a parameter on the GPUs, costs transfers."""

    @property
    def steps_of_an_update(self) -> int:
        """Optimizer steps of an update, all passes together."""
        return self.steps_per_update * self.epochs_per_update


class BatchingConfig(ConfigModel):
    """Section `batching` of `run.yaml`: memory, never the result.

    How an update is cut for memory. Never changes the result.
    """

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


class LoraConfig(ConfigModel):
    """`lora` of run.yaml: only small matrices beside the weights learn, the weights stay.

    Low-rank adapters: a linear layer W becomes W + alpha / rank * B A, and B and A alone learn.
    """

    rank: int = Field(default=16, ge=1, le=65_536)
    """Rows of A and columns of B."""
    alpha: float = Field(default=32.0, gt=0, le=1e6)
    """Weight of the adapters, as `lora_alpha` in peft."""
    targets: Literal["all-linear"] | Annotated[tuple[str, ...], Field(max_length=1000)] = "all-linear"
    """Linear layers by the end of their names, as q_proj; `all-linear`: every one but the head."""
    adapter: Path | None = None
    """Folder in peft's layout to go on from, of the same rank, alpha and targets; empty: B starts at zero."""


class CheckpointConfig(ConfigModel):
    """Section `checkpoint` of `run.yaml`: what a run can go on from.

    Sealed states of the run that it, or a later one, goes on from.
    """

    every_steps: int = Field(default=20, ge=0, le=10_000_000)
    """Steps between two; a lost trainer repeats the updates since the newest, on recorded samples. 0: none is made."""
    keep: int = Field(default=2, ge=1, le=10_000)
    """Newest ones that stay; the one before is used where the newest is damaged."""


class CanaryConfig(ConfigModel):
    """Trainer against generator logprobs on the same tokens after every sync."""

    prompts: int = Field(default=8, ge=0, le=10_000)
    """0 is off."""
    tokens: int = Field(default=16, ge=1, le=100_000)
    """Tokens generated for each prompt."""
    temperatures: tuple[Annotated[float, Field(ge=0, le=100)], ...] = Field(default=(1.0,), max_length=16)
    """One pass for each."""
    warn_at: float = Field(default=0.005, gt=0, le=1)
    """Mean difference of probabilities over all answers that raises a warning."""
    fail_at: float = Field(default=0.01, gt=0, le=1)
    """Mean difference over any one answer that fails the run: the generator does not hold the trainer's weights."""


class WeightSyncConfig(ConfigModel):
    """How new weights reach the generators."""

    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """`auto` takes nccl where trainer and generators have GPUs."""
    bucket_mib: int = Field(default=32, ge=1, le=65_536)
    """Size of one broadcast."""
    update: Literal["in_flight", "between_samples"] = "in_flight"
    """Running samples go on under new weights, and say from which token on; or each replica lets them end first, while
    it begins none."""
    kv_policy: Literal["recompute", "reuse", "drain"] = "recompute"
    """KV cache of running samples at a commit: computed again (exact), or kept as older weights made it; `drain` is
    what `update: between_samples` does."""
    timeout_s: float = Field(default=60.0, gt=0, le=86_400)
    """Longest wait for one member in one sync; then it is evicted and the others go on."""
    canary: CanaryConfig = CanaryConfig()
    """The live check."""

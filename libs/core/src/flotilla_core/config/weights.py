"""Section `weights` of `run.yaml`: how new weights reach the generators, and how that is proved."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from flotilla_core.config.model import ConfigModel


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

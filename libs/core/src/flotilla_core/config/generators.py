"""`generator` in `stack.yaml`, and what it shares with other processes that hold an engine."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from flotilla_core.config.model import ConfigModel, Environment

MOST_REPLICAS = 256
"""Limit for one kind on one host."""
DType = Literal["float32", "bfloat16"]


class LatencyConfig(ConfigModel):
    """The duration of a sample."""

    time_to_first_token_s: float = Field(default=0.0, ge=0, le=86_400)
    """Delay before the first token of a sample."""
    seconds_per_token: float = Field(default=0.0, ge=0, le=3600)
    """Delay before each further token."""


class SimConfig(LatencyConfig):
    """Latency model of the `sim` engine."""

    commit_s: float = Field(default=0.0, ge=0, le=86_400)
    """Duration of the pause for a weight commit."""
    response_tokens: int | None = Field(default=None, ge=1, le=10_000_000)
    """Length of every response; empty draws one up to `max_response_tokens`."""


class EngineConfig(ConfigModel):
    """One vLLM engine: the keys of every process that holds one."""

    replicas: int = Field(default=1, ge=0, le=MOST_REPLICAS)
    """Number of replicas that the launcher starts."""
    dtype: DType = "float32"
    """Type of the weights in the engine. A file that does not say gets bfloat16 on GPUs that compute in it."""
    quantization: Literal["fp8"] | None = None
    """`fp8` decodes with 8-bit matrices: faster on GPUs of compute capability 8.9 and newer, and less exact."""
    tensor_parallel_size: int = Field(default=1, ge=1, le=1024)
    """Workers that share one replica; with GPUs each worker takes one."""
    max_model_tokens: int | None = Field(default=None, ge=8, le=10_000_000)
    """Longest prompt plus response; empty takes the model's own limit."""
    max_running_samples: int = Field(default=1024, ge=1, le=1_000_000)
    """Samples that one replica decodes at the same time; more wait in its queue."""
    memory_fraction: float = Field(default=0.9, gt=0, le=1)
    """Share of the accelerator's memory for the engine (GPU only)."""
    kv_cache_gib: float | None = Field(default=None, gt=0, le=100_000)
    """KV cache of one worker. Empty takes 1 on CPUs, and on GPUs what `memory_fraction` leaves."""
    enforce_eager: bool | None = None
    """Skip compilation and graph capture: the engine starts in seconds, but decodes slower on GPUs. Empty skips them on
    CPUs alone; where they fail on a GPU the engine starts without them and says so."""
    engine_options: dict[str, Any] = Field(default_factory=dict, max_length=256)
    """Arguments of vLLM's engine by its own names, such as `block_size: 32`. They win over what Flotilla would choose;
    what has a key of its own here, or must be as it is, is refused by name when the process starts."""
    environment: Environment = Field(default={})
    """Variables of each replica, in addition to those of the launcher: text, or the place of a secret."""


class GeneratorConfig(EngineConfig):
    """One generator replica."""

    replicas: int = Field(default=1, ge=0, le=MOST_REPLICAS)
    """Number of replicas that the launcher starts. Where a file names neither this nor `trainer.nproc`, they take all
    GPUs of the host."""
    quantization: Literal["fp8"] | None = None
    """`fp8` decodes with 8-bit matrices, made of each published version at its commit: faster on GPUs of compute
    capability 8.9 and newer, and further from the trainer. Runs on it need some `algorithm.correction`."""
    tensor_parallel_size: int = Field(default=1, ge=1, le=1024)
    """Workers that share one replica; with GPUs each worker takes one, after those of the trainer."""
    memory_fraction: float = Field(default=0.9, gt=0, le=1)
    """Share of the accelerator's memory for the engine (GPU only). A file that does not say gets less where the second
    copy of the weights, which syncs fill, needs the room."""
    kv_cache_gib: float | None = Field(default=None, gt=0, le=100_000)
    """KV cache of one worker. Empty takes 1 on CPUs, and on GPUs what `memory_fraction` leaves, or with
    `placement: colocated` what the trainer leaves."""
    engine: Literal["vllm", "sim"] = "vllm"
    """`vllm` runs the model; `sim` is for load and fault tests."""
    apply_weights: Literal["prefetch", "direct"] = "prefetch"
    """`prefetch` receives a version in a second copy of the weights while samples decode, and commits it in a short
    pause. `direct` receives it in the live weights and pauses for the whole transfer: no second copy, but after a
    transfer that broke off the replica decodes nothing until the next one."""
    sleep_while_training: bool = False
    """Leave the GPU memory of the KV cache to the trainer rank on the same GPU during each update, in which samples
    stand still. Needs `placement: colocated` and one trainer; it costs each step the time to give and to take it. Where
    the file does not say it, `flotilla up` decides by the size of the KV cache."""
    sim: SimConfig = Field(default_factory=SimConfig)
    """Settings of the `sim` engine alone."""
    slowed_by: LatencyConfig | None = None
    """Delays the samples of a real engine until they have taken this long: a slow generator for benches and tests."""
    boot_version: str = Field(default="", pattern=r"^([A-Za-z0-9_.-]{1,128}/[0-9]{1,9}\.[0-9]{1,18})?$")
    """`RUN/VERSION`, such as `count-20260314-0915-7f3a/0.120`: the model is this version of this run, so replicas serve
    it without a sync. `flotilla eval` sets it. Empty: the model is no version, and runs send theirs."""
    attach: tuple[str, ...] = Field(default=(), max_length=256)
    """Addresses of replicas that were started outside this stack."""

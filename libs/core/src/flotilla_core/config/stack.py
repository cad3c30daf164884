"""`stack.yaml`: the fleet, one description for every launcher.

Owns the settings that are fixed while a process lives: its model, its number of ranks, its address.
A run's own settings are in `run.py`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from flotilla_core.config.model import ConfigModel, expanded
from flotilla_core.config.training import TeacherName
from flotilla_core.roles import MOST_TEACHERS

MOST_REPLICAS = 256
"""Limit for one kind on one host."""
DType = Literal["float32", "bfloat16"]


class AutoscaleConfig(ConfigModel):
    """`autoscale` in `stack.yaml`: how many generators a run needs.

    Adjusts the number of generators by the idle time of trainer and generators.
    """

    mode: Literal["advise", "act"] = "advise"
    """`advise` reports what would help; with `act` the launcher does it."""
    min_generators: int = Field(default=1, ge=1, le=256)
    """Lower limit of the number of generators."""
    max_generators: int = Field(default=8, ge=1, le=256)
    """Upper limit of the number of generators: as many as the machine, or its GPUs, can take."""
    window_steps: int = Field(default=5, ge=1, le=10_000)
    """The decision uses the mean over this many steps, all of them with the same number of generators."""
    cooldown_steps: int = Field(default=10, ge=0, le=100_000)
    """Steps after a change before the next decision."""
    trainer_waits_above: float = Field(default=0.4, gt=0, lt=1)
    """Share of a step that the trainer waits for rollouts; above it one more generator is wanted."""
    generators_idle_above: float = Field(default=0.5, gt=0, lt=1)
    """Share of a step in which a generator has no sample; above it, if the trainer waits for less than half of
    `trainer_waits_above`, one generator fewer is wanted."""

    @model_validator(mode="after")
    def _has_room(self) -> AutoscaleConfig:
        if self.min_generators > self.max_generators:
            raise ValueError(
                f"min_generators is {self.min_generators}, but max_generators is {self.max_generators}: "
                "set max_generators to at least as many"
            )
        return self


def _folder_or_name(value: object) -> object:
    """Return a Path if the folder exists, else the name as it was written."""
    if not isinstance(value, str | Path):
        return value
    folder = expanded(Path(value))
    # A folder that this user may not enter counts as existing: the process that reads it reports the problem.
    return folder if os.path.isdir(folder) else str(value)


ModelName = Annotated[Path | str, BeforeValidator(_folder_or_name)]


class BindConfig(ConfigModel):
    """The addresses of a service."""

    host: str = "127.0.0.1"
    """Address to bind. Callers beyond this host need a copy of the stack's token."""
    port: int = Field(default=0, ge=0, le=65535)
    """0 takes a free port; the registry publishes which."""
    advertise_host: str | None = None
    """Host that peers dial, if it differs from `host`."""
    token_file: Path | None = None
    """File with the secret of the stack (mode 0600); empty takes the one that `flotilla up` creates."""


class NatsConfig(ConfigModel):
    """The registry and event bus."""

    url: str | None = None
    """URL of an existing server; empty starts a server for this stack."""
    credentials_file: Path | None = None
    """File (mode 0600) with one line for the server of `url`: user:password, or a token."""
    insecure: bool = False
    """Accept a server that does not authenticate its clients."""

    @model_validator(mode="after")
    def _is_about_a_server(self) -> NatsConfig:
        if self.url is None and (self.credentials_file is not None or self.insecure):
            raise ValueError(
                "credentials_file and insecure are about the server of url, which is not set: the stack's own server "
                "needs neither"
            )
        if self.url is not None and "@" in self.url:
            raise ValueError(
                "url carries credentials: write them to a file of mode 0600 and name it in credentials_file"
            )
        return self


class TelemetryConfig(ConfigModel):
    """The destinations of spans, in addition to the coordinator's own store."""

    enabled: bool = True
    """Record spans; without them there is no timeline."""
    otlp_endpoint: str | None = None
    """Address of a further OTLP/gRPC collector (Jaeger, Tempo), host:port."""


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


class GeneratorConfig(ConfigModel):
    """One generator replica."""

    replicas: int = Field(default=1, ge=0, le=MOST_REPLICAS)
    """Number of replicas that the launcher starts. Where a file names neither this nor `trainer.nproc`, they take all
    GPUs of the host."""
    engine: Literal["vllm", "sim"] = "vllm"
    """`vllm` runs the model; `sim` is for load and fault tests."""
    dtype: DType = "float32"
    """Type of the weights in the engine. A file that does not say gets bfloat16 on GPUs that compute in it."""
    quantization: Literal["fp8"] | None = None
    """`fp8` decodes with 8-bit matrices, made of each published version at its commit: faster on GPUs of compute
    capability 8.9 and newer, and further from the trainer. Runs on it need `algorithm.correction.importance`."""
    tensor_parallel_size: int = Field(default=1, ge=1, le=1024)
    """Workers that share one replica; with GPUs each worker takes one, after those of the trainer."""
    max_model_tokens: int | None = Field(default=None, ge=8, le=10_000_000)
    """Longest prompt plus response; empty takes the model's own limit."""
    max_running_samples: int = Field(default=1024, ge=1, le=1_000_000)
    """Samples that one replica decodes at the same time; more wait in its queue."""
    memory_fraction: float = Field(default=0.9, gt=0, le=1)
    """Share of the accelerator's memory for the engine (GPU only). A file that does not say gets less where the second
    copy of the weights, which syncs fill, needs the room."""
    kv_cache_gib: float | None = Field(default=None, gt=0, le=100_000)
    """KV cache of one worker. Empty takes 1 on CPUs, and on GPUs what `memory_fraction` leaves, or with
    `placement: colocated` what the trainer leaves."""
    enforce_eager: bool | None = None
    """Skip compilation and graph capture: the engine starts in seconds, but decodes slower on GPUs. Empty skips them on
    CPUs alone; where they fail on a GPU the engine starts without them and says so."""
    engine_options: dict[str, Any] = Field(default_factory=dict, max_length=256)
    """Arguments of vLLM's engine by its own names, such as `block_size: 32`. They win over what Flotilla would choose;
    what has a key of its own here, or must be as it is, is refused by name when the generator starts."""
    sim: SimConfig = SimConfig()
    """Only for the `sim` engine."""
    slowed_by: LatencyConfig | None = None
    """Delays the samples of a real engine until they have taken this long: a slow generator for benches and tests."""
    boot_version: str = Field(default="", pattern=r"^([A-Za-z0-9_.-]{1,128}/[0-9]{1,9}\.[0-9]{1,18})?$")
    """`RUN/VERSION`, such as `count-20260314-0915-7f3a/0.120`: the model is this version of this run, so replicas serve
    it without a sync. `flotilla eval` sets it. Empty: the model is no version, and runs send theirs."""
    attach: tuple[str, ...] = Field(default=(), max_length=256)
    """Addresses of replicas that were started outside this stack."""


class TrainerConfig(ConfigModel):
    """The policy trainer: a front process and its ranks."""

    replicas: int = Field(default=1, ge=0, le=MOST_REPLICAS)
    """Whole trainers that the launcher starts; each serves one run at a time. 0: a trainer that is started by hand
    registers itself."""
    nproc: int = Field(default=1, ge=1, le=1024)
    """FSDP2 ranks; with GPUs each rank takes one, the first of the host. Where a file names neither this nor
    `generator.replicas`, they take all GPUs of the host."""
    replicate: int = Field(default=1, ge=1, le=1024)
    """Copies of the weights (HSDP): each is sharded over `nproc` / `replicate` ranks, gradients are summed over all."""
    sequence_parallel: int = Field(default=1, ge=1, le=1024)
    """Neighbouring ranks that share each micro-batch, each with its part of the tokens (Ulysses)."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Compile the repeated layers; `auto` does so with GPUs. Without a compiler the layers run uncompiled."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """Collectives of the ranks; `auto` takes nccl with GPUs."""
    dtype: DType = "float32"
    """Type of forward and backward passes; master weights and reductions stay float32. A file that does not say gets
    bfloat16 on GPUs that compute in it."""
    rank_timeout_s: float = Field(default=60.0, gt=0, le=86_400)
    """A rank that is silent, or computes no layer and no chunk of tokens, for this long within one command is reported,
    dumped and replaced with its gang."""
    attach: str | None = None
    """Address of a trainer that was started outside this stack."""

    @model_validator(mode="after")
    def _mesh_fits(self) -> TrainerConfig:
        """Check that the ranks fill their mesh; the data need not be divisible."""
        for key in ("replicate", "sequence_parallel"):
            width = getattr(self, key)
            if self.nproc % width:
                raise ValueError(
                    f"{key} is {width}, but nproc is {self.nproc} = {self.nproc // width} x {width} "
                    f"+ {self.nproc % width}: {key} must divide nproc"
                )
        return self

    @property
    def lanes(self) -> int:
        """The number of rank groups that work on micro-batches of their own."""
        return self.nproc // self.sequence_parallel


class GangConfig(TrainerConfig):
    """A gang in addition to the policy's, run by the same program."""

    replicas: int = Field(default=0, ge=0, le=MOST_REPLICAS)
    """Whole gangs that the launcher starts, one for each run that needs one at once. Other runs ignore them."""
    nproc: int = Field(default=1, ge=1, le=1024)
    """FSDP2 ranks; with GPUs each rank takes one, after those of the sections above."""
    model: ModelName | None = None
    """Hugging Face folder (or hub name) with the stack's tokenizer; empty takes the stack's model."""


class RewardServiceConfig(ConfigModel):
    """One reward replica."""

    replicas: int = Field(default=1, ge=0, le=MOST_REPLICAS)
    """Number of replicas that the launcher starts."""
    workers: int = Field(default=2, ge=1, le=1024)
    """Killable worker processes for checkers and user functions."""
    attach: tuple[str, ...] = Field(default=(), max_length=256)
    """Addresses of replicas that were started outside this stack."""


class RetentionConfig(ConfigModel):
    """Limits of the records on disk; the oldest ended runs are removed first."""

    ledger_mib: int = Field(default=8192, ge=1, le=1 << 30)
    """Above it the ledger deletes the tokens of ended runs, then the history of their samples."""
    spans_mib: int = Field(default=2048, ge=1, le=1 << 30)
    """Above it the span store deletes whole runs; of the last run it deletes the oldest spans."""
    runs_kept: int | None = Field(default=None, ge=1, le=10_000_000)
    """Ended runs that are kept; older ones are removed with directory, checkpoints and model. Empty keeps all."""


class CoordinatorConfig(ConfigModel):
    """The coordinator of the stack."""

    attach: str | None = None
    """Address of a coordinator that was started outside this stack."""
    span_retention_runs: int = Field(default=50, ge=1, le=10_000_000)
    """Runs whose spans are kept."""
    retention: RetentionConfig = RetentionConfig()
    """Limits of the records on disk."""


class StackConfig(ConfigModel):
    """A whole fleet."""

    name: str = Field(default="local", pattern=r"^[a-z0-9][a-z0-9-]{0,30}$")
    """Name of the stack; two stacks with different names can run on one host."""
    model: ModelName = Path("examples/arithmetic/model")
    """Hugging Face folder (or hub name) that trainer and generators load."""
    state_dir: Path = Path(".flotilla")
    """Everything that the stack writes goes to `<state_dir>/<name>/`."""
    bind: BindConfig = BindConfig()
    """Addresses and secret of every service of the stack."""
    nats: NatsConfig = NatsConfig()
    """Registry and event bus."""
    telemetry: TelemetryConfig = TelemetryConfig()
    """Recording of spans."""
    generator: GeneratorConfig = GeneratorConfig()
    """Generator replicas."""
    trainer: TrainerConfig = TrainerConfig()
    """The policy trainer."""
    placement: Literal["auto", "separate", "colocated"] = "auto"
    """GPUs of trainer and generators: separate ones, or each generator shares the GPU of the trainer rank with its
    number. `auto` shares the only GPU, and where the file names neither `trainer.nproc` nor `generator.replicas`, every
    GPU on which both fit."""
    critic: GangConfig = GangConfig()
    """Holds the value model of runs with algorithm.critic."""
    reference: GangConfig = GangConfig()
    """Holds the first policy of runs with algorithm.kl.reference: service."""
    teacher: GangConfig = GangConfig()
    """Holds the model that runs with algorithm.advantage.type: distill or algorithm.teacher learn from."""
    teachers: dict[TeacherName, GangConfig] = Field(default={}, max_length=MOST_TEACHERS)
    """Named teachers, for runs that learn from several or choose one: a section like `teacher` for each name."""
    reward: RewardServiceConfig = RewardServiceConfig()
    """Reward replicas."""
    coordinator: CoordinatorConfig = CoordinatorConfig()
    """The coordinator."""
    autoscale: AutoscaleConfig | None = None
    """Adjusts the number of generators to what a run measures; absent: the number stays as configured."""
    ready_timeout_s: float = Field(default=180.0, gt=0, le=86_400)
    """Longest wait for one process to become ready. A file that does not say gets 480 on GPUs, where the first start
    compiles the model."""
    restart_budget: int = Field(default=5, ge=0, le=1000)
    """Restarts of one process within ten minutes before the launcher gives it up."""

    @model_validator(mode="after")
    def _can_be_colocated(self) -> StackConfig:
        generator, trainer = self.generator, self.trainer
        if self.placement != "colocated" or generator.engine != "vllm":
            return self
        ranks = (
            0 if trainer.attach is not None or trainer.backend == "gloo" else trainer.replicas * trainer.nproc
        )
        if generator.tensor_parallel_size > 1:
            raise ValueError(
                f"generator.tensor_parallel_size is {generator.tensor_parallel_size}, and with placement colocated "
                "each generator shares the GPU of one trainer rank: set it to 1 and generator.replicas to more"
            )
        if generator.replicas > ranks:
            raise ValueError(
                f"generator.replicas is {generator.replicas}, and with placement colocated each shares the GPU of a "
                f"trainer rank, of which this stack has {ranks}: lower it, or raise trainer.nproc"
            )
        return self

    def longest_command_s(self, gang: TrainerConfig) -> float:
        """The longest silence of ranks that read or write whole models; callers that wait for a session wait longer."""
        return max(self.ready_timeout_s, gang.rank_timeout_s)

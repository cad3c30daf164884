"""`stack.yaml`: the fleet, one description for every launcher.

Owns the settings that are fixed while a process lives: its model, its number of ranks, its address.
A run's own settings are in `run.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from flotilla_core.addresses import is_loopback, loopback
from flotilla_core.config.generators import (
    MOST_JUDGES,
    MOST_REPLICAS,
    DType,
    GeneratorConfig,
    Judge,
    JudgeName,
)
from flotilla_core.config.model import (
    ConfigModel,
    Environment,
    GangName,
    HostName,
    IsolationConfig,
    ModelName,
)
from flotilla_core.roles import MOST_NAMED


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


def _port_range(text: str) -> str:
    first, sign, last = text.partition("-")
    if not (sign and first.isdecimal() and last.isdecimal() and 0 < int(first) <= int(last) <= 65_535):
        raise ValueError(f"{text[:40]!r} is no range of ports: write FIRST-LAST, such as 9000-9099")
    return text


class BindConfig(ConfigModel):
    """The addresses of a service."""

    host: HostName = Field(default_factory=loopback)
    """Address to bind, ::1 by default without IPv4. Callers beyond this host need a credential of the stack."""
    port: int = Field(default=0, ge=0, le=65535)
    """0 takes a free port; the registry publishes which."""
    ports: Annotated[str, AfterValidator(_port_range)] | None = None
    """Range such as "9000-9099": services, NATS and weight groups take free ports of it, where `port` is 0."""
    interface: str | None = None
    """Network interface of this host that leads to the other hosts, for NCCL, gloo and the advertised address."""
    advertise_host: HostName | None = None
    """Host that peers dial, if it differs from `host`."""
    credential_file: Path | None = None
    """Credential of the stack: a PEM file (mode 0600), or a folder with tls.crt, tls.key and ca.crt; empty takes the
    one that `flotilla up` makes."""

    @model_validator(mode="before")
    @classmethod
    def _has_no_older_key(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        for key, (unset, instead) in _OLDER_KEYS.items():
            # An older release wrote all keys into the stack's directory.
            if given.get(key, unset) != unset:
                raise ValueError(f"{key} is a key of an older Flotilla: {instead}")
        return {key: value for key, value in given.items() if key not in _OLDER_KEYS}


_OLDER_KEYS = {
    "token_file": (
        None,
        "leave it out where `flotilla up` makes the credential of the stack; else copy that to this host, and name it "
        "in credential_file",
    ),
    "token_overlap_s": (
        600.0,
        "leave it out, and give the overlap to the command: flotilla token rotate --overlap 10m",
    ),
    "tls": (
        None,
        "leave it out where `flotilla up` makes the credential of the stack; certificates of your own authority go "
        "into a folder (tls.crt, tls.key, ca.crt) that credential_file names",
    ),
    "plaintext": (False, "leave it out, because all calls are encrypted"),
}
"""What each key was where nobody set it, and what to do instead of setting it."""


class NatsConfig(ConfigModel):
    """The registry and event bus."""

    url: str | None = None
    """URL of an existing server; empty starts a server for this stack."""
    credentials_file: Path | None = None
    """File (mode 0600) with one line for the server of `url`: user:password, or a token."""
    ca_file: Path | None = None
    """Certificates (PEM) of the authorities of a server at tls://...; empty takes one that has a credential of this
    stack, and encrypts before anything else (`handshake_first`)."""
    insecure: bool = False
    """Accept a server that does not authenticate its clients."""
    replicas: Literal[1, 3, 5] = 1
    """Servers that keep each message. 3 and 5 need a cluster of at least as many behind `url`; then the registry and
    the events survive the loss of one or two of them."""

    @model_validator(mode="after")
    def _is_about_a_server(self) -> NatsConfig:
        if self.url is None and (self.credentials_file or self.ca_file or self.insecure):
            raise ValueError(
                "credentials_file, ca_file and insecure are about the server of url, which is not set: the stack's own "
                "server needs none of them"
            )
        if self.ca_file and not str(self.url).startswith("tls://"):
            raise ValueError("ca_file is about a server that encrypts: begin url with tls://")
        if self.url is None and self.replicas > 1:
            raise ValueError(
                f"replicas is {self.replicas}, but the stack's own server is alone: set url to a cluster of servers"
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
    """Address of a further OTLP/gRPC collector (Jaeger, Tempo): host:port, or https://host:port for one that has a
    credential of the stack."""


class HostRanks(ConfigModel):
    """The ranks of a gang on one host."""

    name: str = Field(pattern=r"^[a-z][a-z0-9-]{0,30}$")
    """Name of the host in this stack; it need not be its name in the network. Slurm and Ray choose the machine."""
    ranks: int = Field(ge=1, le=1024)
    """Ranks there, numbered after those of the hosts before it."""


class TrainerConfig(ConfigModel):
    """The policy trainer: a front process and its ranks."""

    replicas: int = Field(default=1, ge=0, le=MOST_REPLICAS)
    """Whole trainers that the launcher starts; each serves one run at a time. 0: a trainer that is started by hand
    registers itself."""
    nproc: int = Field(default=1, ge=1, le=1024)
    """FSDP2 ranks; with GPUs each rank takes one, the first of the host. Where a file names neither this nor
    `generator.replicas`, they take all GPUs of the host."""
    hosts: tuple[HostRanks, ...] = Field(default=(), max_length=MOST_REPLICAS)
    """Hosts of the ranks, such as `[{name: a, ranks: 8}, {name: b, ranks: 8}]`: the front's first, then others, each
    with an agent, `trainer-at-b`. Slurm and Ray start agents; elsewhere somebody starts `flotilla-ranks --name
    trainer-at-b`. Together they have `nproc` ranks. Empty: all ranks are on the host of the front."""
    replicate: int = Field(default=1, ge=1, le=1024)
    """Copies of the weights (HSDP): each is sharded over `nproc` / `replicate` ranks, gradients are summed over all."""
    sequence_parallel: int = Field(default=1, ge=1, le=1024)
    """Neighbouring ranks that share each micro-batch, each with its part of the tokens (Ulysses)."""
    cpu_offload: bool = False
    """Keep weights, gradients and AdamW's moments in host memory, for what does not fit on GPUs: 16 bytes a parameter,
    half of them pinned. Layers visit the GPU in turns, AdamW runs on the host, and updates take longer."""
    memory_fraction: float | None = Field(default=None, gt=0, le=1)
    """Share of each GPU that tensors of a rank may take. Empty takes what other processes leave free; on a GPU with a
    generator `flotilla up` fills in what the generator leaves."""
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
    environment: Environment = Field(default={})
    """Variables of the front and its ranks, in addition to those of the launcher: text, or the place of a secret."""
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

    @model_validator(mode="after")
    def _hosts_have_all_ranks(self) -> TrainerConfig:
        names, ranks = [host.name for host in self.hosts], sum(host.ranks for host in self.hosts)
        if len({*names}) < len(names):
            raise ValueError(f"hosts names one twice: {', '.join(names)}")
        if self.hosts and ranks != self.nproc:
            raise ValueError(
                f"hosts have {ranks} ranks together, but nproc is {self.nproc}: they must be the same"
            )
        return self

    @property
    def ranks_here(self) -> int:
        """The number of ranks on the host of the front."""
        return self.hosts[0].ranks if self.hosts else self.nproc

    @property
    def lanes(self) -> int:
        """The number of rank groups that work on micro-batches of their own."""
        return self.nproc // self.sequence_parallel


class GangConfig(TrainerConfig):
    """A gang in addition to the policy's, run by the same program."""

    replicas: int = Field(default=0, ge=0, le=MOST_REPLICAS)
    """Whole gangs that the launcher starts, one for each run that needs one at once. Other runs ignore them."""
    nproc: int = Field(default=1, ge=1, le=1024)
    """FSDP2 ranks; with GPUs each rank takes one. A file that does not say gets as many as the trainer where they share
    its GPUs."""
    placement: Literal["auto", "separate", "colocated"] = "auto"
    """GPUs of the ranks: their own, after those of the sections above, or `colocated` those of the trainer's ranks with
    their numbers, where policy and critic learn in turns. `auto` shares them where all have room, or where the host has
    no others."""
    model: ModelName | None = None
    """Hugging Face folder (or hub name) with the stack's tokenizer; empty takes the stack's model."""

    @property
    def shares_gpus(self) -> bool:
        """True where its ranks have the GPUs of the trainer's ranks."""
        return self.placement == "colocated" and self.replicas > 0 and self.backend != "gloo"


class RewardModelGangConfig(GangConfig):
    """A gang with a reward model, which scores the samples of a run."""

    replicas: int = Field(default=1, ge=0, le=MOST_REPLICAS)
    """Whole gangs that the launcher starts, one for each run that asks it at once."""
    model: ModelName
    """Hugging Face folder (or hub name) of a model with a head of scores, and its own tokenizer and chat template."""


class RewardServiceConfig(ConfigModel):
    """One reward replica."""

    replicas: int = Field(default=1, ge=0, le=MOST_REPLICAS)
    """Number of replicas that the launcher starts."""
    workers: int = Field(default=2, ge=1, le=1024)
    """Killable worker processes for checkers and user functions that run at the same time."""
    environment: Environment = Field(default={})
    """Variables of each replica, in addition to those of the launcher: text, or the place of a secret."""
    isolation: IsolationConfig = Field(default_factory=IsolationConfig)
    """The jail of functions of users."""
    attach: tuple[str, ...] = Field(default=(), max_length=256)
    """Addresses of replicas that were started outside this stack."""


class GatewayConfig(ConfigModel):
    """The place at which agents find the policy, as clients of OpenAI or Anthropic do."""

    host: HostName = Field(default_factory=loopback)
    """Address to bind. Agents on other hosts reach it over TLS alone."""
    port: int = Field(default=0, ge=0, le=65535)
    """0 takes a free port, of which the agents that a replica starts are told; others need one that they know."""
    certificate: Path | None = None
    """PEM file with a certificate for the name that agents on other hosts dial, and its private key."""
    sessions: int = Field(default=64, ge=1, le=65536)
    """Most episodes with agents of one replica at the same time; further ones wait."""

    @model_validator(mode="after")
    def _is_reached_over_tls(self) -> GatewayConfig:
        if self.certificate is None and not is_loopback(self.host):
            raise ValueError(
                f"the gateway is not reached from other hosts, as at {self.host}, without TLS: "
                "set certificate, a PEM file with certificate and private key"
            )
        return self


class EnvironmentServiceConfig(RewardServiceConfig):
    """One environment replica, with workers and a jail as those of rewards."""

    replicas: int = Field(default=0, ge=0, le=MOST_REPLICAS)
    """Number of replicas that the launcher starts: 1 or more for runs with episodes of several turns."""
    workers: int = Field(default=2, ge=1, le=1024)
    """Killable worker processes for the episodes of each run. One holds many episodes and works for one at a time."""
    gateway: GatewayConfig = Field(default_factory=GatewayConfig)
    """The place at which agents find the policy."""

    @model_validator(mode="after")
    def _keeps_its_processes(self) -> EnvironmentServiceConfig:
        if self.isolation.preload is not None:
            raise ValueError(
                "isolation.preload is about rewards: leave it out, since environments keep their process between turns"
            )
        return self


class RetentionConfig(ConfigModel):
    """Limits of the records on disk; the oldest ended runs are removed first."""

    ledger_mib: int = Field(default=8192, ge=1, le=1 << 30)
    """Size above which the ledger deletes the tokens of ended runs, then the history of their samples."""
    spans_mib: int = Field(default=2048, ge=1, le=1 << 30)
    """Size above which the span store deletes whole runs; of the last run it deletes the oldest spans."""
    runs_kept: int | None = Field(default=None, ge=1, le=10_000_000)
    """Ended runs that are kept; older ones are removed with directory, checkpoints and model. Empty keeps all."""


class CoordinatorConfig(ConfigModel):
    """The coordinator of the stack."""

    environment: Environment = Field(default={})
    """Variables of the coordinator, in addition to those of the launcher: text, or the place of a secret."""
    attach: str | None = None
    """Address of a coordinator that was started outside this stack."""
    keep_runs: bool = False
    """Leave the runs to the next coordinator when this one is asked to end; that one continues them in the step that
    was under way. False records them as stopped. For hosts that move the coordinator, as Kubernetes does."""
    span_retention_runs: int = Field(default=50, ge=1, le=10_000_000)
    """Runs whose spans are kept."""
    retention: RetentionConfig = Field(default_factory=RetentionConfig)
    """Limits of the records on disk."""


HEAD = "head"
"""The node of the coordinator, of NATS and of the rewards, where an engine places a stack."""
_WORD = r"^[A-Za-z0-9_][A-Za-z0-9_.,:@-]{0,127}$"
NodeName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,30}$")]
SlurmOption = Annotated[str, Field(pattern=r"^--[a-z][a-z-]*(=[^\s#]+)?$")]


class SlurmNodeConfig(ConfigModel):
    """The share of a node that the services of one kind take."""

    cpus: int = Field(default=1, ge=1, le=4096)
    """CPUs of one gang on each of its hosts, of one generator, or of the head."""
    memory_mib: int | None = Field(default=None, ge=16, le=1 << 30)
    """Memory; empty takes what the partition gives."""
    options: tuple[SlurmOption, ...] = Field(default=(), max_length=64)
    """Options of sbatch for these nodes, such as `--constraint=nvlink`."""


class SlurmConfig(ConfigModel):
    """`slurm` in `stack.yaml`: what `flotilla up --on slurm` asks of the cluster."""

    partition: str | None = Field(default=None, pattern=_WORD)
    """Partition of all nodes; empty takes the default of the cluster."""
    account: str | None = Field(default=None, pattern=_WORD)
    """Account that is charged."""
    time_limit_minutes: int | None = Field(default=None, ge=1, le=1_000_000)
    """Limit of the job; empty takes the limit of the partition."""
    gpu: str | None = Field(default=None, pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.:-]{0,63}$")
    """GRES name of the GPUs, such as `gpu` or `gpu:h100`: each trainer gets `nproc` of them, each generator
    `tensor_parallel_size`. Empty: the nodes compute on CPUs."""
    options: tuple[SlurmOption, ...] = Field(default=(), max_length=64)
    """Options of sbatch for all nodes, such as `--qos=high`."""
    nodes: dict[str, NodeName] = Field(default={}, max_length=MOST_REPLICAS)
    """Node of a service, by both names, such as `trainer-0: head`. By default each gang and each generator has one of
    its own; coordinator, NATS and rewards share `head`."""
    head: SlurmNodeConfig = Field(default_factory=SlurmNodeConfig)
    """The node of coordinator, NATS and rewards."""
    trainer: SlurmNodeConfig = Field(default_factory=SlurmNodeConfig)
    """Nodes of trainers and other gangs, and of their further hosts."""
    generator: SlurmNodeConfig = Field(default_factory=SlurmNodeConfig)
    """Nodes of generators."""


class RayNodeConfig(ConfigModel):
    """The resources of Ray that a service of one kind takes."""

    cpus: int = Field(default=1, ge=1, le=4096)
    """CPUs of one gang on each of its hosts, of one generator, of one reward, of one environment, or of the head."""
    memory_mib: int | None = Field(default=None, ge=16, le=1 << 30)
    """Memory; empty takes none of what Ray counts."""
    resources: dict[Annotated[str, Field(pattern=_WORD)], Annotated[float, Field(gt=0, le=1e6)]] = Field(
        default={}, max_length=16
    )
    """Further resources by Ray's names, such as `accelerator_type:H100: 0.001`: only nodes that have them are taken."""


class RayConfig(ConfigModel):
    """`ray` in `stack.yaml`: what `flotilla up --on ray` asks of the cluster."""

    address: str = Field(default="auto", pattern=r"^(auto|(ray://)?[A-Za-z0-9_.:\[\]-]{1,255}:[0-9]{1,5})$")
    """Address of the cluster, as `ray.init` takes it; `auto` is the cluster that this machine is a node of."""
    gpus: bool = False
    """Each trainer takes `nproc` GPUs, and each generator `tensor_parallel_size`; false: they compute on CPUs."""
    head: RayNodeConfig = Field(default_factory=RayNodeConfig)
    """Coordinator and NATS, which are on one node."""
    trainer: RayNodeConfig = Field(default_factory=RayNodeConfig)
    """Each trainer or other gang, on each of its hosts."""
    generator: RayNodeConfig = Field(default_factory=RayNodeConfig)
    """Each generator."""
    reward: RayNodeConfig = Field(default_factory=RayNodeConfig)
    """Each reward replica."""
    environment: RayNodeConfig = Field(default_factory=RayNodeConfig)
    """Each environment replica."""


class KubernetesConfig(ConfigModel):
    """`kubernetes` in `stack.yaml`, which is experimental: where `flotilla up --on kubernetes` installs the chart."""

    context: str | None = Field(default=None, pattern=r"^[A-Za-z0-9_]\S{0,252}$")
    """Context of kubectl; empty takes the current one of the first `up`, and stays with it."""
    namespace: str = Field(default="default", pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")
    """Namespace of the stack, which must exist."""
    values: tuple[Path, ...] = Field(default=(), max_length=16)
    """Files with values of the chart, such as images, volumes and resources; later ones win, and none has `stack`."""


class LauncherConfig(ConfigModel):
    """The launcher of the stack, as other machines reach it."""

    port: int = Field(default=0, ge=0, le=65535)
    """Port at which the launcher of `flotilla up` listens on `bind.host`, with the credential of `bind`; 0
    listens on a socket file of its host alone."""
    attach: str | None = None
    """Address, as host:port, of a launcher on another machine, which `flotilla ps`, `scale` and `down` then ask."""


class ComposeConfig(ConfigModel):
    """`compose` in `stack.yaml`: the containers of `flotilla up --on compose`."""

    tag: str | None = Field(default=None, pattern=_WORD)
    """Tag of the images; empty takes the version of this installation, as `make images` does."""
    data: tuple[Path, ...] = Field(default=(), max_length=256)
    """Folders of data, and of code of yours, that runs name. The container of the coordinator reads them at the same
    path."""


class StackConfig(ConfigModel):
    """A whole fleet."""

    name: str = Field(default="local", pattern=r"^[a-z0-9][a-z0-9-]{0,30}$")
    """Name of the stack; two stacks with different names can run on one host."""
    model: ModelName = Path("examples/arithmetic/model")
    """Hugging Face folder, [hub:]owner/name or s3://bucket/prefix that trainer and generators load."""
    state_dir: Path = Path(".flotilla")
    """Everything that the stack writes goes to `<state_dir>/<name>/`."""
    bind: BindConfig = Field(default_factory=BindConfig)
    """Addresses and secret of every service of the stack."""
    nats: NatsConfig = Field(default_factory=NatsConfig)
    """Registry and event bus."""
    telemetry: TelemetryConfig = Field(default_factory=TelemetryConfig)
    """Recording of spans."""
    generator: GeneratorConfig = Field(default_factory=GeneratorConfig)
    """Generator replicas."""
    trainer: TrainerConfig = Field(default_factory=TrainerConfig)
    """The policy trainer."""
    placement: Literal["auto", "separate", "colocated"] = "auto"
    """GPUs of trainer and generators: separate ones, or each generator shares the GPU of the trainer rank with its
    number. `auto` shares the only GPU, and where the file names neither `trainer.nproc` nor `generator.replicas`, every
    GPU on which both fit."""
    critic: GangConfig = Field(default_factory=GangConfig)
    """Holds the value model of runs with algorithm.critic."""
    reference: GangConfig = Field(default_factory=GangConfig)
    """Holds the first policy of runs with algorithm.kl.reference: service."""
    teacher: GangConfig = Field(default_factory=GangConfig)
    """Holds the model that runs with algorithm.advantage.type: distill or algorithm.teacher learn from."""
    teachers: dict[GangName, GangConfig] = Field(default={}, max_length=MOST_NAMED)
    """Named teachers, for runs that learn from several or choose one: a section like `teacher` for each name."""
    reward_models: dict[GangName, RewardModelGangConfig] = Field(default={}, max_length=MOST_NAMED)
    """Models that give rewards, by the names that `rewards` of runs have."""
    reward: RewardServiceConfig = Field(default_factory=RewardServiceConfig)
    """Reward replicas."""
    judges: dict[JudgeName, Judge] = Field(default={}, max_length=MOST_JUDGES)
    """Language models that score samples, by the names that runs give them: behind endpoints, or held by the fleet."""
    environment: EnvironmentServiceConfig = Field(default_factory=EnvironmentServiceConfig)
    """Environment replicas, which play episodes of several turns."""
    coordinator: CoordinatorConfig = Field(default_factory=CoordinatorConfig)
    """The coordinator."""
    launcher: LauncherConfig = Field(default_factory=LauncherConfig)
    """The launcher, as other machines reach it."""
    compose: ComposeConfig = Field(default_factory=ComposeConfig)
    """The stack in containers of this host."""
    slurm: SlurmConfig = Field(default_factory=SlurmConfig)
    """Resources that the stack takes on a Slurm cluster."""
    ray: RayConfig = Field(default_factory=RayConfig)
    """Resources that the stack takes on a Ray cluster."""
    kubernetes: KubernetesConfig = Field(default_factory=KubernetesConfig)
    """Place of the stack on a Kubernetes cluster; experimental."""
    autoscale: AutoscaleConfig | None = None
    """Adjusts the number of generators to what a run measures; absent: the number stays as configured."""
    file_cache_gib: float = Field(default=256.0, gt=0, le=1_000_000)
    """Copies of models, checkpoints and code that services fetched from other hosts take at most so much of
    `<state_dir>/<name>/files`; what was used longest ago is removed first, and nothing in use."""
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
            0
            if trainer.attach is not None or trainer.backend == "gloo"
            else trainer.replicas * trainer.ranks_here
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

    @model_validator(mode="after")
    def _can_sleep_while_training(self) -> StackConfig:
        if not self.generator.sleep_while_training:
            return self
        key = "generator.sleep_while_training"
        if self.placement != "colocated":
            raise ValueError(
                f"{key} is true, but placement is {self.placement}: set placement to colocated, or leave the key out; "
                "generators with GPUs of their own have nobody to leave memory to"
            )
        if self.trainer.replicas > 1 or self.generator.attach:
            raise ValueError(
                f"{key} is true, so every generator sleeps while the one trainer works: set trainer.replicas to 1, and "
                "leave generator.attach out"
            )
        return self

    @model_validator(mode="after")
    def _gangs_can_share_gpus(self) -> StackConfig:
        trainer = self.trainer
        gangs = {"critic": self.critic, "reference": self.reference, "teacher": self.teacher}
        gangs.update((f"teachers.{name}", gang) for name, gang in self.teachers.items())
        gangs.update((f"reward_models.{name}", gang) for name, gang in self.reward_models.items())
        for section, gang in gangs.items():
            if not gang.shares_gpus:
                continue
            elsewhere = trainer.attach is not None or bool(trainer.hosts) or trainer.backend == "gloo"
            elsewhere = elsewhere or bool(gang.hosts) or gang.attach is not None
            if trainer.replicas != 1 or gang.replicas > 1 or elsewhere:
                raise ValueError(
                    f"{section}.placement is colocated, so its ranks share the GPUs of one trainer that is started "
                    f"here: set trainer.replicas and {section}.replicas to 1, leave attach and hosts out, and "
                    "trainer.backend to auto"
                )
            if gang.nproc > trainer.nproc:
                raise ValueError(
                    f"{section}.nproc is {gang.nproc}, and with {section}.placement colocated each rank shares the GPU "
                    f"of a trainer rank, of which this stack has {trainer.nproc}: lower it, or raise trainer.nproc"
                )
        return self

    def longest_command_s(self, gang: TrainerConfig) -> float:
        """The longest silence of ranks that read or write whole models; callers that wait for a session wait longer."""
        return max(self.ready_timeout_s, gang.rank_timeout_s)

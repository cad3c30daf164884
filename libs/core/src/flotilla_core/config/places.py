"""The places where `flotilla up` starts a stack, and the launcher as others reach it: sections of `stack.yaml`.

Invariants: each section is about one kind of place, and the stack is the same wherever it runs. What a place gives to a
service is named by the kind of the service.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from flotilla_core.config.model import MOST_REPLICAS, ConfigModel

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
    """CPUs of one gang on each of its hosts, of one generator, of one reward, or of the head."""
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

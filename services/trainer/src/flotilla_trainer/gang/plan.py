"""The plan that every gang of one trainer is started from.

Invariant: the plan is fixed while the trainer lives; a gang that replaces another one is started from the same plan.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path

from flotilla_core.addresses import ANY_ADDRESS, dialable, listening
from flotilla_core.config import StackConfig
from flotilla_core.config.stack import BindConfig, HostRanks
from flotilla_core.gangs import gang_of
from flotilla_core.roles import POLICY, role_of_process
from flotilla_core.rpc.interface import interface_address
from flotilla_trainer.wire.settings import GangSettings


@dataclass(frozen=True, kw_only=True)
class GangPlan(GangSettings):
    """The settings of a gang: the number of ranks, their model, their time limits and the place of their logs."""

    name: str
    role: str
    """One of policy, critic, reference and teacher; the teacher named math has the role teacher-math, and the reward
    model named helpful the role reward_model-helpful."""
    model: Path
    log_dir: Path
    rank_timeout_s: float
    """The longest silence of a process, and the longest time without progress within training and scoring."""
    slow_timeout_s: float
    """The longest time without progress where a rank reads or writes whole models."""
    otlp: tuple[str, ...] = ()
    credential_file: str | None = None
    """The stack's credential on this host, by which the ranks send their spans."""
    bind: BindConfig = field(default_factory=BindConfig)
    """The addresses of this host."""
    hosts: tuple[HostRanks, ...] = ()
    """The hosts of the ranks, that of the front first; none where all ranks are on it."""
    host: str = ""
    """The host that this process runs ranks on; empty on that of the front."""

    @classmethod
    def of_stack(
        cls,
        stack: StackConfig,
        name: str,
        instance_id: str,
        model: Path,
        log_dir: Path,
        otlp: tuple[str, ...] = (),
        credential_file: str | None = None,
        *,
        host: str = "",
    ) -> GangPlan:
        """Return the plan of the gang of a stack that has this name, for the front or for the agent on `host`."""
        role = role_of_process(name)
        trainer = gang_of(stack, role)
        return cls(
            name=name,
            role=role,
            instance_id=instance_id,
            nproc=trainer.nproc,
            replicate=trainer.replicate,
            sequence_parallel=trainer.sequence_parallel,
            cpu_offload=trainer.cpu_offload,
            memory_fraction=trainer.memory_fraction,
            compile=trainer.compile,
            backend=_backend(trainer.backend),
            dtype=trainer.dtype,
            model=model,
            log_dir=log_dir,
            rank_timeout_s=trainer.rank_timeout_s,
            slow_timeout_s=stack.longest_command_s(trainer),
            otlp=otlp,
            credential_file=credential_file,
            bind=stack.bind,
            hosts=trainer.hosts,
            host=host,
            returns_memory=role == POLICY and stack.generator.sleep_while_training,
        )

    @property
    def places(self) -> dict[str, range]:
        """The ranks of each host by its name, which is empty for that of the front."""
        found: dict[str, range] = {}
        first = 0
        for place in self.hosts:
            found[place.name if found else ""] = range(first, first + place.ranks)
            first += place.ranks
        return found or {"": range(self.nproc)}

    @property
    def ranks_here(self) -> range:
        """The ranks of the host that this process runs ranks on."""
        return self.places[self.host]

    def log_path(self, rank: int) -> Path:
        """Return the log file of a rank."""
        return self.log_dir / f"{self.name}.rank-{rank}.log"

    def stacks_path(self, rank: int) -> Path:
        """Return the file that a rank writes its stacks to on SIGUSR1."""
        return self.log_dir / f"{self.name}.rank-{rank}.stacks"

    def new_rendezvous(self) -> Path:
        """Return the path of a rendezvous file that no gang has used; the file has to stay while the gang lives."""
        return self.log_dir / f"{self.name}.rendezvous-{secrets.token_hex(4)}"

    def rendezvous_paths(self) -> list[Path]:
        """Return the rendezvous files that exist, also those of lost gangs."""
        return list(self.log_dir.glob(f"{self.name}.rendezvous-*"))

    def environment(self) -> dict[str, str]:
        """Return the variables of every rank: its share of the threads, and a cache for compiled code.

        On one host the ranks talk over the loopback; on several each finds its interface when they meet.
        """
        threads = max(1, len(os.sched_getaffinity(0)) // len(self.ranks_here))
        loopback = {} if len(self.places) > 1 else {"GLOO_SOCKET_IFNAME": "lo"}
        return {
            **loopback,
            **os.environ,
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
            # A thread that waits soon gives its core away. By default it spins for milliseconds, and two gangs on the
            # same cores then take up to ten times as long.
            "GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", "1000"),
            # A gang that replaces another one finds the code that the other one compiled.
            "TORCHINDUCTOR_CACHE_DIR": os.environ.get(
                "TORCHINDUCTOR_CACHE_DIR", str(self.log_dir.parent / "compiled")
            ),
            **_allocator(),
            "TORCHINDUCTOR_COMPILE_THREADS": os.environ.get("TORCHINDUCTOR_COMPILE_THREADS", str(threads)),
            # Asking the driver instead would keep processes that are forked later from using their GPU.
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
            "TRANSFORMERS_VERBOSITY": "error",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONUNBUFFERED": "1",
        }


def _allocator() -> dict[str, str]:
    """Return how torch keeps the memory of a GPU, unless the user says so.

    Gathers and reductions run on streams of their own. What the stream of the layers keeps in fixed segments and does
    not use is lost to them while one tensor lies in it: a rank ran out of memory with 35 of its 80 GiB unused.
    """
    said = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys()
    return {} if said else {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


def _backend(configured: str) -> str:
    """Return gloo or nccl; without torch, the device node of the driver shows whether there are GPUs."""
    if configured != "auto":
        return configured
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return "nccl" if Path("/dev/nvidiactl").exists() and not hidden else "gloo"


def listening_host(bind: BindConfig) -> str:
    """Return an address of this host, for ranks of other hosts and for generators.

    It also decides the interface that weights and gradients take.
    """
    if bind.host not in ANY_ADDRESS:
        return bind.host
    if bind.advertise_host and _is_local(bind.advertise_host):
        return bind.advertise_host
    if own := interface_address():
        return own
    # Not what the host's own name resolves to: on many hosts that is the loopback.
    return dialable(bind.host)


def _is_local(host: str) -> bool:
    """Return whether this host can listen at `host`: an advertised address may be that of a NAT."""
    try:
        listening(host, 0, 1).close()
    except OSError:
        return False
    return True

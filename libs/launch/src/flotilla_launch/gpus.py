"""The assignment of this host's GPUs to the processes of a stack.

Invariants: the trainers have the first GPUs, `trainer.nproc` each. The other gangs (critic, reference, teacher, named
teachers, reward models) have the next ones in this order, then the generators of judges. Generator i of the policy has
the i-th `tensor_parallel_size` after them, or where both are colocated the GPU of trainer rank i. So a process keeps
its GPUs over restarts and while other replicas come and go. A process sees its own GPUs and no others. A stack that
needs more than there are is refused before anything starts. On a host without GPUs nothing is set.
CUDA_VISIBLE_DEVICES of the launcher narrows what there is: empty hides all GPUs, a number given twice is shared.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from flotilla.common.v1.registration_pb2 import ServiceKind
from flotilla_core.config import StackConfig, TrainerConfig
from flotilla_core.errors import FailedPrecondition
from flotilla_core.gangs import gang_of, roles_of, section_of_process, slots_of_role
from flotilla_core.judge_generators import judge_of_role, judge_roles, slots_of_judge
from flotilla_core.kinds import OF_GANGS
from flotilla_core.roles import POLICY, holds_judge, role_of_process, section_of
from flotilla_launch.placement import Slot, processes_of, runs_vllm, slots_of

VISIBLE = "CUDA_VISIBLE_DEVICES"
_PROC = Path("/proc/driver/nvidia/gpus")
_TOOL_LIMIT_S = 30.0
AMPERE = 8
"""The first compute capability with bfloat16."""


@dataclass(frozen=True)
class Gpus:
    """The GPUs that a launcher may hand out, by the names that CUDA_VISIBLE_DEVICES takes."""

    names: tuple[str, ...]
    numbered_by_bus: bool = False
    """Names are numbers in the order of the PCI bus, which is not CUDA's own order."""

    @classmethod
    def of_host(cls, environment: Mapping[str, str] = os.environ) -> Gpus:
        """Return the GPUs of this host, or those that the environment leaves visible."""
        if VISIBLE in environment:
            names = (name.strip() for name in environment[VISIBLE].split(","))
            return cls(tuple(name for name in names if name not in ("", "-1")))
        return cls(tuple(map(str, range(_count()))), numbered_by_bus=True)

    def colocates(self, stack: StackConfig) -> bool:
        """Return whether each generator shares the GPU of a trainer rank; `auto` shares one that is the only one."""
        if stack.placement != "auto":
            return stack.placement == "colocated"
        one_each = sum(_first(stack).values()) == _policy_ranks(stack) == stack.generator.replicas == 1
        return len(self.names) == 1 and one_each and _generator(stack) == 1

    def require(self, stack: StackConfig, generators: int) -> None:
        """Refuse a stack with this many generator replicas that does not fit."""
        first, each = _first(stack), _generator(stack)
        if self.names and each and self.colocates(stack):
            self._require_ranks(stack, generators)
            each = 0
        needed = sum(first.values()) + generators * each
        if not self.names or needed <= len(self.names):
            return
        raise FailedPrecondition(
            f"the stack needs {needed} GPUs and this host has {len(self.names)}",
            where=f"stack {stack.name!r}",
            why=", ".join(f"{name} takes {count} ({_key_of(name)})" for name, count in first.items() if count)
            + f" and {generators} generators take {each} each (generator.tensor_parallel_size)",
            next_step="lower trainer.nproc, generator.replicas or generator.tensor_parallel_size; "
            f"or run on the CPU: {VISIBLE}= flotilla up ...",
        )

    def seats(self, stack: StackConfig) -> dict[str, list[str]]:
        """Return who has each GPU that is in use, in the order of the GPUs."""
        seats: dict[str, list[str]] = {}
        for slot in slots_of(stack):
            own = [name for name in self.environment(slot, stack).get(VISIBLE, "").split(",") if name]
            for rank, gpu in enumerate(own):
                seats.setdefault(gpu, []).append(slot.name if len(own) == 1 else f"{slot.name} rank {rank}")
        return {gpu: seats[gpu] for gpu in dict.fromkeys(self.names) if gpu in seats}

    def _require_ranks(self, stack: StackConfig, generators: int) -> None:
        ranks = _policy_ranks(stack)
        if generators > ranks:
            raise FailedPrecondition(
                f"{generators} generators cannot share the GPUs of {ranks} trainer ranks",
                where=f"stack {stack.name!r}",
                why="with placement colocated each shares the GPU of one rank",
                next_step="ask for fewer generators, raise trainer.nproc, or set placement to separate",
            )

    def environment(self, slot: Slot, stack: StackConfig) -> dict[str, str]:
        """Return the variables that give one process its GPUs."""
        if not self.names:
            return {}
        first, count = 0, 0
        before = _first(stack)
        if slot.kind == ServiceKind.SERVICE_KIND_TRAINER or slot.name in before:
            count = before[slot.name]
            first = sum(before[name] for name in [*before][: [*before].index(slot.name)])
        elif slot.kind == ServiceKind.SERVICE_KIND_GENERATOR:
            count = _generator(stack)
            first = slot.index if self.colocates(stack) else sum(before.values()) + slot.index * count
        order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} if self.numbered_by_bus else {}
        return {VISIBLE: ",".join(self.names[first : first + count]), **order}


def taken_by(slot: Slot, stack: StackConfig) -> int:
    """Return how many GPUs a service takes that has its own."""
    if slot.kind in OF_GANGS:
        return processes_of(slot, stack) if _ranks(section_of_process(stack, slot.name)) else 0
    is_generator = slot.kind == ServiceKind.SERVICE_KIND_GENERATOR
    return processes_of(slot, stack) if is_generator and runs_vllm(slot, stack) else 0


def needed(stack: StackConfig) -> int:
    """Return the GPUs of a stack whose placement is decided."""
    generators = 0 if stack.placement == "colocated" else stack.generator.replicas * _generator(stack)
    return sum(_first(stack).values()) + generators


def needed_beside(stack: StackConfig) -> int:
    """Return the GPUs of the gangs and judges beside the policy."""
    return sum(_first(stack).values()) - _policy_ranks(stack)


def _first(stack: StackConfig) -> dict[str, int]:
    """GPUs of each gang and of each judge's generator by its slot, in the order in which they are dealt."""
    gangs = {
        slot: _ranks(gang_of(stack, role)) for role in roles_of(stack) for slot in slots_of_role(stack, role)
    }
    judges = {
        slot: judge_of_role(stack, role).tensor_parallel_size
        for role in judge_roles(stack)
        for slot in slots_of_judge(stack, role)
    }
    return gangs | judges


def _key_of(name: str) -> str:
    """Return the key that says how many GPUs a process takes."""
    return f"{section_of(role_of_process(name))}.{'tensor_parallel_size' if holds_judge(name) else 'nproc'}"


def _policy_ranks(stack: StackConfig) -> int:
    return len(slots_of_role(stack, POLICY)) * _ranks(stack.trainer)


def _ranks(gang: TrainerConfig) -> int:
    """None for one that computes on the CPU, that someone else runs, or that is not there."""
    ours = gang.replicas and gang.attach is None
    return gang.ranks_here if ours and gang.backend != "gloo" else 0


def _generator(stack: StackConfig) -> int:
    return stack.generator.tensor_parallel_size if stack.generator.engine == "vllm" else 0


def gpu_bytes() -> int | None:
    """Return the memory of the smallest GPU of this host; None where nvidia-smi does not tell."""
    mebibytes = [int(line) for line in _asked("memory.total") if line.isdecimal()]
    return min(mebibytes) << 20 if mebibytes else None


def computes_bfloat16() -> bool:
    """Return whether every GPU of this host computes in bfloat16, as far as nvidia-smi tells."""
    versions = [line.partition(".")[0] for line in _asked("compute_cap")]
    return bool(versions) and all(version.isdecimal() and int(version) >= AMPERE for version in versions)


def _asked(fact: str) -> list[str]:
    """Return one word for each GPU; nothing where nvidia-smi does not tell."""
    query = ["nvidia-smi", f"--query-gpu={fact}", "--format=csv,noheader,nounits"]
    try:
        listed = subprocess.run(query, capture_output=True, text=True, timeout=_TOOL_LIMIT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return listed.stdout.split()


def _count() -> int:
    """List the GPUs by nvidia-smi, which respects the limits of a container or job, or else by the driver's list."""
    try:
        listed = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=_TOOL_LIMIT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return sum(1 for _ in _PROC.iterdir()) if _PROC.is_dir() else 0
    return len(re.findall(r"^GPU \d+:", listed.stdout, re.MULTILINE))

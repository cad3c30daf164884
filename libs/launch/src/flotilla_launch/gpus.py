"""The assignment of this host's GPUs to the processes of a stack.

Invariants: the trainers have the first GPUs, `trainer.nproc` each, the other gangs (critic, reference, teacher,
named teachers) the next ones in this order, and generator i the i-th `tensor_parallel_size` after them, so a process
keeps its GPUs over restarts and while other replicas come and go; a process sees its own GPUs and no others; a stack
that needs more than there are is refused before anything starts. On a host without GPUs nothing is set.
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
from flotilla_core.gangs import gang_of, roles_of, slots_of_role
from flotilla_core.roles import role_of_process, section_of
from flotilla_launch.placement import Slot

VISIBLE = "CUDA_VISIBLE_DEVICES"
_PROC = Path("/proc/driver/nvidia/gpus")
_TOOL_LIMIT_S = 30.0


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

    def require(self, stack: StackConfig, generators: int) -> None:
        """Refuse a stack with this many generator replicas that does not fit."""
        gangs, each = _gangs(stack), _generator(stack)
        needed = sum(gangs.values()) + generators * each
        if not self.names or needed <= len(self.names):
            return
        raise FailedPrecondition(
            f"the stack needs {needed} GPUs and this host has {len(self.names)}",
            where=f"stack {stack.name!r}",
            why=", ".join(
                f"{name} takes {count} ({section_of(role_of_process(name))}.nproc)"
                for name, count in gangs.items()
                if count
            )
            + f" and {generators} generators take {each} each (generator.tensor_parallel_size)",
            next_step="lower trainer.nproc, generator.replicas or generator.tensor_parallel_size; "
            f"or run on the CPU: {VISIBLE}= flotilla up ...",
        )

    def environment(self, slot: Slot, stack: StackConfig) -> dict[str, str]:
        """Return the variables that give one process its GPUs."""
        if not self.names:
            return {}
        first, count = 0, 0
        gangs = _gangs(stack)
        if slot.kind == ServiceKind.SERVICE_KIND_TRAINER:
            count = gangs[slot.name]
            first = sum(gangs[name] for name in [*gangs][: [*gangs].index(slot.name)])
        elif slot.kind == ServiceKind.SERVICE_KIND_GENERATOR:
            count = _generator(stack)
            first = sum(gangs.values()) + slot.index * count
        order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} if self.numbered_by_bus else {}
        return {VISIBLE: ",".join(self.names[first : first + count]), **order}


def _gangs(stack: StackConfig) -> dict[str, int]:
    """GPUs of each gang by its slot, in the order in which they are dealt."""
    return {
        slot: _ranks(gang_of(stack, role)) for role in roles_of(stack) for slot in slots_of_role(stack, role)
    }


def _ranks(gang: TrainerConfig) -> int:
    """None for one that computes on the CPU, that someone else runs, or that is not there."""
    ours = gang.replicas and gang.attach is None
    return gang.nproc if ours and gang.backend != "gloo" else 0


def _generator(stack: StackConfig) -> int:
    return stack.generator.tensor_parallel_size if stack.generator.engine == "vllm" else 0


def _count() -> int:
    """List the GPUs by nvidia-smi, which respects the limits of a container or job, or else by the driver's list."""
    try:
        listed = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=_TOOL_LIMIT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return sum(1 for _ in _PROC.iterdir()) if _PROC.is_dir() else 0
    return len(re.findall(r"^GPU \d+:", listed.stdout, re.MULTILINE))

"""The nodes of a stack on Ray: one for each service and each agent of a gang, but NATS is with the coordinator.

Invariant: pure functions of the stack file, so the plan of a stack needs no Ray.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flotilla.common.v1.registration_pb2 import ServiceKind
from flotilla_core.config import StackConfig
from flotilla_core.config.stack import HEAD, RayNodeConfig
from flotilla_core.errors import InvalidConfig
from flotilla_core.gangs import spread_gangs
from flotilla_core.kinds import kind_of
from flotilla_launch.cluster import check_several_hosts
from flotilla_launch.gpus import taken_by
from flotilla_launch.placement import Slot, agent_slots, processes_of, slots_of
from flotilla_launch.table import Resources, Row, ports_of

_MIB = 1 << 20
_OWN_KEYS = {"CPU": "cpus", "GPU": "ray.gpus", "memory": "memory_mib", "object_store_memory": "none"}


@dataclass(frozen=True)
class RayNodes:
    """The nodes of a stack on Ray, by the names of its actors."""

    stack: StackConfig

    def slots(self, stack: StackConfig) -> list[Slot]:
        return [*slots_of(stack), *agent_slots(stack)]

    def node(self, slot: Slot) -> str:
        return HEAD if not slot.kind or kind_of(slot.kind).node == HEAD else slot.name

    def resources(self, slot: Slot, stack: StackConfig) -> Resources:
        """Return what a service takes; NATS shares what the coordinator is given."""
        section = self._section(slot)
        if section is None:
            return Resources(ports=ports_of(slot, stack))
        gpus = taken_by(slot, stack) if stack.ray.gpus else 0
        return Resources(
            cpus=section.cpus,
            gpus=tuple(f"{slot.name}:{index}" for index in range(gpus)),
            memory_mib=section.memory_mib,
            ports=ports_of(slot, stack),
        )

    def variables(self, slot: Slot, stack: StackConfig) -> dict[str, str]:
        """Return the share of the CPUs that each process of a service computes with; Ray itself gives the GPUs."""
        section = self._section(slot)
        if section is None or slot.kind == ServiceKind.SERVICE_KIND_COORDINATOR:
            return {}
        return {"OMP_NUM_THREADS": str(max(1, section.cpus // processes_of(slot, stack)))}

    def bundle(self, rows: Sequence[Row]) -> dict[str, float]:
        """Return what the rows of one node take together, by Ray's names: one bundle, so it is on one machine."""
        found: dict[str, float] = {
            "CPU": sum(row.resources.cpus or 0 for row in rows),
            "GPU": sum(len(row.resources.gpus) for row in rows),
            "memory": sum(row.resources.memory_mib or 0 for row in rows) * _MIB,
        }
        for row in rows:
            section = self._section(row.slot)
            found |= section.resources if section is not None else {}
        return {name: amount for name, amount in found.items() if amount}

    def gang(self, node: str) -> list[str]:
        """Return the nodes that are placed together with this one: it alone, or its gang, the front's first."""
        return next((gang for gang in spread_gangs(self.stack) if node in gang), [node])

    def _section(self, slot: Slot) -> RayNodeConfig | None:
        if not slot.kind:
            return None
        found: RayNodeConfig | None = getattr(self.stack.ray, kind_of(slot.kind).node, None)
        return found


def check(stack: StackConfig) -> None:
    """Raise InvalidConfig for a stack that cannot run on several machines, or not on Ray."""
    check_several_hosts(stack, "Ray")
    for section, node in stack.ray:
        for name in node.resources if isinstance(node, RayNodeConfig) else ():
            if name in _OWN_KEYS:
                raise InvalidConfig(
                    f"{name} has a key of its own",
                    where=f"ray.{section}.resources.{name}",
                    next_step=f"the key that says it: {_OWN_KEYS[name]}",
                )

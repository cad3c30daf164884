"""The table of a stack: which service process runs on which node, with which command, variables and resources.

Invariants: pure functions of the stack file and of what an engine calls a node, so the table is the same wherever it is
made; it is what `flotilla up --plan` prints and what every launcher starts. It holds places of secrets, never a secret.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from flotilla.common.v1.registration_pb2 import ServiceKind
from flotilla.launcher.v1.launcher_pb2 import ProcessStatus
from flotilla_core.config import StackConfig
from flotilla_core.config.model import Environment, SecretReference
from flotilla_core.gangs import agent_of, section_of_process
from flotilla_core.judge_generators import section_of_generator
from flotilla_core.kinds import OF_GANGS, kind_name, kind_of
from flotilla_launch.environment import shown
from flotilla_launch.gpus import VISIBLE, Gpus
from flotilla_launch.placement import Slot, agent_slots, slots_of

NATS = "nats"
NATS_SLOT = Slot(NATS, ServiceKind.SERVICE_KIND_UNSPECIFIED)
HERE = "localhost"
"""The only node of the local launcher."""


@dataclass(frozen=True)
class Endpoints:
    """The two addresses that every service is told; known when NATS runs."""

    nats_url: str
    otlp: str
    """The coordinator, which also takes spans: https://host:port."""


@dataclass(frozen=True)
class Resources:
    """The share of its node that a process takes."""

    cpus: int | None = None
    """The number of CPUs; None is what the others leave."""
    gpus: tuple[str, ...] = ()
    """The GPUs, each as node:index."""
    memory_mib: int | None = None
    ports: tuple[int, ...] = ()
    """The ports that it listens on; 0 is a free one."""


@dataclass(frozen=True)
class Row:
    """One process of the stack and its place."""

    node: str
    slot: Slot
    command: tuple[str, ...]
    """The command with `{nats}`, `{otlp}` and `{port}` for what is known only when NATS runs."""
    environment: Mapping[str, str | SecretReference] = field(default_factory=dict)
    resources: Resources = Resources()

    @property
    def name(self) -> str:
        return self.slot.name

    @property
    def kind(self) -> str:
        """Return `generator`, `trainer`, ..., or `nats`."""
        return kind_name(self.slot.kind) if self.slot.kind else NATS

    def command_at(self, endpoints: Endpoints) -> list[str]:
        """Return the command line once the addresses are known."""
        known = {
            "{nats}": endpoints.nats_url,
            "{otlp}": endpoints.otlp,
            "{port}": endpoints.otlp.rpartition(":")[2],
        }
        return [known.get(word, word) for word in self.command]

    def as_dict(self) -> dict[str, Any]:
        """Return the row for `--json`; of secrets only where they are."""
        return {
            "node": self.node,
            "name": self.name,
            "kind": self.kind,
            "command": list(self.command),
            "environment": {name: shown(name, value) for name, value in self.environment.items()},
            "cpus": self.resources.cpus,
            "gpus": list(self.resources.gpus),
            "memory_mib": self.resources.memory_mib,
            "ports": list(self.resources.ports),
        }


@dataclass(frozen=True)
class Placed:
    """The result of placing a table."""

    changed: bool
    processes: list[ProcessStatus]


class Nodes(Protocol):
    """The nodes of one engine: what it places and where, what a slot takes there, and which variables say so."""

    def slots(self, stack: StackConfig) -> list[Slot]: ...

    def node(self, slot: Slot) -> str: ...

    def resources(self, slot: Slot, stack: StackConfig) -> Resources: ...

    def variables(self, slot: Slot, stack: StackConfig) -> dict[str, str]: ...


@dataclass(frozen=True)
class ThisHost:
    """The node of the local launcher."""

    gpus: Gpus

    def slots(self, stack: StackConfig) -> list[Slot]:
        """Return all but the agents of gangs: they are on other hosts."""
        return slots_of(stack)

    def node(self, slot: Slot) -> str:
        return HERE

    def resources(self, slot: Slot, stack: StackConfig) -> Resources:
        own = self.variables(slot, stack).get(VISIBLE, "")
        return Resources(
            gpus=tuple(f"{HERE}:{gpu}" for gpu in own.split(",") if gpu), ports=ports_of(slot, stack)
        )

    def variables(self, slot: Slot, stack: StackConfig) -> dict[str, str]:
        return self.gpus.environment(slot, stack)


def table_of(stack: StackConfig, nodes: Nodes, *, directory: Path, executables: Path) -> list[Row]:
    """Return all rows of a stack, NATS first, then in start order; none for what someone else runs."""
    slots = [slot for slot in nodes.slots(stack) if slot.attached is None]
    if stack.nats.url is None:
        slots = [NATS_SLOT, *slots]
    return [row_of(slot, stack, nodes, directory=directory, executables=executables) for slot in slots]


def row_of(slot: Slot, stack: StackConfig, nodes: Nodes, *, directory: Path, executables: Path) -> Row:
    """Return the row of one slot, which may also be a replica beyond those of the stack file."""
    own, resources = _variables(slot, stack), nodes.resources(slot, stack)
    return Row(
        node=nodes.node(slot),
        slot=slot,
        command=tuple(_command(slot, directory, executables, resources.ports[0])),
        environment={**nodes.variables(slot, stack), **own} if slot.kind else {},
        resources=resources,
    )


def agent_rows(stack: StackConfig, *, directory: Path, executables: Path) -> list[Row]:
    """Return the agents of gangs on several hosts that a user starts, each on its host: no engine has other hosts.

    Their paths are those of this host, and their GPUs those that the user lets them see.
    """
    return [
        Row(
            node=agent_of(stack, slot.name)[1],
            slot=slot,
            command=tuple(_command(slot, directory, executables, 0)),
            environment=_variables(slot, stack),
            resources=Resources(ports=(0,)),
        )
        for slot in agent_slots(stack)
    ]


def ports_of(slot: Slot, stack: StackConfig) -> tuple[int, ...]:
    """Return the ports of a process: the coordinator may have a fixed one."""
    is_coordinator = slot.kind == ServiceKind.SERVICE_KIND_COORDINATOR
    return (stack.bind.port if is_coordinator else 0,)


def _command(slot: Slot, directory: Path, executables: Path, port: int) -> list[str]:
    if not slot.kind:
        from flotilla_core.bus.server import (
            find_binary,  # with the client of NATS, which most commands need not
        )

        return [find_binary(), "--config", str(directory / NATS / "nats.conf")]
    is_coordinator = slot.kind == ServiceKind.SERVICE_KIND_COORDINATOR
    arguments = {
        "--name": slot.name,
        "--stack": str(directory / "stack.yaml"),
        "--nats": "{nats}",
        "--otlp": "{otlp}",
        "--port": "{port}" if is_coordinator else str(port),
    }
    executable = executables / f"flotilla-{kind_name(slot.kind)}"
    return [str(executable), *(part for option in arguments.items() for part in option)]


def _variables(slot: Slot, stack: StackConfig) -> Mapping[str, str | SecretReference]:
    """Return what the stack file gives to a service, by its kind and role."""
    if not slot.kind:
        return {}
    if slot.kind in OF_GANGS:
        return section_of_process(stack, slot.name).environment
    if slot.kind == ServiceKind.SERVICE_KIND_GENERATOR:
        return section_of_generator(stack, slot.name).environment
    own: Environment = getattr(stack, kind_of(slot.kind).section).environment
    return own

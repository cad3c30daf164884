"""The processes that a stack file asks for: one slot each.

Invariant: no port is fixed here. Only those of NATS and of the coordinator are chosen before these start, because
every other process is told them; they lie outside the range from which the kernel hands out ports, so that they
are still free when one of the two is restarted.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from flotilla.common.v1.registration_pb2 import ServiceKind
from flotilla_core.addresses import is_free, ports_of
from flotilla_core.config import StackConfig
from flotilla_core.errors import Exhausted, FailedPrecondition, InvalidConfig, InvalidRequest
from flotilla_core.gangs import gang_of, ranks_beside, roles_of, slots_of_role, spread_gangs
from flotilla_core.judge_generators import judge_roles, section_of_generator, slots_of_judge
from flotilla_core.kinds import KINDS, OF_GANGS, SCALABLE, Kind, kind_name, kind_of
from flotilla_core.roles import holds_judge
from flotilla_launch.environment import shown


@dataclass(frozen=True)
class Slot:
    """One process of the stack, or one that someone else runs."""

    name: str
    kind: ServiceKind.ValueType
    attached: str | None = None
    """Address of the process that someone else started."""
    index: int = 0
    """The number of a replica among its kind, or among the generators of its judge."""

    def scales_with(self, kind: ServiceKind.ValueType) -> bool:
        """Return whether it is one of the replicas of a kind: those of a judge have a number of their own."""
        return self.kind == kind and not holds_judge(self.name)


def check_scalable(kind: ServiceKind.ValueType) -> None:
    """Raise InvalidRequest for a kind whose number is fixed by the stack file."""
    if kind not in SCALABLE:
        raise InvalidRequest(
            f"{kind_name(kind)} cannot be scaled",
            where="kind",
            why="a stack has exactly one",
            next_step=f"scale one of: {', '.join(map(kind_name, SCALABLE))}",
        )


def refuse(what: str, refused: Iterable[tuple[bool, str, str]]) -> None:
    """Raise InvalidConfig for the first of these that applies: whether it does, `key: reason`, and what to do."""
    for applies, reason, next_step in refused:
        if applies:
            where, _, why = reason.partition(": ")
            raise InvalidConfig(what, where=where, why=why, next_step=next_step)


def refused_by_engines(stack: StackConfig) -> list[tuple[bool, str, str]]:
    """Return what no launcher but that of processes on this host can do, as `refuse` takes it."""
    attached = [slot.name for slot in slots_of(stack) if slot.attached is not None]
    return [
        (
            bool(attached),
            f"{', '.join(attached)}: attached, and there the launcher starts every service",
            "leave attach out of the stack file",
        ),
        (
            stack.autoscale is not None and stack.autoscale.mode == "act",
            "autoscale.mode act: a run cannot scale a stack there",
            "set autoscale.mode: advise, and follow the advice with flotilla scale",
        ),
        (
            stack.placement == "colocated",
            "placement colocated: there generators have GPUs of their own",
            "set placement: separate",
        ),
    ]


def replica(kind: ServiceKind.ValueType, index: int) -> Slot:
    return Slot(f"{kind_name(kind)}-{index}", kind, index=index)


def replicas_of(stack: StackConfig, kind: ServiceKind.ValueType) -> int:
    """Return the number of processes of a scalable kind that the stack file asks for."""
    return int(getattr(stack, kind_of(kind).section).replicas)


def wanted_replicas(stack: StackConfig) -> dict[str, int]:
    """Return the number of replicas of each kind that can be scaled, by the kind's name."""
    return {kind_name(kind): replicas_of(stack, kind) for kind in SCALABLE}


def changed_replicas(running: StackConfig, stack: StackConfig) -> dict[str, int]:
    """Return the wanted numbers that differ from those of the running stack."""
    before = wanted_replicas(running)
    return {name: count for name, count in wanted_replicas(stack).items() if count != before[name]}


def processes_of(slot: Slot, stack: StackConfig) -> int:
    """Return how many processes of a service compute, which share its CPUs and have a GPU each."""
    if slot.kind in OF_GANGS:
        return ranks_beside(stack, slot.name)
    if slot.kind == ServiceKind.SERVICE_KIND_GENERATOR and runs_vllm(slot, stack):
        return section_of_generator(stack, slot.name).tensor_parallel_size
    return 0 if slot.kind == ServiceKind.SERVICE_KIND_COORDINATOR else 1


def runs_vllm(slot: Slot, stack: StackConfig) -> bool:
    """Return whether a generator runs the model: those of judges always do."""
    return stack.generator.engine == "vllm" or holds_judge(slot.name)


def slots_of(stack: StackConfig) -> list[Slot]:
    """In start order, and last the replicas that someone else runs."""
    kinds = [kind for kind in KINDS if kind.section]
    attached = (slot for kind in kinds if kind.scales for slot in _attached(stack, kind))
    return [*(slot for kind in kinds for slot in _own(stack, kind)), *attached]


def agent_slots(stack: StackConfig) -> list[Slot]:
    """Return the agents of gangs on several hosts, which have nodes of their own where an engine places a stack."""
    return [Slot(agent, ServiceKind.SERVICE_KIND_RANKS) for gang in spread_gangs(stack) for agent in gang[1:]]


def difference(running: StackConfig, wanted: StackConfig) -> list[str]:
    """`key: old -> new` of everything that cannot change while the stack lives (replica counts can)."""
    old, new = (dict(_flat("", stack.model_dump(mode="json"))) for stack in (running, wanted))
    live = {f"{kind_name(kind)}.replicas" for kind in SCALABLE}
    return [
        f"{key}: {_seen(key, old.get(key))} -> {_seen(key, new.get(key))}"
        for key in sorted(old.keys() | new.keys())
        if key not in live and old.get(key) != new.get(key)
    ]


def require_same(running: StackConfig, wanted: StackConfig, directory: Path) -> None:
    """Raise FailedPrecondition for a stack that differs from the running one in more than replica counts."""
    if differing := difference(running, wanted):
        raise FailedPrecondition(
            f"stack {running.name!r} already runs with another configuration",
            where=str(directory),
            why="\n  " + "\n  ".join(differing) + "\n",
            next_step="run `flotilla down` first, or give the new stack another name",
        )


def reserve_port(host: str, among: str | None = None) -> int:
    """Return a port of `bind.ports` that is free now, else one that the kernel gives only to who asks by number."""
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    others = [port for port in range(10_000, 65_536) if not low <= port <= high] or range(10_000, 65_536)
    ports = ports_of(among) if among else others
    for _ in range(200):
        port = random.SystemRandom().choice(ports)
        try:
            if is_free(host, port):
                return port
        except OSError as error:
            raise InvalidConfig(
                f"no process can listen on {host}",
                where="bind.host",
                why=str(error),
                next_step="set bind.host in the stack file to an address of this host: ip -brief address",
            ) from error
    raise Exhausted(
        "no free port for NATS or the coordinator",
        where=host,
        why="200 ports outside the kernel's own range were tried",
        next_step="set nats.url and bind.port in the stack file, or stop what holds the ports: ss -ltnp",
    )


def _own(stack: StackConfig, kind: Kind) -> Iterable[Slot]:
    if kind.is_gang:
        return _gangs(stack)
    if kind.scales:
        own = [replica(kind.number, index) for index in range(replicas_of(stack, kind.number))]
        return [*own, *_judges(stack)] if kind.number == ServiceKind.SERVICE_KIND_GENERATOR else own
    return [Slot(kind.name, kind.number, getattr(stack, kind.section).attach)]


def _gangs(stack: StackConfig) -> Iterator[Slot]:
    """The trainers and the other gangs; none for one that is started elsewhere and registers itself."""
    for role in roles_of(stack):
        for name in slots_of_role(stack, role):
            yield Slot(name, ServiceKind.SERVICE_KIND_TRAINER, gang_of(stack, role).attach)


def _judges(stack: StackConfig) -> Iterator[Slot]:
    """The generators of judges."""
    for role in judge_roles(stack):
        for index, name in enumerate(slots_of_judge(stack, role)):
            yield Slot(name, ServiceKind.SERVICE_KIND_GENERATOR, index=index)


def _attached(stack: StackConfig, kind: Kind) -> Iterator[Slot]:
    for address in getattr(stack, kind.section).attach:
        yield Slot(f"{kind.name}@{address}", kind.number, address)


def _seen(key: str, value: object) -> str:
    """Show a value, unless it is a variable that looks like a secret."""
    before, variable, name = key.partition(".environment.")
    return repr(shown(name, value) if variable and before and value is not None else value)


def _flat(prefix: str, values: object) -> Iterator[tuple[str, object]]:
    if isinstance(values, dict) and values:
        for key, value in values.items():
            yield from _flat(f"{prefix}.{key}" if prefix else str(key), value)
    else:
        yield prefix, values

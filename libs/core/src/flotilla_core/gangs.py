"""The gangs of each role, and the models of all roles, as the stack file describes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from flotilla_core.config import GangConfig, StackConfig, TrainerConfig
from flotilla_core.errors import FailedPrecondition
from flotilla_core.judge_generators import judge_of_role, judge_roles
from flotilla_core.roles import (
    CRITIC,
    JUDGE,
    KINDS,
    NAMED,
    POLICY,
    REFERENCE,
    REWARD_MODEL,
    TEACHER,
    kind_of_role,
    name_of_role,
    named_role,
    process_name,
    role_of_process,
    section_of,
)


def roles_of(stack: StackConfig) -> tuple[str, ...]:
    """Return all roles that gangs of a stack may have: named teachers, then reward models, in the order of the file."""
    return (*KINDS, *_named(stack))


def model_roles(stack: StackConfig) -> tuple[str, ...]:
    """Return all roles whose processes may load a model: those of gangs, then those of judges."""
    return (*roles_of(stack), *judge_roles(stack))


def gang_of(stack: StackConfig, role: str) -> TrainerConfig:
    """Return the section that describes the gangs of a role."""
    if role == POLICY:
        return stack.trainer
    return _beside(stack, role)


def model_of(stack: StackConfig, role: str) -> Path | str:
    """Return the folder or hub name of the model that a role's processes are started with."""
    if kind_of_role(role) == JUDGE:
        return judge_of_role(stack, role).model
    own = None if role == POLICY else _beside(stack, role).model
    return stack.model if own is None else own


def with_model(stack: StackConfig, role: str, folder: Path | str) -> StackConfig:
    """Return the stack with another folder for the model of a role, and of those that share it."""
    if kind_of_role(role) == JUDGE:
        judge = judge_of_role(stack, role).model_copy(update={"model": folder})
        return stack.model_copy(update={"judges": {**stack.judges, name_of_role(role): judge}})
    if role == POLICY or _beside(stack, role).model is None:
        return stack.model_copy(update={"model": folder})
    gang = _beside(stack, role).model_copy(update={"model": folder})
    if role in KINDS:
        return stack.model_copy(update={role: gang})
    kind = kind_of_role(role)
    return stack.model_copy(update={NAMED[kind]: {**named_gangs(stack)[kind], name_of_role(role): gang}})


def started(stack: StackConfig, role: str) -> bool:
    """Return whether the stack has a process of this role, started by its launcher or attached."""
    if role in judge_roles(stack):
        return judge_of_role(stack, role).replicas > 0
    if role not in roles_of(stack):
        return False
    gang = gang_of(stack, role)
    return bool(gang.replicas or gang.attach)


def slots_of_role(stack: StackConfig, role: str) -> list[str]:
    """Return the names of a role's gangs in the stack; several are numbered."""
    gang, name = gang_of(stack, role), process_name(role)
    if gang.attach is not None or gang.replicas == 1:
        return [name]
    return [f"{name}-{index}" for index in range(gang.replicas)]


def _beside(stack: StackConfig, role: str) -> GangConfig:
    gangs = {CRITIC: stack.critic, REFERENCE: stack.reference, TEACHER: stack.teacher, **_named(stack)}
    if role not in gangs:
        kind = kind_of_role(role)
        raise FailedPrecondition(
            f"the stack has no {kind.replace('_', ' ')} {name_of_role(role)!r}",
            where=f"stack {stack.name!r}, {NAMED[kind]}",
            why=f"it names {', '.join(named_gangs(stack)[kind]) or 'none'}",
            next_step=f"write {section_of(role)} into stack.yaml, or take another name",
        )
    return gangs[role]


def named_gangs(stack: StackConfig) -> dict[str, Mapping[str, GangConfig]]:
    """Return the gangs that have names, by the kind of their roles."""
    return {TEACHER: stack.teachers, REWARD_MODEL: stack.reward_models}


def _named(stack: StackConfig) -> dict[str, GangConfig]:
    return {
        named_role(kind, name): gang
        for kind, gangs in named_gangs(stack).items()
        for name, gang in gangs.items()
    }


AT = "-at-"


def agent_name(gang: str, host: str) -> str:
    """Return the name of the agent that runs a gang's ranks on a further host."""
    return f"{gang}{AT}{host}"


def agents_of(stack: StackConfig, role: str) -> list[tuple[str, str, int]]:
    """Return gang, host and number of ranks of each agent that the gangs of a role need."""
    gang = gang_of(stack, role)
    if gang.attach is not None:
        return []
    return [(slot, host.name, host.ranks) for slot in slots_of_role(stack, role) for host in gang.hosts[1:]]


def agent_of(stack: StackConfig, name: str) -> tuple[str, str]:
    """Return gang and host of the agent of this name; also a gang that is started by hand has agents."""
    # A name may have the word inside: each place is tried.
    for place in range(len(name)):
        if not name.startswith(AT, place):
            continue
        gang, host = name[:place], name[place + len(AT) :]
        role = role_of_process(gang)
        if role in roles_of(stack) and host in [one.name for one in gang_of(stack, role).hosts[1:]]:
            return gang, host
    raise FailedPrecondition(
        f"no gang of the stack has ranks at {name!r}",
        where=f"stack {stack.name!r}, hosts",
        why="an agent is named after its gang and a host of that gang's section, the first host excepted",
        next_step="write hosts into the section of the gang, and start flotilla-ranks --name trainer-at-HOST",
    )


def spread_gangs(stack: StackConfig) -> list[list[str]]:
    """Return the processes of each gang on several hosts: its front, then its agents in the order of `hosts`."""
    found: dict[str, list[str]] = {}
    for role in roles_of(stack):
        for gang, host, _ in agents_of(stack, role):
            found.setdefault(gang, [gang]).append(agent_name(gang, host))
    return [*found.values()]


def section_of_process(stack: StackConfig, name: str) -> TrainerConfig:
    """Return the section that describes the gang of this front or agent."""
    is_agent = any(name in gang[1:] for gang in spread_gangs(stack))
    return gang_of(stack, role_of_process(agent_of(stack, name)[0] if is_agent else name))


def ranks_beside(stack: StackConfig, name: str) -> int:
    """Return the number of ranks on the host of this front or agent."""
    agents = (agent for role in roles_of(stack) for agent in agents_of(stack, role))
    ranks = {agent_name(gang, host): count for gang, host, count in agents}
    return ranks.get(name, section_of_process(stack, name).ranks_here)

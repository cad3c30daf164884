"""The gangs of each role, as the stack file describes them."""

from __future__ import annotations

from pathlib import Path

from flotilla_core.config import GangConfig, StackConfig, TrainerConfig
from flotilla_core.errors import FailedPrecondition
from flotilla_core.roles import (
    CRITIC,
    KINDS,
    POLICY,
    REFERENCE,
    TEACHER,
    process_name,
    section_of,
    teacher_name,
    teacher_role,
)


def roles_of(stack: StackConfig) -> tuple[str, ...]:
    """Return all roles that gangs of a stack may have, named teachers last and in the order of the file."""
    return (*KINDS, *map(teacher_role, stack.teachers))


def gang_of(stack: StackConfig, role: str) -> TrainerConfig:
    """Return the section that describes the gangs of a role."""
    if role == POLICY:
        return stack.trainer
    return _beside(stack, role)


def model_of(stack: StackConfig, role: str) -> Path | str:
    """Return the folder or hub name of the model that a role's gangs are started with."""
    own = None if role == POLICY else _beside(stack, role).model
    return stack.model if own is None else own


def started(stack: StackConfig, role: str) -> bool:
    """Return whether the stack has a gang of this role, started by its launcher or attached."""
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
    gangs = {CRITIC: stack.critic, REFERENCE: stack.reference, TEACHER: stack.teacher}
    gangs |= {teacher_role(name): gang for name, gang in stack.teachers.items()}
    if role not in gangs:
        raise FailedPrecondition(
            f"the stack has no teacher {teacher_name(role)!r}",
            where=f"stack {stack.name!r}, teachers",
            why=f"it names {', '.join(stack.teachers) or 'none'}",
            next_step=f"write {section_of(role)} into stack.yaml, or take another name",
        )
    return gangs[role]

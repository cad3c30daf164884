"""What a gang of ranks holds for a run, and where the stack file describes it.

Invariant: the first part of a process's name says its role, so a gang that is started by hand needs no other word.
"""

from __future__ import annotations

from pathlib import Path

from flotilla_core.config import StackConfig
from flotilla_core.config.stack import GangConfig, TrainerConfig

POLICY = "policy"
CRITIC = "critic"
REFERENCE = "reference"
TEACHER = "teacher"

ROLES = (POLICY, CRITIC, REFERENCE, TEACHER)
BESIDE_THE_POLICY = (CRITIC, REFERENCE, TEACHER)
LEARNING = (POLICY, CRITIC)


def role_of_process(name: str) -> str:
    """`critic` for critic and critic-a; `policy` for trainer and for any name that says nothing."""
    first = name.partition("-")[0]
    return first if first in BESIDE_THE_POLICY else POLICY


def process_name(role: str) -> str:
    """The slot of a role, which its section of the stack file is called after."""
    return "trainer" if role == POLICY else role


def gang_of(stack: StackConfig, role: str) -> TrainerConfig:
    """The section that describes the gang of a role."""
    if role == POLICY:
        return stack.trainer
    return _beside(stack, role)


def model_of(stack: StackConfig, role: str) -> Path | str:
    """Folder or hub name of the model that a role's gang is started with."""
    own = None if role == POLICY else _beside(stack, role).model
    return stack.model if own is None else own


def started(stack: StackConfig, role: str) -> bool:
    """Whether the stack has a gang of this role, ours or somebody else's."""
    gang = gang_of(stack, role)
    return bool(gang.replicas or gang.attach)


def _beside(stack: StackConfig, role: str) -> GangConfig:
    gangs = {CRITIC: stack.critic, REFERENCE: stack.reference, TEACHER: stack.teacher}
    return gangs[role]

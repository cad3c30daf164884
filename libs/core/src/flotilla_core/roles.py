"""What a gang of ranks holds for a run.

Invariant: the first part of a process's name says its role, so a gang that is started by hand needs no other word.
"""

from __future__ import annotations

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

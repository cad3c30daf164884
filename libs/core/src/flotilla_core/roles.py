"""The roles that a gang of ranks can have for a run.

Invariant: a process's name says its role, so a gang that is started by hand needs no further setting. The role is the
part of the name; a teacher with a name of its own has a role of its own, the first two parts.
"""

from __future__ import annotations

POLICY = "policy"
CRITIC = "critic"
REFERENCE = "reference"
TEACHER = "teacher"

KINDS = (POLICY, CRITIC, REFERENCE, TEACHER)
"""The kinds of roles: every named teacher is a teacher."""
BESIDE_THE_POLICY = (CRITIC, REFERENCE, TEACHER)
LEARNING = (POLICY, CRITIC)

TEACHER_NAME = r"^[a-z][a-z0-9_]{0,30}$"
MOST_TEACHERS = 16


def teacher_role(name: str) -> str:
    """Return the role of the teacher with this name."""
    return f"{TEACHER}-{name}"


def teacher_name(role: str) -> str:
    """Return the name of a named teacher; empty for any other role."""
    return role.partition("-")[2]


def kind_of_role(role: str) -> str:
    """Return `teacher` for `teacher-math`; any other role is its own kind."""
    return role.partition("-")[0]


def role_of_process(name: str) -> str:
    """Return the role that the name of a process begins with; `policy` for trainer and for any other name.

    `critic` for critic and critic-a, `teacher` for teacher-0, `teacher-math` for teacher-math and teacher-math-0.
    """
    first, _, rest = name.partition("-")
    second = rest.partition("-")[0]
    # A number distinguishes replicas and is never the start of a teacher's name.
    if first == TEACHER and second and not second[0].isdigit():
        return teacher_role(second)
    return first if first in BESIDE_THE_POLICY else POLICY


def process_name(role: str) -> str:
    """Return the name of the process that fills a role."""
    return "trainer" if role == POLICY else role


def section_of(role: str) -> str:
    """Return the section of the stack file that describes the gangs of a role."""
    name = teacher_name(role)
    return f"teachers.{name}" if name else process_name(role)

"""The roles that a gang of ranks, or a generator with a judge, can have for a run.

Invariant: a process's name says its role, so one that is started by hand needs no further setting. The role is the
part of the name; a teacher, a reward model or a judge with a name of its own has a role of its own, the first two
parts.
"""

from __future__ import annotations

POLICY = "policy"
CRITIC = "critic"
REFERENCE = "reference"
TEACHER = "teacher"
REWARD_MODEL = "reward_model"
JUDGE = "judge"

KINDS = (POLICY, CRITIC, REFERENCE, TEACHER)
"""The kinds of roles with a section of their own: every named teacher is a teacher."""
NAMED = {TEACHER: "teachers", REWARD_MODEL: "reward_models", JUDGE: "judges"}
"""The sections of processes that have names, by the kind of their roles."""
BESIDE_THE_POLICY = (CRITIC, REFERENCE, TEACHER, REWARD_MODEL)
LEARNING = (POLICY, CRITIC)

GANG_NAME = r"^[a-z][a-z0-9_]{0,30}$"
MOST_NAMED = 16
"""The most gangs of one section of `NAMED`."""


def named_role(kind: str, name: str) -> str:
    """Return the role of the teacher, the reward model or the judge with this name."""
    return f"{kind}-{name}"


def teacher_role(name: str) -> str:
    """Return the role of the teacher with this name."""
    return named_role(TEACHER, name)


def name_of_role(role: str) -> str:
    """Return the name of a named teacher, of a reward model or of a judge; empty for any other role."""
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
    # A number distinguishes replicas and is never the start of a name.
    if first in NAMED and second and not second[0].isdigit():
        return named_role(first, second)
    return first if first in BESIDE_THE_POLICY else POLICY


def holds_judge(name: str) -> bool:
    """Return whether a process of this name holds a judge, and no policy."""
    return kind_of_role(role_of_process(name)) == JUDGE


def process_name(role: str) -> str:
    """Return the name of the process that fills a role."""
    return "trainer" if role == POLICY else role


def section_of(role: str) -> str:
    """Return the section of the stack file that describes the processes of a role."""
    name = name_of_role(role)
    return f"{NAMED[kind_of_role(role)]}.{name}" if name else process_name(role)

"""Whether the stack has the gangs beside the policy's that a run needs."""

from __future__ import annotations

from flotilla_core.config import AlgorithmConfig, PolicyConfig, StackConfig
from flotilla_core.gangs import started
from flotilla_core.roles import TEACHER, kind_of_role, section_of, teacher_name

WHY = {
    "critic": "algorithm.critic is set (advantage gae)",
    "reference": "algorithm.kl.reference is service",
    "teacher": "algorithm.advantage.type is distill",
}


def role_errors(algorithm: AlgorithmConfig, stack: StackConfig) -> list[str]:
    """One for each gang that nobody will start."""
    if not isinstance(algorithm, PolicyConfig):
        return []
    return [
        f"{_why(algorithm, role)}, but the stack has no {section_of(role)}: write `{_section(role)}` into its "
        "stack.yaml (nproc, dtype and model as for trainer), then flotilla down and flotilla up"
        for role in algorithm.gangs_beside_the_policy
        if not started(stack, role)
    ]


def _why(algorithm: PolicyConfig, role: str) -> str:
    asked, name = algorithm.asked_teachers, teacher_name(role)
    if asked is None or kind_of_role(role) != TEACHER:
        return WHY[role]
    if not name:
        return WHY[role] if asked is algorithm.advantage else f"algorithm.{asked.asked_by} is set"
    return f"algorithm.{asked.asked_by}.teachers names {name}"


def _section(role: str) -> str:
    name = teacher_name(role)
    return f"teachers: {{{name}: {{replicas: 1}}}}" if name else f"{role}: {{replicas: 1}}"

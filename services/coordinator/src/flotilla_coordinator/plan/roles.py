"""Whether the stack has the gangs beside the policy's that a run needs."""

from __future__ import annotations

from flotilla_core.config import AlgorithmConfig, PolicyConfig, StackConfig
from flotilla_core.gangs import started

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
        f"{WHY[role]}, but the stack has no {role}: write `{role}: {{replicas: 1}}` into its stack.yaml "
        "(nproc, dtype and model as for trainer), then flotilla down and flotilla up"
        for role in algorithm.gangs_beside_the_policy
        if not started(stack, role)
    ]

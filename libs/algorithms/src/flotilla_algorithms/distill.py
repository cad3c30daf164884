"""On-policy distillation: a token is worth what the teacher thinks of it more than the policy that drew it."""

from __future__ import annotations

from flotilla_algorithms.grpo import group_advantages
from flotilla_algorithms.outcomes import Floats, Outcomes


def distill(outcomes: Outcomes, *, coefficient: float, reward_weight: float) -> Floats:
    """coefficient (log p_teacher - log p) of each token, and `reward_weight` times the advantage within its group.

    In the mean over samples this descends on the divergence of the policy from the teacher, token by token.
    """
    if outcomes.teacher_lead is None:
        raise ValueError("distill needs the log-probabilities of a teacher")
    advantages = coefficient * outcomes.teacher_lead
    if reward_weight:
        task = group_advantages(outcomes.totals, outcomes.group_sizes, normalize_std=True)
        advantages = advantages + reward_weight * outcomes.to_tokens(task)
    return advantages

"""The same updates by the formulas, in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from flotilla_core.config import PolicyConfig, RunConfig
from flotilla_testing.exact_update import Setting, exact_update
from option_pairs.axes import LIMIT, TERM_WEIGHTS
from option_pairs.made import Made
from option_pairs.scenes import chosen, part_of
from option_pairs.trained import SEED


def powered(judgement: Any, *, power: float = 1.0) -> np.ndarray:
    return np.array([np.sign(total) * abs(total) ** power for total in judgement.totals])


def soft(tokens: Any, *, power: float = 1.0) -> torch.Tensor:
    away = torch.exp(tokens.now.detach() - tokens.old)
    return -tokens.advantages * (1 - (1 - torch.exp(tokens.now)) ** power) * away


EXACT = Setting(LIMIT, TERM_WEIGHTS, SEED, powered, soft)


def expected_update(config: RunConfig, number: int, updates: int) -> Made:
    """The first updates of a scene in float64, step by step."""
    algorithm = config.algorithm
    assert isinstance(algorithm, PolicyConfig)
    made = Made()
    coefficient, seen = algorithm.kl.coefficient, np.zeros(0)
    for place in range(updates):
        part = part_of(number, place, chosen(number, place, config.rollout.dynamic_sampling))
        count = part.rollouts.groups
        mini_batches = min(part.plan.mini_batches, count)
        update = exact_update(
            algorithm,
            part.rollouts,
            part.policies,
            np.arange(count) * mini_batches // count,
            EXACT,
            kl_coefficient=coefficient,
            earlier=seen,
            policy_learns=algorithm.critic is None or place >= algorithm.critic.warmup_steps,
        )
        coefficient, seen = update.kl_coefficient, np.concatenate([seen, update.seen])
        for step in [*update.steps, *update.critic]:
            made.losses.append(step.loss)
            made.gradients.append(step.gradient)
    return made

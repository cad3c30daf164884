"""Advantages and weights of whole updates, in numpy alone: callable from the trainer's front and from user code."""

from __future__ import annotations

from flotilla_algorithms.advantages import gae, gdpo, group_advantages, remax, whitened
from flotilla_algorithms.outcomes import NonFiniteRewardError, Outcomes, RewardHistory
from flotilla_algorithms.pair_losses import PAIR_LOSSES, PairLosses
from flotilla_algorithms.rewards import (
    adapted_coefficient,
    divergence,
    normalised_rewards,
    overlong_penalties,
    shuffled_rewards,
)
from flotilla_algorithms.steps import Step, compared_share, gigpo, step_reinforce
from flotilla_algorithms.table import ADVANTAGES, AdvantageFunction, token_advantages
from flotilla_algorithms.weights import (
    counted_units,
    covariances,
    difficulty_weights,
    drawn_between,
    highest,
    kept_groups,
    length_weights,
    mean_importance,
    reward_weights,
    token_weights,
)

__all__ = [
    "ADVANTAGES",
    "PAIR_LOSSES",
    "AdvantageFunction",
    "NonFiniteRewardError",
    "Outcomes",
    "PairLosses",
    "RewardHistory",
    "Step",
    "adapted_coefficient",
    "compared_share",
    "counted_units",
    "covariances",
    "difficulty_weights",
    "divergence",
    "drawn_between",
    "gae",
    "gdpo",
    "gigpo",
    "group_advantages",
    "highest",
    "kept_groups",
    "length_weights",
    "mean_importance",
    "normalised_rewards",
    "overlong_penalties",
    "remax",
    "reward_weights",
    "shuffled_rewards",
    "step_reinforce",
    "token_advantages",
    "token_weights",
    "whitened",
]

"""Advantages and weights of whole updates, in numpy alone: callable from the trainer's front and from user code."""

from __future__ import annotations

from flotilla_algorithms.aggregation import counted_units, token_weights
from flotilla_algorithms.covariance import covariances, drawn_between, highest
from flotilla_algorithms.difficulty import kept_groups
from flotilla_algorithms.divergence import adapted_coefficient, divergence
from flotilla_algorithms.gae import gae
from flotilla_algorithms.gdpo import gdpo
from flotilla_algorithms.gigpo import Step, gigpo
from flotilla_algorithms.grpo import group_advantages
from flotilla_algorithms.importance import mean_importance
from flotilla_algorithms.outcomes import Outcomes
from flotilla_algorithms.overlong import overlong_penalties
from flotilla_algorithms.pair_losses import PAIR_LOSSES, PairLosses
from flotilla_algorithms.remax import remax
from flotilla_algorithms.reward_history import RewardHistory
from flotilla_algorithms.reward_normalization import normalised_rewards
from flotilla_algorithms.rewards import NonFiniteRewardError
from flotilla_algorithms.sample_weights import difficulty_weights, length_weights, reward_weights
from flotilla_algorithms.shuffle import shuffled_rewards
from flotilla_algorithms.step_reinforce import step_reinforce
from flotilla_algorithms.table import ADVANTAGES, AdvantageFunction
from flotilla_algorithms.token_advantages import token_advantages
from flotilla_algorithms.whitening import whitened

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

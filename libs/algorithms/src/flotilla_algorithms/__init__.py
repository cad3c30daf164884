"""Advantages of whole updates, in numpy alone: callable from the trainer's front and from user code."""

from __future__ import annotations

from flotilla_algorithms.grpo import group_advantages
from flotilla_algorithms.rewards import NonFiniteRewardError
from flotilla_algorithms.shuffle import shuffled_rewards

__all__ = ["NonFiniteRewardError", "group_advantages", "shuffled_rewards"]

"""Losses: pure functions of log-probabilities, summed over tokens and never averaged here.

The mean over all tokens of the update is taken once, when all micro-batches of all ranks are in.
"""

from __future__ import annotations

from flotilla_trainer.losses.grpo import grpo_loss
from flotilla_trainer.losses.sft import sft_loss
from flotilla_trainer.losses.terms import LossTerms

__all__ = ["LossTerms", "grpo_loss", "sft_loss"]

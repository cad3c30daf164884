"""The objective that a session's settings ask for, whatever its kind."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from flotilla_trainer.losses.terms import LossTerms
from flotilla_trainer.rank.objective import Objective
from flotilla_trainer.rank.reference_distribution import ReferenceDistribution
from flotilla_trainer.rank.reward_objective import RewardObjective
from flotilla_trainer.rank.value_objective import ValueObjective
from flotilla_trainer.wire.settings import REWARD, VALUE, ObjectiveSettings


class RankObjective(Protocol):
    """An objective of any kind."""

    def on(self, model: Any, columns: dict[str, torch.Tensor], chunk_tokens: int) -> LossTerms:
        """What a micro-batch says; the model is of the objective's kind, because a session's role chooses both."""


def rank_objective(
    settings: ObjectiveSettings, reference: ReferenceDistribution | None = None
) -> RankObjective:
    """Ready to be applied to micro-batches; `reference` where the session keeps one."""
    if settings.loss == VALUE:
        return ValueObjective(settings)
    return RewardObjective() if settings.loss == REWARD else Objective(settings, reference)

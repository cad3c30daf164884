"""The objective that a session's settings ask for, whatever its kind."""

from __future__ import annotations

from flotilla_trainer.rank.objective import Objective
from flotilla_trainer.rank.objective_settings import REWARD, VALUE, ObjectiveSettings
from flotilla_trainer.rank.reference_distribution import ReferenceDistribution
from flotilla_trainer.rank.reward_objective import RewardObjective
from flotilla_trainer.rank.value_objective import ValueObjective

RankObjective = Objective | ValueObjective | RewardObjective


def rank_objective(
    settings: ObjectiveSettings, reference: ReferenceDistribution | None = None
) -> RankObjective:
    """Ready to be applied to micro-batches; `reference` where the session keeps one."""
    if settings.loss == VALUE:
        return ValueObjective(settings)
    return RewardObjective() if settings.loss == REWARD else Objective(settings, reference)

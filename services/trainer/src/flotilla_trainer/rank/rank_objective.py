"""The objective that a session's settings ask for, whatever its kind."""

from __future__ import annotations

from flotilla_trainer.rank.objective import Objective
from flotilla_trainer.rank.objective_settings import VALUE, ObjectiveSettings
from flotilla_trainer.rank.value_objective import ValueObjective

RankObjective = Objective | ValueObjective


def rank_objective(settings: ObjectiveSettings) -> RankObjective:
    """Ready to be applied to micro-batches."""
    return ValueObjective(settings) if settings.loss == VALUE else Objective(settings)

"""The objective that a session's settings ask for, whatever its kind."""

from __future__ import annotations

from flotilla_trainer.rank.objective import Objective
from flotilla_trainer.rank.objective_settings import VALUE, ObjectiveSettings
from flotilla_trainer.rank.reference_distribution import ReferenceDistribution
from flotilla_trainer.rank.value_objective import ValueObjective

RankObjective = Objective | ValueObjective


def rank_objective(
    settings: ObjectiveSettings, reference: ReferenceDistribution | None = None
) -> RankObjective:
    """Ready to be applied to micro-batches; `reference` where the session keeps one."""
    return ValueObjective(settings) if settings.loss == VALUE else Objective(settings, reference)

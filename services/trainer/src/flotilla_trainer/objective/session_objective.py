"""The objective that a session names, as the front applies it to updates."""

from __future__ import annotations

from flotilla.trainer.v1 import session_pb2 as pb
from flotilla_trainer.objective.pair_objective import PairObjective
from flotilla_trainer.objective.reward_update import RewardUpdate
from flotilla_trainer.objective.update_objective import UpdateObjective
from flotilla_trainer.objective.value_update import ValueUpdate

SessionObjective = UpdateObjective | PairObjective | RewardUpdate | ValueUpdate


def session_objective(objective: pb.Objective) -> SessionObjective:
    """Of a checked specification."""
    if objective.HasField("preference"):
        return PairObjective(objective.preference)
    if objective.HasField("reward_model"):
        return RewardUpdate(objective.reward_model)
    if objective.HasField("value"):
        return ValueUpdate(objective.value)
    return UpdateObjective(objective)

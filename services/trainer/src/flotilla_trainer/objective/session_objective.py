"""The objective that a session names, as the front applies it to updates."""

from __future__ import annotations

from flotilla.trainer.v1 import session_pb2 as pb
from flotilla_trainer.objective.pair_objective import PairObjective
from flotilla_trainer.objective.update_objective import UpdateObjective
from flotilla_trainer.objective.value_update import ValueUpdate

SessionObjective = UpdateObjective | PairObjective | ValueUpdate


def session_objective(objective: pb.Objective) -> SessionObjective:
    """Of a checked specification."""
    if objective.HasField("preference"):
        return PairObjective(objective.preference)
    if objective.HasField("value"):
        return ValueUpdate(objective.value)
    return UpdateObjective(objective)

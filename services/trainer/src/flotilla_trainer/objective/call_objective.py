"""The objective of one ForwardBackward call: the session's, with a loss of the call's own.

Invariant: a call changes the loss and nothing else, so calls of one step differ in what they descend on, never in how
advantages, corrections and means are made.
"""

from __future__ import annotations

from flotilla.trainer.v1 import session_pb2 as pb
from flotilla_core.errors import InvalidRequest
from flotilla_trainer.objective.settings import check_objective
from flotilla_trainer.rank.objective_settings import SUPERVISED


def call_objective(objective: pb.Objective, loss: pb.Function) -> pb.Objective:
    """`objective` with `loss` in its place; checked."""
    if objective.HasField("value"):
        raise InvalidRequest(
            f"a critic cannot descend on {loss.name or 'a loss without a name'}",
            where="loss",
            next_step="leave it empty: a critic has the loss of its values alone",
        )
    changed = pb.Objective()
    if loss.name == SUPERVISED:
        if loss.parameters.fields:
            raise InvalidRequest(f"{SUPERVISED} takes no parameters", where="loss.parameters")
        changed.sft.SetInParent()
        return changed
    if not objective.HasField("policy"):
        raise InvalidRequest(
            f"a session without a policy objective cannot descend on {loss.name or 'a loss without a name'}",
            where="loss",
            why="it says neither how advantages are made nor at which temperature samples are drawn",
            next_step="open the session with a policy objective; it can take sft as the loss of a call",
        )
    changed.CopyFrom(objective)
    changed.policy.loss.CopyFrom(loss)
    check_objective(changed)
    return changed

"""The objective that a session names, and that of a ForwardBackward call: the session's, with a loss of its own.

Invariant: a call changes the loss and nothing else, so calls of one step differ in what they descend on, never in how
advantages, corrections and means are made.
"""

from __future__ import annotations

from flotilla.trainer.v1 import session_pb2 as pb
from flotilla_core.errors import InvalidRequest
from flotilla_trainer.objective.base import SessionObjective
from flotilla_trainer.objective.pairs import PairObjective, RewardUpdate
from flotilla_trainer.objective.policy import PolicyObjective
from flotilla_trainer.objective.settings import check_objective
from flotilla_trainer.objective.value import ValueUpdate
from flotilla_trainer.wire.settings import SUPERVISED

LOSSES_OF_THEIR_OWN = {"value": "a critic", "reward_model": "a reward model"}
"""What learns by them, which has no vocabulary that another loss would be about."""


def session_objective(objective: pb.Objective) -> SessionObjective:
    """Make the objective of a checked specification."""
    if objective.HasField("preference"):
        return PairObjective(objective.preference)
    if objective.HasField("reward_model"):
        return RewardUpdate(objective.reward_model)
    if objective.HasField("value"):
        return ValueUpdate(objective.value)
    return PolicyObjective(objective)


def call_objective(objective: pb.Objective, loss: pb.Function) -> pb.Objective:
    """`objective` with `loss` in its place; checked."""
    learner = LOSSES_OF_THEIR_OWN.get(objective.WhichOneof("kind") or "")
    if learner is not None:
        raise InvalidRequest(
            f"{learner} cannot descend on {loss.name or 'a loss without a name'}",
            where="loss",
            next_step=f"leave it empty: {learner} has one loss alone",
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


def check_takes_parts(objective: pb.Objective) -> None:
    """Refuse an objective that has to see an update as a whole."""
    advantage = objective.policy.advantage
    parameters, normalization = advantage.function.parameters.fields, advantage.reward_normalization
    running = {
        "baseline": "baseline" in parameters and parameters["baseline"].string_value == "running",
        "reward_normalization": pb.REWARD_STATISTICS_RUNNING in (normalization.mean, normalization.std),
    }
    for key, is_running in running.items():
        if is_running:
            raise InvalidRequest(
                f"a call is a part of an update, and a running {key} needs whole ones",
                where=f"spec.objective.policy.advantage.{key}",
                next_step="take group or batch, or send advantages of your own",
            )

"""The objective that a session names, and that of a ForwardBackward call: the session's, with a loss of its own.

Invariant: a call changes the loss and nothing else, so calls of one step differ in what they descend on, never in how
advantages, corrections and means are made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from flotilla.trainer.v1 import session_pb2 as pb
from flotilla_core.config import ConfigModel, DpoConfig, PolicyConfig, RewardModelConfig
from flotilla_core.config.advantages import GrpoAdvantage
from flotilla_core.config.losses import LossSection
from flotilla_core.errors import InvalidRequest
from flotilla_core.structs import to_json
from flotilla_trainer.batch.packing import Sequences
from flotilla_trainer.batch.update_batch import UpdateBatch
from flotilla_trainer.objective.base import TOKEN_MEAN, SessionObjective
from flotilla_trainer.objective.pairs import PairObjective, RewardUpdate
from flotilla_trainer.objective.policy import PolicyObjective
from flotilla_trainer.objective.policy_columns import part_weights
from flotilla_trainer.objective.value import ValueUpdate
from flotilla_trainer.wire.objective import (
    REWARD_MODEL,
    SFT,
    VALUE,
    ObjectiveSettings,
    read_section,
)
from flotilla_trainer.wire.user_functions import check_user_function, is_user_function

LOSSES_OF_THEIR_OWN = {VALUE: "a critic", REWARD_MODEL: "a reward model"}
"""The models that learn by losses of their own: they have no vocabulary that another loss would be about."""


class CallSection(ConfigModel):
    """The part of a section that a ForwardBackward call says in place of the session's `algorithm.loss`."""

    loss: LossSection
    """The loss that the call descends on."""


class SupervisedObjective(SessionObjective):
    """Raises the log-probabilities of given answers; every trained token counts the same."""

    def sequences(
        self,
        batch: UpdateBatch,
        seed: int,
        policy: NDArray[np.float32] | None = None,
        parts: Sequence[NDArray[np.bool_]] = (),
    ) -> tuple[Sequences, dict[str, float]]:
        """Make sequences with the weights of their tokens, each part with its own denominator; there are no metrics."""
        return batch.sequences({"weights": part_weights(TOKEN_MEAN, batch, batch.trained, parts)}), {}


def session_objective(settings: ObjectiveSettings) -> SessionObjective:
    """Make the objective of a checked specification."""
    if isinstance(settings.section, DpoConfig):
        return PairObjective(settings.section)
    if isinstance(settings.section, RewardModelConfig):
        return RewardUpdate(settings.section)
    if settings.kind == SFT:
        return SupervisedObjective()
    return ValueUpdate(settings) if settings.kind == VALUE else PolicyObjective(settings)


def call_objective(settings: ObjectiveSettings, loss: pb.Function) -> ObjectiveSettings:
    """`settings` with `loss` in its place; checked."""
    learner = LOSSES_OF_THEIR_OWN.get(settings.kind)
    if learner is not None:
        raise InvalidRequest(
            f"{learner} cannot descend on {loss.name or 'a loss without a name'}",
            where="loss",
            next_step=f"leave it empty: {learner} has one loss alone",
        )
    if loss.name == SFT:
        if loss.parameters.fields:
            raise InvalidRequest(f"{SFT} takes no parameters", where="loss.parameters")
        return ObjectiveSettings()
    if settings.policy is None:
        raise InvalidRequest(
            f"a session without a policy objective cannot descend on {loss.name or 'a loss without a name'}",
            where="loss",
            why="it says neither how advantages are made nor at which temperature samples are drawn",
            next_step="open the session with a policy objective; it can take sft as the loss of a call",
        )
    parameters = to_json(loss.parameters)
    if is_user_function(loss.name):
        check_user_function(loss.name)
        parameters = {"parameters": parameters}
    own = read_section(CallSection, {"loss": {"type": loss.name, **parameters}}, "request").loss
    # A section that is made of sections takes nothing from its preset.
    section = read_section(PolicyConfig, dict(settings.policy) | {"loss": own}, f"loss {loss.name}")
    return replace(settings, section=section)


def check_takes_parts(settings: ObjectiveSettings) -> None:
    """Refuse an objective that has to see an update as a whole."""
    if settings.policy is None:
        return
    advantage = settings.policy.advantage
    normalization = advantage.reward_normalization
    running = {
        "baseline": isinstance(advantage, GrpoAdvantage) and advantage.baseline == "running",
        "reward_normalization": normalization is not None and normalization.remembers,
    }
    for key, is_running in running.items():
        if is_running:
            raise InvalidRequest(
                f"a call is a part of an update, and a running {key} needs whole ones",
                where=f"spec.objective.section.advantage.{key}",
                next_step="take group or batch, or send advantages of your own",
            )

"""The specification of a session, checked: its sections as the front and the ranks read them."""

from __future__ import annotations

from typing import Any

from flotilla.trainer.v1 import session_pb2 as pb
from flotilla_core import roles
from flotilla_core.config import BatchingConfig, LoraConfig, OptimizerConfig
from flotilla_core.errors import FailedPrecondition, InvalidRequest
from flotilla_trainer.batch.packing import Layout
from flotilla_trainer.batch.update_batch import StepPlan
from flotilla_trainer.wire.objective import (
    POLICY,
    PREFERENCE,
    REWARD_MODEL,
    SFT,
    VALUE,
    ObjectiveSettings,
    read_section,
)
from flotilla_trainer.wire.settings import SessionSettings

SEED_BITS = 63


ROLE_NAMES = {
    pb.ROLE_UNSPECIFIED: roles.POLICY,
    pb.ROLE_POLICY: roles.POLICY,
    pb.ROLE_CRITIC: roles.CRITIC,
    pb.ROLE_REFERENCE: roles.REFERENCE,
    pb.ROLE_TEACHER: roles.TEACHER,
    pb.ROLE_REWARD_MODEL: roles.REWARD_MODEL,
}
OBJECTIVES = {roles.POLICY: (SFT, POLICY, PREFERENCE, REWARD_MODEL), roles.CRITIC: (VALUE,)}
FROM_SCORES = (PREFERENCE, REWARD_MODEL)
"""Objectives whose gradients are made from scores before the update."""


def scoring_batching(spec: pb.SessionSpec, role: str) -> BatchingConfig:
    """Return the memory limits of a session that only scores; refused where a gang of this role cannot serve it."""
    _check_role(spec, role)
    if spec.HasField("objective") or spec.HasField("optimizer"):
        raise InvalidRequest(
            f"a {role} does not learn", where="spec", why="it has an objective or an optimizer"
        )
    return read_section(BatchingConfig, spec.batching, "spec.batching")


def session_settings(spec: pb.SessionSpec, role: str = roles.POLICY) -> SessionSettings:
    """Return what a session learns; refused where a gang of this role cannot serve it, naming the field."""
    _check_role(spec, role)
    objective = ObjectiveSettings.from_wire(spec.objective)
    if objective.kind not in OBJECTIVES[role]:
        raise InvalidRequest(
            f"a {role} does not learn by {objective.kind}",
            where="spec.objective.kind",
            next_step=f"set {' or '.join(OBJECTIVES[role])}",
        )
    if spec.HasField("lora") and objective.kind == REWARD_MODEL:
        raise InvalidRequest(
            "a reward model has no adapters",
            where="spec.lora",
            why="they are trained with a language model only",
            next_step="leave lora out",
        )
    optimizer = read_section(OptimizerConfig, spec.optimizer, "spec.optimizer")
    if objective.kind in FROM_SCORES and StepPlan.of(optimizer).several:
        raise InvalidRequest(
            "preferences are learned in one step an update",
            where="spec.optimizer",
            why="their gradients come from scores before the update, which are old after its first step",
            next_step="leave steps_per_update and epochs_per_update at 1, and send smaller updates",
        )
    if not spec.total_updates:
        raise InvalidRequest("total_updates is out of range or missing", where="spec.total_updates")
    return SessionSettings(
        objective=objective,
        optimizer=optimizer,
        batching=read_section(BatchingConfig, spec.batching, "spec.batching"),
        seed=spec.seed % 2**SEED_BITS,
        total_updates=spec.total_updates,
        lora=read_section(LoraConfig, spec.lora, "spec.lora") if spec.HasField("lora") else None,
    )


def _check_role(spec: pb.SessionSpec, role: str) -> None:
    asked = ROLE_NAMES.get(spec.role)
    if asked != roles.kind_of_role(role):
        raise FailedPrecondition(
            f"this gang is the {role}'s, the session is for {asked or spec.role}",
            where="spec.role",
            next_step="ask the gang of that role: its registration says which it has",
        )
    if spec.HasField("lora") and role != roles.POLICY:
        raise InvalidRequest(
            f"a {role} has no adapters",
            where="spec.lora",
            why="only the policy is trained with them",
            next_step="leave lora out",
        )


def layout(batching: BatchingConfig, facts: dict[str, Any], ranks: int) -> Layout:
    """Say how updates are laid out on ranks that hold a model with these facts."""
    refusal = facts["packing_refusal"]
    if refusal and batching.packing == "on":
        raise FailedPrecondition(
            "sequences of this model cannot be packed",
            where="spec.batching.packing",
            why=refusal,
            next_step="set batching.packing to auto or off: padded rows give the same result",
        )
    # On the CPU only long and uneven sequences gain; short ones lose a little in many small kernels.
    automatic = batching.packing == "auto" and facts["device"] != "cpu"
    return Layout(
        budget=batching.microbatch_budget,
        ranks=ranks,
        packed=not refusal and (automatic or batching.packing == "on"),
        crossover_tokens=facts["attention_crossover_tokens"],
    )

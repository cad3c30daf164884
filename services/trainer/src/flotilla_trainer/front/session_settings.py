"""The run's specification, checked, as the ranks need it."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from flotilla.trainer.v1 import session_pb2 as pb
from flotilla_core import roles
from flotilla_core.errors import FailedPrecondition, InvalidRequest
from flotilla_trainer.batch.packing import Layout
from flotilla_trainer.batch.step_plan import StepPlan
from flotilla_trainer.objective.settings import check_objective, objective_settings
from flotilla_trainer.wire.settings import LoraSettings, SessionSettings

SEED_BITS = 63


ROLE_NAMES = {
    pb.ROLE_UNSPECIFIED: roles.POLICY,
    pb.ROLE_POLICY: roles.POLICY,
    pb.ROLE_CRITIC: roles.CRITIC,
    pb.ROLE_REFERENCE: roles.REFERENCE,
    pb.ROLE_TEACHER: roles.TEACHER,
}
OBJECTIVES = {roles.POLICY: ("sft", "policy", "preference", "reward_model"), roles.CRITIC: ("value",)}
FROM_SCORES = ("preference", "reward_model")
"""Objectives whose gradients are made from scores before the update."""


def check_spec(spec: pb.SessionSpec, role: str = roles.POLICY) -> None:
    """Refuse a specification that a gang of this role cannot serve, naming the field."""
    asked = ROLE_NAMES.get(spec.role)
    if asked != roles.kind_of_role(role):
        raise FailedPrecondition(
            f"this gang is the {role}'s, the session is for {asked or spec.role}",
            where="spec.role",
            next_step="ask the gang of that role: its registration says which it has",
        )
    _check_rules(
        {
            "batching.tokens_per_microbatch": spec.batching.tokens_per_microbatch > 0,
            "batching.logprob_chunk_tokens": spec.batching.logprob_chunk_tokens > 0,
        }
    )
    if spec.HasField("lora") and role != roles.POLICY:
        raise InvalidRequest(
            f"a {role} has no adapters",
            where="spec.lora",
            why="only the policy is trained with them",
            next_step="leave lora out",
        )
    if spec.HasField("lora") and spec.objective.HasField("reward_model"):
        raise InvalidRequest(
            "a reward model has no adapters",
            where="spec.lora",
            why="they are trained beside a language model alone",
            next_step="leave lora out",
        )
    if role in roles.LEARNING:
        _check_learning(spec, role)
    elif spec.HasField("objective") or spec.HasField("optimizer"):
        raise InvalidRequest(
            f"a {role} learns nothing", where="spec", why="it has an objective or an optimizer"
        )


def _check_learning(spec: pb.SessionSpec, role: str) -> None:
    check_objective(spec.objective)
    if spec.objective.WhichOneof("kind") not in OBJECTIVES[role]:
        raise InvalidRequest(
            f"a {role} does not learn by {spec.objective.WhichOneof('kind')}",
            where="spec.objective",
            next_step=f"set {' or '.join(OBJECTIVES[role])}",
        )
    optimizer = spec.optimizer
    if spec.objective.WhichOneof("kind") in FROM_SCORES and StepPlan.of(optimizer).several:
        raise InvalidRequest(
            "preferences are learned in one step an update",
            where="spec.optimizer",
            why="their gradients come from scores before the update, which are old after its first step",
            next_step="leave steps_per_update and epochs_per_update at 1, and send smaller updates",
        )
    rules = {
        "optimizer.learning_rate": _number(optimizer.learning_rate, above=0),
        "optimizer.beta1": 0 <= optimizer.beta1 < 1,
        "optimizer.beta2": 0 <= optimizer.beta2 < 1,
        "optimizer.epsilon": _number(optimizer.epsilon, above=0),
        "optimizer.weight_decay": _number(optimizer.weight_decay),
        "optimizer.max_grad_norm": _number(optimizer.max_grad_norm),
        "optimizer.final_lr_ratio": 0 <= optimizer.final_lr_ratio <= 1,
        "optimizer.schedule": optimizer.schedule != pb.SCHEDULE_UNSPECIFIED,
        "total_updates": spec.total_updates > 0,
    }
    if spec.HasField("lora"):
        rules["lora.rank"] = spec.lora.rank > 0
        rules["lora.alpha"] = _number(spec.lora.alpha, above=0)
    _check_rules(rules)


def _check_rules(rules: dict[str, bool]) -> None:
    for name, holds in rules.items():
        if not holds:
            raise InvalidRequest(f"{name} is out of range or missing", where=f"spec.{name}")


def rank_settings(spec: pb.SessionSpec) -> dict[str, Any]:
    """The fields of the command that opens the session on the ranks."""
    optimizer = spec.optimizer
    settings = SessionSettings(
        objective=objective_settings(spec.objective),
        beta1=optimizer.beta1,
        beta2=optimizer.beta2,
        epsilon=optimizer.epsilon,
        weight_decay=optimizer.weight_decay,
        max_grad_norm=optimizer.max_grad_norm,
        chunk_tokens=spec.batching.logprob_chunk_tokens,
        activation_checkpointing=spec.batching.activation_checkpointing,
        activation_offload=spec.batching.activation_offload,
        offload=optimizer.offload,
        seed=spec.seed % 2**SEED_BITS,
        lora=_lora_settings(spec.lora) if spec.HasField("lora") else None,
    )
    return asdict(settings)


def layout(batching: pb.Batching, facts: dict[str, Any], ranks: int) -> Layout:
    """How updates are laid out on ranks that hold a model with these facts."""
    refusal = facts["packing_refusal"]
    if refusal and batching.packing == pb.PACKING_ON:
        raise FailedPrecondition(
            "sequences of this model cannot be packed",
            where="spec.batching.packing",
            why=refusal,
            next_step="set batching.packing to auto or off: padded rows give the same result",
        )
    # On the CPU only long and uneven sequences gain; short ones lose a little in many small kernels.
    automatic = batching.packing == pb.PACKING_UNSPECIFIED and facts["device"] != "cpu"
    return Layout(
        budget=batching.tokens_per_microbatch,
        ranks=ranks,
        packed=not refusal and (automatic or batching.packing == pb.PACKING_ON),
        crossover_tokens=facts["attention_crossover_tokens"],
    )


def _lora_settings(lora: pb.Lora) -> LoraSettings:
    return LoraSettings(lora.rank, lora.alpha, tuple(lora.targets), lora.adapter)


def _number(value: float, above: float | None = None) -> bool:
    return math.isfinite(value) and (value >= 0 if above is None else value > above)

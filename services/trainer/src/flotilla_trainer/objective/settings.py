"""A session's objective on the wire, checked, as the ranks need it.

Invariants: what a run's configuration refuses is refused here, by the very models that check it; a field of the wire
has the name of its key, and a value of an enum that of its choice, so a new key needs nothing here.
"""

from __future__ import annotations

import math
from typing import Any, cast

from google.protobuf.descriptor import EnumDescriptor
from google.protobuf.message import Message
from pydantic import ValidationError

from flotilla.trainer.v1 import session_pb2 as pb
from flotilla_core.config import PolicyConfig
from flotilla_core.errors import InvalidRequest
from flotilla_core.structs import to_json
from flotilla_trainer.objective.function_config import ADVANTAGE, LOSS, checked_section
from flotilla_trainer.objective.pairs import LOSSES as PAIR_LOSSES
from flotilla_trainer.objective.policy_columns import ESTIMATORS
from flotilla_trainer.wire.settings import FORWARD, REVERSE, REWARD, VALUE, ObjectiveSettings
from flotilla_trainer.wire.user_functions import check_user_function, is_user_function

IMPORTANCE = {
    pb.IMPORTANCE_UNSPECIFIED: "",
    pb.IMPORTANCE_TOKEN: "token",
    pb.IMPORTANCE_SEQUENCE: "sequence",
    pb.IMPORTANCE_ICEPOP: "icepop",
    pb.IMPORTANCE_ICEPOP_SEQUENCE: "icepop_sequence",
    pb.IMPORTANCE_SEGMENT: "segment",
}
TEACHER_DIVERGENCES = {
    pb.TEACHER_DIVERGENCE_UNSPECIFIED: "",
    pb.TEACHER_DIVERGENCE_FORWARD: FORWARD,
    pb.TEACHER_DIVERGENCE_REVERSE: REVERSE,
}
PLACE = "spec.objective.policy"
VALUE_PLACE = "spec.objective.value.policy"

OF_THE_ROLLOUTS = ("temperature", "max_response_tokens")
ZERO_IS_THE_DEFAULT = (
    "constant_tokens",
    "horizon_samples",
    "importance_cap",
    "importance_floor",
    "coefficient",
)
"""Numbers that mean nothing unless another field is set."""


def check_objective(objective: pb.Objective) -> None:
    """Refuse an objective that cannot be trained, naming the field."""
    kind = objective.WhichOneof("kind")
    if kind is None:
        raise InvalidRequest(
            "no objective is given",
            where="spec.objective",
            next_step="set sft, policy, preference, reward_model or value",
        )
    if kind == "policy":
        _check_policy(objective.policy, PLACE)
    elif kind == "preference":
        _check_rules(_preference_rules(objective.preference), "spec.objective.preference")
    elif kind == "reward_model":
        center = objective.reward_model.center_coefficient
        rules = {"center_coefficient": math.isfinite(center) and center >= 0}
        _check_rules(rules, "spec.objective.reward_model")
    elif kind == "value":
        _check_policy(objective.value.policy, VALUE_PLACE)
        _check_rules(_value_rules(objective.value), "spec.objective.value")


def _check_policy(policy: pb.PolicyObjective, place: str) -> None:
    checked_section(LOSS, policy.loss, f"{place}.loss")
    checked_section(ADVANTAGE, policy.advantage.function, f"{place}.advantage.function")
    _check_rules(_rules(policy), place)
    policy_config(policy, place)
    for function in (policy.loss, policy.advantage.function):
        if is_user_function(function.name):
            check_user_function(function.name)


def _check_rules(rules: dict[str, bool], place: str) -> None:
    for name, holds in rules.items():
        if not holds:
            raise InvalidRequest(f"{name} is out of range or missing", where=f"{place}.{name}")


def objective_settings(objective: pb.Objective) -> ObjectiveSettings:
    """What the ranks have to know of a checked objective."""
    if objective.HasField("preference"):
        return ObjectiveSettings(keeps_reference=not objective.preference.reference_free)
    if objective.HasField("reward_model"):
        return ObjectiveSettings(loss=REWARD)
    if objective.HasField("value"):
        clip = objective.value.clip if objective.value.HasField("clip") else None
        return ObjectiveSettings(loss=VALUE, parameters={"clip": clip})
    if not objective.HasField("policy"):
        return ObjectiveSettings()
    policy, correction = objective.policy, objective.policy.correction
    loss = checked_section(LOSS, policy.loss, f"{PLACE}.loss")
    selects = ("share", "covariance_low", "covariance_high")
    return ObjectiveSettings(
        loss=policy.loss.name,
        # What selects tokens is used up by the front, which sees the whole update.
        parameters={name: value for name, value in loss.arguments.items() if name not in selects},
        temperature=policy.temperature,
        ratio_to_trainer=correction.proximal in (pb.PROXIMAL_TRAINER, pb.PROXIMAL_INTERPOLATED),
        importance=IMPORTANCE[correction.importance],
        importance_cap=correction.importance_cap,
        importance_floor=correction.importance_floor,
        sequence_low=correction.sequence_low if correction.HasField("sequence_low") else None,
        sequence_high=correction.sequence_high if correction.HasField("sequence_high") else None,
        rejections=[each.model_dump() for each in policy_config(policy, PLACE).correction.rejection],
        kl_estimator=ESTIMATORS[policy.kl.estimator] if policy.kl.placement else "",
        keeps_reference=bool(policy.kl.placement) and not policy.kl.reference_is_sent,
        teacher_divergence=TEACHER_DIVERGENCES[policy.teacher.divergence],
        teacher_tail=policy.teacher.tail,
        entropy_coefficient=policy.entropy_coefficient,
        fail_at=correction.fail_at if correction.HasField("fail_at") else None,
    )


def _preference_rules(preference: pb.PreferenceObjective) -> dict[str, bool]:
    smoothing = preference.label_smoothing
    return {
        "loss": preference.loss in PAIR_LOSSES,
        "beta": _positive(preference.beta),
        "label_smoothing": 0 <= smoothing < 0.5
        and (not smoothing or preference.loss == pb.PREFERENCE_LOSS_SIGMOID),
    }


def _rules(policy: pb.PolicyObjective) -> dict[str, bool]:
    """What has to hold, by the name of the field."""
    kl, correction, overlong = policy.kl, policy.correction, policy.advantage.overlong
    teacher, has_teacher = policy.teacher, policy.HasField("teacher")
    constant = policy.aggregation.constant_tokens or policy.max_response_tokens
    return {
        "temperature": _positive(policy.temperature),
        "aggregation.type": policy.aggregation.type != pb.AGGREGATION_TYPE_UNSPECIFIED,
        "aggregation.constant_tokens": constant > 0
        or policy.aggregation.type != pb.AGGREGATION_TYPE_CONSTANT,
        "max_response_tokens": policy.max_response_tokens > 0 or not policy.advantage.HasField("overlong"),
        "advantage.overlong": not policy.advantage.HasField("overlong")
        or (overlong.buffer_tokens > 0 and _positive(overlong.penalty)),
        "kl.estimator": not kl.placement or kl.estimator != pb.KL_ESTIMATOR_UNSPECIFIED,
        "kl.placement": kl.placement != pb.KL_PLACEMENT_REWARD or kl.estimator != pb.KL_ESTIMATOR_FULL,
        "kl.reference_is_sent": not kl.reference_is_sent or kl.estimator != pb.KL_ESTIMATOR_FULL,
        "kl.coefficient": math.isfinite(kl.coefficient) and kl.coefficient >= 0,
        "kl.target": not kl.HasField("target") or (_positive(kl.target) and kl.horizon_samples > 0),
        "correction.importance_cap": not correction.importance or _positive(correction.importance_cap),
        "correction.staleness_decay": 0 < correction.staleness_decay <= 1,
        "teacher.divergence": not has_teacher or bool(teacher.divergence),
        "teacher.top_k": not has_teacher or teacher.top_k > 0,
        "teacher.coefficient": not has_teacher or _positive(teacher.coefficient),
        "entropy_coefficient": math.isfinite(policy.entropy_coefficient) and policy.entropy_coefficient >= 0,
    }


def _value_rules(value: pb.ValueObjective) -> dict[str, bool]:
    """Of a critic; a coefficient that adapts would have to adapt to the same number in two gangs."""
    return {
        "clip": not value.HasField("clip") or _positive(value.clip),
        "policy.advantage.function": value.policy.advantage.function.name == "gae",
        "policy.kl.target": not value.policy.kl.HasField("target"),
    }


def _positive(value: float) -> bool:
    return math.isfinite(value) and value > 0


def policy_config(policy: pb.PolicyObjective, place: str) -> PolicyConfig:
    """What a run would have to write for this objective; refused where no run may."""
    written = {name: value for name, value in _section(policy, place).items() if name not in OF_THE_ROLLOUTS}
    if "advantage" in written:
        written["advantage"] |= written["advantage"].pop("function", {})
    if "kl" in written:
        written["kl"]["reference"] = "service" if written["kl"].pop("reference_is_sent") else "frozen"
    if policy.advantage.function.name == "gae":
        # The critic is a session of its own: the values that it gives come with the samples.
        written["critic"] = {}
    try:
        return PolicyConfig.model_validate(written)
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, item['loc']))} {item['msg']}".strip() for item in error.errors()]
        raise InvalidRequest(
            "no run may have this objective",
            where=place,
            why="; ".join(problem.removeprefix("Value error, ") for problem in problems),
            next_step="docs/algorithms.md says what goes together",
        ) from error


def _section(message: Message, place: str) -> dict[str, Any]:
    """The fields of a message that say something, by the names of their keys."""
    written: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value, where = getattr(message, field.name), f"{place}.{field.name}"
        if field.is_repeated:
            written[field.name] = [
                _section(item, where) if isinstance(item, Message) else item for item in value
            ]
        elif field.has_presence and not message.HasField(field.name):
            continue
        elif isinstance(value, pb.Function):
            written[field.name] = _function(value)
        elif isinstance(value, Message):
            written[field.name] = _section(value, where)
        elif field.enum_type is not None:
            if value:
                # The stubs have a second class for descriptors that are made in C.
                written[field.name] = _choice(cast(EnumDescriptor, field.enum_type), value, where)
        elif value or field.name not in ZERO_IS_THE_DEFAULT:
            written[field.name] = value
    # What the wire does not say is off, even where a run that does not say it has it on.
    return {"fail_at": None, "warn_at": None} | written if isinstance(message, pb.Correction) else written


def _function(function: pb.Function) -> dict[str, Any]:
    parameters = to_json(function.parameters)
    if is_user_function(function.name):
        parameters = {"parameters": parameters}
    return {"type": function.name, **parameters}


def _choice(kind: EnumDescriptor, value: int, where: str) -> str:
    """KL_ESTIMATOR_K3 is k3."""
    if value not in kind.values_by_number:
        raise InvalidRequest(f"{value} is no {kind.name}", where=where)
    prefix = kind.values_by_number[0].name.removesuffix("UNSPECIFIED")
    return str(kind.values_by_number[value].name.removeprefix(prefix).lower())

"""A policy objective on the wire as the section `algorithm` of a run, so that one set of rules holds for both.

Invariants: what a run's configuration refuses is refused here, by the very models that check it; a field of the wire
has the name of its key, and a value of an enum that of its choice, so a new key needs nothing here.
"""

from __future__ import annotations

from typing import Any, cast

from google.protobuf.descriptor import EnumDescriptor
from google.protobuf.message import Message
from pydantic import ValidationError

from flotilla.trainer.v1 import session_pb2 as pb
from flotilla_core.config import PolicyConfig
from flotilla_core.errors import InvalidRequest
from flotilla_core.structs import to_json
from flotilla_trainer.wire.user_functions import is_user_function

OF_THE_ROLLOUTS = ("temperature", "max_response_tokens")
ZERO_IS_THE_DEFAULT = (
    "constant_tokens",
    "horizon_samples",
    "importance_cap",
    "importance_floor",
    "coefficient",
)
"""Numbers that mean nothing unless another field is set."""


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

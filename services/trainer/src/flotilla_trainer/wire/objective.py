"""A session's objective: its kind, and the section of the run's configuration that says the rest.

Invariants: front and ranks check a section of a session by the model that checks it in a run's configuration, and
both read it unchanged. So a key costs its line in the model and its use, and nothing on the way. A refusal names the
place in the session's specification and every reason.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, TypeVar

from google.protobuf import struct_pb2
from pydantic import ValidationError

from flotilla.trainer.v1 import session_pb2 as pb
from flotilla_core.config import ConfigModel, DpoConfig, PolicyConfig, RewardModelConfig, SftConfig
from flotilla_core.config.document import join
from flotilla_core.config.loading import MOST_EXPLAINED, found_problems
from flotilla_core.errors import InvalidRequest
from flotilla_core.structs import to_json
from flotilla_trainer.wire.user_functions import check_user_function, is_user_function

SFT, POLICY, PREFERENCE, REWARD_MODEL, VALUE = "sft", "policy", "preference", "reward_model", "value"

Section = PolicyConfig | SftConfig | DpoConfig | RewardModelConfig
SectionModel = TypeVar("SectionModel", bound=ConfigModel)

SECTIONS: dict[str, type[Section]] = {
    SFT: SftConfig,
    POLICY: PolicyConfig,
    PREFERENCE: DpoConfig,
    REWARD_MODEL: RewardModelConfig,
    VALUE: PolicyConfig,
}
PLACE = "spec.objective"


@dataclass(frozen=True)
class ObjectiveSettings:
    """The objective of a session: its kind, its section, and the limits of its rollouts."""

    kind: str = SFT
    section: Section = field(default_factory=SftConfig)
    temperature: float = 1.0
    """The temperature of the rollouts; given answers are scored at 1."""
    max_response_tokens: int = 0
    """Length limit of the rollouts; 0 where nothing asks for it."""

    @classmethod
    def from_wire(cls, objective: pb.Objective) -> ObjectiveSettings:
        """Read and check what a specification says; the error names the place."""
        if objective.kind not in SECTIONS:
            raise InvalidRequest(
                f"{objective.kind!r} is no objective" if objective.kind else "no objective is given",
                where=f"{PLACE}.kind",
                next_step=f"set {', '.join(SECTIONS)}",
            )
        section = read_section(SECTIONS[objective.kind], objective.section, f"{PLACE}.section")
        if not isinstance(section, PolicyConfig):
            return cls(objective.kind, section)
        settings = cls(objective.kind, section, objective.temperature, objective.max_response_tokens)
        settings._check_rollouts()
        for function in (section.loss.type, section.advantage.type):
            if is_user_function(function):
                check_user_function(function)
        return settings

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> ObjectiveSettings:
        """Read the fields of a command of the front."""
        section = SECTIONS[fields["kind"]].model_validate(fields["section"])
        return cls(**{**fields, "section": section})

    def fields(self) -> dict[str, Any]:
        """Write the fields of a command to the ranks."""
        return {**vars(self), "section": self.section.model_dump(mode="json")}

    @property
    def policy(self) -> PolicyConfig | None:
        """The section where rollouts of a policy are learned from, by the policy or by its critic; None elsewhere."""
        return self.section if isinstance(self.section, PolicyConfig) else None

    @property
    def keeps_reference(self) -> bool:
        """Return whether the ranks keep the weights that the session started from."""
        if isinstance(self.section, DpoConfig):
            return not self.section.reference_free
        if self.kind != POLICY or self.policy is None:
            return False
        return self.policy.kl.placement != "none" and self.policy.kl.reference == "frozen"

    @property
    def compares_distributions(self) -> bool:
        """Return whether the divergence needs the whole distribution of the reference at each token."""
        return self.kind == POLICY and self.policy is not None and self.policy.kl.estimator == "full"

    def _check_rollouts(self) -> None:
        """Refuse what the section cannot know: the sampling, and what a critic needs of it."""
        assert self.policy is not None
        aggregation = self.policy.aggregation
        constant = aggregation.type == "constant" and aggregation.constant_tokens is None
        rules = {
            "temperature": math.isfinite(self.temperature) and self.temperature > 0,
            "max_response_tokens": self.max_response_tokens > 0
            or not (constant or self.policy.advantage.overlong is not None),
            "section.critic": self.kind != VALUE or self.policy.critic is not None,
        }
        for name, holds in rules.items():
            if not holds:
                raise InvalidRequest(f"{name} is out of range or missing", where=f"{PLACE}.{name}")


def read_section(
    model: type[SectionModel], written: struct_pb2.Struct | dict[str, Any], place: str
) -> SectionModel:
    """Read a section from a Struct of the wire, or from the values that a call changed."""
    values = to_json(written) if isinstance(written, struct_pb2.Struct) else written
    try:
        return model.model_validate(values)
    except ValidationError as error:
        problems = found_problems(error, model, values)
        path, _ = problems[0]
        raise InvalidRequest(
            "no run may have this section",
            where=f"{place}.{join(path)}" if path and len(problems) == 1 else place,
            why="; ".join(dict.fromkeys(message for _, message in problems[:MOST_EXPLAINED])),
            next_step="docs/algorithms.md says what goes together, docs/reference/config.md what each key takes",
        ) from error

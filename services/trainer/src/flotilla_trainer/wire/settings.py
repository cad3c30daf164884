"""Settings that the front sends to the ranks: what a rank is at its start, and what a session asks of it.

Invariants: the front makes them from checked specifications, and those of a session are equal on all ranks; everything
that differs between two stacks or two ranks is in a rank's setup, for a rank reads no configuration of its own;
everything that depends on a whole update comes with the update. The head is what stands on the body of the model that
a gang holds; the ranks build the model anew where a session needs another head.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from flotilla.trainer.v1 import session_pb2 as pb
from flotilla_core.roles import CRITIC

SUPERVISED = "sft"
VALUE = "value"
REWARD = "reward"
FULL_DIVERGENCE = "full"
FORWARD, REVERSE = "forward", "reverse"
"""Of a divergence from a teacher: by the teacher's probabilities, or by the policy's."""

VOCABULARY_HEAD = "vocabulary"
VALUE_HEAD = "values"
REWARD_HEAD = "reward"


@dataclass(frozen=True)
class RankSetup:
    """What a rank is told when it starts.

    One rank's place in its gang, and the model to load.
    """

    rank: int
    ranks: int
    head: str
    """What stands on the body of the model: model_heads."""
    rendezvous: str
    """File through which the ranks of this gang find each other; new for every gang."""
    backend: str
    dtype: str
    replicate: int
    sequence_parallel: int
    compile: str
    model: str
    instance_id: str
    otlp: tuple[str, ...]
    token: str | None = field(repr=False)
    """The stack's secret, which signs the spans of the rank."""

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> RankSetup:
        """Read the fields of the first command."""
        return cls(**{**fields, "otlp": tuple(fields["otlp"])})


@dataclass(frozen=True)
class ObjectiveSettings:
    """What the ranks have to know of a session's objective.

    Loss, correction and bonuses of one session.
    """

    loss: str = SUPERVISED
    """`sft` (minus the weighted log-probabilities), `value`, `reward`, a policy loss of ours, or path.py:function."""
    parameters: dict[str, Any] = field(default_factory=dict)
    temperature: float = 1.0
    ratio_to_trainer: bool = False
    """The ratio compares with the trainer's own log-probabilities before the update and not with the rollout's."""
    importance: str = ""
    """token, segment, sequence, icepop or icepop_sequence; empty is off."""
    importance_cap: float = 0.0
    importance_floor: float = 0.0
    sequence_low: float | None = None
    sequence_high: float | None = None
    rejections: list[dict[str, Any]] = field(default_factory=list)
    """Arguments of `within`, one set for each."""
    kl_estimator: str = ""
    """Of the divergence in the loss."""
    keeps_reference: bool = False
    """Whether the ranks keep the weights that the session started from."""
    teacher_divergence: str = ""
    """forward or reverse, over the tokens that a teacher finds likeliest; empty is off."""
    teacher_tail: bool = False
    """Whether all other tokens count as one more there."""
    entropy_coefficient: float = 0.0
    fail_at: float | None = None
    """Mean difference of probabilities from which an update is refused."""

    @property
    def compares_distributions(self) -> bool:
        """Whether the divergence is that of the whole distributions, which the reference has to give for each token."""
        return self.kl_estimator == FULL_DIVERGENCE

    @property
    def supervised(self) -> bool:
        """Whether the tokens are given answers, to be raised or lowered by the weights of the front."""
        return self.loss == SUPERVISED


@dataclass(frozen=True)
class LoraSettings:
    """What the ranks have to know of a session's adapters.

    Size, place and beginning of the adapters.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]
    """Ends of the names of linear layers; empty takes every one but the head."""
    adapter: str
    """Folder in the layout of peft; empty starts B at zero."""

    @property
    def scale(self) -> float:
        """Factor of B A."""
        return self.alpha / self.rank


def first_head(role: str) -> str:
    """That of a gang of this role before any session."""
    return VALUE_HEAD if role == CRITIC else VOCABULARY_HEAD


def head_for(role: str, spec: pb.SessionSpec) -> str:
    """That of a gang of this role while such a session is open."""
    return REWARD_HEAD if spec.objective.HasField("reward_model") else first_head(role)


@dataclass(frozen=True)
class SessionSettings:
    """Objective, optimizer and memory limits of one session."""

    objective: ObjectiveSettings
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float
    max_grad_norm: float
    chunk_tokens: int
    activation_checkpointing: bool
    activation_offload: bool
    offload: bool
    seed: int
    lora: LoraSettings | None = None
    """None trains all weights."""

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> SessionSettings:
        """Read the fields of the command that opens a session."""
        lora = fields["lora"]
        objective = ObjectiveSettings(**fields["objective"])
        return cls(**{**fields, "objective": objective, "lora": LoraSettings(**lora) if lora else None})

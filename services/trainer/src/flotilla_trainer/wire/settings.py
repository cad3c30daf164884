"""Settings that the front sends to the ranks: what a rank is at its start, and what a session asks of it.

Invariants: the front makes them from checked specifications, and those of a session are equal on all ranks; everything
that differs between two stacks or two ranks is in a rank's setup, for a rank reads no configuration of its own;
everything that depends on a whole update comes with the update. The head is the last layer of a gang's
model; the ranks build the model again where a session needs another head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flotilla_core import roles
from flotilla_core.config import BatchingConfig, LoraConfig, OptimizerConfig
from flotilla_trainer.wire.objective import REWARD_MODEL, ObjectiveSettings

VOCABULARY_HEAD = "vocabulary"
VALUE_HEAD = "values"
REWARD_HEAD = "reward"
SCORE_HEAD = "scores"
SHARDS = "shards"
"""The folder inside a checkpoint that ranks write to, each a file."""
OPEN_STORE = "open_store"
"""The command before a setup by which rank 0 opens a store for ranks of other hosts."""
SMALLEST_BUDGET = 256
"""The tokens below which a micro-batch is halved no more: what lacks memory then is another thing."""


@dataclass(frozen=True, kw_only=True)
class GangSettings:
    """The settings that all ranks of a gang share."""

    instance_id: str
    nproc: int
    """Number of the ranks."""
    replicate: int
    sequence_parallel: int
    cpu_offload: bool
    memory_fraction: float | None
    """The share of its GPU that the tensors of a rank may take; None where it is what other processes leave free."""
    compile: str
    backend: str
    dtype: str
    returns_memory: bool = False
    """True where memory of the GPU that no tensor uses is for a generator there, which sleeps during updates."""


@dataclass(frozen=True, kw_only=True)
class HostSettings:
    """The settings that the ranks of a host share."""

    model: str
    otlp: Sequence[str]
    credential_file: str | None
    """The stack's credential on this host, by which the rank sends its spans."""


@dataclass(frozen=True, kw_only=True)
class RankSetup(GangSettings, HostSettings):
    """The place of a rank in its gang, and the model that it loads at its start."""

    rank: int
    head: str
    """The last layer of the model: one of the `*_HEAD` constants."""
    rendezvous: str
    """File through which the ranks of this gang find each other, new for every gang; or the port of rank 0."""
    meet_host: str
    """The host that ranks of other hosts dial; empty where all are on one host and meet by a file."""
    place: int
    """Number of this rank among those of its host, which is the number of its GPU there."""
    ranks_here: int
    """Number of the ranks on its host."""


def first_head(role: str) -> str:
    """Return the head of a gang of this role before any session."""
    heads = {roles.CRITIC: VALUE_HEAD, roles.REWARD_MODEL: SCORE_HEAD}
    return heads.get(roles.kind_of_role(role), VOCABULARY_HEAD)


def head_for(role: str, kind: str) -> str:
    """Return the head of a gang of this role while a session with an objective of this kind is open."""
    return REWARD_HEAD if kind == REWARD_MODEL else first_head(role)


@dataclass(frozen=True)
class SessionSettings:
    """Objective, optimizer, batching and adapters of a session."""

    objective: ObjectiveSettings
    optimizer: OptimizerConfig
    batching: BatchingConfig
    seed: int
    total_updates: int
    """Updates after which the schedules end."""
    lora: LoraConfig | None = None
    """The adapters that learn; None trains all weights."""
    refuse_above: float | None = None
    """Mean difference between generator and trainer above which an update is refused; None refuses none."""

    def fields(self) -> dict[str, Any]:
        """Write the fields of the command that opens a session."""
        return {
            **vars(self),
            "objective": self.objective.fields(),
            "optimizer": self.optimizer.model_dump(mode="json"),
            "batching": self.batching.model_dump(mode="json"),
            "lora": None if self.lora is None else self.lora.model_dump(mode="json"),
        }

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> SessionSettings:
        """Read the fields of the command that opens a session."""
        sections = {
            "objective": ObjectiveSettings.from_fields(fields["objective"]),
            "optimizer": OptimizerConfig.model_validate(fields["optimizer"]),
            "batching": BatchingConfig.model_validate(fields["batching"]),
            "lora": None if fields["lora"] is None else LoraConfig.model_validate(fields["lora"]),
        }
        return cls(**fields | sections)

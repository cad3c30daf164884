"""What a rank is told when it starts.

Invariant: everything that differs between two stacks or two ranks is here; a rank reads no configuration of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class RankSetup:
    """One rank's place in its gang, and the model to load."""

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

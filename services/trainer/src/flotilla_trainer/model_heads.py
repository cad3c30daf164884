"""What stands on the body of the model that a gang holds; the ranks build it anew where a session needs another."""

from __future__ import annotations

from flotilla.trainer.v1 import session_pb2 as pb
from flotilla_core.roles import CRITIC

VOCABULARY = "vocabulary"
VALUES = "values"
REWARD = "reward"


def first_head(role: str) -> str:
    """That of a gang of this role before any session."""
    return VALUES if role == CRITIC else VOCABULARY


def head_for(role: str, spec: pb.SessionSpec) -> str:
    """That of a gang of this role while such a session is open."""
    return REWARD if spec.objective.HasField("reward_model") else first_head(role)

"""The version of the policy.

Invariant: versions are totally ordered; a later lineage is newer than every step of an earlier one.
"""

from __future__ import annotations

from typing import NamedTuple

from flotilla.common.v1 import version_pb2


class Version(NamedTuple):
    """One state of the policy: `lineage` grows on a fallback, `step` counts updates that survived."""

    lineage: int = 0
    step: int = 0

    def __str__(self) -> str:
        return f"{self.lineage}.{self.step}"

    @classmethod
    def parse(cls, text: str) -> Version:
        """Return the version that is written so: lineage.step."""
        lineage, _, step = text.partition(".")
        return cls(int(lineage), int(step))

    def to_proto(self) -> version_pb2.PolicyVersion:
        return version_pb2.PolicyVersion(lineage=self.lineage, step=self.step)

    @classmethod
    def from_proto(cls, message: version_pb2.PolicyVersion) -> Version:
        return cls(message.lineage, message.step)

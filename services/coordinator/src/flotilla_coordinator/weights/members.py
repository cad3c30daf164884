"""The generators of a weight group.

Invariants: rank 0 is the sender; members follow in a fixed order without gaps, each with as many ranks as it
has workers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from flotilla.common.v1 import weights_pb2
from flotilla_core.rpc import Replica

if TYPE_CHECKING:
    from flotilla.generator.v1.generator_pb2_grpc import GeneratorServiceAsyncStub


GeneratorReplica: TypeAlias = "Replica[GeneratorServiceAsyncStub]"


@dataclass(frozen=True)
class Member:
    """One replica inside a group."""

    replica: GeneratorReplica
    rank_offset: int

    @property
    def name(self) -> str:
        """The slot's name, for messages."""
        return self.replica.name

    @property
    def instance_id(self) -> str:
        """Unique over restarts."""
        return self.replica.instance_id


@dataclass(frozen=True)
class Group:
    """One epoch: its manifest and its members."""

    epoch: int
    manifest: weights_pb2.WeightManifest
    members: tuple[Member, ...]

    def matches(self, replicas: list[GeneratorReplica]) -> bool:
        """True when these replicas, and no others, are the members."""
        return self.instance_ids == {replica.instance_id for replica in replicas}

    @property
    def instance_ids(self) -> set[str]:
        """Of the members."""
        return {member.instance_id for member in self.members}


def seat(replicas: list[GeneratorReplica]) -> tuple[tuple[Member, ...], int]:
    """Members with their ranks, and the world size."""
    members, rank = [], 1
    for replica in replicas:
        members.append(Member(replica, rank))
        rank += int(replica.registration.capacity.get("weight_workers", 1))
    return tuple(members), rank

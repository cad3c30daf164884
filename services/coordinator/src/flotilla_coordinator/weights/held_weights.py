"""What a generator took at its last sync.

Invariants: the digest was computed by the sender and agreed on by the replica before it counts as held; equal digests
are equal weights, whatever run or replica they belong to.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from google.protobuf.duration_pb2 import Duration

from flotilla.common.v1 import weights_pb2
from flotilla.coordinator.v1 import coordinator_pb2 as pb
from flotilla.generator.v1 import generator_pb2 as gen
from flotilla_coordinator.weights.members import Member
from flotilla_core.version import Version


@dataclass(frozen=True)
class HeldWeights:
    """One version on one replica, and what it took to bring it there."""

    member: Member
    version: Version
    digests: weights_pb2.WeightDigests
    staged: gen.StageWeightsResponse
    stall_s: float

    @property
    def digest(self) -> str:
        """One value over all tensors."""
        content = [self.digests.manifest_digest, *map(str, self.digests.tensor_digests)]
        return hashlib.blake2b("\n".join(content).encode(), digest_size=16).hexdigest()

    def to_proto(self) -> pb.HeldWeights:
        """For the wire."""
        stall = Duration()
        stall.FromNanoseconds(round(self.stall_s * 1e9))
        return pb.HeldWeights(
            name=self.member.name,
            instance_id=self.member.instance_id,
            version=self.version.to_proto(),
            digest=self.digest,
            bytes=self.staged.bytes,
            stage=self.staged.elapsed,
            stall=stall,
        )

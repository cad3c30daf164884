"""Holds the generators of a weight group: who may join the next one, and the weights that each serves.

Invariants: rank 0 is the sender; members follow in a fixed order without gaps, each with as many ranks as it has
workers. A generator with another tokenizer, or with a model of another shape, is refused for as long as its process
lives, and so is one that did not take its weights a few times. Any other one that failed returns when it is healthy.
Each member that leaves is named to the user.

A digest counts as held once the sender computed it and the replica confirmed it. Equal digests are equal weights, in
any run and on any replica. A replica serves a version from its confirmed commit until it fails, or until it is left out
of the group that follows the policy. Instances count, not names, so a restarted replica serves nothing until it
commits.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from google.protobuf.duration_pb2 import Duration

from flotilla.common.v1 import weights_pb2
from flotilla.common.v1.finding_pb2 import SEVERITY_WARNING, Finding
from flotilla.coordinator.v1 import coordinator_pb2 as pb
from flotilla.generator.v1 import generator_pb2 as gen
from flotilla_coordinator.data.same_tokenizer import of_same_tokenizer
from flotilla_core.errors import DeadlineExceeded, FlotillaError, Mismatch, Unauthenticated, Unavailable
from flotilla_core.rpc import Replica, ReplicaPool
from flotilla_core.version import Version
from flotilla_data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from flotilla.generator.v1.generator_pb2_grpc import GeneratorServiceAsyncStub

GeneratorReplica: TypeAlias = "Replica[GeneratorServiceAsyncStub]"


MOST_REFUSALS = 3
"""An instance that fails a sync by itself so often gets no weights any more: each time costs two epochs."""


@dataclass(frozen=True)
class Member:
    """One replica inside a group."""

    replica: GeneratorReplica
    rank_offset: int

    @property
    def name(self) -> str:
        """Return the name of its slot, for messages."""
        return self.replica.name

    @property
    def instance_id(self) -> str:
        """Return its instance id, which a restart changes."""
        return self.replica.instance_id


@dataclass(frozen=True)
class Group:
    """The group of one epoch: its manifest and its members."""

    epoch: int
    manifest: weights_pb2.WeightManifest
    members: tuple[Member, ...]

    def matches(self, replicas: list[GeneratorReplica]) -> bool:
        """Return whether these replicas, and no others, are the members."""
        return self.instance_ids == {replica.instance_id for replica in replicas}

    @property
    def instance_ids(self) -> set[str]:
        """Return the instance ids of the members."""
        return {member.instance_id for member in self.members}


def seat(replicas: list[GeneratorReplica]) -> tuple[tuple[Member, ...], int]:
    """Return the members with their ranks, and the world size."""
    members, rank = [], 1
    for replica in replicas:
        members.append(Member(replica, rank))
        rank += int(replica.registration.capacity.get("weight_workers", 1))
    return tuple(members), rank


@dataclass(frozen=True)
class HeldWeights:
    """One version on one replica, with the cost of bringing it there."""

    member: Member
    version: Version
    digests: weights_pb2.WeightDigests
    staged: gen.StageWeightsResponse
    stall_s: float

    @property
    def digest(self) -> str:
        """Return one digest over all tensors."""
        content = [self.digests.manifest_digest, *map(str, self.digests.tensor_digests)]
        return hashlib.blake2b("\n".join(content).encode(), digest_size=16).hexdigest()

    def to_proto(self) -> pb.HeldWeights:
        """Return the message for the wire."""
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


class Serving:
    """The weights that each replica of this run took last."""

    def __init__(self) -> None:
        self._held: dict[str, HeldWeights] = {}

    def took(self, held: HeldWeights) -> None:
        """Note a confirmed commit."""
        self._held[held.member.instance_id] = held

    def lost(self, instance_id: str) -> None:
        """Note that a replica no longer serves this run."""
        self._held.pop(instance_id, None)

    def keep_only(self, instance_ids: Collection[str]) -> None:
        """Forget replicas outside the group, such as a drained one, because they no longer follow the policy."""
        self._held = {key: held for key, held in self._held.items() if key in instance_ids}

    def serves(self, instance_id: str, version: Version) -> bool:
        """Return whether a replica may get work that needs `version` or newer."""
        live = self.live_version(instance_id)
        return live is not None and live >= version

    def live_version(self, instance_id: str) -> Version | None:
        """Return the version that a replica serves for this run."""
        held = self._held.get(instance_id)
        return held.version if held is not None else None

    def held(self) -> list[HeldWeights]:
        """Return all held weights, by the names of their slots."""
        return sorted(self._held.values(), key=lambda one: one.member.name)


@dataclass(frozen=True)
class SyncReport:
    """The content and the cost of one sync."""

    version: Version
    bytes: int
    stage_s: float
    stall_s: float
    members: tuple[Member, ...]
    epochs: int
    caught_up: bool = False
    """True where the members joined after the version was published, and took it in a group of their own."""

    def record_in(self, metrics: dict[str, float]) -> None:
        """Add the cost to the metrics of the step that is under way."""
        if self.caught_up:
            metrics["sync/caught_up"] = metrics.get("sync/caught_up", 0.0) + len(self.members)
            return
        metrics["sync/bytes"] = float(self.bytes)
        metrics["sync/stage_s"] = self.stage_s
        metrics["sync/stall_s"] = self.stall_s
        metrics["sync/members"] = float(len(self.members))
        metrics["sync/epochs"] = float(self.epochs)


class Candidates:
    """The generators of one run that the next weight group may have.

    `spared` leaves out the one that an evaluation has pinned.
    """

    def __init__(
        self,
        pool: ReplicaPool[GeneratorServiceAsyncStub],
        *,
        tokenizer: Tokenizer,
        model: Path | str,
        wait_limit_s: float,
        notice: Callable[[Finding], None],
        spared: Callable[[list[GeneratorReplica]], list[GeneratorReplica]],
    ) -> None:
        self._pool = pool
        self._tokenizer = tokenizer
        self._model = model
        self._wait_limit_s = wait_limit_s
        self._notice = notice
        self._spared = spared
        self._refusals: Counter[str] = Counter()

    async def fitting(self) -> list[GeneratorReplica]:
        """Wait for at least one generator that fits; return all by name."""
        await self._pool.wait_for(1, self._wait_limit_s, "a generator")
        replicas = sorted(self._pool.replicas(), key=lambda replica: replica.name)
        return self._spared(of_same_tokenizer(replicas, self._tokenizer, self._model, self.evict))

    def evict(self, replica: GeneratorReplica, error: FlotillaError) -> None:
        """Take a generator out of the group: it failed, or will never fit."""
        if isinstance(error, Mismatch):  # it will never fit, even when it is healthy
            self._pool.drain(replica.instance_id, str(error))
            self._notice(error.finding(f"{replica.name} is refused"))
            return
        # Who does not take our calls now (it is away, or its token or clock differs) says nothing of its weights.
        if not isinstance(error, Unavailable | DeadlineExceeded | Unauthenticated):
            self._refusals[replica.instance_id] += 1
        if self._refusals[replica.instance_id] >= MOST_REFUSALS:
            why = f"no weights until it restarts, after {MOST_REFUSALS} refusals"
            self._pool.drain(replica.instance_id, f"{why}: {error}")
            self._notice(error.finding(f"{replica.name} gets {why}, last"))
            return
        self._pool.eject(replica.instance_id, str(error))
        self._notice(error.finding(f"{replica.name} left the weight group", SEVERITY_WARNING))

"""Calls the members of weight groups: to form, to stage, to commit and to give up; finds who broke a group.

Invariants: epochs only grow, and the trainer has at most one group open, that of the newest epoch. A call that fails
breaks its group, which the next epoch repairs as a whole. The choice of members and evictions are made elsewhere. A
member that reports a failure of its own is to blame. The failure of another member, or a limit that all members missed,
blames no member. An error that every single member reports alike would occur in any other epoch too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.duration_pb2 import Duration

from flotilla.common.v1 import weights_pb2
from flotilla.generator.v1 import generator_pb2 as gen
from flotilla.trainer.v1 import trainer_pb2 as train
from flotilla_coordinator.trainers.roles import PolicyTrainer
from flotilla_coordinator.weights.members import (
    GeneratorReplica,
    Group,
    HeldWeights,
    Member,
    SyncReport,
    seat,
)
from flotilla_core import ids, rpc
from flotilla_core.agreement import kv_policy
from flotilla_core.config import WeightSyncConfig, bucket_size_mib
from flotilla_core.errors import (
    DeadlineExceeded,
    FlotillaError,
    Mismatch,
    StaleVersion,
    Unavailable,
    WeightGroupFailed,
    WeightsMismatch,
)
from flotilla_core.tasks import gather_with_grace
from flotilla_core.version import Version

EPOCHS_PER_BEGINNING = 1_000_000
PROBE_TIMEOUT_S = 3.0
# The limit of the members is shorter, so that those that still answer can say for whom they waited.
CALL_SLACK_S = 5.0
RELEASE_TIMEOUT_S = 10.0
TRAINER = "trainer"
BACKENDS = {"gloo": weights_pb2.WEIGHT_BACKEND_GLOO, "nccl": weights_pb2.WEIGHT_BACKEND_NCCL}
KV_POLICIES = {
    "recompute": gen.KV_POLICY_RECOMPUTE,
    "reuse": gen.KV_POLICY_REUSE,
    "drain": gen.KV_POLICY_DRAIN,
}

Failures = dict[str, FlotillaError]
"""The errors by the name of the member, or `trainer`."""

# The errors of a healthy member when another one failed, or when its epoch ended.
NOT_ITS_FAULT = (WeightGroupFailed, StaleVersion)


@dataclass(frozen=True)
class Staged:
    """A version that all members of a group hold in addition to their live weights."""

    version: Version
    published: train.PublishWeightsResponse
    by_member: dict[str, gen.StageWeightsResponse]


class WeightEpochs:
    """The trainer's weight groups, one after the other."""

    def __init__(
        self,
        run_id: str,
        config: WeightSyncConfig,
        backend: str,
        policy: PolicyTrainer,
        fence: int,
        longest_sample_s: float,
        max_staleness: int,
    ) -> None:
        self._run_id = run_id
        self._config = config
        self._backend = BACKENDS[backend]
        self._bucket_bytes = bucket_size_mib(config.bucket_mib, backend) << 20
        self._policy = policy
        applied = kv_policy(config, max_staleness)
        self._kv_policy = KV_POLICIES[applied]
        # A draining replica commits when its last sample has ended, and samples end in time or are given up.
        self._commit_limit_s = config.timeout_s + (longest_sample_s if applied == "drain" else 0.0)
        # Gangs and generators outlive a restart of the run, and refuse an epoch that is not newer than their last.
        self._epoch = fence * EPOCHS_PER_BEGINNING

    async def form(self, replicas: list[GeneratorReplica]) -> Group:
        """Form a new epoch with exactly these replicas, in place of any that the trainer has open."""
        self._epoch += 1
        members, world_size = seat(replicas)
        timeout = Duration()
        timeout.FromNanoseconds(int(self._config.timeout_s * 1e9))
        try:
            opened = await rpc.unary(
                self._policy.stub.OpenWeightGroup,
                train.OpenWeightGroupRequest(
                    run_id=self._run_id,
                    request_id=ids.new_request_id(),
                    epoch=self._epoch,
                    backend=self._backend,
                    world_size=world_size,
                    bucket_bytes=self._bucket_bytes,
                    timeout=timeout,
                ),
                timeout_s=self._config.timeout_s,
            )
        except DeadlineExceeded as error:
            # The gang itself ends ranks that are stuck, and reports that to its next caller.
            raise GroupBrokenError({TRAINER: error}) from error
        group = Group(self._epoch, opened.manifest, members)
        await self._together(group, {m.name: self._join(m, opened) for m in members})
        return group

    async def move(self, group: Group, version: Version) -> tuple[SyncReport, list[HeldWeights], Failures]:
        """Bring `version` to a group; return the cost, the weights that each member took, and the failures."""
        started = time.monotonic()
        staged = await self._stage(group, version)
        stage_s = time.monotonic() - started
        taken, failures = await self._commit(group, staged)
        report = SyncReport(
            version,
            staged.published.bytes,
            stage_s,
            stall_s=max(held.stall_s for held in taken),
            members=tuple(held.member for held in taken),
            epochs=1,
        )
        return report, taken, failures

    async def _stage(self, group: Group, version: Version) -> Staged:
        """Broadcast the weights into a second copy, while decoding continues."""
        publish = train.PublishWeightsRequest(
            run_id=self._run_id,
            request_id=ids.new_request_id(),
            epoch=group.epoch,
            policy_version=version.to_proto(),
        )
        calls: dict[str, Awaitable[Any]] = {TRAINER: self._once(self._policy.stub.PublishWeights, publish)}
        for member in group.members:
            request = gen.StageWeightsRequest(
                run_id=self._run_id,
                request_id=ids.new_request_id(),
                epoch=group.epoch,
                policy_version=version.to_proto(),
                kv_policy=self._kv_policy,
            )
            calls[member.name] = self._once(member.replica.stub.StageWeights, request)
        answers = await self._together(group, calls)
        return Staged(version, answers.pop(TRAINER), answers)

    async def _commit(self, group: Group, staged: Staged) -> tuple[list[HeldWeights], Failures]:
        """Let each member switch at its own time; a failure costs that member alone. Raise where none is left."""
        outcomes = await asyncio.gather(
            *(self._commit_one(group, member, staged) for member in group.members), return_exceptions=True
        )
        taken: list[HeldWeights] = []
        failures: Failures = {}
        for member, outcome in zip(group.members, outcomes, strict=True):
            if isinstance(outcome, HeldWeights):
                taken.append(outcome)
            elif isinstance(outcome, FlotillaError):
                failures[member.name] = outcome
            else:
                raise outcome
        if not taken:
            raise GroupBrokenError(failures, group)
        return taken, failures

    async def verify_live(self, report: SyncReport) -> Failures:
        """Have the members compare what decodes with what they committed; return the failures."""
        outcomes = await asyncio.gather(
            *(self._verify_one(member, report.version) for member in report.members), return_exceptions=True
        )
        failures: Failures = {}
        for member, outcome in zip(report.members, outcomes, strict=True):
            if isinstance(outcome, FlotillaError):
                failures[member.name] = outcome
            elif outcome is not None:
                raise outcome
        return failures

    async def abandon(self, broken: GroupBrokenError) -> list[tuple[Member, FlotillaError]]:
        """Free all members for the next epoch; return those that failed by themselves or are gone, with the reasons."""
        group = broken.group
        if group is None:
            return []
        answers = await asyncio.gather(*(self._answers(member) for member in group.members))
        blamed = to_blame(group.members, broken.failures)
        guilty: list[tuple[Member, FlotillaError]] = []
        for member, answering in zip(group.members, answers, strict=True):
            if member.name in blamed or not answering:
                gone = Unavailable(f"{member.name} does not answer")
                guilty.append((member, broken.failures.get(member.name) or gone))
        reachable = [m for m, answering in zip(group.members, answers, strict=True) if answering]
        await self.release(group, reachable)
        return guilty

    async def release(self, group: Group, members: Sequence[Member]) -> None:
        """Release the members as far as possible; one that cannot be reached has no group left."""
        calls: list[Awaitable[Any]] = [self.close(group.epoch)]
        for member in members:
            abort = gen.AbortWeightsRequest(run_id=self._run_id, request_id=ids.new_request_id())
            stub = member.replica.stub
            calls.append(rpc.unary(stub.AbortWeights, abort, timeout_s=RELEASE_TIMEOUT_S, attempts=1))
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException) and not isinstance(outcome, FlotillaError):
                raise outcome

    async def close_newest(self) -> None:
        """End the trainer's open group, with any broadcast under way; its members notice that the sender is gone."""
        await self.close(self._epoch)

    async def close(self, epoch: int) -> None:
        """Close the trainer's side of a group."""
        close = train.CloseWeightGroupRequest(
            run_id=self._run_id, request_id=ids.new_request_id(), epoch=epoch
        )
        await rpc.unary(self._policy.stub.CloseWeightGroup, close, timeout_s=RELEASE_TIMEOUT_S, attempts=1)

    async def _join(self, member: Member, opened: train.OpenWeightGroupResponse) -> None:
        request = gen.JoinWeightGroupRequest(
            run_id=self._run_id,
            request_id=ids.new_request_id(),
            group=opened.group,
            rank_offset=member.rank_offset,
            manifest=opened.manifest,
        )
        try:
            await self._once(member.replica.stub.JoinWeightGroup, request)
        except WeightsMismatch as error:
            raise Mismatch(
                f"{member.name} holds another model than the trainer",
                where=f"instance {member.instance_id}",
                why=error.why,
                next_step="start it with the model of the stack",
            ) from error

    async def _commit_one(self, group: Group, member: Member, staged: Staged) -> HeldWeights:
        digests = staged.published.digests
        request = gen.CommitWeightsRequest(
            run_id=self._run_id,
            request_id=ids.new_request_id(),
            epoch=group.epoch,
            policy_version=staged.version.to_proto(),
            kv_policy=self._kv_policy,
            expected=digests,
        )
        limit_s = self._commit_limit_s + CALL_SLACK_S
        reply = await rpc.unary(member.replica.stub.CommitWeights, request, timeout_s=limit_s, attempts=1)
        stall_s = reply.stall.ToNanoseconds() / 1e9
        return HeldWeights(member, staged.version, digests, staged.by_member[member.name], stall_s)

    async def _verify_one(self, member: Member, version: Version) -> None:
        request = gen.VerifyWeightsRequest(
            run_id=self._run_id, request_id=ids.new_request_id(), policy_version=version.to_proto()
        )
        await self._once(member.replica.stub.VerifyWeights, request)

    async def _once(self, method: Any, request: Any) -> Any:
        """Make one call within the sync's limit, without a retry, because a broken group is repaired as a whole."""
        return await rpc.unary(method, request, timeout_s=self._config.timeout_s + CALL_SLACK_S, attempts=1)

    @staticmethod
    async def _together(group: Group, calls: dict[str, Awaitable[Any]]) -> dict[str, Any]:
        """Return the results of all calls, or raise that the group is broken, or an error of the trainer itself."""
        results, failures = await gather_with_grace(calls)
        if not failures:
            return results
        trainer = failures.get(TRAINER)
        # A sender that missed the limit was delayed by a member: the next epoch shows by which.
        if trainer is not None and not isinstance(trainer, (WeightGroupFailed, DeadlineExceeded)):
            raise trainer
        raise GroupBrokenError(failures, group)

    async def _answers(self, member: Member) -> bool:
        request = gen.GetWeightStatusRequest(run_id=self._run_id)
        try:
            await rpc.unary(
                member.replica.stub.GetWeightStatus, request, timeout_s=PROBE_TIMEOUT_S, attempts=1
            )
        except FlotillaError:
            return False
        return True


class GroupBrokenError(Exception):
    """The group of this epoch is lost; `failures` has the report of each member."""

    def __init__(self, failures: Failures, group: Group | None = None) -> None:
        super().__init__("; ".join(f"{name}: {error}" for name, error in failures.items()))
        self.failures = failures
        self.group = group

    @property
    def common_mismatch(self) -> WeightsMismatch | Mismatch | None:
        """Return the mismatch that every single member reports, and that no other epoch would change."""
        members = self.group.members if self.group is not None else ()
        reported = [self.failures.get(member.name) for member in members]
        mismatches = [error for error in reported if isinstance(error, WeightsMismatch | Mismatch)]
        return mismatches[0] if mismatches and len(mismatches) == len(members) else None


def to_blame(members: tuple[Member, ...], failures: Failures) -> set[str]:
    """Return the members that failed by themselves; a limit that all members missed blames none of them."""
    own = {
        m.name: failures[m.name]
        for m in members
        if m.name in failures and not isinstance(failures[m.name], NOT_ITS_FAULT)
    }
    late = {name for name, error in own.items() if isinstance(error, DeadlineExceeded)}
    return set(own) - late if len(late) == len(members) > 1 else set(own)

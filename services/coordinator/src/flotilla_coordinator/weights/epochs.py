"""Weight groups and the calls inside them: form, stage, commit, give up, and whose fault it is that one broke.

Invariants: epochs only grow, and the trainer has one group open at most, that of the newest epoch; a call that fails
breaks its group, which is repaired as a whole by the next epoch; nothing here decides who is asked or who is evicted.
A member that reports a failure of its own is to blame; somebody else's failure, and a limit that all members missed,
blame nobody; what every single member refuses alike would be refused in any other epoch too.
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
from flotilla_core.config import WeightSyncConfig
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
# The members' own limit comes first: who still answers then says whom it waited for.
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
"""What went wrong, by the name of the member or `trainer`."""

# What a healthy member reports when another one failed, or when the epoch ended under it.
NOT_ITS_FAULT = (WeightGroupFailed, StaleVersion)


@dataclass(frozen=True)
class Staged:
    """A version that all members of a group hold beside their live weights."""

    version: Version
    published: train.PublishWeightsResponse
    by_member: dict[str, gen.StageWeightsResponse]


class WeightEpochs:
    """The trainer's groups, one after the other."""

    def __init__(
        self,
        run_id: str,
        config: WeightSyncConfig,
        backend: str,
        policy: PolicyTrainer,
        fence: int,
        longest_sample_s: float,
    ) -> None:
        self._run_id = run_id
        self._config = config
        self._backend = BACKENDS[backend]
        self._policy = policy
        kv_policy = "drain" if config.update == "between_samples" else config.kv_policy
        self._kv_policy = KV_POLICIES[kv_policy]
        # A replica that drains commits when its last sample has ended, and those end in time or are given up.
        self._commit_limit_s = config.timeout_s + (longest_sample_s if kv_policy == "drain" else 0.0)
        # Gangs and generators outlive a beginning of the run, and refuse an epoch that is not newer than their last.
        self._epoch = fence * EPOCHS_PER_BEGINNING

    async def form(self, replicas: list[GeneratorReplica]) -> Group:
        """A new epoch with exactly these replicas, in place of whatever the trainer has open."""
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
                    bucket_bytes=self._config.bucket_mib << 20,
                    timeout=timeout,
                ),
                timeout_s=self._config.timeout_s,
            )
        except DeadlineExceeded as error:
            # Ranks that are stuck are the gang's to end: it says so to whoever asks next.
            raise GroupBrokenError({TRAINER: error}) from error
        group = Group(self._epoch, opened.manifest, members)
        await self._together(group, {m.name: self._join(m, opened) for m in members})
        return group

    async def move(self, group: Group, version: Version) -> tuple[SyncReport, list[HeldWeights], Failures]:
        """Bring `version` to a group: what that cost, what each member took, and who failed at its end."""
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
        """Broadcast beside the live weights; decoding goes on."""
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
            )
            calls[member.name] = self._once(member.replica.stub.StageWeights, request)
        answers = await self._together(group, calls)
        return Staged(version, answers.pop(TRAINER), answers)

    async def _commit(self, group: Group, staged: Staged) -> tuple[list[HeldWeights], Failures]:
        """Each member switches at its own time; a failure costs that member alone. Breaks when nobody is left."""
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

    async def abandon(self, broken: GroupBrokenError) -> list[tuple[Member, FlotillaError]]:
        """Free everybody for the next epoch; returns who failed by itself or is gone, with the reason."""
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
        """Best effort: whoever cannot be reached has no group left to hold."""
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
        """End whatever the trainer has open, a broadcast under way included; its members see the sender go."""
        await self.close(self._epoch)

    async def close(self, epoch: int) -> None:
        """The trainer's end of a group."""
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

    async def _once(self, method: Any, request: Any) -> Any:
        """One call within the sync's limit; a broken group is repaired as a whole, not call by call."""
        return await rpc.unary(method, request, timeout_s=self._config.timeout_s + CALL_SLACK_S, attempts=1)

    @staticmethod
    async def _together(group: Group, calls: dict[str, Awaitable[Any]]) -> dict[str, Any]:
        """All calls, or a broken group; trouble of the trainer's own is raised as what it is."""
        results, failures = await gather_with_grace(calls)
        if not failures:
            return results
        trainer = failures.get(TRAINER)
        # A sender that got no further within the limit was held up by a member: the next epoch tells.
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
    """The group of this epoch is lost; `failures` says what each member reported."""

    def __init__(self, failures: Failures, group: Group | None = None) -> None:
        super().__init__("; ".join(f"{name}: {error}" for name, error in failures.items()))
        self.failures = failures
        self.group = group

    @property
    def common_mismatch(self) -> WeightsMismatch | Mismatch | None:
        """The mismatch that every single member reports: another epoch would not change it."""
        members = self.group.members if self.group is not None else ()
        reported = [self.failures.get(member.name) for member in members]
        mismatches = [error for error in reported if isinstance(error, WeightsMismatch | Mismatch)]
        return mismatches[0] if mismatches and len(mismatches) == len(members) else None


def to_blame(members: tuple[Member, ...], failures: Failures) -> set[str]:
    """Members that failed by themselves; a limit that everybody missed says nothing about anyone."""
    own = {
        m.name: failures[m.name]
        for m in members
        if m.name in failures and not isinstance(failures[m.name], NOT_ITS_FAULT)
    }
    late = {name for name, error in own.items() if isinstance(error, DeadlineExceeded)}
    return set(own) - late if len(late) == len(members) > 1 else set(own)

"""Weight synchronisation: every leased generator serves exactly what the trainer holds.

Invariants: a replica counts as serving a version only after its digests agreed with the sender's, its live
weights were verified and it confirmed the commit; a failed member costs its own eviction and one new epoch,
never the run, as long as one other remains or comes back within the limit; epochs only grow; the group is re-
formed only when its membership changes or it broke. No weights pass through here: bytes go from trainer ranks
to generator workers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from google.protobuf.duration_pb2 import Duration

from flotilla.common.v1 import weights_pb2
from flotilla.generator.v1 import generator_pb2 as gen
from flotilla.trainer.v1 import trainer_pb2 as train
from flotilla_coordinator.runs.held_weights import HeldWeights
from flotilla_coordinator.runs.members import GeneratorReplica, Group, Member, seat
from flotilla_coordinator.runs.policy import PolicyTrainer
from flotilla_coordinator.runs.together import run_together
from flotilla_core import ids, rpc, telemetry
from flotilla_core.config import WeightSyncConfig
from flotilla_core.errors import (
    DeadlineExceeded,
    FlotillaError,
    StaleVersion,
    Unavailable,
    WeightGroupFailed,
    WeightsMismatch,
)
from flotilla_core.telemetry import names
from flotilla_core.version import Version

T = TypeVar("T")

MAX_EPOCHS_PER_SYNC = 8
EPOCHS_PER_BEGINNING = 1_000_000
LOOK_AGAIN_S = 0.5
PROBE_TIMEOUT_S = 3.0
# The members' own limit comes first: who still answers then says whom it waited for.
CALL_SLACK_S = 5.0
# What a healthy member reports when another one failed, or when the epoch ended under it.
NOT_ITS_FAULT = (WeightGroupFailed, StaleVersion)
RELEASE_TIMEOUT_S = 10.0
TRAINER = "trainer"
BACKENDS = {"gloo": weights_pb2.WEIGHT_BACKEND_GLOO, "nccl": weights_pb2.WEIGHT_BACKEND_NCCL}
KV_POLICIES = {
    "recompute": gen.KV_POLICY_RECOMPUTE,
    "reuse": gen.KV_POLICY_REUSE,
    "drain": gen.KV_POLICY_DRAIN,
}


@dataclass(frozen=True)
class SyncReport:
    """What one sync moved and cost."""

    version: Version
    bytes: int
    stage_s: float
    stall_s: float
    members: tuple[Member, ...]
    epochs: int


class GroupBrokenError(Exception):
    """The group of this epoch is lost; `failures` says what each member reported."""

    def __init__(self, failures: dict[str, FlotillaError]) -> None:
        super().__init__("; ".join(f"{name}: {error}" for name, error in failures.items()))
        self.failures = failures


class WeightSync:
    """Brings versions from one trainer to a changing set of generators."""

    def __init__(
        self,
        run_id: str,
        config: WeightSyncConfig,
        backend: str,
        policy: PolicyTrainer,
        candidates: Callable[[], Awaitable[list[GeneratorReplica]]],
        ready: Callable[[], list[GeneratorReplica]],
        evict: Callable[[GeneratorReplica, FlotillaError], None],
        verify: Callable[[SyncReport], Awaitable[dict[str, FlotillaError]]],
        fence: int = 0,
    ) -> None:
        self._run_id = run_id
        self._config = config
        self._backend = BACKENDS[backend]
        self._policy = policy
        self._candidates = candidates
        self._ready = ready
        self._evict = evict
        self._verify = verify
        self._group: Group | None = None
        # Gangs and generators outlive a beginning of the run, and refuse an epoch that is not newer than their last.
        self._epoch = fence * EPOCHS_PER_BEGINNING
        self._live: dict[str, Version] = {}
        self._held: dict[str, HeldWeights] = {}
        self.version: Version | None = None

    def serves(self, instance_id: str, version: Version) -> bool:
        """Whether a replica may be given work that needs `version` or newer."""
        live = self.live_version(instance_id)
        return live is not None and live >= version

    def live_version(self, instance_id: str) -> Version | None:
        """What a replica serves for this run."""
        return self._live.get(instance_id)

    def held(self) -> list[HeldWeights]:
        """What each replica that serves this run took last, by the names of their slots."""
        held = (self._held[instance_id] for instance_id in self._live if instance_id in self._held)
        return sorted(held, key=lambda one: one.member.name)

    async def publish(self, version: Version) -> SyncReport:
        """Make every reachable generator serve `version`; return when the survivors do, verified."""
        attributes = {names.RUN_ID: self._run_id, names.POLICY_VERSION: str(version)}
        with telemetry.span(names.RL_SYNC, attributes=attributes) as span:
            broken = GroupBrokenError({})
            for attempt in range(1, MAX_EPOCHS_PER_SYNC + 1):
                try:
                    report = await self._publish_once(version, attempt)
                    await self._verified(report)
                except GroupBrokenError as error:
                    broken = error
                    span.add_event("weight group broken", {"failures": str(broken)})
                    await self._abandon(broken)
                    continue
                self.version = version
                return report
        raise WeightGroupFailed(
            f"no generator took version {version}",
            where=f"run {self._run_id}",
            why=f"the weight group broke {MAX_EPOCHS_PER_SYNC} times in a row, last by {broken}",
            next_step="see `flotilla logs` of the generators named here",
        )

    async def keep_serving(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work`, which needs generators: when none serves the version any more, bring it to those that came.

        Without this a fleet whose last replica was replaced would wait for a sync that comes after the work.
        """
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=LOOK_AGAIN_S)
                if not task.done() and self.version is not None and self._unserved(self.version):
                    await self.publish(self.version)
            return task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def close(self) -> None:
        """Give the group up on every side."""
        group, self._group = self._group, None
        if group is not None:
            await self._release(group, group.members)

    async def _publish_once(self, version: Version, attempt: int) -> SyncReport:
        replicas = await self._candidates()
        if self._group is None or not self._group.matches(replicas):
            await self._form(replicas)
        group = self._formed()
        started = time.monotonic()
        staged = await self._stage(group, version)
        published = staged[TRAINER]
        stage_s = time.monotonic() - started
        stalls = await self._commit(group, version, published.digests)
        members = tuple(m for m in group.members if self._live.get(m.instance_id) == version)
        for m in members:
            taken = HeldWeights(m, version, published.digests, staged[m.name], stalls[m.name])
            self._held[m.instance_id] = taken
        return SyncReport(version, published.bytes, stage_s, max(stalls.values()), members, attempt)

    async def _verified(self, report: SyncReport) -> None:
        """The live check; members that cannot answer it are out, and somebody has to be left."""
        failures = await self._verify(report)
        if failures and len(failures) == len(report.members):
            raise GroupBrokenError(failures)
        for member in report.members:
            if member.name in failures:
                self._expel(member, failures[member.name])

    def _unserved(self, version: Version) -> bool:
        ready = self._ready()
        return bool(ready) and not any(self.serves(replica.instance_id, version) for replica in ready)

    def _formed(self) -> Group:
        if self._group is None:
            raise GroupBrokenError({})
        return self._group

    async def _form(self, replicas: list[GeneratorReplica]) -> None:
        """A new epoch with exactly these replicas."""
        await self.close()
        self._epoch += 1
        members, world_size = seat(replicas)
        # Whoever is left out, a drained replica say, will not follow the policy: it serves nothing of ours any more.
        staying = {member.instance_id for member in members}
        self._live = {key: version for key, version in self._live.items() if key in staying}
        self._held = {key: held for key, held in self._held.items() if key in staying}
        timeout = Duration()
        timeout.FromNanoseconds(int(self._config.timeout_s * 1e9))
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
        self._group = Group(self._epoch, opened.manifest, members)
        await self._together(members, {m.name: self._join(m, opened) for m in members})

    async def _join(self, member: Member, opened: train.OpenWeightGroupResponse) -> None:
        request = gen.JoinWeightGroupRequest(
            run_id=self._run_id,
            request_id=ids.new_request_id(),
            group=opened.group,
            rank_offset=member.rank_offset,
            manifest=opened.manifest,
        )
        await self._once(member.replica.stub.JoinWeightGroup, request)

    async def _stage(self, group: Group, version: Version) -> dict[str, Any]:
        """Broadcast beside the live weights; decoding goes on. What trainer and members answered, by name."""
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
        return await self._together(group.members, calls)

    async def _commit(
        self, group: Group, version: Version, expected: weights_pb2.WeightDigests
    ) -> dict[str, float]:
        """Each member switches at its own time; a failure costs that member alone. The stalls by name."""
        outcomes = await asyncio.gather(
            *(self._commit_one(group, member, version, expected) for member in group.members),
            return_exceptions=True,
        )
        stalls: dict[str, float] = {}
        failures: dict[str, FlotillaError] = {}
        for member, outcome in zip(group.members, outcomes, strict=True):
            if isinstance(outcome, float):
                self._live[member.instance_id] = version
                stalls[member.name] = outcome
            elif isinstance(outcome, FlotillaError):
                failures[member.name] = outcome
            else:
                raise outcome
        if not stalls:
            raise _common_mismatch(group.members, failures) or GroupBrokenError(failures)
        for member in group.members:
            if member.name in failures:
                self._expel(member, failures[member.name])
        return stalls

    async def _commit_one(
        self, group: Group, member: Member, version: Version, expected: weights_pb2.WeightDigests
    ) -> float:
        request = gen.CommitWeightsRequest(
            run_id=self._run_id,
            request_id=ids.new_request_id(),
            epoch=group.epoch,
            policy_version=version.to_proto(),
            kv_policy=KV_POLICIES[self._config.kv_policy],
            expected=expected,
        )
        reply = await self._once(member.replica.stub.CommitWeights, request)
        stall: float = reply.stall.ToNanoseconds() / 1e9
        return stall

    async def _once(self, method: Any, request: Any) -> Any:
        """One call within the sync's limit; a broken group is repaired as a whole, not call by call."""
        return await rpc.unary(method, request, timeout_s=self._config.timeout_s + CALL_SLACK_S, attempts=1)

    @staticmethod
    async def _together(members: tuple[Member, ...], calls: dict[str, Awaitable[Any]]) -> dict[str, Any]:
        """All calls, or a broken group; trouble of the trainer's own ends the sync."""
        results, failures = await run_together(calls)
        if not failures:
            return results
        trainer = failures.get(TRAINER)
        # A sender that got no further within the limit was held up by a member: the next epoch tells.
        if trainer is not None and not isinstance(trainer, (WeightGroupFailed, DeadlineExceeded)):
            raise trainer
        raise _common_mismatch(members, failures) or GroupBrokenError(failures)

    async def _abandon(self, broken: GroupBrokenError) -> None:
        """Evict whoever failed by itself or is gone, and free everybody else for the next epoch."""
        group, self._group = self._group, None
        if group is None:
            return
        answers = await asyncio.gather(*(self._answers(member) for member in group.members))
        blamed = _to_blame(group.members, broken.failures)
        for member, answering in zip(group.members, answers, strict=True):
            if member.name in blamed or not answering:
                why = broken.failures.get(member.name) or Unavailable(f"{member.name} does not answer")
                self._expel(member, why)
        reachable = [m for m, answering in zip(group.members, answers, strict=True) if answering]
        await self._release(group, reachable)

    def _expel(self, member: Member, why: FlotillaError) -> None:
        """It serves nothing of ours any more; its health decides when it may join again."""
        self._live.pop(member.instance_id, None)
        self._evict(member.replica, why)

    async def _answers(self, member: Member) -> bool:
        request = gen.GetWeightStatusRequest(run_id=self._run_id)
        try:
            await rpc.unary(
                member.replica.stub.GetWeightStatus, request, timeout_s=PROBE_TIMEOUT_S, attempts=1
            )
        except FlotillaError:
            return False
        return True

    async def _release(self, group: Group, members: list[Member] | tuple[Member, ...]) -> None:
        """Best effort: whoever cannot be reached has no group left to hold."""
        close = train.CloseWeightGroupRequest(
            run_id=self._run_id, request_id=ids.new_request_id(), epoch=group.epoch
        )
        calls: list[Awaitable[Any]] = [
            rpc.unary(self._policy.stub.CloseWeightGroup, close, timeout_s=RELEASE_TIMEOUT_S, attempts=1)
        ]
        for member in members:
            abort = gen.AbortWeightsRequest(run_id=self._run_id, request_id=ids.new_request_id())
            stub = member.replica.stub
            calls.append(rpc.unary(stub.AbortWeights, abort, timeout_s=RELEASE_TIMEOUT_S, attempts=1))
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException) and not isinstance(outcome, FlotillaError):
                raise outcome


def _common_mismatch(
    members: tuple[Member, ...], failures: dict[str, FlotillaError]
) -> WeightsMismatch | None:
    """The mismatch that every single member reports: another epoch would not change it."""
    reported = [failures.get(member.name) for member in members]
    mismatches = [error for error in reported if isinstance(error, WeightsMismatch)]
    return mismatches[0] if len(mismatches) == len(members) else None


def _to_blame(members: tuple[Member, ...], failures: dict[str, FlotillaError]) -> set[str]:
    """Members that failed by themselves; a limit that everybody missed says nothing about anyone."""
    own = {
        m.name: failures[m.name]
        for m in members
        if m.name in failures and not isinstance(failures[m.name], NOT_ITS_FAULT)
    }
    late = {name for name, error in own.items() if isinstance(error, DeadlineExceeded)}
    return set(own) - late if len(late) == len(members) > 1 else set(own)

"""GeneratorService over an engine.

Invariants: a call that is cancelled leaves no request in the engine; nothing is generated before the engine has
started, while it drains, while it sleeps, or with broken weights; calls about weights and sleep only translate here,
their rules live in `WeightSession` and `Sleep`. A request of the run whose trainer has the memory waits for the wake.

Samples that end at nearly the same time share one message, because a message costs both sides more than the sample in
it. The caller may say how long a sample that has ended can wait. No sample waits longer than that, and the last ones do
not wait at all. Samples that an engine yields together stay together. When an engine fails, the caller gets all that it
had yielded before it gets the failure.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

from flotilla.common.v1 import weights_pb2
from flotilla.generator.v1 import generator_pb2 as pb
from flotilla.generator.v1.generator_pb2_grpc import GeneratorServiceServicer
from flotilla_core import telemetry
from flotilla_core.errors import AlreadyExists, InvalidRequest, Unavailable
from flotilla_core.service import Activities
from flotilla_core.telemetry import names
from flotilla_core.version import Version
from flotilla_generator.engine.base import Engine, KvPolicy, Sample
from flotilla_generator.request import duration, read_request, write_sample, write_samples
from flotilla_generator.shared_call import SharedCalls, in_messages
from flotilla_generator.sleep import Sleep
from flotilla_generator.weights import Phase, WeightSession
from flotilla_weights.manifest import Manifest

KV_POLICIES = {
    pb.KV_POLICY_UNSPECIFIED: KvPolicy.RECOMPUTE,
    pb.KV_POLICY_RECOMPUTE: KvPolicy.RECOMPUTE,
    pb.KV_POLICY_REUSE: KvPolicy.REUSE,
    pb.KV_POLICY_DRAIN: KvPolicy.DRAIN,
}
PHASES = {
    Phase.IDLE: pb.WEIGHT_PHASE_IDLE,
    Phase.RECEIVING: pb.WEIGHT_PHASE_RECEIVING,
    Phase.STAGED: pb.WEIGHT_PHASE_STAGED,
    Phase.COMMITTING: pb.WEIGHT_PHASE_COMMITTING,
    Phase.BROKEN: pb.WEIGHT_PHASE_BROKEN,
}
HAND_OVER_S = 2.0
"""The part of the time to drain that is for partial samples on their way to the coordinator."""


class GeneratorServicer(GeneratorServiceServicer):
    """The API of one replica."""

    def __init__(self, engine: Engine, activities: Activities) -> None:
        self._engine = engine
        self._activities = activities
        self._running: dict[str, str] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._unavailable = "the engine is still starting"
        self._shared = SharedCalls(self._whole)
        self.weights = WeightSession(engine)
        self.sleep = Sleep(engine, self.weights, activities)

    def open(self) -> None:
        """Note that the engine has started."""
        self._unavailable = ""

    async def close(self, grace_s: float) -> None:
        """Take no new work and let what runs end; what has not by then is cut, and its streams deliver what it has."""
        self._unavailable = "the replica is draining"
        try:
            async with asyncio.timeout(max(grace_s / 2, grace_s - HAND_OVER_S)):
                await self._idle.wait()
        except TimeoutError:
            await self._engine.abort(list(self._running))
            await self._idle.wait()
        self._shared.end()

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        async with aclosing(self._endings(request)) as endings:
            async for samples in endings:
                for message in write_samples(samples, self._engine.waiting_samples):
                    yield message

    async def GenerateMany(
        self, request_iterator: AsyncIterator[pb.GenerateManyRequest], context: Any
    ) -> AsyncIterator[pb.GenerateManyResponse]:
        self._require_open()
        async with aclosing(self._shared.answers(request_iterator)) as answers:
            async for together in answers:
                for message in in_messages(together, self._engine.waiting_samples):
                    yield message

    async def _whole(self, request: pb.GenerateRequest) -> list[pb.GeneratedSample]:
        """Return the samples of a request once all have ended."""
        request.ClearField("gather")
        async with aclosing(self._endings(request)) as endings:
            return [sample async for samples in endings for sample in map(write_sample, samples)]

    async def _endings(self, request: pb.GenerateRequest) -> AsyncGenerator[list[Sample]]:
        """Yield the samples of a request, those that end together."""
        self._require_open()
        self.sleep.require_awake(unless=request.run_id)
        minimum = Version.from_proto(request.min_version) if request.HasField("min_version") else None
        self.weights.require_serving(request.run_id, minimum)
        live = self.weights.live
        wanted = read_request(
            request, self._engine.info, None if live is None else f"{self.weights.run_id}/{live}"
        )
        if request.request_id in self._running:
            raise AlreadyExists(
                f"request {request.request_id} runs already", next_step="give each attempt its own id"
            )
        self._running[request.request_id] = request.run_id
        self._idle.clear()
        try:
            endings = gathered(self._engine.generate(wanted), request.gather.ToTimedelta().total_seconds())
            async with aclosing(endings):
                async for samples in endings:
                    yield samples
        finally:
            del self._running[request.request_id]
            if not self._running:
                self._idle.set()

    async def JoinWeightGroup(
        self, request: pb.JoinWeightGroupRequest, context: Any
    ) -> pb.JoinWeightGroupResponse:
        self._require_open()
        self._require_run(request.run_id)
        group, manifest = request.group, Manifest.from_proto(request.manifest)
        title = f"joining weight group epoch {group.epoch}"
        with self._doing(names.GENERATOR_JOIN, title, request, {names.EPOCH: group.epoch}):
            # A stale call would take the trainer's memory.
            self.weights.require_newer(request.run_id, group.epoch)
            await self.sleep.wake()
            await self.weights.join(request.run_id, group, request.rank_offset, manifest)
        return pb.JoinWeightGroupResponse()

    async def StageWeights(self, request: pb.StageWeightsRequest, context: Any) -> pb.StageWeightsResponse:
        self._require_open()
        self.sleep.require_awake()
        version = Version.from_proto(request.policy_version)
        about: dict[str, str | int] = {names.POLICY_VERSION: str(version)}
        with self._doing(names.GENERATOR_STAGE, f"receiving version {version}", request, about) as span:
            kv_policy = KV_POLICIES.get(request.kv_policy, KvPolicy.RECOMPUTE)
            staged = await self.weights.stage(request.run_id, request.epoch, version, kv_policy)
            span.set_attribute(names.BYTES, staged.manifest.nbytes)
        return pb.StageWeightsResponse(
            digests=weights_pb2.WeightDigests(
                version=request.policy_version,
                manifest_digest=staged.manifest.digest,
                tensor_digests=staged.digests,
            ),
            bytes=staged.manifest.nbytes,
            elapsed=duration(staged.elapsed_s),
        )

    async def GetWeightStatus(
        self, request: pb.GetWeightStatusRequest, context: Any
    ) -> pb.GetWeightStatusResponse:
        weights = self.weights
        return pb.GetWeightStatusResponse(
            phase=PHASES[weights.phase],
            live_version=None if weights.live is None else weights.live.to_proto(),
            staged_version=None if weights.staged is None else weights.staged.version.to_proto(),
            epoch=weights.epoch,
            buckets_received=weights.buckets_received,
            buckets_total=weights.buckets_total,
            error=weights.error,
            asleep=self.sleep.asleep,
        )

    async def CommitWeights(self, request: pb.CommitWeightsRequest, context: Any) -> pb.CommitWeightsResponse:
        self._require_open()
        self.sleep.require_awake()
        version = Version.from_proto(request.policy_version)
        about: dict[str, str | int] = {names.POLICY_VERSION: str(version)}
        with self._doing(names.GENERATOR_COMMIT, f"committing version {version}", request, about) as span:
            applied = await self.weights.commit(
                request.run_id, request.epoch, version, KV_POLICIES[request.kv_policy], request.expected
            )
            span.set_attribute(names.STALL_SECONDS, applied.stall_s)
        return pb.CommitWeightsResponse(
            stall=duration(applied.stall_s),
            apply=duration(applied.apply_s),
            verify=duration(applied.verify_s),
        )

    async def VerifyWeights(self, request: pb.VerifyWeightsRequest, context: Any) -> pb.VerifyWeightsResponse:
        self._require_open()
        version = Version.from_proto(request.policy_version)
        with self._activities.doing(f"verifying version {version}", run_id=request.run_id):
            verified = await self.weights.verify(request.run_id, version)
        return pb.VerifyWeightsResponse(tensors=verified.tensors, unchecked=verified.unchecked)

    async def AbortWeights(self, request: pb.AbortWeightsRequest, context: Any) -> pb.AbortWeightsResponse:
        self._require_open()
        await self.weights.abort(request.run_id)
        return pb.AbortWeightsResponse()

    async def Sleep(self, request: pb.SleepRequest, context: Any) -> pb.SleepResponse:
        self._require_open()
        self._require_run(request.run_id)
        with self._doing(names.GENERATOR_SLEEP, "falling asleep", request) as span:
            freed = await self.sleep.sleep(request.run_id)
            span.set_attribute(names.BYTES, freed)
        return pb.SleepResponse(freed_bytes=freed)

    async def Wake(self, request: pb.WakeRequest, context: Any) -> pb.WakeResponse:
        self._require_open()
        self._require_run(request.run_id)
        with self._doing(names.GENERATOR_WAKE, "waking up", request):
            await self.sleep.wake()
        return pb.WakeResponse()

    @contextmanager
    def _doing(
        self, name: str, title: str, request: Any, about: dict[str, str | int] | None = None
    ) -> Iterator[Any]:
        """Show a call for a run as a span and as an activity."""
        with (
            telemetry.span(name, attributes={names.RUN_ID: request.run_id, **(about or {})}) as span,
            self._activities.doing(title, run_id=request.run_id),
        ):
            yield span

    def _require_open(self) -> None:
        if self._unavailable:
            raise Unavailable(self._unavailable)

    def _require_run(self, run_id: str) -> None:
        if not run_id:
            raise InvalidRequest("run_id is empty", next_step="weights and sleep belong to a run")


async def gathered(endings: AsyncGenerator[list[Sample]], wait_s: float) -> AsyncGenerator[list[Sample]]:
    """Yield the samples that end within `wait_s` after the first, together; closing it closes `endings`."""
    if not wait_s:
        async with aclosing(endings):
            async for samples in endings:
                yield samples
        return
    arrived: list[Sample] = []
    news = asyncio.Event()

    async def take() -> None:
        try:
            async with aclosing(endings):
                async for samples in endings:
                    arrived.extend(samples)
                    news.set()
        finally:
            news.set()

    taking = asyncio.create_task(take(), name="gather")
    try:
        # More may arrive, and the last of all, while those before are handed on.
        while arrived or not taking.done():
            await news.wait()
            if not taking.done():
                await asyncio.wait({taking}, timeout=wait_s)
            news.clear()
            if arrived:
                together, arrived = arrived, []
                yield together
        await taking
    finally:
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)

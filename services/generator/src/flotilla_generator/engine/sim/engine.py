"""Samples without a model: seeded tokens, a latency model, and a real weight receiver.

Invariants: the same seed under the same version gives the same sample; logprobs are plausible but mean nothing; weights
are received, digested and kept like in any other engine, so that every path of a sync is the real one. One process
serves thousands of streams: a sample costs a slice of a shared table and no task, and all of them share one timer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import numpy as np
import torch

from flotilla.common.v1 import weights_pb2
from flotilla_core.config.generators import GeneratorConfig
from flotilla_core.errors import FailedPrecondition
from flotilla_core.version import Version
from flotilla_generator.checkpoint import Checkpoint
from flotilla_generator.engine.base import (
    Applied,
    Engine,
    EngineInfo,
    FinishReason,
    GenerationRequest,
    KvPolicy,
    Received,
    Sample,
    SampleSlot,
    Verified,
)
from flotilla_generator.engine.sim.decoding import Decoding
from flotilla_generator.engine.sim.schedule import Schedule
from flotilla_weights.group import Receiver
from flotilla_weights.inbox import Inbox
from flotilla_weights.manifest import Manifest

TABLE_SIZE = 1 << 20
GOLDEN = 0x9E3779B97F4A7C15
MASK = (1 << 64) - 1


class SimEngine(Engine):
    """Tokens out of a table."""

    def __init__(self, config: GeneratorConfig, checkpoint: Checkpoint) -> None:
        self._config = config
        self._latency = config.sim
        self._checkpoint = checkpoint
        self._tokens = np.empty(0, np.int32)
        self._logprobs = np.empty(0, np.float32)
        self.requests: dict[str, list[Decoding]] = {}
        self._live: Version | None = None
        self.schedule = Schedule(config.max_running_samples, lambda one: one.begin(self._live))
        self._receiver: Receiver | None = None
        self._inbox: Inbox | None = None
        self.weights: dict[str, torch.Tensor] = {}

    @property
    def info(self) -> EngineInfo:
        limit = self._config.max_model_tokens or self._checkpoint.longest_sequence
        return EngineInfo(
            limit,
            self._checkpoint.vocabulary_size,
            weight_workers=1,
            versions={"engine": "sim"},
            can_sleep=self._config.sleep_while_training,
        )

    async def start(self) -> None:
        random = np.random.default_rng(0)
        self._tokens = random.integers(0, self._checkpoint.vocabulary_size, 2 * TABLE_SIZE, dtype=np.int32)
        self._logprobs = -random.exponential(1.0, 2 * TABLE_SIZE).astype(np.float32)

    async def stop(self) -> None:
        await self.drop()

    async def wait_failed(self) -> str:
        await asyncio.Event().wait()
        return ""

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[list[Sample]]:
        decoding = [Decoding(slot, self._length(slot, request), self._latency) for slot in request.samples]
        self.requests[request.request_id] = decoding
        schedule = self.schedule
        try:
            if schedule.beginning and schedule.ending and not any(one.seconds for one in decoding):
                for one in decoding:
                    one.begin(self._live)
                yield [self._finish(one, request) for one in decoding]
                return
            ended: list[Sample] = []
            news = asyncio.Event()

            def take(one: Decoding) -> None:
                ended.append(self._finish(one, request))
                news.set()

            schedule.ask(decoding, take)
            left = len(decoding)
            while left:
                await news.wait()
                news.clear()
                together, ended = ended, []
                left -= len(together)
                yield together
        finally:
            self.requests.pop(request.request_id, None)
            schedule.forget(decoding)

    async def abort(self, request_ids: Sequence[str]) -> int:
        return self.schedule.cut(one for name in request_ids for one in self.requests.get(name, ()))

    async def worker_stacks(self) -> list[tuple[str, int, str]]:
        return []

    @property
    def waiting_samples(self) -> int:
        return self.schedule.waiting

    async def join(self, group: weights_pb2.WeightGroup, rank_offset: int, manifest: Manifest) -> None:
        self._receiver = receiver = Receiver(group, rank_offset, manifest)
        self._inbox = Inbox(receiver, manifest)
        await self._on_a_thread(receiver, receiver.connect)

    async def receive(self, progress: Callable[[int], None], kv_policy: KvPolicy) -> Received:
        receiver, inbox = self._receiver, self._inbox
        if receiver is None or inbox is None:
            raise FailedPrecondition("no weight group was joined")
        await self._on_a_thread(receiver, lambda: inbox.receive(progress))
        return Received((tuple(inbox.digests),))

    async def apply(self, version: Version, kv_policy: KvPolicy) -> Applied:
        started = time.perf_counter()
        async with self._standing_still(kv_policy):
            if self._latency.commit_s:
                await asyncio.sleep(self._latency.commit_s)
            staged = self._inbox.take() if self._inbox is not None else None
            self.weights = dict(staged.tensors(torch.device("cpu"))) if staged is not None else {}
            self._live = version
            for group in self.requests.values():
                for one in group:
                    one.go_on_under(version)
        elapsed = time.perf_counter() - started
        return Applied(stall_s=elapsed, apply_s=elapsed, verify_s=0.0)

    async def verify(self) -> Verified:
        return Verified(0, unchecked="the sim engine decodes without weights")

    async def tag(self, version: Version | None) -> None:
        self._live = version

    async def drop(self) -> bool:
        receiver, self._receiver, self._inbox = self._receiver, None, None
        if receiver is not None:
            await asyncio.to_thread(receiver.abort)
        return False

    async def sleep(self) -> int:
        self.schedule.stand_still()
        return 0

    async def wake(self) -> None:
        self.schedule.go_on()

    @asynccontextmanager
    async def _standing_still(self, kv_policy: KvPolicy) -> AsyncIterator[None]:
        """Let no sample end inside the block; before it, wait for the end of those that must not see the commit."""
        schedule = self.schedule
        try:
            if kv_policy is KvPolicy.DRAIN:
                schedule.beginning = False
                await schedule.wait_idle()
            schedule.ending = False
            yield
        finally:
            schedule.beginning = schedule.ending = True
            schedule.look()

    async def _on_a_thread(self, receiver: Receiver, work: Callable[[], None]) -> None:
        try:
            await asyncio.to_thread(work)
        except asyncio.CancelledError:
            receiver.abort()
            raise

    def _finish(self, one: Decoding, request: GenerationRequest) -> Sample:
        sampling = request.sampling.after(len(one.slot.prefix))
        version = (one.starts[-1][0] if one.starts else None) or Version(0, 0)
        key = (one.slot.seed ^ (version.step + 1) * GOLDEN ^ version.lineage << 32) * GOLDEN & MASK
        start = key >> 44
        length = one.length
        if one.cut:
            length = one.written()
            reason = FinishReason.ABORT
        else:
            reason = FinishReason.LENGTH if length == sampling.max_tokens else FinishReason.STOP
        token_ids = self._tokens[start : start + length]
        stops = sampling.stop_token_ids or self._checkpoint.end_of_sequence
        if reason is FinishReason.STOP and stops:
            token_ids = token_ids.copy()
            token_ids[-1] = stops[0]
        now = time.monotonic()
        return Sample(
            sample_id=one.slot.sample_id,
            token_ids=token_ids,
            logprobs=self._logprobs[start : start + length],
            finish_reason=reason,
            spans=one.spans(length),
            queued_s=(one.started if one.starts else now) - one.asked,
            first_token_s=min(now - one.asked, self._latency.time_to_first_token_s),
            total_s=now - one.asked,
        )

    def _length(self, slot: SampleSlot, request: GenerationRequest) -> int:
        written = len(slot.prefix)
        sampling = request.sampling.after(written)
        longest = min(sampling.max_tokens, self.info.max_model_tokens - len(request.prompt) - written)
        if self._latency.response_tokens is not None:
            return max(1, min(self._latency.response_tokens - written, longest))
        shortest = min(max(1, sampling.min_tokens), longest)
        return longest if request.sampling.ignore_eos else shortest + slot.seed % (longest - shortest + 1)

"""Samples without a model: seeded tokens, a latency model, and a real weight receiver.

Invariants: the same seed under the same version gives the same sample; logprobs are plausible but mean nothing; weights
are received, digested and kept like in any other engine, so that every path of a sync is the real one. One process
serves thousands of streams: a sample costs a slice of a shared table and at most one timer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence

import numpy as np
import torch

from flotilla.common.v1 import weights_pb2
from flotilla_core.config.stack import GeneratorConfig
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
    Load,
    PauseMode,
    Received,
    Sample,
    SampleSlot,
    Sampling,
    Span,
)
from flotilla_weights.group import Receiver
from flotilla_weights.inbox import Inbox
from flotilla_weights.manifest import Manifest

TABLE_SIZE = 1 << 20
GOLDEN = 0x9E3779B97F4A7C15
MASK = (1 << 64) - 1


class Decoding:
    """A sample: how long it will be, and who writes from which token on once it has begun."""

    def __init__(self, slot: SampleSlot, length: int) -> None:
        self.slot = slot
        self.length = length
        self.starts: list[tuple[Version | None, int]] = []
        self.asked = self.started = time.monotonic()
        self.cut = asyncio.Event()

    def begin(self, version: Version | None) -> None:
        """It decodes from now on."""
        self.starts.append((version, 0))
        self.started = time.monotonic()


class SimEngine(Engine):
    """Tokens out of a table."""

    def __init__(self, config: GeneratorConfig, checkpoint: Checkpoint) -> None:
        self._config = config
        self._latency = config.sim
        self._checkpoint = checkpoint
        self._tokens = np.empty(0, np.int32)
        self._logprobs = np.empty(0, np.float32)
        self._requests: dict[str, list[Decoding]] = {}
        self._live: Version | None = None
        self._unpaused = asyncio.Event()
        self._unpaused.set()
        self._beginning = asyncio.Event()
        self._beginning.set()
        """Cleared while running samples end before a pause: the others wait."""
        self._places = asyncio.Semaphore(config.max_running_samples)
        self._waiting = 0
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._receiver: Receiver | None = None
        self._inbox: Inbox | None = None
        self._weights: dict[str, torch.Tensor] = {}

    @property
    def info(self) -> EngineInfo:
        limit = self._config.max_model_tokens or self._checkpoint.longest_sequence
        return EngineInfo(
            limit, self._checkpoint.vocabulary_size, weight_workers=1, versions={"engine": "sim"}
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

    async def generate(self, request: GenerationRequest) -> AsyncIterator[list[Sample]]:
        decoding = [Decoding(slot, self._length(slot, request)) for slot in request.samples]
        self._requests[request.request_id] = decoding
        try:
            if self._slowest(decoding) == 0 and self._unpaused.is_set() and self._beginning.is_set():
                for one in decoding:
                    one.begin(self._live)
                yield [self._finish(one, _rest(one.slot, request)) for one in decoding]
                return
            tasks = {asyncio.create_task(self._decode(one, _rest(one.slot, request))) for one in decoding}
            try:
                while tasks:
                    ended, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                    yield [task.result() for task in ended]
            finally:
                for task in tasks:
                    task.cancel()
        finally:
            self._requests.pop(request.request_id, None)

    async def abort(self, request_ids: Sequence[str]) -> int:
        cut = [one for name in request_ids for one in self._requests.get(name, ()) if not one.cut.is_set()]
        for one in cut:
            one.cut.set()
        return len(cut)

    async def pause(self, mode: PauseMode) -> None:
        self._unpaused.clear()
        if mode is PauseMode.ABORT:
            await self.abort(list(self._requests))
        elif mode is PauseMode.WAIT:
            self._beginning.clear()
            self._unpaused.set()
            await self._idle.wait()
            self._unpaused.clear()

    async def resume(self) -> None:
        self._beginning.set()
        self._unpaused.set()

    async def worker_stacks(self) -> list[tuple[str, int, str]]:
        return []

    @property
    def waiting_samples(self) -> int:
        return self._waiting

    def load(self) -> Load:
        running = [one for group in self._requests.values() for one in group]
        left = sum(one.length - self._written(one) for one in running)
        return Load(len(running), self.waiting_samples, left, 0.0)

    async def join(self, group: weights_pb2.WeightGroup, rank_offset: int, manifest: Manifest) -> None:
        self._receiver = receiver = Receiver(group, rank_offset, manifest)
        self._inbox = Inbox(receiver, manifest)
        await self._on_a_thread(receiver, receiver.connect)

    async def receive(self, progress: Callable[[int], None]) -> Received:
        receiver, inbox = self._receiver, self._inbox
        if receiver is None or inbox is None:
            raise FailedPrecondition("no weight group was joined")
        await self._on_a_thread(receiver, lambda: inbox.receive(progress))
        return Received((tuple(inbox.digests),))

    async def apply(self, version: Version, kv_policy: KvPolicy) -> Applied:
        started = time.perf_counter()
        await self.pause(PauseMode.WAIT if kv_policy is KvPolicy.DRAIN else PauseMode.KEEP)
        if self._latency.commit_s:
            await asyncio.sleep(self._latency.commit_s)
        staged = self._inbox.take() if self._inbox is not None else None
        self._weights = dict(staged.tensors(torch.device("cpu"))) if staged is not None else {}
        self._live = version
        for group in self._requests.values():
            for one in group:
                if one.starts:
                    one.starts.append((version, self._written(one)))
        await self.resume()
        elapsed = time.perf_counter() - started
        return Applied(stall_s=elapsed, apply_s=elapsed, verify_s=0.0)

    async def untag(self) -> None:
        self._live = None

    async def drop(self) -> None:
        receiver, self._receiver, self._inbox = self._receiver, None, None
        if receiver is not None:
            await asyncio.to_thread(receiver.abort)

    async def _on_a_thread(self, receiver: Receiver, work: Callable[[], None]) -> None:
        try:
            await asyncio.to_thread(work)
        except asyncio.CancelledError:
            receiver.abort()
            raise

    async def _decode(self, one: Decoding, sampling: Sampling) -> Sample:
        placed = await self._place(one)
        try:
            await self._write(one)
        finally:
            if placed:
                self._places.release()
        return self._finish(one, sampling)

    async def _place(self, one: Decoding) -> bool:
        """Wait in the queue of the engine; false where the sample was cut meanwhile."""
        if not self._places.locked():
            return await self._places.acquire()
        place, cut = asyncio.ensure_future(self._places.acquire()), asyncio.ensure_future(one.cut.wait())
        taken = False
        self._waiting += 1
        try:
            await asyncio.wait({place, cut}, return_when=asyncio.FIRST_COMPLETED)
            taken = place.done()
        finally:
            self._waiting -= 1
            cut.cancel()
            if not taken and not place.cancel():
                self._places.release()
        return taken

    async def _write(self, one: Decoding) -> None:
        if not self._beginning.is_set():
            await _first_of(self._beginning, one.cut)
        one.begin(self._live)
        self._running += 1
        self._idle.clear()
        try:
            async with asyncio.timeout(self._seconds(one.length)):
                await one.cut.wait()
        except TimeoutError:
            await self._unpaused.wait()
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()

    def _finish(self, one: Decoding, sampling: Sampling) -> Sample:
        version = one.starts[-1][0] or Version(0, 0)
        key = (one.slot.seed ^ (version.step + 1) * GOLDEN ^ version.lineage << 32) * GOLDEN & MASK
        start = key >> 44
        length = one.length
        if one.cut.is_set():
            length = self._written(one)
            reason = FinishReason.ABORT
        else:
            reason = FinishReason.LENGTH if length == sampling.max_tokens else FinishReason.STOP
        token_ids = self._tokens[start : start + length]
        stops = sampling.stop_token_ids or self._checkpoint.end_of_sequence
        if reason is FinishReason.STOP and stops:
            token_ids = token_ids.copy()
            token_ids[-1] = stops[0]
        total = time.monotonic() - one.asked
        return Sample(
            sample_id=one.slot.sample_id,
            token_ids=token_ids,
            logprobs=self._logprobs[start : start + length],
            finish_reason=reason,
            spans=_spans(one.starts, length),
            queued_s=one.started - one.asked,
            first_token_s=min(total, self._latency.time_to_first_token_s),
            total_s=total,
        )

    def _length(self, slot: SampleSlot, request: GenerationRequest) -> int:
        sampling, written = _rest(slot, request), len(slot.prefix)
        longest = min(sampling.max_tokens, self.info.max_model_tokens - len(request.prompt) - written)
        if self._latency.response_tokens is not None:
            return max(1, min(self._latency.response_tokens - written, longest))
        shortest = min(max(1, sampling.min_tokens), longest)
        return longest if request.sampling.ignore_eos else shortest + slot.seed % (longest - shortest + 1)

    def _seconds(self, length: int) -> float:
        return self._latency.time_to_first_token_s + (length - 1) * self._latency.seconds_per_token

    def _slowest(self, decoding: list[Decoding]) -> float:
        return max(self._seconds(one.length) for one in decoding)

    def _written(self, one: Decoding) -> int:
        """Tokens that exist by now."""
        if not one.starts:
            return 0
        elapsed = time.monotonic() - one.started - self._latency.time_to_first_token_s
        if elapsed < 0:
            return 0
        if self._latency.seconds_per_token == 0:
            return one.length
        return min(one.length, 1 + int(elapsed / self._latency.seconds_per_token))


async def _first_of(*events: asyncio.Event) -> None:
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


def _rest(slot: SampleSlot, request: GenerationRequest) -> Sampling:
    return request.sampling.after(len(slot.prefix))


def _spans(starts: list[tuple[Version | None, int]], length: int) -> tuple[Span, ...]:
    ends = [min(start, length) for _, start in starts[1:]] + [length]
    return tuple(
        Span(version, start, end) for (version, start), end in zip(starts, ends, strict=True) if end > start
    )

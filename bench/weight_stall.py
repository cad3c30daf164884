"""The time that decoding is paused at a weight sync, against what applying the weights costs with nothing around it.

vLLM on the CPU decodes; a sender in another process broadcasts a Qwen3 of 95 million parameters beside it; each commit
is made as the generator makes it, with digests and proof of the weights. Two floors are measured in the same run,
in the worker, on the same tensors, right before each commit: vLLM's own reload of them, and a copy of their bytes into
memory that is there already.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import psutil
from qwen3_shape import make_model
from table import Row
from weight_sender import EPOCH, WeightSender

from flotilla.common.v1 import weights_pb2
from flotilla_core.config.generators import GeneratorConfig
from flotilla_core.errors import Unavailable
from flotilla_core.version import Version
from flotilla_generator.checkpoint import Checkpoint
from flotilla_generator.engine.base import Applied, KvPolicy, SampleSlot, Sampling
from flotilla_generator.engine.vllm.decoding import Decoding, sampling_params
from flotilla_generator.engine.vllm.engine import VllmEngine
from flotilla_generator.engine.vllm.weight_commit import Commits
from flotilla_generator.engine.vllm.worker_calls import WorkerCalls
from flotilla_generator.weights import WeightSession

ROUNDS = int(os.environ.get("FLOTILLA_BENCH_SYNCS", "12"))
WARM_UP_ROUNDS = 2
BAR = 1.3
STREAMS = 4
LONGEST = 4096
BUCKET_BYTES = 32 << 20
RUN = "weight-stall"
T = TypeVar("T")
Parts = dict[str, float]
QWEN3_95M = {
    "vocab_size": 50_304,
    "hidden_size": 640,
    "intermediate_size": 1920,
    "num_hidden_layers": 13,
    "num_attention_heads": 10,
    "num_key_value_heads": 5,
    "head_dim": 64,
}


@dataclass(frozen=True)
class Round:
    """One sync: what it cost, and the floor of its tensors."""

    floor_s: float
    floor_cpu_s: float
    copy_s: float
    applied: Applied
    parts: Parts
    """Of the stall, as the service sees them: each is a call to vLLM's process and back."""
    commit_cpu_s: float
    """Of the engine's process, with the decoding step that ends before the pause."""
    gap_s: float
    """Longest silence of a stream around the commit."""
    resident: int
    """Bytes of memory that the engine's process held before it."""


class TimedCalls(WorkerCalls):
    """Calls of the workers, each with the time that the last one took."""

    def __init__(self, llm: Callable[[], Any], parts: Parts) -> None:
        super().__init__(llm)
        self._parts = parts

    async def ask(self, method: str, *arguments: Any) -> list[dict[str, Any]]:
        with _timed(self._parts, method):
            return await super().ask(method, *arguments)


class TimedEngine(VllmEngine):
    """The engine, with the parts of its last commit."""

    def __init__(self, config: GeneratorConfig, checkpoint: Checkpoint, worker_extension: str) -> None:
        super().__init__(config, checkpoint, worker_extension)
        self.parts: Parts = {}
        self.workers = TimedCalls(lambda: self.llm, self.parts)
        self.commits = TimedCommits(lambda: self.llm, self.workers, self.decoding, self.parts)

    async def apply(self, version: Version, kv_policy: KvPolicy) -> Applied:
        self.parts.clear()
        applied = await super().apply(version, kv_policy)
        self.parts["resume"] = max(0.0, applied.stall_s - self.parts["flotilla_apply"])
        return applied


class TimedCommits(Commits):
    """Commits, whose parts are timed."""

    def __init__(
        self, llm: Callable[[], Any], workers: WorkerCalls, decoding: Decoding, parts: Parts
    ) -> None:
        super().__init__(llm, workers, decoding)
        self._parts = parts

    async def _stand_still(self, kv_policy: KvPolicy) -> None:
        with _timed(self._parts, "pause"):
            await super()._stand_still(kv_policy)


@contextmanager
def _timed(parts: Parts, part: str) -> Iterator[None]:
    started = time.perf_counter()
    try:
        yield
    finally:
        parts[part] = time.perf_counter() - started


@dataclass
class Streams:
    """Samples that decode all the time, and when their tokens came."""

    engine: VllmEngine
    arrivals: list[list[float]] = field(default_factory=lambda: [[] for _ in range(STREAMS)])
    _arrived: asyncio.Event = field(default_factory=asyncio.Event)

    async def decode(self, index: int) -> None:
        """One stream after the other in this place."""
        from vllm.sampling_params import RequestOutputKind

        for number in range(1 << 30):
            params = sampling_params(
                Sampling(1.0, LONGEST // 2, ignore_eos=True), SampleSlot("stream", index), end_of_sequence=()
            )
            params.output_kind = RequestOutputKind.DELTA
            prompt = {"prompt_token_ids": list(range(16))}
            async for _ in self.engine.llm.generate(prompt, params, f"stream-{index}-{number}"):
                self.arrivals[index].append(time.perf_counter())
                self._arrived.set()

    def longest_gap(self, since: float) -> float:
        """Seconds between two tokens of one stream."""
        gaps = [0.0]
        for times in self.arrivals:
            recent = [when for when in times if when >= since]
            gaps += [after - before for before, after in itertools.pairwise(recent)]
        return max(gaps)

    async def tokens(self, count: int) -> None:
        """Wait until each stream has so many more tokens."""
        wanted = [len(times) + count for times in self.arrivals]
        while any(len(times) < want for times, want in zip(self.arrivals, wanted, strict=True)):
            await self._arrived.wait()
            self._arrived.clear()


def measure() -> list[Row]:
    """Return the stall, its parts, and the floor."""
    rounds, parameters = asyncio.run(_rounds())
    return _rows(rounds, parameters)


async def _rounds() -> tuple[list[Round], int]:
    with tempfile.TemporaryDirectory(prefix="flotilla-bench-") as name:
        folder = Path(name)
        make_model(folder, **QWEN3_95M)
        engine = TimedEngine(
            GeneratorConfig(max_model_tokens=LONGEST), Checkpoint.read(folder), "apply_alone.ApplyingWorker"
        )
        await engine.start()
        try:
            return await _unless_it_dies(engine, _synced(engine, folder))
        finally:
            await engine.stop()


async def _unless_it_dies(engine: VllmEngine, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`, or raise when the engine dies: vLLM never answers a caller of a dead engine."""
    working = asyncio.create_task(work)
    dying = asyncio.create_task(engine.wait_failed())
    try:
        await asyncio.wait([working, dying], return_when=asyncio.FIRST_COMPLETED)
        if dying.done():
            raise Unavailable(dying.result(), where="the measured engine", next_step="see its log above")
        return working.result()
    finally:
        for task in (working, dying):
            task.cancel()
        await asyncio.gather(working, dying, return_exceptions=True)


async def _synced(engine: TimedEngine, folder: Path) -> tuple[list[Round], int]:
    await engine.workers.ask("flotilla_remember")
    with WeightSender(folder, BUCKET_BYTES) as sender:
        session = WeightSession(engine)
        await session.join(RUN, sender.group, 1, sender.manifest)
        done = [
            await _round(engine, session, sender, Version(0, step))
            for step in range(1, WARM_UP_ROUNDS + ROUNDS + 1)
        ]
        return done[WARM_UP_ROUNDS:], sender.manifest.nbytes // 4


async def _round(
    engine: TimedEngine, session: WeightSession, sender: WeightSender, version: Version
) -> Round:
    streams = Streams(engine)
    decoding = [asyncio.create_task(streams.decode(index)) for index in range(STREAMS)]
    try:
        await streams.tokens(4)
        (process,) = await engine.workers.ask("flotilla_stacks")
        resident = psutil.Process(process["pid"]).memory_info().rss
        digests, _ = await asyncio.gather(
            asyncio.to_thread(sender.publish), session.stage(RUN, EPOCH, version)
        )
        expected = weights_pb2.WeightDigests(
            version=version.to_proto(), manifest_digest=sender.manifest.digest, tensor_digests=digests
        )
        (floor,) = await engine.workers.ask("flotilla_apply_alone")
        await streams.tokens(4)
        since = time.perf_counter()
        await streams.tokens(4)
        before = _cpu_seconds(floor["pid"])
        applied = await session.commit(RUN, EPOCH, version, KvPolicy.RECOMPUTE, expected)
        used = _cpu_seconds(floor["pid"]) - before
        await streams.tokens(4)
        return Round(
            floor_s=floor["seconds"],
            floor_cpu_s=floor["cpu_seconds"],
            copy_s=floor["copy_seconds"],
            applied=applied,
            parts=dict(engine.parts),
            commit_cpu_s=used,
            gap_s=streams.longest_gap(since),
            resident=resident,
        )
    finally:
        for task in decoding:
            task.cancel()
        await asyncio.gather(*decoding, return_exceptions=True)


def _cpu_seconds(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def _rows(rounds: list[Round], parameters: int) -> list[Row]:
    def median(of: Any) -> float:
        return statistics.median(of(one) for one in rounds)

    def ms(of: Any) -> str:
        return f"{1000 * median(of):.1f} ms"

    ratio = median(lambda one: one.applied.stall_s / one.floor_s)
    to_copy = median(lambda one: one.applied.stall_s / one.copy_s)
    part_names = {"pause": "pause", "flotilla_apply": "apply", "resume": "resume"}
    return [
        Row(
            f"weight sync, {parameters / 1e6:.0f}M parameters on a CPU: stall / vLLM's own reload",
            f"{ratio:.2f}",
            f"<= {BAR}",
            ratio <= BAR,
        ),
        Row("  stall / a copy of the bytes", f"{to_copy:.2f}"),
        Row("  stall of decoding, last step to resume", ms(lambda one: one.applied.stall_s)),
        *(
            Row(f"    {name}", ms(lambda one, part=part: one.parts[part]))
            for part, name in part_names.items()
        ),
        Row("      exchange of the weights, in the engine's process", ms(lambda one: one.applied.apply_s)),
        Row("  floor: vLLM's own reload", ms(lambda one: one.floor_s)),
        Row("  floor: a copy of the bytes", ms(lambda one: one.copy_s)),
        Row(
            "  CPU time of the engine: whole commit / reload, which other processes disturb less",
            f"{median(lambda one: one.commit_cpu_s / one.floor_cpu_s):.2f}",
        ),
        Row("  longest silence of a stream", ms(lambda one: one.gap_s)),
        Row(
            "  memory of the engine's process between two syncs", f"{rounds[-1].resident / (1 << 20):.0f} MiB"
        ),
        Row(
            "    how much more that is after each sync",
            f"{(rounds[-1].resident - rounds[0].resident) / (len(rounds) - 1) / (1 << 20):.1f} MiB",
        ),
    ]

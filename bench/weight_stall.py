"""How long decoding stands still at a weight sync, against what applying the weights costs with nothing around it.

vLLM on the CPU decodes; a sender in another process broadcasts a Qwen3 of 95 million parameters beside it; each commit
is made as the generator makes it, with digests, proof of the live weights and tag. The floor is measured in the same
run, on the same staged tensors, right before each commit: vLLM's own reload of tensors that lie in the worker's memory.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from qwen3_shape import make_model
from table import Row
from weight_sender import EPOCH, WeightSender

from flotilla.common.v1 import weights_pb2
from flotilla_core.config.stack import GeneratorConfig
from flotilla_core.version import Version
from flotilla_generator.checkpoint import Checkpoint
from flotilla_generator.engine.base import Applied, KvPolicy, Sampling
from flotilla_generator.engine.vllm.engine import VllmEngine
from flotilla_generator.engine.vllm.sampling import sampling_params
from flotilla_generator.weights import WeightSession

ROUNDS = int(os.environ.get("FLOTILLA_BENCH_SYNCS", "12"))
WARM_UP_ROUNDS = 2
BAR = 1.3
STREAMS = 4
LONGEST = 4096
BUCKET_BYTES = 32 << 20
RUN = "weight-stall"
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
    applied: Applied
    commit_cpu_s: float
    """Of the engine's process, with the decoding step that ends before the pause."""
    gap_s: float
    """Longest silence of a stream around the commit."""


@dataclass
class Streams:
    """Samples that decode all the time, and when their tokens came."""

    engine: VllmEngine
    arrivals: list[list[float]] = field(default_factory=lambda: [[] for _ in range(STREAMS)])
    _arrived: asyncio.Event = field(default_factory=asyncio.Event)

    async def decode(self, index: int) -> None:
        """One stream after the other in this place."""
        for number in range(1 << 30):
            params = sampling_params(
                Sampling(1.0, LONGEST // 2, ignore_eos=True), seed=index, end_of_sequence=(), stream=True
            )
            prompt = {"prompt_token_ids": list(range(16))}
            async for _ in self.engine._llm.generate(prompt, params, f"stream-{index}-{number}"):
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
    """The stall, its parts, and the floor."""
    rounds, parameters = asyncio.run(_rounds())
    return _rows(rounds, parameters)


async def _rounds() -> tuple[list[Round], int]:
    with tempfile.TemporaryDirectory(prefix="flotilla-bench-") as name:
        folder = Path(name)
        make_model(folder, **QWEN3_95M)
        engine = VllmEngine(
            GeneratorConfig(max_model_tokens=LONGEST), Checkpoint.read(folder), "apply_alone.ApplyingWorker"
        )
        await engine.start()
        try:
            with WeightSender(folder, BUCKET_BYTES) as sender:
                session = WeightSession(engine)
                await session.join(RUN, sender.group, 1, sender.manifest)
                done = [
                    await _round(engine, session, sender, Version(0, step))
                    for step in range(1, WARM_UP_ROUNDS + ROUNDS + 1)
                ]
                return done[WARM_UP_ROUNDS:], sender.manifest.nbytes // 4
        finally:
            await engine.stop()


async def _round(engine: VllmEngine, session: WeightSession, sender: WeightSender, version: Version) -> Round:
    streams = Streams(engine)
    decoding = [asyncio.create_task(streams.decode(index)) for index in range(STREAMS)]
    try:
        await streams.tokens(4)
        digests, _ = await asyncio.gather(
            asyncio.to_thread(sender.publish), session.stage(RUN, EPOCH, version)
        )
        expected = weights_pb2.WeightDigests(
            version=version.to_proto(), manifest_digest=sender.manifest.digest, tensor_digests=digests
        )
        (floor,) = await engine._ask("flotilla_apply_alone")
        await streams.tokens(4)
        since = time.perf_counter()
        await streams.tokens(4)
        before = _cpu_seconds(floor["pid"])
        applied = await session.commit(RUN, EPOCH, version, KvPolicy.RECOMPUTE, expected)
        used = _cpu_seconds(floor["pid"]) - before
        await streams.tokens(4)
        return Round(floor["seconds"], floor["cpu_seconds"], applied, used, streams.longest_gap(since))
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

    ratio = median(lambda one: one.applied.stall_s / one.floor_s)
    around = median(lambda one: one.applied.stall_s - one.applied.apply_s - one.applied.verify_s)
    return [
        Row(
            f"weight sync, {parameters / 1e6:.0f}M parameters on a CPU: stall / floor",
            f"{ratio:.2f}",
            f"<= {BAR}",
            ratio <= BAR,
        ),
        Row(
            "  stall of decoding, pause to resume", f"{1000 * median(lambda one: one.applied.stall_s):.0f} ms"
        ),
        Row("  floor: applying alone", f"{1000 * median(lambda one: one.floor_s):.0f} ms"),
        Row("    apply, in the stall", f"{1000 * median(lambda one: one.applied.apply_s):.0f} ms"),
        Row("    proof of the live weights", f"{1000 * median(lambda one: one.applied.verify_s):.0f} ms"),
        Row("    pause, tag, resume", f"{1000 * around:.0f} ms"),
        Row(
            "  CPU time of the engine: whole commit / floor, which other processes disturb less",
            f"{median(lambda one: one.commit_cpu_s / one.floor_cpu_s):.2f}",
        ),
        Row("  longest silence of a stream", f"{1000 * median(lambda one: one.gap_s):.0f} ms"),
    ]

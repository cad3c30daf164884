"""The sleep of a generator on one GPU: the memory that it gives back, how long that takes, and what it decodes after.

    python bench/gpu/sleepwake.py [--shape 0.6b|8b] [--kv-gib 16] [--rounds 4] [--limit-s 170] [--out DIR]

Boots the generator's engine in this process with random weights, and takes versions from a sender in another process on
the same GPU, as stall.py does. Prompts are decoded greedily, one after the other, so that a step is composed alike each
time. Each round then

1. puts the replica to sleep, and reads from the driver what became free;
2. has another process take 90 % of it, and write ones into every bit: while it holds them, the replica must not wake;
3. compares the live weights with what was committed, asleep;
4. wakes the replica, decodes the prompts again, and requires the same tokens;
5. publishes a new version, compares it live, and decodes with it what the next round has to repeat.

Prints one JSON line a round, and one of medians. Ends with an error where a requirement fails. `--plain` boots without
sleep and measures decoding alone: what the allocator for sleep costs. Needs torch, vLLM and the sources of this
repository.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import signal
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from stall import RUN, SHAPES, STREAMS, Syncs, send, write_folder
from weight_stall import TimedEngine

from flotilla_core.config.generators import GeneratorConfig
from flotilla_core.errors import Exhausted
from flotilla_core.service import Activities
from flotilla_core.version import Version
from flotilla_generator.checkpoint import Checkpoint
from flotilla_generator.engine.base import GenerationRequest, SampleSlot, Sampling
from flotilla_generator.sleep import Sleep

PROMPTS, PROMPT_TOKENS, TOKENS = 8, 192, 96
LONGEST = 4096
GIB = 1 << 30
BUCKET_BYTES = GIB // 4
SHARE_TAKEN = 0.9
STOP_S, ROUND_S = 20.0, 25.0
LEAST_FREE = 0.3
"""Share of the GPU that has to be free for vLLM to start; the sender is there before it."""
TOLERATED = 256 << 20
"""Bytes by which the driver may call less free than the replica does: other processes take memory meanwhile."""


def take(wire: Connection) -> None:
    """The other process: hold as many bytes as it is told, with every bit set, until it is told 0."""
    held: torch.Tensor | None = None
    torch.zeros(1, device="cuda").sum().item()  # its context is on the GPU before anything is measured
    wire.send("here")
    while (size := wire.recv()) is not None:
        held = None
        torch.cuda.empty_cache()
        if size:
            held = torch.full((size,), 255, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        wire.send(0 if held is None else held.nbytes)


class Neighbour:
    """A process with memory of the same GPU."""

    def __init__(self) -> None:
        spawning = multiprocessing.get_context("spawn")
        self._wire, theirs = spawning.Pipe()
        self._process = spawning.Process(target=take, args=(theirs,), daemon=True)
        self._process.start()
        self._wire.recv()

    async def hold(self, size: int) -> None:
        """Return when it holds so many bytes."""
        self._wire.send(size)
        assert await asyncio.to_thread(self._wire.recv) == size

    def end(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.join()


class Bench:
    """One replica without its service."""

    def __init__(self, engine: TimedEngine, wire: Connection) -> None:
        self.engine = engine
        self.syncs = Syncs(engine, wire)
        idle = asyncio.Event()
        idle.set()
        self.sleep = Sleep(engine, self.syncs.session, Activities(), idle.wait)
        self._requests = 0

    async def greedy(self) -> list[list[int]]:
        """Decode every prompt alone, with nothing in the prefix cache."""
        return [
            (await self._decoded([prompt + 7 * at for at in range(PROMPT_TOKENS)], 1, 0.0))[0]
            for prompt in range(PROMPTS)
        ]

    async def tokens_per_s(self) -> float:
        """Decode many samples at once."""
        started = time.perf_counter()
        samples = await self._decoded(list(range(PROMPT_TOKENS)), STREAMS, 1.0)
        return sum(map(len, samples)) / (time.perf_counter() - started)

    async def _decoded(self, prompt: list[int], count: int, temperature: float) -> list[list[int]]:
        self._requests += 1
        name = f"request-{self._requests}"
        request = GenerationRequest(
            name,
            prompt,
            tuple(SampleSlot(f"{name}/{at}", at) for at in range(count)),
            Sampling(temperature, TOKENS, ignore_eos=True),
            cache_salt=name,
        )
        return [
            sample.token_ids.tolist() async for samples in self.engine.generate(request) for sample in samples
        ]

    async def verified(self, version: Version) -> int:
        """Compare live memory with what was committed; return the number of tensors."""
        return (await self.syncs.session.verify(RUN, version)).tensors


async def one_round(bench: Bench, neighbour: Neighbour, before: list[list[int]]) -> dict[str, Any]:
    """Sleep, wake, and take a new version; `before` is what the prompts gave awake."""
    version = bench.syncs.session.live
    assert version is not None
    speed = await bench.tokens_per_s()
    free = _free()
    started = time.perf_counter()
    freed = await bench.sleep.sleep(RUN)
    slept = time.perf_counter() - started
    gained = _free() - free
    assert gained > freed - TOLERATED, f"{freed} bytes given back, and {gained} more are free"
    tensors = await bench.verified(version)
    await neighbour.hold(int(_free() * SHARE_TAKEN))
    try:
        await bench.sleep.wake()
    except Exhausted as error:
        refusal = str(error)
    else:
        raise AssertionError("it woke without room for its KV cache")
    await neighbour.hold(0)
    started = time.perf_counter()
    await bench.sleep.wake()
    woke = time.perf_counter() - started
    assert _free() > free - TOLERATED, f"{free} bytes were free before, and {_free()} are"
    started = time.perf_counter()
    after = await bench.greedy()
    assert after == before, "other tokens after the sleep"
    greedy_s = time.perf_counter() - started
    again = await bench.tokens_per_s()
    sync = await bench.syncs.sync(None)
    return {
        "freed_gib": round(freed / GIB, 3),
        "gained_gib": round(gained / GIB, 3),
        "sleep_s": round(slept, 4),
        "wake_s": round(woke, 4),
        "greedy_s": round(greedy_s, 3),
        "tokens_per_s": round(speed),
        "tokens_per_s_after": round(again),
        "tensors_compared_asleep": tensors,
        "tensors_compared_after_the_next_sync": sync["tensors_compared"],
        "stall_s": sync["stall_s"],
        "refused": refusal,
    }


def _free() -> int:
    return int(torch.cuda.mem_get_info()[0])


async def measure(asked: argparse.Namespace, folder: Path, wire: Connection) -> list[dict[str, Any]]:
    """Boot, and return the figures of each round."""
    options: dict[str, Any] = {"load_format": "dummy"}
    if not asked.eager:
        options["compilation_config"] = {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "max_cudagraph_capture_size": STREAMS,
        }
    config = GeneratorConfig(
        dtype="bfloat16",
        max_model_tokens=LONGEST,
        max_running_samples=STREAMS,
        kv_cache_gib=asked.kv_gib,
        memory_fraction=LEAST_FREE,
        enforce_eager=asked.eager,
        apply_weights=asked.apply,
        sleep_while_training=not asked.plain,
        engine_options=options,
    )
    engine = TimedEngine(config, Checkpoint.read(folder), "stall.StallWorker")
    booted = time.perf_counter()
    await engine.start()
    _say({"boot_s": round(time.perf_counter() - booted, 1), "free_gib": round(_free() / GIB, 2)})
    neighbour: Neighbour | None = None
    try:
        bench = Bench(engine, wire)
        await bench.syncs.join()
        for _ in range(2):  # the first one loads and makes the standby, the second one copies
            await bench.syncs.sync(None)
        await bench.tokens_per_s()
        if asked.plain:
            speeds = [await bench.tokens_per_s() for _ in range(asked.rounds)]
            _say({"plain": True, "tokens_per_s": round(statistics.median(speeds))})
            return []
        neighbour = await asyncio.to_thread(Neighbour)
        before = await bench.greedy()
        assert await bench.greedy() == before, "other tokens without any sleep: nothing can be compared"
        rounds: list[dict[str, Any]] = []
        last = asked.started + asked.limit_s - STOP_S - ROUND_S
        while len(rounds) < asked.rounds and time.perf_counter() < last:
            rounds.append(await one_round(bench, neighbour, before))
            _say(rounds[-1])
            before = await bench.greedy()
        assert rounds, "the boot took all the time"
        return rounds
    finally:
        if neighbour is not None:
            neighbour.end()
        await engine.stop()


def _say(found: dict[str, Any]) -> None:
    print(json.dumps(found), flush=True)


def summary(asked: argparse.Namespace, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians."""
    keys = ("freed_gib", "gained_gib", "sleep_s", "wake_s", "tokens_per_s", "tokens_per_s_after", "stall_s")
    found: dict[str, Any] = {key: statistics.median(one[key] for one in rounds) for key in keys}
    return {
        "gpu": torch.cuda.get_device_name(0),
        "shape": asked.shape,
        "kv_gib": asked.kv_gib,
        "apply_weights": asked.apply,
        "rounds": len(rounds),
        **found,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="0.6b")
    parser.add_argument("--kv-gib", type=float, default=16.0)
    parser.add_argument("--apply", choices=("prefetch", "direct"), default="prefetch")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--plain", action="store_true", help="boot without sleep, and measure decoding alone")
    parser.add_argument("--limit-s", type=float, default=170.0)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    asked.started = time.perf_counter()
    signal.alarm(round(asked.limit_s))  # for a wait that nothing else ends
    # vLLM's process loads the worker's class by name.
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    spawning = multiprocessing.get_context("spawn")
    wire, theirs = spawning.Pipe()
    sender = spawning.Process(target=send, args=(theirs, asked.shape, "cuda:0", BUCKET_BYTES), daemon=True)
    sender.start()

    async def within_the_limit(folder: Path) -> list[dict[str, Any]]:
        async with asyncio.timeout(max(asked.limit_s - STOP_S, STOP_S)):
            return await measure(asked, folder, wire)

    try:
        with tempfile.TemporaryDirectory(prefix="flotilla-bench-") as name:
            write_folder(Path(name), asked.shape)
            rounds = asyncio.run(within_the_limit(Path(name)))
    finally:
        sender.terminate()
        sender.join()
    lines = [*rounds, summary(asked, rounds)] if rounds else []
    if lines:
        _say(lines[-1])
    if asked.out and lines:
        asked.out.mkdir(parents=True, exist_ok=True)
        text = "".join(json.dumps(one) + "\n" for one in lines)
        (asked.out / f"sleepwake-{asked.shape}-{asked.apply}.jsonl").write_text(text)


if __name__ == "__main__":
    main()

"""The simulated engine keeps the rules of a commit that a real one keeps."""

from __future__ import annotations

import asyncio
import json
import threading
from contextlib import aclosing
from pathlib import Path

import pytest

from flotilla_core.config.generators import GeneratorConfig, SimConfig
from flotilla_core.version import Version
from flotilla_generator.checkpoint import Checkpoint
from flotilla_generator.engine.base import GenerationRequest, KvPolicy, Sample, SampleSlot, Sampling
from flotilla_generator.engine.sim.engine import SimEngine

V1, V2 = Version(0, 1), Version(0, 2)
WAIT_S = 10.0


@pytest.fixture
async def engine(tmp_path: Path) -> SimEngine:
    """The first token of a sample is there at once, the second never."""
    return await serving(tmp_path, SimConfig(seconds_per_token=3600))


async def fresh(folder: Path, sim: SimConfig) -> SimEngine:
    (folder / "config.json").write_text(json.dumps({"vocab_size": 64, "max_position_embeddings": 128}))
    engine = SimEngine(GeneratorConfig(engine="sim", sim=sim), Checkpoint.read(folder))
    await engine.start()
    return engine


async def serving(folder: Path, sim: SimConfig) -> SimEngine:
    engine = await fresh(folder, sim)
    await engine.apply(V1, KvPolicy.RECOMPUTE)
    return engine


def generating(engine: SimEngine, name: str) -> asyncio.Task[list[Sample]]:
    slots = tuple(SampleSlot(f"{name}/{index}", index) for index in range(3))
    request = GenerationRequest(name, [1, 2], slots, Sampling(1.0, 40, ignore_eos=True))

    async def samples() -> list[Sample]:
        async with asyncio.timeout(WAIT_S), aclosing(engine.generate(request)) as stream:
            return [sample async for ended in stream for sample in ended]

    return asyncio.create_task(samples())


async def begun(engine: SimEngine, name: str) -> None:
    async with asyncio.timeout(WAIT_S):
        while not all(one.starts for one in engine.requests.get(name, ())) or name not in engine.requests:
            await asyncio.sleep(0)


async def test_between_samples_each_one_ends_as_it_began_and_new_ones_wait_for_the_commit(
    engine: SimEngine,
) -> None:
    old = generating(engine, "old")
    await begun(engine, "old")
    committing = asyncio.create_task(engine.apply(V2, KvPolicy.DRAIN))
    await asyncio.sleep(0)
    new, given_up = generating(engine, "new"), generating(engine, "given up")
    done, _ = await asyncio.wait({committing, new}, timeout=0.05)
    assert not done and sum(map(len, engine.requests.values())) == 9
    await engine.abort(["given up"])
    assert len(await given_up) == 3

    await engine.abort(["old"])
    assert [[span.version for span in sample.spans] for sample in await old] == [[V1]] * 3
    await asyncio.wait_for(committing, WAIT_S)
    await begun(engine, "new")
    await engine.abort(["new"])
    assert [[span.version for span in sample.spans] for sample in await new] == [[V2]] * 3


async def test_samples_stand_still_during_a_commit_and_end_when_it_is_over(tmp_path: Path) -> None:
    engine = await fresh(tmp_path, SimConfig(commit_s=3600))
    committing = asyncio.create_task(engine.apply(V1, KvPolicy.RECOMPUTE))
    await asyncio.sleep(0)
    samples = generating(engine, "samples")
    await begun(engine, "samples")
    done, _ = await asyncio.wait({samples}, timeout=0.05)
    assert not done
    committing.cancel()
    assert len(await samples) == 3


async def test_in_flight_a_sample_goes_on_under_the_new_version(engine: SimEngine) -> None:
    old = generating(engine, "old")
    await begun(engine, "old")
    await asyncio.wait_for(engine.apply(V2, KvPolicy.RECOMPUTE), WAIT_S)
    (one, *_) = engine.requests["old"]
    assert one.starts == [(V1, 0), (V2, 1)]
    await engine.abort(["old"])
    assert [[span.version for span in sample.spans] for sample in await old] == [[V1]] * 3


async def test_samples_beyond_the_places_of_the_engine_wait_for_one(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 64, "max_position_embeddings": 128}))
    config = GeneratorConfig(engine="sim", sim=SimConfig(seconds_per_token=3600), max_running_samples=4)
    engine = SimEngine(config, Checkpoint.read(tmp_path))
    await engine.start()
    first = generating(engine, "first")
    await begun(engine, "first")
    second, third = generating(engine, "second"), generating(engine, "third")
    done, _ = await asyncio.wait({second, third}, timeout=0.05)
    assert not done and started(engine) == {"first": 3, "second": 1, "third": 0}
    assert engine.waiting_samples == 5

    await engine.abort(["second"])
    assert len(await second) == 3
    async with asyncio.timeout(WAIT_S):
        while started(engine) != {"first": 3, "third": 1}:
            await asyncio.sleep(0)
    first.cancel()
    await begun(engine, "third")
    third.cancel()
    await asyncio.gather(first, third, return_exceptions=True)
    await asyncio.wait_for(engine.schedule.wait_idle(), WAIT_S)
    assert not engine.waiting_samples


def started(engine: SimEngine) -> dict[str, int]:
    return {name: sum(bool(one.starts) for one in samples) for name, samples in engine.requests.items()}


async def test_thousands_of_samples_share_a_few_threads(tmp_path: Path) -> None:
    engine = await serving(tmp_path, SimConfig())

    async def group(number: int) -> int:
        slots = tuple(SampleSlot(f"{number}/{index}", index) for index in range(8))
        request = GenerationRequest(f"group-{number}", [1, 2], slots, Sampling(1.0, 4))
        return sum([len(ended) async for ended in engine.generate(request)])

    async with asyncio.timeout(WAIT_S):
        assert await asyncio.gather(*(group(number) for number in range(250))) == [8] * 250
    assert threading.active_count() < 100

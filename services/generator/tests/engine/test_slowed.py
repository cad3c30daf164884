"""A slowed engine gives what the one inside gives, later."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path

import pytest

from flotilla_core.config.generators import GeneratorConfig, LatencyConfig, SimConfig
from flotilla_generator.checkpoint import Checkpoint
from flotilla_generator.engine.base import GenerationRequest, Sample, SampleSlot, Sampling
from flotilla_generator.engine.sim.engine import SimEngine
from flotilla_generator.engine.slowed import SlowedEngine

FOR_EVER = LatencyConfig(time_to_first_token_s=1000.0)
WAIT_S = 10.0


class Engine(SimEngine):
    """Says when it has given all samples of a request."""

    def __init__(self, config: GeneratorConfig, checkpoint: Checkpoint) -> None:
        super().__init__(config, checkpoint)
        self.given = asyncio.Event()

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[list[Sample]]:
        async with aclosing(super().generate(request)) as stream:
            async for ended in stream:
                yield ended
        self.given.set()


@pytest.fixture
async def engine(tmp_path: Path) -> Engine:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 64, "max_position_embeddings": 128}))
    engine = Engine(GeneratorConfig(engine="sim", sim=SimConfig()), Checkpoint.read(tmp_path))
    await engine.start()
    return engine


def ask(*seeds: int, max_tokens: int = 40) -> GenerationRequest:
    slots = tuple(SampleSlot(f"sample-{seed}", seed) for seed in seeds)
    return GenerationRequest("request", [1, 2, 3], slots, Sampling(1.0, max_tokens))


async def samples(engine: SimEngine | SlowedEngine, request: GenerationRequest) -> list[Sample]:
    async with asyncio.timeout(WAIT_S), aclosing(engine.generate(request)) as stream:
        return [sample async for ended in stream for sample in ended]


def no_other_task_is_left() -> bool:
    return asyncio.all_tasks() == {asyncio.current_task()}


async def test_the_same_samples_leave_after_their_time(engine: Engine) -> None:
    slowed = SlowedEngine(engine, LatencyConfig(time_to_first_token_s=0.05, seconds_per_token=0.002))
    fast = {sample.sample_id: sample for sample in await samples(engine, ask(30, 5, 17))}
    slow = await samples(slowed, ask(30, 5, 17))
    assert len(slow) == len(fast) == 3
    for sample in slow:
        same = fast[sample.sample_id]
        assert sample.token_ids.tolist() == same.token_ids.tolist() and sample.spans == same.spans
        assert sample.total_s >= 0.05 + 0.002 * (len(sample.token_ids) - 1)
    assert no_other_task_is_left()


async def test_an_abort_lets_what_is_held_go(engine: Engine) -> None:
    slowed = SlowedEngine(engine, FOR_EVER)
    asking = asyncio.create_task(samples(slowed, ask(1, 2, 3)))
    await asyncio.wait_for(engine.given.wait(), WAIT_S)
    assert not asking.done()
    await slowed.abort(["request"])
    assert len(await asking) == 3


async def test_a_caller_that_goes_away_leaves_nothing_behind(engine: Engine) -> None:
    slowed = SlowedEngine(engine, FOR_EVER)
    asking = asyncio.create_task(samples(slowed, ask(1, 2)))
    await asyncio.wait_for(engine.given.wait(), WAIT_S)
    asking.cancel()
    await asyncio.wait({asking}, timeout=WAIT_S)
    assert asking.cancelled() and no_other_task_is_left()
    assert len(await samples(SlowedEngine(engine, LatencyConfig()), ask(1, 2))) == 2

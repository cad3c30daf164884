"""A replica that gave its memory away: what stands still, what it refuses, and that it always can be woken."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from flotilla_core.config.generators import GeneratorConfig
from flotilla_core.errors import Exhausted, FailedPrecondition, Internal, StaleVersion, Unavailable
from flotilla_core.service import Activities
from flotilla_core.version import Version
from flotilla_generator.checkpoint import Checkpoint
from flotilla_generator.engine.sim.engine import SimEngine
from flotilla_generator.sleep import Sleep
from flotilla_generator.weights import Phase, WeightSession

LIMIT_S = 5.0
FREED = 1 << 30


class Sleeper(SimEngine):
    """An engine that notes how its memory moves, and fails as it is told."""

    def __init__(self, folder: Path, *, can_sleep: bool = True) -> None:
        (folder / "config.json").write_text(json.dumps({"vocab_size": 8, "max_position_embeddings": 16}))
        config = GeneratorConfig(engine="sim", sleep_while_training=can_sleep)
        super().__init__(config, Checkpoint.read(folder))
        self.did: list[str] = []
        self.failures: list[Exception] = []
        self.may_sleep = asyncio.Event()
        self.may_sleep.set()

    async def sleep(self) -> int:
        self.did.append("sleep")
        await self.may_sleep.wait()
        if self.failures:
            raise self.failures.pop()
        return FREED

    async def wake(self) -> None:
        self.did.append("wake")
        if self.failures:
            raise self.failures.pop()


class Replica:
    """An engine with its sessions."""

    def __init__(self, folder: Path, *, can_sleep: bool = True) -> None:
        self.engine = Sleeper(folder, can_sleep=can_sleep)
        self.weights = WeightSession(self.engine)
        self.activities = Activities()
        self.sleep = Sleep(self.engine, self.weights, self.activities)

    async def until(self, did: str) -> None:
        async with asyncio.timeout(LIMIT_S):
            while did not in self.engine.did:
                await asyncio.sleep(0)


@pytest.fixture
def replica(tmp_path: Path) -> Replica:
    return Replica(tmp_path)


async def test_it_sleeps_and_wakes_once_however_often_it_is_asked(replica: Replica) -> None:
    await replica.sleep.wake()
    replica.sleep.require_awake()
    assert [await replica.sleep.sleep("run") for _ in range(2)] == [FREED, FREED]
    assert replica.sleep.asleep
    with pytest.raises(Unavailable, match=r"run run has put it to sleep.*Wake"):
        replica.sleep.require_awake()
    await replica.sleep.wake()
    await replica.sleep.wake()
    replica.sleep.require_awake()
    assert replica.engine.did == ["sleep", "wake"] and not replica.sleep.asleep


async def test_who_asks_what_a_sleeping_process_does_is_told(replica: Replica) -> None:
    await replica.sleep.sleep("run")
    (activity,) = replica.activities.current()
    assert activity.what.startswith("asleep") and activity.run_id == "run"
    await replica.sleep.wake()
    assert not replica.activities.current()


async def test_the_run_whose_sleep_it_is_may_ask_for_samples_meanwhile(replica: Replica) -> None:
    await replica.sleep.sleep("run")
    replica.sleep.require_awake(unless="run")
    with pytest.raises(Unavailable, match="run run has put it to sleep"):
        replica.sleep.require_awake(unless="other")


async def test_a_caller_who_gives_up_leaves_it_whole_and_a_wake_follows_in_order(
    replica: Replica,
) -> None:
    replica.engine.may_sleep.clear()
    falling = asyncio.create_task(replica.sleep.sleep("run"))
    await replica.until("sleep")
    falling.cancel()
    waking = asyncio.create_task(replica.sleep.wake())
    for _ in range(20):
        await asyncio.sleep(0)
    assert replica.sleep.asleep and replica.engine.did == ["sleep"]
    replica.engine.may_sleep.set()
    await waking
    assert falling.cancelled() and replica.engine.did == ["sleep", "wake"] and not replica.sleep.asleep


async def test_after_a_failure_on_the_way_it_decodes_nothing_until_a_wake_repairs_it(
    replica: Replica,
) -> None:
    replica.engine.failures = [Exhausted("the GPU has no room"), Internal("a worker failed")]
    with pytest.raises(Internal):
        await replica.sleep.sleep("run")
    with pytest.raises(Exhausted):
        await replica.sleep.wake()
    with pytest.raises(Unavailable):
        replica.sleep.require_awake()
    await replica.sleep.wake()
    replica.sleep.require_awake()


async def test_who_serves_a_run_sleeps_for_no_other_one(replica: Replica) -> None:
    await replica.weights.adopt("run", Version(0, 3))
    with pytest.raises(StaleVersion, match="serves run run, and not run other"):
        await replica.sleep.sleep("other")
    assert await replica.sleep.sleep("run") == FREED


async def test_it_does_not_sleep_while_weights_are_on_their_way(replica: Replica) -> None:
    replica.weights.phase = Phase.RECEIVING
    with pytest.raises(FailedPrecondition, match="weights are on their way"):
        await replica.sleep.sleep("run")
    replica.sleep.require_awake()


async def test_an_engine_that_keeps_its_memory_says_which_key_would_change_that(tmp_path: Path) -> None:
    replica = Replica(tmp_path, can_sleep=False)
    with pytest.raises(FailedPrecondition, match=r"generator\.sleep_while_training"):
        await replica.sleep.sleep("run")
    replica.sleep.require_awake()

"""A replica that comes while rollouts run: it catches up beside them, and costs nobody anything but itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from flotilla_coordinator.weights import sync as sync_module
from flotilla_coordinator.weights.members import SyncReport
from flotilla_coordinator.weights.sync import WeightSync
from flotilla_core.config import WeightSyncConfig
from flotilla_core.errors import (
    DeadlineExceeded,
    FlotillaError,
    Internal,
    Mismatch,
    RankFailed,
    Unavailable,
    WeightGroupFailed,
)
from flotilla_core.version import Version
from flotilla_testing.scripted import scripted_generator, scripted_trainer

V1, V2 = Version(0, 1), Version(0, 2)
LIMIT_S = 5.0
JOINER = "b-1"


class Bench:
    """A run on replica `a`, which serves V1, and a joiner `b` that has just become READY."""

    version = Version(0, 0)

    def __init__(self) -> None:
        self.stub = scripted_trainer()
        self.a, self.b = scripted_generator("a"), scripted_generator("b")
        self.ready = [self.a]
        self.evicted: dict[str, FlotillaError] = {}
        self.reports: list[SyncReport] = []
        self.verdicts: dict[str, FlotillaError] = {}
        self.served_at_check: list[bool] = []
        self.sync = WeightSync(
            "run",
            WeightSyncConfig(),
            backend="gloo",
            policy=self,  # type: ignore[arg-type]
            candidates=self._candidates,
            ready=lambda: list(self.ready),  # type: ignore[arg-type]
            evict=self._evict,
            record=self.reports.append,
            verify=self._verify,
        )

    async def _candidates(self) -> list[Any]:
        return list(self.ready)

    def _evict(self, gone: Any, error: FlotillaError) -> None:
        self.evicted[gone.instance_id] = error
        self.ready.remove(gone)

    async def _verify(self, report: SyncReport) -> dict[str, FlotillaError]:
        self.served_at_check.append(self.sync.serving.serves(JOINER, report.version))
        return {m.name: self.verdicts[m.name] for m in report.members if m.name in self.verdicts}

    async def begin(self) -> None:
        await self.sync.publish(V1)
        await self.sync.settled()
        self.ready.append(self.b)

    async def work_until(self, done: Callable[[], bool]) -> None:
        """Rollouts that last until `done`."""

        async def rollouts() -> None:
            while not done():
                await asyncio.sleep(0.001)

        async with asyncio.timeout(LIMIT_S):
            await self.sync.keep_serving(rollouts())

    @property
    def worlds(self) -> list[tuple[int, int]]:
        """Epoch and size of every group."""
        return [(request.epoch, request.world_size) for request in self.stub.asked("OpenWeightGroup")]


@pytest.fixture(autouse=True)
def newcomers_are_looked_for_all_the_time(direct_calls: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync_module, "LOOK_AGAIN_S", 0.001)


async def test_a_joiner_takes_the_version_in_a_group_of_its_own_and_the_next_sync_is_of_all() -> None:
    bench = Bench()
    await bench.begin()
    await bench.work_until(lambda: bench.sync.serving.serves(JOINER, V1))
    assert bench.worlds == [(1, 2), (2, 2)]
    assert len(bench.a.stub.asked("JoinWeightGroup")) == len(bench.a.stub.asked("StageWeights")) == 1
    report = await bench.sync.publish(V2)
    assert bench.worlds[2:] == [(3, 3)] and {member.name for member in report.members} == {"a", "b"}


async def test_a_joiner_serves_only_after_its_live_check_and_its_report_says_that_it_caught_up() -> None:
    bench = Bench()
    await bench.begin()
    await bench.work_until(lambda: bench.sync.serving.serves(JOINER, V1))
    assert bench.served_at_check == [False, False]
    assert [(report.caught_up, len(report.members)) for report in bench.reports] == [(False, 1), (True, 1)]


@pytest.mark.parametrize("phase", ["JoinWeightGroup", "StageWeights", "CommitWeights"])
async def test_work_that_ends_waits_for_no_joiner(phase: str) -> None:
    bench = Bench()
    await bench.begin()
    bench.b.stub.gates[phase] = asyncio.Event()
    await bench.work_until(lambda: bool(bench.b.stub.asked(phase)))
    assert bench.stub.asked("CloseWeightGroup")[-1].epoch == 2, "the trainer is free again"
    assert not bench.evicted and not bench.sync.serving.serves(JOINER, V1)
    bench.b.stub.gates.clear()
    await bench.sync.publish(V2)
    assert bench.sync.serving.serves(JOINER, V2) and bench.sync.serving.serves("a-1", V2)


@pytest.mark.parametrize("phase", ["JoinWeightGroup", "StageWeights", "CommitWeights"])
@pytest.mark.parametrize("error", [Internal("out of memory"), Mismatch("another model")])
async def test_trouble_of_a_joiner_evicts_it_and_the_work_goes_on(phase: str, error: FlotillaError) -> None:
    bench = Bench()
    await bench.begin()
    bench.b.stub.failures[phase] = [error]
    await bench.work_until(lambda: bool(bench.evicted))
    assert bench.evicted == {JOINER: error} and bench.sync.serving.serves("a-1", V1)


async def test_a_joiner_that_cannot_answer_the_live_check_is_evicted() -> None:
    bench = Bench()
    await bench.begin()
    bench.verdicts["b"] = Internal("no tokens")
    await bench.work_until(lambda: bool(bench.evicted))
    assert list(bench.evicted) == [JOINER] and not bench.sync.serving.serves(JOINER, V1)


async def test_a_broken_wire_is_tried_once_a_version() -> None:
    bench = Bench()
    await bench.begin()
    bench.b.stub.failures["StageWeights"] = [WeightGroupFailed("the sender went away")] * 100
    looks = iter(range(20))
    await bench.work_until(lambda: next(looks, None) is None)
    assert bench.worlds == [(1, 2), (2, 2)] and not bench.evicted


async def test_trouble_of_the_trainers_own_ends_the_work_as_what_it_is() -> None:
    bench = Bench()
    await bench.begin()
    bench.stub.failures["PublishWeights"] = [RankFailed("rank 1 was killed")]
    with pytest.raises(RankFailed, match="rank 1 was killed"):
        await bench.work_until(lambda: False)


@pytest.mark.parametrize(
    "error", [Unavailable("the trainer restarts"), DeadlineExceeded("no answer within 10 s")]
)
@pytest.mark.parametrize("phase", ["StageWeights", None])
async def test_a_joiners_group_that_cannot_be_closed_ends_nothing(
    phase: str | None, error: FlotillaError
) -> None:
    bench = Bench()
    await bench.begin()
    bench.stub.failures["CloseWeightGroup"] = [None, error, error]
    if phase:
        bench.b.stub.failures[phase] = [Internal("out of memory")]
    closings, looks = 3 if phase else 2, iter(range(20))
    await bench.work_until(
        lambda: len(bench.stub.asked("CloseWeightGroup")) == closings and next(looks, None) is None
    )
    assert list(bench.evicted) == ([JOINER] if phase else []) and bench.sync.serving.serves("a-1", V1)
    assert bench.sync.serving.serves(JOINER, V1) == (phase is None)

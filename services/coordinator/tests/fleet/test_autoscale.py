"""The autoscaler decides how many generators a run needs, and scales or advises."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from flotilla.coordinator.v1 import run_pb2
from flotilla_coordinator.fleet.autoscale import Autoscaler, Measured, advice
from flotilla_coordinator.runs.events import EventLog
from flotilla_coordinator.runs.status import RunStatus
from flotilla_core.config import AutoscaleConfig, StackConfig, load_text
from flotilla_core.errors import InvalidConfig, Unavailable

CONFIG = AutoscaleConfig(window_steps=2, cooldown_steps=3, min_generators=1, max_generators=3)
WAITING, RESTING, BALANCED = Measured(0.8, 0.1), Measured(0.1, 0.9), Measured(0.3, 0.4)


def decided(*steps: Measured, generators: int = 2) -> int | None:
    found = advice(steps, generators, CONFIG)
    return None if found is None else found.generators


def test_a_trainer_that_waits_wants_one_more_generator() -> None:
    assert decided(WAITING, WAITING) == 3
    found = advice([WAITING, WAITING], 2, CONFIG)
    assert found is not None and "in the last 2 steps" in found.why and "80%" in found.why


def test_idle_generators_before_a_busy_trainer_are_one_too_many() -> None:
    assert decided(RESTING, RESTING) == 1


def test_nothing_changes_between_the_limits() -> None:
    assert decided(BALANCED, BALANCED) is None
    # Both are idle in turns: fewer would make the trainer wait, and it waits too little for more.
    assert decided(Measured(0.3, 0.9), Measured(0.3, 0.9)) is None


@pytest.mark.parametrize(("step", "generators"), [(WAITING, 3), (WAITING, 4), (RESTING, 1)])
def test_the_bounds_hold(step: Measured, generators: int) -> None:
    assert decided(step, step, generators=generators) is None


def test_the_mean_of_a_whole_window_decides() -> None:
    assert decided(WAITING) is None
    assert decided(Measured(0.9, 0.1), Measured(0.1, 0.1)) == 3
    assert decided(Measured(0.6, 0.1), Measured(0.1, 0.1)) is None


def test_bounds_that_leave_no_room_are_refused() -> None:
    with pytest.raises(InvalidConfig, match="max_generators"):
        load_text(StackConfig, "autoscale: {min_generators: 3, max_generators: 2}")


@dataclass
class Bench:
    """A run that is watched, with as many generators as were asked for."""

    mode: str = "advise"
    generators: int = 2
    alone: bool = True
    error: Exception | None = None
    changes: list[int] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.booted = asyncio.Event()
        self.booted.set()
        self.status = RunStatus(run_pb2.Run(), EventLog(self._told))
        config = CONFIG.model_copy(update={"mode": self.mode})
        self.autoscaler = Autoscaler(
            config,
            advise=self.status.advise,
            notice=self.status.notice,
            generators=lambda: self.generators,
            change=self._change,
            may_act=lambda: self.alone,
        )

    def _told(self, event: run_pb2.RunEvent) -> None:
        if event.WhichOneof("event") == "notice":
            self.notices.append(event.notice.text)

    async def _change(self, by: int) -> None:
        self.changes.append(by)
        await self.booted.wait()
        if self.error is not None:
            raise self.error
        self.generators += by

    async def steps(self, count: int, measured: Measured) -> None:
        shares = {"idle/trainer": measured.trainer, "idle/generators": measured.generators}
        for _ in range(count):
            self.autoscaler.step_done(shares)
            await asyncio.sleep(0)
            await asyncio.sleep(0)


async def test_advice_is_told_once_and_shown_as_long_as_it_holds() -> None:
    bench = Bench()
    await bench.steps(5, WAITING)
    assert len(bench.notices) == 1 and bench.notices[0].startswith("advice: 2 -> 3 generators")
    assert bench.status.run.advice.startswith("2 -> 3 generators")
    await bench.steps(2, BALANCED)
    assert bench.status.run.advice == "" and bench.changes == []
    await bench.steps(4, RESTING)
    assert [notice.partition(":")[2][:21] for notice in bench.notices[1:]] == [" 2 -> 1 generators: i"]


async def test_acting_changes_by_one_then_rests_and_measures_afresh() -> None:
    bench = Bench("act", generators=1)
    await bench.steps(2, WAITING)
    assert bench.changes == [1] and bench.status.run.advice == ""
    await bench.steps(CONFIG.cooldown_steps + 1, WAITING)
    assert bench.changes == [1]
    await bench.steps(1, WAITING)
    assert bench.changes == [1, 1] and bench.generators == 3
    await bench.steps(20, WAITING)
    assert bench.changes == [1, 1]


async def test_a_long_boot_is_followed_by_the_whole_rest() -> None:
    bench = Bench("act", generators=1)
    bench.booted.clear()
    await bench.steps(2 + 10, WAITING)
    bench.booted.set()
    await bench.steps(1, WAITING)
    assert bench.generators == 2
    await bench.steps(CONFIG.cooldown_steps + 1, WAITING)
    assert bench.changes == [1]
    await bench.steps(1, WAITING)
    assert bench.changes == [1, 1]


async def test_a_run_that_shares_its_fleet_only_advises() -> None:
    bench = Bench("act", generators=1, alone=False)
    await bench.steps(2, WAITING)
    assert bench.changes == [] and bench.status.run.advice.startswith("1 -> 2 generators")
    bench.alone = True
    await bench.steps(1, WAITING)
    assert bench.changes == [1]


async def test_a_change_that_fails_is_told_and_tried_again_later() -> None:
    bench = Bench("act", error=Unavailable("generator-2 did not get ready"))
    await bench.steps(2, WAITING)
    assert "the change failed" in bench.notices[-1] and "generator-2" in bench.notices[-1]
    bench.error = None
    await bench.steps(CONFIG.cooldown_steps + 2, WAITING)
    assert bench.generators == 3


async def test_steps_with_another_number_of_generators_are_not_mixed() -> None:
    bench = Bench("act")
    await bench.steps(1, WAITING)
    bench.generators = 1
    await bench.steps(1 + 1, WAITING)
    assert bench.changes == [], "the step in which it changed counts for neither number"
    await bench.steps(1, WAITING)
    assert bench.changes == [1]


async def test_steps_in_which_nobody_generates_say_nothing() -> None:
    bench = Bench()
    for _ in range(5):
        bench.autoscaler.step_done({"idle/trainer": 0.9})
    assert bench.notices == []

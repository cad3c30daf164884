"""A user's requests to a run take effect between two steps."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from flotilla.coordinator.v1 import run_pb2
from flotilla_coordinator.fleet.autoscale import IdleShares
from flotilla_coordinator.runs.context import RunContext
from flotilla_coordinator.runs.control import RunControl, changed_config
from flotilla_coordinator.runs.events import EventLog
from flotilla_coordinator.runs.status import RemainingTime, RunStatus
from flotilla_core.config import RunConfig, StackConfig, load_text
from flotilla_core.config.run import LIVE_KEYS
from flotilla_core.errors import InvalidConfig, InvalidRequest
from flotilla_core.service import Activities

CONFIG = load_text(
    RunConfig,
    "name: run\nsteps: 3\ndata: {train: /x.jsonl}\nrewards: [{reward: exact}]\nevaluation: {data: /y.jsonl}\n",
)
PAUSED, RUNNING = run_pb2.RUN_STATE_PAUSED, run_pb2.RUN_STATE_RUNNING


class Bench:
    """A run between two steps, with collaborators that remember by what they are to go on."""

    def __init__(self) -> None:
        self.events: list[run_pb2.RunEvent] = []
        self.taken: list[Any] = []
        self.control = RunControl(CONFIG)
        collaborator: Any = SimpleNamespace(reconfigure=self.taken.append, full=None)
        sync: Any = SimpleNamespace(keep_serving=self._work)
        nobody: Any = None
        self.run = RunContext(
            run_id="run",
            config=CONFIG,
            stack=StackConfig(),
            control=self.control,
            learners=collaborator,
            source=collaborator,
            sync=sync,
            evaluator=None,
            checkpoints=collaborator,
            ledger=nobody,
            directory=nobody,
            status=RunStatus(run_pb2.Run(total_steps=3, state=RUNNING), EventLog(self.events.append)),
            activities=Activities(),
            idle=IdleShares(list),
        )

    @staticmethod
    async def _work(work: Coroutine[Any, Any, None]) -> None:
        await work

    async def paused(self) -> asyncio.Task[bool]:
        """The loop as it waits."""
        self.control.pause()
        waiting = asyncio.create_task(self.run.wait_for_next_step())
        await asyncio.sleep(0)
        assert not waiting.done() and self.run.status.run.state == PAUSED
        return waiting

    @property
    def notices(self) -> list[str]:
        return [event.notice.text for event in self.events if event.WhichOneof("event") == "notice"]


def changed(*assignments: str, steps_done: int = 0) -> RunConfig:
    return changed_config(CONFIG, assignments, steps_done)


async def test_a_paused_run_begins_no_step_until_it_goes_on() -> None:
    bench = Bench()
    waiting = await bench.paused()
    assert bench.run.status.run.phase == "paused"
    bench.control.unpause()
    assert await asyncio.wait_for(waiting, 5)
    states = [event.run.state for event in bench.events if event.WhichOneof("event") == "run"]
    assert PAUSED in states and states[-1] == RUNNING


async def test_a_stop_ends_a_pause_and_no_step_follows() -> None:
    bench = Bench()
    waiting = await bench.paused()
    bench.run.status.set_state(run_pb2.RUN_STATE_STOPPING)
    bench.control.stop()
    assert not await asyncio.wait_for(waiting, 5)
    assert bench.run.status.run.state == run_pb2.RUN_STATE_STOPPING


async def test_a_pause_that_is_taken_back_in_time_is_none() -> None:
    bench = Bench()
    bench.control.pause()
    bench.control.unpause()
    assert await bench.run.wait_for_next_step() and not bench.events


@pytest.mark.parametrize("paused", [False, True])
async def test_other_settings_hold_from_the_next_step_on(paused: bool) -> None:
    bench = Bench()
    config = changed("steps=9", "checkpoint.keep=5", "optimizer.learning_rate=0.5")
    if paused:
        waiting = await bench.paused()
        bench.control.configure(config)
        bench.control.unpause()
        assert await asyncio.wait_for(waiting, 5)
    else:
        bench.control.configure(config)
        assert await bench.run.wait_for_next_step()
    assert bench.run.config is config and bench.taken == [config, config, config.checkpoint]
    assert bench.run.status.run.total_steps == 9
    before = CONFIG.optimizer.learning_rate
    assert bench.notices == [
        f"from step 0 on: steps 3 -> 9, optimizer.learning_rate {before} -> 0.5, checkpoint.keep 2 -> 5"
    ]
    assert await bench.run.wait_for_next_step() and len(bench.notices) == 1


async def test_a_run_ends_at_the_last_step_that_is_wanted_now() -> None:
    bench = Bench()
    bench.run.steps_done = 2
    bench.control.configure(changed("steps=4"))
    assert await bench.run.wait_for_next_step()
    bench.run.steps_done = 4
    assert not await bench.run.wait_for_next_step()


def test_every_key_of_the_list_can_change() -> None:
    values = ("7", "1", "0.5", "3", "4", "6")
    config = changed(*(f"{key}={value}" for key, value in zip(LIVE_KEYS, values, strict=True)))
    assert (config.steps, config.rollout.max_staleness, config.optimizer.learning_rate) == (7, 1, 0.5)
    assert config.evaluation is not None and config.evaluation.every_steps == 3
    assert (config.checkpoint.every_steps, config.checkpoint.keep) == (4, 6)


@pytest.mark.parametrize(
    ("assignments", "steps_done", "told"),
    [
        (["seed=3"], 0, "seed cannot change"),
        (
            ["steps=5", "rollout.prompts_per_step=3"],
            0,
            r"rollout.prompts_per_step cannot change.*max_staleness",
        ),
        ([], 0, "nothing is to be changed"),
        (["steps=2"], 2, "steps is 2, but 2 steps are done"),
    ],
)
def test_what_cannot_change_is_refused_by_name(assignments: list[str], steps_done: int, told: str) -> None:
    with pytest.raises(InvalidRequest, match=told):
        changed(*assignments, steps_done=steps_done)


@pytest.mark.parametrize(
    "assignment", ["steps=many", "checkpoint.keep=0", "rollout.max_staleness=-1", "steps"]
)
def test_a_value_that_no_run_file_may_have_is_refused(assignment: str) -> None:
    with pytest.raises(InvalidConfig):
        changed(assignment)


def test_a_run_without_held_out_prompts_cannot_evaluate_them() -> None:
    without = CONFIG.model_copy(update={"evaluation": None})
    with pytest.raises(InvalidRequest, match="no held-out prompts"):
        changed_config(without, ["evaluation.every_steps=5"], 0)


def test_the_remaining_time_counts_evaluations_by_themselves_and_no_first_step() -> None:
    remaining = RemainingTime()
    remaining.took("evaluate", 30.0)  # before the first step
    remaining.step_took({"time/step_s": 100.0})
    assert remaining.estimate(10, {}) == 1000.0  # all that is known
    remaining.step_took({"time/step_s": 2.0})
    remaining.step_took({"time/step_s": 34.0, "time/evaluate_s": 32.0})
    remaining.took("evaluate", 32.0)
    remaining.took("rollout", 1.0)
    assert remaining.estimate(10, {"evaluate": 2, "checkpoint": 3}) == 10 * 2.0 + 2 * 31.0
    assert remaining.estimate(0, {"evaluate": 1}) == 31.0


@pytest.mark.parametrize(
    ("every", "done", "expected"), [(2, 3, 3), (2, 4, 2), (3, 3, 2), (0, 5, 1), (10, 5, 1), (7, 7, 0)]
)
async def test_the_last_evaluation_is_to_come_whatever_the_schedule(
    every: int, done: int, expected: int
) -> None:
    run = Bench().run
    steps = 7 if every in (3, 7, 10) else 8
    evaluation = CONFIG.evaluation
    assert evaluation is not None
    evaluation = evaluation.model_copy(update={"every_steps": every})
    run.config = CONFIG.model_copy(update={"steps": steps, "evaluation": evaluation})
    run.steps_done = done
    assert run.occasions()["evaluate"] == expected

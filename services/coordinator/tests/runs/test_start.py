"""Runs start one at a time, and a request that is sent twice starts one run."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from flotilla.coordinator.v1 import run_pb2
from flotilla_coordinator.ledger.records import RunRecord, RunState
from flotilla_coordinator.runs.registry import Runs
from flotilla_coordinator.runs.resume import FROM_START, StartPoint
from flotilla_core.errors import FailedPrecondition

CONFIG = "name: run\nsteps: 3\ndata: {train: /x.jsonl}\nrewards: [{reward: exact}]\n"


async def test_a_request_that_is_sent_twice_starts_one_run(runs: Runs) -> None:
    first, second = await asyncio.gather(runs.start(CONFIG, "r1"), runs.start(CONFIG, "r1"))
    assert first.run_id == second.run_id and len(await runs.list(0)) == 1


async def test_of_two_requests_at_once_one_is_refused_by_name(runs: Runs) -> None:
    outcomes = await asyncio.gather(
        runs.start(CONFIG, "r1"), runs.start(CONFIG, "r2"), return_exceptions=True
    )
    refused = [outcome for outcome in outcomes if isinstance(outcome, FailedPrecondition)]
    (listed,) = await runs.list(0)
    assert len(refused) == 1 and listed.run_id in str(refused[0])


async def test_requests_without_an_id_are_never_taken_for_each_other(runs: Runs) -> None:
    await runs.start(CONFIG, "")
    with pytest.raises(FailedPrecondition):
        await runs.start(CONFIG, "")


async def test_a_run_that_an_earlier_coordinator_left_is_failed_and_listed(
    runs: Runs, tmp_path: Path
) -> None:
    await runs.ledger.save_run(
        RunRecord("old", "old", RunState.RUNNING, "no longer: a configuration", str(tmp_path), 1.0)
    )
    await runs.recover()
    (listed,) = await runs.list(0)
    assert listed.state == run_pb2.RUN_STATE_FAILED and "its coordinator had died" in listed.reason


async def test_an_ended_run_is_kept_in_its_records_alone(runs: Runs) -> None:
    run = await runs.start(CONFIG, "r1")
    active = runs.active(run.run_id)
    assert active is not None and active.task is not None
    await asyncio.sleep(0)  # the run has begun
    active.cancel()
    await asyncio.wait({active.task}, timeout=5)
    await asyncio.sleep(0)  # what follows the end of a task comes with the next turn of the loop
    assert runs.active(run.run_id) is None
    assert (await runs.find(run.run_id)).run_id == run.run_id
    with pytest.raises(FailedPrecondition, match=f"run {run.run_id} has ended already"):
        await runs.stop(run.run_id, "too late")


async def test_run_without_checkpoints_goes_back_to_its_start_only_when_told(
    runs: Runs, launched: list[StartPoint], tmp_path: Path
) -> None:
    (tmp_path / "old").mkdir()
    config = CONFIG + "checkpoint: {every_steps: 0}\n"
    await runs.ledger.save_run(
        RunRecord("old", "old", RunState.FAILED, config, str(tmp_path / "old"), 1.0, ended_at=2.0)
    )
    await runs.ledger.update_run("old", step=3)
    with pytest.raises(FailedPrecondition, match=r"its 3 steps can only be made again .* --from start"):
        await runs.resume("old", "", "")
    await runs.resume("old", FROM_START, "")
    await asyncio.sleep(0)
    assert [start.checkpoint for start in launched] == [FROM_START]

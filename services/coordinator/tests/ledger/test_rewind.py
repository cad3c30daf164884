"""A run that falls back to a checkpoint: what is undone comes back, what is covered never does."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flotilla_coordinator.ledger.checker import check
from flotilla_coordinator.ledger.ledger import Ledger
from flotilla_coordinator.ledger.records import (
    FinishedSample,
    GroupIssue,
    RunRecord,
    RunState,
    SampleState,
    TokenSpan,
)
from flotilla_coordinator.runs.checkpoints import Progress
from flotilla_coordinator.runs.resume import StartPoint, restore
from flotilla_core.checkpoint import CheckpointShelf
from flotilla_core.errors import FailedPrecondition, NotFound
from flotilla_core.findings import info
from flotilla_core.version import Version

RUN = "count-20260314-0915-7f3a"
CONFIG = "rollout: {max_staleness: 1}\n"


@pytest.fixture
async def ledger(tmp_path: Path) -> AsyncIterator[Ledger]:
    ledger = Ledger.open(tmp_path / "ledger.sqlite")
    await ledger.save_run(RunRecord(RUN, "count", RunState.RUNNING, CONFIG, "/runs/count", time.time()))
    yield ledger
    ledger.close()


async def issued(ledger: Ledger, step: int) -> list[str]:
    group_id = f"{RUN}/0/{step}"
    samples = tuple(f"{group_id}/{index}" for index in range(2))
    prompt = np.array([1], dtype=np.int32)
    await ledger.group_issued(GroupIssue(RUN, group_id, samples, step, 0, "1+1=", prompt))
    return list(samples)


async def scored(ledger: Ledger, step: int) -> list[str]:
    sample_ids = await issued(ledger, step)
    await ledger.group_scored(
        [
            FinishedSample(
                sample_id=sample_id,
                attempt=0,
                generator="generator-0",
                token_ids=np.array([step], dtype=np.int32),
                logprobs=np.array([-0.5], dtype=np.float32),
                text="2",
                spans=(TokenSpan(Version(0, step), 0, 1),),
                reward=float(step),
            )
            for sample_id in sample_ids
        ]
    )
    return sample_ids


async def trained(ledger: Ledger, step: int, lineage: int = 0, samples: list[str] | None = None) -> None:
    before, after = Version(lineage, step), Version(lineage, step + 1)
    ids = samples or await scored(ledger, step)
    await ledger.consumed(
        RUN, f"{RUN}/{after}", ids, before, result=after, step=step + 1, cursor={"position": step + 1}
    )


async def states(ledger: Ledger, step: int) -> list[SampleState]:
    return [record.state for record in await ledger.samples(RUN, step=step)]


@pytest.mark.parametrize(
    ("asked_for", "after"),
    [
        (RunState.PAUSED, RunState.PAUSED),
        (RunState.STOPPING, RunState.STOPPING),
        (RunState.FAILED, RunState.RUNNING),
    ],
)
async def test_what_a_user_asked_of_the_run_outlives_a_fall_back(
    ledger: Ledger, asked_for: RunState, after: RunState
) -> None:
    await ledger.update_run(RUN, state=asked_for)
    await ledger.fall_back(RUN, Version(1, 0), step=0, cursor=None)
    assert (await ledger.get_run(RUN)).state is after


async def test_a_step_that_changed_nothing_is_recorded_with_its_samples(ledger: Ledger) -> None:
    samples = await scored(ledger, 0)
    await issued(ledger, 1)
    with pytest.raises(NotFound, match="has no sample"):
        await ledger.passed_by(
            RUN, [*samples, "unknown"], "update_skipped", result=Version(0, 0), step=1, cursor=None
        )
    assert await states(ledger, 0) == [SampleState.SCORED] * 2 and (await ledger.get_run(RUN)).step == 0
    await ledger.passed_by(
        RUN, samples, "update_skipped", result=Version(0, 0), step=1, cursor={"position": 1}
    )
    assert await states(ledger, 0) == [SampleState.DROPPED] * 2
    run = await ledger.get_run(RUN)
    assert (run.step, run.version, run.cursor) == (1, Version(0, 0), {"position": 1})


async def test_a_fall_back_brings_everything_after_the_checkpoint_back(
    ledger: Ledger, tmp_path: Path
) -> None:
    for step in range(4):
        await trained(ledger, step)
    await scored(ledger, 4)
    await issued(ledger, 5)
    await ledger.dropped(RUN, [f"{RUN}/0/5/0"], "reward_error")
    await ledger.drop_in_flight(RUN, "run_ended")
    await ledger.update_run(RUN, state=RunState.FAILED, reason=info("the trainer died"), ended_at=1.0)
    assert check(tmp_path / "ledger.sqlite", RUN).passed

    voided = await ledger.fall_back(RUN, Version(1, 2), step=2, cursor={"position": 2})
    assert [update.sample_ids for update in voided] == [
        (f"{RUN}/0/2/0", f"{RUN}/0/2/1"),
        (f"{RUN}/0/3/0", f"{RUN}/0/3/1"),
    ]
    run = await ledger.get_run(RUN)
    assert (run.state, run.reason.what, run.ended_at) == (RunState.RUNNING, "", None)
    assert (run.step, run.version, run.cursor) == (2, Version(1, 2), {"position": 2})
    assert await states(ledger, 1) == [SampleState.CONSUMED] * 2
    for step in (2, 3, 4):
        assert await states(ledger, step) == [SampleState.SCORED] * 2
        assert [record.token_ids.tolist() for record in await ledger.samples(RUN, step=step)] == [[step]] * 2
    assert await states(ledger, 5) == [SampleState.DROPPED, SampleState.ISSUED]
    assert [group.step for group in await ledger.admitted_groups(RUN, 4)] == [4, 5]

    for step in (2, 3):
        await trained(ledger, step, lineage=1, samples=[f"{RUN}/0/{step}/0", f"{RUN}/0/{step}/1"])
    await ledger.drop_in_flight(RUN, "run_ended")
    await ledger.update_run(RUN, state=RunState.STOPPED)
    verdict = check(tmp_path / "ledger.sqlite", RUN)
    assert verdict.passed, str(verdict)
    assert verdict.trained == 8 and verdict.dropped == {"reward_error": 1, "run_ended": 3}


async def test_a_fall_back_from_anywhere_can_be_repeated(ledger: Ledger, tmp_path: Path) -> None:
    for step in range(3):
        await trained(ledger, step)
    for lineage in (1, 2, 3):
        await ledger.fall_back(RUN, Version(lineage, 1), step=1, cursor=None)
        await trained(ledger, 1, lineage=lineage, samples=[f"{RUN}/0/1/0", f"{RUN}/0/1/1"])
    verdict = check(tmp_path / "ledger.sqlite", RUN)
    assert verdict.passed and verdict.trained == 4 and verdict.in_flight == 2, str(verdict)


async def test_what_a_skipped_update_dropped_is_tried_again(ledger: Ledger) -> None:
    await trained(ledger, 0)
    await ledger.dropped(RUN, await scored(ledger, 1), "update_skipped")
    await trained(ledger, 2)
    await ledger.fall_back(RUN, Version(1, 1), step=1, cursor=None)
    assert await states(ledger, 1) == await states(ledger, 2) == [SampleState.SCORED] * 2


@pytest.mark.parametrize("reason", ["reward_error", "reward_timeout", "group_too_small"])
async def test_what_a_reward_failed_on_is_asked_for_again_where_a_user_resumes(
    ledger: Ledger, tmp_path: Path, reason: str
) -> None:
    await trained(ledger, 0)
    sample_ids = await issued(ledger, 1)
    await ledger.dropped(RUN, sample_ids[:1], reason)
    await ledger.fall_back(RUN, Version(1, 1), step=1, cursor=None)
    assert await states(ledger, 1) == [SampleState.DROPPED, SampleState.ISSUED]
    await ledger.fall_back(RUN, Version(2, 1), step=1, cursor=None, retry_rewards=True)
    assert await states(ledger, 1) == [SampleState.ISSUED] * 2
    await trained(ledger, 1, lineage=2)
    verdict = check(tmp_path / "ledger.sqlite", RUN)
    assert verdict.passed and verdict.trained == 4 and not verdict.dropped, str(verdict)


async def test_what_every_kept_checkpoint_covers_is_durable_and_loses_its_payload(
    ledger: Ledger, tmp_path: Path
) -> None:
    for step in range(4):
        await trained(ledger, step)
    assert await ledger.covered(RUN, Version(0, 2), 2) == 4
    assert await states(ledger, 1) == [SampleState.DURABLE] * 2
    assert [record.token_ids for record in await ledger.samples(RUN, step=1)] == [None, None]
    assert [record.token_ids.tolist() for record in await ledger.samples(RUN, step=2)] == [[2], [2]]
    assert await ledger.covered(RUN, Version(0, 2), 2) == 0
    with pytest.raises(FailedPrecondition, match="is durable and cannot be undone"):
        await ledger.fall_back(RUN, Version(1, 1), step=1, cursor=None)
    assert len(await ledger.fall_back(RUN, Version(1, 2), step=2, cursor=None)) == 2
    assert check(tmp_path / "ledger.sqlite", RUN).passed


async def test_a_beginning_that_the_ledger_refuses_leaves_every_checkpoint(
    ledger: Ledger, tmp_path: Path
) -> None:
    for step in range(3):
        await trained(ledger, step)
    await ledger.covered(RUN, Version(0, 2), 2)
    shelf = CheckpointShelf(tmp_path / "checkpoints")
    for name in ("step-000001", "step-000003"):
        (shelf.path / name).mkdir(parents=True)

    async def opened() -> None:
        """Nothing is known of a session."""

    async def load(folder: Path, **_options: Any) -> bytes:
        return Progress(RUN, shelf.step_of(folder.name), Version(0, 1), None).to_bytes()

    run: Any = SimpleNamespace(
        run_id=RUN,
        ledger=ledger,
        learners=SimpleNamespace(open=opened, load=load),
        policy=SimpleNamespace(version=Version(1, 1)),
        checkpoints=SimpleNamespace(shelf=shelf),
        phase=lambda _: nullcontext(),
    )
    with pytest.raises(FailedPrecondition, match="is durable and cannot be undone"):
        await restore(run, StartPoint(1, "step-000001", by_user=True))
    assert shelf.names() == ["step-000001", "step-000003"]

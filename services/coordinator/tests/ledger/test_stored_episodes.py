"""The ledger keeps what episodes have in addition to their tokens, byte for byte, and nothing for other samples."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from flotilla_coordinator.ledger.ledger import Ledger
from flotilla_coordinator.ledger.records import (
    Branch,
    DropReason,
    Episode,
    FinishedSample,
    GroupIssue,
    RunRecord,
    RunState,
    TokenSpan,
)
from flotilla_coordinator.rollouts.samples import recorded_failures, recorded_samples
from flotilla_core.version import Version

RUN = "count-20260314-0915-7f3a"
GROUP = f"{RUN}/0/0"
SAMPLES = (f"{GROUP}/0", f"{GROUP}/1")


def played(sample_id: str, ending: str = "completed") -> FinishedSample:
    branches = (Branch(0, np.array([1, 2, 3], np.int32)), Branch(2, np.array([7], np.int32)))
    return FinishedSample(
        sample_id,
        np.array([5, 6, 5], np.int32),
        np.array([-0.5, 0.0, -0.25], np.float32),
        "5",
        (TokenSpan(Version(0, 0), 0, 1), TokenSpan(Version(0, 0), 2, 3)),
        trained=np.array([True, False, True]),
        reward=1.5,
        episode=Episode(
            ending, 2, (0.5, 1.0), '[{"role":"user","content":"ü\\u001b"}]', branches, (1, 3), (7, -(2**63))
        ),
    )


def single(sample_id: str) -> FinishedSample:
    tokens = np.array([5], np.int32)
    return FinishedSample(sample_id, tokens, np.zeros(1, np.float32), "5", (TokenSpan(Version(0, 0), 0, 1),))


@pytest.fixture
async def ledger(tmp_path: Path) -> AsyncIterator[Ledger]:
    ledger = Ledger.open(tmp_path / "ledger.sqlite")
    await ledger.save_run(RunRecord(RUN, "count", RunState.RUNNING, "steps: 3\n", "/runs/count", 0.0))
    await ledger.group_issued(GroupIssue(RUN, GROUP, SAMPLES, 0, 0, "", np.array([1], np.int32)))
    yield ledger
    ledger.close()


def rows(folder: Path) -> int:
    with sqlite3.connect(folder / "ledger.sqlite") as db:
        (count,) = db.execute("SELECT count(*) FROM episodes").fetchone()
    return int(count)


async def test_an_episode_comes_back_as_it_was_and_may_be_trained_again(ledger: Ledger) -> None:
    await ledger.group_scored([played(SAMPLES[0])])
    (again,) = recorded_samples(await ledger.samples(RUN, limit=1))
    assert again.episode is not None
    kept = [(branch.start, branch.prompt_token_ids.tolist()) for branch in again.episode.branches]
    assert kept == [(0, [1, 2, 3]), (2, [7])]
    assert (again.episode.ending, again.episode.turns, again.episode.turn_rewards) == (
        "completed",
        2,
        (0.5, 1.0),
    )
    assert again.episode.turn_ends == (1, 3) and again.episode.turn_states == (7, -(2**63))
    assert again.episode.messages == '[{"role":"user","content":"ü\\u001b"}]'
    assert again.trained is not None and again.trained.tolist() == [True, False, True]


async def test_a_single_response_has_no_row_and_no_episode(ledger: Ledger, tmp_path: Path) -> None:
    await ledger.group_scored([single(SAMPLES[0]), played(SAMPLES[1])])
    first, second = await ledger.samples(RUN)
    assert first.episode is None and second.episode is not None and rows(tmp_path) == 1


async def test_an_episode_goes_with_its_tokens(ledger: Ledger, tmp_path: Path) -> None:
    await ledger.group_scored([played(SAMPLES[0])])
    await ledger.dropped(RUN, SAMPLES[:1], DropReason.UNIFORM)
    await ledger.prune_payloads(RUN, before_step=1)
    assert rows(tmp_path) == 0


@pytest.mark.parametrize("late", [False, True])
async def test_a_failed_episode_can_be_looked_at_and_counts_as_a_failure(ledger: Ledger, late: bool) -> None:
    ending = "timeout" if late else "error"
    await ledger.group_generated([played(SAMPLES[0], ending)])
    reason = DropReason.ENVIRONMENT_TIMEOUT if late else DropReason.ENVIRONMENT_ERROR
    await ledger.dropped(RUN, SAMPLES[:1], reason)
    records = await ledger.samples(RUN, limit=1)
    assert records[0].episode is not None and records[0].episode.ending == ending
    (failure,) = recorded_failures(records)
    assert failure.timed_out is late
    assert recorded_samples(records) == []

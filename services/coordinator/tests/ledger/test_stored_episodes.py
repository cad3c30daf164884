"""The ledger keeps episodes byte for byte, their turns until they have ended, and nothing of it for other samples."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from flotilla.coordinator.v1 import coordinator_pb2 as pb
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
    TurnRecord,
)
from flotilla_coordinator.records.directory import RunDirectory
from flotilla_coordinator.rollouts.batch import RolloutSample
from flotilla_coordinator.rollouts.played_turns import PlayedTurns, TurnLog, may_go_on
from flotilla_coordinator.rollouts.samples import recorded_failures, recorded_samples
from flotilla_coordinator.views.samples import list_samples
from flotilla_core.version import Version

RUN = "count-20260314-0915-7f3a"
GROUP = f"{RUN}/0/0"
SAMPLES = (f"{GROUP}/0", f"{GROUP}/1")
BEFORE_EPISODES = 385.5
"""Bytes that the ledger took for a sample of one response at commit fb07eef8, which knew no episodes: this test's
statements on that tree."""
MORE_BYTES = 8
BYTES = """
SELECT sum(payload) FROM dbstat JOIN sqlite_schema USING (name)
WHERE tbl_name IN ('samples', 'payloads', 'transitions', 'episodes', 'turns')
"""
"""What rows have in them, of the tables with rows for each sample and of their indices."""


def turn(number: int, sample_id: str = SAMPLES[0], *, beginning: int = 7, version: int = 2) -> TurnRecord:
    return TurnRecord(
        sample_id,
        number,
        beginning,
        1,
        b"asked",
        np.array([number, 5], np.int32),
        np.array([-0.5, -0.25], np.float32),
        (TokenSpan(Version(0, version), 0, 2),),
        "ü",
        True,
        "generator-0",
    )


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


def rows(folder: Path, table: str) -> int:
    with closing(sqlite3.connect(folder / "ledger.sqlite")) as db:
        (count,) = db.execute(f"SELECT count(*) FROM {table}").fetchone()
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


@pytest.mark.parametrize("without", [True, False])
async def test_a_list_of_samples_has_conversations_where_they_are_wanted(
    ledger: Ledger, tmp_path: Path, without: bool
) -> None:
    await ledger.group_scored([played(SAMPLES[0])])
    request = pb.ListSamplesRequest(limit=1, without_messages=without)
    (shown,) = list_samples(ledger.path, RUN, RunDirectory.create(tmp_path / "run"), request).samples
    assert shown.episode.turns == 2 and bool(shown.episode.messages_json) is not without


async def test_a_single_response_has_no_row_and_no_episode(ledger: Ledger, tmp_path: Path) -> None:
    await ledger.group_scored([single(SAMPLES[0]), played(SAMPLES[1])])
    first, second = await ledger.samples(RUN)
    assert first.episode is None and second.episode is not None and rows(tmp_path, "episodes") == 1


async def test_a_single_response_takes_at_most_eight_bytes_more_than_before_there_were_episodes(
    ledger: Ledger, tmp_path: Path
) -> None:
    samples = [single(sample_id) for sample_id in SAMPLES]
    await ledger.group_generated(samples)
    await ledger.group_scored(samples)
    await ledger.consumed(
        RUN, f"{RUN}/0.1", SAMPLES, Version(0, 0), result=Version(0, 1), step=1, cursor=None
    )
    with closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as db:
        if ("ENABLE_DBSTAT_VTAB",) not in db.execute("PRAGMA compile_options"):
            pytest.skip("this SQLite does not count the bytes of its tables")
        (taken,) = db.execute(BYTES).fetchone()
    assert taken / len(SAMPLES) <= BEFORE_EPISODES + MORE_BYTES


async def test_an_episode_goes_with_its_tokens(ledger: Ledger, tmp_path: Path) -> None:
    await ledger.group_scored([played(SAMPLES[0])])
    await ledger.dropped(RUN, SAMPLES[:1], DropReason.UNIFORM)
    await ledger.prune_payloads(RUN, before_step=1)
    assert rows(tmp_path, "episodes") == 0


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


def record(ledger: Ledger, *turns: TurnRecord) -> None:
    for one in turns:
        ledger.turn_written(one)


async def so_far(ledger: Ledger) -> list[list[int]]:
    await ledger.beat()  # what was handed in before is durable
    return [[one.number for one in sample.turns] for sample in await ledger.samples(RUN)]


async def test_a_turn_comes_back_as_it_was(ledger: Ledger) -> None:
    record(ledger, turn(0), turn(1))
    assert await so_far(ledger) == [[0, 1], []]
    (first, second) = (await ledger.samples(RUN, limit=1))[0].turns
    assert (first.token_ids.tolist(), second.token_ids.tolist()) == ([0, 5], [1, 5])
    assert first.logprobs.tolist() == [-0.5, -0.25] and first.spans == turn(0).spans
    assert (first.asked, first.attempt, first.beginning) == (b"asked", 1, 7)
    assert (first.text, first.truncated, first.generator) == ("ü", True, "generator-0")


async def test_turns_of_an_earlier_beginning_or_after_a_gap_do_not_count(ledger: Ledger) -> None:
    record(ledger, turn(0), turn(1), turn(2), turn(0, beginning=8))
    record(ledger, turn(0, SAMPLES[1]), turn(2, SAMPLES[1]))
    assert await so_far(ledger) == [[0], [0]]


async def test_a_turn_that_is_written_again_ends_what_followed_it(ledger: Ledger) -> None:
    record(ledger, turn(0), turn(1), turn(3))
    assert await so_far(ledger) == [[0, 1], []]
    record(ledger, turn(2))
    assert await so_far(ledger) == [[0, 1, 2], []]


@pytest.mark.parametrize("end", ["generated", "scored", "dropped"])
async def test_turns_leave_with_the_end_of_their_episode_and_come_too_late_after_it(
    ledger: Ledger, tmp_path: Path, end: str
) -> None:
    record(ledger, turn(0), turn(0, SAMPLES[1]))
    sample = FinishedSample(SAMPLES[0], np.array([0, 5], np.int32), np.zeros(2, np.float32), "")
    if end == "generated":
        await ledger.group_generated([sample])
    elif end == "scored":
        await ledger.group_scored([sample])
    else:
        await ledger.dropped(RUN, SAMPLES[:1], DropReason.TAIL)
    record(ledger, turn(1), turn(0, "of an evaluation"))
    assert await so_far(ledger) == [[], [0]]
    assert rows(tmp_path, "turns") == 1


def piece(version: int) -> RolloutSample:
    spans = (TokenSpan(Version(0, version), 0, 1),)
    return RolloutSample("turn", np.array([5], np.int32), np.zeros(1, np.float32), "", spans)


async def test_a_turn_is_recorded_once_its_versions_are_checked_and_never_of_wrong_weights(
    ledger: Ledger,
) -> None:
    checked = Version(0, 1)
    log = TurnLog(
        ledger, lambda version: version <= checked, lambda sample: sample.spans[0].version.step == 3
    )
    turns = PlayedTurns(SAMPLES[0], (), log)
    turns.add(b"", piece(1))
    turns.add(b"", piece(2))
    assert await so_far(ledger) == [[0], []]
    checked = Version(0, 3)
    turns.add(b"", piece(2))
    assert await so_far(ledger) == [[0, 1, 2], []]
    turns.add(b"", piece(3))
    turns.add(b"", piece(2))
    assert await so_far(ledger) == [[0, 1, 2], []]


def test_turns_are_too_old_where_one_version_is_or_where_it_is_of_another_lineage() -> None:
    turns = [turn(0, version=4), turn(1, version=5)]
    assert may_go_on(turns, Version(0, 5), oldest_step=4)
    assert not may_go_on(turns, Version(0, 5), oldest_step=5)
    other = replace(turns[1], spans=(TokenSpan(Version(1, 5), 0, 2),))
    assert not may_go_on([turns[0], other], Version(1, 5), oldest_step=4)

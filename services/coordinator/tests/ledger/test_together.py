"""Submissions of many callers at once are one operation, and none of the callers can tell."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flotilla_coordinator.ledger import transitions
from flotilla_coordinator.ledger.checker import check
from flotilla_coordinator.ledger.ledger import Ledger
from flotilla_coordinator.ledger.records import (
    FinishedSample,
    GroupIssue,
    Recorded,
    RunRecord,
    RunState,
    TokenSpan,
)
from flotilla_coordinator.ledger.writer import MOST_TOGETHER, Owner, WriterThread
from flotilla_core.errors import Internal, InvalidRequest, NotFound
from flotilla_core.version import Version
from flotilla_testing.ledger_counts import counts_of

RUNS = ("one-20260314-0915-7f3a", "two-20260314-0915-11bc")
CALLERS = 2 * MOST_TOGETHER + 1
HELD_S = 30.0


@pytest.fixture
async def ledger(tmp_path: Path) -> AsyncIterator[Ledger]:
    ledger = Ledger.open(tmp_path / "ledger.sqlite")
    for run_id in RUNS:
        await ledger.save_run(RunRecord(run_id, "load", RunState.RUNNING, "{}", "", time.time()))
    yield ledger
    ledger.close()


def group(number: int, run_id: str = RUNS[0]) -> GroupIssue:
    group_id = f"{run_id}/0/{number}"
    prompt = np.array([1, 2, number], dtype=np.int32)
    return GroupIssue(run_id, group_id, (f"{group_id}/0", f"{group_id}/1"), 0, 0, f"{number}+1=", prompt)


def scored(sample_id: str) -> FinishedSample:
    tokens = np.array([5, 6], dtype=np.int32)
    spans = (TokenSpan(Version(0, 0), 0, 2),)
    return FinishedSample(sample_id, tokens, np.zeros(2, np.float32), "2", spans, reward=1.0)


class Held:
    """A writer that is inside an operation until it is let go: all that is submitted meanwhile shares a commit."""

    def __init__(self, path: Path) -> None:
        self.writer = WriterThread(path, Owner.of_this_process())
        self.applied: list[list[int]] = []
        self._inside = threading.Event()
        self._gate = threading.Event()

    async def hold(self) -> None:
        self._holding = asyncio.create_task(self.writer.submit(self._wait))
        assert await asyncio.to_thread(self._inside.wait, HELD_S)

    async def answers(self, *callers: Coroutine[Any, Any, Any]) -> list[Any]:
        """Return the results of callers that all submit while the writer is held."""
        asked = [asyncio.create_task(caller) for caller in callers]
        await asyncio.sleep(0)  # each takes its one step up to the queue
        self._gate.set()
        await self._holding
        return await asyncio.gather(*asked, return_exceptions=True)

    def close(self) -> None:
        self._gate.set()
        self.writer.close()

    def _wait(self, db: sqlite3.Connection) -> None:
        self._inside.set()
        self._gate.wait(HELD_S)

    def double(self, db: sqlite3.Connection, numbers: Sequence[int]) -> list[int]:
        self.applied.append(list(numbers))
        if 13 in numbers:
            raise InvalidRequest("13 is refused")
        if 666 in numbers:
            db.execute("ROLLBACK")
            raise sqlite3.OperationalError("disk I/O error")
        return [2 * number for number in numbers]


@pytest.fixture
async def held(tmp_path: Path) -> AsyncIterator[Held]:
    held = Held(tmp_path / "held.sqlite")
    await held.hold()
    yield held
    held.close()


async def test_a_step_that_many_take_at_once_is_applied_in_parts_of_bounded_size(held: Held) -> None:
    numbers = range(1000, 1000 + CALLERS)
    answers = await held.answers(*(held.writer.submit_step(held.double, n) for n in numbers))
    assert answers == [2 * n for n in numbers]
    assert [len(together) for together in held.applied] == [MOST_TOGETHER, MOST_TOGETHER, 1]


async def test_what_comes_between_is_not_overtaken(held: Held) -> None:
    step = held.writer.submit_step
    between = held.writer.submit(lambda db: list(held.applied))
    answers = await held.answers(step(held.double, 1), step(held.double, 2), between, step(held.double, 3))
    assert answers == [2, 4, [[1, 2]], 6]


async def test_who_is_refused_is_refused_alone(held: Held) -> None:
    answers = await held.answers(*(held.writer.submit_step(held.double, n) for n in (12, 13, 14)))
    assert (answers[0], answers[2]) == (24, 28)
    assert isinstance(answers[1], InvalidRequest)
    assert held.applied == [[12, 13, 14], [12], [13], [14]]


async def test_when_the_transaction_is_lost_everybody_in_it_hears_so_and_the_writer_goes_on(
    held: Held,
) -> None:
    written = held.writer.submit(lambda db: db.execute("CREATE TABLE written (x)").fetchall())
    answers = await held.answers(written, *(held.writer.submit_step(held.double, n) for n in (1, 666, 2)))
    assert [type(answer) for answer in answers] == [Internal] * 4
    assert held.applied == [[1, 666, 2]]
    tables = await held.writer.submit(lambda db: db.execute("SELECT name FROM sqlite_master").fetchall())
    assert ("written",) not in tables
    assert await held.writer.submit_step(held.double, 4) == 8


async def test_samples_of_two_runs_in_one_operation_are_counted_for_their_own(ledger: Ledger) -> None:
    asked = [group(n, RUNS[n % 3 == 0]) for n in range(24)]
    with closing(sqlite3.connect(ledger.path)) as db, db:
        assert transitions.issue(db, asked[:20]) == [Recorded(one.sample_ids) for one in asked[:20]]
        again = transitions.issue(db, asked)
        assert [recorded.accepted for recorded in again] == [()] * 20 + [one.sample_ids for one in asked[20:]]
        scores = [[scored(i) for i in one.sample_ids] for one in asked]
        assert transitions.scored(db, scores[:10]) == [Recorded(one.sample_ids) for one in asked[:10]]
        late = transitions.scored(db, scores)
        assert [recorded.duplicates for recorded in late] == [one.sample_ids for one in asked[:10]] + [
            ()
        ] * 14
    for run_id in RUNS:
        counts = counts_of(ledger.path, run_id)
        assert counts.holds
        assert counts.admitted == 2 * sum(one.run_id == run_id for one in asked)
        assert check(ledger.path, run_id).conservation_ok


async def test_groups_of_two_runs_that_come_at_once_are_counted_for_their_own(ledger: Ledger) -> None:
    asked = [group(n, RUNS[n % 3 == 0]) for n in range(CALLERS)]
    issued = await asyncio.gather(*(ledger.group_issued(one) for one in asked))
    assert [recorded.accepted for recorded in issued] == [one.sample_ids for one in asked]
    await asyncio.gather(*(ledger.group_scored([scored(i) for i in one.sample_ids]) for one in asked))
    for run_id in RUNS:
        counts = counts_of(ledger.path, run_id)
        assert counts.holds
        assert counts.admitted == 2 * sum(one.run_id == run_id for one in asked)
        assert check(ledger.path, run_id).conservation_ok
        prompts = {
            record.group_id: record.prompt_text for record in await ledger.samples(run_id, limit=10**6)
        }
        assert prompts == {one.group_id: one.prompt_text for one in asked if one.run_id == run_id}


async def test_a_sample_that_two_deliver_at_once_counts_once(ledger: Ledger) -> None:
    asked = [group(n) for n in range(8)]
    await asyncio.gather(*(ledger.group_issued(one) for one in (*asked, *asked)))
    twice = [scored(i) for one in (*asked, *asked) for i in one.sample_ids]
    recorded = await asyncio.gather(*(ledger.group_scored([sample]) for sample in twice))
    assert sorted(i for one in recorded for i in one.accepted) == sorted(
        i for one in asked for i in one.sample_ids
    )
    assert sum(len(one.duplicates) for one in recorded) == 16
    assert counts_of(ledger.path, RUNS[0]).holds


async def test_an_unknown_sample_does_not_hold_up_those_beside_it(ledger: Ledger) -> None:
    await ledger.group_issued(group(0))
    ids = [*group(0).sample_ids, f"{RUNS[0]}/0/7/0"]
    answers = await asyncio.gather(*(ledger.group_scored([scored(i)]) for i in ids), return_exceptions=True)
    assert [recorded.accepted for recorded in answers[:2]] == [(i,) for i in ids[:2]]
    assert isinstance(answers[2], NotFound)

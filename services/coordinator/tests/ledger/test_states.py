"""The ledger allows some transitions, refuses others by name, and keeps its records over a restart."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from flotilla.coordinator.v1 import coordinator_pb2, run_pb2
from flotilla_coordinator.ledger.ledger import Ledger
from flotilla_coordinator.ledger.records import (
    DropReason,
    FinishedSample,
    GroupIssue,
    RunRecord,
    RunState,
    SampleState,
    TokenSpan,
)
from flotilla_coordinator.ledger.verdicts import Said, TermVerdict
from flotilla_coordinator.rollouts.samples import recorded_failures, recorded_samples
from flotilla_core.errors import AlreadyExists, FailedPrecondition, InvalidRequest, NotFound
from flotilla_core.findings import info
from flotilla_core.version import Version
from flotilla_testing.ledger_counts import counts_of

RUN = "count-20260314-0915-7f3a"
START = Version(0, 0)
VERDICTS = (
    TermVerdict("exact", value=0.1, version="flotilla 0.3.0, rules 2", seconds=0.25, extracted="zwölf"),
    TermVerdict("f.py:f", Said.UNVERIFIABLE, -1e300, {"acc": 0.5}, message="a tower of powers"),
)


def issue(group: int = 0, *, step: int = 0, size: int = 2, attempt: int = 0) -> GroupIssue:
    group_id = f"{RUN}/0/{group}"
    samples = tuple(f"{group_id}/{index}" for index in range(size))
    return GroupIssue(RUN, group_id, samples, step, attempt, "1+1=", np.array([1, 2, 3], dtype=np.int32))


def scored(
    sample_id: str, *, version: Version = START, reward: float = 1.0, attempt: int = 0
) -> FinishedSample:
    return FinishedSample(
        sample_id=sample_id,
        attempt=attempt,
        generator="generator-0",
        token_ids=np.array([5, 6], dtype=np.int32),
        logprobs=np.array([-0.5, -0.25], dtype=np.float32),
        text="2",
        spans=(TokenSpan(version, 0, 2),),
        reward=reward,
    )


@pytest.fixture
async def ledger(tmp_path: Path) -> AsyncIterator[Ledger]:
    ledger = Ledger.open(tmp_path / "state" / "ledger.sqlite")
    await ledger.save_run(RunRecord(RUN, "count", RunState.RUNNING, "steps: 3\n", "/runs/count", time.time()))
    yield ledger
    ledger.close()


async def consume(ledger: Ledger, sample_ids: tuple[str, ...], version: Version = START) -> str:
    result = Version(version.lineage, version.step + 1)
    update_id = f"{RUN}/{result}"
    await ledger.consumed(
        RUN, update_id, sample_ids, version, result=result, step=result.step, cursor={"position": result.step}
    )
    return update_id


def test_states_carry_the_numbers_of_the_contract() -> None:
    for state in SampleState:
        assert coordinator_pb2.SampleState.Value(f"SAMPLE_STATE_{state.name}") == state
    for state in RunState:
        assert run_pb2.RunState.Value(f"RUN_STATE_{state.name}") == state


async def test_a_response_with_too_few_marks_of_what_is_trained_is_refused_by_name(ledger: Ledger) -> None:
    group = issue()
    await ledger.group_issued(group)
    sample = replace(scored(group.sample_ids[0]), trained=np.array([True]))
    with pytest.raises(InvalidRequest, match=f"{group.sample_ids[0]} has 2 tokens but 1 marks"):
        await ledger.group_scored([sample])


async def test_a_sample_is_stored_byte_for_byte(ledger: Ledger) -> None:
    group = issue()
    await ledger.group_issued(group)
    spans = (TokenSpan(Version(1, 7), 0, 1), TokenSpan(Version(1, 8), 1, 2))
    sample = FinishedSample(
        sample_id=group.sample_ids[0],
        attempt=0,
        generator="generator-1",
        token_ids=np.array([2**31 - 1, 0], dtype=np.int32),
        logprobs=np.array([-1e-30, -np.float32(1 / 3)], dtype=np.float32),
        text="zwölf",
        spans=spans,
        truncated=True,
        reward=0.1 + 0.2,
        reward_terms=(0.1, -1e300),
        greedy_reward=0.1 + 0.7,
        trained=np.array([False, True]),
        verdicts=VERDICTS,
    )
    await ledger.group_scored([sample])
    record, other = await ledger.samples(RUN, step=0)
    assert record.trained is not None and record.trained.tolist() == [False, True] and other.trained is None
    (kept,) = recorded_samples([record])
    assert kept.trained is record.trained, "a run that goes on trains the same tokens"
    assert record.verdicts == kept.verdicts == VERDICTS and other.verdicts == ()
    assert (record.reward_terms, other.reward_terms) == (sample.reward_terms, ())
    assert (record.greedy_reward, other.greedy_reward) == (0.1 + 0.7, None)
    assert (record.sample_id, record.state, record.generator) == (
        sample.sample_id,
        SampleState.SCORED,
        "generator-1",
    )
    assert (record.text, record.spans, record.truncated, record.reward) == ("zwölf", spans, True, 0.1 + 0.2)
    assert (
        record.token_ids is not None and record.logprobs is not None and record.prompt_token_ids is not None
    )
    assert record.token_ids.tobytes() == sample.token_ids.tobytes()
    assert record.logprobs.tobytes() == sample.logprobs.tobytes()
    assert record.prompt_token_ids.tolist() == [1, 2, 3]
    assert other.state is SampleState.ISSUED and other.token_ids is None


async def test_a_dropped_sample_keeps_why_it_has_no_reward_until_it_is_asked_for_again(
    ledger: Ledger,
) -> None:
    group = issue(size=3)
    await ledger.group_issued(group)
    first, second, third = group.sample_ids
    raised = TermVerdict("f.py:f", Said.ERROR, message="KeyError: 'level'", file="/f.py", line=7)
    await ledger.dropped(RUN, [first], DropReason.REWARD_ERROR, [replace(scored(first), verdicts=(raised,))])
    await ledger.group_scored([replace(scored(second), verdicts=VERDICTS)])
    await ledger.dropped(RUN, [second], DropReason.UNIFORM)
    records = {record.sample_id: record for record in await ledger.samples(RUN)}
    assert records[first].verdicts == (raised,) and records[second].verdicts == VERDICTS
    assert [one.failure for one in recorded_failures([records[first]])] == ["KeyError: 'level'"]
    assert records[third].verdicts == ()
    kept = records[first]
    assert (kept.state, kept.reward, kept.generator) == (SampleState.DROPPED, None, "generator-0")
    assert (kept.text, kept.spans) == ("2", (TokenSpan(START, 0, 2),)), "a user can judge its response again"
    await ledger.fall_back(RUN, Version(1, 0), step=0, cursor=None, retry_rewards=True)
    again = {record.sample_id: record for record in await ledger.samples(RUN)}
    assert (again[first].state, again[first].verdicts) == (SampleState.ISSUED, ())
    assert again[first].token_ids is None, "another response may come"


async def test_progress_and_cursor_are_recorded_with_the_update(ledger: Ledger) -> None:
    group = issue()
    await ledger.group_issued(group)
    await ledger.group_scored([scored(sample_id) for sample_id in group.sample_ids])
    await consume(ledger, group.sample_ids)
    run = await ledger.get_run(RUN)
    assert (run.step, run.version, run.cursor) == (1, Version(0, 1), {"position": 1})
    with pytest.raises(FailedPrecondition):
        await consume(ledger, group.sample_ids, Version(0, 1))
    assert (await ledger.get_run(RUN)) == run


async def test_training_a_sample_twice_names_it_and_both_updates(ledger: Ledger) -> None:
    group = issue()
    await ledger.group_issued(group)
    await ledger.group_scored([scored(sample_id) for sample_id in group.sample_ids])
    await consume(ledger, group.sample_ids[:1])
    with pytest.raises(FailedPrecondition) as refused:
        await consume(ledger, group.sample_ids, Version(0, 1))
    message = str(refused.value)
    for part in (group.sample_ids[0], "consumed", f"{RUN}/0.1", f"{RUN}/0.2"):
        assert part in message
    states = [record.state for record in await ledger.samples(RUN)]
    assert states == [SampleState.CONSUMED, SampleState.SCORED], "the refused update must change nothing"


async def test_an_update_that_is_reported_again_changes_nothing(ledger: Ledger) -> None:
    group = issue()
    await ledger.group_issued(group)
    await ledger.group_scored([scored(sample_id) for sample_id in group.sample_ids])
    await consume(ledger, group.sample_ids)
    await consume(ledger, group.sample_ids)
    counts = counts_of(ledger.path, RUN)
    assert (counts.trained, counts.duplicates) == (2, 2)
    with pytest.raises(FailedPrecondition, match="other samples"):
        await consume(ledger, group.sample_ids[:1])


async def test_unknown_samples_and_runs_are_named(ledger: Ledger) -> None:
    with pytest.raises(NotFound, match="stranger/0/0/0"):
        await ledger.group_scored([scored("stranger/0/0/0")])
    with pytest.raises(NotFound, match="no-such-run"):
        await ledger.dropped("no-such-run", ["x"], "lost")


async def test_a_sample_is_trained_only_after_it_was_scored(ledger: Ledger) -> None:
    group = issue()
    await ledger.group_issued(group)
    with pytest.raises(FailedPrecondition, match="is issued and cannot become consumed"):
        await consume(ledger, group.sample_ids)


async def test_duplicate_and_late_deliveries_are_ignored_and_counted(ledger: Ledger) -> None:
    group = issue()
    await ledger.group_issued(group)
    first, second = group.sample_ids
    await ledger.group_scored([scored(first, reward=1.0)])
    await ledger.dropped(RUN, [second], "timeout")
    again = await ledger.group_scored([scored(first, reward=0.0, attempt=1), scored(second)])
    assert (again.accepted, again.duplicates, again.late) == ((), (first,), (second,))
    records = await ledger.samples(RUN)
    assert [(record.state, record.reward) for record in records] == [
        (SampleState.SCORED, 1.0),
        (SampleState.DROPPED, None),
    ]
    counts = counts_of(ledger.path, RUN)
    assert (counts.duplicates, counts.late, counts.dropped) == (1, 1, {"timeout": 1})
    assert counts.holds


async def test_a_score_may_follow_its_response(ledger: Ledger) -> None:
    group = issue()
    await ledger.group_issued(group)
    first, second = group.sample_ids
    response = scored(first)
    await ledger.group_generated(
        [FinishedSample(first, response.token_ids, response.logprobs, "2", generator="generator-0")]
    )
    accepted = await ledger.group_scored([scored(first), scored(second)])
    assert accepted.accepted == (first, second)
    assert counts_of(ledger.path, RUN).in_flight == 2


async def test_what_a_lost_update_trained_comes_back_in_its_order(ledger: Ledger) -> None:
    trained = []
    for step in range(3):
        group = issue(step, step=step)
        await ledger.group_issued(group)
        await ledger.group_scored(
            [scored(sample_id, version=Version(0, step)) for sample_id in group.sample_ids]
        )
        order = tuple(reversed(group.sample_ids))
        trained.append((await consume(ledger, order, Version(0, step)), order))
    await ledger.durable(RUN, [trained[0][0]])
    voided = await ledger.fall_back(RUN, Version(1, 1), step=1, cursor=None)
    assert [(update.update_id, update.sample_ids) for update in voided] == trained[1:]
    counts = counts_of(ledger.path, RUN)
    assert (counts.trained, counts.in_flight) == (2, 4)
    await consume(ledger, trained[1][1], Version(1, 1))
    with pytest.raises(FailedPrecondition, match="void"):
        await ledger.consumed(
            RUN, trained[2][0], trained[2][1], Version(0, 2), result=Version(0, 3), step=3, cursor=None
        )
    with pytest.raises(FailedPrecondition, match="durable"):
        await ledger.fall_back(RUN, Version(2, 0), step=0, cursor=None)


async def test_only_payloads_that_can_never_train_again_are_pruned(ledger: Ledger) -> None:
    for step in range(3):
        group = issue(step, step=step)
        await ledger.group_issued(group)
        await ledger.group_scored([scored(sample_id) for sample_id in group.sample_ids])
    update = await consume(ledger, issue(0).sample_ids)
    await consume(ledger, issue(1).sample_ids, Version(0, 1))
    await ledger.durable(RUN, [update])
    assert await ledger.prune_payloads(RUN, before_step=3) == 2
    kept = [record.token_ids is not None for record in await ledger.samples(RUN)]
    assert kept == [False, False, True, True, True, True]


async def test_what_a_run_leaves_behind_is_dropped_with_a_reason(ledger: Ledger) -> None:
    for step in range(2):
        await ledger.group_issued(issue(step, step=step))
    await ledger.group_scored([scored(issue(0).sample_ids[0])])
    assert await ledger.drop_in_flight(RUN, "run_ended") == 4
    counts = counts_of(ledger.path, RUN)
    assert (counts.in_flight, counts.dropped) == (0, {"run_ended": 4})
    with pytest.raises(InvalidRequest, match="without a reason"):
        await ledger.dropped(RUN, [], "")


async def test_one_refused_operation_does_not_touch_others_in_its_commit(ledger: Ledger) -> None:
    operations = [ledger.group_issued(issue(group)) for group in range(20)]
    operations.insert(10, ledger.group_scored([scored("stranger/0/0/0")]))
    results = await asyncio.gather(*operations, return_exceptions=True)
    assert [index for index, result in enumerate(results) if isinstance(result, BaseException)] == [10]
    assert counts_of(ledger.path, RUN).admitted == 40


async def test_a_broken_operation_reaches_its_caller_and_the_writer_goes_on(ledger: Ledger) -> None:
    with pytest.raises(AttributeError):
        await ledger.group_scored([None])  # type: ignore[list-item]
    await ledger.group_issued(issue())
    assert counts_of(ledger.path, RUN).admitted == 2


async def test_the_event_log_cannot_be_rewritten(ledger: Ledger) -> None:
    await ledger.group_issued(issue())
    db = sqlite3.connect(ledger.path)
    for statement in ("DELETE FROM transitions", "UPDATE transitions SET to_state = 4"):
        with pytest.raises(sqlite3.IntegrityError, match="only grows"):
            db.execute(statement)
    db.close()


async def test_runs_are_found_by_id_prefix_and_latest(ledger: Ledger) -> None:
    other = "count-20260315-0915-0000"
    await ledger.save_run(RunRecord(other, "count", RunState.PENDING, "", "", time.time()))
    assert (await ledger.get_run("latest")).run_id == other
    assert (await ledger.get_run("count-20260314")).run_id == RUN
    assert [run.run_id for run in await ledger.list_runs()] == [other, RUN]
    with pytest.raises(InvalidRequest, match="several"):
        await ledger.get_run("count-")
    with pytest.raises(NotFound, match="no run 'sum'"):
        await ledger.get_run("sum")
    with pytest.raises(AlreadyExists):
        await ledger.save_run(RunRecord(other, "count", RunState.PENDING, "", "", time.time()))


async def test_runs_that_have_not_ended_are_told_in_the_order_of_their_start(ledger: Ledger) -> None:
    for state in RunState:
        await ledger.save_run(RunRecord(f"run-{state.name}", "count", state, "", "", time.time()))
    names = [f"run-{name}" for name in ("PENDING", "RUNNING", "PAUSED", "STOPPING")]
    assert [run.run_id for run in await ledger.unfinished_runs()] == [RUN, *names]
    assert await ledger.run_ids() == [*(f"run-{state.name}" for state in reversed(RunState)), RUN]


async def test_a_run_changes_only_where_it_is_told_to(ledger: Ledger) -> None:
    before = await ledger.get_run(RUN)
    await ledger.update_run(RUN, state=RunState.FAILED, reason=info("no disk"), ended_at=12.5)
    after = await ledger.get_run(RUN)
    assert (after.state, after.reason, after.ended_at) == (RunState.FAILED, info("no disk"), 12.5)
    assert (after.config_yaml, after.created_at, after.step) == (
        before.config_yaml,
        before.created_at,
        before.step,
    )


async def test_pages_of_samples_have_no_gap_and_no_overlap(ledger: Ledger) -> None:
    for group in range(5):
        await ledger.group_issued(issue(group, step=group % 2))
    pages, after = [], 0
    while page := await ledger.samples(RUN, step=1, limit=3, after=after):
        pages += [record.sample_id for record in page]
        after = page[-1].position
    assert pages == [*issue(1).sample_ids, *issue(3).sample_ids]


async def test_a_ledger_of_a_newer_flotilla_is_refused(ledger: Ledger) -> None:
    ledger.close()
    with sqlite3.connect(ledger.path) as db:
        db.execute("INSERT INTO migrations VALUES (99, 0)")
    with pytest.raises(FailedPrecondition, match="schema 99"):
        Ledger.open(ledger.path)


async def test_a_closed_ledger_says_so(ledger: Ledger) -> None:
    ledger.close()
    with pytest.raises(FailedPrecondition, match="closed"):
        await ledger.group_issued(issue())

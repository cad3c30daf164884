"""Active runs lose nothing on disk; of ended runs, the oldest are removed first."""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

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
from flotilla_coordinator.ledger.run_rows import used_bytes
from flotilla_coordinator.retention import Retention
from flotilla_coordinator.timeline.reader import SpanReader
from flotilla_coordinator.timeline.store import SpanStore
from flotilla_core.config.stack import CoordinatorConfig
from flotilla_core.errors import FailedPrecondition, NotFound
from flotilla_core.telemetry import names
from flotilla_core.version import Version

RUNS = ("first", "second", "third")
TOKENS = 20_000
LIMIT_S = 10.0
LOOSE = "name: run\nsteps: 3\ndata: {train: /x.jsonl}\nrewards: [{reward: exact}]\n"
MIB = 1 << 20


@pytest.fixture
async def ledger(tmp_path: Path) -> AsyncIterator[Ledger]:
    """Three runs with a trained and an open group each; the last one goes on."""
    ledger = Ledger.open(tmp_path / "ledger.sqlite")
    for run_id in RUNS:
        directory = tmp_path / "runs" / run_id
        directory.mkdir(parents=True)
        await ledger.save_run(RunRecord(run_id, run_id, RunState.RUNNING, "{}", str(directory), 1.0))
        trained, _ = [await scored(ledger, run_id, step) for step in (0, 1)]
        await ledger.consumed(
            run_id, f"{run_id}/0.1", trained, Version(0, 0), result=Version(0, 1), step=1, cursor=None
        )
        if run_id != RUNS[-1]:
            await ledger.drop_in_flight(run_id, "run_ended")
            await ledger.update_run(run_id, state=RunState.FAILED)
    yield ledger
    ledger.close()


async def scored(ledger: Ledger, run_id: str, step: int) -> list[str]:
    group_id = f"{run_id}/0/{step}"
    samples = tuple(f"{group_id}/{index}" for index in range(2))
    await ledger.group_issued(GroupIssue(run_id, group_id, samples, step, 0, "", np.zeros(1, np.int32)))
    tokens, logprobs = np.zeros(TOKENS, np.int32), np.zeros(TOKENS, np.float32)
    spans = (TokenSpan(Version(0, step), 0, TOKENS),)
    await ledger.group_scored(
        [FinishedSample(name, tokens, logprobs, "", spans, reward=1.0) for name in samples]
    )
    return list(samples)


def used(path: Path) -> int:
    db = sqlite3.connect(path)
    try:
        return used_bytes(db)
    finally:
        db.close()


async def with_tokens(ledger: Ledger, run_id: str) -> int:
    return sum(record.token_ids is not None for record in await ledger.samples(run_id))


async def test_a_ledger_that_is_small_enough_forgets_nothing(ledger: Ledger) -> None:
    assert await ledger.shrink(100 * MIB) == []
    assert [await with_tokens(ledger, run_id) for run_id in RUNS] == [4, 4, 4]


async def test_the_oldest_ended_run_loses_its_tokens_first(ledger: Ledger) -> None:
    before = used(ledger.path)
    assert await ledger.shrink(before - MIB // 4) == ["first"]
    assert [await with_tokens(ledger, run_id) for run_id in RUNS] == [0, 4, 4]
    assert len(await ledger.samples("first")) == 4, "what happened is known still"
    for run_id in RUNS:
        assert check(ledger.path, run_id).passed
    assert used(ledger.path) < before


async def test_one_that_goes_on_keeps_everything_however_small_the_limit(ledger: Ledger) -> None:
    assert await ledger.shrink(1) == ["first", "second"]
    assert [len(await ledger.samples(run_id)) for run_id in RUNS] == [0, 0, 4]
    assert await with_tokens(ledger, "third") == 4
    for run_id in RUNS:
        verdict = check(ledger.path, run_id)
        assert verdict.conservation_ok and verdict.trained_twice == 0, str(verdict)
    with pytest.raises(FailedPrecondition, match="is active"):
        await ledger.forget_run("third")


async def test_a_run_that_is_resumed_after_all_asks_for_its_samples_again(ledger: Ledger) -> None:
    assert await ledger.shrink(used(ledger.path) - MIB // 4) == ["first"]
    await ledger.fall_back("first", Version(1, 0), step=0, cursor=None)
    states = [record.state for record in await ledger.samples("first")]
    assert states == [SampleState.ISSUED] * 4
    await ledger.group_scored([])
    assert check(ledger.path, "first").passed


async def test_the_event_log_still_refuses_to_shrink_by_itself(ledger: Ledger) -> None:
    await ledger.shrink(1)
    db = sqlite3.connect(ledger.path)
    with pytest.raises(sqlite3.IntegrityError, match="only grows"):
        db.execute("DELETE FROM transitions")
    db.close()


def keeping_one(
    ledger: Ledger, spans: SpanStore, folder: Path, change_lock: asyncio.Lock | None = None
) -> Retention:
    config = CoordinatorConfig.model_validate({"retention": {"runs_kept": 1}})
    return Retention(config, ledger, spans, folder / "runs", change_lock or asyncio.Lock())


@pytest.fixture
def spans(tmp_path: Path) -> Iterator[SpanStore]:
    store = SpanStore(tmp_path / "spans.sqlite")
    yield store
    store.close()


async def test_runs_beyond_the_newest_are_removed_whole_and_those_elsewhere_keep_their_directory(
    ledger: Ledger, spans: SpanStore, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    await ledger.save_run(RunRecord("mine", "mine", RunState.STOPPED, "{}", str(elsewhere), 1.0))
    await ledger.save_run(RunRecord("newest", "newest", RunState.STOPPED, "{}", str(tmp_path / "x"), 1.0))
    retention = keeping_one(ledger, spans, tmp_path)
    for _ in range(2):
        await retention.enforce()
    assert [record.run_id for record in await ledger.list_runs()] == ["newest", "third"]
    assert sorted(entry.name for entry in (tmp_path / "runs").iterdir()) == ["third"]
    assert elsewhere.is_dir()
    with pytest.raises(NotFound):
        await ledger.get_run("first")
    fence = await ledger.begin("third", 0)
    assert fence.number == 1


async def begin_from(ledger: Ledger, folder: Path, settings: str) -> None:
    """The run `third`, which goes on, begins from a folder of the run `first`, by way of a link."""
    model = folder / "runs" / "first" / "checkpoints" / "step-000002" / "model"
    model.mkdir(parents=True)
    (folder / "link").symlink_to(model)
    await ledger.update_run("third", config_yaml=LOOSE + settings.format(path=folder / "link"))


BEGINNINGS = {
    "initial_weights": "initial_weights: {path}\n",
    "critic": "algorithm: {{advantage: {{type: gae}}, critic: {{initial_weights: {path}}}}}\n",
    "adapter": "lora: {{adapter: {path}}}\n",
}


@pytest.mark.parametrize("settings", BEGINNINGS.values(), ids=BEGINNINGS)
@pytest.mark.parametrize("state", [RunState.RUNNING, RunState.FAILED])
async def test_a_run_from_which_another_one_begins_stays_while_that_one_may_go_on(
    ledger: Ledger, spans: SpanStore, tmp_path: Path, settings: str, state: RunState
) -> None:
    await begin_from(ledger, tmp_path, settings)
    await ledger.update_run("third", state=state)
    await keeping_one(ledger, spans, tmp_path).enforce()
    assert (tmp_path / "link").is_dir()
    assert (await ledger.get_run("first")).state is RunState.FAILED


@pytest.mark.parametrize(("settings", "stays"), [("", False), ("lora: {{}}\n", True)])
async def test_of_a_run_that_succeeded_the_weights_under_adapters_alone_are_needed_on(
    ledger: Ledger, spans: SpanStore, tmp_path: Path, settings: str, stays: bool
) -> None:
    await begin_from(ledger, tmp_path, BEGINNINGS["initial_weights"] + settings)
    await ledger.update_run("third", state=RunState.SUCCEEDED)
    await keeping_one(ledger, spans, tmp_path).enforce()
    assert (tmp_path / "link").is_dir() is stays


async def test_what_a_run_began_from_goes_at_the_look_after_that_run_went(
    ledger: Ledger, spans: SpanStore, tmp_path: Path
) -> None:
    await begin_from(ledger, tmp_path, BEGINNINGS["initial_weights"])
    await ledger.update_run("third", state=RunState.FAILED)
    await ledger.save_run(RunRecord("newest", "newest", RunState.STOPPED, LOOSE, str(tmp_path / "x"), 1.0))
    for left in (["newest", "first"], ["newest"]):
        await keeping_one(ledger, spans, tmp_path).enforce()
        assert [record.run_id for record in await ledger.list_runs()] == left
    assert list((tmp_path / "runs").iterdir()) == []


async def test_a_run_that_is_resumed_while_others_are_removed_stays(
    ledger: Ledger, spans: SpanStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_lock, listed, list_ended = asyncio.Lock(), asyncio.Event(), ledger.ended_beyond

    async def ended_beyond(kept: int) -> list[tuple[str, str]]:
        ended = await list_ended(kept)
        listed.set()
        return ended

    monkeypatch.setattr(ledger, "ended_beyond", ended_beyond)
    retention = keeping_one(ledger, spans, tmp_path, change_lock)
    async with change_lock:  # as a resume does
        looking = asyncio.create_task(retention.enforce())
        await asyncio.wait_for(listed.wait(), LIMIT_S)
        await ledger.update_run("first", state=RunState.RUNNING)
    await asyncio.wait_for(looking, LIMIT_S)
    assert (await ledger.get_run("first")).state is RunState.RUNNING
    assert sorted(entry.name for entry in (tmp_path / "runs").iterdir()) == sorted(RUNS)


async def test_a_run_whose_files_are_being_removed_is_forgotten_already_and_holds_up_no_start(
    ledger: Ledger, spans: SpanStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on, rmtree = threading.Event(), threading.Event(), shutil.rmtree

    def slowly(path: Path, *, ignore_errors: bool) -> None:
        begun.set()
        assert go_on.wait(LIMIT_S)
        rmtree(path, ignore_errors=ignore_errors)

    monkeypatch.setattr(shutil, "rmtree", slowly)
    change_lock = asyncio.Lock()
    removing = asyncio.create_task(keeping_one(ledger, spans, tmp_path, change_lock).enforce())
    assert await asyncio.to_thread(begun.wait, LIMIT_S)
    with pytest.raises(NotFound):
        await ledger.get_run("first")
    assert not change_lock.locked() and not (tmp_path / "runs" / "first").exists()
    go_on.set()
    await asyncio.wait_for(removing, LIMIT_S)


async def test_what_a_coordinator_left_that_died_while_it_removed_runs_goes_at_the_next_look(
    ledger: Ledger, spans: SpanStore, tmp_path: Path
) -> None:
    runs = tmp_path / "runs"
    (runs / "first").rename(runs / ".removed-first")  # it did not come to forget it
    (runs / ".removed-earlier" / "checkpoints").mkdir(parents=True)
    await keeping_one(ledger, spans, tmp_path).enforce()
    assert sorted(entry.name for entry in runs.iterdir()) == ["second", "third"]
    with pytest.raises(NotFound):
        await ledger.get_run("first")


async def stored(store: SpanStore, run_id: str, start_ns: int, spans: int) -> None:
    request = ExportTraceServiceRequest()
    scope = request.resource_spans.add().scope_spans.add()
    for number in range(spans):
        span = scope.spans.add(
            trace_id=os.urandom(16),
            span_id=os.urandom(8),
            name="rl.step",
            start_time_unix_nano=start_ns + number,
            end_time_unix_nano=start_ns + number + 1,
        )
        for key, value in ((names.RUN_ID, run_id), ("text", "x" * 1000)):
            span.attributes.add(key=key).value.string_value = value
    await store.add(request)


async def test_the_span_store_forgets_runs_then_the_oldest_spans_of_the_last(tmp_path: Path) -> None:
    store = SpanStore(tmp_path / "spans.sqlite")
    for place, run_id in enumerate(RUNS):
        await stored(store, run_id, place * 10_000, 600)
    assert await store.prune(50, 100 * MIB) == 0
    assert await store.prune(50, used(store.path) * 4 // 5) == 600
    reader = SpanReader(store.path)
    assert [len(list(reader.spans_of_run(run_id, None))) for run_id in RUNS] == [0, 600, 600]
    assert await store.prune(50, used(store.path) // 4) > 600
    left = [span.start_ns for span in reader.spans_of_run("third", None)]
    assert 0 < len(left) < 600 and max(left) == 20_599, "the newest spans stay"
    reader.close()
    store.close()

"""The span store and its receiver: what is acknowledged is found again, whatever happens to the writer."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import TraceServiceStub

from flotilla_coordinator.timeline import store as store_module
from flotilla_coordinator.timeline.reader import SpanReader
from flotilla_coordinator.timeline.store import SpanStore, TraceReceiver, add_to_server
from flotilla_core import telemetry
from flotilla_core.errors import FailedPrecondition, NotFound
from flotilla_core.telemetry import names


class Batch:
    """Builds an export request of one process."""

    def __init__(self, instance: str = "coordinator-0") -> None:
        self.request = ExportTraceServiceRequest()
        resource = self.request.resource_spans.add()
        for key, value in (
            (names.SERVICE_NAME, instance.split("-", maxsplit=1)[0]),
            (names.SERVICE_INSTANCE_ID, instance),
        ):
            resource.resource.attributes.add(key=key).value.string_value = value
        self._spans = resource.scope_spans.add().spans

    def span(
        self,
        name: str,
        trace: int,
        span: int,
        *,
        parent: int = 0,
        run: str = "",
        step: int | None = None,
        links: Sequence[tuple[int, int]] = (),
        start: int = 0,
    ) -> Batch:
        added = self._spans.add(name=name, trace_id=trace.to_bytes(16), span_id=span.to_bytes(8), kind=1)
        added.parent_span_id = parent.to_bytes(8) if parent else b""
        added.start_time_unix_nano = 1_000 + start
        added.end_time_unix_nano = 2_000 + start
        if run:
            added.attributes.add(key=names.RUN_ID).value.string_value = run
        if step is not None:
            added.attributes.add(key=names.STEP).value.int_value = step
        for linked_trace, linked_span in links:
            added.links.add(trace_id=linked_trace.to_bytes(16), span_id=linked_span.to_bytes(8))
        return self


@pytest_asyncio.fixture
async def store(tmp_path: Path) -> AsyncIterator[SpanStore]:
    running = SpanStore(tmp_path / "spans.sqlite")
    yield running
    running.close()


def found(store: SpanStore, run_id: str, step: int | None = None) -> list[str]:
    reader = SpanReader(store.path)
    try:
        return sorted(span.name for span in reader.spans_of_run(run_id, step))
    finally:
        reader.close()


async def test_a_run_has_all_spans_of_its_traces_in_whatever_order_they_arrive(store: SpanStore) -> None:
    await store.add(Batch("generator-0").span("generate", 1, 2, parent=1).request)
    await store.add(Batch().span("sample", 1, 1, run="run-1", step=0).request)
    await store.add(Batch("reward-0").span("score", 1, 3, parent=1).request)
    await store.add(Batch().span("foreign", 2, 4, run="run-2").span("of nobody", 3, 5).request)
    assert found(store, "run-1") == ["generate", "sample", "score"]
    assert found(store, "run-2") == ["foreign"]
    assert found(store, "run-3") == []


async def test_traces_that_a_run_links_to_belong_to_its_timeline(store: SpanStore) -> None:
    await store.add(Batch().span("train", 1, 1, run="run-1", links=[(2, 7)]).request)
    await store.add(Batch().span("linked", 2, 7).span("below", 2, 8, parent=7).span("other", 3, 9).request)
    assert found(store, "run-1") == ["below", "linked", "train"]


async def test_a_step_is_its_own_traces_and_its_part_of_a_longer_one(store: SpanStore) -> None:
    batch = Batch().span("loop", 1, 1, run="run-1")
    for step in (0, 1):
        batch.span(
            f"step {step}", 1, 10 + step, parent=1, run="run-1", step=step, links=[(20 + step, 20 + step)]
        )
        batch.span(f"train {step}", 1, 12 + step, parent=10 + step)
        batch.span(f"sample {step}", 20 + step, 20 + step, run="run-1", step=step)
        batch.span(f"generate {step}", 20 + step, 30 + step, parent=20 + step)
    await store.add(batch.request)
    assert found(store, "run-1", 1) == ["generate 1", "sample 1", "step 1", "train 1"]
    assert len(found(store, "run-1")) == 9


async def test_a_batch_that_is_sent_twice_is_stored_once(store: SpanStore) -> None:
    batch = Batch().span("once", 1, 1, run="run-1")
    await store.add(batch.request)
    await store.add(batch.request)
    assert found(store, "run-1") == ["once"]


async def test_the_newest_runs_are_kept_and_the_rest_is_deleted(store: SpanStore) -> None:
    for number in range(5):
        batch = Batch().span("root", number + 1, 1, run=f"run-{number}", start=number * 10_000)
        await store.add(batch.span("child", number + 1, 2, parent=1, start=number * 10_000).request)
    await store.add(Batch().span("of nobody, old", 99, 1).span("of nobody, new", 98, 1, start=90_000).request)
    assert await store.prune(keep_runs=2) == 7
    assert [len(found(store, f"run-{number}")) for number in range(5)] == [0, 0, 0, 2, 2]
    assert await store.prune(keep_runs=2) == 0


async def test_a_full_queue_refuses_and_counts_and_recovers(
    store: SpanStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "MAX_QUEUED_SPANS", 1)
    too_much = Batch().span("a", 1, 1, run="run-1").span("b", 1, 2)
    assert await store.add(too_much.request) == 2
    assert store.dropped == 2
    assert await store.add(Batch().span("c", 1, 3, run="run-1").request) == 0
    assert found(store, "run-1") == ["c"]


async def test_what_waits_for_the_writer_is_committed_together(store: SpanStore) -> None:
    statements: list[str] = []
    held, go_on = threading.Event(), threading.Event()

    def hold(connection: sqlite3.Connection) -> int:
        connection.set_trace_callback(statements.append)
        held.set()
        assert go_on.wait(30)
        return 0

    holding = store._submit(hold, 0)
    assert await asyncio.to_thread(held.wait, 30)
    batches = [Batch("generator-0").span("generate", number, 1, run="run-1") for number in range(80)]
    adding = [asyncio.create_task(store.add(batch.request)) for batch in batches]
    async with asyncio.timeout(30):
        while store._queue.qsize() < len(batches):
            await asyncio.sleep(0)
    go_on.set()
    await asyncio.gather(asyncio.wrap_future(holding), *adding)
    assert store.stored == len(batches)
    assert [statement for statement in statements if statement.startswith("BEGIN")] == ["BEGIN IMMEDIATE"]


async def test_a_failed_commit_reaches_the_sender_and_the_store_goes_on(store: SpanStore) -> None:
    with sqlite3.connect(store.path) as another:
        another.execute("ALTER TABLE spans RENAME TO hidden")
    with pytest.raises(sqlite3.OperationalError, match="no such table"):
        await store.add(Batch().span("lost", 1, 1, run="run-1").request)
    with another:
        another.execute("ALTER TABLE hidden RENAME TO spans")
    another.close()
    await store.add(Batch().span("kept", 1, 2, run="run-1").request)
    assert found(store, "run-1") == ["kept"]
    assert store.dropped == 1


async def test_a_closed_store_refuses(tmp_path: Path) -> None:
    store = SpanStore(tmp_path / "spans.sqlite")
    store.close()
    store.close()
    with pytest.raises(FailedPrecondition):
        await store.add(Batch().span("late", 1, 1).request)


def test_a_missing_store_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="nowhere"):
        SpanReader(tmp_path / "nowhere.sqlite")


_WRITER = """
import asyncio, sys
from pathlib import Path
from flotilla_coordinator.timeline.store import SpanStore
from flotilla_core.telemetry import names
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

async def main():
    store = SpanStore(Path(sys.argv[1]))
    for number in range(1, 1_000_000):
        request = ExportTraceServiceRequest()
        span = request.resource_spans.add().scope_spans.add().spans.add(
            name=str(number), trace_id=number.to_bytes(16), span_id=number.to_bytes(8))
        span.attributes.add(key=names.RUN_ID).value.string_value = "run-1"
        await store.add(request)
        sys.stdout.write(f"{number}\\n")
        sys.stdout.flush()

asyncio.run(main())
"""


def test_every_acknowledged_span_is_readable_after_the_writer_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "spans.sqlite"
    writer = subprocess.Popen([sys.executable, "-c", _WRITER, str(path)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    acknowledged = 0
    for line in writer.stdout:
        acknowledged = int(line)
        if acknowledged == 200:
            break
    alive = SpanReader(path)  # next to the living writer
    assert len(list(alive.spans_of_run("run-1"))) >= 200
    alive.close()
    writer.send_signal(signal.SIGKILL)
    acknowledged = max([acknowledged, *(int(line) for line in writer.stdout if line.endswith("\n"))])
    writer.wait()
    reader = SpanReader(path)
    stored = {int(span.name) for span in reader.spans_of_run("run-1")}
    reader.close()
    assert stored >= set(range(1, acknowledged + 1))


async def test_spans_of_a_process_arrive_through_the_receiver(store: SpanStore) -> None:
    server = grpc.aio.server()
    add_to_server(TraceReceiver(store), server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    telemetry.start("trainer", "trainer-0-ab12", [f"127.0.0.1:{port}"])
    with (
        telemetry.span(
            names.RL_TRAIN, attributes={names.RUN_ID: "run-1", names.STEP: 4, "bad": float("nan")}
        ),
        telemetry.span(names.TRAINER_FORWARD_BACKWARD),
    ):
        pass
    await asyncio.to_thread(telemetry.stop)
    await server.stop(None)
    reader = SpanReader(store.path)
    spans = list(reader.spans_of_run("run-1", step=4))
    reader.close()
    assert [span.name for span in spans] == [names.RL_TRAIN, names.TRAINER_FORWARD_BACKWARD]
    assert spans[1].parent_id == spans[0].span_id
    assert {(span.service, span.instance, span.pid) for span in spans} == {
        ("trainer", "trainer-0-ab12", os.getpid())
    }


async def test_the_receiver_says_how_many_spans_it_refused(
    store: SpanStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "MAX_QUEUED_SPANS", 0)
    server = grpc.aio.server()
    add_to_server(TraceReceiver(store), server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        answer = await TraceServiceStub(channel).Export(Batch().span("x", 1, 1).request)  # type: ignore[no-untyped-call]
    assert answer.partial_success.rejected_spans == 1
    await server.stop(None)

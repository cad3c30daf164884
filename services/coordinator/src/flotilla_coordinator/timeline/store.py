"""Writes the span store, SQLite in WAL mode on a thread of its own, from the OTLP messages that it receives.

Invariants: there is one writer. `add` returns once the spans are committed, so an exporter that waits for the answer
loses nothing when this process is killed. All waiting spans are committed together. The queue is bounded by spans;
those that do not fit are refused and counted. Readers never wait for the writer. Old runs are deleted first, and then
the oldest spans of the last run: the newest spans stay, whatever the limits.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import queue
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTracePartialSuccess,
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as OtlpSpan

from flotilla_coordinator.timeline.schema import NO_STEP, migrate
from flotilla_core.disk import disk_full, names_full_disk
from flotilla_core.errors import FailedPrecondition
from flotilla_core.telemetry import names

MAX_QUEUED_SPANS = 100_000
_MAX_COMMIT_SPANS = 20_000

_INSERT_SPAN = "INSERT OR IGNORE INTO spans VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
_INSERT_RUN = (
    "INSERT INTO runs VALUES (?, ?) "
    "ON CONFLICT (run_id) DO UPDATE SET started_ns = min(started_ns, excluded.started_ns)"
)

logger = logging.getLogger(__name__)

Work = Callable[[sqlite3.Connection], int]

# Free pages are returned to the file system in portions, so that no commit takes long.
_VACUUM_PAGES = 4096
_PORTION = 8
"""The oldest eighth of the last run's time is deleted at once."""

SERVICE_NAME = "opentelemetry.proto.collector.trace.v1.TraceService"
add_to_server = add_TraceServiceServicer_to_server

Value = str | int | float | bool | None | list["Value"] | dict[str, "Value"]


class ResourceKey(NamedTuple):
    """The process that a span comes from."""

    service: str
    instance: str
    host: str
    pid: int


class SpanRow(NamedTuple):
    """A span as it is stored, without its resource."""

    trace_id: bytes
    span_id: bytes
    parent_id: bytes | None
    name: str
    kind: int
    start_ns: int
    end_ns: int
    status: int
    attributes: str
    links: bytes | None
    """Trace and span id of each linked span, 24 bytes a link."""
    run_id: str | None
    step: int | None


def count_spans(request: ExportTraceServiceRequest) -> int:
    """Return the number of spans in a request."""
    return sum(len(scope.spans) for resource in request.resource_spans for scope in resource.scope_spans)


def rows(request: ExportTraceServiceRequest) -> Iterator[tuple[ResourceKey, SpanRow]]:
    """Return every span of a request with its process; spans without valid ids are left out."""
    for resource_spans in request.resource_spans:
        key = _resource_key(resource_spans.resource.attributes)
        for scope in resource_spans.scope_spans:
            for span in scope.spans:
                if len(span.trace_id) == 16 and len(span.span_id) == 8:
                    yield key, _row(span)


def _resource_key(attributes: Iterable[KeyValue]) -> ResourceKey:
    found = {attribute.key: _plain(attribute.value) for attribute in attributes}
    pid = found.get(names.PROCESS_PID)
    service = str(found.get(names.SERVICE_NAME) or "unknown")
    return ResourceKey(
        service,
        str(found.get(names.SERVICE_INSTANCE_ID) or service),
        str(found.get(names.HOST_NAME) or ""),
        pid if isinstance(pid, int) else 0,
    )


def _row(span: OtlpSpan) -> SpanRow:
    attributes = {attribute.key: _plain(attribute.value) for attribute in span.attributes}
    run_id = attributes.get(names.RUN_ID)
    step = attributes.get(names.STEP)
    if span.events:
        attributes["events"] = [_event(event) for event in span.events]
    if span.status.message:
        attributes["status.message"] = span.status.message
    return SpanRow(
        span.trace_id,
        span.span_id,
        span.parent_span_id or None,
        span.name,
        span.kind,
        span.start_time_unix_nano,
        max(span.start_time_unix_nano, span.end_time_unix_nano),
        span.status.code,
        json.dumps(attributes, separators=(",", ":"), sort_keys=True) if attributes else "{}",
        b"".join(link.trace_id + link.span_id for link in span.links) or None,
        run_id if isinstance(run_id, str) else None,
        step if isinstance(step, int) else None,
    )


def _event(event: OtlpSpan.Event) -> Value:
    return {
        "name": event.name,
        "time_ns": event.time_unix_nano,
        **{attribute.key: _plain(attribute.value) for attribute in event.attributes},
    }


def _plain(value: AnyValue) -> Value:
    """Convert to a JSON value; a value that JSON cannot hold becomes text."""
    kind = value.WhichOneof("value")
    if kind in ("string_value", "int_value", "bool_value"):
        plain: Value = getattr(value, kind)
        return plain
    if kind == "double_value":
        return value.double_value if math.isfinite(value.double_value) else str(value.double_value)
    if kind == "array_value":
        return [_plain(item) for item in value.array_value.values]
    if kind == "kvlist_value":
        return {item.key: _plain(item.value) for item in value.kvlist_value.values}
    return value.bytes_value.hex() if kind == "bytes_value" else None


class SpanStore:
    """Stores spans; a `SpanReader` reads them, in this process or another."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stored = 0
        self.dropped = 0
        self._queued = 0
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[tuple[Work, int, Future[int]] | None] = queue.SimpleQueue()
        self._resources: dict[ResourceKey, int] = {}
        self._closed = False
        with names_full_disk("the span store cannot be opened", path):
            self._connection = _open(path)
        self._thread = threading.Thread(target=self._write, name="span-store", daemon=True)
        self._thread.start()

    async def add(self, request: ExportTraceServiceRequest) -> int:
        """Store the spans of a request; return how many were refused because the queue is full."""
        count = count_spans(request)
        with self._lock:
            if self._queued + count > MAX_QUEUED_SPANS:
                self.dropped += count
                return count
            self._queued += count
        await asyncio.wrap_future(self._submit(lambda connection: self._insert(connection, request), count))
        return 0

    async def prune(self, keep_runs: int, most_bytes: int | None = None) -> int:
        """Keep only the newest runs, and of those no more than fits; return the number of deleted spans."""
        return await asyncio.wrap_future(
            self._submit(lambda connection: prune(connection, keep_runs, most_bytes), 0)
        )

    def close(self) -> None:
        """Commit what is queued, and close the store."""
        if self._closed:
            return
        self._closed = True
        self._queue.put(None)
        self._thread.join()

    def _submit(self, work: Work, spans: int) -> Future[int]:
        if self._closed:
            raise FailedPrecondition("the span store is closed", where=str(self.path))
        done: Future[int] = Future()
        self._queue.put((work, spans, done))
        return done

    def _write(self) -> None:
        """Run the writer's thread: commit all waiting work as one transaction, and answer its callers."""
        last = False
        while not last:
            batch, last = self._take_batch()
            if batch:
                self._commit(batch)
        self._connection.close()

    def _take_batch(self) -> tuple[list[tuple[Work, int, Future[int]]], bool]:
        batch: list[tuple[Work, int, Future[int]]] = []
        spans = 0
        while spans < _MAX_COMMIT_SPANS:
            try:
                item = self._queue.get(block=not batch)
            except queue.Empty:
                return batch, False
            if item is None:
                return batch, True
            batch.append(item)
            spans += item[1]
        return batch, False

    def _commit(self, batch: list[tuple[Work, int, Future[int]]]) -> None:
        results: list[int] = []
        failure: Exception | None = None
        try:
            with self._connection:
                self._connection.execute("BEGIN IMMEDIATE")
                results = [work(self._connection) for work, _, _ in batch]
        # The thread survives every failure, such as a full disk: each caller gets the error and decides.
        except Exception as error:  # noqa: BLE001
            failure = disk_full(error, "spans cannot be stored", self.path) or error
            self._resources.clear()
            logger.warning("spans could not be stored: %s", error)
        spans = sum(count for _, count, _ in batch)
        with self._lock:
            self._queued -= spans
            self.dropped += spans if failure else 0
            self.stored += 0 if failure else spans
        for position, (_, _, done) in enumerate(batch):
            if not done.set_running_or_notify_cancel():
                continue
            if failure is not None:
                done.set_exception(failure)
            else:
                done.set_result(results[position])

    def _insert(self, connection: sqlite3.Connection, request: ExportTraceServiceRequest) -> int:
        spans = list(rows(request))
        connection.executemany(
            _INSERT_SPAN, [_columns(row, self._resource(connection, key)) for key, row in spans]
        )
        carrying = [row for _, row in spans if row.run_id is not None]
        if carrying:
            connection.executemany(
                "INSERT OR IGNORE INTO run_traces VALUES (?, ?, ?)",
                {(row.run_id, row.trace_id, NO_STEP if row.step is None else row.step) for row in carrying},
            )
            connection.executemany(_INSERT_RUN, _run_starts(carrying).items())
        return len(spans)

    def _resource(self, connection: sqlite3.Connection, key: ResourceKey) -> int:
        known = self._resources.get(key)
        if known is None:
            connection.execute(
                "INSERT OR IGNORE INTO resources (service, instance, host, pid) VALUES (?, ?, ?, ?)", key
            )
            row = connection.execute(
                "SELECT id FROM resources WHERE service = ? AND instance = ? AND host = ? AND pid = ?", key
            ).fetchone()
            known = self._resources[key] = int(row[0])
        return known


def _open(path: Path) -> sqlite3.Connection:
    path.parent.mkdir(parents=True, exist_ok=True)
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
    connection.execute("PRAGMA journal_mode = WAL")
    # A killed process loses nothing; a power cut may lose the last seconds of a timeline.
    connection.execute("PRAGMA synchronous = NORMAL")
    migrate(connection, path)
    return connection


def _columns(row: SpanRow, resource: int) -> tuple[object, ...]:
    return (*row[:5], resource, *row[5:10])


def _run_starts(carrying: list[SpanRow]) -> dict[str, int]:
    starts: dict[str, int] = {}
    for row in carrying:
        if row.run_id is not None:
            starts[row.run_id] = min(row.start_ns, starts.get(row.run_id, row.start_ns))
    return starts


def prune(connection: sqlite3.Connection, keep_runs: int, most_bytes: int | None) -> int:
    """Keep only the newest runs, and of those no more than fits; return the number of deleted spans."""
    deleted = _keep(connection, keep_runs)
    if most_bytes is not None:
        (runs,) = connection.execute("SELECT count(*) FROM runs").fetchone()
        while runs > 1 and _used_bytes(connection) > most_bytes:
            runs -= 1
            deleted += _keep(connection, runs)
        while _used_bytes(connection) > most_bytes and (oldest := _cut_oldest(connection)):
            deleted += oldest
    if deleted:
        connection.execute(f"PRAGMA incremental_vacuum({_VACUUM_PAGES})").fetchall()
    return deleted


def _keep(connection: sqlite3.Connection, keep_runs: int) -> int:
    """Delete all but the newest runs, and the spans of no run that are older than what is kept."""
    kept = connection.execute(
        "SELECT run_id, started_ns FROM runs ORDER BY started_ns DESC, run_id DESC LIMIT ?", (keep_runs,)
    ).fetchall()
    gone = connection.execute("SELECT count(*) FROM runs").fetchone()[0] - len(kept)
    if gone == 0:
        return 0
    oldest_ns = min((started_ns for _, started_ns in kept), default=1 << 62)
    connection.execute("CREATE TEMP TABLE IF NOT EXISTS kept_runs (run_id TEXT PRIMARY KEY)")
    connection.execute("DELETE FROM kept_runs")
    connection.executemany("INSERT INTO kept_runs VALUES (?)", [(run_id,) for run_id, _ in kept])
    connection.execute("DELETE FROM run_traces WHERE run_id NOT IN (SELECT run_id FROM kept_runs)")
    connection.execute("DELETE FROM runs WHERE run_id NOT IN (SELECT run_id FROM kept_runs)")
    return connection.execute(
        "DELETE FROM spans WHERE start_ns < ? AND trace_id NOT IN (SELECT trace_id FROM run_traces)",
        (oldest_ns,),
    ).rowcount


def _cut_oldest(connection: sqlite3.Connection) -> int:
    """Delete the oldest part of the spans; return 0 where all of them start at the same time."""
    first, last = connection.execute("SELECT min(start_ns), max(start_ns) FROM spans").fetchone()
    if first is None or first == last:
        return 0
    until = first + max(1, (last - first) // _PORTION)
    deleted = connection.execute("DELETE FROM spans WHERE start_ns < ?", (until,)).rowcount
    connection.execute("DELETE FROM run_traces WHERE trace_id NOT IN (SELECT trace_id FROM spans)")
    return deleted


def _used_bytes(connection: sqlite3.Connection) -> int:
    pages, free, size = (
        connection.execute(f"PRAGMA {name}").fetchone()[0]
        for name in ("page_count", "freelist_count", "page_size")
    )
    return int((pages - free) * size)


class TraceReceiver(TraceServiceServicer):
    """Receives the spans of every process by OTLP and puts them into the store.

    It answers once the spans are committed, and says how many a full queue refused.
    """

    def __init__(self, store: SpanStore) -> None:
        self._store = store

    async def Export(self, request: ExportTraceServiceRequest, context: Any) -> ExportTraceServiceResponse:
        refused = await self._store.add(request)
        if not refused:
            return ExportTraceServiceResponse()
        return ExportTraceServiceResponse(
            partial_success=ExportTracePartialSuccess(
                rejected_spans=refused, error_message="the span store cannot keep up"
            )
        )

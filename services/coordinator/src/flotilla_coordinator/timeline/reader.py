"""Reads the span store, while it is written or after its writer was killed.

Invariants: a reader never writes and never blocks the writer; spans come in the order of their start.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from flotilla_coordinator.timeline.schema import NO_STEP
from flotilla_core.errors import NotFound
from flotilla_core.telemetry import names

_COLUMNS = (
    "s.trace_id, s.span_id, s.parent_id, s.name, s.kind, r.service, r.instance, r.host, r.pid, "
    "s.start_ns, s.end_ns, s.status, s.attributes, s.links"
)
_IN_ORDER = "ORDER BY s.start_ns, s.end_ns DESC, s.span_id"


class StoredSpan(NamedTuple):
    """A span and the process that it comes from."""

    trace_id: bytes
    span_id: bytes
    parent_id: bytes | None
    name: str
    kind: int
    service: str
    instance: str
    host: str
    pid: int
    start_ns: int
    end_ns: int
    status: int
    attributes: str
    """A JSON object."""
    links: bytes | None

    def linked(self) -> Iterator[tuple[bytes, bytes]]:
        """Return the trace id and the span id of every span that this one links to."""
        ids = self.links or b""
        for start in range(0, len(ids), 24):
            yield ids[start : start + 16], ids[start + 16 : start + 24]


class SpanReader:
    """A connection for reading; use one a thread."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            raise NotFound(
                "there is no span store", where=str(path), next_step="start the coordinator with telemetry on"
            )
        self._connection = sqlite3.connect(
            f"{path.resolve().as_uri()}?mode=ro", uri=True, isolation_level=None, check_same_thread=False
        )
        self._connection.execute("CREATE TEMP TABLE selected (trace_id BLOB PRIMARY KEY)")

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def spans_of_run(self, run_id: str, step: int | None = None) -> Iterable[StoredSpan]:
        """Return the spans of every trace of a run and of the traces that these link to, or only those of one step.

        A trace that carries this step alone counts whole; of a trace with several steps, only the spans of this step
        and their descendants count.
        """
        if step is not None:
            return self._spans_of_step(run_id, step)
        self._select_traces(run_id)
        found = self._connection.execute(
            f"SELECT {_COLUMNS} FROM temp.selected JOIN spans s USING (trace_id) "
            f"JOIN resources r ON r.id = s.resource {_IN_ORDER}"
        )
        return map(StoredSpan._make, found)

    def _spans_of_step(self, run_id: str, step: int) -> list[StoredSpan]:
        traces = self._connection.execute(
            "SELECT DISTINCT trace_id FROM run_traces WHERE run_id = ? AND step = ?", (run_id, step)
        )
        chosen: dict[bytes, StoredSpan] = {}
        for (trace_id,) in traces.fetchall():
            spans = self._trace(trace_id)
            seeds = {span.span_id for span in spans if json.loads(span.attributes).get(names.STEP) == step}
            chosen.update(self._part(trace_id, spans, seeds))
        targets: dict[bytes, set[bytes]] = {}
        for span in chosen.values():
            for trace_id, span_id in span.linked():
                targets.setdefault(trace_id, set()).add(span_id)
        for trace_id, span_ids in targets.items():
            chosen.update(self._part(trace_id, self._trace(trace_id), span_ids))
        return sorted(chosen.values(), key=lambda span: (span.start_ns, -span.end_ns, span.span_id))

    def _part(self, trace_id: bytes, spans: list[StoredSpan], seeds: set[bytes]) -> dict[bytes, StoredSpan]:
        """Return the whole trace where it carries at most one step, else the seeds and their descendants."""
        steps = self._connection.execute(
            "SELECT count(DISTINCT step) FROM run_traces WHERE trace_id = ? AND step != ?",
            (trace_id, NO_STEP),
        ).fetchone()[0]
        wanted = {span.span_id for span in spans} if steps <= 1 else _with_descendants(spans, seeds)
        return {span.span_id: span for span in spans if span.span_id in wanted}

    def _trace(self, trace_id: bytes) -> list[StoredSpan]:
        found = self._connection.execute(
            f"SELECT {_COLUMNS} FROM spans s JOIN resources r ON r.id = s.resource "
            f"WHERE s.trace_id = ? {_IN_ORDER}",
            (trace_id,),
        )
        return [StoredSpan._make(row) for row in found]

    def _select_traces(self, run_id: str) -> None:
        """Fill `selected` with the traces of a run and those that they link to."""
        self._connection.execute("DELETE FROM temp.selected")
        self._connection.execute(
            "INSERT INTO temp.selected SELECT DISTINCT trace_id FROM run_traces WHERE run_id = ?", (run_id,)
        )
        links = self._connection.execute(
            "SELECT links FROM temp.selected JOIN spans USING (trace_id) WHERE links IS NOT NULL"
        ).fetchall()
        linked = {(ids[start : start + 16],) for (ids,) in links for start in range(0, len(ids), 24)}
        self._connection.executemany("INSERT OR IGNORE INTO temp.selected VALUES (?)", linked)


def _with_descendants(spans: list[StoredSpan], seeds: set[bytes]) -> set[bytes]:
    children: dict[bytes, list[bytes]] = {}
    for span in spans:
        if span.parent_id is not None:
            children.setdefault(span.parent_id, []).append(span.span_id)
    wanted: set[bytes] = set()
    waiting = list(seeds)
    while waiting:
        span_id = waiting.pop()
        if span_id not in wanted:
            wanted.add(span_id)
            waiting.extend(children.get(span_id, ()))
    return wanted

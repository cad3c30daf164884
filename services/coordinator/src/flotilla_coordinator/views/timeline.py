"""Answers what the timeline of a run is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from flotilla_coordinator.timeline.chrome import chrome_trace
from flotilla_coordinator.timeline.reader import SpanReader
from flotilla_core.errors import NotFound


def trace(store: Path, run_id: str, step: int | None) -> Iterator[bytes]:
    """Yield the spans of a run, or of one step of it, as Chrome trace JSON in chunks."""
    with closing(SpanReader(store)) as reader:
        spans = list(reader.spans_of_run(run_id, step))
    if not spans:
        wanted = "" if step is None else f" of step {step}"
        raise NotFound(f"run {run_id} has no spans{wanted}", next_step="see `flotilla run show`")
    yield from chrome_trace(spans)

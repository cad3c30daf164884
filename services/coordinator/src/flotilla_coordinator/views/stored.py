"""Answers for a coordinator that does not run: the calls of the SDK that need no more than the files of a stack.

Invariant: a run without an end in any record is told as interrupted, so nobody may ask here while a coordinator has it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncGenerator, Callable
from contextlib import closing
from pathlib import Path
from typing import TypeVar

from flotilla.coordinator.v1 import coordinator_pb2 as pb
from flotilla.coordinator.v1.run_pb2 import Run
from flotilla_coordinator import views
from flotilla_coordinator.ledger import queries
from flotilla_coordinator.ledger.schema import connect_read_only
from flotilla_coordinator.records.directory import RunDirectory
from flotilla_coordinator.views.runs import interrupted_run
from flotilla_core.errors import Unavailable

LEAST_PAGE = 10_000
"""Samples that are read at once: no message has to hold them, and the file of a step is read for each page."""

T = TypeVar("T")


class StoredAnswers:
    """The answers that the state directory of a stack holds, by the names of the client's calls."""

    def __init__(self, directory: Path) -> None:
        self._ledger = directory / "ledger.sqlite"
        if not self._ledger.exists():
            raise Unavailable(
                f"stack {directory.name!r} is not running and has no runs on disk",
                where=str(directory),
                next_step="start it with `flotilla up`, or name a coordinator by --coordinator HOST:PORT",
            )

    async def list_runs(self, limit: int = 20) -> list[Run]:
        """Return the runs, newest first."""
        return [interrupted_run(record) for record in self._read(lambda db: queries.runs(db, limit))]

    async def get_run(self, run_id: str = "latest") -> Run:
        """Return a run by its id, a unique prefix of it, or "latest"."""
        return (await self.get_run_and_config(run_id)).run

    async def get_run_and_config(self, run_id: str = "latest") -> pb.GetRunResponse:
        """Return the run and its resolved configuration."""
        record = self._read(lambda db: queries.run(db, run_id))
        return pb.GetRunResponse(run=interrupted_run(record), config_yaml=record.config_yaml)

    async def list_samples(
        self,
        run_id: str = "latest",
        *,
        step: int | None = None,
        state: pb.SampleState.ValueType = pb.SAMPLE_STATE_UNSPECIFIED,
        limit: int = 100,
        page_token: str = "",
        messages: bool = True,
    ) -> pb.ListSamplesResponse:
        """Return one page of samples, which may be longer than `limit`."""
        record = self._read(lambda db: queries.run(db, run_id))
        request = pb.ListSamplesRequest(
            step=step,
            state=state,
            limit=max(limit, LEAST_PAGE),
            page_token=page_token,
            without_messages=not messages,
        )
        return views.list_samples(self._ledger, record.run_id, RunDirectory(Path(record.directory)), request)

    async def timeline(self, run_id: str = "latest", *, step: int | None = None) -> AsyncGenerator[bytes]:
        """Yield Chrome trace JSON in chunks."""
        record = self._read(lambda db: queries.run(db, run_id))
        for chunk in views.trace(self._ledger.with_name("spans.sqlite"), record.run_id, step):
            yield chunk

    def _read(self, query: Callable[[sqlite3.Connection], T]) -> T:
        with closing(connect_read_only(self._ledger)) as db:
            return query(db)

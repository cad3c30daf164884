"""Keeps the numbered events of one run, for any number of watchers, also after the run has ended.

Invariants: sequence numbers start at 1 and have no gaps. A watcher that reconnects with the last number it saw misses
none of the last MAX_EVENTS. A slow watcher never slows the loop. All events are in the run directory, and are read from
there once the run has ended: a log exists as long as its run is active, and ended runs keep nothing in memory. The last
event is always the end of the run, also where its file lost some (a full disk, a killed coordinator).
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import islice
from pathlib import Path

from google.protobuf import json_format

from flotilla.coordinator.v1 import run_pb2
from flotilla_coordinator.records.directory import RunDirectory

MAX_EVENTS = 20_000

EVENTS_AT_ONCE = 500


class EventLog:
    """The append-only events of one active run."""

    def __init__(self, published: Callable[[run_pb2.RunEvent], None], *, after: int = 0) -> None:
        self._published = published
        self._events: deque[run_pb2.RunEvent] = deque(maxlen=MAX_EVENTS)
        self._count = after
        self._grown = asyncio.Event()
        self._closed = False

    @property
    def last_sequence(self) -> int:
        """Return the number of the newest event; 0 before the first."""
        return self._count

    @property
    def first_kept(self) -> int:
        """Return the number of the oldest event that is still in memory, or of the next one."""
        return self._count - len(self._events) + 1

    def append(self, event: run_pb2.RunEvent) -> None:
        """Number the event, keep it, and wake the watchers."""
        self._count += 1
        event.sequence = self._count
        event.time.GetCurrentTime()
        self._events.append(event)
        self._wake()
        self._published(event)

    def close(self) -> None:
        """End the log: no event follows, and watchers end."""
        self._closed = True
        self._wake()

    async def follow(self, after_sequence: int) -> AsyncIterator[run_pb2.RunEvent]:
        """Yield the events after a number, then live ones until the run has ended."""
        position = after_sequence
        while True:
            grown = self._grown
            for event in self._after(position):
                yield event
                position = event.sequence
            if self._closed:
                return
            await grown.wait()

    def _after(self, sequence: int) -> list[run_pb2.RunEvent]:
        missing = min(self._count - sequence, len(self._events))
        return list(itertools.islice(self._events, len(self._events) - missing, None)) if missing > 0 else []

    def _wake(self) -> None:
        grown, self._grown = self._grown, asyncio.Event()
        grown.set()


async def past_events(run: run_pb2.Run, after_sequence: int) -> AsyncIterator[run_pb2.RunEvent]:
    """Yield the events of an ended run after a number, up to its end."""
    events = _events(RunDirectory(Path(run.directory)), after_sequence)
    told = run_pb2.RUN_STATE_UNSPECIFIED
    sequence = after_sequence
    while batch := await asyncio.to_thread(lambda: list(islice(events, EVENTS_AT_ONCE))):
        for event in batch:
            yield event
            sequence = event.sequence
            if event.WhichOneof("event") == "run":
                told = event.run.state
    if told != run.state:
        yield run_pb2.RunEvent(sequence=sequence, run=run)


async def all_events(run: run_pb2.Run, log: EventLog, after_sequence: int) -> AsyncIterator[run_pb2.RunEvent]:
    """Yield the events of an active run: those from before its log began, then those of the log as they come."""
    first = log.first_kept
    if after_sequence + 1 < first:
        events = _events(RunDirectory(Path(run.directory)), after_sequence)
        while batch := await asyncio.to_thread(lambda: list(islice(events, EVENTS_AT_ONCE))):
            for event in batch:
                if event.sequence < first:
                    yield event
    async for event in log.follow(max(after_sequence, first - 1)):
        yield event


def _events(directory: RunDirectory, after_sequence: int) -> Iterator[run_pb2.RunEvent]:
    for line in directory.read_events():
        if int(line["sequence"]) > after_sequence:
            yield json_format.ParseDict(line, run_pb2.RunEvent())

"""The events of a run from its directory: of one that has ended, and what the feed of one that goes on has not.

Invariants: ended runs keep nothing in memory; the last event is always the end of the run, also where its file
lost some (a full disk, a killed coordinator).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from itertools import islice
from pathlib import Path

from google.protobuf import json_format

from flotilla.coordinator.v1 import run_pb2
from flotilla_coordinator.records.directory import RunDirectory
from flotilla_coordinator.runs.feed import RunFeed

EVENTS_AT_ONCE = 500


async def past_events(run: run_pb2.Run, after_sequence: int) -> AsyncIterator[run_pb2.RunEvent]:
    """What happened after a number, to the end."""
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


async def all_events(run: run_pb2.Run, feed: RunFeed, after_sequence: int) -> AsyncIterator[run_pb2.RunEvent]:
    """Of a run that goes on: what was told before its feed began, then what that holds and gets."""
    first = feed.first_kept
    if after_sequence + 1 < first:
        events = _events(RunDirectory(Path(run.directory)), after_sequence)
        while batch := await asyncio.to_thread(lambda: list(islice(events, EVENTS_AT_ONCE))):
            for event in batch:
                if event.sequence < first:
                    yield event
    async for event in feed.follow(max(after_sequence, first - 1)):
        yield event


def _events(directory: RunDirectory, after_sequence: int) -> Iterator[run_pb2.RunEvent]:
    for line in directory.read_events():
        if int(line["sequence"]) > after_sequence:
            yield json_format.ParseDict(line, run_pb2.RunEvent())

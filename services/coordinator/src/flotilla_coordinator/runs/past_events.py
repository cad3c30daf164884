"""The events of a run that has ended, from its directory.

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
from flotilla_coordinator.rundir import RunDirectory

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


def _events(directory: RunDirectory, after_sequence: int) -> Iterator[run_pb2.RunEvent]:
    for line in directory.read_events():
        if int(line["sequence"]) > after_sequence:
            yield json_format.ParseDict(line, run_pb2.RunEvent())

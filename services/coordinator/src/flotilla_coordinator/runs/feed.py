"""The events of one run: numbered, kept, and followed by any number of watchers.

Invariants: sequence numbers start at 1 and have no gaps; a watcher that reconnects with the last number it
saw misses nothing of the last MAX_EVENTS; a slow watcher never slows the loop. All events are in the run
directory, from which they are told once the run has ended (`past_events`): a feed lives as long as its run.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncIterator, Callable

from flotilla.coordinator.v1 import run_pb2

MAX_EVENTS = 20_000


class RunFeed:
    """Append-only events of one run."""

    def __init__(self, published: Callable[[run_pb2.RunEvent], None], *, after: int = 0) -> None:
        self._published = published
        self._events: deque[run_pb2.RunEvent] = deque(maxlen=MAX_EVENTS)
        self._count = after
        self._grown = asyncio.Event()
        self._closed = False

    @property
    def last_sequence(self) -> int:
        """The number of the newest event; 0 before the first."""
        return self._count

    @property
    def first_kept(self) -> int:
        """The number of the oldest event that is still here, or of the next one."""
        return self._count - len(self._events) + 1

    def append(self, event: run_pb2.RunEvent) -> None:
        """Number the event, keep it, wake the watchers."""
        self._count += 1
        event.sequence = self._count
        event.time.GetCurrentTime()
        self._events.append(event)
        self._wake()
        self._published(event)

    def close(self) -> None:
        """No event will follow; watchers end."""
        self._closed = True
        self._wake()

    async def follow(self, after_sequence: int) -> AsyncIterator[run_pb2.RunEvent]:
        """Events after a number, then live ones until the run has ended."""
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

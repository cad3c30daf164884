"""The activities of a process, which operators ask for when something takes long.

Invariant: an activity is listed exactly while its block runs, so an empty list means idle.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager

from flotilla.common.v1.operate_pb2 import Activity


class Activities:
    """The current activities of a service: what it does or waits for.

    Lists those of one process, oldest first.
    """

    def __init__(self) -> None:
        self._running: dict[int, Activity] = {}
        self._numbers = itertools.count()

    @contextmanager
    def doing(self, what: str, *, run_id: str = "") -> Iterator[Activity]:
        """List `what` while the block runs, which may go on changing the text."""
        number = next(self._numbers)
        activity = Activity(what=what, run_id=run_id)
        activity.since.FromNanoseconds(time.time_ns())
        self._running[number] = activity
        try:
            yield activity
        finally:
            del self._running[number]

    def current(self) -> list[Activity]:
        return list(self._running.values())

"""Waits where a disk is full: reports it, waits for room, and tries again.

Invariants: no write is skipped. A run that waits is PAUSED, with the disk as its reason, and continues by itself. A
request to end, or to try again, takes effect at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from flotilla_coordinator.runs.control import RunControl
from flotilla_coordinator.runs.status import RunStatus
from flotilla_core.errors import DiskFull

T = TypeVar("T")

TRY_AGAIN_S = 2.0
SHARE_OF_TIME = 10.0
"""A slow attempt is repeated so rarely that attempts take at most a tenth of the time."""


class DiskWaits:
    """Repeats the writes of one run other than to the ledger, which waits by itself."""

    def __init__(self, status: RunStatus, control: RunControl) -> None:
        self._status = status
        self._control = control

    async def until_taken(
        self,
        what: str,
        write: Callable[[], Awaitable[T]],
        *,
        full: DiskFull | None = None,
        may_fit: Callable[[], bool] = lambda: True,
    ) -> T:
        """Return the result of `write` once the disk has room; `full` is the error of an attempt that was made already.

        Raises: DiskFull: The run was told to end and the disk is still full.
        """
        took_s = 0.0
        try:
            while True:
                if full is not None:
                    self._status.wait_for_disk(what, full)
                    await self._pause(max(TRY_AGAIN_S, took_s * SHARE_OF_TIME))
                    if self._control.stop_requested:
                        raise full
                    if not may_fit():
                        continue
                started = time.monotonic()
                try:
                    return await write()
                except DiskFull as error:
                    full = error
                    took_s = time.monotonic() - started
        finally:
            self._status.disk_has_room(what)

    async def wait(self, full: DiskFull) -> None:
        """Wait for some time, where another process writes, or until the run is told to end."""
        self._status.wait_for_disk("service", full)
        try:
            await self._pause(TRY_AGAIN_S * SHARE_OF_TIME)
        finally:
            self._status.disk_has_room("service")

    async def _pause(self, longest_s: float) -> None:
        try:
            async with asyncio.timeout(longest_s):
                await self._control.changed()
        except TimeoutError:
            pass

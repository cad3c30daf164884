"""What a run does where a disk takes no more: it says so, waits for room, and tries again.

Invariants: nothing that was to be written is skipped; a run that waits shows PAUSED, with the disk as its reason, and
goes on by itself; one that is told to end, or to try again, hears of it at once.
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
"""What takes long to try is tried for a tenth of the time at most."""


class DiskWaits:
    """Those of one run, for what it writes beside the ledger: the ledger waits by itself."""

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
        """What `write` returns, once the disk takes it; `full` where that was tried already.

        Raises where the run is told to end and the disk is still full.
        """
        took_s = 0.0
        try:
            while True:
                if full is not None:
                    self._status.wait_for_disk(what, str(full))
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
        """A while, for what is not written by the run itself; until the run is told to end."""
        self._status.wait_for_disk("service", str(full))
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

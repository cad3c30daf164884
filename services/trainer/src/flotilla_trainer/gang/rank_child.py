"""A rank as a process: which one it is, whether it lives, how it ended.

Invariant: the nursery says how a rank ended; where it says nothing it died, and its ranks were killed with it.
"""

from __future__ import annotations

import asyncio
import os
import signal


class RankChild:
    """One forked rank; it leads a process group of its own."""

    def __init__(self, pid: int, tidings: asyncio.StreamReader, line_end: asyncio.StreamWriter) -> None:
        self.pid = pid
        self.returncode: int | None = None
        """None while it lives; minus the signal where one ended it."""
        self._tidings = tidings
        self._line_end = line_end

    async def wait(self) -> None:
        """Until it has ended; for one caller."""
        told = await self._tidings.readline()
        self.returncode = int(told) if told else -signal.SIGKILL
        self._line_end.close()

    def send_signal(self, signum: signal.Signals) -> None:
        """To the process alone; one that has ended raises ProcessLookupError."""
        if self.returncode is not None:
            raise ProcessLookupError(self.pid)
        os.kill(self.pid, signum)

    def kill(self) -> None:
        """End the process and everything that it started."""
        if self.returncode is None:
            try:
                os.killpg(self.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # it ended between the two lines

"""A rank as a process: which one it is, whether it lives, how it ended.

Invariant: the nursery says how a rank ended; where it says nothing it died, and its ranks were killed with it.
"""

from __future__ import annotations

import asyncio
import os
import signal

BORN, ENDED = "born", "ended"


class Tidings:
    """What is told about one rank, a word and a number a line."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def next(self) -> tuple[str, int]:
        """The next line; an empty word once nobody is there to tell more."""
        line = (await self._reader.readline()).split()
        return (line[0].decode(), int(line[1])) if len(line) == 2 else ("", 0)

    def close(self) -> None:
        """Hear no more."""
        self._writer.close()


class RankChild:
    """One forked rank; it leads a process group of its own."""

    def __init__(self, pid: int, tidings: Tidings) -> None:
        self.pid = pid
        self.returncode: int | None = None
        """None while it lives; minus the signal where one ended it."""
        self._tidings = tidings

    async def wait(self) -> None:
        """Until it has ended; for one caller."""
        word, status = await self._tidings.next()
        self.returncode = status if word == ENDED else -signal.SIGKILL
        self._tidings.close()

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

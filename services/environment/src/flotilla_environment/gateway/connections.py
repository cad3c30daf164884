"""Bounds the connections of a place at which the gateway listens.

Invariant: a connection beyond the number is closed before anything is read from it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Bounded:
    """Makes the protocols of connections, up to a number at the same time."""

    def __init__(self, made: Callable[[], asyncio.Protocol], most: int) -> None:
        self._made = made
        self._most = most
        self.open = 0

    def __call__(self) -> asyncio.Protocol:
        return _Counted(self)

    def enter(self) -> asyncio.Protocol | None:
        """Return what serves one connection more; None where there are as many as may be."""
        if self.open >= self._most:
            return None
        self.open += 1
        return self._made()


class _Counted(asyncio.Protocol):
    """One connection, whose end is known."""

    def __init__(self, all_of_them: Bounded) -> None:
        self._all = all_of_them
        self._serves: asyncio.Protocol | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._serves = self._all.enter()
        if self._serves is not None:
            self._serves.connection_made(transport)
        else:
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._serves is not None:
            self._all.open -= 1
            self._serves.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._serves is not None:
            self._serves.data_received(data)

    def eof_received(self) -> bool | None:
        return None if self._serves is None else self._serves.eof_received()

    def pause_writing(self) -> None:
        if self._serves is not None:
            self._serves.pause_writing()

    def resume_writing(self) -> None:
        if self._serves is not None:
            self._serves.resume_writing()

"""The order in which runs get the next free worker that they share.

Invariants: while items of several runs wait, a run that has more workers than another one that waits gets no further
one. Of equals, the one that was served longest ago is next. Items of one run keep their order, and a run that is alone
has all workers. Nothing is free while a run waits. Of free places an item takes the one that suits it best, and of
equals the one that was given back last: its caches are warm.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

PlaceT = TypeVar("PlaceT")


class FairShare(Generic[PlaceT]):
    """Hands places out to runs."""

    def __init__(self) -> None:
        self._free: list[PlaceT] = []
        self._working: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[PlaceT]]] = {}
        """The waiting items by run; the run that was served longest ago is first."""

    def add(self, place: PlaceT) -> None:
        """One place more, or one that is free again."""
        run_id = self._next()
        if run_id is None:
            self._free.append(place)
            return
        waiting = self._waiting.pop(run_id)
        self._working[run_id] += 1
        waiting.popleft().set_result(place)
        if waiting:
            self._waiting[run_id] = waiting

    @asynccontextmanager
    async def place(self, run_id: str, suits: Callable[[PlaceT], int] = lambda _: 0) -> AsyncIterator[PlaceT]:
        """One place for an item of a run, as long as the block lasts; waits for it.

        `suits` rates a free place for this item, where there is a choice.
        """
        place = await self._take(run_id, suits)
        try:
            yield place
        finally:
            self._give_back(run_id, place)

    async def _take(self, run_id: str, suits: Callable[[PlaceT], int]) -> PlaceT:
        if self._free:
            self._working[run_id] += 1
            return self._free.pop(max(reversed(range(len(self._free))), key=lambda at: suits(self._free[at])))
        promised: asyncio.Future[PlaceT] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(run_id, deque()).append(promised)
        try:
            return await promised
        except asyncio.CancelledError:
            if not promised.cancelled():  # it came in the moment in which the caller went away
                self._give_back(run_id, promised.result())
            raise

    def _give_back(self, run_id: str, place: PlaceT) -> None:
        self._working[run_id] -= 1
        if not self._working[run_id]:
            del self._working[run_id]
        self.add(place)

    def _next(self) -> str | None:
        for run_id, waiting in [*self._waiting.items()]:
            while waiting and waiting[0].done():  # its caller went away
                waiting.popleft()
            if not waiting:
                del self._waiting[run_id]
        return min(self._waiting, key=lambda run_id: self._working[run_id], default=None)

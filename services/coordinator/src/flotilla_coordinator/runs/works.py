"""Work that comes to its end when its caller goes away.

Invariant: what was begun is known until it has ended, so whoever closes can wait for it or give it up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Works:
    """What is under way."""

    def __init__(self, one_ended: Callable[[], object] = lambda: None) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._one_ended = one_ended

    def __bool__(self) -> bool:
        return bool(self._tasks)

    def begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Work in a task of its own; it ends with whoever waits for that task."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def whole(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of work that goes on when its caller goes away."""
        return await asyncio.shield(self.begin(work))

    async def settle(self) -> None:
        """Wait until nothing is under way."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def give_up(self) -> None:
        """End what is under way."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        self._one_ended()

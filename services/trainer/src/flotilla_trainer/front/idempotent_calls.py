"""Let requests that may be sent twice act once.

Invariants: while the work of a key runs, a repeat waits for it; once it succeeded, a repeat gets its result; work that
failed is forgotten, so that a repeat tries again. The work continues when its caller goes away.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class IdempotentCalls(Generic[T]):
    """Runs the work of each key once, and keeps the results of the last `kept` keys."""

    def __init__(self, kept: int) -> None:
        self._kept = kept
        self._tasks: OrderedDict[str, asyncio.Task[T]] = OrderedDict()

    async def run(self, key: str, work: Callable[[], Awaitable[T]]) -> T:
        """Run `work` once for this key and return its result; a repeat gets the same result."""
        task = self._tasks.get(key)
        if task is None:
            task = asyncio.ensure_future(_awaited(work))
            self._tasks[key] = task
            task.add_done_callback(lambda done: self._ended(key, done))
        try:
            return await asyncio.shield(task)
        finally:
            # A failed task holds its exception, whose traceback holds this frame; this cycle would keep the request.
            del task

    def get(self, key: str) -> asyncio.Task[T] | None:
        """Return the task of a key, done or not; None where there is none."""
        return self._tasks.get(key)

    def forget(self, key: str) -> None:
        """Let the next request with this key act again."""
        self._tasks.pop(key, None)

    def _ended(self, key: str, task: asyncio.Task[T]) -> None:
        failed = task.cancelled() or task.exception() is not None
        if failed and self._tasks.get(key) is task:
            del self._tasks[key]
        while len(self._tasks) > self._kept:
            oldest = next(iter(self._tasks))
            if not self._tasks[oldest].done():
                break
            del self._tasks[oldest]


async def _awaited(work: Callable[[], Awaitable[T]]) -> T:
    return await work()

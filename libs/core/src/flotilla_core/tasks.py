"""Asyncio tasks that belong together, and work that comes to its end although its caller goes away.

Invariants: of calls that only make sense together, one failure ends the others, and none of them is left behind; work
that was begun is known until it has ended, so that its owner can wait for it or cancel it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from typing import Any, TypeVar

from flotilla_core.errors import FlotillaError

T = TypeVar("T")
U = TypeVar("U")

SETTLE_S = 1.0


class BackgroundTasks:
    """Work that comes to its end although its caller goes away."""

    def __init__(self, one_ended: Callable[[], object] = lambda: None) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._one_ended = one_ended

    def __bool__(self) -> bool:
        return bool(self._tasks)

    def begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start work in a task of its own; cancelling a caller that awaits the task cancels the work."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def shielded(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of work that continues when its caller goes away."""
        return await asyncio.shield(self.begin(work))

    async def settle(self) -> None:
        """Wait until no work is under way."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def cancel_all(self) -> None:
        """Cancel the work that is under way."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        self._one_ended()


async def gather_or_cancel(calls: Iterable[Awaitable[T]]) -> list[T]:
    """Return all results in order; the first failure cancels the rest and is raised as it is."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def both(first: Awaitable[T], second: Awaitable[U]) -> tuple[T, U]:
    """Return both results; a failure of either cancels the other and is raised as it is."""
    one, other = asyncio.ensure_future(first), asyncio.ensure_future(second)
    try:
        return await asyncio.gather(one, other)
    finally:
        one.cancel()
        other.cancel()
        await asyncio.gather(one, other, return_exceptions=True)


async def all_settled(calls: Iterable[Awaitable[T]]) -> list[T]:
    """Return all results in order, for calls that must not be cut off; raise the first failure when all have ended."""
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]


async def gather_with_grace(
    calls: Mapping[str, Awaitable[Any]],
) -> tuple[dict[str, Any], dict[str, FlotillaError]]:
    """Run all calls; after the first failure the rest get a short time to report their own errors.

    Returns results and failures by name; a cancelled call is in neither. Anything but a FlotillaError
    propagates.
    """
    tasks = {name: asyncio.ensure_future(call) for name, call in calls.items()}
    try:
        _, pending = await asyncio.wait(tasks.values(), return_when=asyncio.FIRST_EXCEPTION)
        if pending:
            await asyncio.wait(pending, timeout=SETTLE_S)
    finally:
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
    results: dict[str, Any] = {}
    failures: dict[str, FlotillaError] = {}
    for name, task in tasks.items():
        if task.cancelled():
            continue
        error = task.exception()
        if error is None:
            results[name] = task.result()
        elif isinstance(error, FlotillaError):
            failures[name] = error
        else:
            raise error
    return results, failures


async def run_while(work: asyncio.Task[Any], beside: Coroutine[Any, Any, None]) -> None:
    """Run `beside` until it ends or `work` does; then it is cancelled and its clean-up awaited. Raises its error."""
    task = asyncio.ensure_future(beside)
    try:
        await asyncio.wait({task, work}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        task.cancel()
        await asyncio.wait({task})
    if not task.cancelled():
        task.result()

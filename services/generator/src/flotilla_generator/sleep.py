"""The sleep of this replica: its KV cache's memory is the trainer's, and nothing is generated.

Invariants: what runs ends before the memory is given back, and nothing begins from the call on until the replica is
awake; a call that is given up while it waits leaves it awake, and one that began to give the memory back is completed.
A replica that sleeps wakes by `wake`, and before it joins a weight group: a run that begins, or goes on under another
coordinator, joins one before it generates, so whoever put the replica to sleep need not live to wake it.

It waits instead of refusing, because a request whose caller has just cancelled it is still there for a moment.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import ExitStack
from typing import Any, TypeVar

from flotilla_core.errors import FailedPrecondition, StaleVersion, Unavailable
from flotilla_core.service import Activities
from flotilla_generator.engine.base import Engine
from flotilla_generator.weights import Phase, WeightSession

T = TypeVar("T")

QUIET = (Phase.IDLE, Phase.BROKEN)


class Sleep:
    """Whether the replica sleeps, and the only way to change that."""

    def __init__(
        self,
        engine: Engine,
        weights: WeightSession,
        activities: Activities,
        wait_idle: Callable[[], Awaitable[object]],
    ) -> None:
        """`wait_idle` returns when no request runs."""
        self._engine = engine
        self._weights = weights
        self._activities = activities
        self._wait_idle = wait_idle
        self._lock = asyncio.Lock()
        self._closed_for = ""
        """The run for which nothing begins: the replica sleeps, or is about to."""
        self._freed: int | None = None
        self._listed = ExitStack()
        """The activity of the sleep, for as long as it lasts."""

    @property
    def asleep(self) -> bool:
        """Return whether the memory is given back, or may be."""
        return self._freed is not None

    def require_awake(self) -> None:
        """Refuse what needs the engine while it sleeps."""
        if self._closed_for:
            raise Unavailable(
                "the replica sleeps while the trainer has its memory",
                why=f"run {self._closed_for} has put it to sleep (generator.sleep_while_training)",
                next_step="it wakes by the call Wake, and when it joins a weight group",
            )

    async def sleep(self, run_id: str) -> int:
        """Give the memory back once nothing runs, and return the bytes; again while it sleeps, return the same."""
        async with self._lock:
            self._require_of(run_id)
            if self._freed is not None:
                return self._freed
            self._closed_for = run_id
            try:
                await self._wait_idle()
            except asyncio.CancelledError:
                self._closed_for = ""
                raise
            return await _to_its_end(self._fall_asleep())

    async def wake(self) -> None:
        """Take the memory again; nothing where it is awake."""
        async with self._lock:
            if self.asleep:
                await _to_its_end(self._wake_up())

    async def _fall_asleep(self) -> int:
        # Before the engine is asked: of an error in between nobody knows how much it has given back.
        self._freed = 0
        self._listed.enter_context(
            self._activities.doing("asleep, while the trainer has its memory", run_id=self._closed_for)
        )
        self._freed = await self._engine.sleep()
        return self._freed

    async def _wake_up(self) -> None:
        await self._engine.wake()
        self._freed, self._closed_for = None, ""
        self._listed.close()

    def _require_of(self, run_id: str) -> None:
        if not self._engine.info.can_sleep:
            raise FailedPrecondition(
                "this replica keeps the memory of its KV cache",
                why="it was started without generator.sleep_while_training",
                next_step="set that in stack.yaml, then flotilla down and flotilla up",
            )
        weights = self._weights
        if weights.live is not None and weights.run_id != run_id:
            raise StaleVersion(
                f"this replica serves run {weights.run_id}, and not run {run_id}",
                next_step="bring it weights first",
            )
        if weights.phase not in QUIET:
            raise FailedPrecondition(
                "weights are on their way to this replica",
                why=f"the sync is {weights.phase.value}",
                next_step="commit or abort them first",
            )


async def _to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """Await `work`; where the caller goes away, the lock is held until the work has ended."""
    task = asyncio.ensure_future(work)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise

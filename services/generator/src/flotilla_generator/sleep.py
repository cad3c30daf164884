"""The sleep of this replica: its KV cache's memory is the trainer's, and nothing is generated.

Invariants: samples stand still while the replica sleeps, and continue when it wakes, which computes their KV again; the
run that put it to sleep may send further requests, which begin then, and all others are refused. A call that began to
give the memory back is completed, even if its caller has given up. A replica that sleeps wakes by `wake`, and before it
joins a weight group: a run that begins, or goes on under another coordinator, joins one before it generates, so whoever
put the replica to sleep need not live to wake it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
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

    def __init__(self, engine: Engine, weights: WeightSession, activities: Activities) -> None:
        self._engine = engine
        self._weights = weights
        self._activities = activities
        self._lock = asyncio.Lock()
        self._run_id = ""
        """The run whose trainer has the memory, or is about to have it."""
        self._freed: int | None = None
        self._listed = ExitStack()
        """The activity of the sleep, for as long as it lasts."""

    @property
    def asleep(self) -> bool:
        """Return whether the memory is given back, or may be."""
        return self._freed is not None

    def require_awake(self, *, unless: str = "") -> None:
        """Refuse what needs the engine while it sleeps; a request of the run `unless`, whose sleep it is, may wait."""
        if self._run_id and self._run_id != unless:
            raise Unavailable(
                "the replica sleeps while the trainer has its memory",
                why=f"run {self._run_id} has put it to sleep (generator.sleep_while_training)",
                next_step="it wakes by the call Wake, and when it joins a weight group",
            )

    async def sleep(self, run_id: str) -> int:
        """Give the memory back and return the bytes; again while it sleeps, return the same."""
        async with self._lock:
            self._require_of(run_id)
            if self._freed is not None:
                return self._freed
            self._run_id = run_id
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
            self._activities.doing("asleep, while the trainer has its memory", run_id=self._run_id)
        )
        self._freed = await self._engine.sleep()
        return self._freed

    async def _wake_up(self) -> None:
        await self._engine.wake()
        self._freed, self._run_id = None, ""
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

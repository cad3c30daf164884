"""Orders the calls of a client to one run, and decides how long they are accepted.

Invariants: calls that change the run exclude each other. The loss of the trainer ends the loop, because the client's
view of the policy would be wrong from then on. No call outlives the loop, and a call that its end interrupts gets the
reason.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, TypeVar

from flotilla_coordinator.runs.context import RunContext
from flotilla_core.errors import (
    Cancelled,
    DeadlineExceeded,
    FailedPrecondition,
    FlotillaError,
    RankFailed,
    Unavailable,
)
from flotilla_core.tasks import BackgroundTasks

T = TypeVar("T")

IDLE = "waiting for the client"
# A call may fail with these errors because the trainer's session is gone.
MAYBE_LOST = (Unavailable, RankFailed, DeadlineExceeded, FailedPrecondition)


class ClientCalls:
    """The calls that are under way, and whether further ones are accepted."""

    def __init__(self, run: RunContext, trainer_lost: Callable[[FlotillaError], None]) -> None:
        self._run = run
        self._trainer_lost = trainer_lost
        self._lock = asyncio.Lock()
        self._over = asyncio.Event()
        self._tasks = BackgroundTasks(self.heard)
        self._heard_at = time.monotonic()
        self.failure: FlotillaError | None = None
        """The error after which further calls are useless."""

    def begin(self) -> None:
        """Start to wait for calls of the client."""
        self.heard()
        self._run.status.enter(IDLE)

    def heard(self) -> None:
        """Note a sign of life of the client."""
        self._heard_at = time.monotonic()

    def end(self) -> None:
        """Take no further calls."""
        self._over.set()

    async def close(self) -> None:
        """Cancel the calls that are still under way."""
        self.end()
        await self._tasks.cancel_all()

    def check_open(self) -> None:
        """Refuse a call that comes too late."""
        if self._over.is_set():
            raise Cancelled(
                f"the loop of run {self._run.run_id} takes no further calls",
                why=str(self.failure or "it was closed or stopped"),
                next_step=f"see `flotilla run show {self._run.run_id}`",
            )

    async def silence(self, busy: Callable[[], bool]) -> str:
        """Wait for the end of the loop, or until the client was silent for too long; return that reason, or nothing.

        `busy` says whether work for the client is under way outside of these calls.
        """
        limit_s = self._run.config.loop_idle_timeout_s
        while not self._over.is_set():
            working = bool(self._tasks) or busy()
            left_s = limit_s if working else self._heard_at + limit_s - time.monotonic()
            if left_s <= 0:
                return f"no call of its client came for {limit_s:g} s (loop_idle_timeout_s)"
            with suppress(TimeoutError):
                await asyncio.wait_for(self._over.wait(), left_s)
        return ""

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Enter a block in which no call acts."""
        async with self._lock:
            yield

    @asynccontextmanager
    async def exclusive(self, phase: str) -> AsyncIterator[None]:
        """Enter a block in which this call acts alone, with a phase that watchers of the run see."""
        async with self._lock:
            self.check_open()
            try:
                with self._run.phase(phase):
                    yield
            except MAYBE_LOST as error:
                if await self._run.policy.lost():
                    self._trainer_lost(error)
                    self.failure = error
                    self.end()
                raise
            finally:
                self._run.status.enter(IDLE)

    async def shielded(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of work that continues when its caller goes away."""
        with self.told_when_over():
            return await self._tasks.shielded(work)

    async def while_open(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of work that ends with its caller, or with the loop."""
        with self.told_when_over():
            return await self._tasks.begin(work)

    @contextmanager
    def told_when_over(self) -> Iterator[None]:
        """Raise the reason in a caller whose work the end of the loop cancels."""
        try:
            yield
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if caller is not None and not caller.cancelling():
                self.check_open()
            raise

"""Says after each step how many generators the run needs, or has the launcher start and stop them.

Invariants: a fleet that several runs share is changed by none of them; one change at a time, its end followed by a
pause of `cooldown_steps`; steps with another number of generators are never taken into one decision, and the one in
which it changed into none; a change that fails is told and costs the run nothing.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping

from flotilla.coordinator.v1 import run_pb2
from flotilla_coordinator.autoscale.decision import Advice, Measured, advice
from flotilla_coordinator.autoscale.idle_shares import GENERATORS, TRAINER
from flotilla_core.config import AutoscaleConfig
from flotilla_core.errors import FlotillaError

Change = Callable[[int], Awaitable[None]]


class Autoscaler:
    """Watches one run."""

    def __init__(
        self,
        config: AutoscaleConfig,
        advise: Callable[[str], None],
        notice: Callable[[run_pb2.NoticeLevel.ValueType, str], None],
        generators: Callable[[], int],
        change: Change,
        may_act: Callable[[], bool],
    ) -> None:
        self._config = config
        self._advise = advise
        self._notice = notice
        self._generators = generators
        self._change = change
        self._may_act = may_act
        self._window: deque[Measured] = deque(maxlen=config.window_steps)
        self._measured_with = 0
        self._resting_steps = 0
        self._told = ""
        self._changing: asyncio.Task[None] | None = None

    def step_done(self, metrics: Mapping[str, float]) -> None:
        """One more step, with its metrics."""
        generators = self._generators()
        came_or_went = self._measured_with not in (0, generators)
        if generators != self._measured_with:
            self._window.clear()
            self._measured_with = generators
        if self._resting_steps > 0:
            self._resting_steps -= 1
            return
        if came_or_went:
            return
        if GENERATORS in metrics and (self._changing is None or self._changing.done()):
            self._window.append(Measured(metrics[TRAINER], metrics[GENERATORS]))
            self._follow(advice(self._window, generators, self._config), generators)

    async def close(self) -> None:
        """Wait for no change any more; what the launcher has begun it ends."""
        if self._changing is not None:
            self._changing.cancel()
            await asyncio.wait({self._changing})

    def _follow(self, found: Advice | None, generators: int) -> None:
        text = "" if found is None else f"{generators} -> {found.generators} generators: {found.why}"
        self._advise(text)
        if found is None:
            self._told = ""
        elif self._config.mode == "act" and self._may_act():
            self._changing = asyncio.create_task(
                self._act(found.generators - generators, text), name="autoscale"
            )
        elif self._told != (direction := text.partition(":")[0]):
            self._told = direction
            self._notice(run_pb2.NOTICE_LEVEL_INFO, f"advice: {text}")

    async def _act(self, by: int, text: str) -> None:
        self._notice(run_pb2.NOTICE_LEVEL_INFO, f"autoscale: {text}")
        try:
            await self._change(by)
        except FlotillaError as error:
            self._notice(run_pb2.NOTICE_LEVEL_WARNING, f"autoscale: the change failed: {error}")
        finally:
            self._window.clear()
            self._resting_steps = self._config.cooldown_steps
            self._advise("")

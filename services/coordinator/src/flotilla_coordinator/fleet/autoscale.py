"""Says after each step how many generators the run needs, or has the launcher start and stop them.

Invariants: a fleet that several runs share is never scaled. One change is made at a time, and its end is followed by a
pause of `cooldown_steps`. Steps with different numbers of generators never share a decision, and the step in which the
number changed counts for none. A change that fails is reported, and the run continues. A decision depends on the
measurements and the configuration alone; between the two limits nothing changes, so that a change does not cause its
opposite. The trainer is idle while the loop waits for rollouts, a generator while it has no sample of this run. A
replica that joined within a step is measured from the next step on.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from flotilla.common.v1.finding_pb2 import SEVERITY_WARNING, Finding
from flotilla_core.config import AutoscaleConfig
from flotilla_core.errors import FlotillaError
from flotilla_core.findings import info
from flotilla_core.rpc import Replica

Change = Callable[[int], Awaitable[None]]

TRAINER, GENERATORS = "idle/trainer", "idle/generators"


class IdleShares:
    """The shares of a step in which the trainer and the generators are idle, measured one step after the other."""

    def __init__(self, replicas: Callable[[], list[Replica[Any]]]) -> None:
        self._replicas = replicas
        self._began = 0.0
        self._busy_s: dict[str, float] = {}

    def begin(self) -> None:
        """Start to measure a step."""
        self._began = time.monotonic()
        self._busy_s = {replica.instance_id: replica.busy_s for replica in self._replicas()}

    def metrics(self, waited_s: float) -> dict[str, float]:
        """Return the shares of the step so far, in which the loop waited `waited_s` for rollouts."""
        seconds = max(time.monotonic() - self._began, 1e-9)
        shares = {TRAINER: min(1.0, waited_s / seconds)}
        busy = [
            (replica.busy_s - self._busy_s[replica.instance_id]) / seconds
            for replica in self._replicas()
            if replica.instance_id in self._busy_s
        ]
        if busy:
            shares[GENERATORS] = max(0.0, 1.0 - sum(busy) / len(busy))
        return shares


class Autoscaler:
    """Scales the generators of one run, or advises how many it needs."""

    def __init__(
        self,
        config: AutoscaleConfig,
        *,
        advise: Callable[[str], None],
        notice: Callable[[Finding], None],
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
        """Take in the metrics of one more step."""
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
        """Stop waiting for a change; the launcher completes what it has begun."""
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
            self._notice(info(f"advice: {text}"))

    async def _act(self, by: int, text: str) -> None:
        self._notice(info(f"autoscale: {text}"))
        try:
            await self._change(by)
        except FlotillaError as error:
            self._notice(error.finding("autoscale: the change failed", SEVERITY_WARNING))
        finally:
            self._window.clear()
            self._resting_steps = self._config.cooldown_steps
            self._advise("")


@dataclass(frozen=True)
class Measured:
    """The idle shares of one step."""

    trainer: float
    generators: float


@dataclass(frozen=True)
class Advice:
    """A number of generators, and the reason for it."""

    generators: int
    why: str


def advice(window: Sequence[Measured], generators: int, config: AutoscaleConfig) -> Advice | None:
    """Return the change that these steps call for, or None; all of them had this many generators."""
    if len(window) < config.window_steps:
        return None
    trainer, idle = fmean(step.trainer for step in window), fmean(step.generators for step in window)
    why = f"in the last {len(window)} steps the trainer waited for rollouts {trainer:.0%} of the time"
    if trainer > config.trainer_waits_above and generators < config.max_generators:
        return Advice(generators + 1, why)
    enough = trainer < config.trainer_waits_above / 2 and idle > config.generators_idle_above
    if enough and generators > config.min_generators:
        return Advice(generators - 1, f"{why}, and the generators were idle {idle:.0%}")
    return None

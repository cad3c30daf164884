"""A run that this coordinator has started, from admission to after its end."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from flotilla_coordinator.runs.client_loop import ClientLoop
from flotilla_coordinator.runs.context import RunContext
from flotilla_coordinator.runs.feed import RunFeed
from flotilla_coordinator.runs.status import RunStatus
from flotilla_core.config import RunConfig


@dataclass
class ActiveRun:
    """Handles of one run: what a servicer may touch."""

    run_id: str
    config: RunConfig
    config_yaml: str
    status: RunStatus
    feed: RunFeed
    context: RunContext | None = None
    task: asyncio.Task[None] | None = None
    client: ClientLoop | None = None
    """Of a run whose steps a client makes; it takes calls once `opened` is set."""
    opened: asyncio.Event = field(default_factory=asyncio.Event)
    stop_requested: bool = False
    stop_reason: str = ""
    ending: bool = False
    """From here on the run is closed and recorded, which nothing cuts short."""

    def request_stop(self, reason: str) -> None:
        """End after the current step; before the first step, at once."""
        self.stop_requested = True
        self.stop_reason = reason or "stopped by request"
        if self.context is not None:
            self.context.stop_requested = True
            if self.client is not None:
                self.client.end()
        else:
            self.cancel()

    def cancel(self) -> None:
        """End now; a run that is ending already ends by itself."""
        if self.task is not None and not self.ending:
            self.task.cancel()

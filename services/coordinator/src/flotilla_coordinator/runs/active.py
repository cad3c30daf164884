"""A run that this coordinator has started, from admission to after its end."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from flotilla_coordinator.runs.client.loop import ClientLoop
from flotilla_coordinator.runs.context import RunContext
from flotilla_coordinator.runs.control import RunControl
from flotilla_coordinator.runs.events import EventLog
from flotilla_coordinator.runs.status import RunStatus
from flotilla_core.config import RunConfig
from flotilla_core.errors import DiskFull

LEDGER = "ledger"


@dataclass
class RunHandle:
    """Handles of one run: what a servicer may touch."""

    run_id: str
    control: RunControl
    status: RunStatus
    events: EventLog
    context: RunContext | None = None
    task: asyncio.Task[None] | None = None
    client: ClientLoop | None = None
    """Of a run whose steps a client makes; it takes calls once `opened` is set."""
    opened: asyncio.Event = field(default_factory=asyncio.Event)
    stop_reason: str = ""
    ending: bool = False
    """From here on the run is closed and recorded, which nothing cuts short."""
    abandoned: bool = False
    """The coordinator goes: the record of the end waits no longer for room on the disk."""

    @property
    def config(self) -> RunConfig:
        """As it is wanted now."""
        return self.control.config

    def ledger_full(self, full: DiskFull | None) -> None:
        """The disk of the ledger takes no more, or (None) does again; a run that is told to end waits for neither."""
        if full is None:
            self.status.disk_has_room(LEDGER)
            return
        self.status.wait_for_disk(LEDGER, str(full))
        if self.status.ended:
            self.events.close()  # its end is told, and only its record waits
        elif self.control.stop_requested:
            self.cancel()

    def request_stop(self, reason: str) -> None:
        """End after the current step; before the first step, and where a full disk holds it up, at once."""
        self.stop_reason = reason or "stopped by request"
        waits = self.status.waits_for_disk
        self.control.stop()
        if self.context is None or waits:
            self.cancel()
        elif self.client is not None:
            self.client.calls.end()

    def cancel(self) -> None:
        """End now; a run that is ending already ends by itself."""
        if self.task is not None and not self.ending:
            self.task.cancel()

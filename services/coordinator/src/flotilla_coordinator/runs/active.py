"""A run that this coordinator has started, from its admission until its end is recorded."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from flotilla.common.v1.finding_pb2 import Finding
from flotilla_coordinator.runs.client.loop import ClientLoop
from flotilla_coordinator.runs.context import RunContext
from flotilla_coordinator.runs.control import RunControl
from flotilla_coordinator.runs.events import EventLog
from flotilla_coordinator.runs.status import RunStatus
from flotilla_core.config import RunConfig
from flotilla_core.errors import DiskFull
from flotilla_core.findings import info

LEDGER = "ledger"


@dataclass
class RunHandle:
    """The handles of one run, which a servicer may use."""

    run_id: str
    control: RunControl
    status: RunStatus
    events: EventLog
    context: RunContext | None = None
    task: asyncio.Task[None] | None = None
    client: ClientLoop | None = None
    """The loop of a run whose steps a client makes; it takes calls once `opened` is set."""
    opened: asyncio.Event = field(default_factory=asyncio.Event)
    stop_reason: Finding = field(default_factory=lambda: info("the coordinator was stopped"))
    """The reason of an early end that is no failure; a user who stops the run gives another one."""
    ending: bool = False
    """True once the run is being closed and recorded, which nothing interrupts."""
    abandoned: bool = False
    """True once the coordinator stops: the record of the end no longer waits for room on the disk."""
    left: bool = False
    """True once the coordinator stops and leaves the run, as it stands, to the next one."""

    @property
    def config(self) -> RunConfig:
        """Return the configuration with all accepted changes."""
        return self.control.config

    def ledger_full(self, full: DiskFull | None) -> None:
        """Note that the ledger's disk is full, or (None) has room again; a run that was told to end does not wait."""
        if full is None:
            self.status.disk_has_room(LEDGER)
            return
        self.status.wait_for_disk(LEDGER, full)
        if self.status.ended:
            self.events.close()  # watchers have its end, and only its record waits
        elif self.control.stop_requested:
            self.cancel()

    def request_stop(self, reason: str) -> None:
        """End after the current step; before the first step, and where a full disk delays the run, at once."""
        self.stop_reason = info(reason or "stopped by request")
        waits = self.status.waits_for_disk
        self.control.stop()
        if self.context is None or waits:
            self.cancel()
        elif self.client is not None:
            self.client.calls.end()

    def cancel(self) -> None:
        """End now; a run that is already ending completes that."""
        if self.task is not None and not self.ending:
            self.task.cancel()

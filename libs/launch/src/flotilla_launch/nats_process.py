"""The stack's own NATS server, restarted at the same address when it dies.

Invariant: the URL never changes while the stack lives, because every service was started with it.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import structlog

from flotilla.launcher.v1.launcher_pb2 import ProcessState, ProcessStatus
from flotilla_core.bus import NatsServer
from flotilla_core.errors import FlotillaError
from flotilla_launch.state import ProcessIdentity
from flotilla_launch.sweep import ProcessRecord

log = structlog.get_logger()

NAME = "nats"
_RESTART_DELAY_S = 0.5


class NatsProcess:
    """Keeps one `nats-server` alive."""

    def __init__(self, directory: Path, *, restart_budget: int, on_change: Callable[[], None]) -> None:
        self._directory = directory
        self._budget = restart_budget
        self._on_change = on_change
        self._server: NatsServer | None = None
        self._task: asyncio.Task[None] | None = None
        self._status = ProcessStatus(name=NAME, state=ProcessState.PROCESS_STATE_STARTING)
        self._status.since.GetCurrentTime()
        self._mark = secrets.token_hex(8)

    async def start(self) -> str:
        """The URL that holds for the life of the stack."""
        self._server = await NatsServer.start(self._directory)
        self._status.address = urlsplit(self._server.url).netloc
        self._status.log_path = str(self._server.log)
        self._became(ProcessState.PROCESS_STATE_READY)
        self._task = asyncio.create_task(self._keep(), name="supervise nats")
        return self._server.url

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        if self._server is not None:
            await self._server.stop()
        self._became(ProcessState.PROCESS_STATE_STOPPED)

    def status(self) -> ProcessStatus:
        copy = ProcessStatus()
        copy.CopyFrom(self._status)
        return copy

    def record(self) -> ProcessRecord | None:
        if self._server is None or not self._server.running:
            return None
        identity = ProcessIdentity.of(self._server.pid)
        return ProcessRecord(NAME, identity, self._mark) if identity else None

    async def _keep(self) -> None:
        deaths: list[float] = []
        port = int(self._status.address.rpartition(":")[2])
        while True:
            assert self._server is not None
            code = await self._server.wait()
            why = f"nats-server ended with status {code}"
            while True:
                now = time.monotonic()
                deaths = [death for death in deaths if now - death < 600]
                if len(deaths) >= self._budget:
                    self._became(ProcessState.PROCESS_STATE_FAILED, why)
                    return
                deaths.append(now)
                self._status.restarts += 1
                self._became(ProcessState.PROCESS_STATE_RESTARTING, why)
                log.warning("restarting", process=NAME, why=why)
                await asyncio.sleep(_RESTART_DELAY_S)
                try:
                    self._server = await NatsServer.start(self._directory, port)
                except FlotillaError as error:
                    why = str(error)
                    continue
                self._became(ProcessState.PROCESS_STATE_READY)
                break

    def _became(self, state: ProcessState.ValueType, error: str = "") -> None:
        running = self._server is not None and self._server.running
        self._status.pid = self._server.pid if self._server is not None and running else 0
        self._status.state = state
        self._status.error = error
        self._status.since.GetCurrentTime()
        self._on_change()

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
from flotilla_core.disk import lacks_room
from flotilla_core.errors import FlotillaError
from flotilla_launch.placement import reserve_port
from flotilla_launch.state import ProcessIdentity
from flotilla_launch.sweep import ProcessRecord

log = structlog.get_logger()

NAME = "nats"
_HOST = "127.0.0.1"
_RESTART_DELAY_S = 0.5
_LOOK_FOR_ROOM_EVERY_S = 1.0


class NatsProcess:
    """Keeps one `nats-server` alive."""

    def __init__(self, directory: Path, *, restart_budget: int, on_change: Callable[[], None]) -> None:
        self._directory = directory
        self._budget = restart_budget
        self._on_change = on_change
        # Of those that the kernel gives to nobody else: a server that was away finds it free.
        self._port = reserve_port(_HOST)
        self._server: NatsServer | None = None
        self._task: asyncio.Task[None] | None = None
        self._status = ProcessStatus(name=NAME, state=ProcessState.PROCESS_STATE_STARTING)
        self._status.since.GetCurrentTime()
        self._mark = secrets.token_hex(8)

    async def start(self) -> str:
        """The URL that holds for the life of the stack."""
        server = await self._boot()
        self._task = asyncio.create_task(self._keep(server), name="supervise nats")
        return server.url

    async def start_again(self) -> bool:
        """Whether it had FAILED; then it is up again, at the same address and with its whole budget."""
        if self._status.state != ProcessState.PROCESS_STATE_FAILED:
            return False
        self._status.restarts = 0
        try:
            await self.start()
        except (FlotillaError, OSError) as error:
            self._became(ProcessState.PROCESS_STATE_FAILED, str(error))
            raise
        return True

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

    async def _boot(self) -> NatsServer:
        """Start the server; none is left when not even its record can be written."""
        server = self._server = await NatsServer.start(self._directory, self._port)
        self._status.address = urlsplit(server.url).netloc
        self._status.log_path = str(server.log)
        try:
            self._became(ProcessState.PROCESS_STATE_READY)
        except OSError:
            await server.stop()
            raise
        return server

    async def _keep(self, server: NatsServer) -> None:
        deaths: list[float] = []
        while True:
            why = f"nats-server ended with status {await server.wait()}"
            while True:
                now = time.monotonic()
                deaths = [death for death in deaths if now - death < 600]
                if len(deaths) >= self._budget:
                    log.error("failed", process=NAME, why=why)
                    self._became(ProcessState.PROCESS_STATE_FAILED, why)
                    return
                deaths.append(now)
                self._status.restarts += 1
                log.warning("restarting", process=NAME, why=why)
                try:
                    self._became(ProcessState.PROCESS_STATE_RESTARTING, why)
                    await asyncio.sleep(_RESTART_DELAY_S)
                    while lacks_room(self._directory):  # noqa: ASYNC110 - a disk tells nobody
                        await asyncio.sleep(_LOOK_FOR_ROOM_EVERY_S)
                    server = await self._boot()
                # Nobody awaits this task: what the system refuses (a full disk) is one failed attempt as well.
                except (FlotillaError, OSError) as error:
                    why = str(error)
                    continue
                break

    def _became(self, state: ProcessState.ValueType, error: str = "") -> None:
        running = self._server is not None and self._server.running
        self._status.pid = self._server.pid if self._server is not None and running else 0
        self._status.state = state
        self._status.error = error
        self._status.since.GetCurrentTime()
        self._on_change()

"""The stack's own NATS server, restarted at the same address when it dies.

Invariants: the URL never changes while the stack lives, because every service was started with it; the server outlives
the launcher that started it, and the next launcher continues with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from google.protobuf.json_format import MessageToDict, ParseDict

from flotilla.launcher.v1.launcher_pb2 import ProcessState, ProcessStatus
from flotilla_core.addresses import loopback
from flotilla_core.bus import NatsServer
from flotilla_core.disk import lacks_room
from flotilla_core.errors import FlotillaError
from flotilla_core.logger import get_logger
from flotilla_core.process_identity import ProcessIdentity
from flotilla_core.trust import Credential, Pem
from flotilla_launch.child import RestartBudget, new_mark
from flotilla_launch.placement import reserve_port
from flotilla_launch.process_tree import MARK, end_tree
from flotilla_launch.records import ProcessRecord

log = get_logger()

NAME = "nats"
_RESTART_DELAY_S = 0.5
_LOOK_FOR_ROOM_EVERY_S = 1.0
_LOOK_FOR_CREDENTIAL_EVERY_S = 5.0


class NatsProcess:
    """Keeps one `nats-server` alive."""

    def __init__(
        self,
        directory: Path,
        *,
        credential: Credential,
        wrapper: Sequence[str],
        restart_budget: int,
        on_change: Callable[[], None],
        host: str = "",
        dialled: str = "",
        port: int = 0,
    ) -> None:
        """`port` is that of a server before it whose clients come back; 0 takes a free one.

        Without a `host` it is for this host alone.
        """
        self._host = host or loopback()
        self._dialled = dialled or self._host
        self._directory = directory
        self._wrapper = wrapper
        self._budget = RestartBudget(restart_budget)
        self._on_change = on_change
        self._port = port
        self._credential = credential
        self._told: Pem | None = None
        """The credential that the server has; None where a launcher before this one told it."""
        self._server: NatsServer | None = None
        self._identity: ProcessIdentity | None = None
        self._mark = ""
        self._task: asyncio.Task[None] | None = None
        self._status = ProcessStatus(name=NAME, state=ProcessState.PROCESS_STATE_STARTING)
        self._status.since.GetCurrentTime()

    async def start(self) -> str:
        """Return the URL that holds for the life of the stack."""
        if not self._port:
            # Of those that the kernel gives to no other process: a server that was away finds it free.
            self._port = reserve_port(self._host)
        server = await self._boot()
        self._keep(server)
        return server.url

    def take_over(self, record: ProcessRecord, url: str) -> None:
        """Go on where the launcher before this one stood: with its server where that lives, else with another one."""
        self._status = ParseDict(record.status, ProcessStatus())
        self._budget.refill(record.deaths)
        self._port = urlsplit(url).port or 0
        self._mark, self._identity = record.mark, record.identity
        ready = self._status.state == ProcessState.PROCESS_STATE_READY
        # One that was being started is ended: no client has its password yet.
        if record.identity is not None and ready:
            # Opened first, looked at then: from there on the id stands for this process.
            with contextlib.suppress(ProcessLookupError):
                server = NatsServer.adopt(self._directory, record.identity.pid, url, self._credential)
                self._server = server if record.alive else None
        if self._status.state != ProcessState.PROCESS_STATE_FAILED:
            self._keep(self._server)

    async def start_again(self) -> bool:
        """Return whether it had FAILED; then it is up again, at the same address and with its whole budget."""
        if self._status.state != ProcessState.PROCESS_STATE_FAILED:
            return False
        self._status.restarts = 0
        self._budget.refill()
        try:
            await self.start()
        except (FlotillaError, OSError) as error:
            await self._bury()
            self._became(ProcessState.PROCESS_STATE_FAILED, str(error))
            raise
        return True

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        if self._server is not None:
            await self._server.stop()
        await self._bury()
        self._became(ProcessState.PROCESS_STATE_STOPPED)

    def status(self) -> ProcessStatus:
        copy = ProcessStatus()
        copy.CopyFrom(self._status)
        return copy

    def record(self) -> ProcessRecord:
        """Return the record that the next launcher needs of it."""
        return ProcessRecord(
            NAME,
            self._identity,
            self._mark,
            deaths=self._budget.spent,
            status=MessageToDict(self._status),
        )

    async def _boot(self) -> NatsServer:
        """Start the server; none is left when not even its record can be written."""
        self._mark = new_mark(self._directory)
        # Written down before it begins: the next launcher finds it by its mark.
        self._on_change()
        self._told = self._credential.current()
        server = self._server = await NatsServer.start(
            self._directory,
            self._port,
            host=self._host,
            dialled=self._dialled,
            wrapper=self._wrapper,
            environment={**os.environ, MARK: self._mark},
            credential=self._credential,
        )
        self._identity = ProcessIdentity.of(server.pid)
        self._status.address = urlsplit(server.url).netloc
        self._status.log_path = str(server.log)
        try:
            self._became(ProcessState.PROCESS_STATE_READY)
        except OSError:
            await server.stop()
            raise
        return server

    async def _bury(self) -> None:
        """End what is left of the server that died, its watcher as well."""
        if self._mark:
            await asyncio.to_thread(end_tree, self._identity, self._mark)
        self._server, self._identity, self._mark = None, None, ""

    def _keep(self, server: NatsServer | None) -> None:
        self._task = asyncio.create_task(self._kept_up(server), name="supervise nats")

    async def _kept_up(self, server: NatsServer | None) -> None:
        """Restart the server whenever it dies, until the budget is spent; None where it has already."""
        why = "nats-server ended while no launcher was there"
        while True:
            if server is not None:
                why = f"nats-server ended with status {await self._ended(server)}"
                server = None
            await self._bury()
            if self._budget.spend() is None:
                log.error("failed", process=NAME, why=why)
                self._became(ProcessState.PROCESS_STATE_FAILED, why)
                return
            self._status.restarts += 1
            log.warning("restarting", process=NAME, why=why)
            try:
                self._became(ProcessState.PROCESS_STATE_RESTARTING, why)
                await asyncio.sleep(_RESTART_DELAY_S)
                while lacks_room(self._directory):  # noqa: ASYNC110 - a disk sends no notice
                    await asyncio.sleep(_LOOK_FOR_ROOM_EVERY_S)
                server = await self._boot()
            # This task is not awaited: what the system refuses (a full disk) is one failed attempt as well.
            except (FlotillaError, OSError) as error:
                why = str(error)

    async def _ended(self, server: NatsServer) -> int:
        """Wait until the server has ended, and have it take a credential that was replaced meanwhile."""
        waiting = asyncio.ensure_future(server.wait())
        try:
            while not (await asyncio.wait({waiting}, timeout=_LOOK_FOR_CREDENTIAL_EVERY_S))[0]:
                if (newest := self._credential.current()) is not self._told:
                    try:
                        server.read_again()
                    except OSError as error:  # A full disk: it is told at the next look.
                        log.warning("nats-server keeps the credential that it has", why=str(error))
                    else:
                        self._told = newest
                        log.info("nats-server takes the credential as it is now")
            return waiting.result()
        finally:
            waiting.cancel()

    def _became(self, state: ProcessState.ValueType, error: str = "") -> None:
        running = self._server is not None and self._server.running
        self._status.pid = self._server.pid if self._server is not None and running else 0
        self._status.state = state
        self._status.error = error
        self._status.since.GetCurrentTime()
        self._on_change()

"""The agent of one node: starts the rows of the table that belong there, keeps them up, ends them in order.

An engine runs it: as a process in a component of a Slurm job, or in an actor of Ray.
Invariants: it starts what the table says and nothing else; nothing starts before the agent of the head has written the
addresses of this placement; a service that dies is started again within its budget, and an agent whose services are all
given up ends; whatever ends the agent ends its services, because they die with the process that started them. An agent
that takes the place of one that was killed gives NATS and the coordinator the same addresses on the same host;
otherwise the agents of other nodes start their services anew with the new addresses.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
import time
from collections.abc import Coroutine
from dataclasses import asdict
from pathlib import Path
from urllib.parse import urlsplit

from google.protobuf.json_format import MessageToDict

from flotilla.common.v1.registration_pb2 import ServiceKind
from flotilla.launcher.v1.launcher_pb2 import ProcessState
from flotilla_core.addresses import dialable, joined
from flotilla_core.bus import Bus, Login
from flotilla_core.config import StackConfig
from flotilla_core.errors import DeadlineExceeded, FailedPrecondition, FlotillaError, Unavailable
from flotilla_core.files import make_private_folder
from flotilla_core.kinds import END_STAGES, SCALABLE, kind_of
from flotilla_core.log_files import keep_bounded
from flotilla_core.logger import get_logger
from flotilla_core.logs import configure_logs, tolerate_lost_lines
from flotilla_core.trust import Credential
from flotilla_launch.nats_process import NatsProcess
from flotilla_launch.paths import StackPaths
from flotilla_launch.placement import reserve_port
from flotilla_launch.service_process import ServiceProcess
from flotilla_launch.state import PlacedFile, read_json, write_json
from flotilla_launch.table import NATS, Endpoints, Nodes, Row, table_of

log = get_logger()

_LOOK_EVERY_S = 1.0
_DEAD = (ProcessState.PROCESS_STATE_FAILED, ProcessState.PROCESS_STATE_STOPPED)


def read_endpoints(paths: StackPaths, mark: str) -> Endpoints | None:
    """Return the addresses of a placement; None before they are known."""
    values = read_json(paths.endpoints_file) or {}
    return Endpoints(values["nats_url"], values["otlp"]) if values.get("mark") == mark else None


class Agent:
    """Owns the processes of one node."""

    def __init__(
        self,
        stack: StackConfig,
        paths: StackPaths,
        nodes: Nodes,
        node: str,
        mark: str,
        executables: Path,
        *,
        place: str = "",
    ) -> None:
        """`place` is what the engine calls the machine, where it may move the node to another one."""
        self._stack = stack
        self._paths = paths
        self._nodes = nodes
        self._node = node
        self._mark = mark
        self._executables = executables
        self._place = place
        self._rows: list[Row] = []
        self._rows = self.wanted()
        self._credential = Credential.of_stack(stack.bind, paths.directory)
        self._services: dict[str, ServiceProcess] = {}
        self._nats: NatsProcess | None = None
        self._endpoints = Endpoints("", "")
        self._ending = asyncio.Event()
        self._told = False

    def end(self) -> None:
        """End because of a signal: Slurm sends it to every process of the step, so the services have it, too."""
        self._told = True
        self._ending.set()

    async def run(self) -> int:
        """Return 0 after an ordered end, 1 when nothing is left to keep up."""
        if not self._rows:
            raise FailedPrecondition(
                f"no service of this placement is on node {self._node!r}",
                where=str(self._paths.placed_file),
                next_step="see the nodes: flotilla up --plan",
            )
        log.info("tending", node=self._node, host=socket.gethostname(), services=[r.name for r in self._rows])
        try:
            if await self._until_ended(self._start()):
                return 0
            return 0 if await self._kept_up() else 1
        finally:
            await self._stop()

    @property
    def _is_head(self) -> bool:
        return any(row.slot.kind == ServiceKind.SERVICE_KIND_COORDINATOR for row in self._rows)

    def wanted(self) -> list[Row]:
        """Return the rows of this node; none where the node or the whole placement is over.

        A shared file system may fail for a moment, which ends nothing.
        """
        try:
            placed = PlacedFile.read(self._paths.placed_file)
        except Unavailable as error:
            if not self._rows:
                raise
            log.warning("what is wanted here is not known, and stays as it was", error=str(error))
            return self._rows
        if placed is None or placed.mark != self._mark or self._node in placed.ended:
            return []
        stack = placed.scaled(self._stack)
        table = table_of(stack, self._nodes, directory=self._paths.directory, executables=self._executables)
        self._rows = [row for row in table if row.node == self._node]
        return self._rows

    async def _until_ended(self, work: Coroutine[None, None, None]) -> bool:
        """Do the work; return whether the agent was told to end meanwhile."""
        working = asyncio.create_task(work)
        ending = asyncio.create_task(self._ending.wait())
        try:
            await asyncio.wait({working, ending}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            # Also when cancelled: nothing begins a process after all were stopped.
            is_cut_short = working.cancel()
            ending.cancel()
            await asyncio.wait({working})
        if not is_cut_short:
            working.result()
        return is_cut_short or self._ending.is_set()

    async def _start(self) -> None:
        """Begin every row; the status of each says how it goes."""
        self._record()
        self._endpoints = await (self._open() if self._is_head else self._endpoints_told())
        for row in self._rows:
            if row.name != NATS:
                self._begin(row)

    def _begin(self, row: Row) -> None:
        service = self._services[row.name] = ServiceProcess(
            row.slot,
            command=row.command_at(self._endpoints),
            wrapper=[],  # Dies with us, and we with our step.
            variables=row.environment,
            log_path=self._paths.log_file(row.name),
            announce_file=self._paths.announce_file(row.name),
            ready_timeout_s=self._stack.ready_timeout_s,
            restart_budget=self._stack.restart_budget,
            credential=self._credential,
            on_change=self._record,
        )
        service.start()

    async def _open(self) -> Endpoints:
        """Start NATS and choose the coordinator's port, or take those of the agent before us; tell all others."""
        host = self._stack.bind.host
        dialled = dialable(host)
        before = read_endpoints(self._paths, self._mark)
        here = f"https://{joined(dialled, 0)}".removesuffix("0")
        if before is not None and before.otlp.rstrip("0123456789") != here:
            before = None  # That agent was on another host.
        nats_url = self._stack.nats.url or ""
        if nats_url:
            login = Login.of_stack(self._stack.nats, self._paths.directory, self._credential)
            bus = await Bus.connect(nats_url, login)
            await bus.close()
        else:
            self._nats = NatsProcess(
                self._paths.nats,
                wrapper=[],
                restart_budget=self._stack.restart_budget,
                on_change=self._record,
                host=host,
                dialled=dialled,
                port=self._port_of_nats(host, before),
                credential=self._credential,
            )
            nats_url = await self._nats.start()
        otlp = (
            before.otlp
            if before
            else f"{here}{self._stack.bind.port or reserve_port(host, self._stack.bind.ports)}"
        )
        endpoints = Endpoints(nats_url, otlp)
        write_json(self._paths.endpoints_file, {"mark": self._mark, **asdict(endpoints)})
        return endpoints

    def _port_of_nats(self, host: str, before: Endpoints | None) -> int:
        """Return the port that NATS had, or one of `bind.ports`; 0 stands for any free one."""
        if before is not None:
            return urlsplit(before.nats_url).port or 0
        ports = self._stack.bind.ports
        return reserve_port(host, ports) if ports is not None else 0

    async def _endpoints_told(self) -> Endpoints:
        """Wait for what the agent of the head writes."""
        deadline = time.monotonic() + self._stack.ready_timeout_s
        log.info("waiting for the head", file=str(self._paths.endpoints_file))
        while (endpoints := read_endpoints(self._paths, self._mark)) is None:
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    "the head of the stack has not said where NATS is",
                    where=str(self._paths.endpoints_file),
                    why=f"nothing within {self._stack.ready_timeout_s:.0f} s",
                    next_step="see flotilla logs launcher-head; is the state directory on a file system that all "
                    "nodes share?",
                )
            if not self.wanted():
                self._ending.set()
            await asyncio.sleep(_LOOK_EVERY_S)
        return endpoints

    async def _kept_up(self) -> bool:
        """Follow what is wanted until the end; return whether that was asked for."""
        while not self._ending.is_set():
            wanted = self.wanted()
            if not wanted:
                log.info("the node is not wanted any more", node=self._node)
                return True
            await self._follow(wanted)
            await self._follow_head(wanted)
            await asyncio.to_thread(keep_bounded, self._logs())
            if all(service.state in _DEAD for service in self._services.values()):
                log.error("every service of this node is given up", node=self._node)
                return False
            try:
                await asyncio.wait_for(self._ending.wait(), _LOOK_EVERY_S)
            except TimeoutError:
                pass
        return True

    async def _follow(self, rows: list[Row]) -> None:
        """Start and stop replicas until this node has those that `flotilla scale` asked for."""
        wanted = {row.name: row for row in rows if row.slot.kind in SCALABLE}
        running = {name for name, service in self._services.items() if service.slot.kind in SCALABLE}
        for name in sorted(running - wanted.keys()):
            await self._services[name].stop()
            del self._services[name]
            self._record()
        for name in sorted(wanted.keys() - running):
            self._begin(wanted[name])

    async def _follow_head(self, rows: list[Row]) -> None:
        """Start every service anew once the head is on another host: each was started with its addresses."""
        endpoints = read_endpoints(self._paths, self._mark)
        if endpoints is None or endpoints == self._endpoints or self._is_head:
            return
        log.warning("the head has moved", node=self._node, nats_url=endpoints.nats_url)
        self._endpoints = endpoints
        await asyncio.gather(*(service.stop() for service in self._services.values()))
        for row in rows:
            self._begin(row)

    async def _stop(self) -> None:
        """End all in the stages of their kinds, and NATS last."""
        for stage in END_STAGES:
            own = [s for s in self._services.values() if kind_of(s.slot.kind).ends == stage]
            stops = (service.stop(told=self._told) for service in own)
            for error in await asyncio.gather(*stops, return_exceptions=True):
                if isinstance(error, Exception):
                    log.error("a service was not stopped in order", error=str(error))
        if self._nats is not None:
            await self._nats.stop()
        log.info("ended", node=self._node)

    def _logs(self) -> list[Path]:
        """Return the logs of this node; other nodes may have theirs in the same folder."""
        logs = [
            self._paths.log_file(f"launcher-{self._node}"),
            *([self._paths.nats_log] if self._nats else []),
        ]
        for name in self._services:
            logs += [self._paths.log_file(name), *self._paths.logs.glob(f"{name}.rank-*.log")]
        return logs

    def _record(self) -> None:
        """Tell the launcher what runs here; on a full disk the next change tells it."""
        statuses = [self._nats.status()] if self._nats else []
        statuses += [service.status() for service in self._services.values()]
        values = {
            "mark": self._mark,
            "place": self._place,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "processes": [MessageToDict(status) for status in statuses],
        }
        try:
            write_json(self._paths.node_file(self._node), values)
        except OSError as error:
            log.warning("the processes were not recorded", error=str(error))


def run_agent(
    stack: StackConfig, nodes: Nodes, node: str, mark: str, *, executables: Path, place: str = ""
) -> int:
    """Tend the services of a node until they are told to stop; return the exit code.

    What keeps the agent from its work is in its log, and in the list as the error of its services.
    """
    tolerate_lost_lines()
    configure_logs(f"launcher-{node}")
    paths = StackPaths.of(stack.state_dir, stack.name)
    make_private_folder(paths.nodes)

    async def tend() -> int:
        agent = Agent(stack, paths, nodes, node, mark, executables, place=place)
        # In an actor of Ray this is not the main thread, and no signal is an order there.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(number, agent.end)
        return await agent.run()

    try:
        return asyncio.run(tend())
    except FlotillaError as error:
        write_json(
            paths.node_file(node), {"mark": mark, "place": place, "error": str(error), "processes": []}
        )
        raise

"""The local launcher: makes the processes of this host equal to one stack, and keeps them so.

Invariants: a stack comes up whole or not at all; what is running, and what is about to, is always written in
`processes.json`, so that the next launcher continues with it, or a cleanup ends it, whenever this one is killed; NATS
is the first to start and the last to go.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from flotilla.common.v1.registration_pb2 import ServiceKind
from flotilla.launcher.v1.launcher_pb2 import ProcessState, ProcessStatus
from flotilla_core.addresses import ANY_ADDRESS, joined, loopback
from flotilla_core.bus import Bus, Login
from flotilla_core.config import StackConfig, dump_yaml
from flotilla_core.config.generators import MOST_REPLICAS
from flotilla_core.disk import why_full
from flotilla_core.errors import FailedPrecondition, FlotillaError, InvalidRequest, NotFound
from flotilla_core.files import write_atomically
from flotilla_core.kinds import END_STAGES, SCALABLE, kind_name, kind_of
from flotilla_core.log_files import keep_bounded
from flotilla_core.logger import get_logger
from flotilla_core.process_identity import ProcessIdentity
from flotilla_core.trust import Credential
from flotilla_launch.child import under_lease
from flotilla_launch.gpus import Gpus
from flotilla_launch.guardian import GuardianKeeper
from flotilla_launch.health import ExternalService
from flotilla_launch.nats_process import NAME as NATS
from flotilla_launch.nats_process import NatsProcess
from flotilla_launch.paths import StackPaths
from flotilla_launch.placement import (
    Slot,
    check_scalable,
    replica,
    replicas_of,
    require_same,
    reserve_port,
    slots_of,
)
from flotilla_launch.records import Phase, ProcessRecord, StackRecord
from flotilla_launch.service_process import ServiceProcess, start_together
from flotilla_launch.state import LauncherFile
from flotilla_launch.table import Endpoints, ThisHost, row_of

log = get_logger()

_NOTE_SHARED_MEMORY_EVERY_S = 10.0
_LOOK_FOR_GUARDIAN_EVERY_S = 1.0
_LOOK_AT_LOGS_EVERY_S = 0.5


class Supervisor:
    """Owns every process of one stack on this host."""

    def __init__(
        self, paths: StackPaths, stack: StackConfig, executables: Path, gpus: Gpus, guardian: GuardianKeeper
    ) -> None:
        self.paths = paths
        self.stack = stack
        self.stopped = asyncio.Event()
        """The event that everything is down, so that the supervisor may end."""
        self.nats_url = ""
        self._executables = executables
        self._gpus = gpus
        self._guardian = guardian
        self._phase = Phase.STARTING
        self._credential = Credential.of_stack(stack.bind, paths.directory)
        self._nats: NatsProcess | None = None
        self._otlp = ""
        self._services: dict[str, ServiceProcess] = {}
        self._attached: dict[str, ExternalService] = {}
        self._changing = asyncio.Lock()
        self._stopping = False
        self._unrecorded = False
        """True where a full disk kept `processes.json` from being written."""
        self._releases: dict[str, str] = {}
        """Folders of commands from which replicas start, by kind, where it is another one than `executables`."""
        self._changer: asyncio.Task[Any] | None = None
        self._watches: list[asyncio.Task[None]] = []

    async def bring_up(self) -> None:
        """Start the whole stack; when any part fails, take down everything and raise why."""
        self._record()
        self._watch()
        async with self._change(), AsyncExitStack() as unless_up:
            # Also when `stop_all` interrupts it: nothing half-started stays.
            unless_up.push_async_callback(self._abandon)
            await self._start_everything()
            self._phase = Phase.UP
            self._record()
            unless_up.pop_all()

    async def take_over(self, record: StackRecord) -> None:
        """Go on with what a launcher that died has left: adopt what lives, start again what died meanwhile."""
        self._phase = record.phase
        self.nats_url, self._otlp = record.nats_url, record.otlp
        self._releases = dict(record.releases)
        self.write_launcher_file()
        async with self._change():
            for slot in slots_of(self.stack):
                if slot.attached is not None:
                    self._attached[slot.name] = ExternalService(slot, self._credential)
            processes = [process for process in record.processes if process.name != NATS]
            # Nothing is awaited from here to the last of them: what is written down next must name every one.
            for process in processes:
                slot = Slot(process.name, ServiceKind.ValueType(process.kind), index=process.index)
                self._services[slot.name] = self._process(slot)
                self._services[slot.name].take_over(process)
            nats = next((process for process in record.processes if process.name == NATS), None)
            if nats is not None:
                self._nats = self._nats_process()
                self._nats.take_over(nats, record.nats_url)
            await self._remove([service for service in self._services.values() if service.surplus])
        self._watch()

    async def apply(self, stack: StackConfig) -> bool:
        """Return whether anything changed. Only replica counts can change while the stack lives."""
        async with self._change():
            require_same(self.stack, stack, self.paths.directory)
            changed = self._nats is not None and await self._nats.start_again()
            for kind in SCALABLE:
                wanted = replicas_of(stack, kind)
                if wanted != replicas_of(self.stack, kind):
                    changed |= await self._scale(kind, wanted)
            self.stack = stack
            write_atomically(self.paths.stack_file, dump_yaml(stack))
            # Also what is STOPPED: a repair that failed has stopped what it had started beside the one that died.
            down = [service.slot for service in self._services.values() if _down(service)]
            await self._start_all(down)
            return changed or bool(down)

    async def scale(self, kind: ServiceKind.ValueType, replicas: int) -> list[ProcessStatus]:
        """Returns when the new replicas are READY or the superfluous ones are gone."""
        check_scalable(kind)
        if replicas > MOST_REPLICAS:
            raise InvalidRequest(
                f"{replicas} replicas of the {kind_name(kind)} are too many for one host",
                where="replicas",
                why=f"{MOST_REPLICAS} is the limit, the same as in stack.yaml",
            )
        async with self._change():
            await self._scale(kind, replicas)
        return [service.status() for service in self._services.values() if service.slot.scales_with(kind)]

    async def restart(self, name: str, executables: Path) -> ProcessStatus:
        """Start a replica again from the commands of another environment; return when it is READY.

        Replicas of its kind start from there from now on. Where this one does not come up, the former commands stay,
        and the replica is started again from those.
        """
        async with self._change():
            slot = self._replica(name)
            kind = kind_name(slot.kind)
            command = executables / f"flotilla-{kind}"
            if not os.access(command, os.X_OK):
                raise NotFound(
                    f"there is no command flotilla-{kind} to start {name} from",
                    where=str(command),
                    next_step="install the release there, with the package of this service",
                )
            former, before = self._services.get(name), self._releases.get(kind)
            if former is None and slot.kind == ServiceKind.SERVICE_KIND_GENERATOR:
                self._gpus.require(self.stack, slot.index + 1)
            self._releases[kind] = str(executables)
            try:
                await self._replaced(slot)
            except FlotillaError:
                self._releases.pop(kind)
                if before is not None:
                    self._releases[kind] = before
                if former is None:
                    del self._services[name]
                    self._record()
                else:
                    await self._replaced(slot)
                raise
            return self._services[name].status()

    async def _replaced(self, slot: Slot) -> None:
        """Let another process fill a slot, from the commands that hold now."""
        if slot.name in self._services:
            await self._services[slot.name].stop()
        self._services[slot.name] = self._process(slot)
        await start_together([self._services[slot.name]])

    def _replica(self, name: str) -> Slot:
        """Return the slot of a replica that runs here, or of the one more that its kind may have."""
        for kind in SCALABLE:
            own = [one.slot for one in self._services.values() if one.slot.scales_with(kind)]
            for slot in [*own, replica(kind, len(own))]:
                if slot.name == name and slot.index < MOST_REPLICAS:
                    return slot
        raise _unknown(name, self._services)

    async def stop_process(self, name: str) -> None:
        async with self._changing:
            await self._service(name).stop()

    async def stop_all(self) -> None:
        """Everything in reverse order; interrupts what is being started. Returns when nothing is left."""
        self._stopping = True
        # Once only: a second stop must not interrupt what the first one made it clean up.
        changer, self._changer = self._changer, None
        if changer is not None:
            changer.cancel()
        async with self._changing:
            await self._take_down()
        self.stopped.set()

    def require_running(self) -> None:
        """Raises where the stack is being stopped."""
        if self._stopping:
            raise FailedPrecondition(
                f"stack {self.stack.name!r} is being stopped", next_step="wait for `flotilla down` to end"
            )

    def processes(self) -> list[ProcessStatus]:
        statuses = [self._nats.status()] if self._nats else []
        statuses += [service.status() for service in self._services.values()]
        return statuses + [service.status() for service in self._attached.values()]

    async def refresh_attached(self) -> None:
        """Ask the attached services for their health; they are not ours to watch all the time."""
        await asyncio.gather(*(service.refresh() for service in self._attached.values()))

    @asynccontextmanager
    async def _change(self) -> AsyncIterator[None]:
        """One at a time, none once the stack is being stopped; `stop_all` cancels the task that is at it."""
        async with self._changing:
            self.require_running()
            self._changer = asyncio.current_task()
            try:
                yield
            finally:
                self._changer = None

    async def _start_bus(self) -> None:
        self.nats_url = self.stack.nats.url or ""
        if self.nats_url:
            # A server of the user's own that refuses us, or takes anybody, is one error here, not one a service.
            nats = self.stack.nats
            login = Login.of_stack(nats, self.paths.directory, self._credential)
            bus = await Bus.connect(self.nats_url, login, replicas=nats.replicas)
            await bus.close()
        else:
            self._nats = self._nats_process()
            self.nats_url = await self._nats.start()
        host = self.stack.bind.host
        dialled = self.stack.bind.advertise_host or (loopback() if host in ANY_ADDRESS else host)
        coordinator = self.stack.coordinator.attach or joined(
            dialled, self.stack.bind.port or reserve_port(host, self.stack.bind.ports)
        )
        self._otlp = f"https://{coordinator}"
        self._record()
        self.write_launcher_file()

    def write_launcher_file(self) -> None:
        """Tell the command line and services started by hand where this stack is."""
        identity = ProcessIdentity.of(os.getpid())
        assert identity is not None
        socket = str(self.paths.socket())
        LauncherFile(
            identity.pid, socket, self.nats_url, self._otlp, identity.start_ticks, identity.boot_id
        ).write(self.paths.launcher_file)

    async def _start_everything(self) -> None:
        """The bus, then all slots of the stack, then those that were started elsewhere."""
        self._gpus.require(self.stack, self.stack.generator.replicas)
        await self._start_bus()
        slots = slots_of(self.stack)
        for slot in slots:
            if slot.attached is not None:
                self._attached[slot.name] = ExternalService(slot, self._credential)
        await self._start_all([slot for slot in slots if slot.attached is None])
        for service in self._attached.values():
            await service.wait_serving(self.stack.ready_timeout_s)

    async def _abandon(self) -> None:
        """Take down what a start that failed has left; nothing starts any more."""
        self._stopping = True
        await self._take_down()

    async def _start_all(self, slots: list[Slot]) -> None:
        """Side by side; the first failure stops those of `slots` that were started, and is raised."""
        for slot in slots:
            if slot.name not in self._services:
                self._services[slot.name] = self._process(slot)
        await start_together([self._services[slot.name] for slot in slots])

    async def _scale(self, kind: ServiceKind.ValueType, replicas: int) -> bool:
        running = {name: one for name, one in self._services.items() if one.slot.scales_with(kind)}
        wanted = [replica(kind, index) for index in range(replicas)]
        if kind == ServiceKind.SERVICE_KIND_GENERATOR:
            self._gpus.require(self.stack, replicas)
        names = {slot.name for slot in wanted}
        surplus = [service for name, service in running.items() if name not in names]
        await self._remove(surplus)
        missing = [slot for slot in wanted if slot.name not in running or _down(running[slot.name])]
        try:
            await self._start_all(missing)
        except FlotillaError:
            for slot in missing:
                if slot.name not in running:
                    del self._services[slot.name]
            self._record()
            raise
        return bool(surplus or missing)

    async def _remove(self, surplus: list[ServiceProcess]) -> None:
        for service in surplus:
            service.surplus = True
        self._record()
        await asyncio.gather(*(service.stop() for service in surplus))
        for service in surplus:
            del self._services[service.slot.name]
        self._record()

    async def _take_down(self) -> None:
        self._phase = Phase.STOPPING
        self._record()
        for watch in self._watches:
            watch.cancel()
        for stage in END_STAGES:
            stops = (s.stop() for s in self._services.values() if kind_of(s.slot.kind).ends == stage)
            await asyncio.gather(*stops)
        if self._nats is not None:
            await self._nats.stop()
        for path in (self.paths.launcher_file, self.paths.processes_file):
            path.unlink(missing_ok=True)

    def _process(self, slot: Slot) -> ServiceProcess:
        row = row_of(
            slot,
            self.stack,
            ThisHost(self._gpus),
            directory=self.paths.directory,
            executables=Path(self._releases.get(kind_name(slot.kind), self._executables)),
        )
        return ServiceProcess(
            slot,
            command=row.command_at(Endpoints(self.nats_url, self._otlp)),
            wrapper=under_lease(self.paths.directory),
            variables=row.environment,
            log_path=self.paths.log_file(slot.name),
            announce_file=self.paths.announce_file(slot.name),
            ready_timeout_s=self.stack.ready_timeout_s,
            restart_budget=self.stack.restart_budget,
            credential=self._credential,
            on_change=self._record,
        )

    def _nats_process(self) -> NatsProcess:
        return NatsProcess(
            self.paths.nats,
            wrapper=under_lease(self.paths.directory),
            restart_budget=self.stack.restart_budget,
            on_change=self._record,
            credential=self._credential,
        )

    def _watch(self) -> None:
        self._watches = [
            asyncio.create_task(self._watch_shared_memory(), name="watch shared memory"),
            asyncio.create_task(self._watch_guardian(), name="watch the guardian"),
            asyncio.create_task(self._watch_logs(), name="watch the logs"),
        ]

    async def _watch_shared_memory(self) -> None:
        while True:
            if self._unrecorded:
                self._record()
            for service in list(self._services.values()):
                await service.note_shared_memory()
            await asyncio.sleep(_NOTE_SHARED_MEMORY_EVERY_S)

    async def _watch_guardian(self) -> None:
        while True:
            try:
                if self._guardian.keep():
                    log.info("started a guardian")
            except OSError as error:
                log.error("the guardian cannot be started", why=str(error))
            await asyncio.sleep(_LOOK_FOR_GUARDIAN_EVERY_S)

    async def _watch_logs(self) -> None:
        while True:
            # Of ranks, too, whose files the trainer makes.
            await asyncio.to_thread(keep_bounded, [*self.paths.logs.glob("*.log"), self.paths.nats_log])
            await asyncio.sleep(_LOOK_AT_LOGS_EVERY_S)

    def _record(self) -> None:
        processes = [service.record() for service in self._services.values()]
        nats: list[ProcessRecord] = [self._nats.record()] if self._nats else []
        record = StackRecord(self._phase, self.nats_url, self._otlp, [*processes, *nats], self._releases)
        try:
            record.write(self.paths.processes_file)
            self._unrecorded = False
        except OSError as error:
            # A full disk costs no service: a cleanup finds dead what is gone by then, and no start comes before room.
            if not why_full(error):
                raise
            self._unrecorded = True
            log.warning("the processes were not recorded", error=str(error))

    def _service(self, name: str) -> ServiceProcess:
        if name not in self._services:
            raise _unknown(name, self._services)
        return self._services[name]


def _down(service: ServiceProcess) -> bool:
    return service.state in (ProcessState.PROCESS_STATE_STOPPED, ProcessState.PROCESS_STATE_FAILED)


def _unknown(name: str, known: Iterable[str]) -> NotFound:
    return NotFound(
        f"there is no process {name!r}", next_step=f"processes of this stack: {', '.join(sorted(known))}"
    )

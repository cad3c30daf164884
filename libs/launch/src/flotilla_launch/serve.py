"""The life of a launcher process: lock the stack, serve, bring it up or take it over, wait for the end.

Invariants: however it ends in order, no process of the stack is left, nor its socket or state files; one that is
killed, or fails with what it took over, leaves the stack as it is, for the guardian to start the next launcher.
Repeating a call changes nothing, because every call names a wanted state; `Restart` alone does not, and no caller
repeats it. A change that was begun continues when its caller goes away (a deadline, a closed terminal) and is never
left half done; only the stop of the whole stack interrupts it.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from grpc.aio import ServicerContext

from flotilla.launcher.v1 import launcher_pb2 as pb
from flotilla.launcher.v1.launcher_pb2_grpc import (
    LauncherServiceServicer,
    add_LauncherServiceServicer_to_server,
)
from flotilla_core.config import StackConfig, dump_yaml, load_text
from flotilla_core.config.stack import BindConfig
from flotilla_core.errors import FailedPrecondition
from flotilla_core.files import write_atomically
from flotilla_core.logger import get_logger
from flotilla_core.logs import configure_logs, tolerate_lost_lines
from flotilla_core.rpc import RpcServer
from flotilla_core.tasks import BackgroundTasks
from flotilla_core.trust import Credential
from flotilla_launch.cleanup import CLEANUP_LIMIT_S, clean_up
from flotilla_launch.gpus import Gpus
from flotilla_launch.guardian import GuardianKeeper, end_guardian
from flotilla_launch.own_credential import own_credential
from flotilla_launch.paths import StackPaths
from flotilla_launch.records import Phase, StackRecord
from flotilla_launch.report import Report
from flotilla_launch.stack_lock import hold_lock
from flotilla_launch.state import LauncherFile
from flotilla_launch.supervisor import Supervisor

log = get_logger()

Result = TypeVar("Result")
Context = ServicerContext[Any, Any]


async def serve(stack: StackConfig, report: Report, *, executables: Path, take_over: bool = False) -> None:
    """Returns when the stack was stopped; raises why it did not come up."""
    tolerate_lost_lines()
    configure_logs("launcher")
    paths = StackPaths.of(stack.state_dir, stack.name)
    paths.make()
    own_credential(stack, paths, log.warning)
    guardian = GuardianKeeper(paths, executables / "flotilla-launcher")
    try:
        with hold_lock(
            paths.launcher_lock_file, timeout_s=0 if _supervised(paths) else CLEANUP_LIMIT_S
        ) as held:
            if not held:
                raise FailedPrecondition(
                    f"stack {stack.name!r} has a supervisor already",
                    where=str(paths.directory),
                    next_step="run `flotilla ps` to see it, `flotilla down` to stop it",
                )
            record = _found(paths) if take_over else None
            if record is None:
                _begin_anew(stack, paths)
            gpus = await asyncio.to_thread(Gpus.of_host)
            await _serve_locked(Supervisor(paths, stack, executables, gpus, guardian), paths, report, record)
    finally:
        # Outside the lock: the guardian ends when no process holds it and nothing is there to guard.
        if not paths.processes_file.exists():
            guardian.wait_ended()


def _found(paths: StackPaths) -> StackRecord:
    record = StackRecord.read(paths.processes_file)
    if record is None or record.phase is not Phase.UP:
        raise FailedPrecondition("there is no stack to take over", where=str(paths.processes_file))
    return record


def _begin_anew(stack: StackConfig, paths: StackPaths) -> None:
    ended = clean_up(paths, runs_go_on=True)
    if ended:
        log.warning("ended what a launcher that was killed has left", processes=ended)
    # It would start the launcher of the environment that this stack was started from before.
    end_guardian(paths, within_s=0)
    paths.ended_file.unlink(missing_ok=True)
    write_atomically(paths.stack_file, dump_yaml(stack))


async def _serve_locked(
    supervisor: Supervisor, paths: StackPaths, report: Report, record: StackRecord | None
) -> None:
    socket = paths.socket()
    socket.unlink(missing_ok=True)
    servers = _servers(supervisor.stack, paths)
    servicer = LauncherServicer(supervisor)
    for server in servers:
        server.add(add_LauncherServiceServicer_to_server, servicer, "flotilla.launcher.v1.LauncherService")
    loop = asyncio.get_running_loop()
    stops: set[asyncio.Task[None]] = set()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lambda: stops.add(loop.create_task(supervisor.stop_all())))
    try:
        for server in servers:
            log.info("listening", address=await server.start())
            server.set_serving(True)
        socket.chmod(0o600)
        if record is None:
            supervisor.write_launcher_file()
        begin = supervisor.bring_up() if record is None else supervisor.take_over(record)
        beginning = asyncio.create_task(begin, name="bring up or take over")
        await asyncio.wait({beginning})
        if not beginning.cancelled():
            beginning.result()
            log.info("the stack is up" if record is None else "took the stack over", pid=os.getpid())
            report.up()
        await supervisor.stopped.wait()
    finally:
        await asyncio.gather(*(server.stop(1.0) for server in servers))
        socket.unlink(missing_ok=True)


def _servers(stack: StackConfig, paths: StackPaths) -> list[RpcServer]:
    """Return the server of this host's callers, and that of other machines where the stack file names a port."""
    servers = [RpcServer(BindConfig(host=f"unix:{paths.socket()}"))]
    if stack.launcher.port:
        bind = stack.bind.model_copy(update={"port": stack.launcher.port})
        servers.append(RpcServer(bind, credential=Credential.of_stack(stack.bind, paths.directory)))
    return servers


def _supervised(paths: StackPaths) -> bool:
    file = LauncherFile.read(paths.launcher_file)
    return file is not None and file.identity.alive()


class LauncherServicer(LauncherServiceServicer):
    """Translates calls; the supervisor decides."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._changes = BackgroundTasks()

    async def Apply(self, request: pb.ApplyRequest, context: Context) -> pb.ApplyResponse:
        stack = load_text(StackConfig, request.stack_yaml)
        changed = await self._finished(self._supervisor.apply(stack))
        return pb.ApplyResponse(changed=changed, processes=self._supervisor.processes())

    async def Stop(self, request: pb.StopRequest, context: Context) -> pb.StopResponse:
        log.info("stop", name=request.name or "the whole stack", request_id=request.request_id)
        if request.name:
            await self._finished(self._supervisor.stop_process(request.name))
        else:
            await self._finished(self._supervisor.stop_all())
        return pb.StopResponse()

    async def Scale(self, request: pb.ScaleRequest, context: Context) -> pb.ScaleResponse:
        processes = await self._finished(self._supervisor.scale(request.kind, request.replicas))
        return pb.ScaleResponse(processes=processes)

    async def Restart(self, request: pb.RestartRequest, context: Context) -> pb.RestartResponse:
        change = self._supervisor.restart(request.name, Path(request.executables))
        return pb.RestartResponse(process=await self._finished(change))

    async def List(self, request: pb.ListRequest, context: Context) -> pb.ListResponse:
        await self._supervisor.refresh_attached()
        return pb.ListResponse(
            stack=self._supervisor.stack.name,
            nats_url=self._supervisor.nats_url,
            processes=self._supervisor.processes(),
        )

    async def _finished(self, change: Coroutine[Any, Any, Result]) -> Result:
        task = self._changes.begin(change)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                self._supervisor.require_running()  # The stop of the stack has cancelled it: say so.
            raise

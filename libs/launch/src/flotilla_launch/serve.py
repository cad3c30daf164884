"""The life of a supervisor process: claim the stack, serve, bring it up, wait for the end, take it down.

Invariant: however it ends, short of SIGKILL, no process of the stack is left, nor its socket or state
files; after SIGKILL the guardian sees to that.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import structlog

from flotilla.launcher.v1.launcher_pb2_grpc import add_LauncherServiceServicer_to_server
from flotilla_core.config import StackConfig, dump_yaml
from flotilla_core.config.stack import BindConfig
from flotilla_core.errors import FailedPrecondition
from flotilla_core.files import write_atomically
from flotilla_core.logs import configure_logs, tolerate_lost_lines
from flotilla_core.rpc import RpcServer
from flotilla_core.trust import make_token
from flotilla_launch.claim import claim
from flotilla_launch.gpus import Gpus
from flotilla_launch.guardian import start_guardian
from flotilla_launch.paths import StackPaths
from flotilla_launch.report import Report
from flotilla_launch.servicer import LauncherServicer
from flotilla_launch.state import LauncherFile
from flotilla_launch.supervisor import Supervisor
from flotilla_launch.sweep import sweep

log = structlog.get_logger()

_SWEEP_LIMIT_S = 20.0


async def serve(stack: StackConfig, report: Report, *, executables: Path) -> None:
    """Returns when the stack was stopped; raises why it did not come up."""
    tolerate_lost_lines()
    configure_logs("launcher")
    paths = StackPaths.of(stack.state_dir, stack.name)
    paths.make()
    make_token(stack.bind, paths.directory)
    with claim(paths.claim_file, timeout_s=0 if _supervised(paths) else _SWEEP_LIMIT_S) as claimed:
        if not claimed:
            raise FailedPrecondition(
                f"stack {stack.name!r} has a supervisor already",
                where=str(paths.directory),
                next_step="run `flotilla ps` to see it, `flotilla down` to stop it",
            )
        ended = sweep(paths)
        if ended:
            log.warning("swept what a killed supervisor left", processes=ended)
        write_atomically(paths.stack_file, dump_yaml(stack))
        guardian = start_guardian(paths)
        try:
            gpus = await asyncio.to_thread(Gpus.of_host)
            await _serve_claimed(Supervisor(paths, stack, executables, gpus), paths, report)
        finally:
            assert guardian.stdin is not None
            guardian.stdin.close()
    guardian.wait()


async def _serve_claimed(supervisor: Supervisor, paths: StackPaths, report: Report) -> None:
    socket = paths.socket()
    server = RpcServer(BindConfig(host=f"unix:{socket}"))
    server.add(
        add_LauncherServiceServicer_to_server,
        LauncherServicer(supervisor),
        "flotilla.launcher.v1.LauncherService",
    )
    loop = asyncio.get_running_loop()
    stops: set[asyncio.Task[None]] = set()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lambda: stops.add(loop.create_task(supervisor.stop_all())))
    try:
        await server.start()
        socket.chmod(0o600)
        server.set_serving(True)
        supervisor.write_launcher_file()
        bring_up = asyncio.create_task(supervisor.bring_up(), name="bring up")
        await asyncio.wait({bring_up})
        if not bring_up.cancelled():
            bring_up.result()
            log.info("the stack is up", pid=os.getpid())
            report.up()
        await supervisor.stopped.wait()
    finally:
        await server.stop(1.0)
        socket.unlink(missing_ok=True)


def _supervised(paths: StackPaths) -> bool:
    file = LauncherFile.read(paths.launcher_file)
    return file is not None and file.identity.alive()

"""The launcher of a stack, as its callers see it: the command line and the coordinator."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from flotilla.common.v1.registration_pb2 import ServiceKind
from flotilla.launcher.v1 import launcher_pb2 as pb
from flotilla.launcher.v1.launcher_pb2_grpc import LauncherServiceStub
from flotilla_core import rpc
from flotilla_core.config import StackConfig, dump_yaml
from flotilla_core.errors import Unavailable
from flotilla_core.ids import new_request_id
from flotilla_core.trust import Credential
from flotilla_launch.guardian import starts_launcher_again, why_it_ended
from flotilla_launch.paths import StackPaths
from flotilla_launch.state import LauncherFile, find

if TYPE_CHECKING:
    # A class of the typed stubs only.
    from flotilla.launcher.v1.launcher_pb2_grpc import LauncherServiceAsyncStub

_QUICK_S = 5.0
# A service may use its whole grace, one after the other: services, coordinator, NATS.
_STOP_LIMIT_S = 60.0


class LauncherClient:
    """Calls to one supervisor, over its unix socket or a port."""

    def __init__(self, stub: LauncherServiceAsyncStub) -> None:
        self._stub = stub

    @classmethod
    @asynccontextmanager
    async def open(cls, file: LauncherFile) -> AsyncIterator[LauncherClient]:
        """A client for the time of the block."""
        async with cls.at(f"unix:{file.socket}") as client:
            yield client

    @classmethod
    @asynccontextmanager
    async def at(cls, address: str, credential: Credential | None = None) -> AsyncIterator[LauncherClient]:
        """A client of the launcher at host:port, for the time of the block."""
        channel = rpc.connect(address, credential=credential)
        try:
            yield cls(LauncherServiceStub(channel))
        finally:
            await channel.close()

    async def state(self) -> pb.ListResponse:
        return await rpc.unary(self._stub.List, pb.ListRequest(), timeout_s=_QUICK_S)

    async def apply(self, stack: StackConfig) -> pb.ApplyResponse:
        request = pb.ApplyRequest(request_id=new_request_id(), stack_yaml=dump_yaml(stack))
        return await rpc.unary(self._stub.Apply, request, timeout_s=2 * stack.ready_timeout_s)

    async def stop(self, name: str = "") -> None:
        """One process; the whole stack and its supervisor when `name` is empty."""
        request = pb.StopRequest(request_id=new_request_id(), name=name)
        await rpc.unary(self._stub.Stop, request, timeout_s=_STOP_LIMIT_S, attempts=1)

    async def scale(
        self, kind: ServiceKind.ValueType, replicas: int, *, timeout_s: float
    ) -> list[pb.ProcessStatus]:
        """Returns when the new replicas are READY and the superfluous ones are gone."""
        request = pb.ScaleRequest(request_id=new_request_id(), kind=kind, replicas=replicas)
        return list((await rpc.unary(self._stub.Scale, request, timeout_s=timeout_s)).processes)

    async def restart(self, name: str, executables: Path, *, timeout_s: float) -> pb.ProcessStatus:
        """Return the replica when it was started again from these commands, and is READY."""
        request = pb.RestartRequest(request_id=new_request_id(), name=name, executables=str(executables))
        return (await rpc.unary(self._stub.Restart, request, timeout_s=timeout_s, attempts=1)).process


def require(paths: StackPaths) -> LauncherFile:
    """Return the supervisor of the stack, or an error that says how to start it."""
    file = find(paths)
    if file is not None:
        return file
    if starts_launcher_again(paths):
        raise Unavailable(
            f"the launcher of stack {paths.directory.name!r} is being started again",
            where=str(paths.directory),
            why="it was killed; what it had started continues",
            next_step="run the command again in a few seconds; see: flotilla logs launcher",
        )
    raise Unavailable(
        f"stack {paths.directory.name!r} is not running",
        where=str(paths.directory),
        why=why_it_ended(paths),
        next_step="start it: flotilla up",
    )

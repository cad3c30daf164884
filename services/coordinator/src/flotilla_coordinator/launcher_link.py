"""The way to the launcher of this stack, where there is one."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from flotilla.common.v1.registration_pb2 import SERVICE_KIND_GENERATOR
from flotilla.launcher.v1 import launcher_pb2
from flotilla.launcher.v1.launcher_pb2_grpc import LauncherServiceStub
from flotilla_core.errors import FailedPrecondition
from flotilla_core.ids import new_request_id
from flotilla_core.rpc import connect, unary

if TYPE_CHECKING:
    from flotilla.launcher.v1.launcher_pb2_grpc import LauncherServiceAsyncStub


SCALE_TIMEOUT_S = 240.0
LIST_TIMEOUT_S = 10.0


class LauncherLink:
    """Finds the launcher by the file that it keeps in the stack's directory."""

    def __init__(self, state_dir: Path) -> None:
        self._file = state_dir / "launcher.json"

    async def change_generators(self, by: int, *, least: int, most: int) -> int:
        """So many more than the launcher runs now, or fewer, within bounds; how many it runs then."""
        async with self._launcher() as launcher:
            state = await unary(launcher.List, launcher_pb2.ListRequest(), timeout_s=LIST_TIMEOUT_S)
        running = sum(process.kind == SERVICE_KIND_GENERATOR for process in state.processes)
        wanted = min(max(running + by, least), most)
        if wanted != running:
            await self.scale(
                launcher_pb2.ScaleRequest(
                    request_id=new_request_id(), kind=SERVICE_KIND_GENERATOR, replicas=wanted
                )
            )
        return wanted

    async def scale(self, request: launcher_pb2.ScaleRequest) -> launcher_pb2.ScaleResponse:
        """Ask the launcher that runs now for another number of replicas."""
        async with self._launcher() as launcher:
            return await unary(launcher.Scale, request, timeout_s=SCALE_TIMEOUT_S)

    @asynccontextmanager
    async def _launcher(self) -> AsyncIterator[LauncherServiceAsyncStub]:
        channel = connect(f"unix:{self._socket()}")
        try:
            yield LauncherServiceStub(channel)
        finally:
            await channel.close()

    def _socket(self) -> str:
        if not self._file.exists():
            raise FailedPrecondition(
                "this stack has no launcher",
                where=str(self._file),
                why="its services were started by hand",
                next_step="start or stop replicas the way they were started",
            )
        socket: str = json.loads(self._file.read_text())["socket"]
        return socket

"""Calls the launcher of this stack, where there is one.

Invariant: a change by one counts the processes that the launcher started itself. One that failed is started again
before another one is added, and nothing is added while one starts.
"""

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
from flotilla_core.roles import holds_judge
from flotilla_core.rpc import connect, unary

if TYPE_CHECKING:
    from flotilla.launcher.v1.launcher_pb2_grpc import LauncherServiceAsyncStub


LIST_TIMEOUT_S = 10.0
SCALE_SLACK_S = 60.0
"""Added to the time in which a replica must be ready, for others to stop and the launcher to answer."""
_STARTS = (launcher_pb2.PROCESS_STATE_STARTING, launcher_pb2.PROCESS_STATE_RESTARTING)
_DOWN = (launcher_pb2.PROCESS_STATE_FAILED, launcher_pb2.PROCESS_STATE_STOPPED)


class LauncherLink:
    """Finds the launcher by the file that it keeps in the stack's directory."""

    def __init__(self, state_dir: Path, ready_timeout_s: float) -> None:
        self._file = state_dir / "launcher.json"
        self._scale_timeout_s = ready_timeout_s + SCALE_SLACK_S

    async def change_generators(self, by: int, *, least: int, most: int) -> None:
        """Add or stop one generator; the bounds also count generators that were started elsewhere."""
        async with self._launcher() as launcher:
            state = await unary(launcher.List, launcher_pb2.ListRequest(), timeout_s=LIST_TIMEOUT_S)
        states = [
            process.state
            for process in state.processes
            if process.kind == SERVICE_KIND_GENERATOR and not holds_judge(process.name)
        ]
        attached = states.count(launcher_pb2.PROCESS_STATE_ATTACHED)
        own = len(states) - attached
        wanted = min(max(own + by, least - attached, 0), max(most - attached, 0))
        if by > 0 and any(process in _STARTS for process in states):
            return
        if by > 0 and any(process in _DOWN for process in states):
            wanted = own
        elif wanted == own:
            raise FailedPrecondition(
                f"the launcher runs {own} of {len(states)} generators and cannot come to {len(states) + by}",
                next_step="start or stop those that were started by hand in the same way",
            )
        request = launcher_pb2.ScaleRequest(
            request_id=new_request_id(), kind=SERVICE_KIND_GENERATOR, replicas=wanted
        )
        await self.scale(request)

    async def scale(self, request: launcher_pb2.ScaleRequest) -> launcher_pb2.ScaleResponse:
        """Ask the launcher for another number of replicas."""
        async with self._launcher() as launcher:
            return await unary(launcher.Scale, request, timeout_s=self._scale_timeout_s)

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

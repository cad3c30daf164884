"""The way to the launcher of this stack, where there is one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from flotilla.launcher.v1 import launcher_pb2
from flotilla.launcher.v1.launcher_pb2_grpc import LauncherServiceStub
from flotilla_core.errors import FailedPrecondition
from flotilla_core.rpc import connect, unary

if TYPE_CHECKING:
    from flotilla.launcher.v1.launcher_pb2_grpc import LauncherServiceAsyncStub


SCALE_TIMEOUT_S = 240.0


class LauncherLink:
    """Finds the launcher by the file that it keeps in the stack's directory."""

    def __init__(self, state_dir: Path) -> None:
        self._file = state_dir / "launcher.json"

    async def scale(self, request: launcher_pb2.ScaleRequest) -> launcher_pb2.ScaleResponse:
        """Ask the launcher that runs now for another number of replicas."""
        channel = connect(f"unix:{self._socket()}")
        try:
            stub: LauncherServiceAsyncStub = LauncherServiceStub(channel)
            return await unary(stub.Scale, request, timeout_s=SCALE_TIMEOUT_S)
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

"""The interface of a service, and the host that it gets when it is built.

Invariants: a service never opens ports, connects to NATS or writes its registration; the host does. Whatever ends a
service later than its start goes through `Host.failed`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import grpc

from flotilla.common.v1.finding_pb2 import Finding
from flotilla.common.v1.operate_pb2 import ProcessStacks
from flotilla.common.v1.registration_pb2 import Registration, ServiceKind
from flotilla_core import rpc
from flotilla_core.activities import Activities
from flotilla_core.bus import Bus, Registry
from flotilla_core.config import StackConfig
from flotilla_core.transfer import Files
from flotilla_core.trust import Credential


class Service(Protocol):
    """One service, as the host drives it: `add_to`, `start`, `describe`, ..., `drain`, `stop`."""

    def add_to(self, server: rpc.RpcServer) -> None:
        """Add servicers; called before the port opens."""

    async def start(self) -> None:
        """Boot; health is NOT_SERVING and the state STARTING meanwhile."""

    def describe(self, registration: Registration) -> None:
        """Fill in digests, versions and capacity; called after `start`."""

    async def check(self) -> list[Finding]:
        """Preflight findings beyond the host's own."""

    async def dump_stacks(self) -> list[ProcessStacks]:
        """Stacks of child processes; the host adds its own."""

    async def drain(self, grace_s: float) -> None:
        """Refuse new work and let running work end within `grace_s`."""

    async def stop(self) -> None:
        """Free everything; also called when `start` failed or was interrupted."""


@dataclass
class Host:
    """The process around a service."""

    kind: ServiceKind.ValueType
    name: str
    instance_id: str
    stack: StackConfig
    state_dir: Path
    """The directory of the stack: `<state_dir>/<stack>`, absolute."""
    bus: Bus
    registry: Registry
    credential: Credential
    """The stack's credential, as its file holds it now."""
    fail: Callable[[BaseException], None]
    activities: Activities
    files: Files
    """The files that this process offers to services on other hosts, and fetches from them."""

    def connect(
        self, address: str, *, fence: Callable[[], rpc.Fence | None] | None = None
    ) -> grpc.aio.Channel:
        """Return a channel to a peer, to whom we show the stack's credential."""
        return rpc.connect(address, credential=self.credential, fence=fence)

    def failed(self, error: BaseException) -> None:
        """Report that the service cannot continue: it becomes FAILED, stops, and the process ends with exit code 1."""
        self.fail(error)

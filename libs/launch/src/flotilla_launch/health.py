"""Asks services whether they serve, and lists those that someone else started, for example under a debugger.

Invariant: a service of someone else is looked at and listed, never started, restarted or signalled.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from flotilla.launcher.v1.launcher_pb2 import ProcessState, ProcessStatus
from flotilla_core import rpc
from flotilla_core.errors import FlotillaError, Unavailable
from flotilla_core.kinds import kind_name
from flotilla_core.logger import get_logger
from flotilla_core.trust import Credential
from flotilla_launch.placement import Slot

log = get_logger()

_TIMEOUT_S = 2.0
_POLL_S = 0.5


async def is_serving(address: str, credential: Credential, timeout_s: float = _TIMEOUT_S) -> bool:
    """Ask `grpc.health.v1`; no answer is no."""
    channel = rpc.connect(address, credential=credential)
    check: Any = HealthStub(channel).Check  # type: ignore[attr-defined]
    try:
        answer = await rpc.unary(check, HealthCheckRequest(), timeout_s=timeout_s, attempts=1)
    except FlotillaError:
        return False
    finally:
        await channel.close()
    return bool(answer.status == HealthCheckResponse.SERVING)


class ExternalService:
    """One address of `attach` in the stack file."""

    def __init__(self, slot: Slot, credential: Credential) -> None:
        assert slot.attached is not None
        self._slot = slot
        self._address = slot.attached
        self._credential = credential
        self._status = ProcessStatus(
            name=slot.name,
            kind=slot.kind,
            address=slot.attached,
            state=ProcessState.PROCESS_STATE_ATTACHED,
        )
        self._status.since.GetCurrentTime()

    def status(self) -> ProcessStatus:
        copy = ProcessStatus()
        copy.CopyFrom(self._status)
        return copy

    async def refresh(self) -> bool:
        serving = await is_serving(self._address, self._credential)
        self._status.error = "" if serving else "its health does not say SERVING"
        return serving

    async def wait_serving(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        log.info("waiting for an attached service", process=self._slot.name, limit_s=timeout_s)
        while not await self.refresh():
            if time.monotonic() > deadline:
                kind, section = kind_name(self._slot.kind), self._slot.name.partition("@")[0]
                raise Unavailable(
                    f"the attached {section} does not serve",
                    where=self._address,
                    why=f"no SERVING health within {timeout_s:.0f} s",
                    next_step=f"start it by hand: flotilla-{kind} --name {section}-a --stack FILE --port "
                    f"{self._address.rpartition(':')[2]}, or remove it from {section}.attach",
                )
            await asyncio.sleep(_POLL_S)

"""What replicas say of themselves, asked until there is something to decide.

Invariant: a replica is believed when it answers; the registry knows of heartbeats alone.
"""

from __future__ import annotations

import asyncio
from typing import Any

from grpc_health.v1 import health_pb2, health_pb2_grpc

from flotilla_core.errors import FlotillaError
from flotilla_core.rpc.calls import unary
from flotilla_core.rpc.replica import Replica

PROBE_INTERVAL_S = 0.5
PROBE_TIMEOUT_S = 2.0
# A replica that fails again soon after it came back stays out longer each time.
LONGEST_PROBE_INTERVAL_S = 10.0
# Who is missing from the registry was silent for long: only an answer keeps it.
MISSING_TIMEOUT_S = 5.0
ASK_MISSING_EVERY_S = 5.0

_SERVING = health_pb2.HealthCheckResponse.SERVING


async def until_serving(replica: Replica[Any]) -> None:
    """Ask one whose call failed, until it serves again."""
    interval_s = min(PROBE_INTERVAL_S * 2 ** (replica.ejections - 1), LONGEST_PROBE_INTERVAL_S)
    await asyncio.sleep(interval_s)
    while await _health(replica, PROBE_TIMEOUT_S, attempts=1) != _SERVING:  # noqa: ASYNC110 - of another process
        await asyncio.sleep(interval_s)


async def while_serving(replica: Replica[Any]) -> bool:
    """Ask one that the registry lost, as long as it serves; whether it answered in the end."""
    while (status := await _health(replica, MISSING_TIMEOUT_S)) == _SERVING:  # noqa: ASYNC110 - of another process
        await asyncio.sleep(ASK_MISSING_EVERY_S)
    return status is not None


async def _health(replica: Replica[Any], timeout_s: float, attempts: int = 4) -> int | None:
    """What it says of itself; None where it says nothing."""
    health: Any = health_pb2_grpc.HealthStub(replica.channel)
    try:
        answer = await unary(
            health.Check, health_pb2.HealthCheckRequest(), timeout_s=timeout_s, attempts=attempts
        )
    except FlotillaError:
        return None
    status: int = answer.status
    return status

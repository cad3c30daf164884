"""Whether a service says of itself that it serves."""

from __future__ import annotations

from typing import Any

from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from flotilla_core import rpc
from flotilla_core.errors import FlotillaError
from flotilla_core.trust import Token

_TIMEOUT_S = 2.0


async def is_serving(address: str, token: str | Token | None, timeout_s: float = _TIMEOUT_S) -> bool:
    """Ask `grpc.health.v1`; no answer is no."""
    channel = rpc.connect(address, token=token)
    check: Any = HealthStub(channel).Check  # type: ignore[attr-defined]
    try:
        answer = await rpc.unary(check, HealthCheckRequest(), timeout_s=timeout_s, attempts=1)
    except FlotillaError:
        return False
    finally:
        await channel.close()
    return bool(answer.status == HealthCheckResponse.SERVING)

"""grpc.health.v1 for our servers.

Invariant: a watcher learns every change at once, and its last answer is the state at that time.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

_Status = health_pb2.HealthCheckResponse
SERVICE_NAME = "grpc.health.v1.Health"
_LONGEST_NAME = 200


class HealthServicer(health_pb2_grpc.HealthServicer):
    """One status for a fixed set of services and for "", the whole server."""

    def __init__(self, services: list[str]) -> None:
        self._services = {"", *services}
        self._status: Any = _Status.NOT_SERVING
        self._changed = asyncio.Event()

    def set_serving(self, serving: bool) -> None:
        self._status = _Status.SERVING if serving else _Status.NOT_SERVING
        # Each waiter holds the event of its time: a new one for the next change.
        self._changed.set()
        self._changed = asyncio.Event()

    async def Check(self, request: Any, context: Any) -> health_pb2.HealthCheckResponse:
        if request.service not in self._services:
            await context.abort(
                grpc.StatusCode.NOT_FOUND, f"no service {request.service[:_LONGEST_NAME]!r} here"
            )
        return health_pb2.HealthCheckResponse(status=self._status)

    async def List(self, request: Any, context: Any) -> Any:
        answer = health_pb2.HealthCheckResponse(status=self._status)
        # The type stubs of grpcio-health-checking are older than this call.
        return health_pb2.HealthListResponse(  # type: ignore[attr-defined]
            statuses=dict.fromkeys(self._services, answer)
        )

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        known = request.service in self._services
        while True:
            changed = self._changed
            yield health_pb2.HealthCheckResponse(status=self._status if known else _Status.SERVICE_UNKNOWN)
            await changed.wait()

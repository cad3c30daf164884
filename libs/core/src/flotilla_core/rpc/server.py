"""The server of every service.

Invariants: it listens on one port that nobody else has; it asks each caller for a proof, unless it listens on a socket
file; its health is NOT_SERVING until its owner says otherwise, and becomes so again before it stops.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import grpc
import psutil
from grpc_health.v1 import health_pb2_grpc

from flotilla_core.errors import PortInUse
from flotilla_core.rpc.auth import dialable, is_loopback, joined, own_names, require_token
from flotilla_core.rpc.boundary import BoundaryInterceptor
from flotilla_core.rpc.health import SERVICE_NAME as HEALTH
from flotilla_core.rpc.health import HealthServicer
from flotilla_core.rpc.options import SERVER_OPTIONS
from flotilla_core.rpc.reflection import add_reflection
from flotilla_core.rpc.token_interceptor import TokenServerInterceptor
from flotilla_core.telemetry.grpc import server_interceptor
from flotilla_core.trust import CallVerifier

if TYPE_CHECKING:
    from flotilla_core.config import BindConfig


class RpcServer:
    """A grpc.aio server with health, reflection and our boundary."""

    def __init__(self, bind: BindConfig, *, token: str | None = None) -> None:
        self._bind = bind
        self._token = token
        self._adders: list[tuple[Callable[[Any, grpc.aio.Server], None], Any]] = []
        self._services: list[str] = []
        self._server: grpc.aio.Server | None = None
        self._health: HealthServicer | None = None
        self._port = 0

    def add(
        self, add_servicer_to_server: Callable[[Any, Any], None], servicer: Any, service_name: str
    ) -> None:
        """Serve `servicer` under `service_name`, for example flotilla.trainer.v1.TrainerService."""
        self._adders.append((add_servicer_to_server, servicer))
        self._services.append(service_name)

    async def start(self) -> str:
        """Listen; return host:port as peers dial it."""
        require_token(self._bind, self._token)
        # The proof comes first: of a call without it nothing acts, neither its fence nor the trace that it names.
        interceptors: list[grpc.aio.ServerInterceptor] = []
        if self._token is not None:
            verifier = CallVerifier(
                self._token,
                lambda: own_names(self._bind, self._port),
                shares_our_clock=is_loopback(self._bind.host),
            )
            interceptors.append(TokenServerInterceptor(verifier))
        interceptors += [server_interceptor(), BoundaryInterceptor()]
        server = grpc.aio.server(interceptors=interceptors, options=SERVER_OPTIONS)
        for add_servicer_to_server, servicer in self._adders:
            add_servicer_to_server(servicer, server)
        self._health = HealthServicer(self._services)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        add_reflection([*self._services, HEALTH], server)
        self._port = self._listen(server)
        await server.start()
        self._server = server
        return joined(self._bind.advertise_host or dialable(self._bind.host), self._port)

    def set_serving(self, serving: bool) -> None:
        """What grpc.health.v1 answers for every service of this server and for the server itself."""
        if self._health is not None:
            self._health.set_serving(serving)

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, give running ones `grace_s`, then cancel them."""
        if self._server is not None:
            self.set_serving(False)
            await self._server.stop(grace_s)

    def _listen(self, server: grpc.aio.Server) -> int:
        address = joined(self._bind.host, self._bind.port)
        try:
            return server.add_insecure_port(address)
        except RuntimeError as error:
            holder = _holder_of(self._bind.port)
            raise PortInUse(
                f"cannot listen on {address}",
                why=holder or "the address is not ours or another process listens there",
                next_step="Stop that process, or choose another port (0 takes a free one).",
            ) from error


def _holder_of(port: int) -> str:
    """Who listens on `port`, where the system tells."""
    if port == 0:
        return ""
    try:
        for connection in psutil.net_connections(kind="tcp"):
            if connection.status != psutil.CONN_LISTEN or not connection.laddr or connection.pid is None:
                continue
            if connection.laddr.port == port:
                process = psutil.Process(connection.pid)
                return f"process {process.pid} listens there ({' '.join(process.cmdline())[:200]})"
    except psutil.Error:
        pass  # Other users' processes are hidden from us: then the message stays general.
    return ""

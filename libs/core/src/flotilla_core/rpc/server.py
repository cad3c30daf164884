"""The server of every service, with its health, its reflection and the authentication of its callers.

Invariants: it listens on a port of its own; it asks each caller for a certificate, whose names say what the caller may
do, unless it listens on a socket file, whose folder decides who may connect. Its health is NOT_SERVING until its owner
says otherwise, and becomes so again before it stops; a watcher learns every change of it at once, and its last answer
is the state at that time. Both names of server reflection have the same messages, so one servicer answers for both.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Any

import grpc
import psutil
from google.protobuf import descriptor_pb2, descriptor_pool, text_format
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from flotilla_core.addresses import ANY_ADDRESS, UNIX, dialable, joined, ports_of
from flotilla_core.errors import InvalidConfig, PortInUse
from flotilla_core.rpc.channel import SERVER_OPTIONS
from flotilla_core.rpc.errors_interceptor import ErrorsInterceptor
from flotilla_core.rpc.interface import check_interface
from flotilla_core.rpc.tls import server_credentials
from flotilla_core.telemetry.grpc import TracingInterceptor
from flotilla_core.trust import Credential

if TYPE_CHECKING:
    from flotilla_core.config import BindConfig

_Status = health_pb2.HealthCheckResponse
SERVICE_NAME = "grpc.health.v1.Health"
_LONGEST_NAME = 200

SERVICE_NAMES = ("grpc.reflection.v1.ServerReflection", reflection.SERVICE_NAME)


class RpcServer:
    """A grpc.aio server with health, reflection and our boundary."""

    def __init__(self, bind: BindConfig, *, credential: Credential | None = None) -> None:
        """`credential` is needed but for a socket file."""
        self._bind = bind
        self._credential = credential
        self._adders: list[tuple[Callable[[Any, grpc.aio.Server], None], Any]] = []
        self._services: list[str] = []
        self._server: grpc.aio.Server | None = None
        self._health: HealthServicer | None = None

    def add(
        self, add_servicer_to_server: Callable[[Any, Any], None], servicer: Any, service_name: str
    ) -> None:
        """Serve `servicer` under `service_name`, for example flotilla.trainer.v1.TrainerService."""
        self._adders.append((add_servicer_to_server, servicer))
        self._services.append(service_name)

    async def start(self) -> str:
        """Listen; return host:port as peers dial it."""
        credential = None if self._bind.host.startswith(UNIX) else required(self._bind, self._credential)
        interceptors = [TracingInterceptor(), ErrorsInterceptor(knows_callers=credential is not None)]
        server = grpc.aio.server(interceptors=interceptors, options=SERVER_OPTIONS)
        for add_servicer_to_server, servicer in self._adders:
            add_servicer_to_server(servicer, server)
        self._health = HealthServicer(self._services)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        add_reflection([*self._services, SERVICE_NAME], server)
        port = self._listen(server, credential)
        await server.start()
        self._server = server
        own = dialable(self._bind.host)
        if self._bind.host in ANY_ADDRESS:
            own = check_interface(self._bind) or own
        return joined(self._bind.advertise_host or own, port)

    def set_serving(self, serving: bool) -> None:
        """Set what grpc.health.v1 answers for every service of this server and for the server itself."""
        if self._health is not None:
            self._health.set_serving(serving)

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, give running ones `grace_s`, then cancel them."""
        if self._server is not None:
            self.set_serving(False)
            await self._server.stop(grace_s)

    def _listen(self, server: grpc.aio.Server, credential: Credential | None) -> int:
        ports = (self._bind.port,) if self._bind.port else ports_of(self._bind.ports)
        for port in ports:
            address = joined(self._bind.host, port)
            with contextlib.suppress(RuntimeError):
                if credential is None:
                    return server.add_insecure_port(address)
                # New ones for each port: those of a port that was taken open no other one.
                return server.add_secure_port(address, server_credentials(credential))
        if len(ports) > 1:
            raise PortInUse(
                f"cannot listen on {self._bind.host}",
                where="bind.ports",
                why=f"the address is not ours or each port of {self._bind.ports} is taken",
                next_step="Give the host a longer range in bind.ports, or stop what listens there: ss -ltnp",
            )
        raise PortInUse(
            f"cannot listen on {joined(self._bind.host, ports[0])}",
            why=_holder_of(ports[0]) or "the address is not ours or another process listens there",
            next_step="Stop that process, or choose another port (0 takes a free one).",
        )


def required(bind: BindConfig, credential: Credential | None) -> Credential:
    """Return the credential; raise InvalidConfig where there is none, or one that no client takes."""
    if credential is None:
        raise InvalidConfig(
            "the server has no credential",
            where=f"bind.host {bind.host}",
            why="every user of this host could call it",
            next_step="start the stack (flotilla up), or name its credential in bind.credential_file",
        )
    credential.require_service(f"bind.host {bind.host}")
    return credential


def _holder_of(port: int) -> str:
    """Describe the process that listens on `port`, if the system tells."""
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


class HealthServicer(health_pb2_grpc.HealthServicer):
    """grpc.health.v1 for our servers.

    One status for a fixed set of services and for "", the whole server.
    """

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


def add_reflection(services: Sequence[str], server: grpc.aio.Server) -> None:
    """Let tools list `services` and read their contracts."""
    _add_contract()
    servicer = reflection.aio.ReflectionServicer([*services, *SERVICE_NAMES])
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        reflection_pb2.ServerReflectionRequest.FromString,
        reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers(
        [
            grpc.method_handlers_generic_handler(name, {"ServerReflectionInfo": handler})
            for name in SERVICE_NAMES
        ]
    )


def _add_contract() -> None:
    """Add the contract of v1 to the pool that the servicer answers from."""
    contract = descriptor_pb2.FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(contract)
    text = (
        text_format.MessageToString(contract)
        .replace("v1alpha", "v1")
        .replace("grpc_reflection", "grpc/reflection")
    )
    descriptor_pool.Default().Add(text_format.Parse(text, descriptor_pb2.FileDescriptorProto()))

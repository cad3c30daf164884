"""Who gets a call through, what is said of a certificate that is not good, and how one is replaced."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)

from flotilla.common.v1 import operate_pb2 as pb
from flotilla.common.v1 import operate_pb2_grpc
from flotilla_core import errors, rpc, telemetry
from flotilla_core.rpc.tls import explain
from flotilla_core.trust import Claims, Credential, write_secret
from flotilla_core.trust.certificates import Authority
from flotilla_testing.credentials import credential, expired, ours, role_credential, stranger
from flotilla_testing.servers import check, serving

SERVICE = "flotilla.common.v1.OperateService"
DRAIN = f"/{SERVICE}/Drain"


class Operate(operate_pb2_grpc.OperateServiceServicer):
    """Keeps the names of the calls that reach it."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    async def Check(self, request: pb.CheckRequest, context: Any) -> pb.CheckResponse:
        self.calls.append("Check")
        return pb.CheckResponse()

    async def Drain(self, request: pb.DrainRequest, context: Any) -> pb.DrainResponse:
        self.calls.append("Drain")
        return pb.DrainResponse()


@pytest.fixture
async def serve() -> AsyncIterator[Any]:
    async with AsyncExitStack() as servers:

        async def start(given: Credential, **bind: Any) -> tuple[Operate, str]:
            servicer = Operate()
            return servicer, await servers.enter_async_context(serving(servicer, credential=given, **bind))

        yield start


def parts(path: Path, key: bytes, chain: bytes, authorities: bytes) -> Credential:
    """A credential of parts of others."""
    write_secret(path, (chain + key + authorities).decode())
    return Credential(path)


def of_neither(folder: Path) -> Credential:
    """A credential of the authority of the stack in `folder` that names neither a service nor a role."""
    authorities = credential(folder).read().authorities
    chain, key = Authority.of((folder / "authority.pem").read_text()).issue(Claims("root", "eve", None))
    return parts(folder / "eve.pem", key.encode(), chain.encode(), authorities)


async def test_a_service_is_known_by_each_of_its_addresses(serve: Any) -> None:
    service, address = await serve(ours(), host="0.0.0.0", advertise_host="127.0.0.2")
    assert address.startswith("127.0.0.2:")
    port = address.rpartition(":")[2]
    hosts = {"127.0.0.1", "127.0.0.2", "localhost", socket.gethostname()}
    for host in hosts:
        await check(f"{host}:{port}", ours())
    assert len(service.calls) == len(hosts)


async def test_a_peer_on_a_busy_host_takes_a_second_to_shake_hands_and_loses_no_call(serve: Any) -> None:
    """Each answer of the service arrives late, as from a process that waits for a processor."""
    service, address = await serve(ours())
    host, _, port = address.rpartition(":")

    async def copied(source: asyncio.StreamReader, target: asyncio.StreamWriter, late_s: float) -> None:
        while data := await source.read(1 << 16):
            await asyncio.sleep(late_s)
            target.write(data)
        target.close()

    async def between(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        its_reader, its_writer = await asyncio.open_connection(host, int(port))
        await asyncio.gather(copied(reader, its_writer, 0.0), copied(its_reader, writer, 0.5))

    async with await asyncio.start_server(between, "127.0.0.1", 0) as slow:
        await check(f"127.0.0.1:{slow.sockets[0].getsockname()[1]}", ours())
    assert service.calls == ["Check"]


async def test_a_socket_file_under_any_path_needs_no_credential(serve: Any, tmp_path: Path) -> None:
    folder = tmp_path / "Zoë's runs\u202e"
    folder.mkdir()
    service, address = await serve(ours(), host=f"unix:{folder / 's'}")
    for given in (None, ours()):
        await check(address, given)
    assert service.calls == ["Check"] * 2


async def test_nothing_is_dialled_without_a_credential() -> None:
    with pytest.raises(errors.InvalidConfig, match="credential-file"):
        await check("127.0.0.1:9", None)


async def test_a_call_to_what_is_no_address_fails_as_one_that_nobody_answers() -> None:
    with pytest.raises(errors.Unavailable):
        await check("\u202eabc\ufffd \n", ours())


async def test_a_holder_is_refused_what_is_above_its_role_and_any_role_may_ask_for_health(
    serve: Any, tmp_path: Path
) -> None:
    service, address = await serve(credential(tmp_path))
    with structlog.testing.capture_logs() as logs:
        async with rpc.connect(address, credential=role_credential(tmp_path, "read")) as channel:
            stub = operate_pb2_grpc.OperateServiceStub(channel)
            health: Any = health_pb2_grpc.HealthStub(channel)
            await rpc.unary(health.Check, health_pb2.HealthCheckRequest(), timeout_s=5)
            await rpc.unary(stub.Check, pb.CheckRequest(), timeout_s=5)
            for _ in range(20):
                with pytest.raises(errors.PermissionDenied, match=r"needs the role admin.*has the role read"):
                    await rpc.unary(stub.Drain, pb.DrainRequest(), timeout_s=5)
    assert service.calls == ["Check"]
    (line,) = [log for log in logs if log["event"] == "calls are refused"]
    assert line["peer"] == "ipv4:127.0.0.1" and line["method"] == DRAIN and "role read" in line["why"]


async def test_a_role_ends_under_an_open_connection(serve: Any, tmp_path: Path) -> None:
    service, address = await serve(credential(tmp_path))
    end = int(time.time()) + 2
    async with rpc.connect(address, credential=role_credential(tmp_path, "read", ends_s=end)) as channel:
        stub = operate_pb2_grpc.OperateServiceStub(channel)
        await rpc.unary(stub.Check, pb.CheckRequest(), timeout_s=5)
        while time.time() < end:
            await asyncio.sleep(0.05)
        made = len(service.calls)
        with pytest.raises(errors.Unauthenticated, match=r"of ana \(role read\) has expired.*token create"):
            await rpc.unary(stub.Check, pb.CheckRequest(), timeout_s=5)
    with pytest.raises(errors.InvalidConfig, match=r"CN=read ana.*has expired.*token create"):
        await check(address, Credential(tmp_path / "read-ana.pem"))
    assert len(service.calls) == made


async def test_an_expired_credential_is_named_before_it_calls_and_stops_the_start_of_a_service(
    serve: Any, tmp_path: Path
) -> None:
    service, address = await serve(credential(tmp_path))
    with pytest.raises(errors.InvalidConfig, match=r"CN=service.*has expired.*UTC.*token create"):
        await check(address, expired(tmp_path))
    with pytest.raises(errors.InvalidConfig, match=r"certificate has expired"):
        await serve(expired(tmp_path))
    assert service.calls == []


async def test_a_peer_of_another_authority_is_named_at_the_caller(serve: Any, tmp_path: Path) -> None:
    own, foreign = credential(tmp_path), stranger(tmp_path)
    service, address = await serve(own)
    with pytest.raises(errors.Unavailable, match=r"shows a certificate that is not good.*foreign: we trust"):
        await check(address, foreign)
    # It trusts the service, and the service does not trust it.
    authorities, key, chain = foreign.read()
    trusting = parts(tmp_path / "trusting.pem", key, chain, authorities + own.read().authorities)
    with pytest.raises(errors.Unavailable, match=r"does not take our certificate.*CN=service.*good until"):
        await check(address, trusting)
    assert service.calls == []


async def served_by(given: Credential) -> tuple[grpc.aio.Server, str, list[str]]:
    """What a holder of this credential can put in the place of a service: gRPC itself, without our checks."""
    heard: list[str] = []

    class Heard(grpc.GenericRpcHandler):
        def service(self, details: grpc.HandlerCallDetails) -> None:
            heard.append(details.method)

    authorities, key, chain = given.read()
    server = grpc.aio.server()
    server.add_generic_rpc_handlers([Heard()])
    port = server.add_secure_port(
        "127.0.0.1:0", grpc.ssl_server_credentials([(key, chain)], authorities, True)
    )
    await server.start()
    return server, f"127.0.0.1:{port}", heard


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            lambda folder: role_credential(folder, "admin"),
            "CN=admin ana.*a holder with a role, who is no service",
        ),
        (
            lambda folder: role_credential(folder, "admin", "service.flotilla"),
            "CN=admin service.flotilla.*that of a holder with a role",
        ),
        (of_neither, "CN=root eve.*a holder with a role"),
        (stranger, "foreign: we trust"),
        (expired, "has expired: it was good until"),
    ],
    ids=["admin", "named as a service", "another name", "stranger", "expired"],
)
async def test_who_listens_in_place_of_a_service_gets_no_call_and_is_named(
    tmp_path: Path, given: Any, words: str
) -> None:
    server, address, heard = await served_by(given(tmp_path))
    with pytest.raises(errors.Unavailable, match=f"shows a certificate that is not good.*{words}"):
        await check(address, credential(tmp_path))
    assert heard == []
    await server.stop(0)


async def test_a_service_of_an_older_release_that_speaks_no_tls_is_named() -> None:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    with pytest.raises(errors.Unavailable, match=r"speaks no TLS.*older Flotilla"):
        await check(f"127.0.0.1:{port}", ours())
    await server.stop(0)


async def test_a_connection_that_fails_for_another_reason_keeps_its_error() -> None:
    began = time.monotonic()
    with pytest.raises(errors.Unavailable, match="call failed"):
        await check("127.0.0.1:9", ours())
    assert time.monotonic() - began < 5


async def test_calls_that_break_together_look_at_their_service_once() -> None:
    looks = 0

    async def closes(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal looks
        looks += 1
        writer.close()

    server = await asyncio.start_server(closes, "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    broken = errors.Unavailable("no answer", why="Socket closed")
    async with server:
        found = await asyncio.gather(*(explain(address, ours(), broken) for _ in range(100)))
    assert looks == 1
    assert all(isinstance(one, errors.Unavailable) for one in found), "callers try again"


async def test_a_replaced_credential_is_taken_at_the_next_connection_and_call(
    serve: Any, tmp_path: Path
) -> None:
    given = credential(tmp_path)
    service, address = await serve(given)
    async with rpc.connect(address, credential=given) as channel:
        stub = operate_pb2_grpc.OperateServiceStub(channel)
        await rpc.unary(stub.Check, pb.CheckRequest(), timeout_s=5)
        # Of another authority: what was there before is worth nothing to the other end.
        write_secret(given.path, stranger(tmp_path).path.read_text())
        for _ in range(5):
            await rpc.unary(stub.Check, pb.CheckRequest(), timeout_s=5)
    await check(address, stranger(tmp_path))
    assert len(service.calls) == 7


class Traces(TraceServiceServicer):
    def __init__(self) -> None:
        self.spans = 0

    async def Export(self, request: Any, context: Any) -> ExportTraceServiceResponse:
        self.spans += sum(len(scope.spans) for one in request.resource_spans for scope in one.scope_spans)
        return ExportTraceServiceResponse()


async def exported(endpoint: str, given: Credential | None) -> None:
    telemetry.start("trainer", "trainer-0", [endpoint], credential=given)
    assert telemetry.provider.endpoints() == (endpoint,), "as our children are told"
    telemetry.start_span("one").end()
    await asyncio.to_thread(telemetry.stop)


@pytest.mark.parametrize(
    ("scheme", "who", "arrive"),
    [
        ("https://", credential, 1),
        ("https://", lambda folder: role_credential(folder, "run"), 1),
        ("https://", lambda folder: role_credential(folder, "read"), 0),
        ("https://", stranger, 0),
        ("", credential, 0),
    ],
    ids=["ours", "run", "read", "stranger", "plain"],
)
async def test_spans_reach_the_coordinator_only_by_a_credential_of_its_stack(
    tmp_path: Path, scheme: str, who: Any, arrive: int
) -> None:
    traces = Traces()
    async with serving(traces, credential=credential(tmp_path)) as address:
        await exported(f"{scheme}{address.replace('127.0.0.1', 'localhost')}", who(tmp_path))
    assert traces.spans == arrive


@pytest.mark.parametrize("scheme", ["", "http://"])
async def test_spans_reach_a_collector_of_the_users_in_the_open(scheme: str) -> None:
    traces, server = Traces(), grpc.aio.server()
    add_TraceServiceServicer_to_server(traces, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    await exported(f"{scheme}127.0.0.1:{port}", ours())
    assert traces.spans == 1
    await server.stop(0)

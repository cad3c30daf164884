"""TLS between services: who gets in, what is said of a certificate that is not good, and how one is replaced."""

from __future__ import annotations

import asyncio
import os
import stat
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)

from flotilla.common.v1 import operate_pb2 as pb
from flotilla.common.v1 import operate_pb2_grpc
from flotilla_core import errors, rpc, telemetry
from flotilla_core.config import BindConfig
from flotilla_core.config.stack import TlsConfig
from flotilla_core.rpc.tls import explain
from flotilla_core.trust import Token, certificates
from flotilla_core.trust.certificates import make_certificates, read_certificates

A_MOMENT_AGO = -0.01
SERVICE = "flotilla.common.v1.OperateService"


class Operate(operate_pb2_grpc.OperateServiceServicer):
    def __init__(self) -> None:
        self.calls = 0

    async def Check(self, request: pb.CheckRequest, context: Any) -> pb.CheckResponse:
        self.calls += 1
        return pb.CheckResponse()


def files_in(folder: Path) -> TlsConfig:
    return TlsConfig(
        certificate_file=folder / "certificate.pem", key_file=folder / "key.pem", ca_file=folder / "ca.pem"
    )


def certificate(folder: Path, host: str = "a", days: float = 365) -> TlsConfig:
    return files_in(make_certificates(folder, [host], days)[0])


@pytest.fixture
def tls(tmp_path: Path) -> TlsConfig:
    return certificate(tmp_path / "ours")


@pytest.fixture
async def serve() -> AsyncIterator[Any]:
    servers = []

    async def start(tls: TlsConfig | None, **bind: Any) -> tuple[Operate, str]:
        servicer, server = Operate(), rpc.RpcServer(BindConfig(tls=tls, **bind), token="secret")
        server.add(operate_pb2_grpc.add_OperateServiceServicer_to_server, servicer, SERVICE)
        servers.append(server)
        return servicer, await server.start()

    yield start
    for server in servers:
        await server.stop(0)


async def check(address: str, tls: TlsConfig | None, attempts: int = 1) -> None:
    async with rpc.connect(address, token=Token("secret", tls)) as channel:
        stub = operate_pb2_grpc.OperateServiceStub(channel)
        await rpc.unary(stub.Check, pb.CheckRequest(), timeout_s=10, attempts=attempts)


async def test_both_ends_show_a_certificate_and_the_token_is_asked_for_as_well(
    serve: Any, tls: TlsConfig
) -> None:
    service, address = await serve(tls)
    await check(address, tls)
    await check(address.replace("127.0.0.1", "localhost"), tls)
    async with rpc.connect(address, token=Token("wrong", tls)) as channel:
        with pytest.raises(errors.Unauthenticated):
            await rpc.unary(
                operate_pb2_grpc.OperateServiceStub(channel).Check, pb.CheckRequest(), timeout_s=5
            )
    assert service.calls == 2


async def test_a_socket_file_needs_no_certificate(serve: Any, tls: TlsConfig, tmp_path: Path) -> None:
    service, address = await serve(tls, host=f"unix:{tmp_path}/socket")
    await check(address, tls)
    assert service.calls == 1


async def test_an_expired_certificate_of_a_caller_is_named_before_it_calls(
    serve: Any, tls: TlsConfig, tmp_path: Path
) -> None:
    service, address = await serve(tls)
    old = certificate(tmp_path / "ours", "late", A_MOMENT_AGO)
    with pytest.raises(errors.InvalidConfig, match=r"CN=late.*has expired.*certs init"):
        await check(address, old)
    assert service.calls == 0


async def test_an_expired_certificate_of_a_service_stops_its_start(
    serve: Any, tls: TlsConfig, tmp_path: Path
) -> None:
    old = certificate(tmp_path / "ours", "late", A_MOMENT_AGO)
    with pytest.raises(errors.InvalidConfig, match=r"CN=late.*has expired"):
        await serve(old)


async def test_a_caller_of_another_authority_is_refused_and_learns_whose_certificates_differ(
    serve: Any, tls: TlsConfig, tmp_path: Path
) -> None:
    service, address = await serve(tls)
    foreign = certificate(tmp_path / "theirs", "b")
    with pytest.raises(errors.Unavailable, match=r"shows a certificate that is not good.*foreign"):
        await check(address, foreign)
    # It trusts the service, and the service does not trust it.
    mixed = foreign.model_copy(update={"ca_file": tmp_path / "both.pem"})
    mixed.ca_file.write_text(tls.ca_file.read_text() + foreign.ca_file.read_text())
    with pytest.raises(errors.Unavailable, match=r"does not take our certificate.*CN=b.*good until"):
        await check(address, mixed)
    assert service.calls == 0


async def test_a_certificate_for_another_host_is_named_with_the_hosts_that_it_is_for(
    serve: Any, tls: TlsConfig
) -> None:
    service, address = await serve(tls, host="0.0.0.0")
    port = address.rpartition(":")[2]
    with pytest.raises(errors.Unavailable, match=r"CN=a \(for a, localhost.*is not for 127\.0\.0\.2"):
        await check(f"127.0.0.2:{port}", tls)
    assert service.calls == 0


async def test_calls_that_break_together_look_at_their_service_once(tls: TlsConfig) -> None:
    looks = 0

    async def closes(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal looks
        looks += 1
        writer.close()

    server = await asyncio.start_server(closes, "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    broken = errors.Unavailable("no answer", why="Socket closed")
    async with server:
        for each in (tls, None):
            looks = 0
            found = await asyncio.gather(*(explain(address, each, broken) for _ in range(100)))
            assert looks == 1
            assert all(isinstance(one, errors.Unavailable) for one in found), "callers try again"


def test_a_certificate_for_all_pods_of_a_service_is_for_each_of_them(tmp_path: Path) -> None:
    made = read_certificates(certificate(tmp_path, "*.generator.ns.svc").certificate_file)[0]
    assert certificates.is_for(made, "generator-0.generator.ns.svc")
    assert certificates.is_for(made, "127.0.0.1")
    assert not certificates.is_for(made, "a.generator-0.generator.ns.svc")
    assert not certificates.is_for(made, "generator.ns.svc")


async def test_an_end_without_tls_learns_that_the_other_one_has_it(serve: Any, tls: TlsConfig) -> None:
    service, address = await serve(tls)
    with pytest.raises(errors.Unavailable, match=r"speaks TLS.*bind\.tls"):
        await check(address, None)
    plain, other = await serve(None)
    with pytest.raises(errors.Unavailable, match=r"speaks no TLS.*bind\.tls"):
        await check(other, tls)
    assert service.calls == plain.calls == 0


async def test_a_replaced_certificate_is_taken_at_the_next_connection_and_call(
    serve: Any, tls: TlsConfig, tmp_path: Path
) -> None:
    service, address = await serve(tls)
    async with rpc.connect(address, token=Token("secret", tls)) as channel:
        stub = operate_pb2_grpc.OperateServiceStub(channel)
        await rpc.unary(stub.Check, pb.CheckRequest(), timeout_s=5)
        # Another authority: what was there before is worth nothing to the other end.
        another = make_certificates(tmp_path / "new", ["a"])[0]
        for name in ("key.pem", "certificate.pem", "ca.pem"):
            (another / name).replace(tls.certificate_file.parent / name)
        for _ in range(5):
            await rpc.unary(stub.Check, pb.CheckRequest(), timeout_s=5)
    await check(address, tls)
    assert service.calls == 7


async def test_a_replacement_that_is_not_complete_is_not_used(
    serve: Any, tls: TlsConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    service, address = await serve(tls)
    async with rpc.connect(address, token=Token("secret", tls)) as channel:
        stub = operate_pb2_grpc.OperateServiceStub(channel)
        await rpc.unary(stub.Check, pb.CheckRequest(), timeout_s=5)
        another = make_certificates(tmp_path / "ours", ["b"])[0]
        (another / "key.pem").replace(tls.key_file)
        await rpc.unary(stub.Check, pb.CheckRequest(), timeout_s=5)
        (another / "certificate.pem").replace(tls.certificate_file)
        await rpc.unary(stub.Check, pb.CheckRequest(), timeout_s=5)
    assert service.calls == 3
    assert "key does not belong" in caplog.text


async def test_what_travels_unencrypted_beyond_this_host_is_said_once(serve: Any, tls: TlsConfig) -> None:
    def warnings(logs: list[Any]) -> int:
        return sum("not encrypted" in line["event"] for line in logs)

    with structlog.testing.capture_logs() as logs:
        await serve(None, host="0.0.0.0")
        assert warnings(logs) == 1
        assert "bind.plaintext" in logs[0]["next_step"] and "certs init" in logs[0]["next_step"]
        await serve(None, host="0.0.0.0", plaintext=True)
        await serve(None)
        await serve(tls, host="0.0.0.0")
        assert warnings(logs) == 1


class Traces(TraceServiceServicer):
    def __init__(self) -> None:
        self.spans = 0

    async def Export(self, request: Any, context: Any) -> ExportTraceServiceResponse:
        self.spans += sum(len(scope.spans) for one in request.resource_spans for scope in one.scope_spans)
        return ExportTraceServiceResponse()


@pytest.mark.parametrize("at_the_receiver", [True, False])
async def test_spans_are_sent_by_tls_but_to_an_endpoint_that_says_it_has_none(
    tls: TlsConfig, at_the_receiver: bool
) -> None:
    traces, server = Traces(), rpc.RpcServer(BindConfig(tls=tls if at_the_receiver else None), token="secret")
    server.add(
        add_TraceServiceServicer_to_server, traces, "opentelemetry.proto.collector.trace.v1.TraceService"
    )
    address = await server.start()
    endpoint = address if at_the_receiver else f"http://{address}"
    telemetry.start("trainer", "trainer-0", [endpoint], token=Token("secret", tls))
    telemetry.start_span("one").end()
    await asyncio.to_thread(telemetry.stop)
    await server.stop(0)
    assert traces.spans == 1


def test_certificates_are_their_owners_alone_and_renewed_by_the_same_authority(tmp_path: Path) -> None:
    first, second = make_certificates(tmp_path / "c", ["a", "10.0.0.2"])
    authority = (tmp_path / "c" / "ca.pem").read_text()
    for key in (first / "key.pem", second / "key.pem", tmp_path / "c" / "ca.key"):
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
    one = read_certificates(second / "certificate.pem")[0]
    assert set(certificates.hosts_of(one)) == {"10.0.0.2", "localhost", "127.0.0.1", "::1"}
    assert 364 < certificates.days_left(one) <= 365
    before = (first / "certificate.pem").read_text()
    make_certificates(tmp_path / "c", ["a"], days=10)
    assert (first / "certificate.pem").read_text() != before
    assert (tmp_path / "c" / "ca.pem").read_text() == authority == (first / "ca.pem").read_text()
    assert 9 < certificates.days_left(read_certificates(first / "certificate.pem")[0]) <= 10


async def test_a_connection_that_fails_for_another_reason_keeps_its_error(tls: TlsConfig) -> None:
    began = time.monotonic()
    with pytest.raises(errors.Unavailable, match="call failed"):
        await check("127.0.0.1:9", tls)
    assert time.monotonic() - began < 5


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
@pytest.mark.parametrize(("mode", "refused"), [(0o440, ""), (0o644, "0644")])
def test_the_key_of_a_certificate_is_read_as_kubernetes_mounts_it(
    tmp_path: Path, mode: int, refused: str
) -> None:
    """Files of root's behind two links, in a folder that is replaced as a whole."""
    for folder in (tmp_path, *tmp_path.parents):
        if not folder.stat().st_mode & 0o001:
            folder.chmod(0o711)
    (made,) = make_certificates(tmp_path / "authority", ["a"])
    mount = tmp_path / "mount"
    version = mount / "..2026_11_25"
    version.mkdir(parents=True)
    (mount / "..data").symlink_to(version.name)
    for name in ("key.pem", "certificate.pem", "ca.pem"):
        (version / name).write_bytes((made / name).read_bytes())
        os.chown(version / name, 0, 10001)
        (version / name).chmod(mode)
        (mount / name).symlink_to(f"..data/{name}")
    mount.chmod(0o755)
    version.chmod(0o755)
    program = (
        "import pathlib, sys\n"
        "from flotilla_core.config.stack import TlsConfig\n"
        "from flotilla_core.trust.certificates import TlsFiles\n"
        "import cryptography.x509, os\n"
        "at = pathlib.Path(sys.argv[1])\n"
        "names = {'key_file': 'key.pem', 'certificate_file': 'certificate.pem', 'ca_file': 'ca.pem'}\n"
        "files = TlsFiles(TlsConfig(**{key: at / name for key, name in names.items()}))\n"
        "os.setgid(10001); os.setuid(10001)\n"
        "files.read()\n"
        "print('read')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(mount)], capture_output=True, text=True, check=False
    )
    if refused:
        assert done.returncode != 0 and f"bind.tls.key_file {mount}/key.pem" in done.stderr
        assert f"its mode is {refused}" in done.stderr
    else:
        assert done.stdout == "read\n", done.stderr

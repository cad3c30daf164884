"""The secret of a stack: its file, and what a stranger gains who gets hold of signed calls."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)

from flotilla.common.v1 import operate_pb2 as pb
from flotilla.common.v1 import operate_pb2_grpc
from flotilla_core import errors, rpc, telemetry
from flotilla_core.config import BindConfig
from flotilla_core.trust import HEADER, CallSigner, CallVerifier, make_token, read_token
from flotilla_core.trust import calls as trust_calls

METHOD = "/flotilla.common.v1.OperateService/Check"
OURS = "127.0.0.1:4000"


def verifier(**options: Any) -> CallVerifier:
    return CallVerifier("secret", lambda: frozenset({OURS}), **options)


def test_a_stack_without_a_token_file_gets_one_that_only_its_owner_can_read(tmp_path: Path) -> None:
    with pytest.raises(errors.Unavailable, match="flotilla up"):
        read_token(BindConfig(), tmp_path)
    token = make_token(BindConfig(), tmp_path)
    assert len(token) == 64
    assert make_token(BindConfig(), tmp_path) == read_token(BindConfig(), tmp_path) == token
    assert stat.S_IMODE((tmp_path / "token").stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["token"]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o601])
def test_a_token_file_that_others_may_open_is_refused_with_its_mode_and_the_remedy(
    tmp_path: Path, mode: int
) -> None:
    file = tmp_path / "mine"
    file.write_text("secret")
    file.chmod(mode)
    for use in (read_token, make_token):
        with pytest.raises(errors.InvalidConfig) as caught:
            use(BindConfig(token_file=file), tmp_path)
        for word in ("bind.token_file", str(file), f"{mode:04o}", f"chmod 600 {file}"):
            assert word in str(caught.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b" \n", "is empty"),
        (b"two words", "one printable word"),
        (b"one\nsecond\nthird", "one printable word"),
        (b"\xff\xfe", "not text"),
        (None, "is not there"),
    ],
)
def test_a_token_file_without_a_token_is_refused_by_name(
    tmp_path: Path, content: bytes | None, words: str
) -> None:
    file = tmp_path / "mine"
    if content is not None:
        file.write_bytes(content)
        file.chmod(0o600)
    with pytest.raises(errors.InvalidConfig, match=words) as caught:
        read_token(BindConfig(token_file=file), tmp_path)
    assert str(file) in str(caught.value)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to somebody else")
def test_a_token_file_of_another_user_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "theirs"
    file.write_text("secret")
    file.chmod(0o600)
    os.chown(file, 4711, 4711)
    with pytest.raises(errors.InvalidConfig, match="uid 4711"):
        read_token(BindConfig(token_file=file), tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
@pytest.mark.parametrize(("mode", "refused"), [(0o440, ""), (0o640, ""), (0o444, "0444"), (0o460, "0460")])
def test_a_secret_that_root_mounts_is_read_by_its_group_alone(
    tmp_path: Path, mode: int, refused: str
) -> None:
    """Kubernetes mounts a Secret as files of root's, and `fsGroup` as their group."""
    for folder in (tmp_path, *tmp_path.parents):
        if not folder.stat().st_mode & 0o001:
            folder.chmod(0o711)
    file = tmp_path / "mounted"
    file.write_text("secret")
    os.chown(file, 0, 10001)
    file.chmod(mode)
    read = (
        "import os, pathlib, sys; os.setgid(10001); os.setuid(10001);"
        "from flotilla_core.trust import read_secret;"
        "print(read_secret(pathlib.Path(sys.argv[1]), 'bind.token_file'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"import flotilla_core.trust; {read}", str(file)],
        capture_output=True,
        text=True,
        check=False,
    )
    if refused:
        assert done.returncode != 0
        assert f"its mode is {refused}" in done.stderr
        assert f"chmod 440 {file}" in done.stderr
    else:
        assert done.stdout == "secret\n", done.stderr


def test_a_named_pipe_or_a_folder_in_place_of_the_token_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "token", 0o600)
    with pytest.raises(errors.InvalidConfig, match="not a file"):
        read_token(BindConfig(), tmp_path)
    with pytest.raises(errors.InvalidConfig, match="not a file"):
        read_token(BindConfig(token_file=tmp_path), tmp_path)


def test_a_signature_is_good_once_for_its_method_and_address() -> None:
    ours = verifier()
    signed = CallSigner("secret", OURS).sign(METHOD)
    assert "secret" not in signed
    assert isinstance(ours.refusal("/another/Method", signed), errors.Unauthenticated)
    assert isinstance(ours.refusal(METHOD, signed + "0"), errors.Unauthenticated)
    assert ours.refusal(METHOD, signed) is None
    assert "received before" in str(ours.refusal(METHOD, signed))
    elsewhere = CallSigner("secret", "127.0.0.2:4000").sign(METHOD)
    refused = str(ours.refusal(METHOD, elsewhere))
    assert "127.0.0.2:4000" in refused and OURS in refused


@pytest.mark.parametrize("text", ["", "Flotilla", "Bearer wrong", "Flotilla 1 a 1 x y", "Bearer secrét"])
def test_what_proves_nothing_is_refused(text: str) -> None:
    refusal = verifier().refusal(METHOD, text)
    assert isinstance(refusal, errors.Unauthenticated) and "token" in str(refusal)


def test_a_tool_may_send_the_token_itself() -> None:
    assert verifier().refusal(METHOD, "Bearer secret") is None


def test_a_clock_that_is_wrong_is_named_with_both_times(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, signed = verifier(), CallSigner("secret", OURS).sign(METHOD)
    monkeypatch.setattr(trust_calls, "_now_ms", lambda: time.time_ns() // 1_000_000 + 301_000)
    refusal = ours.refusal(METHOD, signed)
    assert "clocks" in str(refusal) and str(refusal).count("UTC") == 2
    assert isinstance(refusal, errors.Unavailable), "it is over once the clock is right"


def test_calls_may_overtake_each_other_and_are_still_taken_once() -> None:
    ours, signer = verifier(), CallSigner("secret", OURS)
    signed = [signer.sign(METHOD) for _ in range(trust_calls.WINDOW + 2)]
    order = [*reversed(range(2, 500)), *range(500, len(signed))]
    assert all(ours.refusal(METHOD, signed[index]) is None for index in order)
    assert all(ours.refusal(METHOD, signed[index]) is not None for index in order)
    # So far behind the newest that nobody remembers it: as good as received before.
    assert ours.refusal(METHOD, signed[0]) is not None


def test_what_was_signed_before_the_service_began_is_asked_for_again() -> None:
    signed = CallSigner("secret", OURS).sign(METHOD)
    time.sleep(0.002)  # the resolution of the stated time
    later = verifier(shares_our_clock=True)
    assert isinstance(later.refusal(METHOD, signed), errors.Unavailable)


def test_a_clock_that_was_ahead_when_the_service_began_locks_nobody_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: right() + 3600 * 10**9)
    ours = verifier(shares_our_clock=True)
    monkeypatch.setattr(time, "time_ns", right)
    assert ours.refusal(METHOD, CallSigner("secret", OURS).sign(METHOD)) is None


def test_senders_that_have_gone_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = verifier()
    for _ in range(50):
        assert ours.refusal(METHOD, CallSigner("secret", OURS).sign(METHOD)) is None
    later = time.monotonic_ns() + 11 * 60 * 10**9
    monkeypatch.setattr(time, "monotonic_ns", lambda: later)
    assert ours.refusal(METHOD, CallSigner("secret", OURS).sign(METHOD)) is None
    assert len(ours._senders) == 1


class Operate(operate_pb2_grpc.OperateServiceServicer):
    """Counts the calls that reach it, and keeps the headers of the last one."""

    def __init__(self) -> None:
        self.calls = 0
        self.headers: dict[str, Any] = {}

    async def Check(self, request: pb.CheckRequest, context: Any) -> pb.CheckResponse:
        self.calls += 1
        self.headers = dict(context.invocation_metadata())
        return pb.CheckResponse()


@pytest.fixture
async def serve() -> AsyncIterator[Any]:
    servers = []

    async def start(bind: BindConfig, token: str = "secret") -> tuple[Operate, str]:
        servicer, server = Operate(), rpc.RpcServer(bind, token=token)
        server.add(
            operate_pb2_grpc.add_OperateServiceServicer_to_server,
            servicer,
            "flotilla.common.v1.OperateService",
        )
        servers.append(server)
        return servicer, await server.start()

    yield start
    for server in servers:
        await server.stop(0)


async def check(address: str, **options: Any) -> None:
    async with rpc.connect(address, **options) as channel:
        stub = operate_pb2_grpc.OperateServiceStub(channel)
        await rpc.unary(stub.Check, pb.CheckRequest(), timeout_s=5)


async def test_a_stranger_who_is_dialled_in_place_of_a_service_gains_nothing(serve: Any) -> None:
    """A listener on the same port of another loopback address takes the call, and passes it on to the service."""
    service, address = await serve(BindConfig())
    port = int(address.rpartition(":")[2])
    stranger = f"127.0.0.2:{port}"
    headers: dict[str, str] = {HEADER: CallSigner("secret", stranger).sign(METHOD)}
    async with rpc.connect(address) as channel:
        stub = operate_pb2_grpc.OperateServiceStub(channel)
        with pytest.raises(errors.Unauthenticated, match=r"signed for 127\.0\.0\.2"):
            await rpc.unary(_with(stub.Check, headers), pb.CheckRequest(), timeout_s=5)
    assert service.calls == 0


def _with(method: Any, headers: dict[str, str]) -> Any:
    def call(request: Any, *, metadata: Any = None, **options: Any) -> Any:
        return method(request, metadata=(*(metadata or ()), *headers.items()), **options)

    return call


async def test_a_call_never_carries_the_token(serve: Any) -> None:
    service, address = await serve(BindConfig())
    await check(address, token="secret")
    assert service.calls == 1
    assert service.headers[HEADER].startswith("Flotilla ")
    assert not [key for key, value in service.headers.items() if "secret" in str(value)]


async def test_a_service_takes_calls_by_each_of_its_own_names(serve: Any) -> None:
    service, address = await serve(BindConfig(host="0.0.0.0"))
    outward, _, port = address.rpartition(":")
    names = {outward, "127.0.0.1", "localhost", socket.gethostname()}
    for host in names:
        await check(f"{host}:{port}", token="secret")
    assert service.calls == len(names)
    behind, advertised = await serve(BindConfig(advertise_host="127.0.0.2"))
    signed = CallSigner("secret", advertised).sign(METHOD)
    async with rpc.connect(advertised.replace("127.0.0.2", "127.0.0.1")) as channel:
        stub = operate_pb2_grpc.OperateServiceStub(channel)
        await rpc.unary(_with(stub.Check, {HEADER: signed}), pb.CheckRequest(), timeout_s=5)
    assert behind.calls == 1


async def test_a_socket_under_any_path_takes_signed_calls(serve: Any, tmp_path: Path) -> None:
    folder = tmp_path / "Zoë's runs\u202e"
    folder.mkdir()
    service, address = await serve(BindConfig(host=f"unix:{folder / 's'}"))
    await check(address, token="secret")
    assert service.calls == 1


async def test_a_call_to_what_is_no_address_fails_as_one_that_nobody_answers() -> None:
    with pytest.raises(errors.Unavailable):
        await check("\u202eabc\ufffd \n", token="secret")


async def test_a_service_of_another_stack_refuses_ours(serve: Any) -> None:
    service, address = await serve(BindConfig(), "another")
    with pytest.raises(errors.Unauthenticated):
        await check(address, token="secret")
    assert service.calls == 0


class Traces(TraceServiceServicer):
    """Counts the spans that reach a server which asks for a proof."""

    def __init__(self) -> None:
        self.spans = 0

    async def Export(self, request: Any, context: Any) -> ExportTraceServiceResponse:
        self.spans += sum(len(scope.spans) for one in request.resource_spans for scope in one.scope_spans)
        return ExportTraceServiceResponse()


@pytest.mark.parametrize(("token", "arrive"), [("secret", 1), (None, 0), ("another", 0)])
async def test_spans_reach_the_coordinator_only_with_the_secret_of_its_stack(
    token: str | None, arrive: int
) -> None:
    traces, server = Traces(), rpc.RpcServer(BindConfig(), token="secret")
    server.add(
        add_TraceServiceServicer_to_server, traces, "opentelemetry.proto.collector.trace.v1.TraceService"
    )
    address = await server.start()
    telemetry.start("trainer", "trainer-0", [address.replace("127.0.0.1", "localhost")], token=token)
    telemetry.start_span("one").end()
    await asyncio.to_thread(telemetry.stop)
    assert traces.spans == arrive
    await server.stop(0)

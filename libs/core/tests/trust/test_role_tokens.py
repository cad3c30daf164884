"""Tokens with a role: what their holders may do, and what a changed or old one is worth."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from flotilla.common.v1 import operate_pb2 as pb
from flotilla.common.v1 import operate_pb2_grpc
from flotilla.common.v1.roles import ROLES
from flotilla_core import errors, rpc
from flotilla_core.config import BindConfig
from flotilla_core.trust import (
    CallSigner,
    CallVerifier,
    Claims,
    TokenFile,
    check_is_secret,
    make_role_token,
    write_secret,
)
from flotilla_core.trust.refusals import RefusalLog
from flotilla_core.trust.role_tokens import LADDER

OURS = "127.0.0.1:4000"
SERVICE = "flotilla.common.v1.OperateService"
CHECK = f"/{SERVICE}/Check"  # read
SCORE = "/flotilla.reward.v1.RewardService/Score"  # run
DRAIN = f"/{SERVICE}/Drain"  # admin


def verifier(secret: str = "secret") -> CallVerifier:
    return CallVerifier(secret, lambda: frozenset({OURS}))


def token(role: str = "read", ends_s: int | None = None) -> str:
    return make_role_token("secret", Claims(role, "ana", ends_s))


def headers(method: str, given: str) -> list[str]:
    """Both forms in which a holder proves itself: signed, and as a tool of others sends it."""
    return [CallSigner(given, OURS).sign(method), f"Bearer {given}"]


@pytest.mark.parametrize("role", LADDER)
@pytest.mark.parametrize("method", [CHECK, SCORE, DRAIN])
def test_a_role_may_do_what_the_roles_below_it_may(role: str, method: str) -> None:
    needed = ROLES[method]
    for header in headers(method, token(role)):
        refusal = verifier().refusal(method, header)
        if LADDER.index(role) >= LADDER.index(needed):
            assert refusal is None
        else:
            assert isinstance(refusal, errors.PermissionDenied)
            assert f"needs the role {needed}" in str(refusal) and f"of ana has the role {role}" in str(
                refusal
            )


def test_the_secret_of_the_stack_may_do_all() -> None:
    for method in ROLES:
        for header in headers(method, "secret"):
            assert verifier().refusal(method, header) is None


def test_a_call_that_no_table_knows_needs_admin() -> None:
    for header in headers("/another.Service/Call", token("run")):
        assert isinstance(verifier().refusal("/another.Service/Call", header), errors.PermissionDenied)
    assert (
        verifier().refusal("/another.Service/Call", headers("/another.Service/Call", token("admin"))[0])
        is None
    )


def test_an_expired_token_says_whose_it_was_and_until_when() -> None:
    good, over = token(ends_s=int(time.time()) + 60), token(ends_s=int(time.time()) - 1)
    for header in headers(CHECK, good):
        assert verifier().refusal(CHECK, header) is None
    for header in headers(CHECK, over):
        refusal = verifier().refusal(CHECK, header)
        assert isinstance(refusal, errors.Unauthenticated)
        assert "of ana" in str(refusal) and "UTC" in str(refusal) and "token create" in str(refusal)


@pytest.mark.parametrize(
    ("part", "by"), [("read", "admin"), ("ana", "eve"), (":never:", ":99999999999:"), ("flotilla:read:", "")]
)
def test_a_token_whose_claims_were_changed_is_worth_nothing(part: str, by: str) -> None:
    changed = token().replace(part, by, 1)
    assert changed != token()
    for header in headers(CHECK, changed):
        assert isinstance(verifier().refusal(CHECK, header), errors.Unauthenticated)


def test_the_claims_in_the_header_of_a_signed_call_are_signed_too() -> None:
    signed = CallSigner(token(), OURS).sign(CHECK)
    assert token().rpartition(":")[2] not in signed
    for changed in (signed.replace("read:", "admin:"), signed.replace("read:ana:never ", "")):
        assert isinstance(verifier().refusal(CHECK, changed), errors.Unauthenticated)
    assert verifier().refusal(CHECK, signed) is None
    assert "received before" in str(verifier_after(signed).refusal(CHECK, signed))


def verifier_after(signed: str) -> CallVerifier:
    ours = verifier()
    assert ours.refusal(CHECK, signed) is None
    return ours


def test_a_holder_cannot_use_up_the_calls_of_another_sender() -> None:
    ours, service = verifier(), CallSigner("secret", OURS)
    holder = CallSigner(token(), OURS)
    holder._sender = service._sender
    for _ in range(5):
        assert ours.refusal(CHECK, holder.sign(CHECK)) is None
        assert ours.refusal(CHECK, service.sign(CHECK)) is None


def test_a_token_of_another_stack_is_refused() -> None:
    for header in headers(CHECK, make_role_token("another", Claims("admin", "ana", None))):
        assert isinstance(verifier().refusal(CHECK, header), errors.Unauthenticated)


@pytest.mark.parametrize("name", ["", "an a", "a:b", "x" * 65, "ä"])
def test_a_name_that_does_not_fit_into_a_token_is_refused(name: str) -> None:
    with pytest.raises(errors.InvalidRequest, match="no name of a holder"):
        make_role_token("secret", Claims("read", name, None))


def test_a_token_with_a_role_neither_makes_tokens_nor_runs_a_service() -> None:
    with pytest.raises(errors.PermissionDenied):
        make_role_token(token("admin"), Claims("read", "ana", None))
    with pytest.raises(errors.InvalidConfig, match="role admin is for callers"):
        check_is_secret(token("admin"), "bind.token_file")


class Operate(operate_pb2_grpc.OperateServiceServicer):
    def __init__(self) -> None:
        self.calls: list[str] = []

    async def Check(self, request: pb.CheckRequest, context: Any) -> pb.CheckResponse:
        self.calls.append("Check")
        return pb.CheckResponse()

    async def Drain(self, request: pb.DrainRequest, context: Any) -> pb.DrainResponse:
        self.calls.append("Drain")
        return pb.DrainResponse()


@pytest.fixture
async def served() -> AsyncIterator[tuple[Operate, str]]:
    servicer, server = Operate(), rpc.RpcServer(BindConfig(), token="secret")
    server.add(operate_pb2_grpc.add_OperateServiceServicer_to_server, servicer, SERVICE)
    yield servicer, await server.start()
    await server.stop(0)


async def test_a_holder_finds_its_token_in_a_file_and_is_refused_what_is_above_its_role(
    served: tuple[Operate, str], tmp_path: Path
) -> None:
    servicer, address = served
    write_secret(tmp_path / "mine", token())
    with structlog.testing.capture_logs() as logs:
        async with rpc.connect(address, token=TokenFile(tmp_path / "mine")) as channel:
            stub = operate_pb2_grpc.OperateServiceStub(channel)
            await rpc.unary(stub.Check, pb.CheckRequest(), timeout_s=5)
            for _ in range(20):
                with pytest.raises(errors.PermissionDenied, match=r"needs the role admin.*has the role read"):
                    await rpc.unary(stub.Drain, pb.DrainRequest(), timeout_s=5)
    assert servicer.calls == ["Check"]
    (line,) = [log for log in logs if log["event"] == "calls are refused"]
    assert line["peer"] == "ipv4:127.0.0.1" and line["method"] == DRAIN and "role read" in line["why"]


def test_one_line_a_peer_and_minute_and_a_bounded_memory_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    now, error = 1000.0, errors.Unauthenticated("no", where=CHECK)
    monkeypatch.setattr(time, "monotonic", lambda: now)
    log = RefusalLog()
    with structlog.testing.capture_logs() as logs:
        for port in range(50):
            log.tell(f"ipv4:10.0.0.1:{port}", error)
            log.tell(f"ipv6:%5B::1%5D:{port}", error)
        now += 61
        log.tell("ipv4:10.0.0.1:7", error)
        for number in range(3000):
            log.tell(f"ipv4:10.1.{number >> 8}.{number & 255}:1", error)
    assert [line["more_before"] for line in logs if line["peer"] == "ipv4:10.0.0.1"] == [0, 49]
    assert len([line for line in logs if line["peer"].startswith("ipv6:")]) == 1
    assert len(log._told) <= 1000

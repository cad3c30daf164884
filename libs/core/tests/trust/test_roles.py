"""What the names of a certificate allow its holder, and what is logged of those who are refused."""

from __future__ import annotations

import time

import pytest
import structlog

from flotilla.common.v1.roles import ROLES
from flotilla_core import errors
from flotilla_core.trust.refusals import RefusalLog
from flotilla_core.trust.roles import ADMIN, LADDER, READ, RUN, SERVICE, Claims, identity, refusal

CHECK = "/flotilla.common.v1.OperateService/Check"
SCORE = "/flotilla.reward.v1.RewardService/Score"
DRAIN = "/flotilla.common.v1.OperateService/Drain"
HEALTH = "/grpc.health.v1.Health/Check"


STACK = {"peer_dns": [b"service.flotilla"]}


def holder(role: str = READ, ends_s: int | None = None) -> dict[str, list[bytes]]:
    return {"peer_uri": [f"flotilla:{Claims(role, 'ana', ends_s)}".encode()]}


@pytest.mark.parametrize("role", LADDER)
@pytest.mark.parametrize("method", [CHECK, SCORE, DRAIN, HEALTH])
def test_a_role_may_do_what_the_roles_below_it_may(role: str, method: str) -> None:
    needed = ROLES[method]
    refused = refusal(holder(role), method, fenced=False)
    if LADDER.index(role) >= LADDER.index(needed):
        assert refused is None
    else:
        assert isinstance(refused, errors.PermissionDenied)
        assert f"needs the role {needed}" in str(refused) and f"of ana has the role {role}" in str(refused)


def test_the_stack_itself_may_do_all() -> None:
    for method in (*ROLES, "/another.Service/Call"):
        assert refusal(STACK, method, fenced=True) is None


def test_a_call_that_no_table_knows_needs_admin() -> None:
    assert isinstance(refusal(holder(RUN), "/another.Service/Call", fenced=False), errors.PermissionDenied)
    assert refusal(holder(ADMIN), "/another.Service/Call", fenced=False) is None


@pytest.mark.parametrize("method", [CHECK, HEALTH])
def test_an_expired_credential_says_whose_it_was_and_until_when(method: str) -> None:
    assert refusal(holder(ends_s=int(time.time()) + 60), method, fenced=False) is None
    refused = refusal(holder(ends_s=int(time.time()) - 1), method, fenced=False)
    assert isinstance(refused, errors.Unauthenticated)
    assert "of ana" in str(refused) and "UTC" in str(refused) and "token create" in str(refused)


@pytest.mark.parametrize(
    "shown",
    [
        {},
        {"peer_dns": [], "peer_uri": [b""]},
        {"peer_dns": [b"other.flotilla"], "peer_ip": [b"127.0.0.1"]},
        {"peer_dns": [b"a.service.flotilla", b"*.flotilla", b"service.flotilla."]},
        {"peer_dns": [b"flotilla:admin:eve:never"]},
        # Names of another sort, which an authority of a company may let anybody have.
        {"peer_uri": [b"service.flotilla"], "peer_email": [b"service.flotilla"]},
        {"x509_common_name": [b"service.flotilla"], "x509_subject_alternative_name": [b"service.flotilla"]},
        {"peer_uri": [b"flotilla:root:eve:never"]},
        {"peer_uri": [b"flotilla:admin:eve"]},
        {"peer_uri": [b"flotilla:admin:eve:never:"]},
        {"peer_uri": [b"flotilla:admin:e ve:never"]},
        {"peer_uri": [b"flotilla:"]},
        {"peer_uri": [b"\xff\xfe"]},
        # A name that is none is not made good by another one.
        STACK | {"peer_uri": [b"flotilla:root:eve:never"]},
    ],
    ids=str,
)
def test_who_is_named_neither_a_service_nor_a_role_may_do_nothing(shown: dict[str, list[bytes]]) -> None:
    for method in (CHECK, HEALTH):
        refused = refusal(shown, method, fenced=False)
        assert isinstance(refused, errors.Unauthenticated) and "neither a service nor a role" in str(refused)


def test_with_a_role_beside_it_the_name_of_the_stack_counts_for_nothing() -> None:
    assert identity(STACK | holder()) == Claims(READ, "ana", None)
    assert identity(STACK) is SERVICE


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

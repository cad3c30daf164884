"""The secret of a stack is replaced while services and clients use it."""

from __future__ import annotations

import asyncio
import os
import secrets
import stat
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from flotilla.common.v1 import operate_pb2 as pb
from flotilla.common.v1 import operate_pb2_grpc
from flotilla.common.v1.registration_pb2 import Registration
from flotilla_core import errors, rpc
from flotilla_core.config import BindConfig
from flotilla_core.trust import (
    Claims,
    RegistrationSigner,
    RegistrationVerifier,
    TokenFile,
    make_role_token,
    make_token,
    read_token,
    rotate_token,
    write_secret,
)

SERVICE = "flotilla.common.v1.OperateService"
OVERLAP_S = 1.5


class Operate(operate_pb2_grpc.OperateServiceServicer):
    async def Check(self, request: pb.CheckRequest, context: Any) -> pb.CheckResponse:
        return pb.CheckResponse()


@pytest.fixture
def bind(tmp_path: Path) -> BindConfig:
    bind = BindConfig(token_overlap_s=OVERLAP_S)
    make_token(bind, tmp_path)
    return bind


@pytest.fixture
async def address(bind: BindConfig, tmp_path: Path) -> AsyncIterator[str]:
    server = rpc.RpcServer(bind, token=TokenFile.of_stack(bind, tmp_path))
    server.add(operate_pb2_grpc.add_OperateServiceServicer_to_server, Operate(), SERVICE)
    yield await server.start()
    await server.stop(0)


async def check(address: str, token: Any) -> None:
    async with rpc.connect(address, token=token) as channel:
        await rpc.unary(operate_pb2_grpc.OperateServiceStub(channel).Check, pb.CheckRequest(), timeout_s=5)


async def refused_within(address: str, token: str, limit_s: float) -> float:
    """Call until the token is refused; after how many seconds it was."""
    began = time.monotonic()
    while time.monotonic() - began < limit_s:
        try:
            await check(address, token)
        except errors.Unauthenticated:
            return time.monotonic() - began
    raise AssertionError(f"the previous token was still good after {limit_s:g} s")


async def test_a_stream_of_calls_never_fails_while_the_token_is_replaced(
    address: str, bind: BindConfig, tmp_path: Path
) -> None:
    old = read_token(bind, tmp_path)
    role = make_role_token(old, Claims("read", "ana", None))
    ended = asyncio.Event()

    async def calls(token: Any) -> int:
        made = 0
        async with rpc.connect(address, token=token) as channel:
            stub = operate_pb2_grpc.OperateServiceStub(channel)
            while not ended.is_set():
                await rpc.unary(stub.Check, pb.CheckRequest(), timeout_s=5, attempts=1)
                made += 1
        return made

    callers = [asyncio.create_task(calls(TokenFile.of_stack(bind, tmp_path))) for _ in range(4)]
    await check(address, role)
    rotate_token(bind, tmp_path)
    new = read_token(bind, tmp_path)
    assert new != old
    for good in (new, old, role):
        await check(address, good)
    after = await refused_within(address, old, OVERLAP_S + 5)
    assert after > OVERLAP_S / 2, "the previous token is good for the overlap"
    with pytest.raises(errors.Unauthenticated):
        await check(address, role)
    await check(address, new)
    await check(address, make_role_token(new, Claims("read", "ana", None)))
    ended.set()
    assert min(await asyncio.gather(*callers)) > 10


async def test_a_second_rotation_ends_the_first_token_at_once(
    address: str, bind: BindConfig, tmp_path: Path
) -> None:
    old = read_token(bind, tmp_path)
    for _ in range(2):
        rotate_token(bind, tmp_path)
        await check(address, read_token(bind, tmp_path))
    with pytest.raises(errors.Unauthenticated):
        await check(address, old)


async def test_a_service_that_looks_late_does_not_lengthen_the_overlap(
    address: str, bind: BindConfig, tmp_path: Path
) -> None:
    old = read_token(bind, tmp_path)
    rotate_token(bind, tmp_path)
    replaced_s = (tmp_path / "token").stat().st_ctime
    while time.time() < replaced_s + OVERLAP_S:
        await asyncio.sleep(0.05)
    with pytest.raises(errors.Unauthenticated):
        await check(address, old)


def test_a_file_that_is_being_written_or_is_gone_leaves_the_token_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "token"
    write_secret(file, "first")
    kept = TokenFile(file)
    file.write_text("")
    assert kept.current() == "first"
    file.unlink()
    assert kept.current() == "first"
    file.write_text("open to all")
    assert kept.current() == "first"
    write_secret(file, "second")
    assert kept.accepted() == ("second", "first")
    os.utime(file)
    assert kept.accepted() == ("second", "first")


async def test_hosts_change_one_after_the_other_while_both_tokens_are_in_their_files(tmp_path: Path) -> None:
    """Each step of one host and of the other, in every order that the three steps leave, is served."""
    files, servers = [tmp_path / "one", tmp_path / "other"], []
    for file in files:
        write_secret(file, "old")
    for file in files:
        server = rpc.RpcServer(BindConfig(), token=TokenFile(file, overlap_s=0))
        server.add(operate_pb2_grpc.add_OperateServiceServicer_to_server, Operate(), SERVICE)
        servers.append((server, await server.start()))
    callers = [TokenFile(file) for file in files]
    for content in ("old\nnew", "new\nold", "new"):
        for file in files:
            write_secret(file, content)
            for caller in callers:
                for _, address in servers:
                    await check(address, caller)
    for server, address in servers:
        with pytest.raises(errors.Unauthenticated):
            await check(address, "old")
        await server.stop(0)


def test_rotation_leaves_one_complete_file_that_its_owner_alone_can_read(
    bind: BindConfig, tmp_path: Path
) -> None:
    rotate_token(bind, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["token"]
    assert stat.S_IMODE((tmp_path / "token").stat().st_mode) == 0o600
    assert len(read_token(bind, tmp_path)) == 64


def test_a_token_file_of_the_user_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "mine"
    write_secret(file, "secret")
    with pytest.raises(errors.FailedPrecondition, match=r"bind\.token_file"):
        rotate_token(BindConfig(token_file=file), tmp_path)
    assert file.read_text() == "secret\n"


def test_registrations_of_both_sides_of_a_rotation_are_read(bind: BindConfig, tmp_path: Path) -> None:
    late = RegistrationSigner(read_token(bind, tmp_path))
    signer = RegistrationSigner(TokenFile.of_stack(bind, tmp_path))
    reader = RegistrationVerifier(TokenFile.of_stack(bind, tmp_path))
    rotate_token(bind, tmp_path)
    for one in (late, signer):
        registration = Registration(instance_id=secrets.token_hex(4))
        assert reader.read(registration.instance_id, one.sign(registration)) == registration
    stranger = RegistrationSigner("another").sign(Registration(instance_id="x"))
    assert isinstance(reader.read("x", stranger), str)

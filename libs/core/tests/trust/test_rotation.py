"""The authority of a stack is replaced while services and clients use it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from flotilla.common.v1 import operate_pb2 as pb
from flotilla.common.v1 import operate_pb2_grpc
from flotilla_core import errors, rpc
from flotilla_core.rpc import server as rpc_server
from flotilla_core.trust import Credential, write_secret
from flotilla_core.trust.authority import rotate
from flotilla_core.trust.certificates import own_problem
from flotilla_testing.credentials import credential, role_credential
from flotilla_testing.servers import Checked, check, serving

OVERLAP_S = 3.0


class Operate(Checked):
    async def Profile(self, request: pb.ProfileRequest, context: Any) -> pb.ProfileResponse:
        await asyncio.sleep(2)
        return pb.ProfileResponse(collapsed_stacks="whole")


def copy(given: Credential, path: Path) -> Credential:
    write_secret(path, given.path.read_text())
    return Credential(path)


@pytest.fixture
async def serve(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    """Start servers whose connections live for a moment."""
    options = dict(rpc_server.SERVER_OPTIONS)
    assert options["grpc.max_connection_age_ms"] == 600_000
    monkeypatch.setattr(
        rpc_server, "SERVER_OPTIONS", [*(options | {"grpc.max_connection_age_ms": 300}).items()]
    )
    async with AsyncExitStack() as servers:
        yield lambda given: servers.enter_async_context(serving(Operate(), credential=given))


async def calls_until(ended: asyncio.Event, address: str, given: Credential) -> int:
    """Call again and again over one channel; none of the calls may fail."""
    made = 0
    async with rpc.connect(address, credential=given) as channel:
        stub = operate_pb2_grpc.OperateServiceStub(channel)
        while not ended.is_set():
            await rpc.unary(stub.Check, pb.CheckRequest(), timeout_s=5, attempts=1)
            made += 1
    return made


async def test_calls_never_fail_while_the_authority_is_replaced_and_what_it_signed_ends_with_the_overlap(
    serve: Any, tmp_path: Path
) -> None:
    ours = credential(tmp_path)
    address, ended, over = await serve(ours), asyncio.Event(), asyncio.Event()
    role, old = role_credential(tmp_path, "read"), copy(ours, tmp_path / "old.pem")
    callers = [asyncio.create_task(calls_until(ended, address, ours)) for _ in range(3)]
    # These go on by what the old authority signed, over connections that end all the time.
    older = [asyncio.create_task(calls_until(over, address, one)) for one in (role, old)]
    await asyncio.sleep(0.5)
    assert rotate(tmp_path, OVERLAP_S) == ours.path
    began = time.time()
    for good in (ours, old, role, role_credential(tmp_path, "run")):
        await check(address, good)
    await asyncio.sleep(OVERLAP_S / 2)
    over.set()
    assert min(await asyncio.gather(*older)) > 10
    while time.time() < began + OVERLAP_S + 1:
        await asyncio.sleep(0.05)
    for bad in (old, role):
        with pytest.raises(errors.Unavailable, match="is foreign: we trust"):
            await check(address, bad)
    for good in (ours, role_credential(tmp_path, "run")):
        await check(address, good)
    ended.set()
    assert min(await asyncio.gather(*callers)) > 10


async def test_an_open_connection_of_the_old_authority_ends_with_its_age(serve: Any, tmp_path: Path) -> None:
    ours, role = credential(tmp_path), role_credential(tmp_path, "read")
    address = await serve(ours)
    async with rpc.connect(address, credential=role) as channel:
        stub = operate_pb2_grpc.OperateServiceStub(channel)
        await rpc.unary(stub.Check, pb.CheckRequest(), timeout_s=5)
        rotate(tmp_path, 0)
        with pytest.raises(errors.Unavailable, match="is foreign"):
            async with asyncio.timeout(10):
                while True:
                    await rpc.unary(stub.Check, pb.CheckRequest(), timeout_s=5, attempts=1)
    await check(address, ours)


async def test_a_call_that_runs_ends_on_its_connection(serve: Any, tmp_path: Path) -> None:
    address = await serve(credential(tmp_path))
    async with rpc.connect(address, credential=role_credential(tmp_path, "admin")) as channel:
        stub = operate_pb2_grpc.OperateServiceStub(channel)
        call = asyncio.create_task(rpc.unary(stub.Profile, pb.ProfileRequest(), timeout_s=10, attempts=1))
        await asyncio.sleep(0.2)
        rotate(tmp_path, 0)
        assert (await call).collapsed_stacks == "whole"


async def test_hosts_change_one_after_the_other_within_the_overlap(serve: Any, tmp_path: Path) -> None:
    """Each host serves each other one before, between and after they get their copies of the new credential."""
    ours = credential(tmp_path)
    hosts = [ours, copy(ours, tmp_path / "one.pem"), copy(ours, tmp_path / "other.pem")]
    addresses = [await serve(host) for host in hosts]

    async def all_call_all() -> None:
        for address in addresses:
            for host in hosts:
                await check(address, host)

    await all_call_all()
    rotate(tmp_path, 60)
    await all_call_all()
    for host in hosts[1:]:
        copy(ours, host.path)
        await all_call_all()


async def test_a_second_rotation_ends_what_the_first_authority_signed_at_once(
    serve: Any, tmp_path: Path
) -> None:
    ours = credential(tmp_path)
    address, first = await serve(ours), role_credential(tmp_path, "read", "first")
    rotate(tmp_path, 60)
    second = role_credential(tmp_path, "read", "second")
    rotate(tmp_path, 60)
    for good in (ours, second):
        await check(address, good)
    with pytest.raises(errors.Unavailable):
        await check(address, first)


def test_rotation_leaves_complete_files_and_no_other(tmp_path: Path) -> None:
    ours = credential(tmp_path)
    before = (tmp_path / "authority.pem").read_text()
    rotate(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["authority.pem", "credential.pem"]
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in tmp_path.iterdir())
    assert (tmp_path / "authority.pem").read_text() != before
    assert own_problem(ours.read()) == ""
    ours.require_service("here")

"""What a credential opens on a fleet that works: while it is replaced, when it ends, elsewhere, and in false hands."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from contract.callers import (
    SERVICES,
    address_of,
    context_of,
    nats_of,
    outcome,
    role_file,
    told_by,
    user_of,
)
from older_fleet import LAUNCHER_PORT, OlderFleet

from flotilla.common.v1 import registration_pb2 as reg
from flotilla_client import connect
from flotilla_coordinator.ledger.checker import check
from flotilla_core import rpc
from flotilla_core.bus.registry import HEARTBEAT_S
from flotilla_core.errors import PermissionDenied
from flotilla_core.trust import Credential
from flotilla_testing.command_line import run_command
from flotilla_testing.credentials import stranger
from flotilla_testing.fuzzed_fleet import MADE_UP_SAMPLES
from flotilla_testing.runs import small_run
from flotilla_testing.stack import Outcome, Stack, wait_until

pytestmark = pytest.mark.timeout(300)

CHECK = SERVICES["flotilla.common.v1.OperateService"][1]
OVERLAP_S = 4
WAIT_S = 60.0


@pytest.fixture(scope="module")
def stack(older: OlderFleet) -> Stack:
    return older.stack


@contextlib.contextmanager
def going_on(stack: Stack, arithmetic: Path, folder: Path) -> Iterator[dict[str, Any]]:
    """Start a run that goes on, and stop it some steps later: nothing is lost or trained twice."""
    file = small_run(arithmetic, folder / "run.yaml", name="trust", steps=1000)
    run: dict[str, Any] = stack.ok("run", "start", str(file), *MADE_UP_SAMPLES)
    try:
        further_steps(stack, run)
        yield run
        further_steps(stack, run)
    finally:
        stack.ok("run", "stop", run["run_id"])
    wait_until("the end of the run", lambda: stack.state(run) == "stopped", WAIT_S)
    verdict = check(stack.directory / "ledger.sqlite", run["run_id"])
    assert verdict.passed and verdict.lost == verdict.trained_twice == 0, str(verdict)


def further_steps(stack: Stack, run: dict[str, Any]) -> None:
    done = len(stack.metrics(run))
    wait_until("two further steps", lambda: len(stack.metrics(run)) >= done + 2, WAIT_S)


def answer(stack: Stack, holder: Credential, name: str = "reward-0") -> grpc.StatusCode:
    """Return what a call is answered that connects anew."""

    async def asked() -> grpc.StatusCode:
        async with rpc.connect(address_of(stack, name), credential=holder) as channel:
            return await outcome(channel, CHECK)

    return asyncio.run(asked())


def opens_nats(stack: Stack, shown: Path) -> bool:
    async def tried() -> bool:
        context = context_of(stack.credential, shown)
        client, _ = await told_by(nats_of(stack), tls=context, **user_of(stack, "credentials"))
        if client is not None:
            await client.close()
        return client is not None

    return asyncio.run(tried())


def alone(folder: Path, credential: Path, *arguments: str) -> Outcome:
    """Run the command line where there is nothing of the stack but this file."""
    environment = {**os.environ, "NO_COLOR": "1", "FLOTILLA_CREDENTIAL_FILE": ""}
    return Outcome(
        *run_command(["--credential-file", str(credential), *arguments], environment, WAIT_S, folder)
    )


def test_a_fleet_works_on_while_its_authority_is_replaced(
    stack: Stack, arithmetic: Path, tmp_path: Path
) -> None:
    holders = [role_file(stack.directory, role, tmp_path / f"{role}.pem") for role in ("read", "run")]
    # Somebody's copy of the stack's own, too.
    shutil.copy(stack.credential.path, tmp_path / "copy.pem")
    holders.append(Credential(tmp_path / "copy.pem"))
    with going_on(stack, arithmetic, tmp_path) as run:
        stack.ok("token", "rotate", "--overlap", f"{OVERLAP_S}s")
        replaced = time.monotonic()
        assert [answer(stack, one) for one in holders] == [grpc.StatusCode.OK] * len(holders)
        assert opens_nats(stack, tmp_path / "copy.pem")
        newer = role_file(stack.directory, "read", tmp_path / "newer.pem")
        assert answer(stack, newer) is grpc.StatusCode.OK
        assert time.monotonic() < replaced + OVERLAP_S, "what was asked was asked within the overlap"
        further_steps(stack, run)
        for name in ("reward-0", "generator-0", "trainer", "coordinator", "launcher"):
            for one in holders:
                wait_until(
                    f"the end of the previous authority at {name}",
                    lambda name=name, one=one: answer(stack, one, name) is grpc.StatusCode.UNAVAILABLE,  # type: ignore[misc]
                    OVERLAP_S + 10,
                )
        assert answer(stack, newer) is answer(stack, stack.credential) is grpc.StatusCode.OK
        wait_until("the end of the copy at NATS", lambda: not opens_nats(stack, tmp_path / "copy.pem"))
    services = stack.ok("replicas", "list")["replicas"]
    assert all(one["work"] == "ready" for one in services), services


def test_a_file_alone_is_enough_for_the_command_line_and_the_sdk(stack: Stack, tmp_path: Path) -> None:
    coordinator = stack.address("coordinator")
    file = tmp_path / "ana.pem"
    stack.ok("token", "create", "--role", "read", "--name", "ana", "--expires", "1d", "-o", str(file))
    assert file.stat().st_mode & 0o777 == 0o600
    listed = alone(tmp_path, file, "run", "list", "--json", "--coordinator", coordinator)
    assert listed.code == 0 and listed.json["runs"], listed.err
    run_id = listed.json["runs"][0]["run_id"]
    refused = alone(tmp_path, file, "run", "pause", run_id, "--coordinator", coordinator)
    assert refused.code == 4 and "needs the role run" in refused.err and "role read" in refused.err, (
        refused.err
    )
    with connect(coordinator=coordinator, credential_file=file) as client:
        assert client.get_run(run_id).run_id == run_id
        with pytest.raises(PermissionDenied, match="needs the role run"):
            client.pause_run(run_id)
    elsewhere = stranger(tmp_path).path
    refused = alone(tmp_path, elsewhere, "run", "list", "--coordinator", coordinator)
    assert refused.code != 0 and "foreign" in refused.err, refused.err


def test_another_machine_sees_and_changes_the_fleet_by_the_port_of_its_launcher(
    stack: Stack, tmp_path: Path
) -> None:
    own = tmp_path / "credential.pem"
    shutil.copy(stack.credential.path, own)
    file = tmp_path / "stack.yaml"
    described = {
        "name": "sim",
        "state_dir": str(tmp_path),
        "bind": {"credential_file": str(own)},
        "launcher": {"attach": f"127.0.0.1:{LAUNCHER_PORT}"},
    }
    file.write_text(yaml.safe_dump(described))
    there = Stack(file, tmp_path / "sim")
    names = {process["name"] for process in there.ok("ps")["processes"]}
    assert {"coordinator", "trainer", "generator-0", "nats"} <= names
    assert [one["name"] for one in there.ok("scale", "reward", "1")["processes"]] == ["reward-0"]
    refused = there.flotilla("up")
    assert refused.code != 0 and "launcher of another machine" in refused.err
    role_file(stack.directory, "read", own)
    assert there.ok("ps")["processes"]
    for command in (("scale", "reward", "2", "--yes"), ("down",)):
        refused = there.flotilla(*command)
        assert refused.code != 0 and "needs the role admin" in refused.err
    assert {process["name"] for process in stack.ok("ps")["processes"]} == names


class Eavesdropper(grpc.GenericRpcHandler):
    """Listens where a service could, and remembers what it is asked."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> None:
        self.heard.append(str(handler_call_details.method))


@contextlib.asynccontextmanager
async def eavesdropping(*files: Path | None) -> AsyncIterator[tuple[Eavesdropper, list[str]]]:
    """Listen once for each of these certificates, in the open for None; ask no caller for one; yield the addresses."""
    ear = Eavesdropper()
    server = grpc.aio.server(handlers=[ear])
    addresses = []
    for file in files:
        if file is None:
            port = server.add_insecure_port("127.0.0.1:0")
        else:
            text = file.read_bytes()
            port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(text, text)]))
        addresses.append(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield ear, addresses
    finally:
        await server.stop(0)


def lies(stack: Stack, addresses: list[str]) -> dict[str, reg.Registration]:
    """Registrations by their keys: of each listener as a service of each kind, in a slot of its own and in that of one
    that is there; and of a real reward service as a generator.
    """
    with stack.client() as client:
        real = {one.registration.name: one.registration for one in client.list_services()}
    told = {}
    for index, address in enumerate(addresses):
        for slot in ("generator-0", "reward-0", "trainer"):
            for name in (slot, f"{slot.partition('-')[0]}-{index + 5}"):
                lie = reg.Registration()
                lie.CopyFrom(real[slot])
                lie.name, lie.instance_id, lie.address = name, f"{name}-eve{index}", address
                lie.state, lie.host = reg.INSTANCE_STATE_READY, socket.gethostname()
                lie.started_at.GetCurrentTime()
                told[lie.instance_id] = lie
    other = reg.Registration()
    other.CopyFrom(real["reward-0"])
    other.kind, other.name = reg.SERVICE_KIND_GENERATOR, "generator-9"
    return told | {"eve": other, other.instance_id: other}


def shown_of(stack: Stack) -> dict[str, Any]:
    """Return what the coordinator says of the lies."""
    with stack.client() as client:
        listed = {one.registration.instance_id: one for one in client.list_services()}
    return {
        key: one for key, one in listed.items() if "-eve" in key or one.registration.name == "generator-9"
    }


def test_who_can_write_to_nats_gets_no_work_and_hears_of_no_sample(
    stack: Stack, arithmetic: Path, tmp_path: Path
) -> None:
    own, before = stack.credential, stack.ok("replicas", "list")["replicas"]
    file = small_run(arithmetic, tmp_path / "run.yaml", name="false", steps=2)

    async def registered() -> None:
        login = user_of(stack, "credentials")
        admin = role_file(stack.directory, "admin", tmp_path / "admin.pem").path
        async with eavesdropping(None, stranger(tmp_path).path, admin) as (ear, addresses):
            client, said = await told_by(nats_of(stack), tls=context_of(own, own.path), **login)
            assert client is not None, said
            bucket = await client.jetstream().key_value("registry")
            told = await asyncio.to_thread(lies, stack, addresses)
            strangers = {key for key in told if "-eve" in key}

            async def tell(keys: set[str]) -> None:
                while True:
                    for key in keys:
                        await bucket.put(key, told[key].SerializeToString())
                    await asyncio.sleep(HEARTBEAT_S)

            async def are_named(keys: set[str]) -> None:
                """Wait until the coordinator knows them all; it gives them nothing."""
                async with asyncio.timeout(WAIT_S):
                    while not keys <= (shown := await asyncio.to_thread(shown_of, stack)).keys():
                        await asyncio.sleep(0.1)
                for one in shown.values():
                    assert one.registration.state != reg.INSTANCE_STATE_READY and not one.run_id, one

            try:
                telling = asyncio.create_task(tell({*told}))
                await are_named(strangers)
                telling.cancel()
                # In the slots of others they would be in the way of the run.
                kept = {
                    key for key in strangers if told[key].name not in ("generator-0", "reward-0", "trainer")
                }
                for key in told.keys() - kept:
                    await bucket.delete(key)
                telling = asyncio.create_task(tell(kept))
                run = await asyncio.to_thread(stack.run, file, *MADE_UP_SAMPLES)
                assert run.get("state") == "succeeded", run
                await are_named(kept)
                telling.cancel()
            finally:
                for key in told:
                    await bucket.delete(key)
                await client.close()
            assert ear.heard == []

    asyncio.run(registered())
    wait_until("what is there by its own word", lambda: stack.ok("replicas", "list")["replicas"] == before)

"""On every call of every service, whoever does not belong is refused, and nothing of the stack is another afterwards.

Its launcher listens on a port as well. The agent of a gang's ranks is tried as a server of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from contract.callers import (
    REFLECTION,
    SERVICES,
    Attempt,
    Callers,
    Method,
    address_of,
    at_no_door,
    context_of,
    nats_of,
    outcome,
    role_file,
    told_by,
    user_of,
)
from contract.fleet_state import changes, settled, state_of
from older_fleet import OlderFleet

from flotilla.common.v1.roles import ROLES
from flotilla_core import rpc
from flotilla_core.trust import Credential
from flotilla_testing.credentials import credential
from flotilla_testing.fuzzed_fleet import MADE_UP_SAMPLES
from flotilla_testing.runs import small_run
from flotilla_testing.servers import serving
from flotilla_testing.stack import Stack
from flotilla_trainer.agent import RankServicer
from flotilla_weights.rendezvous import StoreServicer

pytestmark = pytest.mark.timeout(400)

OPEN_TO_READERS = ("grpc.health.v1.Health", *REFLECTION)
EVERYWHERE = ("flotilla.common.v1.OperateService", "flotilla.common.v1.FileService", *OPEN_TO_READERS)
COLLECTOR = "opentelemetry.proto.collector.trace.v1.TraceService"
SERVED = {
    "generator-0": ("flotilla.generator.v1.GeneratorService", *EVERYWHERE),
    "trainer": ("flotilla.trainer.v1.TrainerService", *EVERYWHERE),
    "reward-0": ("flotilla.reward.v1.RewardService", *EVERYWHERE),
    "environment-0": ("flotilla.environment.v1.EnvironmentService", *EVERYWHERE),
    "coordinator": (
        "flotilla.coordinator.v1.CoordinatorService",
        "flotilla.coordinator.v1.LoopService",
        COLLECTOR,
        *EVERYWHERE,
    ),
    "launcher": ("flotilla.launcher.v1.LauncherService", *OPEN_TO_READERS),
}
RANKS = "flotilla.trainer.v1.RankService"
STORES = "flotilla.weights.v1.StoreService"
UNKNOWN_FENCE = rpc.Fence("ledger", 1000, "run", 1)
AT_ONCE = 16
CONNECTED_WITHIN_S = 20.0
REFUSED = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)


async def offences(
    address: str,
    services: tuple[str, ...],
    own: Credential,
    callers: Callers,
    fence: rpc.Fence = UNKNOWN_FENCE,
) -> list[str]:
    """Try every caller on every method of a server; what was answered otherwise than it must be."""
    wrong: list[str] = []
    limit = asyncio.Semaphore(AT_ONCE)
    channels: dict[str, grpc.aio.Channel] = {}

    async def one(method: Method, attempt: Attempt) -> None:
        sent = fence.metadata if attempt.fenced else ()
        async with limit:
            code = await outcome(channels[attempt.shown.who], method, sent)
        if code is not attempt.code:
            wrong.append(f"{method.path} {attempt.shown.who}: {code}")

    async with asyncio.TaskGroup() as group:
        for service in services:
            for method in SERVICES[service]:
                for attempt in callers.of(method.path):
                    if attempt.shown.who not in channels:
                        channels[attempt.shown.who] = attempt.shown.channel(address, own)
                    group.create_task(one(method, attempt))
    for channel in channels.values():
        await channel.close()
    return wrong


async def reads(address: str, services: tuple[str, ...], reader: Credential, run: str) -> set[str]:
    """Make every call that a holder of the role `read` may make, about `run` where it names one; which were served."""
    served: set[str] = set()
    async with rpc.connect(address, credential=reader) as channel:
        # A busy machine may lose a handshake, which is no refusal: gRPC begins another one.
        await asyncio.wait_for(channel.channel_ready(), CONNECTED_WITHIN_S)
        for method in (one for name in services for one in SERVICES[name] if ROLES[one.path] == "read"):
            names_a_run = "run_id" in method.request.DESCRIPTOR.fields_by_name
            request = method.request(**({"run_id": run} if names_a_run else {}))
            code = await outcome(channel, method, request=request.SerializeToString())
            assert code not in REFUSED, method.path
            if code is grpc.StatusCode.OK:
                served.add(method.path.rpartition("/")[2])
    return served


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("refusals")


@pytest.fixture(scope="module")
def stack(older: OlderFleet) -> Stack:
    return older.stack


@pytest.fixture(scope="module")
def run_file(arithmetic: Path, folder: Path) -> Path:
    return small_run(arithmetic, folder / "run.yaml", name="refusals", steps=1)


def test_every_call_of_every_service_is_tried() -> None:
    served = {name for names in SERVED.values() for name in names} | {RANKS, STORES}
    assert served == set(SERVICES)
    assert {method.path for name in served for method in SERVICES[name]} == set(ROLES)
    # Who may only look is told no secret of a weight group.
    for call in (
        "trainer.v1.TrainerService/OpenWeightGroup",
        "generator.v1.GeneratorService/JoinWeightGroup",
    ):
        assert ROLES[f"/flotilla.{call}"] != "read"


def takeover_of(stack: Stack, run: str) -> rpc.Fence:
    """Return a fence that would shut the coordinator out of all its runs: as far ahead as a service believes."""
    with contextlib.closing(sqlite3.connect(f"file:{stack.directory}/ledger.sqlite?mode=ro", uri=True)) as db:
        (ledger,), (epoch,) = (
            db.execute(f"SELECT {what}").fetchone() for what in ("name FROM identity", "epoch FROM owner")
        )
    return rpc.Fence(ledger, epoch + 1000, run, 1)


def refusals_told(stack: Stack, name: str) -> int:
    return (stack.directory / "logs" / f"{name}.log").read_text().count("calls are refused")


def test_who_does_not_belong_is_refused_on_every_call_and_changes_nothing(
    stack: Stack, run_file: Path, folder: Path
) -> None:
    ended = stack.run(run_file, *MADE_UP_SAMPLES)
    assert ended["state"] == "succeeded", ended["reason"]
    callers = Callers(stack.directory, folder)
    reader = role_file(stack.directory, "read", folder / "reader.pem")
    before, began = settled(stack), time.monotonic()
    told = {name: refusals_told(stack, name) for name in SERVED}
    for kind, fewest in (("table ", 6), ("instance ", 4), ("file ", 10)):
        assert sum(name.startswith(kind) for name in before) >= fewest, kind
    fence = takeover_of(stack, ended["run_id"])
    served: set[str] = set()
    for name, services in SERVED.items():
        address = address_of(stack, name)
        assert asyncio.run(offences(address, services, stack.credential, callers, fence)) == []
        served |= asyncio.run(reads(address, services, reader, ended["run_id"]))
    assert {
        "Check",
        "Watch",
        "GetRun",
        "WatchRun",
        "ListSamples",
        "GetWeightStatus",
        "ListRewards",
        "ListEnvironments",
        "List",
    } <= served
    assert changes(before, state_of(stack)) == []
    minutes = int((time.monotonic() - began) // 60) + 1
    for name in SERVED:
        # Other tests were refused by the same fleet, perhaps within this minute.
        assert 1 <= refusals_told(stack, name) <= told[name] + minutes, "one line a peer and minute"
    # No fence was moved either: the fleet serves the next run.
    assert stack.run(run_file, *MADE_UP_SAMPLES)["state"] == "succeeded"


async def test_an_agent_of_a_gang_and_a_store_of_a_group_ask_for_a_credential(tmp_path: Path) -> None:
    nothing: Any = None  # A call that is not refused fails otherwise than by a refusal.
    own = credential(tmp_path)
    servicers = RankServicer(nothing, nothing, nothing, nothing), StoreServicer(nothing, b"", "a store")
    async with serving(*servicers, credential=own) as address:
        assert await offences(address, (RANKS, STORES), own, Callers(tmp_path, tmp_path)) == []


def test_nats_is_behind_certificates_and_users_of_its_own(stack: Stack, folder: Path) -> None:
    own = stack.credential
    good, url = user_of(stack, "coordinator-credentials"), nats_of(stack)
    before = settled(stack)

    async def refused() -> None:
        ours = context_of(own, own.path)
        for login in (
            {},
            {"token": "flotilla"},
            good | {"password": "0" * 64},
            {"user": "flotilla", "password": "x"},
        ):
            client, said = await told_by(url, tls=ours, **login)
            assert client is None and "authorization" in said[-1], (login, said)
        for shown in at_no_door(stack.directory, folder):
            client, said = await told_by(url, tls=context_of(own, shown.file), **good)
            assert client is None, shown.who
        client, _ = await told_by(url, tls=ours, **good)
        assert client is not None
        await client.close()

    asyncio.run(refused())
    assert changes(before, state_of(stack)) == []

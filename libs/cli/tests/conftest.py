"""The `flotilla` command in an empty directory, and the coordinator that it calls."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flotilla.coordinator.v1.coordinator_pb2_grpc import (
    CoordinatorServiceServicer,
    add_CoordinatorServiceServicer_to_server,
)
from flotilla_cli.main import main
from flotilla_core.config.stack import BindConfig
from flotilla_core.rpc import RpcServer
from flotilla_testing.credentials import credential

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def umask() -> Iterator[None]:
    """What a command closes to others is its own matter: later tests of this process write as they would alone."""
    before = os.umask(0o077)
    os.umask(before)
    yield
    os.umask(before)


@pytest.fixture
def flotilla(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """The command in an empty directory: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def command(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["flotilla", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return command


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Starts a coordinator in the background, with other services at its address, and names it to the command."""
    monkeypatch.chdir(tmp_path)
    own = credential(Path(".flotilla/local"))
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    servers = []

    def start(servicer: CoordinatorServiceServicer, *others: tuple[Callable[[Any, Any], None], Any]) -> str:
        async def begin() -> str:
            server = RpcServer(BindConfig(), credential=own)
            server.add(
                add_CoordinatorServiceServicer_to_server,
                servicer,
                "flotilla.coordinator.v1.CoordinatorService",
            )
            for add, other in others:
                server.add(add, other, f"flotilla.test.{type(other).__name__}")
            servers.append(server)
            return await server.start()

        address = asyncio.run_coroutine_threadsafe(begin(), loop).result(10)
        monkeypatch.setenv("FLOTILLA_COORDINATOR", address)
        return address

    yield start
    for server in servers:
        asyncio.run_coroutine_threadsafe(server.stop(0), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()

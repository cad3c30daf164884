"""The `flotilla` command in an empty directory, the coordinator that it calls, and the runs of one."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flotilla.coordinator.v1 import run_pb2
from flotilla.coordinator.v1.coordinator_pb2_grpc import (
    CoordinatorServiceServicer,
    add_CoordinatorServiceServicer_to_server,
)
from flotilla_coordinator.cli.main import main
from flotilla_coordinator.fleet.fleet import Fleet
from flotilla_coordinator.ledger.ledger import Ledger
from flotilla_coordinator.runs import start as run_start
from flotilla_coordinator.runs.executor import RunExecutor
from flotilla_coordinator.runs.registry import Runs
from flotilla_coordinator.runs.resume import StartPoint
from flotilla_core import rpc
from flotilla_core.config.stack import BindConfig, StackConfig
from flotilla_core.files import make_private_folder
from flotilla_core.rpc import RpcServer
from flotilla_core.trust import make_token

Command = Callable[..., tuple[int, str, str]]


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
    folder = Path(".flotilla/local")
    make_private_folder(folder)
    token = make_token(BindConfig(), folder)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    servers = []

    def start(servicer: CoordinatorServiceServicer, *others: tuple[Callable[[Any, Any], None], Any]) -> str:
        async def begin() -> str:
            server = RpcServer(BindConfig(), token=token)
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


@pytest.fixture
def direct_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripted services are called as they are, without a wire."""

    async def call(method: Callable[..., Any], request: Any, **_options: Any) -> Any:
        return await method(request)

    monkeypatch.setattr(rpc, "unary", call)
    monkeypatch.setattr(rpc, "client_stream", call)
    monkeypatch.setattr(rpc, "server_stream", lambda method, request, **_: method(request))


@pytest.fixture
def launched() -> list[StartPoint]:
    """Where each of the `runs` that was launched began."""
    return []


@pytest.fixture
async def runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launched: list[StartPoint]
) -> AsyncIterator[Runs]:
    """The runs of one coordinator without services; a run that is launched goes on until it is ended."""

    async def execute(execution: RunExecutor, start_point: StartPoint) -> None:
        launched.append(start_point)
        execution.active.status.set_state(run_pb2.RUN_STATE_RUNNING)
        try:
            await asyncio.Event().wait()
        finally:
            await execution.fleet.close()
            execution.active.status.set_state(run_pb2.RUN_STATE_STOPPED)

    async def nothing_is_queued() -> None:
        pass

    monkeypatch.setattr(run_start, "plan_run", lambda *_: run_pb2.Plan())
    monkeypatch.setattr(RunExecutor, "execute", execute)
    ledger = Ledger.open(tmp_path / "ledger.sqlite")
    host: Any = SimpleNamespace(stack=StackConfig(ready_timeout_s=5.0), state_dir=tmp_path)
    events: Any = SimpleNamespace(publish=lambda *_: None, close=nothing_is_queued)
    made = Runs(host, Fleet(host, lambda: True), ledger, events)
    await made.recover()
    yield made
    await made.close()
    ledger.close()

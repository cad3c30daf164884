"""The runs of a coordinator, and scripted services that are called as they are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flotilla.coordinator.v1 import run_pb2
from flotilla_coordinator.fleet.fleet import Fleet
from flotilla_coordinator.ledger.ledger import Ledger
from flotilla_coordinator.runs import start as run_start
from flotilla_coordinator.runs.executor import RunExecutor
from flotilla_coordinator.runs.registry import Runs
from flotilla_coordinator.runs.resume import StartPoint
from flotilla_core import rpc
from flotilla_core.config.stack import StackConfig


@pytest.fixture
def direct_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripted services are called as they are, without a wire."""

    async def call(method: Callable[..., Any], request: Any, **_options: Any) -> Any:
        return await method(request)

    monkeypatch.setattr(rpc, "unary", call)
    monkeypatch.setattr(rpc, "client_stream", call)
    monkeypatch.setattr(rpc, "server_stream", lambda method, request, **_: method(request))
    monkeypatch.setattr(rpc, "duplex", lambda method, requests, **_: method(requests))


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

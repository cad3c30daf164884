"""Another number of generators: what the launcher is asked for, by what it runs."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from flotilla.common.v1.registration_pb2 import SERVICE_KIND_GENERATOR
from flotilla.launcher.v1 import launcher_pb2, launcher_pb2_grpc
from flotilla_coordinator.fleet.launcher import LauncherLink
from flotilla_core.errors import FailedPrecondition
from flotilla_testing.servers import serving

READY, STARTING = launcher_pb2.PROCESS_STATE_READY, launcher_pb2.PROCESS_STATE_STARTING
FAILED, ATTACHED = launcher_pb2.PROCESS_STATE_FAILED, launcher_pb2.PROCESS_STATE_ATTACHED


class Launcher(launcher_pb2_grpc.LauncherServiceServicer):
    """Runs what a test says, and remembers what it was asked for."""

    def __init__(self, states: Sequence[launcher_pb2.ProcessState.ValueType]) -> None:
        self.asked: list[int] = []
        self._states = states

    async def List(self, request: Any, context: Any) -> launcher_pb2.ListResponse:
        processes = [launcher_pb2.ProcessStatus(kind=SERVICE_KIND_GENERATOR, state=s) for s in self._states]
        judge = launcher_pb2.ProcessStatus(
            name="judge-careful", kind=SERVICE_KIND_GENERATOR, state=READY
        )  # counts for nothing
        processes.append(judge)
        return launcher_pb2.ListResponse(processes=processes)

    async def Scale(self, request: launcher_pb2.ScaleRequest, context: Any) -> launcher_pb2.ScaleResponse:
        self.asked.append(request.replicas)
        return launcher_pb2.ScaleResponse()


@asynccontextmanager
async def launched(folder: Path, states: Sequence[Any]) -> AsyncIterator[tuple[Launcher, LauncherLink]]:
    """A launcher that serves, and the link to it."""
    launcher = Launcher(states)
    async with serving(launcher, host=f"unix:{folder}/launcher"):
        (folder / "launcher.json").write_text(json.dumps({"socket": f"{folder}/launcher"}))
        yield launcher, LauncherLink(folder, ready_timeout_s=5.0)


@pytest.mark.parametrize(
    ("states", "by", "most", "asked"),
    [
        ([READY, READY], 1, 4, [3]),
        ([READY, READY], -1, 4, [1]),
        ([READY, FAILED], 1, 2, [2]),  # the same number starts the failed one again
        ([READY, FAILED], 1, 4, [2]),
        ([READY, STARTING], 1, 4, []),
        ([READY, ATTACHED], 1, 4, [2]),
        ([READY, ATTACHED], -1, 4, [0]),
    ],
)
async def test_the_launcher_is_asked_for_what_the_advice_means(
    tmp_path: Path, states: list[Any], by: int, most: int, asked: list[int]
) -> None:
    async with launched(tmp_path, states) as (launcher, link):
        await link.change_generators(by, least=1, most=most)
    assert launcher.asked == asked


async def test_generators_that_others_started_cannot_be_stopped(tmp_path: Path) -> None:
    async with launched(tmp_path, [ATTACHED, ATTACHED]) as (launcher, link):
        with pytest.raises(FailedPrecondition, match="runs 0 of 2 generators"):
            await link.change_generators(-1, least=1, most=4)
    assert launcher.asked == []

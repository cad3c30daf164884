"""A gang that should compile its layers and cannot reports why, and trains like any other."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from flotilla.common.v1.finding_pb2 import SEVERITY_WARNING
from flotilla_trainer.gang.fork_server import RankForkServer
from flotilla_trainer.service import compiler_check

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(120)]


async def test_a_host_without_a_compiler_trains_and_the_reason_is_shown(
    start_trainer: Callable[..., Any],
    groups_of: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    groups = groups_of([2, 1])
    async with AsyncExitStack() as exits:
        # Which compiler there is, is looked up by the import.
        fork_server = RankForkServer(dict(os.environ), tmp_path / "fork-server.log")
        exits.callback(fork_server.close)
        trainer = await exits.enter_async_context(
            start_trainer(own_fork_server=fork_server, nproc=1, compile="on")
        )
        (check,) = compiler_check(trainer.gang.facts)
        assert check.severity == SEVERITY_WARNING
        assert "no-such-compiler" in check.what
        await trainer.open()
        result = await trainer.train(0, groups)
    assert not result.skipped
    assert "compilations" not in result.metrics

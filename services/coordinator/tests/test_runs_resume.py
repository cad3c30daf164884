"""Which runs can be continued, and as what."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from google.protobuf import json_format

from flotilla.coordinator.v1 import run_pb2
from flotilla_coordinator.ledger.ledger import Ledger
from flotilla_coordinator.ledger.records import RunRecord, RunState
from flotilla_coordinator.rundir import RunDirectory
from flotilla_coordinator.runs import runs as runs_module
from flotilla_coordinator.runs.beginning import Beginning
from flotilla_coordinator.runs.runs import Runs
from flotilla_core.errors import FailedPrecondition, NotFound
from flotilla_core.version import Version

CONFIG = "name: run\nsteps: 3\ndata: {train: /x.jsonl}\nrewards: [{reward: exact}]\n"
RUN = "run-20260314-0915-7f3a"


class Bench:
    """The runs of one coordinator; a run that is launched goes on until the end."""

    def __init__(self, folder: Path, ledger: Ledger, launched: list[Beginning]) -> None:
        host: Any = SimpleNamespace(stack=None, state_dir=folder)
        fleet: Any = SimpleNamespace(registrations={})
        events: Any = SimpleNamespace(publish=lambda *_: None, close=self._nothing)
        self.ledger = ledger
        self.launched = launched
        self.runs = Runs(host, fleet, ledger, events)
        self.directory = RunDirectory.create(folder / "runs" / RUN)

    async def recorded(self, state: RunState) -> None:
        run = run_pb2.Run(
            run_id=RUN,
            name="run",
            state=run_pb2.RunState.ValueType(state),
            step=2,
            reason="why",
            total_steps=3,
        )
        self.directory.write_event(run_pb2.RunEvent(sequence=7, run=run))
        (self.directory.path / "outcome.json").write_text(json_format.MessageToJson(run))
        await self.ledger.save_run(
            RunRecord(RUN, "run", state, CONFIG, str(self.directory.path), 1.0, 2.0, "why", 2, Version(4, 2))
        )

    @staticmethod
    async def _nothing() -> None:
        """Nothing is queued."""


@pytest.fixture
async def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    launched: list[Beginning] = []

    async def execute(
        _host: Any, _fleet: Any, _ledger: Any, active: Any, _directory: Any, begin: Any
    ) -> None:
        launched.append(begin)
        active.status.set_state(run_pb2.RUN_STATE_RUNNING)
        try:
            await asyncio.Event().wait()
        finally:
            active.status.set_state(run_pb2.RUN_STATE_STOPPED)

    monkeypatch.setattr(runs_module, "plan_run", lambda *_: run_pb2.Plan())
    monkeypatch.setattr(runs_module, "execute", execute)
    ledger = Ledger.open(tmp_path / "ledger.sqlite")
    made = Bench(tmp_path, ledger, launched)
    yield made
    await made.runs.close()
    ledger.close()


@pytest.mark.parametrize("state", [RunState.FAILED, RunState.STOPPED])
async def test_a_run_that_failed_or_was_stopped_goes_on_under_the_next_lineage(
    bench: Bench, state: RunState
) -> None:
    await bench.recorded(state)
    run = await bench.runs.resume(RUN, "", "r1")
    assert (run.run_id, run.step, run.reason) == (RUN, 2, "")
    assert not run.HasField("ended_at")
    assert (await bench.runs.resume(RUN, "", "r1")).run_id == RUN  # the same request
    assert bench.launched == [Beginning(5, by_user=True)]
    assert (await bench.ledger.get_run(RUN)).state == RunState.RUNNING
    assert bench.directory.read_outcome() is None and bench.directory.last_sequence() == 8
    with pytest.raises(FailedPrecondition, match="has not ended"):
        await bench.runs.resume(RUN, "", "r2")
    with pytest.raises(FailedPrecondition, match=f"run {RUN} is using the trainer"):
        await bench.runs.start(CONFIG, "r3")


async def test_a_run_that_succeeded_is_not_continued(bench: Bench) -> None:
    await bench.recorded(RunState.SUCCEEDED)
    with pytest.raises(FailedPrecondition, match=r"has succeeded.*initial_weights"):
        await bench.runs.resume(RUN, "", "r1")
    assert bench.launched == []


async def test_a_checkpoint_that_is_not_there_changes_nothing(bench: Bench) -> None:
    await bench.recorded(RunState.FAILED)
    with pytest.raises(NotFound, match="step-000001"):
        await bench.runs.resume(RUN, "step-000001", "r1")
    assert bench.launched == [] and (await bench.ledger.get_run(RUN)).state == RunState.FAILED
    (bench.directory.checkpoints_path / "step-000001").mkdir(parents=True)
    await bench.runs.resume(RUN, "step-000001", "r1")
    await asyncio.sleep(0)
    assert bench.launched == [Beginning(5, "step-000001", by_user=True)]

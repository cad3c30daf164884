"""The state of a run is shown with what it waits for."""

from __future__ import annotations

from flotilla.coordinator.v1 import run_pb2
from flotilla_coordinator.runs.events import EventLog
from flotilla_coordinator.runs.status import RunStatus
from flotilla_core.errors import DiskFull


def test_a_run_that_waits_for_two_writes_names_the_one_that_is_left() -> None:
    told: list[run_pb2.RunEvent] = []
    status = RunStatus(run_pb2.Run(run_id="run"), EventLog(told.append))
    status.set_state(run_pb2.RUN_STATE_RUNNING)
    status.wait_for_disk("ledger", DiskFull("the ledger cannot be written"))
    status.wait_for_disk("checkpoint", DiskFull("the checkpoint cannot be written"))
    assert "the ledger cannot be written" in status.run.reason
    status.disk_has_room("ledger")
    assert status.run.state == run_pb2.RUN_STATE_PAUSED
    assert "the checkpoint cannot be written" in status.run.reason
    assert "the checkpoint cannot be written" in told[-1].run.reason
    status.disk_has_room("checkpoint")
    assert (status.run.state, status.run.reason) == (run_pb2.RUN_STATE_RUNNING, "")

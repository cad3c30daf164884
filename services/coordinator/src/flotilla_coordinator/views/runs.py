"""Answers what became of a run, from the ledger and the run directory.

Invariants: the outcome in the run directory wins over the ledger, because it holds the metrics. A run without an end in
any record was interrupted, and ended when its last event was written.
"""

from __future__ import annotations

import time
from functools import lru_cache
from pathlib import Path

from flotilla.common.v1.finding_pb2 import SEVERITY_ERROR, Finding
from flotilla.coordinator.v1 import run_pb2
from flotilla_coordinator.ledger.records import RunRecord, RunState
from flotilla_coordinator.records.directory import RunDirectory
from flotilla_coordinator.views.metrics import add_metrics
from flotilla_core import config
from flotilla_core.errors import InvalidConfig
from flotilla_core.findings import text_of

TERMINAL = (run_pb2.RUN_STATE_SUCCEEDED, run_pb2.RUN_STATE_STOPPED, run_pb2.RUN_STATE_FAILED)
REMEMBERED_CONFIGURATIONS = 100


def give_reason(run: run_pb2.Run, reason: Finding) -> None:
    """Set why the run failed, stopped or waits; an empty finding removes it."""
    run.reason = text_of(reason)
    run.ClearField("finding")
    if reason.what:
        run.finding.CopyFrom(reason)


def stored_run(record: RunRecord) -> run_pb2.Run:
    """Return the run as it ended, or as far as the ledger has it."""
    directory = RunDirectory(Path(record.directory))
    if (ended := directory.read_outcome()) is not None:
        if not ended.HasField("finding"):  # An earlier version wrote it.
            give_reason(ended, Finding(what=ended.reason))
        return ended
    run = run_pb2.Run(
        run_id=record.run_id,
        name=record.name,
        state=run_pb2.RunState.ValueType(int(record.state)),
        step=record.step,
        total_steps=_total_steps(record.config_yaml),
        policy_version=record.version.to_proto(),
        directory=record.directory,
    )
    give_reason(run, record.reason)
    run.created_at.FromNanoseconds(int(record.created_at * 1e9))
    if record.ended_at is not None:
        run.ended_at.FromNanoseconds(int(record.ended_at * 1e9))
    add_metrics(run, directory)
    return run


def interruption(run_id: str) -> Finding:
    """Return why a run that was active when its coordinator stopped has ended."""
    return Finding(
        severity=SEVERITY_ERROR,
        what="the coordinator stopped while the run was active; its samples are accounted for in the ledger",
        next_step=f"Continue it: flotilla run resume {run_id}",
    )


def interrupted_run(record: RunRecord, why: Finding | None = None) -> run_pb2.Run:
    """Return the end of a run whose coordinator died before it could record one."""
    run = stored_run(record)
    if run.state not in TERMINAL:
        if record.state is RunState.STOPPING:
            run.state = run_pb2.RUN_STATE_STOPPED
        else:
            run.state = run_pb2.RUN_STATE_FAILED
            give_reason(run, why or interruption(record.run_id))
        written = RunDirectory(Path(record.directory)).last_written()
        run.ended_at.FromNanoseconds(int((written or time.time()) * 1e9))
    return run


@lru_cache(maxsize=REMEMBERED_CONFIGURATIONS)
def _total_steps(config_yaml: str) -> int:
    """Return the planned steps of an earlier run; 0 where this release cannot read its configuration."""
    try:
        return config.load_text(config.RunConfig, config_yaml, source="run").steps
    except InvalidConfig:
        return 0

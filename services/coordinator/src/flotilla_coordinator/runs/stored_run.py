"""A run that nobody works on, as its records tell.

Invariants: the outcome in the run directory wins over the ledger, because it holds the metrics; a run without an
end in any record was cut off, and ended when its last event was written.
"""

from __future__ import annotations

import time
from functools import lru_cache
from pathlib import Path

import structlog

from flotilla.coordinator.v1 import run_pb2
from flotilla_coordinator.ledger.records import RunRecord, RunState
from flotilla_coordinator.records.directory import RunDirectory
from flotilla_coordinator.records.report import conclude
from flotilla_coordinator.runs.status import TERMINAL
from flotilla_core.config import RunConfig, load_text
from flotilla_core.errors import InvalidConfig

log = structlog.get_logger(__name__)

REMEMBERED_CONFIGURATIONS = 100
INTERRUPTED = (
    "the coordinator stopped while the run was going on; its samples are accounted for in the ledger. "
    "Continue it: flotilla run resume {run_id}"
)


def stored_run(record: RunRecord) -> run_pb2.Run:
    """The run as it ended, or as far as the ledger knows it."""
    ended = RunDirectory(Path(record.directory)).read_outcome()
    if ended is not None:
        return ended
    run = run_pb2.Run(
        run_id=record.run_id,
        name=record.name,
        state=run_pb2.RunState.ValueType(int(record.state)),
        step=record.step,
        total_steps=_total_steps(record.config_yaml),
        policy_version=record.version.to_proto(),
        reason=record.reason,
        directory=record.directory,
    )
    run.created_at.FromNanoseconds(int(record.created_at * 1e9))
    if record.ended_at is not None:
        run.ended_at.FromNanoseconds(int(record.ended_at * 1e9))
    return run


def interrupted_run(record: RunRecord, why: str = INTERRUPTED) -> run_pb2.Run:
    """The end of a run whose coordinator was gone before it could record one."""
    run = stored_run(record)
    directory = RunDirectory(Path(record.directory))
    if run.state not in TERMINAL:
        if record.state is RunState.STOPPING:
            run.state = run_pb2.RUN_STATE_STOPPED
        else:
            run.state, run.reason = run_pb2.RUN_STATE_FAILED, why.replace("{run_id}", record.run_id)
        run.ended_at.FromNanoseconds(int((directory.last_written() or time.time()) * 1e9))
    if not run.metrics:
        _add_metrics(run, directory)
    return run


def continued_run(record: RunRecord) -> run_pb2.Run:
    """A run that is about to go on: what was measured so far, without an end."""
    run = interrupted_run(record)
    run.state, run.reason = run_pb2.RUN_STATE_PENDING, ""
    run.ClearField("ended_at")
    return run


def record_end(run: run_pb2.Run) -> None:
    """Give the directory of an interrupted run what every ended one has: the last event, the outcome, logs, plots."""
    directory = RunDirectory(Path(run.directory))
    event = run_pb2.RunEvent(sequence=directory.last_sequence() + 1, run=run)
    event.time.GetCurrentTime()
    try:
        directory.write_event(event)
        conclude(directory, run)
    # A full disk, a directory that is gone: no reason for the coordinator not to start.
    except OSError as error:
        log.warning("the end of a run was not recorded whole", run_id=run.run_id, error=str(error))


def _add_metrics(run: run_pb2.Run, directory: RunDirectory) -> None:
    """The last value of each metric, and the steps that are done."""
    for step, metrics in directory.read_metrics():
        run.step = max(run.step, step + 1)
        for name, value in metrics.items():
            run.metrics[name] = value
    for evaluation in directory.read_evaluations():
        accuracy = float(evaluation["accuracy"])
        if "eval/accuracy_before" not in run.metrics:
            run.metrics["eval/accuracy_before"] = accuracy
        run.metrics["eval/accuracy"], run.metrics["eval/step"] = accuracy, float(evaluation["step"])
        for name, value in evaluation.items():
            if name.startswith("eval/"):
                run.metrics[name] = float(value)


@lru_cache(maxsize=REMEMBERED_CONFIGURATIONS)
def _total_steps(config_yaml: str) -> int:
    """The steps that an earlier run was to make; 0 where this release cannot read its configuration."""
    try:
        return load_text(RunConfig, config_yaml, source="run").steps
    except InvalidConfig:
        return 0

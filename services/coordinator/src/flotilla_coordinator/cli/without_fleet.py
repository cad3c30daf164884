"""Answers `flotilla run` for a stack that does not run: from the ledger, the run directories and the files.

Invariants: nothing of a stack is written. Its state on disk is read only when nothing can be changing it: no
coordinator was named, and no launcher of the stack is alive.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import sqlite3

    from flotilla.coordinator.v1.run_pb2 import Plan, Run
    from flotilla_coordinator.ledger.records import RunRecord
    from flotilla_launch.paths import StackPaths

Result = TypeVar("Result")


def ask_or_else(
    ask: Coroutine[Any, Any, Result],
    otherwise: Callable[[StackPaths], Result],
    stack: str | None,
    coordinator: str | None,
) -> Result:
    """Return the coordinator's answer; where no fleet runs, call `otherwise` with the stack's files."""
    from flotilla_coordinator.cli.options import wait
    from flotilla_coordinator.cli.stack import stack_paths
    from flotilla_core.errors import Unavailable
    from flotilla_launch.client import find

    try:
        return wait(ask)
    except Unavailable:
        paths = stack_paths(stack)
        if coordinator is not None or find(paths) is not None:
            raise
        return otherwise(paths)


def list_runs(paths: StackPaths, limit: int) -> list[Run]:
    """Return the runs, newest first."""
    from flotilla_coordinator.ledger import queries
    from flotilla_coordinator.runs.status import interrupted_run

    return [interrupted_run(record) for record in _query(paths, lambda db: queries.runs(db, limit))]


def get_run(paths: StackPaths, reference: str) -> tuple[Run, str]:
    """Return the run by id, unique prefix or "latest", and its resolved configuration."""
    from flotilla_coordinator.ledger import queries
    from flotilla_coordinator.runs.status import interrupted_run

    record: RunRecord = _query(paths, lambda db: queries.run(db, reference))
    return interrupted_run(record), record.config_yaml


def plan_run(files: Sequence[Path], overrides: Sequence[str], stack: str | None) -> Plan:
    """Work out the plan here from the stack file, as the coordinator would."""
    from flotilla_coordinator import plan
    from flotilla_coordinator.cli.output import say
    from flotilla_coordinator.cli.stack import load_stack, make_example, stack_file
    from flotilla_core.config import RunConfig, load

    make_example(stack_file(stack))
    say("no fleet is running: calculated from the stack file")
    return plan.plan_run(load(RunConfig, files, overrides, resolve_paths=True), load_stack(stack))


def _query(paths: StackPaths, query: Callable[[sqlite3.Connection], Result]) -> Result:
    from flotilla_coordinator.cli.output import say
    from flotilla_coordinator.ledger import schema
    from flotilla_core.errors import Unavailable

    ledger = paths.directory / "ledger.sqlite"
    if not ledger.exists():
        raise Unavailable(
            f"stack {paths.directory.name!r} is not running and has no runs on disk",
            where=str(paths.directory),
            next_step="start it with `flotilla up`, or name a coordinator by --coordinator HOST:PORT",
        )
    say(f"no fleet is running: read from {paths.directory}")
    db = schema.connect_read_only(ledger)
    try:
        return query(db)
    finally:
        db.close()

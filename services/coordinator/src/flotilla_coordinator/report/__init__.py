"""Plots and Parquet files of a run, by the extra `flotilla-coordinator[report]`.

Invariants: nothing heavy is imported before a report is asked for; without the extra, one error says how to
get it.
"""

from __future__ import annotations

from pathlib import Path

from flotilla.coordinator.v1 import run_pb2
from flotilla_coordinator.rundir import RunDirectory
from flotilla_core.disk import names_full_disk
from flotilla_core.errors import DiskFull, FailedPrecondition


def conclude(directory: RunDirectory, run: run_pb2.Run) -> str:
    """Outcome, logs and plots of a run that has ended; a sentence where plots could not be made."""
    directory.finish(run)
    try:
        with names_full_disk("the plots cannot be written", directory.path):
            write_plots(directory.path)
    except (FailedPrecondition, DiskFull) as error:
        return f"no plots: {error}"
    return ""


def write_plots(run_dir: Path) -> list[Path]:
    """PNG plots of a run directory, in `plots/`."""
    try:
        from flotilla_coordinator.report import plots
    except ModuleNotFoundError as error:
        raise _missing(error) from error
    return plots.write_plots(run_dir)


def export_parquet(run_dir: Path) -> list[Path]:
    """Metrics and samples of a run directory as Parquet, in `parquet/`."""
    try:
        from flotilla_coordinator.report import parquet
    except ModuleNotFoundError as error:
        raise _missing(error) from error
    return parquet.export_parquet(run_dir)


def _missing(error: ModuleNotFoundError) -> Exception:
    return FailedPrecondition(
        f"reports need the package {error.name}",
        why="the extra is not installed",
        next_step="pip install 'flotilla-coordinator[report]'",
    )

"""Makes plots and Parquet files of a run, by the extra `flotilla-coordinator[report]`.

Invariants: nothing heavy is imported before a report is requested; without the extra, one error says how to get it.
matplotlib and pyarrow keep a hundred MiB of every process that imports them, so the service draws and exports in
processes of their own. The one that draws stays for a minute: runs that end soon after each other share it.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flotilla.coordinator.v1 import run_pb2
from flotilla_coordinator.records.directory import RunDirectory
from flotilla_core.bounded_process import BoundedProcess, Bounds, OutOfBounds
from flotilla_core.disk import names_full_disk
from flotilla_core.errors import Exhausted, FailedPrecondition, FlotillaError, Internal
from flotilla_core.rpc.status import encode, from_status
from flotilla_core.subprocess_group import ProcessGroup

PLOT_MEMORY_BYTES = 2 << 30
PLOT_CPU_S = 120.0
PLOT_FILE_BYTES = 64 << 20
_PLOTS = BoundedProcess(f"{__name__}:draw", Bounds(PLOT_MEMORY_BYTES, PLOT_CPU_S, file_bytes=PLOT_FILE_BYTES))
_REFUSED = 3
"""The exit code of a process that printed the status of an error."""


def conclude(directory: RunDirectory, run: run_pb2.Run) -> str:
    """Write outcome, logs and plots of a run that has ended; return a sentence where one of the last two is missing."""
    directory.finish(run)
    missing = ""
    try:
        missing = "no logs"
        directory.keep_logs(run)
        missing = "no plots"
        write_plots(directory.path)
    except FlotillaError as error:
        return f"{missing}: {error}"
    return ""


def write_plots(run_dir: Path) -> list[Path]:
    """Write PNG plots of a run directory into `plots/`, by a process of its own where there is anything to draw."""
    drawn = (run_dir / "metrics.jsonl", run_dir / "evaluations.jsonl")
    if not any(file.exists() and file.stat().st_size for file in drawn):
        return []
    try:
        return [Path(file) for file in _PLOTS.ask({"run_dir": str(run_dir)})]
    except OutOfBounds as error:
        raise Exhausted(
            "the plots cannot be drawn within bounds",
            where=str(run_dir),
            why=str(error),
            next_step="draw what you need from metrics.jsonl",
        ) from None


def draw(question: dict[str, Any]) -> list[str]:
    """Draw the plots of the run directory that the question names, in the process of `write_plots`."""
    try:
        from flotilla_coordinator.records import plots
    except ModuleNotFoundError as error:
        raise _missing(error) from error
    run_dir = Path(question["run_dir"])
    with names_full_disk("the plots cannot be written", run_dir):
        return [str(path) for path in plots.write_plots(run_dir)]


def export_parquet(run_dir: Path) -> list[Path]:
    """Write metrics and samples of a run directory as Parquet into `parquet/`."""
    try:
        from flotilla_coordinator.records import parquet
    except ModuleNotFoundError as error:
        raise _missing(error) from error
    return parquet.export_parquet(run_dir)


def write_comparison(
    names: Sequence[str],
    curves: Sequence[Mapping[str, Mapping[int, float]]],
    runs: Sequence[str],
    path: Path,
) -> None:
    """Draw metrics of several runs, by step, into one PNG."""
    try:
        from flotilla_coordinator.records import plots
    except ModuleNotFoundError as error:
        raise _missing(error) from error
    with names_full_disk("the plot cannot be written", path):
        plots.write_comparison(names, curves, runs, path)


def write_sample_table(path: Path, samples: list[dict[str, Any]]) -> None:
    """Write samples as one Parquet file."""
    try:
        from flotilla_coordinator.records import parquet
    except ModuleNotFoundError as error:
        raise _missing(error) from error
    with names_full_disk("the Parquet file cannot be written", path):
        parquet.write_table(path, samples)


def _missing(error: ModuleNotFoundError) -> Exception:
    return FailedPrecondition(
        f"reports need the package {error.name}",
        why="the extra is not installed",
        next_step="pip install 'flotilla-coordinator[report]'",
    )


class Exporter:
    """Exports the runs of one coordinator."""

    def __init__(self) -> None:
        self._one_at_a_time = asyncio.Lock()

    async def export(self, run_dir: Path) -> list[Path]:
        """Write the Parquet files of a run directory and return their paths."""
        command = [sys.executable, "-m", __name__, str(run_dir)]
        async with self._one_at_a_time:
            child = await ProcessGroup.start(command, stdout=asyncio.subprocess.PIPE)
            try:
                told, _ = await child.process.communicate()
            finally:
                code = await child.kill()
        if code == 0:
            return [Path(file) for file in json.loads(told)]
        refused = from_status(told) if code == _REFUSED else None
        raise refused or Internal(
            "the export failed",
            where=str(run_dir),
            why=f"its process ended with code {code}",
            next_step="the log of the coordinator says more",
        )


def main() -> int:
    """Export the run directory that the command line names; print its files as JSON, or the status of the error."""
    run_dir = Path(sys.argv[1])
    try:
        with names_full_disk("the Parquet files cannot be written", run_dir):
            files = export_parquet(run_dir)
    except FlotillaError as error:
        sys.stdout.buffer.write(encode(error).SerializeToString())
        return _REFUSED
    sys.stdout.write(json.dumps([str(file) for file in files]))
    return 0


if __name__ == "__main__":
    sys.exit(main())

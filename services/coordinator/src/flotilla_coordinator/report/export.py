"""Exports a run to Parquet in a process of its own.

Invariants: pyarrow, which keeps 70 MiB of whatever process imports it, never enters the service; one export goes on
at a time; the process of an export ends with the call that asked for it.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from flotilla_coordinator.report import export_parquet
from flotilla_core.disk import names_full_disk
from flotilla_core.errors import FlotillaError, Internal
from flotilla_core.rpc.status import encode, from_status
from flotilla_core.subprocess_group import ProcessGroup

_REFUSED = 3
"""Exit code of a process that printed the status of an error."""


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

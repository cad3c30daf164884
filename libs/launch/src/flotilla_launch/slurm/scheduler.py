"""Slurm as a scheduler: submits jobs, lists them and cancels them.

Invariant: jobs are found by their name, which holds the mark of the placement and the node of the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flotilla_core.config import StackConfig
from flotilla_core.files import write_atomically
from flotilla_launch.cluster import Unit
from flotilla_launch.engine_commands import outcome, refused
from flotilla_launch.paths import StackPaths
from flotilla_launch.slurm.job import Job, SlurmNodes, check, script
from flotilla_launch.state import PlacedFile
from flotilla_launch.table import Nodes, Row

_TOOL_LIMIT_S = 60.0
_ENDED = (
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "TIMEOUT",
)


class SlurmScheduler:
    """Runs the nodes of a stack as components of jobs."""

    name = "slurm"
    listing = "squeue"

    def __init__(self, paths: StackPaths) -> None:
        self._paths = paths

    def check(self, stack: StackConfig) -> None:
        check(stack)

    def nodes(self, stack: StackConfig) -> Nodes:
        return SlurmNodes(stack)

    async def start(
        self, stack: StackConfig, placed: PlacedFile, table: Sequence[Row], nodes: Sequence[str]
    ) -> None:
        job = Job(stack.name, self._paths.directory, placed.mark, Path(placed.executables))
        file = self._paths.nodes / f"{nodes[0]}.sbatch"
        write_atomically(file, script(stack, table, job, nodes))
        await _slurm("sbatch", "--parsable", str(file))

    async def units(self, placed: PlacedFile) -> dict[str, Unit]:
        """Return the newest job of each node, also of those that ended a while ago."""
        prefix = f"flotilla-{self._paths.directory.name}-{placed.mark}."
        listed = await _slurm("squeue", "--me", "--noheader", "--states=all", "--format=%j|%i|%A|%T|%r")
        found: dict[str, tuple[int, Unit]] = {}
        for line in listed.splitlines():
            name, id_, number, state, reason = line.split("|", 4)
            if not name.startswith(prefix):
                continue
            unit = Unit(
                name.removeprefix(prefix),
                id_,
                f"job {id_}",
                state.lower(),
                lives=state not in _ENDED,
                waits=reason if state == "PENDING" else "",
            )
            found[unit.node] = max(
                found.get(unit.node, (-1, unit)), (int(number), unit), key=lambda one: one[0]
            )
        return {node: unit for node, (_, unit) in found.items()}

    async def end(self, units: Sequence[Unit]) -> None:
        for unit in units:
            await _slurm("scancel", unit.id, must=False)


async def _slurm(*command: str, must: bool = True) -> str:
    """Run a command of Slurm; return what it prints."""
    missing = "run the command where Slurm's own commands are, such as a login node"
    status, out, err = await outcome(command, _TOOL_LIMIT_S, missing)
    if status and must:
        raise refused(command, err, "see the section slurm of the stack file")
    return out

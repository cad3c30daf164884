"""Slurm as an engine: submits jobs, lists them and cancels them.

Invariant: jobs are found by their name, which holds the mark of the placement and the node of the table.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from flotilla_core.config import StackConfig
from flotilla_core.errors import FailedPrecondition, Unavailable
from flotilla_core.files import write_atomically
from flotilla_core.subprocess_group import outputs
from flotilla_launch.cluster import Unit
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


class SlurmEngine:
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
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
    except OSError as error:
        raise FailedPrecondition(
            f"{command[0]} cannot be run",
            why=str(error.strerror),
            next_step="run the command where Slurm's own commands are, such as a login node",
        ) from None
    try:
        out, err = await asyncio.wait_for(outputs(process), _TOOL_LIMIT_S)
    except TimeoutError:
        raise Unavailable(
            f"{command[0]} does not answer",
            why=f"nothing within {_TOOL_LIMIT_S:.0f} s",
            next_step="try again",
        ) from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode and must:
        raise FailedPrecondition(
            f"{command[0]} refuses",
            where=" ".join(command),
            why=err.decode(errors="replace").strip(),
            next_step="see the section slurm of the stack file",
        )
    return out.decode(errors="replace")

"""Write deploy/slurm/chat.sbatch: the job that `flotilla up --on slurm` submits for deploy/slurm/stack.yaml."""

from __future__ import annotations

from pathlib import Path

from flotilla_core.config import StackConfig, load
from flotilla_launch.cluster import nodes_of
from flotilla_launch.paths import StackPaths
from flotilla_launch.slurm.job import Job, SlurmNodes, check, script
from flotilla_launch.table import table_of

FOLDER = Path(__file__).resolve().parents[1] / "deploy" / "slurm"
FILE = FOLDER / "chat.sbatch"
EXECUTABLES = Path("/shared/flotilla-env/bin")


def text() -> str:
    """Return the file as the code of today renders it."""
    stack = load(StackConfig, [FOLDER / "stack.yaml"])
    check(stack)
    directory = StackPaths.of(stack.state_dir, stack.name).directory
    table = table_of(stack, SlurmNodes(stack), directory=directory, executables=EXECUTABLES)
    return script(stack, table, Job(stack.name, directory, "1a2b3c4d", EXECUTABLES), nodes_of(table))


if __name__ == "__main__":
    FILE.write_text(text())

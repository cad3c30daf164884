"""The sbatch files of a stack: pure functions of its table.

A heterogeneous job has a component for each node of the table, the head first. Slurm places components on different
nodes of the cluster, always: so what shall share a machine is one component (`slurm.nodes`).
Invariant: what a component starts is an agent, which makes the same table from the same stack file and starts its rows;
so no command line and no variable of a service is in the file, and no secret.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from flotilla.common.v1.registration_pb2 import ServiceKind
from flotilla_core.config import StackConfig
from flotilla_core.config.stack import HEAD, SlurmNodeConfig
from flotilla_core.errors import InvalidConfig
from flotilla_core.gangs import spread_gangs
from flotilla_core.kinds import kind_of
from flotilla_launch.cluster import check_several_hosts
from flotilla_launch.placement import Slot, agent_slots, processes_of, slots_of
from flotilla_launch.table import Resources, Row, ports_of

AGENT_STARTS = 3
"""The number of times that the batch script starts the agent of a node again after it was killed."""

_LOOP = f"""\
# Starts the agent of a node, and starts it again where it was killed. One that was told to stop ends with 0, one that
# gave its services up with 1.
keep() {{
  local left={AGENT_STARTS} code
  while true; do
    "$@" && return 0
    code=$?
    [ "$code" -gt 128 ] && [ "$left" -gt 0 ] || return "$code"
    left=$((left - 1))
  done
}}

# Gives the node of a component back once its agent has ended: by itself Slurm keeps it until the whole job ends.
tend() {{
  local component=$1
  shift
  keep "$@"
  scancel "$SLURM_JOB_ID+$component" 2> /dev/null
}}
"""


@dataclass(frozen=True)
class SlurmNodes:
    """The nodes of a stack on Slurm, by the names of its components."""

    stack: StackConfig

    def slots(self, stack: StackConfig) -> list[Slot]:
        return [*slots_of(stack), *agent_slots(stack)]

    def node(self, slot: Slot) -> str:
        shares = self.section(slot) is None or kind_of(slot.kind).node == HEAD
        return self.stack.slurm.nodes.get(slot.name, HEAD if shares else slot.name)

    def resources(self, slot: Slot, stack: StackConfig) -> Resources:
        """Return what a service takes; NATS and rewards share what the coordinator is given."""
        section = self.section(slot)
        if section is None:
            return Resources(ports=ports_of(slot, stack))
        node, gpus = self.node(slot), processes_of(slot, self.stack) if stack.slurm.gpu else 0
        return Resources(
            cpus=section.cpus,
            gpus=tuple(f"{node}:{index}" for index in range(gpus)),
            memory_mib=section.memory_mib,
            ports=ports_of(slot, stack),
        )

    def variables(self, slot: Slot, stack: StackConfig) -> dict[str, str]:
        """Return the share of the CPUs that each process of a service computes with; Slurm itself gives the GPUs."""
        section = self.section(slot)
        if section is None or slot.kind == ServiceKind.SERVICE_KIND_COORDINATOR:
            return {}
        return {"OMP_NUM_THREADS": str(max(1, section.cpus // processes_of(slot, self.stack)))}

    def section(self, slot: Slot) -> SlurmNodeConfig | None:
        """Return what the stack file says of a service; None of NATS and rewards, which share the coordinator's."""
        if not slot.kind:
            return None
        found: SlurmNodeConfig | None = getattr(self.stack.slurm, kind_of(slot.kind).node, None)
        return found


@dataclass(frozen=True)
class Job:
    """The identity of the jobs of one placement."""

    stack_name: str
    directory: Path
    """The directory of the stack, on a file system that all nodes share."""
    mark: str
    """The mark of this placement, which no other one has."""
    executables: Path

    def name(self, node: str) -> str:
        """Return the name of the component of a node, in `squeue`."""
        return f"flotilla-{self.stack_name}-{self.mark}.{node}"


def check(stack: StackConfig) -> None:
    """Raise InvalidConfig for a stack that cannot run on several machines, or not on Slurm."""
    check_several_hosts(stack, "Slurm")
    if re.search(r"[\s%\\'\"]", str(stack.state_dir)):
        raise InvalidConfig(
            "sbatch cannot take this state directory",
            where=f"state_dir {stack.state_dir}",
            why="it reads spaces, quotes and % in a path as something else",
            next_step="set state_dir to a path without them",
        )
    nodes = SlurmNodes(stack)
    placed = {slot.name: nodes.node(slot) for slot in nodes.slots(stack)}
    for name, node in stack.slurm.nodes.items():
        if name not in placed or (name == "coordinator" and node != HEAD):
            raise InvalidConfig(
                f"slurm.nodes places {name} on {node}",
                why=f"the coordinator is on {HEAD}"
                if name in placed
                else "the stack has no service of that name",
                next_step=f"services: {', '.join(sorted(placed.keys() - {'coordinator'}))}",
            )
    for gang in spread_gangs(stack):
        if len({placed[name] for name in gang}) < len(gang):
            raise InvalidConfig(
                f"hosts of {gang[0]} are on one node",
                where="slurm.nodes",
                why=", ".join(f"{name} is on {placed[name]}" for name in gang),
                next_step="place each of them on a node of its own, or write one host for all ranks of the node",
            )


def script(stack: StackConfig, table: Sequence[Row], job: Job, nodes: Sequence[str]) -> str:
    """Return the file that sbatch takes for these nodes: the whole stack, or one that is placed again."""
    parts = [
        "#!/bin/bash",
        f"# The stack {stack.name!r}, written by flotilla up --on slurm: change the stack file instead.",
    ]
    for number, node in enumerate(nodes):
        rows = [row for row in table if row.node == node]
        parts += ["#SBATCH hetjob"] if number else []
        parts += [f"#SBATCH {option}" for option in _options(stack, rows, job, node)]
        parts += [f"# {node}: {', '.join(row.name for row in rows)}"]
    parts += ["", _LOOP]
    for number, node in enumerate(nodes):
        step = ["srun", *([f"--het-group={number}"] if len(nodes) > 1 else []), *_step(table, job, node)]
        start = f"tend {number}" if number else "keep"
        parts += [f"{start} {shlex.join([*step, *_agent(job, node)])} &", *([] if number else ["leader=$!"])]
    # The end of the first agent is the end of the job, whatever the others do.
    return "\n".join([*parts, 'wait "$leader"', ""])


def _options(stack: StackConfig, rows: Sequence[Row], job: Job, node: str) -> Iterator[str]:
    slurm = stack.slurm
    given: dict[str, None] = dict.fromkeys(slurm.options)
    for row in rows:
        section: SlurmNodeConfig | None = SlurmNodes(stack).section(row.slot)
        if section is not None:
            given |= dict.fromkeys(section.options)
    yield from given
    yield f"--job-name={job.name(node)}"
    yield from [f"--partition={slurm.partition}"] if slurm.partition else []
    yield from [f"--account={slurm.account}"] if slurm.account else []
    yield from [f"--time={slurm.time_limit_minutes}"] if slurm.time_limit_minutes else []
    yield "--nodes=1"
    yield "--ntasks=1"
    yield f"--cpus-per-task={_cpus(rows)}"
    memory = [row.resources.memory_mib for row in rows if row.resources.memory_mib]
    yield from [f"--mem={sum(memory)}M"] if memory else []
    gpus = sum(len(row.resources.gpus) for row in rows)
    yield from [f"--gres={slurm.gpu}:{gpus}"] if gpus else []
    # Started anew elsewhere, the head would have other addresses than those that the others were told.
    yield "--no-requeue"
    yield f"--output={job.directory / 'logs' / 'slurm.log'}"
    yield "--open-mode=append"


def _cpus(rows: Sequence[Row]) -> int:
    return max(1, sum(row.resources.cpus or 0 for row in rows))


def _step(table: Sequence[Row], job: Job, node: str) -> list[str]:
    rows = [row for row in table if row.node == node]
    # A step does not inherit these from its job.
    return [
        "--nodes=1",
        "--ntasks=1",
        f"--cpus-per-task={_cpus(rows)}",
        f"--output={job.directory / 'logs' / f'launcher-{node}.log'}",
        "--open-mode=append",
    ]


def _agent(job: Job, node: str) -> list[str]:
    launcher = str(job.executables / "flotilla-launcher")
    return [launcher, "--stack", str(job.directory / "stack.yaml"), "--node", node, "--mark", job.mark]

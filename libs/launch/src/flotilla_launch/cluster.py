"""The engine of a cluster: has a scheduler start the nodes of a stack, and believes what their agents tell.

A scheduler (Slurm, Ray) starts a unit for each node of the table: the component of a job, or an actor. The agent of the
node runs in it. Invariants: units are found by a name that holds the mark of the placement; what runs on a node is told
by its agent, and believed while its unit lives where the agent is.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from google.protobuf.json_format import ParseDict

from flotilla.common.v1.registration_pb2 import ServiceKind
from flotilla.launcher.v1 import launcher_pb2 as pb
from flotilla_core.addresses import is_loopback
from flotilla_core.config import StackConfig
from flotilla_core.config.stack import HEAD
from flotilla_core.errors import DeadlineExceeded
from flotilla_core.files import make_private_folder
from flotilla_core.gangs import spread_gangs
from flotilla_launch import local
from flotilla_launch.agent import read_endpoints
from flotilla_launch.paths import StackPaths
from flotilla_launch.placed_stack import Say, Seen, troubles_of
from flotilla_launch.placement import refuse, refused_by_engines
from flotilla_launch.state import PlacedFile, read_json
from flotilla_launch.table import Nodes, Row, table_of

_LOOK_EVERY_S = 1.0
_END_LIMIT_S = 60.0
"""The most time that an agent takes to end its services in order."""
_GONE_LIMIT_S = 120.0


@dataclass(frozen=True)
class Unit:
    """A unit is what a scheduler has started for a node of the table."""

    node: str
    id: str
    """The id by which the scheduler ends it."""
    shown: str
    """The name of it in messages."""
    state: str
    """The word of the scheduler."""
    lives: bool
    waits: str = ""
    """The reason why it has not begun yet; empty where it does not wait."""
    place: str = ""
    """The machine, where the scheduler moves units: what an agent tells from another one is out of date."""
    holds: bool = False
    """True where it keeps resources even if it does not live."""


class Scheduler(Protocol):
    """A scheduler starts and ends units."""

    name: str
    listing: str
    """The command of a user that lists units."""

    def check(self, stack: StackConfig) -> None:
        """Raise InvalidConfig for a stack that cannot run there."""

    def nodes(self, stack: StackConfig) -> Nodes: ...

    async def start(
        self, stack: StackConfig, placed: PlacedFile, table: Sequence[Row], nodes: Sequence[str]
    ) -> None:
        """Ask for a unit for each of these nodes."""

    async def units(self, placed: PlacedFile) -> dict[str, Unit]:
        """Return the newest unit of each node."""

    async def end(self, units: Sequence[Unit]) -> None:
        """End units by force; return at once."""


class Cluster:
    """Has a scheduler start the nodes of a stack."""

    look_every_s = _LOOK_EVERY_S
    queue_limit_s = 24 * 3600.0
    changes_in_place = False

    def __init__(self, paths: StackPaths, scheduler: Scheduler) -> None:
        self.name = scheduler.name
        self.listing = scheduler.listing
        self._paths = paths
        self._scheduler = scheduler

    def plan(self, stack: StackConfig, executables: Path) -> list[Row]:
        self._scheduler.check(stack)
        return self._table(stack, executables)

    async def accept(self, stack: StackConfig, placed: PlacedFile | None) -> StackConfig:
        self._scheduler.check(stack)
        return stack

    async def begin(self, stack: StackConfig, placed: PlacedFile) -> PlacedFile:
        # What cannot be asked cannot be told to end either, so it is asked before anything is remembered.
        await self._scheduler.units(placed)
        shutil.rmtree(self._paths.nodes, ignore_errors=True)
        make_private_folder(self._paths.nodes)
        return replace(placed, executables=str(local.executables_directory()))

    async def follow(
        self, stack: StackConfig, placed: PlacedFile, say: Say, scaled: ServiceKind.ValueType | None
    ) -> bool:
        table = self._table(stack, Path(placed.executables))
        wanted = nodes_of(table)
        # Nodes that a `down` had begun to end are wanted again.
        placed = replace(placed, ended=[])
        placed.write(self._paths.placed_file)  # First: an agent starts what this says.
        units = await self._scheduler.units(placed)
        living = {node for node, unit in units.items() if unit.lives}
        surplus = living - set(wanted)
        ending = [unit for node, unit in units.items() if node in surplus or (unit.holds and not unit.lives)]
        await self._end_units(placed, ending)
        for told in self._paths.nodes.glob("*.json"):
            # The last words of a node that was lost before it was given up.
            if told.stem not in wanted and told.stem not in living:
                told.unlink(missing_ok=True)
        missing = [node for node in wanted if node not in living]
        for node in missing:
            self._paths.node_file(node).unlink(missing_ok=True)
        # Apart beside others: a scheduler may start the nodes of one request together or not at all.
        for nodes in apart(table, spread_gangs(stack), missing) if living else [missing]:
            await self._scheduler.start(stack, placed, table, nodes)
        return bool(surplus or missing)

    async def look(self, stack: StackConfig, placed: PlacedFile) -> Seen:
        units = await self._scheduler.units(placed)
        processes: list[pb.ProcessStatus] = []
        for node, rows in _by_node(self._table(stack, Path(placed.executables))).items():
            processes += self._of_node(node, rows, placed, units.get(node))
        endpoints = read_endpoints(self._paths, placed.mark)
        waiting = next((unit for unit in units.values() if unit.waits), None)
        return Seen(
            processes,
            nats_url=endpoints.nats_url if endpoints else "",
            waits=f"{waiting.shown} waits: {waiting.waits}" if waiting else "",
            unsettled=sorted(self._surplus(placed, processes)),
            troubles=troubles_of(processes),
            over=HEAD not in units or not units[HEAD].lives,
        )

    async def end(self, placed: PlacedFile, say: Say) -> None:
        """End all units of a placement, agents of gangs after their fronts and the head last; then its files."""
        units = [unit for unit in (await self._scheduler.units(placed)).values() if unit.lives or unit.holds]
        stages = {
            unit.node: 2 if unit.node == HEAD else int(self._has_ranks_alone(unit.node)) for unit in units
        }
        for stage in range(3):
            placed = replace(placed, ended=[node for node, its in stages.items() if its <= stage])
            placed.write(self._paths.placed_file)
            await self._end_units(placed, [unit for unit in units if stages[unit.node] == stage])
        shutil.rmtree(self._paths.nodes, ignore_errors=True)
        for announced in self._paths.instances.glob("*.json"):
            announced.unlink(missing_ok=True)
        self._paths.endpoints_file.unlink(missing_ok=True)

    def _surplus(self, placed: PlacedFile, wanted: Sequence[pb.ProcessStatus]) -> set[str]:
        """Return the replicas that a node with other services still has."""
        told = [read_json(file) or {} for file in self._paths.nodes.glob("*.json")]
        running = {
            one["name"] for node in told if node.get("mark") == placed.mark for one in node["processes"]
        }
        return running - {process.name for process in wanted}

    def _has_ranks_alone(self, node: str) -> bool:
        """Return whether a node runs nothing but ranks of fronts on other nodes, as its agent tells."""
        told = read_json(self._paths.node_file(node)) or {}
        ranks = ServiceKind.Name(ServiceKind.SERVICE_KIND_RANKS)
        return {one.get("kind") for one in told.get("processes", [])} == {ranks}

    async def _end_units(self, placed: PlacedFile, units: Sequence[Unit]) -> None:
        """Wait for agents that are not wanted any more, end what does not; return when their nodes are free.

        Not by a signal: Slurm gives it to every process of a node at once, NATS and the coordinator among them.
        """
        if not units:
            return
        names = {unit.node for unit in units}
        if idle := [unit for unit in units if unit.waits]:
            await self._scheduler.end(idle)
        if not await self._gone(placed, names, _END_LIMIT_S):
            await self._scheduler.end(units)
            if not await self._gone(placed, names, _GONE_LIMIT_S):
                raise DeadlineExceeded(
                    "nodes of the stack do not end",
                    where=", ".join(unit.shown for unit in units),
                    why=f"{self.name} was asked to end them more than {_GONE_LIMIT_S:.0f} s ago",
                    next_step=f"see {self._scheduler.listing}, then run the command again",
                )
        for node in names:
            self._paths.node_file(node).unlink(missing_ok=True)

    async def _gone(self, placed: PlacedFile, nodes: set[str], limit_s: float) -> bool:
        """Wait until nothing of these nodes is left; what has died and still holds something is ended."""
        deadline = time.monotonic() + limit_s
        while True:
            units = [unit for unit in (await self._scheduler.units(placed)).values() if unit.node in nodes]
            if dead := [unit for unit in units if unit.holds and not unit.lives]:
                await self._scheduler.end(dead)
            elif not any(unit.lives for unit in units):
                return True
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(_LOOK_EVERY_S)

    def _table(self, stack: StackConfig, executables: Path) -> list[Row]:
        nodes = self._scheduler.nodes(stack)
        return table_of(stack, nodes, directory=self._paths.directory, executables=executables)

    def _of_node(
        self, node: str, rows: Sequence[Row], placed: PlacedFile, unit: Unit | None
    ) -> list[pb.ProcessStatus]:
        """Return the processes of a node: as its agent tells them, or as its unit explains that none does."""
        told = read_json(self._paths.node_file(node)) or {}
        # The last words of a unit that is over are believed wherever they were written.
        here = unit is None or not unit.lives or told.get("place", "") == unit.place
        told = told if here and told.get("mark") == placed.mark else {}
        known = {one["name"]: ParseDict(one, pb.ProcessStatus()) for one in told.get("processes", [])}
        state, error = pb.ProcessState.PROCESS_STATE_STARTING, ""
        if unit is None or not unit.lives:
            state = pb.ProcessState.PROCESS_STATE_STOPPED
            ended = f"{unit.shown} is over ({unit.state})" if unit else f"{self.name} has nothing of it"
            error = f"{ended}; flotilla up places it again"
        elif unit.waits:
            error = f"{unit.shown} waits: {unit.waits}"
        if told.get("error"):
            state, error = pb.ProcessState.PROCESS_STATE_FAILED, str(told["error"])
        found = []
        for row in rows:
            status = known.get(row.name)
            if status is None or state != pb.ProcessState.PROCESS_STATE_STARTING:
                failed = status is not None and status.state == pb.ProcessState.PROCESS_STATE_FAILED
                why = status.error if failed and status is not None else error
                status = pb.ProcessStatus(
                    name=row.name,
                    kind=row.slot.kind,
                    state=pb.ProcessState.PROCESS_STATE_FAILED if failed else state,
                    log_path=str(self._paths.log_file(row.name)),
                    error=why,
                )
                status.since.GetCurrentTime()
            found.append(status)
        return found


def nodes_of(table: Sequence[Row]) -> list[str]:
    """Return the nodes of a table, the head first."""
    found = dict.fromkeys(row.node for row in table)
    return sorted(found, key=lambda node: node != HEAD)


def apart(table: Sequence[Row], gangs: Sequence[Sequence[str]], nodes: Sequence[str]) -> list[list[str]]:
    """Return these nodes by what is asked for together: those of a gang in one request, each other one by itself."""
    node_of = {row.name: row.node for row in table}
    left = dict.fromkeys(nodes)
    requests: list[list[str]] = []
    for names in [*gangs, *([row.name] for row in table)]:
        together = [node for name in names if (node := node_of[name]) in left]
        left = {node: None for node in left if node not in together}
        requests += [together] if together else []
    return requests


def check_several_hosts(stack: StackConfig, engine: str) -> None:
    """Raise InvalidConfig for a stack that cannot run on several machines of an engine."""
    refused = (
        (
            is_loopback(stack.bind.host) or is_loopback(stack.bind.advertise_host or "a.b"),
            f"bind.host {stack.bind.host}: other nodes cannot reach a service at a loopback address",
            'set bind.host: "0.0.0.0" in the stack file: each service then tells the address of its node',
        ),
        (
            stack.bind.advertise_host is not None,
            f"bind.advertise_host {stack.bind.advertise_host}: the services would all tell the same address",
            "leave it out: each service tells the address of its node",
        ),
        *refused_by_engines(stack),
    )
    refuse(f"this stack cannot run on {engine}", refused)


def _by_node(table: Sequence[Row]) -> dict[str, list[Row]]:
    return {node: [row for row in table if row.node == node] for node in nodes_of(table)}

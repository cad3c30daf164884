"""The launcher of a cluster: has an engine start the nodes of a stack, watches them, scales the stack and ends it.

An engine (Slurm, Ray) starts a unit for each node of the table: the component of a job, or an actor. The agent of the
node runs in it. Invariants: one command at a time works on a stack; units are found by a name that holds the mark of
the placement, so none is forgotten when a command dies; `placed.json` exists from before the first unit until after
the last one; a first start comes up whole or leaves no unit. What runs on a node is told by its agent, and believed
while its unit lives where the agent is.
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from google.protobuf.json_format import ParseDict

from flotilla.common.v1.registration_pb2 import ServiceKind
from flotilla.launcher.v1 import launcher_pb2 as pb
from flotilla_core.addresses import is_loopback
from flotilla_core.config import StackConfig, dump_yaml, load
from flotilla_core.config.stack import HEAD
from flotilla_core.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidConfig,
)
from flotilla_core.files import make_private_folder, write_atomically
from flotilla_core.gangs import spread_gangs
from flotilla_core.kinds import kind_name
from flotilla_core.trust import make_token
from flotilla_launch import local
from flotilla_launch.agent import read_endpoints
from flotilla_launch.paths import StackPaths
from flotilla_launch.placement import (
    changed_replicas,
    check_scalable,
    difference,
    slots_of,
    wanted_replicas,
)
from flotilla_launch.state import PlacedFile, read_json
from flotilla_launch.table import Nodes, Placed, Row, table_of

LOOK_EVERY_S = 1.0
_END_LIMIT_S = 60.0
"""The most time that an agent takes to end its services in order."""
_GONE_LIMIT_S = 120.0
_UP_LIMIT_S = 24 * 3600.0
"""The longest wait for a stack to come up: a cluster may give a node late."""
_READY = pb.ProcessState.PROCESS_STATE_READY


@dataclass(frozen=True)
class Unit:
    """A unit is what an engine has started for a node of the table."""

    node: str
    id: str
    """The id by which the engine ends it."""
    shown: str
    """The name of it in messages."""
    state: str
    """The word of the engine."""
    lives: bool
    waits: str = ""
    """The reason why it has not begun yet; empty where it does not wait."""
    place: str = ""
    """The machine, where the engine moves units: what an agent tells from another one is out of date."""
    holds: bool = False
    """True where it keeps resources even if it does not live."""


class Engine(Protocol):
    """An engine starts and ends units."""

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


class ClusterLauncher:
    """Keeps one stack on a cluster."""

    def __init__(self, paths: StackPaths, engine: Engine) -> None:
        self.name = engine.name
        self._paths = paths
        self._engine = engine

    async def place(
        self, stack: StackConfig, *, on_progress: local.Progress, on_wait: Callable[[str], None]
    ) -> Placed:
        self._engine.check(stack)
        self._paths.make()
        make_token(stack.bind, self._paths.directory)
        async with local.one_at_a_time(self._paths, _UP_LIMIT_S, on_wait):
            placed = PlacedFile.read(self._paths.placed_file)
            if placed is not None and await self._head_lives(placed):
                changed = await self._completed(stack, placed, on_progress, on_wait)
            else:
                if placed is not None:
                    on_wait(f"this stack has ended on {self.name}: placing it anew")
                    await self._end(placed, on_wait)
                await self._begun(stack, on_progress, on_wait)
                changed = True
            return Placed(changed, list((await self.state()).processes))

    async def state(self) -> pb.ListResponse:
        placed = self._placed()
        units = await self._engine.units(placed)
        stack = placed.scaled(load(StackConfig, [self._paths.stack_file]))
        processes: list[pb.ProcessStatus] = []
        for node, rows in _by_node(self._table(stack, placed)).items():
            processes += self._of_node(node, rows, placed, units.get(node))
        endpoints = read_endpoints(self._paths, placed.mark)
        return pb.ListResponse(
            stack=self._paths.directory.name,
            nats_url=endpoints.nats_url if endpoints else "",
            processes=processes,
        )

    async def scale(
        self, kind: ServiceKind.ValueType, replicas: int, *, timeout_s: float
    ) -> list[pb.ProcessStatus]:
        check_scalable(kind)
        async with local.one_at_a_time(self._paths, _GONE_LIMIT_S, lambda _: None):
            placed = self._placed()
            placed = replace(placed, replicas={**placed.replicas, kind_name(kind): replicas})
            await self._adjust(placed, timeout_s, lambda _: None, lambda _: None)
        return [process for process in (await self.state()).processes if process.kind == kind]

    async def down(self, *, on_wait: Callable[[str], None]) -> bool:
        async with local.one_at_a_time(self._paths, _GONE_LIMIT_S, on_wait):
            placed = PlacedFile.read(self._paths.placed_file)
            if placed is None:
                return False
            await self._end(placed, on_wait)
            return True

    async def _begun(
        self, stack: StackConfig, on_progress: local.Progress, on_wait: Callable[[str], None]
    ) -> None:
        """Start the whole stack and wait until it is up; end it where it does not come up."""
        write_atomically(self._paths.stack_file, dump_yaml(stack))
        replicas = wanted_replicas(stack)
        executables = str(local.executables_directory())
        placed = PlacedFile(self.name, secrets.token_hex(4), replicas, executables)
        # Before anything is remembered: what cannot be asked cannot be told to end either.
        await self._engine.units(placed)
        shutil.rmtree(self._paths.nodes, ignore_errors=True)
        make_private_folder(self._paths.nodes)
        async with AsyncExitStack() as unless_up:
            unless_up.push_async_callback(self._end, placed, on_wait)
            placed.write(self._paths.placed_file)
            table = self._table(stack, placed)
            await self._engine.start(stack, placed, table, nodes_of(table))
            await self._until_up(placed, None, on_progress, on_wait)
            unless_up.pop_all()

    async def _completed(
        self,
        stack: StackConfig,
        placed: PlacedFile,
        on_progress: local.Progress,
        on_wait: Callable[[str], None],
    ) -> bool:
        """Place again what a running stack has lost, and follow changed numbers of replicas."""
        running = load(StackConfig, [self._paths.stack_file])
        differing = difference(running, stack)
        if differing:
            raise FailedPrecondition(
                f"stack {stack.name!r} already runs with another configuration",
                where=str(self._paths.directory),
                why="\n  " + "\n  ".join(differing) + "\n",
                next_step="run `flotilla down` first, or give the new stack another name",
            )
        changed = changed_replicas(running, stack)
        write_atomically(self._paths.stack_file, dump_yaml(stack))
        wanted = replace(placed, replicas={**placed.replicas, **changed})
        return await self._adjust(wanted, None, on_progress, on_wait) or bool(changed)

    async def _adjust(
        self,
        placed: PlacedFile,
        timeout_s: float | None,
        on_progress: local.Progress,
        on_wait: Callable[[str], None],
    ) -> bool:
        """Make the units equal to what is wanted; return whether one was started or ended."""
        stack = placed.scaled(load(StackConfig, [self._paths.stack_file]))
        table = self._table(stack, placed)
        wanted = nodes_of(table)
        # Nodes that a `down` had begun to end are wanted again.
        placed = replace(placed, ended=[])
        placed.write(self._paths.placed_file)  # First: an agent starts what this says.
        units = await self._engine.units(placed)
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
        # Apart: an engine may start the nodes of one request together or not at all.
        for nodes in apart(table, spread_gangs(stack), missing):
            await self._engine.start(stack, placed, table, nodes)
        await self._until_up(placed, timeout_s, on_progress, on_wait)
        return bool(surplus or missing)

    async def _until_up(
        self,
        placed: PlacedFile,
        timeout_s: float | None,
        on_progress: local.Progress,
        on_wait: Callable[[str], None],
    ) -> None:
        """Wait until every row is READY; raise why one will not be."""
        said = ""
        deadline = time.monotonic() + (timeout_s or _UP_LIMIT_S)
        while True:
            units = await self._engine.units(placed)
            processes = list((await self.state()).processes)
            on_progress(processes)
            waiting = next((unit for unit in units.values() if unit.waits), None)
            if waiting is not None and (text := f"{waiting.shown} waits: {waiting.waits}") != said:
                said = text
                on_wait(text)
            if all(process.state == _READY for process in processes) and not self._surplus(placed, processes):
                return
            for process in processes:
                stopped = process.state == pb.ProcessState.PROCESS_STATE_STOPPED
                if process.state == pb.ProcessState.PROCESS_STATE_FAILED or (stopped and process.error):
                    raise FailedPrecondition(
                        f"{process.name} did not start",
                        where=f"stack {self._paths.directory.name!r} on {self.name}",
                        why=process.error,
                        next_step=f"read {process.log_path}, or the other files of {self._paths.logs}",
                    )
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    "the stack did not become ready",
                    where=self.name,
                    why=said or "its services are still starting",
                    next_step=f"see flotilla ps and {self._engine.listing}; what was started stays until "
                    "flotilla down",
                )
            await asyncio.sleep(LOOK_EVERY_S)

    def _surplus(self, placed: PlacedFile, wanted: Sequence[pb.ProcessStatus]) -> set[str]:
        """Return the replicas that a node with other services still has."""
        told = [read_json(file) or {} for file in self._paths.nodes.glob("*.json")]
        running = {
            one["name"] for node in told if node.get("mark") == placed.mark for one in node["processes"]
        }
        return running - {process.name for process in wanted}

    async def _head_lives(self, placed: PlacedFile) -> bool:
        head = (await self._engine.units(placed)).get(HEAD)
        return head is not None and head.lives

    async def _end(self, placed: PlacedFile, on_wait: Callable[[str], None]) -> None:
        """End all units of a placement, agents of gangs after their fronts and the head last; then its files."""
        units = [unit for unit in (await self._engine.units(placed)).values() if unit.lives or unit.holds]
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
        for file in (self._paths.endpoints_file, self._paths.placed_file):
            file.unlink(missing_ok=True)

    def _has_ranks_alone(self, node: str) -> bool:
        """Return whether a node runs nothing but ranks of fronts on other nodes, as its agent tells."""
        told = read_json(self._paths.node_file(node)) or {}
        ranks = ServiceKind.Name(ServiceKind.SERVICE_KIND_RANKS)
        return {one.get("kind") for one in told.get("processes", [])} == {ranks}

    async def _end_units(self, placed: PlacedFile, units: Sequence[Unit]) -> None:
        """Wait for agents that are not wanted any more, end what does not; return when the engine has the nodes back.

        Not by a signal: Slurm gives it to every process of a node at once, NATS and the coordinator among them.
        """
        if not units:
            return
        names = {unit.node for unit in units}
        if idle := [unit for unit in units if unit.waits]:
            await self._engine.end(idle)
        if not await self._gone(placed, names, _END_LIMIT_S):
            await self._engine.end(units)
            if not await self._gone(placed, names, _GONE_LIMIT_S):
                raise DeadlineExceeded(
                    "nodes of the stack do not end",
                    where=", ".join(unit.shown for unit in units),
                    why=f"{self.name} was asked to end them more than {_GONE_LIMIT_S:.0f} s ago",
                    next_step=f"see {self._engine.listing}, then run the command again",
                )
        for node in names:
            self._paths.node_file(node).unlink(missing_ok=True)

    async def _gone(self, placed: PlacedFile, nodes: set[str], limit_s: float) -> bool:
        """Wait until nothing of these nodes is left; what has died and still holds something is ended."""
        deadline = time.monotonic() + limit_s
        while True:
            units = [unit for unit in (await self._engine.units(placed)).values() if unit.node in nodes]
            if dead := [unit for unit in units if unit.holds and not unit.lives]:
                await self._engine.end(dead)
            elif not any(unit.lives for unit in units):
                return True
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(LOOK_EVERY_S)

    def _table(self, stack: StackConfig, placed: PlacedFile) -> list[Row]:
        return table_of(
            stack,
            self._engine.nodes(stack),
            directory=self._paths.directory,
            executables=Path(placed.executables),
        )

    def _of_node(
        self, node: str, rows: Sequence[Row], placed: PlacedFile, unit: Unit | None
    ) -> list[pb.ProcessStatus]:
        """Return the processes of a node: as its agent tells them, or as its unit explains that none does."""
        told = read_json(self._paths.node_file(node)) or {}
        here = told.get("mark") == placed.mark and (unit is None or told.get("place", "") == unit.place)
        told = told if here else {}
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

    def _placed(self) -> PlacedFile:
        return PlacedFile.required(self._paths.placed_file, self.name)


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
    if is_loopback(stack.bind.host) or is_loopback(stack.bind.advertise_host or "a.b"):
        raise InvalidConfig(
            "other nodes cannot reach the services of this stack",
            where=f"bind.host {stack.bind.host}",
            why="a loopback address is another machine on every node",
            next_step='set bind.host: "0.0.0.0" in the stack file: each service then tells the address of its node',
        )
    if stack.bind.advertise_host is not None:
        raise InvalidConfig(
            "the services of this stack would all tell the same address",
            where=f"bind.advertise_host {stack.bind.advertise_host}",
            why="they are on several nodes",
            next_step="leave it out: each service tells the address of its node",
        )
    attached = [slot.name for slot in slots_of(stack) if slot.attached is not None]
    if attached:
        raise InvalidConfig(
            f"{attached[0]} is attached, and on {engine} the launcher starts every service",
            where="attach",
            next_step="leave attach out of the stack file",
        )
    if stack.autoscale is not None and stack.autoscale.mode == "act":
        raise InvalidConfig(
            f"a run cannot scale a stack on {engine}",
            where="autoscale.mode act",
            why="it would have to start nodes from a node",
            next_step="set autoscale.mode: advise, and follow the advice with flotilla scale",
        )
    if stack.placement == "colocated":
        raise InvalidConfig(
            f"on {engine} generators have GPUs of their own",
            where="placement colocated",
            next_step="set placement: separate",
        )


def _by_node(table: Sequence[Row]) -> dict[str, list[Row]]:
    return {node: [row for row in table if row.node == node] for node in nodes_of(table)}

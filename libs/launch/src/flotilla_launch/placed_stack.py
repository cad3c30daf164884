"""The launcher of every engine but this host's own: has an engine place a stack, watches, scales and ends it.

An engine (containers, a cluster, Kubernetes) starts what the table of a stack says, and tells what runs. Invariants:
one command at a time works on a stack; `placed.json` exists from before the engine starts anything until after nothing
is left, and what runs is found by a name, so none is forgotten when a command dies; a first start comes up whole or
leaves nothing.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from flotilla.common.v1.registration_pb2 import ServiceKind
from flotilla.launcher.v1 import launcher_pb2 as pb
from flotilla_core.config import StackConfig, dump_yaml, load
from flotilla_core.errors import DeadlineExceeded, FailedPrecondition, FlotillaError
from flotilla_core.files import write_atomically
from flotilla_core.kinds import kind_name
from flotilla_launch import local
from flotilla_launch.own_credential import own_credential
from flotilla_launch.paths import StackPaths
from flotilla_launch.placement import changed_replicas, check_scalable, require_same, wanted_replicas
from flotilla_launch.state import PlacedFile
from flotilla_launch.table import Placed, Row

_LOCK_LIMIT_S = 600.0
READY = pb.ProcessState.PROCESS_STATE_READY
Say = Callable[[str], None]


@dataclass(frozen=True)
class Trouble:
    """Says why a service will not be READY by waiting, and what to do."""

    name: str
    why: str
    next_step: str
    patience_s: float = 0.0
    """The time after which it has passed, if it passes at all."""


@dataclass(frozen=True)
class Seen:
    """The stack as its engine sees it."""

    processes: list[pb.ProcessStatus]
    nats_url: str = ""
    waits: str = ""
    """A sentence about something that the engine has not begun yet; empty where there is nothing."""
    unsettled: Sequence[str] = ()
    """The names of what does not run as it is wanted yet, although all that is wanted may be READY."""
    troubles: Sequence[Trouble] = ()
    steps: Mapping[str, int] = field(default_factory=dict)
    """The number of steps that each unit has come: each new one may take as long as a whole start."""
    over: bool = False
    """True where nothing of it can be started again without the rest."""
    place: str = ""
    """The place of the stack within the engine, where it has several."""
    next_step: str = ""
    """The advice to a user where it stays like this."""


class Engine(Protocol):
    """An engine places the rows of a stack's table."""

    name: str
    listing: str
    """The command of a user that lists what the engine runs."""
    look_every_s: float
    queue_limit_s: float
    """The longest time for which the engine lets a stack wait for machines."""
    changes_in_place: bool
    """True where a stack that runs follows every change of its file, not only numbers of replicas."""

    def plan(self, stack: StackConfig, executables: Path) -> list[Row]:
        """Return the table; raise InvalidConfig for a stack that cannot run there. Asks nobody."""

    async def accept(self, stack: StackConfig, placed: PlacedFile | None) -> StackConfig:
        """Return the stack as it is kept; raise what would end its start, before anything is written."""

    async def begin(self, stack: StackConfig, placed: PlacedFile) -> PlacedFile:
        """Make what has to be there before a first start, and return the placement with what the engine adds."""

    async def follow(
        self, stack: StackConfig, placed: PlacedFile, say: Say, scaled: ServiceKind.ValueType | None
    ) -> bool:
        """Write `placed`, and make what runs equal to what is wanted; return whether it was not.

        Where a kind was `scaled`, its number alone has changed.
        """

    async def look(self, stack: StackConfig, placed: PlacedFile) -> Seen: ...

    async def end(self, placed: PlacedFile, say: Say) -> None:
        """End everything in order, and remove the files of the engine."""


class PlacedStack:
    """Keeps one stack with an engine."""

    def __init__(self, paths: StackPaths, engine: Engine) -> None:
        self.name = engine.name
        self._paths = paths
        self._engine = engine

    async def place(self, stack: StackConfig, *, on_progress: local.Progress, on_wait: Say) -> Placed:
        stack = await self._engine.accept(stack, PlacedFile.read(self._paths.placed_file))
        self._paths.make()
        own_credential(stack, self._paths, on_wait)
        limit_s = self._up_limit_s(stack)
        async with local.one_at_a_time(self._paths, limit_s + _LOCK_LIMIT_S, on_wait):
            placed = PlacedFile.read(self._paths.placed_file)
            if placed is not None and (await self._engine.look(self._stack(placed), placed)).over:
                on_wait(f"this stack has ended on {self.name}: placing it anew")
                await self._end(placed)
                placed = None
            if placed is None:
                await self._begun(stack, on_progress, on_wait)
                changed = True
            else:
                changed = await self._completed(stack, placed, on_progress, on_wait)
            return Placed(changed, list((await self.state()).processes))

    async def state(self) -> pb.ListResponse:
        placed = self._placed()
        seen = await self._engine.look(self._stack(placed), placed)
        return pb.ListResponse(
            stack=self._paths.directory.name, nats_url=seen.nats_url, processes=seen.processes
        )

    async def scale(
        self, kind: ServiceKind.ValueType, replicas: int, *, timeout_s: float
    ) -> list[pb.ProcessStatus]:
        check_scalable(kind)
        async with local.one_at_a_time(self._paths, _LOCK_LIMIT_S, lambda _: None):
            placed = self._placed()
            placed = replace(placed, replicas={**placed.replicas, kind_name(kind): replicas})
            stack = self._stack(placed)
            await self._engine.follow(stack, placed, lambda _: None, kind)
            await self._until_up(stack, placed, timeout_s, lambda _: None, lambda _: None)
        return [process for process in (await self.state()).processes if process.kind == kind]

    async def down(self, *, on_wait: Say) -> bool:
        async with local.one_at_a_time(self._paths, _LOCK_LIMIT_S, on_wait):
            placed = PlacedFile.read(self._paths.placed_file)
            if placed is not None:
                await self._end(placed, on_wait)
            return placed is not None

    async def _begun(self, stack: StackConfig, on_progress: local.Progress, on_wait: Say) -> None:
        """Start the whole stack and wait until it is up; end it where it does not come up."""
        write_atomically(self._paths.stack_file, dump_yaml(stack))
        placed = PlacedFile(self.name, secrets.token_hex(4), wanted_replicas(stack), executables="")
        placed = await self._engine.begin(stack, placed)
        async with AsyncExitStack() as unless_up:
            unless_up.push_async_callback(self._end, placed)
            await self._follow(stack, placed, on_progress, on_wait)
            unless_up.pop_all()

    async def _completed(
        self, stack: StackConfig, placed: PlacedFile, on_progress: local.Progress, on_wait: Say
    ) -> bool:
        """Start what a running stack has lost, and follow changes; return whether there were any."""
        running = load(StackConfig, [self._paths.stack_file])
        if not self._engine.changes_in_place:
            require_same(running, stack, self._paths.directory)
        changed = changed_replicas(running, stack)
        write_atomically(self._paths.stack_file, dump_yaml(stack))
        placed = replace(placed, replicas={**placed.replicas, **changed})
        # Before what may fail: a next `up` finds no difference to the file of the stack any more.
        placed.write(self._paths.placed_file)
        return await self._follow(placed.scaled(stack), placed, on_progress, on_wait) or bool(changed)

    async def _follow(
        self, stack: StackConfig, placed: PlacedFile, on_progress: local.Progress, on_wait: Say
    ) -> bool:
        changed = await self._engine.follow(stack, placed, on_wait, None)
        await self._until_up(stack, placed, self._up_limit_s(stack), on_progress, on_wait)
        return changed

    async def _until_up(
        self,
        stack: StackConfig,
        placed: PlacedFile,
        timeout_s: float,
        on_progress: local.Progress,
        on_wait: Say,
    ) -> None:
        """Wait until what runs is what is wanted, and READY; raise why it will not be."""
        said = ""
        reached: dict[str, int] = {}
        since: dict[str, float] = {}
        deadline = time.monotonic() + timeout_s
        while True:
            seen = await self._engine.look(stack, placed)
            on_progress(seen.processes)
            if seen.waits and seen.waits != said:
                said = seen.waits
                on_wait(said)
            if not seen.unsettled and all(process.state == READY for process in seen.processes):
                return
            now = time.monotonic()
            for name, step in seen.steps.items():
                if step > reached.get(name, -1):
                    reached[name], deadline = step, now + timeout_s
            since = {trouble.name: since.get(trouble.name, now) for trouble in seen.troubles}
            for trouble in seen.troubles:
                if now - since[trouble.name] >= trouble.patience_s:
                    raise self._did_not_start(FailedPrecondition, seen, trouble)
            if now > deadline:
                raise self._did_not_start(DeadlineExceeded, seen, self._late(seen, timeout_s))
            await asyncio.sleep(self._engine.look_every_s)

    def _late(self, seen: Seen, timeout_s: float) -> Trouble:
        """Say what is not up in time, with what the engine tells of it."""
        slow = [process for process in seen.processes if process.state != READY]
        what = slow[0].name if slow else seen.unsettled[0]
        why = (slow[0].error if slow else "") or f"it was not ready within {timeout_s:.0f} s"
        next_step = f"see {self._engine.listing} and flotilla logs {what}, or raise ready_timeout_s"
        return Trouble(what, why, seen.next_step or next_step)

    def _did_not_start(self, kind: type[FlotillaError], seen: Seen, trouble: Trouble) -> FlotillaError:
        return kind(
            f"{trouble.name} did not start",
            where=f"stack {self._paths.directory.name!r} on {self.name}{seen.place and ', ' + seen.place}",
            why=trouble.why,
            next_step=trouble.next_step,
        )

    async def _end(self, placed: PlacedFile, say: Say = lambda _: None) -> None:
        await self._engine.end(placed, say)
        self._paths.placed_file.unlink(missing_ok=True)

    def _up_limit_s(self, stack: StackConfig) -> float:
        return stack.ready_timeout_s + self._engine.queue_limit_s

    def _stack(self, placed: PlacedFile) -> StackConfig:
        return placed.scaled(load(StackConfig, [self._paths.stack_file]))

    def _placed(self) -> PlacedFile:
        return PlacedFile.required(self._paths.placed_file, self.name)


def troubles_of(processes: Sequence[pb.ProcessStatus]) -> list[Trouble]:
    """Return those that have ended, and that their engine does not start again by itself."""
    return [
        Trouble(
            process.name,
            process.error,
            f"read {process.log_path}, or the other files of {Path(process.log_path).parent}",
        )
        for process in processes
        if process.state == pb.ProcessState.PROCESS_STATE_FAILED
        or (process.state == pb.ProcessState.PROCESS_STATE_STOPPED and process.error)
    ]

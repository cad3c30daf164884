"""The workers that hold the episodes of runs.

Invariants: a worker serves one run and one file of environments; only those of the service itself are in workers that
no file of a user's was loaded into. It holds many episodes and works for one at a time, in the order in which they
asked. A question that has begun is answered whether or not its caller is still there: a caller that leaves harms no
other episode of the worker. A worker that was lost is never used again.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flotilla.common.v1.chat_pb2 import Message, Tool, ToolCall
from flotilla.environment.v1 import environment_pb2 as pb
from flotilla_core.errors import InvalidConfig, Unavailable, unicode_text
from flotilla_core.logger import get_logger
from flotilla_environment.builtin import JAILED
from flotilla_environment.environment import Program
from flotilla_environment.programs import Programs
from flotilla_environment.rooms import Rooms
from flotilla_environment.servers import Place, Servers
from flotilla_environment.waits import Waits
from flotilla_environment.worker import ROLES
from flotilla_workers.frames import NoAnswer
from flotilla_workers.functions import Target
from flotilla_workers.jail.jail import NO_JAIL, Cell, Jail, no_jail, shown_for
from flotilla_workers.pool import Owner
from flotilla_workers.process import Failure, Timeout, WorkerProcess

LOADER = "flotilla_environment.worker:load"
IDLE_S = 60.0
"""The time for which a worker without an episode is kept."""

log = get_logger(__name__)


def owner_of(target: Target, run_id: str) -> Owner:
    """Return whose worker it is; what is code of the service itself alone needs no jail."""
    if target.kind == "builtin":
        jailed = target.source in JAILED
        return Owner(run_id, target.source if jailed else "built-in", trusted=not jailed)
    return Owner.of(target, run_id)


@dataclass(frozen=True)
class Said:
    """The words of an environment."""

    messages: list[Message]
    programs: dict[int, Program]
    """The programs whose outputs are the contents of messages, by the places of these."""
    tools: list[Tool]
    done: bool
    afresh: bool
    state: str
    reward: float | None
    rewards: dict[str, float]
    metrics: dict[str, float]
    digest: bytes
    """Equal where all of it is."""

    @property
    def asked(self) -> pb.TurnAsked:
        """The turn that it asks for."""
        return pb.TurnAsked(messages=self.messages, tools=self.tools, afresh=self.afresh, state=self.state)


Outcome = Said | Failure | Timeout | None
"""An answer, or its failure; None where the worker was lost for a reason that is not the question's."""


def read(value: Any) -> Said:
    """Return what a worker's value means; no honest worker says one that is refused here."""
    try:
        return Said(
            [_message(one) for one in value["messages"]],
            {
                place: Program(unicode_text(one["program"]["code"]), _of(float, one["program"]["limit_s"]))
                for place, one in enumerate(value["messages"])
                if "program" in one
            },
            [Tool(function=unicode_text(text)) for text in value["tools"]],
            _of(bool, value["done"]),
            _of(bool, value["afresh"]),
            unicode_text(value["state"]),
            None if value["reward"] is None else _of(float, value["reward"]),
            {unicode_text(key): _of(float, number) for key, number in value["rewards"].items()},
            {unicode_text(key): _of(float, number) for key, number in value["metrics"].items()},
            hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).digest(),
        )
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise NoAnswer("it is nothing that an environment says") from error


def _message(said: dict[str, Any]) -> Message:
    calls = [
        ToolCall(
            id=unicode_text(one["id"]),
            name=unicode_text(one["name"]),
            arguments=unicode_text(one["arguments"]),
        )
        for one in said.get("tool_calls", ())
    ]
    if said["role"] not in ROLES:
        raise ValueError
    return Message(
        role=said["role"],
        content=unicode_text(said["content"]),
        tool_calls=calls,
        tool_call_id=unicode_text(said.get("tool_call_id", "")),
    )


def _of(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError
    return value


class Holder:
    """One worker with the episodes that it holds; it starts with the first question."""

    def __init__(self, owner: Owner, cell: Cell, on_loss: Callable[[], None]) -> None:
        self.owner = owner
        self._cell = cell
        self._on_loss = on_loss
        self.episodes = 0
        self.lost = False
        self._worker: WorkerProcess | None = None
        self._free = asyncio.Lock()
        self._asked: set[asyncio.Task[Outcome]] = set()
        self._idle: asyncio.TimerHandle | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the worker, while it lives."""
        return self._worker.pid if self._worker is not None and self._worker.alive else None

    def take(self) -> None:
        """Hold one episode more."""
        self.episodes += 1
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None

    def give_back(self) -> None:
        """Hold one episode less; a worker without any ends after a while."""
        self.episodes -= 1
        if not self.episodes:
            self._idle = asyncio.get_running_loop().call_later(IDLE_S, self._retire)

    def _retire(self) -> None:
        self.lost = True
        self._keep(asyncio.ensure_future(self._end()))

    async def _end(self) -> Outcome:
        await self.kill()
        return None

    async def ask(self, target: Target, question: dict[str, Any], limit_s: float, waits: Waits) -> Outcome:
        """Return the outcome of a question; `limit_s` counts while the worker works at it, and `waits` before that."""
        waits.begin()
        asked = asyncio.create_task(self._ask(target, question, limit_s, waits))
        self._keep(asked)
        return await asyncio.shield(asked)

    def _keep(self, task: asyncio.Task[Outcome]) -> None:
        self._asked.add(task)

        def ended(task: asyncio.Task[Outcome]) -> None:
            self._asked.discard(task)
            if not task.cancelled():
                task.exception()  # Its caller may be gone.

        task.add_done_callback(ended)

    async def _ask(self, target: Target, question: dict[str, Any], limit_s: float, waits: Waits) -> Outcome:
        async with self._free:
            if self.lost:
                return None
            if self._worker is None:
                self._worker = await WorkerProcess.start(LOADER, self._cell)
            if not self._worker.quiet:
                self._lose(await self._worker.kill())
                return None
            failure = await self._worker.load(target)
            waits.end()
            outcome: Outcome = failure or await self._worker.ask(target, question, limit_s, read)
            if not self._worker.alive:
                self._lose(_why(outcome))
            if failure is not None and not self.lost:
                raise InvalidConfig(
                    "the environment cannot be loaded",
                    where=f"{target.source}:{target.function}".rstrip(":"),
                    why=failure.message + (f"\n{failure.traceback}" if failure.traceback else ""),
                )
            return outcome

    def _lose(self, why: str) -> None:
        if not self.lost:
            self._on_loss()
        self.lost = True
        log.warning("worker lost", of=str(self.owner), episodes=self.episodes, why=why)

    async def kill(self) -> None:
        """End the worker; a question that it works at fails."""
        self.lost = True
        if self._worker is not None:
            await self._worker.kill()


def _why(outcome: Outcome) -> str:
    if isinstance(outcome, Timeout):
        return f"it took longer than {outcome.limit_s:g} s"
    return outcome.message if isinstance(outcome, Failure) else "it ended"


class Holders:
    """The workers of all runs: up to a number for each run and file."""

    def __init__(self, most: int, find_jail: Callable[[], Jail] = no_jail) -> None:
        self._most = most
        self._find_jail = find_jail
        self.jail = NO_JAIL
        """The jail of code of users, once it was looked for."""
        self._slots = itertools.count(64 * os.getpid())  # Other services of this host have others.
        self._of: dict[Owner, list[Holder]] = {}
        self._stopped = False
        self._programs = Programs()
        self._rooms = Rooms()
        self._servers = Servers(self._rooms)
        self.lost = 0
        """Workers that were killed for what they did or died, since the start."""

    async def start(self) -> None:
        """Look what jail this host has; workers start with their first question."""
        self.jail = await asyncio.to_thread(self._find_jail)

    def take(self, owner: Owner) -> Holder:
        """Return the worker for one more episode: the one with the fewest, or a new one."""
        if self._stopped:
            raise Unavailable("the replica ends")
        living = [holder for holder in self._of.get(owner, ()) if not holder.lost]
        fewest = min(living, key=lambda holder: holder.episodes, default=None)
        if fewest is None or (fewest.episodes and len(living) < self._most):
            self._forget_lost()
            fewest = Holder(owner, self._cell(owner), self._count_loss)
            self._of.setdefault(owner, []).append(fewest)
        fewest.take()
        return fewest

    async def run(self, programs: Sequence[Program], run_id: str, waits: Waits) -> list[tuple[str, bool]]:
        """Return of each program of the policy what it is told, and whether it failed."""
        return await self._programs.run(programs, self.jail, run_id, waits)

    def place(self, run_id: str, *, trusted: bool) -> Place:
        """Return where episodes of a run are played that need no worker."""
        return Place(run_id, trusted, self.jail, self._rooms, self._servers)

    def _cell(self, owner: Owner) -> Cell:
        if not owner.jailed:
            return Cell(NO_JAIL)
        if self.jail.refusal:
            raise InvalidConfig(f"environment {owner.source} cannot run here", why=self.jail.refusal)
        file = Path(owner.source)
        return Cell(self.jail, [shown_for(file)] if file.is_absolute() else (), next(self._slots))

    def _forget_lost(self) -> None:
        living = {owner: [one for one in holders if not one.lost] for owner, holders in self._of.items()}
        self._of = {owner: holders for owner, holders in living.items() if holders}

    def _count_loss(self) -> None:
        self.lost += 1

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the workers that live, by what they hold."""
        return {
            f"worker {number} ({holder.owner}, {holder.episodes} episodes)": holder.pid
            for owner in self._of.values()
            for number, holder in enumerate(owner)
            if holder.pid is not None
        } | self._rooms.pids

    async def stop(self) -> None:
        """Kill every worker, and start none any more."""
        self._stopped = True
        holders = [holder for owner in self._of.values() for holder in owner]
        await asyncio.gather(*(holder.kill() for holder in holders))
        await self._programs.stop()
        await self._rooms.stop()

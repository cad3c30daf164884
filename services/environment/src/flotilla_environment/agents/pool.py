"""The processes of a run's agent that take one task after the other.

Invariants: a process that ends is replaced, and each episode whose task it had is told how it ended. One that ends
before it took a task would do so again: the next one starts with the next episode, and where no other is left all
episodes that wait are told. A process that has no task, and does not come for one, is ended. Without episodes the
processes end after a while.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable

from flotilla_core.logger import get_logger
from flotilla_environment.agents import variables
from flotilla_environment.agents.process import AgentProcess, Exit
from flotilla_environment.agents.spec import Command
from flotilla_environment.gateway.gateway import Gateway
from flotilla_environment.gateway.session import Session
from flotilla_environment.gateway.sessions import Queue, hash_of
from flotilla_workers.jail.jail import Jail

IDLE_S = 60.0
"""The time for which processes without an episode are kept."""
COMES_S = 60.0
"""The time that a process has, after the end of its episode, to ask for the next task."""

log = get_logger(__name__)


class Seat:
    """The hold of an episode on its agent."""

    def __init__(self, exit: asyncio.Future[Exit], close: Callable[[bool], Awaitable[None]]) -> None:
        self.exit = exit
        """The end of its process, where that ends while the episode is played."""
        self._close = close

    async def close(self, hangs: bool = False) -> None:
        """Give it back; `hangs` says that the agent did nothing for too long."""
        await self._close(hangs)


class Pool:
    """The processes of one agent of one run."""

    def __init__(self, command: Command, processes: int, gateway: Gateway, jail: Jail) -> None:
        self._command = command
        self._gateway = gateway
        self._jail = jail
        self.queue = Queue(self._comes)
        self._seats: dict[Session, asyncio.Future[Exit]] = {}
        self._kept: set[bytes] = set()
        """The hashes of the keys of processes that start, or run."""
        self._running: dict[bytes, AgentProcess] = {}
        """Those that run, by the hashes of their keys."""
        self._took: set[bytes] = set()
        """The hashes of the keys of processes whose episodes have ended."""
        self._late: dict[bytes, asyncio.TimerHandle] = {}
        """The time until which each process without a task has to ask for one, by the hash of its key."""
        self._keeping = [asyncio.create_task(self._keep(), name="agents") for _ in range(processes)]
        self._wanted = asyncio.Event()
        self._idle: asyncio.TimerHandle | None = None
        self._stopping: asyncio.Task[None] | None = None

    @property
    def stopped(self) -> bool:
        """Whether it takes no episode any more."""
        return self._stopping is not None

    def seat(self, session: Session) -> Seat:
        """Return the seat of one more episode."""
        if self._idle is not None:
            self._idle.cancel()
        exit: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()
        self._seats[session] = exit
        self._wanted.set()

        async def close(hangs: bool) -> None:
            self._seats.pop(session, None)
            if (process := self._running.get(session.taken_by)) is not None:
                self._took.add(session.taken_by)
                if hangs:
                    await process.close()
                self._expect(session.taken_by, process)
            if not self._seats:
                self._idle = asyncio.get_running_loop().call_later(IDLE_S, self._stop)

        return Seat(exit, close)

    def _expect(self, shown: bytes, process: AgentProcess) -> None:
        """End a process that has no task any more, and does not ask for the next one: it hangs."""
        if not any(session.taken_by == shown for session in self._seats):
            self._comes(shown)
            self._late[shown] = asyncio.get_running_loop().call_later(COMES_S, process.end)

    def _comes(self, shown: bytes) -> None:
        """Know that a process asks for a task."""
        if (late := self._late.pop(shown, None)) is not None:
            late.cancel()

    def _stop(self) -> None:
        if not self._seats:
            self._stopping = self._stopping or asyncio.create_task(self.stop())

    async def _keep(self) -> None:
        """Run one process, and the next one where it ends."""
        while True:
            key = secrets.token_urlsafe(24)
            shown = hash_of(key.encode())
            self._gateway.sessions.admit(key.encode(), self.queue)
            self._kept.add(shown)
            try:
                ended = await self._run(key, shown)
            except Exception as error:  # whatever it is, the episodes that wait are told
                log.exception("a process of agents could not be kept")
                ended = Exit(1, str(error) or type(error).__name__)
            finally:
                self._kept.discard(shown)
                self._running.pop(shown, None)
                self._comes(shown)
                self._gateway.sessions.forget(key.encode())
            if not self._tell(shown, ended):
                self._wanted.clear()
                await self._wanted.wait()

    async def _run(self, key: str, shown: bytes) -> Exit:
        """Run one process to its end."""
        process = await AgentProcess.start(
            self._command, self._jail, self._gateway, lambda url: variables.of_run(url, key)
        )
        self._running[shown] = process
        try:
            return await asyncio.shield(process.exit)
        finally:
            await process.close()

    def _tell(self, shown: bytes, ended: Exit) -> bool:
        """Tell how a process ended: to the episodes whose tasks it had.

        Where it never had one, and no other process is left that may take theirs, those that wait are told. Return
        whether it had one.
        """
        took = shown in self._took
        self._took.discard(shown)
        had = [exit for session, exit in self._seats.items() if session.taken_by == shown]
        in_vain = not took and not self._kept
        waiting = [exit for session, exit in self._seats.items() if in_vain and not session.taken_by]
        for exit in had or waiting:
            if not exit.done():
                exit.set_result(ended if had else Exit(ended.status or 1, ended.printed))
        return took or bool(had)

    async def stop(self) -> None:
        """End the processes."""
        for task in self._keeping:
            task.cancel()
        await asyncio.gather(*self._keeping, return_exceptions=True)

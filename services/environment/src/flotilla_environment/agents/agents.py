"""The agents of a replica: each episode gets one, in a process of its own, from its run's processes, or from outside.

Invariants: the number of episodes with agents is bounded, and runs share it fairly. A run's processes serve no other
run.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from flotilla_core.config import GatewayConfig
from flotilla_core.errors import InvalidConfig
from flotilla_environment.agents import variables
from flotilla_environment.agents.pool import Pool, Seat
from flotilla_environment.agents.process import AgentProcess, Exit, cell_of
from flotilla_environment.agents.spec import AgentSpec
from flotilla_environment.agents.variables import AGENTS_KEY
from flotilla_environment.gateway.gateway import Gateway
from flotilla_environment.gateway.session import Session
from flotilla_environment.gateway.sessions import Queue
from flotilla_environment.waits import Waits
from flotilla_workers.jail.jail import Jail
from flotilla_workers.pool import FairShare

SHORTEST_KEY = 16


class Agents:
    """Seats for episodes."""

    def __init__(self, config: GatewayConfig, jail: Callable[[], Jail]) -> None:
        """`jail` gives the jail of code of users, once it was looked for."""
        self.gateway = Gateway(config)
        self.places: FairShare[int] = FairShare()
        for number in range(config.sessions):
            self.places.add(number)
        self._jail = jail
        self._pools: dict[tuple[str, AgentSpec, bool], Pool] = {}
        self._outside = Queue()

    async def start(self) -> None:
        """Let agents in that come by themselves, where they have a key to show: they may come before their run."""
        if os.environ.get(AGENTS_KEY):
            await self._of_outside()

    async def seat(self, spec: AgentSpec, trusted: bool, run_id: str, session: Session, waits: Waits) -> Seat:
        """Return the agent of an episode, which knows its session; waits until one has taken the task."""
        if spec.comes_by_itself:
            return await self._taken(await self._of_outside(), _from_outside(), run_id, session, waits)
        if spec.processes:
            pool = self._pool(spec, trusted, run_id)
            return await self._taken(pool.queue, pool.seat(session), run_id, session, waits)
        process = await AgentProcess.start(
            spec.started(trusted), self._jail(), self.gateway, lambda url: _of_one(url, session)
        )

        async def close(hangs: bool) -> None:
            await process.close()

        return Seat(process.exit, close)

    def way_out(self, spec: AgentSpec, trusted: bool, number: int, path: str) -> str:
        """Return what to do about an error of the system that an agent got from its jail."""
        return cell_of(spec.started(trusted), self._jail()).way_out(number, path)

    async def _taken(self, queue: Queue, seat: Seat, run_id: str, session: Session, waits: Waits) -> Seat:
        """Wait until an agent takes the task, or there will be none."""
        offer = asyncio.create_task(queue.offer(run_id, session))
        waits.begin()
        try:
            await asyncio.wait((offer, seat.exit), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            await seat.close()
            raise
        finally:
            waits.end()
            offer.cancel()
        return seat

    def _pool(self, spec: AgentSpec, trusted: bool, run_id: str) -> Pool:
        self._pools = {key: pool for key, pool in self._pools.items() if not pool.stopped}
        key = (run_id, spec, trusted)
        if key not in self._pools:
            command = spec.started(trusted)
            cell_of(command, self._jail())  # What refuses it refuses the run.
            self._pools[key] = Pool(command, spec.processes, self.gateway, self._jail())
        return self._pools[key]

    async def _of_outside(self) -> Queue:
        """Return the tasks that agents take that come by themselves; raise InvalidConfig where none can."""
        key = os.environ.get(AGENTS_KEY, "")
        if len(key) < SHORTEST_KEY:
            raise InvalidConfig(
                "agents that come by themselves have no key to show",
                where="environment.parameters of the run",
                why="it names neither command nor function",
                next_step=f"Set {AGENTS_KEY} in environment.environment of the stack, to a secret of at least "
                f"{SHORTEST_KEY} characters; or give the run a command.",
            )
        await self.gateway.start()
        self.gateway.sessions.admit(key.encode(), self._outside)
        return self._outside

    async def stop(self) -> None:
        """End all of them."""
        for pool in self._pools.values():
            await pool.stop()
        await self.gateway.stop()


def _of_one(url: str, session: Session) -> dict[str, str]:
    return variables.of_session(f"{url}/sessions/{session.id}", session.key, session.turns_key, session.task)


def _from_outside() -> Seat:
    """Return the seat of an episode whose agent is no process of ours: only its silence tells of its end."""

    async def close(hangs: bool) -> None:
        pass

    exit: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()
    return Seat(exit, close)

"""The rank processes of one gang: started, asked and ended together.

Invariants: all ranks get the same commands in the same order; a start that fails leaves no process behind; a rank that
does not end when it is killed ends with its nursery.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from flotilla.common.v1 import operate_pb2
from flotilla_core import telemetry
from flotilla_core.errors import FlotillaError
from flotilla_trainer.gang.nursery import RankNursery
from flotilla_trainer.gang.plan import GangPlan
from flotilla_trainer.gang.rank_process import RankProcess
from flotilla_trainer.gang.watch import GangWatch
from flotilla_trainer.wire.frames import Array, Frame
from flotilla_trainer.wire.settings import RankSetup, first_head

LEAVE_TIMEOUT_S = 3.0
REAP_TIMEOUT_S = 3.0

T = TypeVar("T")
Arrays = dict[str, Array]


class Crew:
    """The processes that are the gang at the moment; none before the first start."""

    def __init__(self, plan: GangPlan, nursery: RankNursery) -> None:
        self._plan = plan
        self._nursery = nursery
        self._ranks: list[RankProcess] = []
        self._watch = GangWatch(plan, [])

    async def start(self) -> dict[str, Any]:
        """Fork all ranks and let them load the model; what they say about it."""
        self._ranks = []
        self._forget_meetings()
        try:
            for index in range(self._plan.nproc):
                rank = RankProcess(self._plan, index)
                await rank.start(self._nursery)
                self._ranks.append(rank)
            self._watch = GangWatch(self._plan, self._ranks)
            return await self._watched(self._introduce(self._plan.new_rendezvous()))
        except FlotillaError as error:
            await self.kill(error)
            raise

    async def _introduce(self, rendezvous: Path) -> dict[str, Any]:
        plan, head = self._plan, first_head(self._plan.role)
        setups = [
            RankSetup(
                rank=rank,
                head=head,
                ranks=plan.nproc,
                rendezvous=str(rendezvous),
                backend=plan.backend,
                dtype=plan.dtype,
                replicate=plan.replicate,
                sequence_parallel=plan.sequence_parallel,
                compile=plan.compile,
                model=str(plan.model),
                instance_id=plan.instance_id,
                otlp=plan.otlp,
                token=plan.token,
            )
            for rank in range(plan.nproc)
        ]
        nothing: list[Arrays] = [{}] * plan.nproc
        await self.ask("setup", [asdict(setup) for setup in setups], nothing, plan.slow_timeout_s)
        load = load_fields(plan.model, head, frozen=False) | {"carrier": telemetry.current_carrier()}
        answers = await self.ask("load", [load] * plan.nproc, nothing, plan.slow_timeout_s)
        return answers[0].fields

    async def ask(
        self, kind: str, fields: list[dict[str, Any]], arrays: Sequence[Arrays], limit_s: float
    ) -> list[Frame]:
        """Let all do the same thing, each with its own fields and arrays; their answers by rank."""
        with self._watch.command(kind, limit_s):
            outcomes = await asyncio.gather(
                *(rank.command(kind, fields[rank.rank], arrays[rank.rank]) for rank in self._ranks),
                return_exceptions=True,
            )
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return [outcome for outcome in outcomes if isinstance(outcome, Frame)]

    async def tell(self, kind: str, fields: dict[str, Any]) -> None:
        """Something that all act on beside the command that runs."""
        await asyncio.gather(*(rank.command(kind, fields, {}) for rank in self._ranks))

    def reports(self, number: int) -> list[asyncio.Future[Frame]]:
        """What each will say under `number` about work that goes on behind a command."""
        return [rank.report(number) for rank in self._ranks]

    async def failure(self) -> FlotillaError:
        """Wait until one of them is lost, which costs all of them; what happened to it."""
        return await self._watch.failure()

    async def stacks(self) -> list[operate_pb2.ProcessStacks]:
        """Stacks of each, also of one that hangs."""
        ranks = [rank for rank in self._ranks if not rank.ended()]
        texts = await asyncio.gather(*(rank.stacks() for rank in ranks))
        return [
            operate_pb2.ProcessStacks(
                process=f"rank {rank.rank}",
                pid=rank.process.pid,
                text=text
                or f"{'stopped by a signal' if rank.is_stopped() else 'no answer'}; last seen: {rank.phase}",
            )
            for rank, text in zip(ranks, texts, strict=True)
        ]

    def pids(self) -> list[int]:
        """Process ids by rank."""
        return [rank.process.pid for rank in self._ranks]

    def phases(self) -> list[str]:
        """What each rank does now."""
        return [f"rank {rank.rank}: {rank.phase}" for rank in self._ranks]

    async def leave(self) -> None:
        """Ask the ranks to send their last spans and leave; whoever does not is killed."""
        leaving = [asyncio.ensure_future(rank.leave()) for rank in self._ranks]
        if leaving:
            _, late = await asyncio.wait(leaving, timeout=LEAVE_TIMEOUT_S)
            for waiting in late:
                waiting.cancel()

    async def kill(self, error: FlotillaError) -> None:
        """End all of them at once; what waits for an answer fails with `error`."""
        for rank in self._ranks:
            rank.kill()
            rank.fail_answers(error)
        reaped = [asyncio.ensure_future(rank.reaped()) for rank in self._ranks]
        if reaped:
            _, missing = await asyncio.wait(reaped, timeout=REAP_TIMEOUT_S)
            if missing:  # The nursery, which would say so, is stopped or hangs itself.
                self._nursery.close()
                await asyncio.wait(reaped)
        self._forget_meetings()

    def _forget_meetings(self) -> None:
        """Remove rendezvous files, also those of a front that was killed."""
        for path in self._plan.rendezvous_paths():
            path.unlink(missing_ok=True)

    async def _watched(self, work: Awaitable[T]) -> T:
        """Do `work`, unless a rank fails first."""
        doing = asyncio.ensure_future(work)
        watching = asyncio.create_task(self._watch.failure())
        try:
            await asyncio.wait({doing, watching}, return_when=asyncio.FIRST_COMPLETED)
            if doing.done():
                return doing.result()
            raise watching.result()
        finally:
            doing.cancel()
            watching.cancel()


def load_fields(folder: Path, head: str, *, frozen: bool) -> dict[str, Any]:
    """What a rank is told to load."""
    return {"model": str(folder), "head": head, "frozen": frozen}

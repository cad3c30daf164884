"""The gang: every command goes to all ranks, and a rank that dies or hangs costs only the gang.

Invariants: one command runs at a time and all ranks get the same commands in the same order; a started command is
finished even when its caller went away, because half of it cannot be undone; a lost gang is killed whole, its callers
fail at once with the name of the rank, and a new gang is started in the background; a start that fails leaves no
process behind; a rank that does not end when it is killed ends with the fork server; nothing blocks the front's event
loop meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar

from flotilla.common.v1 import operate_pb2
from flotilla_core import telemetry
from flotilla_core.errors import DeadlineExceeded, FlotillaError, Internal, Unavailable
from flotilla_trainer.gang.fork_server import RankForkServer
from flotilla_trainer.gang.hosts import GangHosts, RankHost
from flotilla_trainer.gang.plan import GangPlan, listening_host
from flotilla_trainer.gang.rank_process import RankProcess
from flotilla_trainer.gang.watch import GangWatch
from flotilla_trainer.wire.frames import Array, Frame
from flotilla_trainer.wire.settings import OPEN_STORE, GangSettings, RankSetup, first_head

MAX_RESTARTS_IN_A_ROW = 3
URGENT_TIMEOUT_S = 5.0
LEAVE_TIMEOUT_S = 3.0
REAP_TIMEOUT_S = 3.0
AGENTS_SHARE = 0.8
"""Share of the time for the start in which the agents of other hosts have to answer."""

T = TypeVar("T")
Arrays = dict[str, Array]


class Gang:
    """The ranks of a trainer, also after their processes were replaced."""

    def __init__(
        self,
        plan: GangPlan,
        fork_server: RankForkServer,
        lost: Callable[[FlotillaError], None],
        beyond_help: Callable[[FlotillaError], None],
        hosts: GangHosts | None = None,
    ) -> None:
        """Take `hosts` where some of the ranks are on other hosts than the front's."""
        self._plan = plan
        self._lost = lost
        self._beyond_help = beyond_help
        self._fork_server = fork_server
        self._hosts = hosts or GangHosts(plan, fork_server)
        self._ranks: list[RankProcess] = []
        """The current processes of the gang; empty before the first start."""
        self._watch = GangWatch(plan, [])
        self._lock = asyncio.Lock()
        self._ready = asyncio.Event()
        self._running: set[asyncio.Task[list[Frame]]] = set()
        self._keeper: asyncio.Task[None] | None = None
        self.facts: dict[str, Any] = {}
        """Facts about the model that the ranks reported: parameters, vocabulary, max_sequence_tokens, torch, device."""

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._plan.nproc

    @property
    def lane_width(self) -> int:
        """The number of ranks that share each micro-batch."""
        return self._plan.sequence_parallel

    @property
    def lanes(self) -> int:
        """The number of groups of ranks with micro-batches of their own."""
        return self.size // self.lane_width

    @property
    def ready(self) -> bool:
        """Return whether every rank holds the model."""
        return self._ready.is_set()

    @property
    def slow_timeout_s(self) -> float:
        """The limit for commands that read or write whole models."""
        return self._plan.slow_timeout_s

    async def start(self) -> None:
        """Start the ranks and load the model; raise the reason if they cannot."""
        await self._hosts.reached(AGENTS_SHARE * self._plan.slow_timeout_s)
        await self._boot()
        self._keeper = asyncio.create_task(self._keep(), name="gang-keeper")
        self._keeper.add_done_callback(self._kept)

    async def stop(self) -> None:
        """End all ranks."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait({self._keeper})
        await self._leave()
        await self._kill(Unavailable("the trainer is stopping"))
        await self._hosts.close()

    async def wait_ready(self) -> None:
        """Wait until a gang that is being replaced is ready."""
        try:
            await asyncio.wait_for(self._ready.wait(), self._plan.slow_timeout_s)
        except TimeoutError:
            raise DeadlineExceeded(
                "the trainer's ranks are not ready",
                where=self._plan.name,
                why=f"waited {self._plan.slow_timeout_s:g} s for their restart",
                next_step=f"see {self._plan.log_path(0)}",
            ) from None

    async def collect(self, folder: Path) -> None:
        """Bring into a checkpoint what the ranks of other hosts wrote of it, once all have reported."""
        await self._hosts.collect(folder)

    async def idle(self) -> None:
        """Wait until no command runs."""
        async with self._lock:
            return

    async def command(
        self,
        kind: str,
        fields: dict[str, Any],
        arrays: Sequence[Arrays] | None = None,
        *,
        limit_s: float | None = None,
        per_rank: Sequence[dict[str, Any]] | None = None,
    ) -> list[Frame]:
        """Send every rank the same command, each with its own arrays; return their answers by rank.

        `limit_s` is the longest time without progress (default `rank_timeout_s`), not the longest total time.
        """
        everything = [
            fields | (per_rank[rank] if per_rank else {}) | {"carrier": telemetry.current_carrier()}
            for rank in range(self.size)
        ]
        task = asyncio.create_task(
            self._command(kind, everything, arrays or [{}] * self.size, limit_s or self._plan.rank_timeout_s),
            name=f"gang-{kind}",
        )
        self._running.add(task)
        task.add_done_callback(self._finished)
        return await asyncio.shield(task)

    async def load(self, folder: Path, head: str, *, frozen: bool) -> None:
        """Load these weights under this head into the ranks, and keep the facts about the loaded model."""
        answers = await self.command(
            "load", load_fields(folder, head, frozen=frozen), limit_s=self.slow_timeout_s
        )
        self.facts = answers[0].fields

    def reports(self, number: int) -> list[asyncio.Future[Frame]]:
        """Return the future reports `number` of all ranks, about work that continues after a command.

        The reports fail when the gang is lost.
        """
        return [rank.report(number) for rank in self._ranks]

    async def urgently(self, kind: str, fields: dict[str, Any]) -> None:
        """Send all ranks a command that they act on while another command runs."""
        if not self._ready.is_set():
            return
        try:
            await asyncio.wait_for(self._tell(kind, fields), URGENT_TIMEOUT_S)
        except TimeoutError:
            raise DeadlineExceeded(
                f"not every rank took {kind}",
                where=self._plan.name,
                why=f"waited {URGENT_TIMEOUT_S:g} s; " + "; ".join(self.phases()),
                next_step="the watch names a rank that hangs and replaces the gang; no action is needed",
            ) from None

    async def stacks(self) -> list[operate_pb2.ProcessStacks]:
        """Return the stacks of every rank, also of one that hangs."""
        ranks = [rank for rank in self._ranks if not rank.process.ended()]
        texts = await asyncio.gather(*(rank.process.stacks() for rank in ranks))
        stopped = await asyncio.gather(*(rank.process.is_stopped() for rank in ranks))
        return [
            operate_pb2.ProcessStacks(
                process=f"rank {rank.rank}" + (f" on {rank.process.where}" if rank.process.where else ""),
                pid=rank.process.pid,
                text=text or f"{'stopped by a signal' if stop else 'no answer'}; last seen: {rank.phase}",
            )
            for rank, text, stop in zip(ranks, texts, stopped, strict=True)
        ]

    def pids(self) -> list[int]:
        """Return the process ids by rank."""
        return [rank.process.pid for rank in self._ranks]

    def phases(self) -> list[str]:
        """Return what each rank is doing now."""
        return [f"rank {rank.rank}: {rank.phase}" for rank in self._ranks]

    def _finished(self, task: asyncio.Task[list[Frame]]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # Retrieved here too, for commands whose caller went away.

    async def _command(
        self, kind: str, fields: list[dict[str, Any]], arrays: Sequence[Arrays], limit_s: float
    ) -> list[Frame]:
        async with self._lock:
            if not self._ready.is_set():
                raise Unavailable(f"the trainer's ranks are being restarted ({kind})")
            return await self._ask(kind, await self._on_their_hosts(kind, fields), arrays, limit_s)

    async def _on_their_hosts(self, kind: str, fields: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the fields of each rank with the files of its host in place of the front's."""
        if not self._hosts.several:
            return fields
        for host in self._hosts.all:
            # What differs between two ranks of a host names no file.
            told = await host.told(kind, fields[host.ranks[0]])
            for rank in host.ranks:
                fields[rank] = fields[rank] | told
        return fields

    def _kept(self, keeper: asyncio.Task[None]) -> None:
        """Report a failure of the keeper: without it, a lost gang would never be replaced."""
        error = None if keeper.cancelled() else keeper.exception()
        if error is not None:
            self._beyond_help(
                Internal("the ranks cannot be replaced", where=self._plan.name, why=repr(error))
            )

    async def _keep(self) -> None:
        """Replace the gang each time it is lost."""
        while True:
            error = await self._watch.failure()
            self._ready.clear()
            self._lost(error)
            await self._kill(error)
            await self._restart()

    async def _restart(self) -> None:
        for attempt in range(1, MAX_RESTARTS_IN_A_ROW + 1):
            # A host may be away for as long as it takes: that is no failed attempt.
            await self._hosts.reached()
            try:
                await self._boot()
            except FlotillaError as error:
                if attempt == MAX_RESTARTS_IN_A_ROW:
                    self._beyond_help(error)
                    return
                await asyncio.sleep(attempt)
            else:
                return

    async def _boot(self) -> None:
        self.facts = await self._fork()
        self._ready.set()

    async def _fork(self) -> dict[str, Any]:
        """Fork all ranks, let them load the model and return its facts."""
        self._ranks = []
        self._forget_meetings()
        try:
            await self._start_on_all_hosts()
            self._watch = GangWatch(self._plan, self._ranks)
            return await self._watched(self._introduce())
        except FlotillaError as error:
            await self._kill(error)
            raise

    async def _start_on_all_hosts(self) -> None:
        """Start the ranks, on all hosts at once; what was started is in `_ranks` also where another one fails."""

        async def start_on(host: RankHost) -> None:
            for rank in host.ranks:
                self._ranks.append(RankProcess(rank, await host.start(rank)))

        outcomes = await asyncio.gather(*map(start_on, self._hosts.all), return_exceptions=True)
        self._ranks.sort(key=lambda rank: rank.rank)
        for outcome in outcomes:
            if outcome is not None:
                raise outcome

    async def _introduce(self) -> dict[str, Any]:
        plan, head = self._plan, first_head(self._plan.role)
        shared = {one.name: getattr(plan, one.name) for one in fields(GangSettings)}
        meet_host, rendezvous = await self._meeting()
        setups = []
        for host in self._hosts.all:
            told = await host.settings()
            setups += [
                RankSetup(
                    **shared,
                    **vars(told),
                    rank=rank,
                    head=head,
                    rendezvous=rendezvous,
                    meet_host=meet_host,
                    place=place,
                    ranks_here=len(host.ranks),
                )
                for place, rank in enumerate(host.ranks)
            ]
        nothing: list[Arrays] = [{}] * plan.nproc
        await self._ask("setup", [asdict(setup) for setup in setups], nothing, plan.slow_timeout_s)
        loads = [
            load_fields(Path(setup.model), head, frozen=False) | {"carrier": telemetry.current_carrier()}
            for setup in setups
        ]
        answers = await self._ask("load", loads, nothing, plan.slow_timeout_s)
        return answers[0].fields

    async def _meeting(self) -> tuple[str, str]:
        """Return where the ranks meet: a new file, or the host of rank 0 with the port and secret of its store."""
        if not self._hosts.several:
            return "", str(self._plan.new_rendezvous())
        bind = self._plan.bind
        host = listening_host(bind)
        with self._watch.command(OPEN_STORE, self._plan.slow_timeout_s):
            opened = await self._ranks[0].command(OPEN_STORE, {"host": host}, {})
        return bind.advertise_host or host, str(opened.fields["rendezvous"])

    async def _ask(
        self, kind: str, fields: list[dict[str, Any]], arrays: Sequence[Arrays], limit_s: float
    ) -> list[Frame]:
        """Send all ranks the same command, each with its own fields and arrays; return their answers by rank."""
        with self._watch.command(kind, limit_s):
            outcomes = await asyncio.gather(
                *(rank.command(kind, fields[rank.rank], arrays[rank.rank]) for rank in self._ranks),
                return_exceptions=True,
            )
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return [outcome for outcome in outcomes if isinstance(outcome, Frame)]

    async def _tell(self, kind: str, fields: dict[str, Any]) -> None:
        """Send all ranks a command that they act on while another command runs."""
        await asyncio.gather(*(rank.command(kind, fields, {}) for rank in self._ranks))

    async def _leave(self) -> None:
        """Ask the ranks to send their last spans and leave; a rank that does not leave in time is killed later."""
        leaving = [asyncio.ensure_future(rank.leave()) for rank in self._ranks]
        if leaving:
            _, late = await asyncio.wait(leaving, timeout=LEAVE_TIMEOUT_S)
            for waiting in late:
                waiting.cancel()

    async def _kill(self, error: FlotillaError) -> None:
        """Kill all ranks at once and fail the callers that wait for an answer with `error`."""
        for rank in self._ranks:
            rank.process.kill()
            rank.fail_answers(error)
        reaped = [asyncio.ensure_future(rank.reaped()) for rank in self._ranks]
        if reaped:
            _, missing = await asyncio.wait(reaped, timeout=REAP_TIMEOUT_S)
            if missing:  # The fork server, which would report their end, is stopped or hangs itself.
                self._fork_server.close()
                await asyncio.wait(reaped)
        self._forget_meetings()

    def _forget_meetings(self) -> None:
        """Remove all rendezvous files, also those of a front that was killed."""
        for path in self._plan.rendezvous_paths():
            path.unlink(missing_ok=True)

    async def _watched(self, work: Awaitable[T]) -> T:
        """Await `work`, unless a rank fails first."""
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
    """Return the fields of a load command."""
    return {"model": str(folder), "head": head, "frozen": frozen}

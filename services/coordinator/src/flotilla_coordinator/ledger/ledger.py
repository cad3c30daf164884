"""The ledger as the coordinator uses it.

Invariants: a call that has returned is on disk. The only writer is one thread (group commit); reads have their own
thread and connection, and see everything that has returned. The ledger makes no decision about a sample: the caller
requests a transition, and the ledger allows it or names the error. Where the disk is full, writes of active runs wait
for room. Other writes are refused then: a beat, a new run, and the cuts of retention.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from flotilla.common.v1.finding_pb2 import Finding
from flotilla_coordinator.ledger import (
    queries,
    run_rows,
    sample_queries,
    schema,
    transitions,
    turns,
    updates,
)
from flotilla_coordinator.ledger.records import (
    AdmittedGroup,
    DropReason,
    FinishedSample,
    GroupIssue,
    GroupOutcome,
    Recorded,
    RunRecord,
    RunState,
    SampleRecord,
    SampleState,
    TurnRecord,
    VoidedUpdate,
)
from flotilla_coordinator.ledger.writer import Owner, WriterThread, renew_ownership
from flotilla_core.disk import names_full_disk
from flotilla_core.errors import DiskFull
from flotilla_core.rpc import Fence
from flotilla_core.version import Version

T = TypeVar("T")

NO_METRICS: Mapping[str, float] = {}
TURNS_WAIT_S = 0.1
"""The time in which turns of episodes are gathered. A coordinator that is killed loses those of so long."""


class Ledger:
    """The durable record of runs and samples."""

    def __init__(self, path: Path, owner: Owner) -> None:
        self.path = path
        self._writer = WriterThread(path, owner)
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="ledger-reader")
        self._read_db = schema.connect_read_only(path)
        self._is_full = asyncio.Event()
        self._turns: list[TurnRecord] = []
        self._turns_wait: asyncio.TimerHandle | None = None

    @classmethod
    def open(cls, path: Path, owner: Owner | None = None) -> Ledger:
        """Open or create the file; an older schema is migrated, and a ledger with another owner is refused."""
        with names_full_disk("the ledger cannot be opened", path):
            path.parent.mkdir(parents=True, exist_ok=True)
            return cls(path, owner or Owner.of_this_process())

    def close(self) -> None:
        """Complete what was submitted, and close the file."""
        if self._turns_wait is not None:
            self._turns_wait.cancel()
        self._writer.close()
        self._reader.shutdown()
        self._read_db.close()

    @property
    def backlog(self) -> int:
        """Return the number of submitted operations that are not durable yet."""
        return self._writer.backlog

    @property
    def full(self) -> DiskFull | None:
        """Return why nothing is written now, while the disk is full."""
        return self._writer.full

    def watch_disk(self, tell: Callable[[DiskFull | None], None]) -> None:
        """Call `tell` whenever the disk becomes full, and, with None, when it has room again."""

        def told(full: DiskFull | None) -> None:
            if full is None:
                self._is_full.clear()
            else:
                self._is_full.set()
            tell(full)

        self._writer.watch_disk(told)

    def give_up_waiting(self) -> None:
        """Refuse, from now on, what the disk has no room for, because the coordinator stops."""
        self._writer.give_up()

    @property
    def lost(self) -> bool:
        """Return whether another owner of the ledger was found."""
        return self._writer.lost is not None

    async def check_owner(self) -> None:
        """Raise StaleVersion where the ledger has another owner; for acts that are recorded elsewhere."""
        await self._read(self._writer.check_owner)

    async def beat(self) -> None:
        """Renew the ownership, and record waiting turns; raise StaleVersion where the ledger has another owner."""
        self._hand_in_turns()
        await self._writer.submit(renew_ownership, waits=False)

    async def group_issued(self, group: GroupIssue) -> Recorded:
        """Admit the samples of a group, before any generator is asked for them."""
        return await self._writer.submit_step(transitions.issue, group)

    def turn_written(self, turn: TurnRecord) -> None:
        """Record a turn of an episode that goes on, within TURNS_WAIT_S; wait for nothing.

        Without it the turn is written again. Turns share an operation, whose own cost is that of several of them.
        """
        self._turns.append(turn)
        if self._turns_wait is None:
            self._turns_wait = asyncio.get_running_loop().call_later(TURNS_WAIT_S, self._hand_in_turns)

    def _hand_in_turns(self) -> None:
        if self._turns_wait is None:
            return
        self._turns_wait.cancel()
        taken, self._turns, self._turns_wait = self._turns, [], None
        self._writer.hand_in(lambda db: turns.store(db, taken)).add_done_callback(_ignored)

    async def group_generated(self, samples: Sequence[FinishedSample]) -> Recorded:
        """Record finished responses whose scores come later."""
        return await self._writer.submit_step(transitions.generated, samples)

    async def group_scored(self, samples: Sequence[FinishedSample]) -> Recorded:
        """Record rewards, together with the responses that are not recorded yet."""
        return await self._writer.submit_step(transitions.scored, samples)

    async def consumed(
        self,
        run_id: str,
        update_id: str,
        sample_ids: Sequence[str],
        version: Version,
        *,
        result: Version,
        step: int,
        cursor: dict[str, Any] | None,
        metrics: Mapping[str, float] = NO_METRICS,
    ) -> None:
        """Record an update that the trainer made, and the run's progress with it.

        `version` is the version that the update started from, and `result` the one that it led to. `step` is the number
        of steps done with it, `cursor` the place in the data set after its prompts, and `metrics` what is known of the
        step by now, which nobody changes any more.
        """

        def record(db: sqlite3.Connection) -> None:
            if updates.consumed(db, run_id, update_id, sample_ids, version):
                run_rows.went_on(db, run_id, step, result, cursor, metrics)

        await self._writer.submit(record)

    async def dropped(
        self,
        run_id: str,
        sample_ids: Sequence[str],
        reason: DropReason,
        judged: Sequence[FinishedSample] = (),
    ) -> Recorded:
        """Drop samples from the run, for a reason that is counted.

        Of those that were judged, the responses and verdicts are recorded with it, so that a user can judge them again.
        """

        def drop(db: sqlite3.Connection) -> Recorded:
            if judged:
                transitions.generated(db, [judged])
            verdicts = {sample.sample_id: sample.verdicts for sample in judged}
            return transitions.dropped(db, run_id, sample_ids, reason, verdicts)

        return await self._writer.submit(drop)

    async def passed_by(
        self,
        run_id: str,
        sample_ids: Sequence[str],
        reason: DropReason,
        *,
        result: Version,
        step: int,
        cursor: dict[str, Any] | None,
        metrics: Mapping[str, float] = NO_METRICS,
    ) -> None:
        """Drop the samples of a step that did not change the policy, and record the run's progress with it."""

        def record(db: sqlite3.Connection) -> None:
            transitions.dropped(db, run_id, sample_ids, reason)
            run_rows.went_on(db, run_id, step, result, cursor, metrics)

        await self._writer.submit(record)

    async def went_on(
        self,
        run_id: str,
        *,
        result: Version,
        step: int,
        cursor: dict[str, Any] | None,
        metrics: Mapping[str, float] = NO_METRICS,
    ) -> None:
        """Record the run's progress with a step that has no samples here."""
        await self._writer.submit(lambda db: run_rows.went_on(db, run_id, step, result, cursor, metrics))

    async def carry_over(self, run_id: str, group_ids: Sequence[str], step: int) -> None:
        """Let groups that were admitted for an earlier step count for `step`."""
        await self._writer.submit(lambda db: transitions.carry_over(db, run_id, group_ids, step))

    async def drop_in_flight(self, run_id: str, reason: DropReason) -> int:
        """Drop all samples of a run that were neither trained nor dropped; return their number."""
        return await self._writer.submit(lambda db: transitions.drop_in_flight(db, run_id, reason))

    async def durable(self, run_id: str, update_ids: Sequence[str]) -> None:
        """Mark updates that every kept checkpoint covers, one by one, so that other operations can come in between."""
        for update_id in update_ids:
            await self._writer.submit(partial(updates.durable, run_id=run_id, update_id=update_id))

    async def prune_payloads(self, run_id: str, before_step: int) -> int:
        """Delete the tokens of durable and dropped samples of earlier steps; return the number of samples."""
        forgotten = 0
        for step in await self._read(lambda db: updates.steps_to_prune(db, run_id, before_step)):
            forgotten += await self._writer.submit(partial(updates.prune_payloads, run_id=run_id, step=step))
        return forgotten

    async def covered(self, run_id: str, version: Version, step: int) -> int:
        """Make the updates before `version`, which every kept checkpoint covers, durable, and prune their samples."""
        await self.durable(run_id, await self._read(lambda db: updates.applied_before(db, run_id, version)))
        return await self.prune_payloads(run_id, before_step=step)

    async def check_fall_back(self, run_id: str, version: Version) -> None:
        """Raise where `fall_back` to `version` would be refused; change nothing."""
        await self._read(lambda db: updates.refuse_to_void_durable(db, run_id, version))

    async def fall_back(
        self,
        run_id: str,
        version: Version,
        *,
        step: int,
        cursor: dict[str, Any] | None,
        retry_rewards: bool = False,
    ) -> list[VoidedUpdate]:
        """Let a run continue after `step` steps as `version`, a new lineage; return the updates that this undid.

        Their samples, and those that were under way when the run ended, are scored or issued again; with
        `retry_rewards`, so are those that were dropped because of a failing reward.
        """
        return await self._writer.submit(
            lambda db: updates.fall_back(
                db, run_id, version, step, run_rows.cursor_text(cursor), retry_rewards=retry_rewards
            )
        )

    async def admitted_groups(self, run_id: str, first_step: int) -> list[AdmittedGroup]:
        """Return every group that counts for `first_step` or a later one, in the order of admission."""
        return await self._read(lambda db: sample_queries.admitted_groups(db, run_id, first_step))

    async def outcomes(
        self, run_id: str, first_step: int, end_step: int, *, right_at: float
    ) -> list[GroupOutcome]:
        """Return the outcomes of groups that count for a step from `first_step` to before `end_step`."""
        return await self._read(
            lambda db: sample_queries.outcomes(db, run_id, first_step, end_step, right_at)
        )

    async def samples(
        self,
        run_id: str,
        *,
        step: int | None = None,
        state: SampleState | None = None,
        limit: int = 100,
        after: int = 0,
    ) -> list[SampleRecord]:
        """Return samples with their payloads, in the order of admission, after the position `after`."""
        return await self._read(lambda db: sample_queries.samples(db, run_id, step, state, limit, after))

    async def save_run(self, run: RunRecord) -> None:
        """Admit a run."""
        await self._writer.submit(lambda db: run_rows.insert(db, run), waits=False)

    async def begin(self, run_id: str, lineage: int) -> Fence:
        """Return the fence of a new start of the run, which is higher than that of any earlier start."""
        return await self._writer.submit(lambda db: run_rows.begin(db, run_id, lineage))

    async def taken_over(self, run_id: str) -> None:
        """Record that a coordinator is about to continue what another one left."""
        await self._writer.submit(lambda db: run_rows.taken_over(db, run_id))

    async def takeovers(self, run_id: str) -> int:
        """Return how often coordinators took the run over since a step was made or a user resumed it."""
        return await self._read(lambda db: run_rows.takeovers(db, run_id))

    async def asked_for(self, run_id: str) -> None:
        """Record that a user resumes the run."""
        await self._writer.submit(lambda db: run_rows.asked_for(db, run_id))

    async def stopping(self, run_id: str, reason: Finding) -> None:
        """Record that a user stops the run: it does not continue if the coordinator dies.

        Returns also where that waits for room on the disk.
        """
        await self._handed_in(lambda db: run_rows.stopping(db, run_id, reason))

    async def shrink(self, most_bytes: int) -> list[str]:
        """Delete tokens, then histories, of the oldest ended runs until the ledger fits; return their ids."""
        forgotten: dict[str, None] = {}
        for oldest, forget in (
            (run_rows.next_with_payloads, run_rows.forget_payloads),
            (run_rows.next_with_history, run_rows.forget_history),
        ):
            while await self._read(run_rows.used_bytes) > most_bytes:
                run_id = await self._read(oldest)
                if run_id is None:
                    break
                await self._writer.submit(partial(_of_run, forget, run_id), waits=False)
                forgotten[run_id] = None
        return list(forgotten)

    async def ended_beyond(self, kept: int) -> list[tuple[str, str]]:
        """Return the ended runs before the newest `kept`, with their directories."""
        return await self._read(lambda db: run_rows.beyond(db, kept))

    async def forget_run(self, run_id: str) -> None:
        """Remove an ended run from every table."""
        await self._writer.submit(lambda db: run_rows.forget_run(db, run_id), waits=False)

    async def update_run(
        self,
        run_id: str,
        *,
        state: RunState | None = None,
        reason: Finding | None = None,
        ended_at: float | None = None,
        config_yaml: str | None = None,
        step: int | None = None,
        version: Version | None = None,
        stays: bool = True,
    ) -> None:
        """Change the given columns; with `stays` false, return also where that waits for room on the disk."""
        changes = {
            "state": state,
            "reason": None if reason is None else run_rows.reason_text(reason),
            "ended_at": ended_at,
            "config_yaml": config_yaml,
            "step": step,
            "version_lineage": version.lineage if version else None,
            "version_step": version.step if version else None,
        }
        given = {column: value for column, value in changes.items() if value is not None}

        def change(db: sqlite3.Connection) -> None:
            run_rows.change(db, run_id, given)

        await (self._writer.submit(change) if stays else self._handed_in(change))

    async def list_runs(self, limit: int = 100) -> list[RunRecord]:
        """Return runs, newest first."""
        return await self._read(lambda db: queries.runs(db, limit))

    async def unfinished_runs(self) -> list[RunRecord]:
        """Return all runs that have not ended, the oldest first."""
        return await self._read(queries.unfinished)

    async def run_ids(self) -> list[str]:
        """Return the ids of all runs, newest first."""
        return await self._read(queries.run_ids)

    async def get_run(self, reference: str) -> RunRecord:
        """Return a run by its id, a unique prefix of it, or `latest`."""
        return await self._read(lambda db: queries.run(db, reference))

    async def last_metrics(self, run_id: str) -> dict[str, float]:
        """Return the metrics of the run's last step as it was recorded; none where an older Flotilla did that."""
        return await self._read(lambda db: queries.last_metrics(db, run_id))

    async def _handed_in(self, operation: Callable[[sqlite3.Connection], None]) -> None:
        """Return when the operation is durable, or is waiting for room on a full disk."""
        written = self._writer.hand_in(operation)
        full = asyncio.ensure_future(self._is_full.wait())
        either: set[asyncio.Future[Any]] = {written, full}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        full.cancel()
        if written.done():
            written.result()
        else:
            written.add_done_callback(_ignored)

    async def _read(self, query: Callable[[sqlite3.Connection], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._reader, query, self._read_db)


def _ignored(written: asyncio.Future[None]) -> None:
    """Ignore a refusal of which the caller knows already, or that costs it nothing that was promised."""
    if not written.cancelled():
        written.exception()


def _of_run(forget: Callable[[sqlite3.Connection, str], None], run_id: str, db: sqlite3.Connection) -> None:
    forget(db, run_id)

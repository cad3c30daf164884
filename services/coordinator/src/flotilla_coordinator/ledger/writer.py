"""Writes the ledger on one thread, while this process owns it: many operations share one durable transaction.

Invariants: the owner is checked within each transaction, so a process that lost the ledger writes nothing more, however
long it was suspended. A ledger is taken over only from a process that has ended, or that was silent for SILENT_S
although it should renew its ownership every BEAT_S. An operation is all or nothing, also inside a shared
transaction, and its result is delivered only after the commit reached the disk. Operations run in the order of their
submission. Where the disk is full, all of them wait for room, except those that were submitted to be refused then. A
transition that many callers submit at once is applied to all of them as one operation. Where that is refused, it is
applied to one after the other, so no caller's answer depends on the others. The cancellation of a waiting caller does
not undo what it submitted.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import queue
import socket
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from flotilla_coordinator.ledger import schema
from flotilla_core.disk import disk_full, why_full
from flotilla_core.errors import DiskFull, FailedPrecondition, FlotillaError, Internal, StaleVersion
from flotilla_core.process_identity import ProcessIdentity, boot_id

BEAT_S = 2.0
SILENT_S = 15.0


@dataclass(frozen=True)
class Owner:
    """A coordinator, as the ledger records it."""

    instance_id: str
    host: str
    process: ProcessIdentity

    @classmethod
    def of_this_process(cls, instance_id: str = "") -> Owner:
        """Return this process as an owner."""
        process = ProcessIdentity.of(os.getpid())
        assert process is not None, "this process lives"
        return cls(instance_id, socket.gethostname(), process)

    def is_gone(self) -> bool:
        """Return whether its process has ended, as far as this host can tell."""
        if self.host != socket.gethostname():
            return False
        return self.process.boot_id != boot_id() or not self.process.alive()

    def __str__(self) -> str:
        return (
            f"coordinator {self.instance_id or '(without a name)'}, process {self.process.pid} on {self.host}"
        )


def claim(db: sqlite3.Connection, owner: Owner, path: Path) -> int:
    """Take ownership of the ledger, and return the new epoch; raise while it has another owner."""
    db.execute("BEGIN IMMEDIATE")
    try:
        row = db.execute(
            "SELECT epoch, instance_id, host, pid, start_ticks, boot_id, seen_at FROM owner"
        ).fetchone()
        epoch = 1 if row is None else row[0] + 1
        if row is not None:
            before = Owner(row[1], row[2], ProcessIdentity(row[3], row[4], row[5]))
            silent_s = time.time() - row[6]
            if before.process != owner.process and not before.is_gone() and silent_s < SILENT_S:
                raise FailedPrecondition(
                    "the ledger belongs to another coordinator",
                    where=str(path),
                    why=f"{before} wrote it {max(0.0, silent_s):.0f} s ago",
                    next_step=f"stop that one first; once it is silent for {SILENT_S:.0f} s it is taken for dead",
                )
        db.execute("DELETE FROM owner")
        process = owner.process
        db.execute(
            "INSERT INTO owner VALUES (?, ?, ?, ?, ?, ?, ?)",
            (
                epoch,
                owner.instance_id,
                owner.host,
                process.pid,
                process.start_ticks,
                process.boot_id,
                time.time(),
            ),
        )
        db.execute("COMMIT")
    finally:
        if db.in_transaction:
            db.execute("ROLLBACK")
    return int(epoch)


def refuse_former(db: sqlite3.Connection, epoch: int, path: Path) -> None:
    """Raise where another process took the ledger over since `epoch`."""
    now, instance_id, pid = db.execute("SELECT epoch, instance_id, pid FROM owner").fetchone()
    if now != epoch:
        raise StaleVersion(
            "another coordinator has taken over the ledger",
            where=str(path),
            why=f"it belongs to coordinator {instance_id}, process {pid}, which continues the runs",
            next_step="see `flotilla ps`",
        )


def renew_ownership(db: sqlite3.Connection) -> None:
    """Renew the ownership."""
    db.execute("UPDATE owner SET seen_at = ?", (time.time(),))


T = TypeVar("T")
Brought = TypeVar("Brought")

MOST_IN_ONE_COMMIT = 1024
MOST_TOGETHER = 64
"""The most callers whose transition is one operation."""
MOST_AT_ONCE = 16
TRY_AGAIN_S = 1.0
"""The time between attempts while operations wait for room on the disk."""

Step = Callable[[sqlite3.Connection, Sequence[Brought]], Sequence[T]]
"""A transition, applied to the items of several callers; the results are in their order."""


@dataclass
class _Submitted:
    step: Step[Any, Any]
    item: Any
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]
    waits: bool
    """True to wait for room on a full disk, false to be refused then."""
    result: Any = None
    error: Exception | None = None


class WriterThread:
    """Runs operations on the ledger's only writing connection."""

    def __init__(self, path: Path, owner: Owner) -> None:
        self._path = path
        self._db = schema.connect(path)
        try:
            self._epoch = claim(self._db, owner, path)
        except FlotillaError:
            self._db.close()
            raise
        self.lost: StaleVersion | None = None
        """The reason why nothing is written any more, once the ledger has another owner."""
        self.full: DiskFull | None = None
        """The reason why nothing is written now, while the disk is full."""
        self._tell_full: Callable[[DiskFull | None], None] = lambda full: None
        self._gives_up = False
        self._queue: queue.SimpleQueue[_Submitted | None] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="ledger-writer", daemon=True)
        self._thread.start()

    @property
    def backlog(self) -> int:
        """Return the number of operations that wait for a commit."""
        return self._queue.qsize()

    def check_owner(self, db: sqlite3.Connection) -> None:
        """Raise where another process took the ledger over, as any connection sees it."""
        refuse_former(db, self._epoch, self._path)

    def watch_disk(self, tell: Callable[[DiskFull | None], None]) -> None:
        """Call `tell` in the running loop whenever the disk becomes full, and, with None, when it has room again."""
        loop = asyncio.get_running_loop()
        self._tell_full = lambda full: _in_loop(loop, tell, full)

    async def submit(self, operation: Callable[[sqlite3.Connection], T], *, waits: bool = True) -> T:
        """Run `operation` in the next transaction; return when it is durable."""
        return await self.hand_in(operation, waits=waits)

    def hand_in(
        self, operation: Callable[[sqlite3.Connection], T], *, waits: bool = True
    ) -> asyncio.Future[T]:
        """Put `operation` into the queue at once; the future ends when it is durable."""

        def alone(db: sqlite3.Connection, _: Sequence[None]) -> list[T]:
            return [operation(db)]

        return self._enqueue(alone, None, waits=waits)

    async def submit_step(self, step: Step[Brought, T], item: Brought) -> T:
        """Apply `step` to `item` in the next transaction, together with other callers of the same step."""
        result: T = await self._enqueue(step, item, waits=True)
        return result

    def give_up(self) -> None:
        """Stop waiting for room on the disk: from now on, what cannot be written is refused."""
        self._gives_up = True
        self.hand_in(lambda db: None, waits=False).add_done_callback(_forget)

    def _enqueue(self, step: Step[Brought, T], item: Brought, *, waits: bool) -> asyncio.Future[T]:
        if self._closed:
            raise FailedPrecondition("the ledger is closed", where=str(self._path))
        loop = asyncio.get_running_loop()
        submitted = _Submitted(step, item, loop, loop.create_future(), waits)
        self._queue.put(submitted)
        return submitted.future

    def close(self) -> None:
        """Complete what was submitted, then close the file."""
        if self._closed:
            return
        self._closed = True
        self._queue.put(None)
        self._thread.join()
        self._db.close()

    def _run(self) -> None:
        waiting: list[_Submitted] = []
        closing = False
        while not closing:
            new, closing = self._take(TRY_AGAIN_S if waiting else None)
            waiting += new
            full = None
            while waiting and full is None:
                batch = waiting[:MOST_IN_ONE_COMMIT]
                full = self._commit(batch)
                self._note(full)  # before any caller gets a result
                if full is None:
                    self._deliver(batch)
                    del waiting[:MOST_IN_ONE_COMMIT]
            if full is not None:
                waiting = self._refuse(waiting, full, all_of_them=closing or self._gives_up)

    def _take(self, limit_s: float | None) -> tuple[list[_Submitted], bool]:
        """Return what was submitted, as soon as there is anything or the time is over, and whether it was the last."""
        batch: list[_Submitted] = []
        try:
            item = self._queue.get(timeout=limit_s)
        except queue.Empty:
            return batch, False
        while item is not None:
            batch.append(item)
            if len(batch) == MOST_IN_ONE_COMMIT or self._queue.empty():
                return batch, False
            item = self._queue.get()
        return batch, True

    def _refuse(self, batch: list[_Submitted], full: DiskFull, *, all_of_them: bool) -> list[_Submitted]:
        """Refuse operations that do not wait for room; return the others in their order."""
        refused = [submitted for submitted in batch if all_of_them or not submitted.waits]
        for submitted in refused:
            submitted.error = full
        self._deliver(refused)
        return [] if all_of_them else [submitted for submitted in batch if submitted.waits]

    def _note(self, full: DiskFull | None) -> None:
        before, self.full = self.full, full
        if (before is None) is not (full is None):
            self._tell_full(full)

    def _commit(self, batch: list[_Submitted]) -> DiskFull | None:
        """Write the whole batch, or return why the disk has no room for any of it."""
        try:
            self._db.execute("BEGIN IMMEDIATE")
            self.check_owner(self._db)
            for together in _same_steps(batch):
                self._apply(together)
            self._db.execute("COMMIT")
        except StaleVersion as lost:
            self._db.execute("ROLLBACK")
            self.lost = lost
            for submitted in batch:
                submitted.error = lost
        except sqlite3.Error as error:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            failure = self._explain(error)
            if isinstance(failure, DiskFull):
                for submitted in batch:
                    submitted.error = None
                return failure
            for submitted in batch:
                submitted.error = submitted.error or failure
        return None

    def _apply(self, together: list[_Submitted]) -> None:
        refused = None
        self._db.execute("SAVEPOINT operation")
        try:
            results = together[0].step(self._db, [submitted.item for submitted in together])
            for submitted, result in zip(together, results, strict=True):
                submitted.result = result
        except Exception as error:  # the caller gets the error; the thread must survive it
            # A full disk is not the fault of one operation; and SQLite may have rolled the whole transaction back.
            if not self._db.in_transaction or (isinstance(error, sqlite3.Error) and why_full(error)):
                raise
            refused = self._explain(error) if isinstance(error, sqlite3.Error) else error
            self._db.execute("ROLLBACK TO operation")
        self._db.execute("RELEASE operation")
        if refused is not None and len(together) == 1:
            together[0].error = refused
        elif refused is not None:
            for submitted in together:
                self._apply([submitted])

    def _explain(self, error: sqlite3.Error) -> FlotillaError:
        full = disk_full(error, "the ledger cannot be written", self._path)
        return full or Internal("the ledger cannot be written", where=str(self._path), why=str(error))

    @staticmethod
    def _deliver(batch: list[_Submitted]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[_Submitted]] = {}
        for submitted in batch:
            by_loop.setdefault(submitted.loop, []).append(submitted)
        for loop, items in by_loop.items():
            try:
                loop.call_soon_threadsafe(_resolve, loop, items)
            except RuntimeError:  # that loop has ended: no caller waits, and the work is durable
                continue


def _in_loop(
    loop: asyncio.AbstractEventLoop, tell: Callable[[DiskFull | None], None], full: DiskFull | None
) -> None:
    with contextlib.suppress(RuntimeError):  # that loop has ended: no caller is left
        loop.call_soon_threadsafe(tell, full)


def _forget(future: asyncio.Future[None]) -> None:
    """Ignore the result of a future, and its error."""
    if not future.cancelled():
        future.exception()


def _same_steps(batch: list[_Submitted]) -> Iterator[list[_Submitted]]:
    """Yield consecutive operations with the same step, in parts of bounded size."""
    for _, same in itertools.groupby(batch, key=lambda submitted: submitted.step):
        while together := list(itertools.islice(same, MOST_TOGETHER)):
            yield together


def _resolve(loop: asyncio.AbstractEventLoop, items: list[_Submitted]) -> None:
    """Deliver results to waiting callers, a few in each turn of the event loop, so that other tasks run too."""
    if len(items) > MOST_AT_ONCE:
        loop.call_soon(_resolve, loop, items[MOST_AT_ONCE:])
    for submitted in items[:MOST_AT_ONCE]:
        if submitted.future.done():
            continue
        if submitted.error is not None:
            submitted.future.set_exception(submitted.error)
        else:
            submitted.future.set_result(submitted.result)

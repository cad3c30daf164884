"""The ledger on a disk that takes no more: what belongs to a run waits in its order, the rest is refused."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from flotilla_coordinator.ledger import schema
from flotilla_coordinator.ledger.ledger import Ledger
from flotilla_coordinator.ledger.records import RunRecord, RunState
from flotilla_core.errors import DiskFull
from flotilla_core.findings import info

RUN = "run-20260314-0915-7f3a"
LIMIT_S = 20.0
LARGE = "x" * (4 << 20)


class Disk:
    """The writer's connection, whose file may be kept from growing: SQLite refuses that like a write to a full disk."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._db: sqlite3.Connection
        connect = schema.connect

        def connected(path: Path) -> sqlite3.Connection:
            self._db = connect(path)
            return self._db

        monkeypatch.setattr(schema, "connect", connected)

    def fills(self) -> None:
        """Let the file grow no further than a mebibyte."""
        self._db.execute(f"PRAGMA max_page_count = {(1 << 20) // schema.PAGE_BYTES}")

    def empties(self) -> None:
        """Lift the limit."""
        self._db.execute("PRAGMA max_page_count = 1000000")


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


@pytest.fixture
def ledger(disk: Disk, tmp_path: Path) -> Iterator[Ledger]:
    opened = Ledger.open(tmp_path / "ledger.sqlite")
    yield opened
    opened.close()


async def begun(ledger: Ledger) -> None:
    await ledger.save_run(RunRecord(RUN, "run", RunState.RUNNING, "", "/tmp", 0.0))


async def test_operations_wait_for_room_and_are_made_in_their_order(ledger: Ledger, disk: Disk) -> None:
    await begun(ledger)
    told: list[bool] = []
    ledger.watch_disk(lambda full: told.append(full is not None))
    disk.fills()
    waiting = [
        asyncio.ensure_future(ledger.update_run(RUN, reason=info(reason)))
        for reason in (LARGE, "second", "third")
    ]
    async with asyncio.timeout(LIMIT_S):
        while not told:
            await asyncio.sleep(0)
    assert ledger.full is not None and "the disk is full" in str(ledger.full)
    with pytest.raises(DiskFull, match=r"ledger\.sqlite"):
        await ledger.beat()
    assert not any(task.done() for task in waiting)
    assert (await ledger.get_run(RUN)).reason.what == ""

    disk.empties()
    async with asyncio.timeout(LIMIT_S):
        await asyncio.gather(*waiting)
    assert (await ledger.get_run(RUN)).reason == info("third")
    assert ledger.full is None
    await ledger.beat()
    await asyncio.sleep(0)
    assert told == [True, False]


async def test_a_wish_of_a_user_is_handed_in_and_a_new_run_is_refused_while_the_disk_is_full(
    ledger: Ledger, disk: Disk
) -> None:
    await begun(ledger)
    ledger.watch_disk(lambda full: None)
    disk.fills()
    held = asyncio.ensure_future(ledger.update_run(RUN, reason=info(LARGE)))
    await asyncio.sleep(0)  # it is the first in the queue
    async with asyncio.timeout(LIMIT_S):
        await ledger.update_run(RUN, state=RunState.PAUSED, stays=False)
        await ledger.stopping(RUN, info("enough"))
        with pytest.raises(DiskFull):
            await ledger.save_run(RunRecord("other", "run", RunState.RUNNING, "", "/tmp", 0.0))
    assert (await ledger.get_run(RUN)).state is RunState.RUNNING
    disk.empties()
    async with asyncio.timeout(LIMIT_S):
        await held
        await ledger.beat()
    assert (await ledger.get_run(RUN)).state is RunState.STOPPING


async def test_a_coordinator_that_goes_waits_for_no_room(ledger: Ledger, disk: Disk) -> None:
    await begun(ledger)
    disk.fills()
    held = asyncio.ensure_future(ledger.update_run(RUN, reason=info(LARGE)))
    await asyncio.sleep(0)
    ledger.give_up_waiting()
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(DiskFull):
            await held
    ledger.close()


async def test_what_fails_for_another_reason_is_refused_beside_those_that_wait(
    ledger: Ledger, disk: Disk
) -> None:
    await begun(ledger)
    disk.fills()
    held = asyncio.ensure_future(ledger.update_run(RUN, reason=info(LARGE)))
    unknown = asyncio.ensure_future(ledger.update_run("nobody", reason=info("x")))
    await asyncio.sleep(0)
    disk.empties()
    async with asyncio.timeout(LIMIT_S):
        await held
        with pytest.raises(Exception, match="nobody"):
            await unknown

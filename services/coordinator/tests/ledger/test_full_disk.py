"""The ledger on a disk that takes no more: what belongs to a run waits in its order, the rest is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from flotilla_coordinator.ledger.ledger import Ledger
from flotilla_coordinator.ledger.records import RunRecord, RunState
from flotilla_core.errors import DiskFull

RUN = "run-20260314-0915-7f3a"
LIMIT_S = 20.0
LARGE = "x" * (4 << 20)


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    opened = Ledger.open(tmp_path / "ledger.sqlite")
    yield opened
    opened.close()


async def limited(ledger: Ledger, mib: int | None) -> None:
    """Let the file grow no further than `mib`; None lifts the limit. Refused like a write to a full disk."""

    def limit(db: object) -> None:
        pages = 1_000_000 if mib is None else (mib << 20) // 16384
        db.execute(f"PRAGMA max_page_count = {pages}")  # type: ignore[attr-defined]

    await ledger._writer.submit(limit)


async def begun(ledger: Ledger) -> None:
    await ledger.save_run(RunRecord(RUN, "run", RunState.RUNNING, "", "/tmp", 0.0))


async def test_operations_wait_for_room_and_are_made_in_their_order(ledger: Ledger) -> None:
    await begun(ledger)
    told: list[bool] = []
    ledger.watch_disk(lambda full: told.append(full is not None))
    await limited(ledger, 1)
    waiting = [
        asyncio.ensure_future(ledger.update_run(RUN, reason=reason)) for reason in (LARGE, "second", "third")
    ]
    async with asyncio.timeout(LIMIT_S):
        while not told:
            await asyncio.sleep(0)
    assert ledger.full is not None and "the disk is full" in str(ledger.full)
    with pytest.raises(DiskFull, match=r"ledger\.sqlite"):
        await ledger.beat()
    assert not any(task.done() for task in waiting)
    assert (await ledger.get_run(RUN)).reason == ""

    ledger._writer._db.execute("PRAGMA max_page_count = 1000000")
    async with asyncio.timeout(LIMIT_S):
        await asyncio.gather(*waiting)
    assert (await ledger.get_run(RUN)).reason == "third"
    assert ledger.full is None
    await ledger.beat()
    await asyncio.sleep(0)
    assert told == [True, False]


async def test_a_wish_of_a_user_is_handed_in_and_a_new_run_is_refused_while_the_disk_is_full(
    ledger: Ledger,
) -> None:
    await begun(ledger)
    ledger.watch_disk(lambda full: None)
    await limited(ledger, 1)
    held = asyncio.ensure_future(ledger.update_run(RUN, reason=LARGE))
    await asyncio.sleep(0)  # it is the first in the queue
    async with asyncio.timeout(LIMIT_S):
        await ledger.update_run(RUN, state=RunState.PAUSED, stays=False)
        await ledger.stopping(RUN, "enough")
        with pytest.raises(DiskFull):
            await ledger.save_run(RunRecord("other", "run", RunState.RUNNING, "", "/tmp", 0.0))
    assert (await ledger.get_run(RUN)).state is RunState.RUNNING
    ledger._writer._db.execute("PRAGMA max_page_count = 1000000")
    async with asyncio.timeout(LIMIT_S):
        await held
        await ledger.beat()
    assert (await ledger.get_run(RUN)).state is RunState.STOPPING


async def test_a_coordinator_that_goes_waits_for_no_room(ledger: Ledger) -> None:
    await begun(ledger)
    await limited(ledger, 1)
    held = asyncio.ensure_future(ledger.update_run(RUN, reason=LARGE))
    await asyncio.sleep(0)
    ledger.give_up_waiting()
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(DiskFull):
            await held
    ledger.close()


async def test_what_fails_for_another_reason_is_refused_beside_those_that_wait(ledger: Ledger) -> None:
    await begun(ledger)
    await limited(ledger, 1)
    held = asyncio.ensure_future(ledger.update_run(RUN, reason=LARGE))
    unknown = asyncio.ensure_future(ledger.update_run("nobody", reason="x"))
    await asyncio.sleep(0)
    ledger._writer._db.execute("PRAGMA max_page_count = 1000000")
    async with asyncio.timeout(LIMIT_S):
        await held
        with pytest.raises(Exception, match="nobody"):
            await unknown

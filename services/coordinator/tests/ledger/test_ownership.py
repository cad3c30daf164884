"""One coordinator writes a ledger at a time: a second one is refused, and one that lost it writes nothing more."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from flotilla_coordinator.ledger import writer
from flotilla_coordinator.ledger.ledger import Ledger
from flotilla_coordinator.ledger.records import RunRecord, RunState
from flotilla_coordinator.ledger.writer import Owner
from flotilla_core.errors import FailedPrecondition, StaleVersion
from flotilla_core.findings import info
from flotilla_core.process_identity import ProcessIdentity

RUN = "run-20260314-0915-7f3a"
RECORD = RunRecord(RUN, "run", RunState.RUNNING, "{}", "/runs/run", 1.0)


@pytest.fixture
def another() -> Owner:
    """A process that lives and has nothing to do with us."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = ProcessIdentity.of(child.pid)
    assert process is not None
    yield Owner("coordinator-a", socket.gethostname(), process)
    child.kill()
    child.communicate()


@pytest.fixture
async def theirs(tmp_path: Path, another: Owner) -> AsyncIterator[Ledger]:
    ledger = Ledger.open(tmp_path / "ledger.sqlite", another)
    await ledger.save_run(RECORD)
    yield ledger
    ledger.close()


async def test_a_second_coordinator_is_refused_with_the_name_of_the_first(
    theirs: Ledger, another: Owner
) -> None:
    with pytest.raises(FailedPrecondition) as refused:
        Ledger.open(theirs.path)
    assert "coordinator-a" in str(refused.value) and str(another.process.pid) in str(refused.value)
    await theirs.beat()


async def test_one_that_is_silent_is_taken_for_dead_and_writes_nothing_when_it_wakes_up(
    theirs: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time() + writer.SILENT_S
    monkeypatch.setattr(writer.time, "time", lambda: now)
    ours = Ledger.open(theirs.path, Owner.of_this_process("coordinator-b"))
    await ours.update_run(RUN, reason=info("ours"))
    assert not theirs.lost
    outcomes = await asyncio.gather(
        theirs.update_run(RUN, reason=info("theirs")), theirs.beat(), return_exceptions=True
    )
    assert [type(outcome) for outcome in outcomes] == [StaleVersion, StaleVersion]
    assert "coordinator-b" in str(outcomes[0]) and theirs.lost
    with pytest.raises(StaleVersion):
        await theirs.check_owner()
    assert (await theirs.get_run(RUN)).reason == info("ours")  # it may still read
    await ours.beat()
    ours.close()


async def test_one_that_speaks_is_not_silent(theirs: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    later = time.time() + writer.SILENT_S
    monkeypatch.setattr(writer.time, "time", lambda: later)
    await theirs.beat()
    with pytest.raises(FailedPrecondition, match="wrote it 0 s ago"):
        Ledger.open(theirs.path)


@pytest.mark.parametrize("gone", ["ended", "before a reboot"])
async def test_one_whose_process_is_gone_is_replaced_at_once(
    tmp_path: Path, another: Owner, gone: str
) -> None:
    changes = {"start_ticks": another.process.start_ticks + 1} if gone == "ended" else {"boot_id": "earlier"}
    dead = replace(another, process=replace(another.process, **changes))
    Ledger.open(tmp_path / "ledger.sqlite", dead).close()
    ours = Ledger.open(tmp_path / "ledger.sqlite")
    await ours.save_run(RECORD)
    assert (await ours.get_run(RUN)).run_id == RUN, "the new owner writes"
    ours.close()


async def test_one_on_another_host_is_judged_by_its_silence_alone(tmp_path: Path, another: Owner) -> None:
    far = replace(another, host="far-away", process=replace(another.process, boot_id="theirs"))
    Ledger.open(tmp_path / "ledger.sqlite", far).close()
    with pytest.raises(FailedPrecondition, match="on far-away"):
        Ledger.open(tmp_path / "ledger.sqlite")


async def test_fences_grow_over_all_runs_and_bear_the_name_of_their_ledger(tmp_path: Path) -> None:
    one, two = (Ledger.open(tmp_path / name) for name in ("one.sqlite", "two.sqlite"))
    for ledger in (one, two):
        await ledger.save_run(RECORD)
        await ledger.save_run(replace(RECORD, run_id="other"))
    fences = [await one.begin(run_id, 0) for run_id in (RUN, "other", RUN)]
    assert [(fence.epoch, fence.run, fence.number) for fence in fences] == [
        (1, RUN, 1),
        (1, "other", 2),
        (1, RUN, 3),
    ]
    assert (await two.begin(RUN, 0)).ledger != fences[0].ledger
    one.close()
    one = Ledger.open(tmp_path / "one.sqlite")
    assert (await one.begin(RUN, 0)).epoch == 2
    one.close()
    two.close()


async def test_a_run_that_has_ended_is_not_marked_as_about_to_stop(tmp_path: Path) -> None:
    ledger = Ledger.open(tmp_path / "ledger.sqlite")
    await ledger.save_run(RECORD)
    await ledger.stopping(RUN, info("enough"))
    assert (await ledger.get_run(RUN)).state is RunState.STOPPING
    await ledger.update_run(RUN, state=RunState.STOPPED, reason=info("enough"))
    await ledger.stopping(RUN, info("again"))
    record = await ledger.get_run(RUN)
    assert (record.state, record.reason) == (RunState.STOPPED, info("enough"))
    ledger.close()

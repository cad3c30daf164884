"""The checker sees what it is there to see: each kind of damage is found and named."""

from __future__ import annotations

import json
import sqlite3
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flotilla_coordinator.ledger.checker import Verdict, check
from flotilla_coordinator.ledger.ledger import Ledger
from flotilla_coordinator.ledger.records import FinishedSample, GroupIssue, RunRecord, RunState, TokenSpan
from flotilla_core.errors import NotFound
from flotilla_core.version import Version

RUN = "judged-20260314-0915-7f3a"
SAMPLES = tuple(f"{RUN}/0/0/{index}" for index in range(4))


@pytest.fixture
async def path(tmp_path: Path) -> Path:
    """A run that trained two samples at step 3, dropped one and has one in flight."""
    ledger = Ledger.open(tmp_path / "ledger.sqlite")
    config = "rollout:\n  max_staleness: 1\n"
    await ledger.save_run(RunRecord(RUN, "judged", RunState.RUNNING, config, "", time.time()))
    ids = np.array([1], dtype=np.int32)
    await ledger.group_issued(GroupIssue(RUN, f"{RUN}/0/0", SAMPLES, 3, 0, "", ids))
    span = (TokenSpan(Version(0, 2), 0, 1),)
    logprobs = np.zeros(1, dtype=np.float32)
    await ledger.group_scored(
        [FinishedSample(sample, ids, logprobs, "", span, reward=1.0) for sample in SAMPLES[:3]]
    )
    await ledger.consumed(
        RUN, f"{RUN}/0.4", SAMPLES[:2], Version(0, 3), result=Version(0, 4), step=4, cursor=None
    )
    await ledger.dropped(RUN, SAMPLES[2:3], "reward_error")
    ledger.close()
    return tmp_path / "ledger.sqlite"


def damage(path: Path, statement: str, *values: object) -> Verdict:
    with sqlite3.connect(path) as db:
        db.execute(statement, values)
    return check(path, RUN)


def event(
    path: Path, sample_id: str, before: int | None, after: int, version_step: int | None = None
) -> Verdict:
    return damage(
        path,
        "INSERT INTO transitions (run, sample_id, attempt, from_state, to_state, version_step, time) "
        "VALUES (1, ?, 0, ?, ?, ?, 0)",
        sample_id,
        before,
        after,
        version_step,
    )


def test_a_sound_run_passes_while_it_goes_on(path: Path) -> None:
    verdict = check(path, RUN)
    assert verdict.passed
    assert (verdict.admitted, verdict.trained, verdict.dropped, verdict.in_flight) == (
        4,
        2,
        {"reward_error": 1},
        1,
    )
    assert str(verdict).startswith(
        "passed: lost 0, trained twice 0, unexpected 0, stale 0, conservation holds"
    )


def test_what_is_admitted_while_it_judges_belongs_to_the_next_verdict(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect, admitted = sqlite3.connect, f"{RUN}/0/0/4"

    class Beside(sqlite3.Connection):
        def execute(self, statement: str, *values: Any) -> sqlite3.Cursor:
            cursor = super().execute(statement, *values)
            if "FROM runs" in statement:
                with connect(path) as db:
                    db.execute(
                        "INSERT INTO samples (sample_id, run, grp, step, state, attempt) VALUES (?, 1, 1, 3, 1, 0)",
                        (admitted,),
                    )
                    db.execute(
                        "INSERT INTO transitions (run, sample_id, attempt, to_state, time) VALUES (1, ?, 0, 1, 0)",
                        (admitted,),
                    )
                    db.execute("UPDATE tallies SET samples = samples + 1 WHERE run = 1 AND state = 1")
                    db.execute("UPDATE runs SET admitted = admitted + 1")
            return cursor

    monkeypatch.setattr(sqlite3, "connect", partial(connect, factory=Beside))
    verdict = check(path, RUN)
    monkeypatch.undo()
    assert verdict.passed and verdict.admitted == len(SAMPLES), str(verdict)
    verdict = check(path, RUN)
    assert verdict.passed and verdict.admitted == len(SAMPLES) + 1, str(verdict)


def test_a_sample_in_flight_is_lost_once_the_run_has_ended(path: Path) -> None:
    verdict = damage(path, "UPDATE runs SET state = 5")
    assert (verdict.lost, verdict.passed) == (1, False)
    assert verdict.offenders["lost"] == [SAMPLES[3]]


def test_a_vanished_sample_is_lost(path: Path) -> None:
    verdict = damage(path, "DELETE FROM samples WHERE sample_id = ?", SAMPLES[0])
    assert verdict.offenders["lost"] == [SAMPLES[0]]
    assert not verdict.conservation_ok


def test_a_sample_in_two_updates_is_trained_twice(path: Path) -> None:
    verdict = event(path, SAMPLES[0], 3, 4)
    assert verdict.offenders["trained_twice"] == [SAMPLES[0]]
    assert not verdict.passed


def test_training_again_after_the_update_was_undone_is_right(path: Path) -> None:
    event(path, SAMPLES[0], 4, 3)
    verdict = event(path, SAMPLES[0], 3, 4)
    assert verdict.passed, verdict


def test_a_sample_that_was_never_issued_is_unexpected(path: Path) -> None:
    assert event(path, f"{RUN}/9/9/9", 2, 3).offenders["unexpected"] == [f"{RUN}/9/9/9"]


def test_a_state_unlike_the_history_is_unexpected(path: Path) -> None:
    verdict = damage(path, "UPDATE samples SET state = 6 WHERE sample_id = ?", SAMPLES[1])
    assert verdict.offenders["unexpected"] == [SAMPLES[1]]
    assert not verdict.conservation_ok


def test_a_wrong_tally_breaks_conservation(path: Path) -> None:
    verdict = damage(path, "UPDATE tallies SET samples = samples + 1 WHERE state = 4")
    assert not verdict.conservation_ok


def test_a_sample_older_than_the_bound_is_stale(path: Path) -> None:
    verdict = damage(path, "UPDATE runs SET config_yaml = 'rollout: {max_staleness: 0}'")
    assert verdict.offenders["stale"] == list(SAMPLES[:2])
    assert (verdict.stale, verdict.passed) == (2, False)


def test_a_bound_that_was_tightened_judges_no_sample_from_before(path: Path) -> None:
    change = {
        "step": 4,
        "changes": {"rollout.max_staleness": {"from": 1, "to": 0}, "steps": {"from": 3, "to": 9}},
    }
    (path.parent / "changes.jsonl").write_text(json.dumps(change) + "\n")
    verdict = damage(
        path,
        "UPDATE runs SET directory = ?, config_yaml = 'rollout: {max_staleness: 0}'",
        str(path.parent),
    )
    assert verdict.passed, str(verdict)


def test_an_unknown_run_is_named(path: Path) -> None:
    with pytest.raises(NotFound, match="no run nobody"):
        check(path, "nobody")

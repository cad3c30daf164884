"""Files of every schema that was ever released are opened by this one; those of a later one are refused."""

from __future__ import annotations

import contextlib
import hashlib
import sqlite3
import time
from pathlib import Path

import numpy as np
import pytest

from flotilla.common.v1.finding_pb2 import Finding
from flotilla_coordinator.ledger import queries, sample_queries
from flotilla_coordinator.ledger import schema as ledger_schema
from flotilla_coordinator.ledger.checker import check
from flotilla_coordinator.ledger.ledger import Ledger
from flotilla_coordinator.ledger.records import SampleState
from flotilla_coordinator.timeline import schema as span_schema
from flotilla_coordinator.timeline.store import SpanStore
from flotilla_core.errors import FailedPrecondition
from flotilla_core.version import Version

RUN = "old-20260314-0915-7f3a"
RELEASED = {
    "ledger": [
        "4b3904321063e98b",
        "63c9fb8d1df424c5",
        "01cb05a776aaa858",
        "096b6d4611d97470",
        "00cf8dcdc18e4ba7",
        "378cb8d16f20c2da",
        "c76361e2830b122a",
        "fcbba4eef96e65aa",
        "bfbfcbc939eb93d5",
        "ae5a7f6dd35a55ec",
        "9ff2ec2f2db77e97",
        "87f1d88590a4d27a",
        "5b30a486666780e4",
        "5d3c066f6b8b19b9",
        "cb08de77a76f4e97",
        "fd39036377d3a2f7",
    ],
    "spans": ["7552e8ae33ec47e1"],
}
"""The beginnings of the digests of what was released: one that users have does not change."""
TRAINED_TOKENS = 9
"""The first schema whose samples this release lists without a coordinator."""
REASON_IN_PARTS = 10
"""The first schema that holds the reason of an end in parts."""
TURN_ENDS = 15
"""The first schema that holds where turns end."""


def digests(scripts: tuple[str, ...]) -> list[str]:
    return [hashlib.sha256(script.encode()).hexdigest()[:16] for script in scripts]


def test_what_was_released_does_not_change() -> None:
    assert digests(ledger_schema.MIGRATIONS) == RELEASED["ledger"]
    assert digests(span_schema.MIGRATIONS) == RELEASED["spans"]


def old_ledger(path: Path, number: int) -> None:
    """A ledger of an early schema with one run: a trained sample, and one that waits."""
    db = sqlite3.connect(path)
    db.execute("CREATE TABLE migrations (number INTEGER PRIMARY KEY, applied_at REAL NOT NULL)")
    for done, script in enumerate(ledger_schema.MIGRATIONS[:number], start=1):
        db.executescript(f"{script} INSERT INTO migrations VALUES ({done}, {time.time()});")
    reason = "the trainer died" if number < REASON_IN_PARTS else '{"what": "the trainer died"}'
    db.executescript(
        f"""
        INSERT INTO runs (key, run_id, name, state, config_yaml, directory, created_at, reason, step, version_step,
            admitted) VALUES (1, '{RUN}', 'old', 7, '{{}}', '/runs/old', 1.0, '{reason}', 1, 1, 2);
        INSERT INTO groups (key, group_id, prompt_text, prompt_token_ids)
            VALUES (1, '{RUN}/0/0', '1+1=', x'01000000');
        INSERT INTO updates VALUES (1, '{RUN}/0.1', 1, 0, 0, 'applied');
        INSERT INTO samples (key, sample_id, run, grp, step, state, attempt, reward, drop_reason, update_key,
            update_position) VALUES (1, '{RUN}/0/0/0', 1, 1, 0, 4, 0, 1.0, '', 1, 0),
            (2, '{RUN}/0/0/1', 1, 1, 0, 6, 0, NULL, 'run_ended', NULL, NULL);
        INSERT INTO payloads (sample, token_ids, logprobs, spans, text)
            VALUES (1, x'05000000', x'0000003f', x'', '2');
        INSERT INTO tallies VALUES (1, 1, '', 0), (1, 4, '', 1), (1, 6, 'run_ended', 1);
        INSERT INTO transitions (run, sample_id, attempt, from_state, to_state, version_step, detail, time) VALUES
            (1, '{RUN}/0/0/0', 0, NULL, 1, NULL, '', 1.0), (1, '{RUN}/0/0/1', 0, NULL, 1, NULL, '', 1.0),
            (1, '{RUN}/0/0/0', 0, 1, 2, 0, '', 1.0), (1, '{RUN}/0/0/0', 0, 2, 3, NULL, '', 1.0),
            (1, '{RUN}/0/0/0', 0, 3, 4, 0, '{RUN}/0.1', 1.0),
            (1, '{RUN}/0/0/1', 0, 1, 6, NULL, 'run_ended', 1.0);
        """
    )
    db.close()


@pytest.mark.parametrize("number", range(1, len(ledger_schema.MIGRATIONS) + 1))
async def test_a_run_of_an_old_ledger_is_judged_and_goes_on(tmp_path: Path, number: int) -> None:
    path = tmp_path / "ledger.sqlite"
    old_ledger(path, number)
    with contextlib.closing(ledger_schema.connect_read_only(path)) as unmigrated:
        before = queries.run(unmigrated, RUN)
        if number >= TRAINED_TOKENS:
            kept = sample_queries.samples(unmigrated, RUN, None, None, 10, 0)
            assert [(one.reward, one.verdicts) for one in kept] == [(1.0, ()), (None, ())]
    ledger = Ledger.open(path)
    assert check(path, RUN).passed
    assert before == await ledger.get_run(RUN) and before.reason == Finding(what="the trainer died")
    assert await ledger.last_metrics(RUN) == {}
    voided = await ledger.fall_back(RUN, Version(1, 0), step=0, cursor=None)
    assert [update.update_id for update in voided] == [f"{RUN}/0.1"]
    fence = await ledger.begin(RUN, 1)
    assert fence.number == 1 and fence.ledger
    samples = await ledger.samples(RUN)
    assert [(one.state, one.verdicts) for one in samples] == [
        (SampleState.SCORED, ()),
        (SampleState.ISSUED, ()),
    ]
    ledger.close()
    Ledger.open(path).close()  # what has been migrated is not migrated again
    db = sqlite3.connect(path)
    numbers = [done for (done,) in db.execute("SELECT number FROM migrations ORDER BY 1")]
    assert numbers == list(range(1, len(ledger_schema.MIGRATIONS) + 1))
    db.close()


async def test_an_episode_from_before_turns_had_ends_is_read_without_them(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    old_ledger(path, TURN_ENDS - 1)
    db = sqlite3.connect(path)
    db.execute(
        "INSERT INTO episodes (sample, ending, turns, turn_rewards, messages, branches) "
        "VALUES (1, 'completed', 1, ?, '[]', x'')",
        (np.array([0.5], "<f8").tobytes(),),
    )
    db.execute("UPDATE payloads SET trained = x'01' WHERE sample = 1")
    db.commit()
    db.close()
    with contextlib.closing(ledger_schema.connect_read_only(path)) as unmigrated:
        (shown, _) = sample_queries.samples(unmigrated, RUN, None, None, 10, 0)
    ledger = Ledger.open(path)
    (trained, _) = await ledger.samples(RUN)
    ledger.close()
    for episode in (shown.episode, trained.episode):
        assert episode is not None and episode.turn_rewards == (0.5,)
        assert (episode.turn_ends, episode.turn_states) == ((), ())


async def test_a_migration_that_fails_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ledger.sqlite"
    old_ledger(path, 1)
    broken = (*ledger_schema.MIGRATIONS[:1], "CREATE TABLE half (x); CREATE TABLE runs (y);")
    monkeypatch.setattr(ledger_schema, "MIGRATIONS", broken)
    with pytest.raises(FailedPrecondition, match=r"schema 2.*runs already exists"):
        Ledger.open(path)
    db = sqlite3.connect(path)
    assert db.execute("SELECT count(*) FROM sqlite_master WHERE name = 'half'").fetchone() == (0,)
    assert db.execute("SELECT max(number) FROM migrations").fetchone() == (1,)
    db.close()


def test_a_span_store_from_before_there_were_numbers_is_taken_on(tmp_path: Path) -> None:
    path = tmp_path / "spans.sqlite"
    db = sqlite3.connect(path)
    db.executescript(f"{span_schema.MIGRATIONS[0]} INSERT INTO runs VALUES ('old', 1);")
    db.close()
    SpanStore(path).close()
    db = sqlite3.connect(path)
    assert db.execute("PRAGMA user_version").fetchone() == (len(span_schema.MIGRATIONS),)
    assert db.execute("SELECT run_id FROM runs").fetchall() == [("old",)]
    db.close()


def test_a_span_store_of_a_later_release_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "spans.sqlite"
    db = sqlite3.connect(path)
    db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(FailedPrecondition, match="schema 99"):
        SpanStore(path)

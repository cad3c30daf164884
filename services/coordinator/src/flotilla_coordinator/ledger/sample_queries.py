"""Reads groups and samples of the ledger, on a connection that cannot write."""

from __future__ import annotations

import sqlite3
from dataclasses import replace

import numpy as np

from flotilla_coordinator.ledger import episodes, turns, verdicts
from flotilla_coordinator.ledger.records import (
    AdmittedGroup,
    GroupOutcome,
    SampleRecord,
    SampleState,
)


def admitted_groups(db: sqlite3.Connection, run_id: str, first_step: int) -> list[AdmittedGroup]:
    """Return every group that counts for `first_step` or a later one, in the order of admission."""
    rows = db.execute(
        "SELECT s.step, g.group_id, g.prompt_token_ids, g.max_staleness "
        "FROM samples s JOIN groups g ON g.key = s.grp "
        "WHERE s.run = (SELECT key FROM runs WHERE run_id = ?) AND s.step >= ? "
        "GROUP BY s.grp ORDER BY min(s.key)",
        (run_id, first_step),
    )
    return [
        AdmittedGroup(step, group_id, np.frombuffer(tokens, "<i4"), bound)
        for step, group_id, tokens, bound in rows
    ]


def outcomes(
    db: sqlite3.Connection, run_id: str, first_step: int, end_step: int, right_at: float
) -> list[GroupOutcome]:
    """Return the outcomes of groups of the steps from `first_step` to before `end_step`, in the order of steps."""
    rows = db.execute(
        "SELECT g.group_id, min(s.reward) >= ?, avg(s.reward) FROM samples s JOIN groups g ON g.key = s.grp "
        "WHERE s.run = (SELECT key FROM runs WHERE run_id = ?) AND s.step >= ? AND s.step < ? "
        "AND s.reward IS NOT NULL GROUP BY s.grp ORDER BY min(s.step), min(s.key)",
        (right_at, run_id, first_step, end_step),
    )
    return [GroupOutcome(group_id, bool(solved), reward) for group_id, solved, reward in rows]


def samples(
    db: sqlite3.Connection,
    run_id: str,
    step: int | None,
    state: SampleState | None,
    limit: int,
    after: int,
) -> list[SampleRecord]:
    """Return samples of a run with their payloads, in the order of admission."""
    conditions = ["r.run_id = ?", "s.key > ?"]
    values: list[str | int] = [run_id, after]
    if step is not None:
        conditions.append("s.step = ?")
        values.append(step)
    if state is not None:
        conditions.append("s.state = ?")
        values.append(int(state))
    rows = db.execute(
        "SELECT s.sample_id, g.group_id, s.state, s.attempt, s.step, s.key, s.generator, s.reward, s.truncated, "
        "s.drop_reason, coalesce(u.update_id, ''), g.prompt_text, g.prompt_token_ids, "
        "p.text, p.token_ids, p.logprobs, p.spans, s.reward_terms, s.greedy_reward, p.trained, "
        f"{_verdicts(db)} "
        "FROM samples s JOIN runs r ON r.key = s.run JOIN groups g ON g.key = s.grp "
        "LEFT JOIN updates u ON u.key = s.update_key LEFT JOIN payloads p ON p.sample = s.key "
        f"WHERE {' AND '.join(conditions)} ORDER BY s.key LIMIT ?",
        (*values, limit),
    )
    found = [_sample_record(row) for row in rows]
    # Every episode has marks of what is trained. A ledger that no coordinator of this release opened has no episodes.
    of_episodes = [one.position for one in found if one.trained is not None]
    known = episodes.load(db, of_episodes) if of_episodes and _has(db, "episodes") else {}
    under_way = {one.position: one.sample_id for one in found if one.state is SampleState.ISSUED}
    so_far = turns.load(db, under_way) if under_way and _has(db, "turns") else {}
    return [
        replace(one, episode=known.get(one.position), turns=so_far.get(one.position, ())) for one in found
    ]


def _has(db: sqlite3.Connection, table: str) -> bool:
    return db.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (table,)).fetchone() is not None


def _verdicts(db: sqlite3.Connection) -> str:
    """Return where verdicts are; a ledger that no coordinator of this release has opened holds none."""
    columns = [name for _, name, *_ in db.execute("PRAGMA table_info (samples)")]
    return "s.verdicts" if "verdicts" in columns else "''"


def _sample_record(row: tuple[object, ...]) -> SampleRecord:
    (sample_id, group_id, state, attempt, step, key, generator, reward, truncated) = row[:9]
    (drop_reason, update_id, prompt_text, prompt_ids, text, token_ids, logprobs, spans) = row[9:17]
    terms, greedy, trained, said = row[17:]
    return SampleRecord(
        sample_id=str(sample_id),
        group_id=str(group_id),
        state=SampleState(int(str(state))),
        attempt=int(str(attempt)),
        step=int(str(step)),
        position=int(str(key)),
        generator=str(generator),
        reward=None if reward is None else float(str(reward)),
        truncated=bool(truncated),
        drop_reason=str(drop_reason),
        update_id=str(update_id),
        prompt_text=str(prompt_text),
        prompt_token_ids=_array(prompt_ids, "<i4"),
        text="" if text is None else str(text),
        token_ids=_array(token_ids, "<i4"),
        logprobs=_array(logprobs, "<f4"),
        spans=turns.spans_of(spans),
        reward_terms=tuple(np.frombuffer(terms, "<f8").tolist()) if isinstance(terms, bytes) else (),
        greedy_reward=None if greedy is None else float(str(greedy)),
        trained=_array(trained, "?"),
        verdicts=verdicts.from_text(str(said)),
    )


def _array(data: object, dtype: str) -> np.ndarray | None:
    return np.frombuffer(data, dtype=dtype) if isinstance(data, bytes) else None

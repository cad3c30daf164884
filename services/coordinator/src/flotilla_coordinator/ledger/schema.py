"""Defines the tables of the ledger, and migrates older files.

Invariants: a released migration never changes, and the file records which ones it has. A file from a newer Flotilla is
refused, never guessed at. `transitions` only grows: triggers refuse every change to a row, and its deletion, except
when an ended run is forgotten.
"""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path

from flotilla_core.errors import FailedPrecondition

PAGE_BYTES = 16384

_FIRST = """
CREATE TABLE runs (
    key INTEGER PRIMARY KEY,
    run_id TEXT NOT NULL UNIQUE,
    name TEXT NOT NULL,
    state INTEGER NOT NULL,
    config_yaml TEXT NOT NULL,
    directory TEXT NOT NULL,
    created_at REAL NOT NULL,
    ended_at REAL,
    reason TEXT NOT NULL DEFAULT '',
    step INTEGER NOT NULL DEFAULT 0,
    version_lineage INTEGER NOT NULL DEFAULT 0,
    version_step INTEGER NOT NULL DEFAULT 0,
    cursor TEXT,
    admitted INTEGER NOT NULL DEFAULT 0,
    duplicates INTEGER NOT NULL DEFAULT 0,
    late INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE groups (
    key INTEGER PRIMARY KEY,
    group_id TEXT NOT NULL UNIQUE,
    prompt_text TEXT NOT NULL,
    prompt_token_ids BLOB NOT NULL
);
CREATE TABLE updates (
    key INTEGER PRIMARY KEY,
    update_id TEXT NOT NULL UNIQUE,
    run INTEGER NOT NULL REFERENCES runs (key),
    lineage INTEGER NOT NULL,
    step INTEGER NOT NULL,
    status TEXT NOT NULL CHECK (status IN ('applied', 'durable', 'void'))
);
CREATE INDEX updates_of_run ON updates (run, step);
CREATE TABLE samples (
    key INTEGER PRIMARY KEY,
    sample_id TEXT NOT NULL UNIQUE,
    run INTEGER NOT NULL REFERENCES runs (key),
    grp INTEGER NOT NULL REFERENCES groups (key),
    step INTEGER NOT NULL,
    state INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    generator TEXT NOT NULL DEFAULT '',
    reward REAL,
    truncated INTEGER NOT NULL DEFAULT 0,
    drop_reason TEXT NOT NULL DEFAULT '',
    update_key INTEGER REFERENCES updates (key),
    update_position INTEGER
);
CREATE INDEX samples_of_step ON samples (run, step);
CREATE INDEX samples_of_update ON samples (update_key) WHERE update_key IS NOT NULL;
CREATE TABLE payloads (
    sample INTEGER PRIMARY KEY REFERENCES samples (key),
    token_ids BLOB NOT NULL,
    logprobs BLOB NOT NULL,
    spans BLOB NOT NULL,
    text TEXT NOT NULL
);
CREATE TABLE tallies (
    run INTEGER NOT NULL REFERENCES runs (key),
    state INTEGER NOT NULL,
    reason TEXT NOT NULL,
    samples INTEGER NOT NULL,
    PRIMARY KEY (run, state, reason)
) WITHOUT ROWID;
CREATE TABLE transitions (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    run INTEGER NOT NULL,
    sample_id TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    from_state INTEGER,
    to_state INTEGER NOT NULL,
    version_lineage INTEGER,
    version_step INTEGER,
    detail TEXT NOT NULL DEFAULT '',
    time REAL NOT NULL
);
CREATE INDEX transitions_of_run ON transitions (run);
CREATE TRIGGER transitions_never_change BEFORE UPDATE ON transitions
BEGIN SELECT RAISE (ABORT, 'the event log only grows'); END;
CREATE TRIGGER transitions_never_vanish BEFORE DELETE ON transitions
BEGIN SELECT RAISE (ABORT, 'the event log only grows'); END;
"""

# Every start of a run has a number that is higher than that of any earlier start of any run.
_BEGINNINGS = """
CREATE TABLE beginnings (
    fence INTEGER PRIMARY KEY AUTOINCREMENT,
    run INTEGER NOT NULL REFERENCES runs (key),
    lineage INTEGER NOT NULL,
    steps_done INTEGER NOT NULL,
    after_coordinator INTEGER NOT NULL,
    time REAL NOT NULL
);
CREATE INDEX beginnings_of_run ON beginnings (run);
"""

# The name of the ledger itself, and the one coordinator that may write it.
_OWNER = """
CREATE TABLE identity (name TEXT NOT NULL);
INSERT INTO identity VALUES (lower(hex(randomblob(8))));
CREATE TABLE owner (
    epoch INTEGER PRIMARY KEY,
    instance_id TEXT NOT NULL,
    host TEXT NOT NULL,
    pid INTEGER NOT NULL,
    start_ticks INTEGER NOT NULL,
    boot_id TEXT NOT NULL,
    seen_at REAL NOT NULL
);
"""

# The event log only grows, until the whole run is forgotten.
_FORGETTING = """
CREATE TABLE forgetting (run INTEGER PRIMARY KEY);
DROP TRIGGER transitions_never_vanish;
CREATE TRIGGER transitions_never_vanish BEFORE DELETE ON transitions
WHEN NOT EXISTS (SELECT 1 FROM forgetting WHERE run = OLD.run)
BEGIN SELECT RAISE (ABORT, 'the event log only grows'); END;
CREATE INDEX samples_of_group ON samples (grp);
"""

# Some advantages weigh the terms of a reward themselves.
_REWARD_TERMS = """
ALTER TABLE samples ADD COLUMN reward_terms BLOB NOT NULL DEFAULT x'';
"""

# Other advantages compare with the reward of the greedy response to the same prompt, which is not a sample.
_GREEDY_REWARD = """
ALTER TABLE samples ADD COLUMN greedy_reward REAL;
"""

# A run may change its bound while groups of an earlier bound wait, or are trained again.
_STALENESS = """
ALTER TABLE groups ADD COLUMN max_staleness INTEGER;
"""

# The number of takeovers is kept with the run, because starts are many and do not count steps.
_TAKEOVERS = """
ALTER TABLE runs ADD COLUMN takeovers INTEGER NOT NULL DEFAULT 0;
ALTER TABLE beginnings DROP COLUMN steps_done;
ALTER TABLE beginnings DROP COLUMN after_coordinator;
"""

# Of a response with context in it, such as what a tool answered, the tokens that the policy wrote are trained.
_TRAINED_TOKENS = """
ALTER TABLE payloads ADD COLUMN trained BLOB;
"""

# The end of a run is told in parts: what, where, why and what to do next.
_REASON_IN_PARTS = """
UPDATE runs SET reason = json_object('what', reason) WHERE reason != '';
"""

# The metrics of the last step: a coordinator that dies before it has written them leaves them here for the next one.
_LAST_METRICS = """
ALTER TABLE runs ADD COLUMN last_metrics TEXT NOT NULL DEFAULT '{}';
"""

# How each reward judged a sample: by which verifier, in which time, and why there is no score.
_VERDICTS = """
ALTER TABLE samples ADD COLUMN verdicts TEXT NOT NULL DEFAULT '';
"""

# What samples of several turns have in addition; it goes with their tokens.
_EPISODES = """
CREATE TABLE episodes (
    sample INTEGER PRIMARY KEY REFERENCES samples (key),
    ending TEXT NOT NULL,
    turns INTEGER NOT NULL,
    turn_rewards BLOB NOT NULL,
    messages TEXT NOT NULL,
    branches BLOB NOT NULL
);
CREATE TRIGGER episodes_go_with_payloads AFTER DELETE ON payloads
BEGIN DELETE FROM episodes WHERE sample = OLD.sample; END;
"""

# The turns of episodes that are under way, which a coordinator that comes back plays again.
_TURNS = """
CREATE TABLE turns (
    sample INTEGER NOT NULL REFERENCES samples (key),
    number INTEGER NOT NULL,
    beginning INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    asked BLOB NOT NULL,
    token_ids BLOB NOT NULL,
    logprobs BLOB NOT NULL,
    spans BLOB NOT NULL,
    text TEXT NOT NULL,
    truncated INTEGER NOT NULL,
    generator TEXT NOT NULL,
    PRIMARY KEY (sample, number)
) WITHOUT ROWID;
CREATE TRIGGER turns_go_with_their_end AFTER UPDATE OF state ON samples WHEN OLD.state = 1 AND NEW.state != 1
BEGIN DELETE FROM turns WHERE sample = OLD.key; END;
"""

# Where the turns of an episode end, so that each is credited with its own reward.
_TURN_ENDS = """
ALTER TABLE episodes ADD COLUMN turn_ends BLOB NOT NULL DEFAULT x'';
"""

# In which state each turn of an episode was asked, so that turns of a group are compared that were asked in the same.
_TURN_STATES = """
ALTER TABLE episodes ADD COLUMN turn_states BLOB NOT NULL DEFAULT x'';
"""

MIGRATIONS: tuple[str, ...] = (
    _FIRST,
    _BEGINNINGS,
    _OWNER,
    _FORGETTING,
    _REWARD_TERMS,
    _GREEDY_REWARD,
    _STALENESS,
    _TAKEOVERS,
    _TRAINED_TOKENS,
    _REASON_IN_PARTS,
    _LAST_METRICS,
    _VERDICTS,
    _EPISODES,
    _TURNS,
    _TURN_ENDS,
    _TURN_STATES,
)


def connect(path: Path) -> sqlite3.Connection:
    """Return the writer's connection: durable at every commit, with the newest schema."""
    db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    db.execute(f"PRAGMA page_size = {PAGE_BYTES}")
    # This has no effect on an existing file, whose free pages are filled again.
    db.execute("PRAGMA auto_vacuum = INCREMENTAL")
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = FULL")
    db.execute("PRAGMA busy_timeout = 10000")
    # Savepoints keep the old pages of a transaction in memory, not in a temporary file.
    db.execute("PRAGMA temp_store = MEMORY")
    _migrate(db, path)
    return db


def connect_read_only(path: Path) -> sqlite3.Connection:
    """Return a connection that sees what is committed and cannot write."""
    db = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, check_same_thread=False)
    db.execute("PRAGMA busy_timeout = 10000")
    return db


def _migrate(db: sqlite3.Connection, path: Path) -> None:
    db.execute("CREATE TABLE IF NOT EXISTS migrations (number INTEGER PRIMARY KEY, applied_at REAL NOT NULL)")
    (done,) = db.execute("SELECT coalesce(max(number), 0) FROM migrations").fetchone()
    if done > len(MIGRATIONS):
        raise FailedPrecondition(
            f"the ledger has schema {done}, and this Flotilla supports up to {len(MIGRATIONS)}",
            where=str(path),
            why="a newer Flotilla wrote it",
            next_step="use that version, or another state_dir",
        )
    for number, script in enumerate(MIGRATIONS[done:], start=done + 1):
        stamp = f"INSERT INTO migrations VALUES ({number}, {time.time()});"
        try:
            db.executescript(f"BEGIN IMMEDIATE; {script} {stamp} COMMIT;")
        except sqlite3.Error as error:
            db.close()
            raise FailedPrecondition(
                f"the ledger cannot be migrated to schema {number}",
                where=str(path),
                why=str(error),
                next_step="it is unchanged; free space on its disk, or use the Flotilla that wrote it",
            ) from error

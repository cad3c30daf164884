"""Checks the ledger independently, for samples that were lost, trained twice, or trained too late.

Invariants: the verdict comes from the append-only event log alone (as a queue's enqueue and dequeue history is judged),
and from code that the writer does not share; the states and tallies in the ledger are then compared with that verdict.
The file is opened read-only, so a check may run while a coordinator is active.
"""

from __future__ import annotations

import json
import sqlite3
from dataclasses import dataclass, field
from pathlib import Path

from flotilla_core.config import read_values
from flotilla_core.errors import NotFound

MOST_NAMED = 20
UNBOUNDED = 1 << 60
"""The staleness limit of a loop that a client makes: the client decides how stale its samples may be."""
ENDED_RUN_STATES = (5, 6, 7)


@dataclass(frozen=True)
class Verdict:
    """The verdict on one run by its event log; lists name at most the first few offenders."""

    lost: int
    """Number of samples that were scored (or admitted, once the run has ended) and neither trained nor dropped."""
    trained_twice: int
    """Number of samples in more than one surviving update."""
    unexpected: int
    """Number of samples with an impossible history: never issued, a gap, or a state unlike their last event."""
    stale: int
    """Number of samples trained further from their oldest token's version than max_staleness allows."""
    dropped: dict[str, int]
    conservation_ok: bool
    """True where admitted = trained + dropped + in flight, by the log, by the states and by the tallies."""
    admitted: int = 0
    trained: int = 0
    in_flight: int = 0
    offenders: dict[str, list[str]] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Return True when nothing is wrong."""
        return self.conservation_ok and not (self.lost or self.trained_twice or self.unexpected or self.stale)

    def __str__(self) -> str:
        dropped = ", ".join(f"{reason} {count}" for reason, count in sorted(self.dropped.items())) or "0"
        verdict = "passed" if self.passed else "FAILED"
        return (
            f"{verdict}: lost {self.lost}, trained twice {self.trained_twice}, unexpected {self.unexpected}, "
            f"stale {self.stale}, conservation {'holds' if self.conservation_ok else 'broken'} "
            f"({self.admitted} admitted = {self.trained} trained + {sum(self.dropped.values())} dropped "
            f"[{dropped}] + {self.in_flight} in flight)"
        )


# Each row is a sample with the sum of its events. Going back from consumed (4) to scored (3) undoes a training.
_HISTORIES = """
CREATE TEMP TABLE histories AS
SELECT
    sample_id,
    sum(from_state IS NULL) AS admissions,
    sum(to_state = 4) - sum(from_state = 4 AND to_state = 3) AS trainings,
    max(to_state = 3) AS was_scored,
    max(CASE WHEN seq_rank = 1 THEN to_state END) AS last_state,
    max(CASE WHEN seq_rank = 1 THEN detail END) AS last_detail,
    sum(gap) AS gaps
FROM (
    SELECT
        sample_id, from_state, to_state, detail,
        row_number() OVER (PARTITION BY sample_id ORDER BY seq DESC) AS seq_rank,
        from_state IS NOT lag(to_state) OVER (PARTITION BY sample_id ORDER BY seq) AS gap
    FROM transitions WHERE run = :run
)
GROUP BY sample_id
"""

_STALE = """
SELECT DISTINCT t.sample_id FROM transitions t
WHERE t.run = :run AND t.to_state = 4
AND t.version_step - (
    SELECT g.version_step FROM generations g WHERE g.sample_id = t.sample_id AND g.seq < t.seq
    ORDER BY g.seq DESC LIMIT 1
) > :max_staleness
"""


def check(path: Path, run_id: str) -> Verdict:
    """Judge one run of the ledger at `path`."""
    db = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
    try:
        db.execute("PRAGMA temp_store = MEMORY")
        return _judge(db, run_id)
    finally:
        db.close()


def _judge(db: sqlite3.Connection, run_id: str) -> Verdict:
    db.execute("BEGIN")  # one snapshot for all that follows
    row = db.execute(
        "SELECT key, state, config_yaml, directory, admitted FROM runs WHERE run_id = ?", (run_id,)
    ).fetchone()
    if row is None:
        raise NotFound(f"the ledger has no run {run_id}")
    run, state, config_yaml, directory, counted_admitted = row
    db.execute(_HISTORIES, {"run": run})
    db.execute(
        "CREATE TEMP TABLE generations AS SELECT sample_id, seq, version_step FROM transitions "
        "WHERE run = ? AND to_state = 2",
        (run,),
    )
    db.execute("CREATE INDEX temp.generations_of ON generations (sample_id, seq)")

    def names(query: str, **values: object) -> list[str]:
        return [name for (name,) in db.execute(query, {"run": run, **values})]

    offenders = {
        "lost": names(
            "SELECT h.sample_id FROM histories h LEFT JOIN samples s USING (sample_id) WHERE s.key IS NULL"
            + (" OR last_state IN (1, 2, 3)" if state in ENDED_RUN_STATES else "")
        ),
        "trained_twice": names("SELECT sample_id FROM histories WHERE trainings > 1"),
        "unexpected": names(
            "SELECT h.sample_id FROM histories h LEFT JOIN samples s USING (sample_id) "
            "WHERE admissions != 1 OR gaps != 0 OR trainings < 0 "
            "OR (s.key IS NOT NULL AND s.state != last_state) "
            "UNION ALL SELECT sample_id FROM samples WHERE run = :run "
            "AND sample_id NOT IN (SELECT sample_id FROM histories)"
        ),
        "stale": names(_STALE, max_staleness=_max_staleness(config_yaml, Path(directory))),
    }
    (admitted, trained, in_flight) = db.execute(
        "SELECT count(*), coalesce(sum(last_state IN (4, 5)), 0), coalesce(sum(last_state IN (1, 2, 3)), 0) "
        "FROM histories"
    ).fetchone()
    dropped = dict(
        db.execute("SELECT last_detail, count(*) FROM histories WHERE last_state = 6 GROUP BY 1").fetchall()
    )
    by_log = {int(s): n for s, n in db.execute("SELECT last_state, count(*) FROM histories GROUP BY 1")}
    by_state = {
        int(s): n
        for s, n in db.execute("SELECT state, count(*) FROM samples WHERE run = ? GROUP BY 1", (run,))
    }
    tallies = "SELECT state, sum(samples) FROM tallies WHERE run = ? GROUP BY 1 HAVING sum(samples) != 0"
    by_tally = {int(s): n for s, n in db.execute(tallies, (run,))}
    return Verdict(
        lost=len(offenders["lost"]),
        trained_twice=len(offenders["trained_twice"]),
        unexpected=len(offenders["unexpected"]),
        stale=len(offenders["stale"]),
        dropped=dropped,
        conservation_ok=(
            by_log == by_state == by_tally
            and admitted == counted_admitted == trained + sum(dropped.values()) + in_flight
        ),
        admitted=admitted,
        trained=trained,
        in_flight=in_flight,
        offenders={kind: found[:MOST_NAMED] for kind, found in offenders.items() if found},
    )


def _max_staleness(config_yaml: str, directory: Path) -> int:
    """Return the loosest bound that the run ever had: a user may tighten it while older samples are under way."""
    config = read_values(config_yaml, "run") if config_yaml.strip() else {}
    if config.get("loop") == "client":
        return UNBOUNDED
    bounds = [int(config.get("rollout", {}).get("max_staleness", 0))]
    changes = directory / "changes.jsonl"
    for line in changes.read_text("utf-8").splitlines() if changes.is_file() else ():
        bounds.append(int(json.loads(line)["changes"].get("rollout.max_staleness", {}).get("from", 0)))
    return max(bounds)

"""What a fleet has, so that a test can say that nothing of it is another."""

from __future__ import annotations

import contextlib
import hashlib
import re
import sqlite3
from typing import Any

from flotilla_testing.stack import Stack, wait_until


def state_of(stack: Stack) -> dict[str, Any]:
    """What a refused call must not change: rows of the ledger, registrations and files, each by its name."""
    with contextlib.closing(sqlite3.connect(f"file:{stack.directory}/ledger.sqlite?mode=ro", uri=True)) as db:
        tables = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        # The owner of the ledger renews its claim all the time.
        tables.remove("owner")
        ledger = {
            f"table {table}": sorted(map(repr, db.execute(f'SELECT * FROM "{table}"'))) for table in tables
        }
    with stack.client() as client:
        registry = {
            f"instance {one.registration.instance_id}": (one.registration.state, one.run_id)
            for one in client.list_services()
        }
    # Logs tell of the refusals, spans of the looks of this test; NATS keeps heartbeats.
    changing = re.compile(r"^nats/|(^|/)logs/|\.sqlite(-wal|-shm)?$")
    files = {
        f"file {name}": hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(stack.directory.rglob("*"))
        if path.is_file() and not changing.search(name := str(path.relative_to(stack.directory)))
    }
    return {**ledger, **registry, **files}


def settled(stack: Stack) -> dict[str, Any]:
    """The state once nothing changes by itself any more."""
    looks = [state_of(stack)]

    def is_quiet() -> bool:
        looks.append(state_of(stack))
        return not changes(looks[-2], looks[-1])

    wait_until("the end of what runs leave to do", is_quiet, 60, every_s=2)
    return looks[-1]


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [name for name in sorted(before.keys() | after.keys()) if before.get(name) != after.get(name)]

"""Lets one coordinator at a time write a ledger.

Invariants: the owner is checked within each transaction, so a process that lost the ledger writes nothing more, however
long it was suspended. A ledger is taken over only from a process that has ended, or that was silent for SILENT_S
although it should renew its ownership every BEAT_S.
"""

from __future__ import annotations

import os
import socket
import sqlite3
import time
from dataclasses import dataclass
from pathlib import Path

from flotilla_core.errors import FailedPrecondition, StaleVersion
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


def beat(db: sqlite3.Connection) -> None:
    """Renew the ownership."""
    db.execute("UPDATE owner SET seen_at = ?", (time.time(),))

"""Every process that descends from one service process, dead or alive.

A service is started as the leader of its own session. Its tree has all processes in that session or process group and
those that still descend from it. A grandchild that made a session of its own belongs to it by the mark in its
environment. Invariant: nothing is signalled unless it belongs to the tree of a process that we started. Start time
and boot decide that, never the pid alone.

psutil says neither the session nor the group of a process, and tells start times only by a clock that may be set. It
does not see a mark behind a part of the environment that the process has overwritten.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

from flotilla_core.process_identity import ProcessIdentity, StatFields, boot_id, stat_fields

MARK = "FLOTILLA_PROCESS"
"""Environment variable that descendants inherit; its value is unique to one start of one service."""


def tree_of(leader: ProcessIdentity | None, mark: str) -> list[ProcessIdentity]:
    """Return the living tree of `leader`, itself included, in no particular order.

    Without a leader (its launcher died before it wrote down which process it is) those that carry the mark.
    """
    boot = boot_id()
    if leader is not None and leader.boot_id != boot:
        return []
    table = _process_table()
    ids = {pid for pid in table if mark and _carries(pid, mark)}
    if leader is not None:
        seen = table.get(leader.pid)
        # A pid that is someone else's now says nothing of a session or group of that number.
        if seen is None or seen.start_ticks == leader.start_ticks:
            ids |= {pid for pid, fields in table.items() if leader.pid in (fields.session, fields.group)}
    ids |= _descendants(ids, table)
    ids.discard(os.getpid())
    oldest = leader.start_ticks if leader is not None else 0
    return [
        ProcessIdentity(pid, table[pid].start_ticks, boot)
        for pid in ids
        if table[pid].state not in "ZX" and table[pid].start_ticks >= oldest
    ]


def kill_all(processes: Iterable[ProcessIdentity], number: int = signal.SIGKILL) -> None:
    for process in processes:
        if process.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)


def end_tree(leader: ProcessIdentity | None, mark: str, *, timeout_s: float = 5.0) -> list[ProcessIdentity]:
    """Kill the whole tree and wait until it is gone. Returns what could not be ended (normally nothing)."""
    deadline = time.monotonic() + timeout_s
    while (left := tree_of(leader, mark)) and time.monotonic() < deadline:
        kill_all(left)
        time.sleep(0.01)
    return left


def _process_table() -> dict[int, StatFields]:
    table = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := stat_fields(int(entry.name))) is not None:
            table[int(entry.name)] = fields
    return table


def _carries(pid: int, mark: str) -> bool:
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    return f"{MARK}={mark}".encode() in environment.split(b"\0")


def _descendants(roots: set[int], table: dict[int, StatFields]) -> set[int]:
    found: set[int] = set()
    frontier = set(roots)
    while frontier:
        frontier = {pid for pid, fields in table.items() if fields.parent in frontier} - found - roots
        found |= frontier
    return found

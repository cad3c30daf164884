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

from flotilla_core.process_identity import ProcessIdentity, boot_id, stat_fields

MARK = "FLOTILLA_PROCESS"
"""Environment variable that descendants inherit; its value is unique to one start of one service."""


class ProcessTable:
    """The processes of this host at one moment; who asks for several trees reads it once."""

    def __init__(self) -> None:
        read = {int(name): stat_fields(int(name)) for name in os.listdir("/proc") if name.isdigit()}
        self.fields = {pid: fields for pid, fields in read.items() if fields is not None}
        self._marks: dict[int, frozenset[bytes]] = {}

    def carrying(self, mark: str, since: int) -> set[int]:
        """Return the processes with this mark that started at a time or later."""
        wanted = f"{MARK}={mark}".encode()
        young = (pid for pid, fields in self.fields.items() if fields.start_ticks >= since)
        return {pid for pid in young if wanted in self._marks_of(pid)}

    def descendants(self, roots: set[int]) -> set[int]:
        """Return all that come from these processes."""
        found: set[int] = set()
        frontier = set(roots)
        while frontier:
            children = {pid for pid, fields in self.fields.items() if fields.parent in frontier}
            frontier = children - found - roots
            found |= frontier
        return found

    def _marks_of(self, pid: int) -> frozenset[bytes]:
        if pid not in self._marks:
            try:
                with open(f"/proc/{pid}/environ", "rb") as file:
                    variables = file.read().split(b"\0")
            except OSError:
                variables = []
            self._marks[pid] = frozenset(one for one in variables if one.startswith(MARK.encode()))
        return self._marks[pid]


def tree_of(
    leader: ProcessIdentity | None, mark: str, table: ProcessTable | None = None
) -> list[ProcessIdentity]:
    """Return the living tree of `leader`, itself included, in no particular order.

    Without a leader (its launcher died before it wrote down which process it is) those that carry the mark.
    """
    boot = boot_id()
    if leader is not None and leader.boot_id != boot:
        return []
    table = table or ProcessTable()
    processes = table.fields
    oldest = leader.start_ticks if leader is not None else 0
    ids = table.carrying(mark, oldest) if mark else set()
    if leader is not None:
        seen = processes.get(leader.pid)
        # A pid that is someone else's now says nothing of a session or group of that number.
        if seen is None or seen.start_ticks == leader.start_ticks:
            ids |= {pid for pid, fields in processes.items() if leader.pid in (fields.session, fields.group)}
    ids |= table.descendants(ids)
    ids.discard(os.getpid())
    return [
        ProcessIdentity(pid, processes[pid].start_ticks, boot)
        for pid in ids
        if processes[pid].state not in "ZX" and processes[pid].start_ticks >= oldest
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

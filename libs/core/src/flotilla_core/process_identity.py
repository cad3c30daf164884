"""The identity of a process of this host, which outlives it.

Invariant: a process is named by its pid together with its start time and the boot it belongs to, so a reused pid is
never taken for ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class ProcessIdentity:
    """One process of this host, identified for ever: pid, start time in clock ticks since boot, and the boot."""

    pid: int
    start_ticks: int
    boot_id: str

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity | None:
        """Return the identity of a live process; None for a zombie or no process."""
        fields = stat_fields(pid)
        if fields is None or fields.state in "ZX":
            return None
        return cls(pid, fields.start_ticks, boot_id())

    def alive(self) -> bool:
        return self == ProcessIdentity.of(self.pid)


@dataclass(frozen=True)
class StatFields:
    """The fields of `/proc/<pid>/stat` that are used here."""

    state: str
    parent: int
    group: int
    session: int
    start_ticks: int


def stat_fields(pid: int) -> StatFields | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            read = file.read()
    except OSError:
        return None
    # The command name is in parentheses and may hold any character, so split after its end.
    fields = read[read.rindex(b")") + 2 :].split()
    return StatFields(fields[0].decode(), int(fields[1]), int(fields[2]), int(fields[3]), int(fields[19]))


@cache
def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()

"""The small JSON files that outlive a process: `launcher.json` and `processes.json`.

Invariant: a reader sees the old file or the new one, never a part (written aside, then renamed). A process is
named by pid together with its start time and the boot it belongs to, so a reused pid is never taken for ours.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flotilla_core.files import write_atomically


@dataclass(frozen=True)
class ProcessIdentity:
    """One process of this host, for ever: pid, start time in clock ticks since boot, and the boot."""

    pid: int
    start_ticks: int
    boot_id: str

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity | None:
        """Of a process that lives (a zombie does not)."""
        fields = stat_fields(pid)
        if fields is None or fields.state in "ZX":
            return None
        return cls(pid, fields.start_ticks, boot_id())

    def alive(self) -> bool:
        return self == ProcessIdentity.of(self.pid)


@dataclass(frozen=True)
class StatFields:
    """What we need of `/proc/<pid>/stat`."""

    state: str
    parent: int
    group: int
    session: int
    start_ticks: int


def stat_fields(pid: int) -> StatFields | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The command name is in parentheses and may hold any character, so split after its end.
    fields = text[text.rindex(")") + 2 :].split()
    return StatFields(fields[0], int(fields[1]), int(fields[2]), int(fields[3]), int(fields[19]))


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@dataclass(frozen=True)
class LauncherFile:
    """`launcher.json`: how the command line and services started by hand find the running stack."""

    pid: int
    socket: str
    nats_url: str
    otlp: str
    start_ticks: int
    boot_id: str

    @property
    def identity(self) -> ProcessIdentity:
        return ProcessIdentity(self.pid, self.start_ticks, self.boot_id)

    @classmethod
    def read(cls, path: Path) -> LauncherFile | None:
        """None when it is not there or is not ours to read (then it is treated as stale)."""
        values = read_json(path)
        try:
            return cls(**values) if values is not None else None
        except TypeError:
            return None

    def write(self, path: Path) -> None:
        write_json(path, asdict(self))


def read_json(path: Path) -> dict[str, Any] | None:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return values if isinstance(values, dict) else None


def write_json(path: Path, values: dict[str, Any]) -> None:
    write_atomically(path, json.dumps(values, indent=1) + "\n")

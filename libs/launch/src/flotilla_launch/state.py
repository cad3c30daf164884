"""The small JSON files that outlive a process: `launcher.json` and `processes.json`.

Invariant: a reader sees the old file or the new one, never a part (written aside, then renamed).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flotilla_core.files import write_atomically
from flotilla_core.process_identity import ProcessIdentity


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

"""The small JSON files that outlive a process: `launcher.json`, `placed.json` and `processes.json`.

Invariant: a reader sees the old file or the new one, never a part (written aside, then renamed).
"""

from __future__ import annotations

import errno
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flotilla_core.errors import Unavailable
from flotilla_core.files import write_atomically
from flotilla_core.process_identity import ProcessIdentity

if TYPE_CHECKING:
    from flotilla_core.config import StackConfig
    from flotilla_launch.paths import StackPaths

_PASSING = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.EINTR)
"""The error numbers of a shared file system that does not answer, or whose file was just replaced."""


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


@dataclass(frozen=True)
class PlacedFile:
    """`placed.json`: which launcher has the stack, where that is not the local one, and what it shall be now."""

    launcher: str
    mark: str
    """The mark of this placement, which no other one has."""
    replicas: dict[str, int]
    """Wanted number, by kind: what `flotilla scale` changes."""
    executables: str
    """Folder of the commands, the same on every node."""
    ended: list[str] = field(default_factory=list)
    """Nodes whose agents shall end."""
    reach: str = ""
    """Command line before the words of a `flotilla` command that runs beside the coordinator, where this host has no
    address of it."""

    @classmethod
    def required(cls, path: Path, launcher: str) -> PlacedFile:
        """Return the file of a stack that runs; raise Unavailable where none does."""
        placed = cls.read(path)
        if placed is None:
            raise Unavailable(
                f"stack {path.parent.name!r} is not running",
                where=str(path.parent),
                next_step=f"start it: flotilla up --on {launcher}",
            )
        return placed

    @classmethod
    def read(cls, path: Path) -> PlacedFile | None:
        """Return None where no engine has the stack; a file that cannot be read for a moment is no sign of that."""
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            if isinstance(error, OSError) and error.errno not in _PASSING:
                return None  # there is none, or nobody could have written one there
            raise Unavailable(
                "the record of the placement cannot be read",
                where=str(path),
                why=str(error),
                next_step="try again; see whether the file system of the state directory answers",
            ) from error

    def write(self, path: Path) -> None:
        write_json(path, asdict(self))

    def scaled(self, stack: StackConfig) -> StackConfig:
        """Return the stack with the wanted numbers of replicas."""
        changes = {
            kind: getattr(stack, kind).model_copy(update={"replicas": number})
            for kind, number in self.replicas.items()
        }
        return stack.model_copy(update=changes)


def find(paths: StackPaths) -> LauncherFile | None:
    """Return the supervisor of the stack, if one lives."""
    file = LauncherFile.read(paths.launcher_file)
    return file if file is not None and file.identity.alive() else None


def is_up(paths: StackPaths) -> bool:
    """Return whether some launcher has the stack."""
    return PlacedFile.read(paths.placed_file) is not None or find(paths) is not None


def read_json(path: Path) -> dict[str, Any] | None:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return values if isinstance(values, dict) else None


def write_json(path: Path, values: dict[str, Any]) -> None:
    write_atomically(path, json.dumps(values, indent=1) + "\n")

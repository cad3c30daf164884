"""The checkpoints of one run, side by side in one folder.

Invariants: a folder `step-...` is complete from the moment it can be seen until the moment it is gone, because it
comes and goes by a rename; `latest` names a complete one and moves after it; what a fall-back left behind is called
`void-...` and is never offered again, and what was only half written then never comes to light.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import ParamSpec, TypeVar

from flotilla_core.checkpoint.manifest import flush_directory
from flotilla_core.disk import disk_full
from flotilla_core.errors import AlreadyExists, FailedPrecondition, FlotillaError, InvalidRequest, NotFound
from flotilla_core.files import write_atomically

LATEST = "latest"
MODEL = "model"
"""Folder inside each checkpoint that transformers and vLLM load."""

# 18 digits are more steps than any run has; int() refuses a text of thousands.
_NAME = re.compile(r"step-([0-9]{6,18})")

P = ParamSpec("P")
T = TypeVar("T")


class CheckpointShelf:
    """`<run directory>/checkpoints/`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # A late writer of a save that was given up must not find the folder of the next one.
        self._nonce = secrets.token_hex(4)

    @staticmethod
    def name_of(step: int) -> str:
        """Return the name of the checkpoint after this many steps: step-000120."""
        return f"step-{step:06d}"

    @staticmethod
    def step_of(name: str) -> int:
        """Return the number of steps that were done when a checkpoint was made."""
        match = _NAME.fullmatch(name)
        if match is None:
            raise InvalidRequest(f"{name!r} is not the name of a checkpoint", why="it looks like step-000120")
        return int(match[1])

    def names(self) -> list[str]:
        """List the complete checkpoints, the oldest first."""
        if not os.path.isdir(self.path):
            return []
        found = [entry.name for entry in self.path.iterdir() if _NAME.fullmatch(entry.name)]
        return sorted(found, key=self.step_of)

    def folder(self, name: str) -> Path:
        """Return the folder of an existing checkpoint."""
        if name not in self.names():
            raise NotFound(
                f"there is no checkpoint {name!r}",
                where=str(self.path),
                why=f"there are {', '.join(self.names()) or 'none'}",
            )
        return self.path / name

    def begin(self, name: str) -> Path:
        """Return an empty folder that no reader sees; remove first what an interrupted write left."""
        self.step_of(name)
        if name in self.names():
            raise AlreadyExists(f"checkpoint {name} is there already", where=str(self.path))
        self.path.mkdir(parents=True, exist_ok=True)
        self._remove_unfinished()
        aside = self.aside(name)
        aside.mkdir()
        return aside

    def publish(self, name: str, written: Path | None = None) -> Path:
        """Let readers see a folder that is sealed, the one that was begun or one inside it; `latest` then names it."""
        folder = self.path / name
        (written or self.aside(name)).rename(folder)
        flush_directory(self.path)
        write_atomically(self.path / LATEST, f"{name}\n")
        flush_directory(self.path)
        return folder

    def discard(self, name: str) -> None:
        """Remove a folder that was begun."""
        shutil.rmtree(self.aside(name), ignore_errors=True)

    def fall_back(self, name: str, lineage: int) -> list[str]:
        """Put away everything newer than `name`, which `lineage` does not continue from; return the names as they were.

        A writer that was held up finds its folder gone when it wakes up, and publishes nothing.
        """
        self._remove_unfinished()
        newer = [
            other for other in self.names() if self.step_of(other) > (self.step_of(name) if name else -1)
        ]
        for other in newer:
            (self.path / other).rename(self.path / f"void-{lineage}-{other}")
        if not name:
            (self.path / LATEST).unlink(missing_ok=True)
        elif newer:
            write_atomically(self.path / LATEST, f"{name}\n")
        return newer

    def prune(self, keep: int, besides: Collection[int] = ()) -> list[str]:
        """Remove all but the newest `keep` and those after the steps `besides`, and what fall-backs left.

        Return the names of the removed ones.
        """
        leftovers = [entry.name for entry in self.path.glob("void-*")] if os.path.isdir(self.path) else []
        gone = [name for name in self.names()[:-keep] if self.step_of(name) not in besides] + leftovers
        for name in gone:
            hidden = self.path / f".{name}.removing"
            (self.path / name).rename(hidden)
            shutil.rmtree(hidden)
        return gone

    def aside(self, name: str) -> Path:
        """Return the folder where this shelf's owner writes a checkpoint before any reader can see it."""
        return self.path / f".{name}.{self._nonce}.writing"

    def _remove_unfinished(self) -> None:
        """Remove every unpublished checkpoint that was begun here, whatever process writes it or fetches it."""
        for unfinished in self.path.glob(".*.writing"):
            # Rename it first: a folder that is still written to may not be removed at the first attempt.
            with suppress(FileNotFoundError):  # its writer ended just now
                unfinished.rename(unfinished.with_suffix(".removing"))
        for leaving in (*self.path.glob(".*.removing"), *self.path.glob(".*.fetching")):
            shutil.rmtree(leaving, ignore_errors=True)


def on_disk(folder: Path, work: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    """Return the result of `work` on `folder`; raise DiskFull for a full disk, FailedPrecondition for a lost one."""
    try:
        return work(*arguments, **options)
    except OSError as error:
        raise not_written("the checkpoint", Path(error.filename or folder), error) from error


def not_written(what: str, path: Path, error: Exception) -> FlotillaError:
    """Return the error that says why `what` is not at `path`."""
    text = f"{what} cannot be written"
    return disk_full(error, text, path) or FailedPrecondition(
        text,
        where=str(path),
        why=getattr(error, "strerror", None) or str(error),
        next_step="see whether the disk answers; checkpoint.keep says how many stay",
    )

"""The code behind a name of a user's: an entry point of a group, or what a file has, as `path.py:name`.

Invariant: nothing of a user's is imported here; a name that means nothing is refused with what would.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from flotilla_core.errors import InvalidConfig
from flotilla_workers.functions import Target


@dataclass(frozen=True)
class Catalog:
    """One sort of code that users name, such as rewards."""

    noun: str
    """Word for one of the sort."""
    member: str
    """Word for what a file has: function or class."""
    group: str
    """Group of the entry points."""
    built_in: Collection[str]
    """Names of the service's own."""

    def target(self, name: str, parameters: dict[str, Any], code: Path | None) -> Target:
        """Return what a name means that is not built in; `code` is where its file is on this host."""
        file, colon, member = name.rpartition(":")
        if colon and file.endswith(".py"):
            path = code or Path(file).absolute()
            if not member.isidentifier():
                raise InvalidConfig(
                    f"{self.noun} {name} names no {self.member}",
                    next_step=f"Write it as path.py:{self.member}.",
                )
            try:
                state = path.stat()
            except OSError as error:
                raise InvalidConfig(
                    f"the file of {self.noun} {name} cannot be read",
                    where=str(path),
                    why=error.strerror or str(error),
                ) from error
            stamp = f"{state.st_mtime_ns}.{state.st_size}"
            return Target("file", str(path), member, parameters, stamp)
        points = self.entry_points()
        if name in points:
            return Target("entry_point", points[name].module, points[name].attr, parameters)
        if name.endswith(".py"):
            raise InvalidConfig(
                f"{self.noun} {name} names no {self.member}", next_step=f"Write it as {name}:{self.member}."
            )
        known = sorted({*self.built_in, *points})
        raise InvalidConfig(
            f"there is no {self.noun} {name!r}{did_you_mean(name, known)}",
            next_step=f"Known are {', '.join(known)}; a {self.member} of your own is path.py:{self.member}.",
        )

    def entry_points(self) -> dict[str, EntryPoint]:
        """Return the entry points of the group by their names."""
        return {point.name: point for point in entry_points(group=self.group)}

    def hidden_entry_points(self) -> list[str]:
        """Return those that can never run because one of the service's own has their name."""
        return sorted(set(self.entry_points()) & set(self.built_in))

    def described_entry_points(self) -> list[tuple[str, str]]:
        """Return each name with what it comes from."""
        return [
            (name, f"Entry point {point.value}{_package(point)}.")
            for name, point in sorted(self.entry_points().items())
        ]


def _package(point: EntryPoint) -> str:
    return f" of {point.dist.name} {point.dist.version}" if point.dist else ""


def did_you_mean(name: str, known: list[str]) -> str:
    """Return a hint at the known name that is closest; empty where none is close."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f" (did you mean {close[0]}?)" if close else ""

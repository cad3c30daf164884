"""Groups of the kernel: the memory and processes of one jail are bounded together, where this process may make a group.

Invariants: version 2 is taken where both controllers are there for the children of our own group, else version 1, else
nothing, and the limits of each process are what remains. A group holds the processes of one jail alone, and is removed
with it. A group that a killed service left, whose processes ended with it, is removed by the next one.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

MOUNTS = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
PREFIX = "flotilla-jail"

_numbers = itertools.count()


@dataclass(frozen=True)
class Group:
    """The folders of one group: one of version 2, or one for each controller of version 1."""

    folders: tuple[Path, ...]

    @property
    def entries(self) -> tuple[str, ...]:
        """The files that a process joins by."""
        return tuple(str(folder / "cgroup.procs") for folder in self.folders)

    def close(self) -> None:
        """End what is left in the group, and remove it."""
        for folder in self.folders:
            with suppress(OSError):
                (folder / "cgroup.kill").write_text("1")
            with suppress(OSError):
                folder.rmdir()


def make(memory_bytes: int, processes: int) -> Group | None:
    """Make the group of a jail; None where that is not ours to do."""
    # A number of its own: a group that the kernel still holds takes no other one's place.
    name = f"{PREFIX}-{os.getpid()}-{next(_numbers)}"
    unified = {"memory.max": memory_bytes, "memory.swap.max": 0, "memory.oom.group": 1, "pids.max": processes}
    divided = {"memory": {"memory.limit_in_bytes": memory_bytes}, "pids": {"pids.max": processes}}
    for parents in _parents():
        made: list[Path] = []
        try:
            for controller, parent in parents.items():
                folder = parent / name
                folder.mkdir()
                made.append(folder)
                for file, limit in (divided[controller] if controller else unified).items():
                    if (folder / file).exists():
                        (folder / file).write_text(str(limit))
        except OSError:
            Group(tuple(made)).close()
            continue
        return Group(tuple(made))
    return None


def remove_left() -> None:
    """Remove groups of services that are gone; one that still has processes stays."""
    for parents in _parents():
        for parent in parents.values():
            for folder in parent.glob(f"{PREFIX}-*-*"):
                pid = folder.name.split("-")[2]
                if not Path(f"/proc/{pid}").exists():
                    with suppress(OSError):
                        folder.rmdir()


def _parents() -> Iterator[dict[str, Path]]:
    """Give where groups can be made: by controller, with an empty name for all of version 2."""
    own: dict[str, str] = {}
    for line in (OWN.read_text() if OWN.exists() else "").splitlines():
        _, names, path = line.split(":", 2)
        for name in names.split(","):
            own[name] = path
    if "" in own:
        for mount in (MOUNTS, MOUNTS / "unified"):
            parent = mount / own[""].lstrip("/")
            with suppress(OSError):
                if {"memory", "pids"} <= set((parent / "cgroup.subtree_control").read_text().split()):
                    yield {"": parent}
    divided = {
        name: MOUNTS / name / path.lstrip("/") for name, path in own.items() if name in ("memory", "pids")
    }
    if len(divided) == 2:
        yield divided

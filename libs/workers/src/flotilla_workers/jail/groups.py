"""Groups of the kernel: the memory and processes of one jail are bounded together, where this process may make a group.

Invariants: version 2 is taken where both controllers are there for the children of our own group, else version 1, else
nothing, and the limits of each process are what remains. A group holds the processes of one jail alone, and is removed
with it. A group that a killed service left, whose processes ended with it, is removed by the next one.
"""

from __future__ import annotations

import errno
import itertools
import math
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

MOUNTS = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
PREFIX = "flotilla-jail"
REMOVAL_LIMIT_S = 2.0
"""The time that the kernel has to let go of processes that have ended."""
USAGE = ("memory.current", "memory.usage_in_bytes")
MOST_LEFT_BYTES = 4 << 20
"""The memory that the kernel may still count to a group that the next jail has."""

_numbers = itertools.count()


@dataclass(frozen=True)
class Group:
    """The folders of one group: one of version 2, or one for each controller of version 1."""

    folders: tuple[Path, ...]

    @property
    def entries(self) -> tuple[str, ...]:
        """The files that a process joins by."""
        return tuple(str(folder / "cgroup.procs") for folder in self.folders)

    @property
    def processes(self) -> bool:
        """Whether any is left in the group."""
        return any(Path(entry).read_text() for entry in self.entries)

    @property
    def memory_bytes(self) -> int:
        """The memory that the kernel counts to the group: of files that were read, also once no process is left."""
        files = [folder / name for folder in self.folders for name in USAGE]
        return sum(int(file.read_text()) for file in files if file.exists())

    def close(self) -> None:
        """End what is left in the group, and remove it."""
        for folder in self.folders:
            with suppress(OSError):
                (folder / "cgroup.kill").write_text("1")
            latest = time.monotonic() + REMOVAL_LIMIT_S
            while not _removed(folder) and time.monotonic() < latest:
                time.sleep(0.001)


class Groups:
    """Groups of one size, which jails have one after the other: one that no process is in is like a new one."""

    def __init__(self, memory_bytes: int, processes: int) -> None:
        self._size = memory_bytes, processes
        self._idle: list[Group] = []
        self._keeps = True

    def take(self) -> Group | None:
        for one in [*self._idle]:
            left = math.inf  # Where somebody removed it.
            with suppress(OSError):
                # Of a process that has ended the kernel may say so a moment later.
                if one.processes:
                    continue
                left = one.memory_bytes
            self._idle.remove(one)
            if left <= MOST_LEFT_BYTES:
                return one
            one.close()
        return make(*self._size)

    def give_back(self, group: Group) -> None:
        if self._keeps:
            self._idle.append(group)
        else:
            group.close()

    def close(self) -> None:
        """Remove those that nobody has, and the others when they come back."""
        self._keeps = False
        while self._idle:
            self._idle.pop().close()


def _removed(folder: Path) -> bool:
    try:
        folder.rmdir()
    except OSError as error:
        return error.errno != errno.EBUSY
    return True


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

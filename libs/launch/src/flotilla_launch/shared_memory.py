"""The files that killed processes leave in `/dev/shm`.

Python and torch unlink shared memory and semaphores when they end in order; a killed process cannot. Invariant: a
file is removed only if a process of ours was seen to hold it, or its name holds the pid, and it has one of the names
that such libraries give. All of that service's processes are gone by then.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

_DIRECTORY = Path("/dev/shm")
_KNOWN = re.compile(r"(psm_|wnsm_|sem\.|torch_\d+_|nccl-|flotilla)")


def any_known() -> bool:
    """Return whether there is anything at all that could be ours (the usual case on a CPU host is no)."""
    return bool(_known_names())


def held_by(pids: Iterable[int]) -> set[str]:
    """Names of the files in /dev/shm that these processes have mapped, or that carry their pid."""
    # By inode: a semaphore is mapped under a temporary name before it gets its own.
    inodes = {_inode(name): name for name in _known_names()}
    held = set()
    for pid in pids:
        held |= {inodes[inode] for inode in _mapped_inodes(pid) if inode in inodes}
        held |= {name for name in inodes.values() if name.startswith(f"torch_{pid}_")}
    return held


def remove(names: Iterable[str]) -> list[str]:
    """Unlink those that are still there; returns their names."""
    removed = []
    for name in names:
        try:
            (_DIRECTORY / name).unlink()
        except OSError:
            continue
        removed.append(name)
    return removed


def _known_names() -> set[str]:
    if not _DIRECTORY.is_dir():
        return set()
    return {entry.name for entry in _DIRECTORY.iterdir() if _KNOWN.match(entry.name)}


def _inode(name: str) -> int:
    try:
        return (_DIRECTORY / name).stat().st_ino
    except OSError:
        return 0


def _mapped_inodes(pid: int) -> set[int]:
    try:
        maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return set()
    # address permissions offset device inode path
    return {int(line.split()[4]) for line in maps.splitlines() if f" {_DIRECTORY}/" in line}

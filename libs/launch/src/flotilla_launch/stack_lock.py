"""One holder at a time, by a lock file that the kernel frees.

Invariant: a launcher holds the lock of its stack for as long as it lives; a cleanup holds it for as long as it takes.
So a stack has one launcher at most, and no clean-up ends what a new launcher has just started.

filelock cannot say whether a lock is held without taking it, and the watcher in `lease.py`, which asks, has the
standard library alone.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from flotilla_core.files import make_private_folder
from flotilla_launch.lease import is_locked, lock

_POLL_S = 0.05


@contextlib.contextmanager
def hold_lock(path: Path, *, timeout_s: float) -> Iterator[bool]:
    """Yields whether the lock was had within the time; gives it back at the end of the block."""
    make_private_folder(path.parent)
    descriptor = _open(path)
    deadline = time.monotonic() + timeout_s
    try:
        while not (held := lock(descriptor)) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        yield held
    finally:
        os.close(descriptor)


def is_held(path: Path) -> bool:
    """Return whether some process holds the lock now; takes nothing itself."""
    try:
        descriptor = _open(path)
    except FileNotFoundError:
        return False
    try:
        return is_locked(descriptor)
    finally:
        os.close(descriptor)


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

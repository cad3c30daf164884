"""Who may change the processes of a stack: one holder at a time, by a file lock that the kernel frees.

Invariant: a supervisor holds the claim for as long as it lives; a sweep holds it for as long as it takes.
So a stack has one supervisor at most, and nobody sweeps what a new supervisor has just started.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from flotilla_core.files import make_private_folder

_POLL_S = 0.05


@contextlib.contextmanager
def claim(path: Path, *, timeout_s: float) -> Iterator[bool]:
    """Yields whether the lock was had within the time; gives it back at the end of the block."""
    make_private_folder(path.parent)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + timeout_s
    try:
        while not (held := _try_lock(descriptor)) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        yield held
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True

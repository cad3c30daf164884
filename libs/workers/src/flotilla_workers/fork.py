"""Answers in processes of their own, forked from a worker that has loaded everything: none finds what another one left.

Invariants: what an answer changes in memory ends with its process. Before it leaves, every process that it started is
dead, and what it wrote is gone, be it beside the content: modes, attributes and times of folders, and states of the
standard descriptors, which all share. A worker that cannot bring this about says so with the answer, and gives no
further one. The process of an answer has no channel, and cannot write into the memory of the worker. Only in a jail:
all processes that this one may end are those of its answers.
"""

from __future__ import annotations

import ctypes
import fcntl
import importlib
import json
import os
import select
import signal
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from flotilla_workers.frames import MOST_ANSWER_BYTES

PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 4, 36
SHARED_MEMORY = "/dev/shm"
OF_SYSTEM_V = ("shm", "sem", "msg")


class State(NamedTuple):
    """All that an answer could write for the next one."""

    files: dict[str, object]
    """The paths, parents first, with what each says beside its content; None of what is mounted there."""
    descriptors: list[object]


class Forks:
    """The processes of one worker's answers, one after the other."""

    def __init__(self, preload: Iterable[str]) -> None:
        self._libc = ctypes.CDLL(None)
        # The memory of a process that cannot be dumped is closed to others of the same user.
        self._libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
        self._libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._folders = [folder for folder in (os.environ["HOME"], SHARED_MEMORY) if _is_shown(folder)]
        self._before = self._state()
        for module in preload:
            importlib.import_module(module)

    def answered(self, answer: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the reply that a new process makes; `spent` in it says that this worker gives no further one."""
        reads, writes = os.pipe()
        child = os.fork()
        if child == 0:
            self._tell(writes, answer)
        os.close(writes)
        try:
            body = _heard(reads, child)
        finally:
            os.close(reads)
        status = _end_all(child)
        said = _reply(body, status)
        return said if self._is_clean() else said | {"spent": True}

    def _tell(self, writes: int, answer: Callable[[], dict[str, Any]]) -> None:
        # User code may replace what it finds in modules, but not these.
        process_id, leave, write = os.getpid, os._exit, os.write
        started_as = process_id()
        try:
            self._libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
            body = json.dumps(answer()).encode()
            while body and process_id() == started_as:  # A process that user code forked tells nothing.
                body = body[write(writes, body) :]
        finally:
            leave(0)

    def _is_clean(self) -> bool:
        """Remove what was written, children first; return whether nothing is left."""
        with suppress(OSError, RecursionError):
            for path in reversed([path for path, _ in self._written()]):
                if path not in self._before.files:
                    (os.rmdir if os.path.isdir(path) and not os.path.islink(path) else os.unlink)(path)
            if self._state() == self._before and not any(map(_is_left, OF_SYSTEM_V)):
                self._reset_times()
                return True
        return False

    def _written(self) -> Iterator[tuple[str, int]]:
        """Give what is there, with the device that it is to be on."""
        for folder in self._folders:
            device = os.stat(folder).st_dev
            yield folder, device
            for path in _below(folder, device):
                yield path, device

    def _state(self) -> State:
        files = {path: _beside_content(path, device) for path, device in self._written()}
        return State(files, [_of_descriptor(number) for number in (0, 1, 2)])

    def _reset_times(self) -> None:
        for path, state in self._before.files.items():
            if state is not None:
                # Where this is not allowed, nobody in the jail may set a time.
                with suppress(PermissionError):
                    os.utime(path, follow_symlinks=False)


def _is_shown(folder: str) -> bool:
    try:
        os.scandir(folder).close()
    except OSError:
        return False
    return True


def _below(folder: str, device: int) -> Iterator[str]:
    """Give what is in a folder and below it, but for what is mounted there."""
    for entry in os.scandir(folder):
        yield entry.path
        if entry.is_dir(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_dev == device:
            yield from _below(entry.path, device)


def _beside_content(path: str, device: int) -> object:
    state = os.lstat(path)
    if state.st_dev != device:
        return None
    names: list[str] = []
    with suppress(OSError):  # A file system without attributes.
        names = os.listxattr(path, follow_symlinks=False)
    attributes = {name: os.getxattr(path, name, follow_symlinks=False) for name in names}
    return state.st_mode, state.st_uid, state.st_gid, state.st_size, attributes


def _of_descriptor(number: int) -> object:
    asked = [fcntl.F_GETFL, fcntl.F_GETOWN, fcntl.F_GETSIG]
    if stat.S_ISFIFO(os.fstat(number).st_mode):
        asked.append(fcntl.F_GETPIPE_SZ)
    return [fcntl.fcntl(number, what) for what in asked]


def _is_left(kind: str) -> bool:
    """Return whether something of System V is there; a level without namespaces lets nobody make it."""
    table = Path("/proc/sysvipc", kind)
    return table.exists() and len(table.read_text().splitlines()) > 1


def _heard(reads: int, child: int) -> bytes:
    """Return what the child tells until it ends; what it started may keep the pipe open for longer."""
    told, watch = bytearray(), os.pidfd_open(child)
    poll = select.poll()
    for descriptor in (reads, watch):
        poll.register(descriptor, select.POLLIN)
    try:
        while len(told) <= MOST_ANSWER_BYTES:
            ready = [descriptor for descriptor, _ in poll.poll()]
            part = os.read(reads, 1 << 16) if reads in ready else b""
            if not part:
                break
            told += part
    finally:
        os.close(watch)
    return bytes(told)


def _end_all(child: int) -> int:
    """Kill every process but this one, until none is left; return the status of the child."""
    status = 0
    while True:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(-1, signal.SIGKILL)
        try:
            pid, ended = os.waitpid(-1, 0)
        except ChildProcessError:
            return status
        status = ended if pid == child else status


def _reply(body: bytes, status: int) -> dict[str, Any]:
    with suppress(ValueError, RecursionError):
        said = json.loads(body)
        if isinstance(said, dict):
            return said
    how = f"was ended by {signal_name(os.WTERMSIG(status))}" if os.WIFSIGNALED(status) else "ended"
    return {"failed": f"its process {how} before it answered"}


def signal_name(number: int) -> str:
    """Return the name of a signal; most of those of real time have none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"

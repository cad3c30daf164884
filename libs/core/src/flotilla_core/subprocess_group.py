"""A child process with everything that it starts.

Invariants: the child leads a session and process group of its own, so stopping it stops its descendants too. Unless a
wrapper says otherwise it dies with the thread that started it (start from the main thread), even when that process is
killed with SIGKILL.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

# Set in the child before exec, without preexec_fn (which may deadlock in a process with threads). A parent that
# died before prctl took effect is noticed by its pid.
_DIE_WITH_PARENT = """
import ctypes, os, signal, sys
parent = int(sys.argv[1])
ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL, 0, 0, 0)
if os.getppid() != parent:
    os._exit(1)
os.execvp(sys.argv[2], sys.argv[2:])
"""


MOST_OUTPUT_BYTES = 64 << 20
MOST_ERROR_BYTES = 16 << 10
UNKNOWN_STATUS = 256
"""The status of a process whose parent is another one; no process ends with it."""


class ProcessGroup:
    """One started command and its descendants."""

    def __init__(self, process: Process | AdoptedProcess) -> None:
        self._process = process
        self._ended = False

    @classmethod
    def adopt(cls, pid: int) -> ProcessGroup:
        """Return the group of a leader that another process started; raise ProcessLookupError if it is gone."""
        return cls(AdoptedProcess(pid))

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        directory: Path | None = None,
        stdin: int | IO[bytes] | None = asyncio.subprocess.DEVNULL,
        stdout: int | IO[bytes] | None = None,
        stderr: int | IO[bytes] | None = None,
        pass_fds: Sequence[int] = (),
        wrapper: Sequence[str] = (),
    ) -> ProcessGroup:
        """Start `command`; its output goes where ours goes unless it is redirected.

        A `wrapper` is a command that becomes the one behind it, and decides what that dies with.
        """
        dies_with_us = (sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid()))
        process = await asyncio.create_subprocess_exec(
            *(wrapper or dies_with_us),
            *command,
            env=environment,
            cwd=directory,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            pass_fds=pass_fds,
            start_new_session=True,
        )
        return cls(process)

    @property
    def pid(self) -> int:
        """The process id of the command; also the id of its group."""
        return self._process.pid

    @property
    def process(self) -> Process:
        """The process, for its streams; an adopted one has none."""
        assert isinstance(self._process, Process)
        return self._process

    @property
    def returncode(self) -> int | None:
        """None while the command runs; minus the signal if one ended it; UNKNOWN_STATUS for an adopted one."""
        return self._process.returncode

    async def wait(self) -> int:
        """Wait until the command itself ends; its descendants may live on until `stop`."""
        return await self._process.wait()

    def signal_leader(self, signum: signal.Signals) -> None:
        """Send a signal to the command alone; one that has ended is fine."""
        if isinstance(self._process, AdoptedProcess):
            self._process.send_signal(signum)
        else:
            signal_child(self._process, signum)

    async def stop(self, grace_s: float) -> int:
        """Send SIGTERM to the whole group, and SIGKILL to the rest of it after `grace_s`."""
        self.signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self._process.wait(), grace_s)
        except TimeoutError:
            pass  # Processes that ignore SIGTERM are killed below.
        return await self.kill()

    async def kill(self) -> int:
        """Send SIGKILL to the whole group."""
        self.signal(signal.SIGKILL)
        code = await self._process.wait()
        self._ended = True
        return code

    def signal(self, signum: signal.Signals) -> None:
        """Send a signal to every member of the group; an empty group is fine."""
        if self._ended:
            return  # The group's number may belong to another process by now.
        try:
            os.killpg(self._process.pid, signum)
        except ProcessLookupError:
            pass


def signal_child(process: Process, signum: signal.Signals) -> None:
    """Send a signal to a child of asyncio; one that has ended is fine.

    `Process.send_signal` first takes the status of a child that has ended, and asyncio then says of it that it exited
    with status 255, whatever ended it.
    """
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signum)


async def outputs(process: Process) -> tuple[bytes, bytes]:
    """Return what a process prints and says of errors until it ends; what is beyond the limits is dropped."""
    assert process.stdout is not None and process.stderr is not None
    out, err = await asyncio.gather(
        _begin_of(process.stdout, MOST_OUTPUT_BYTES), _begin_of(process.stderr, MOST_ERROR_BYTES)
    )
    await process.wait()
    return out, err


async def _begin_of(stream: asyncio.StreamReader, most_bytes: int) -> bytes:
    begin = bytearray()
    while block := await stream.read(1 << 16):
        begin += block[: most_bytes - len(begin)]
    return bytes(begin)


class AdoptedProcess:
    """A process that is no child of ours, with what a group needs of asyncio's own `Process`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._descriptor = os.pidfd_open(pid)
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self._loop.add_reader(self._descriptor, self._end)

    async def wait(self) -> int:
        """Wait until it has ended; only its parent can learn its exit status."""
        await self._ended.wait()
        return UNKNOWN_STATUS

    def send_signal(self, number: int) -> None:
        """Send by descriptor, so that a signal never reaches another process with the same id; an ended one is fine."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, number)

    def _end(self) -> None:
        self._loop.remove_reader(self._descriptor)
        os.close(self._descriptor)
        self.returncode = UNKNOWN_STATUS
        self._ended.set()

"""A child process with everything that it starts.

Invariants: the child leads a session and process group of its own, so stopping it stops its descendants too; it
dies with the thread that started it (start from the main thread), even when that process is killed with SIGKILL.
"""

from __future__ import annotations

import asyncio
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


class ProcessGroup:
    """One started command and its descendants."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._ended = False

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
    ) -> ProcessGroup:
        """Start `command`; its output goes where ours goes unless it is redirected."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid()), *command),
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
        """Of the command; also the id of its group."""
        return self._process.pid

    @property
    def process(self) -> Process:
        """For its streams."""
        return self._process

    @property
    def returncode(self) -> int | None:
        """None while the command runs; minus the signal where one ended it."""
        return self._process.returncode

    async def wait(self) -> int:
        """Until the command itself ends; its descendants may live on until `stop`."""
        return await self._process.wait()

    async def stop(self, grace_s: float) -> int:
        """SIGTERM to the whole group, and SIGKILL to what is left of it after `grace_s`."""
        self.signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self._process.wait(), grace_s)
        except TimeoutError:
            pass  # What does not listen is killed below.
        return await self.kill()

    async def kill(self) -> int:
        """SIGKILL to the whole group."""
        self.signal(signal.SIGKILL)
        code = await self._process.wait()
        self._ended = True
        return code

    def signal(self, signum: signal.Signals) -> None:
        """Send to every member of the group; nobody left is fine."""
        if self._ended:
            return  # The group's number may belong to somebody else by now.
        try:
            os.killpg(self._process.pid, signum)
        except ProcessLookupError:
            pass

"""Bring a stack up on this host and take it down: what `flotilla up` and `flotilla down` do.

Invariants: one command at a time works on a stack; a stack that does not come up, or whose start is
interrupted, leaves nothing behind; after `down` no process, socket or announcement of the stack is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sysconfig
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from flotilla.launcher.v1.launcher_pb2 import ProcessStatus
from flotilla_core.config import StackConfig, dump_yaml
from flotilla_core.errors import DeadlineExceeded, FailedPrecondition, FlotillaError, Internal, Unavailable
from flotilla_core.files import write_atomically
from flotilla_core.process_identity import ProcessIdentity
from flotilla_launch.cleanup import CLEANUP_LIMIT_S, clean_up
from flotilla_launch.client import LauncherClient
from flotilla_launch.guardian import end_guardian, starts_launcher_again
from flotilla_launch.logs import failure_excerpt
from flotilla_launch.own_credential import own_credential
from flotilla_launch.paths import StackPaths
from flotilla_launch.report import read_report
from flotilla_launch.stack_lock import hold_lock
from flotilla_launch.state import LauncherFile, find

_PROGRESS_EVERY_S = 0.5
_CLAIM_POLL_S = 0.05
_STOP_LIMIT_S = 60.0
_GUARDIAN_LIMIT_S = 30.0
_DYING_LIMIT_S = 3.0

Result = TypeVar("Result")
Progress = Callable[[list[ProcessStatus]], None]


@dataclass(frozen=True)
class UpResult:
    """The result of `up`."""

    changed: bool
    launcher: LauncherFile
    processes: list[ProcessStatus]


def executables_directory() -> Path:
    """Return the folder of this environment's commands; a stack's services run from the same one."""
    return Path(sysconfig.get_path("scripts"))


async def up(
    stack: StackConfig,
    *,
    executables: Path | None = None,
    on_progress: Progress = lambda _: None,
    on_wait: Callable[[str], None] = lambda _: None,
    on_tightened: Callable[[str], None] = lambda _: None,
) -> UpResult:
    """Make the stack run; a stack that runs already and is the same stays untouched."""
    paths = StackPaths.of(stack.state_dir, stack.name)
    tightened = paths.make()
    if tightened:
        on_tightened(f"{paths.directory}: closed {tightened} files and folders to other users of this host")
    own_credential(stack, paths, on_wait)
    while True:
        # Before the lock, which the guardian takes as well.
        await _guardian_done(paths, on_wait)
        async with one_at_a_time(paths, 2 * stack.ready_timeout_s, on_wait):
            file = find(paths)
            if file is None:
                await _start_supervisor(stack, paths, executables or executables_directory(), on_progress)
                return await _up_result(paths, changed=True)
            try:
                async with LauncherClient.open(file) as launcher:
                    changed = (await _answered(launcher.apply(stack), file)).changed
                return await _up_result(paths, changed=changed)
            except Unavailable:
                if not await _died(file.identity):
                    raise
        # It was killed meanwhile: the next one is asked the same.


async def _up_result(paths: StackPaths, *, changed: bool) -> UpResult:
    file = find(paths)
    if file is None:
        log_path = paths.log_file("launcher")
        raise Internal("the supervisor ended as soon as the stack was up", where=str(log_path))
    async with LauncherClient.open(file) as launcher:
        return UpResult(changed, file, list((await launcher.state()).processes))


async def down(paths: StackPaths, *, on_wait: Callable[[str], None] = lambda _: None) -> bool:
    """Return whether anything was there to stop."""
    if not paths.directory.is_dir():
        return False
    async with one_at_a_time(paths, _STOP_LIMIT_S, on_wait):
        file = find(paths)
        if file is None:
            return await _cleaned_up(paths)
        try:
            async with LauncherClient.open(file) as launcher:
                await _answered(launcher.stop(), file)
        except Unavailable:
            if not await _died(file.identity):
                raise
            # It was killed while it did so; the guardian stands back for as long as we are at work.
            await _cleaned_up(paths)
        await _ended(file.identity, _STOP_LIMIT_S)
        return True


async def _cleaned_up(paths: StackPaths) -> bool:
    """End what a launcher that died has left, and its guardian; whether anything was there."""
    stale = paths.launcher_file.exists() or paths.processes_file.exists()
    with hold_lock(paths.launcher_lock_file, timeout_s=CLEANUP_LIMIT_S) as held:
        if not held:
            raise DeadlineExceeded(
                "another command is changing the processes of the stack",
                where=str(paths.launcher_lock_file),
                why=f"the file was locked for {CLEANUP_LIMIT_S:.0f} s",
                next_step="see who holds the lock: fuser -v " + str(paths.launcher_lock_file),
            )
        ended = await asyncio.to_thread(partial(clean_up, paths, runs_go_on=False))
    await asyncio.to_thread(end_guardian, paths)
    paths.ended_file.unlink(missing_ok=True)
    return bool(ended) or stale


async def _guardian_done(paths: StackPaths, on_wait: Callable[[str], None]) -> None:
    """Wait while a guardian is about to start the launcher again; one that hangs is not waited for for long."""
    deadline = time.monotonic() + _GUARDIAN_LIMIT_S
    waiting = False
    while find(paths) is None and starts_launcher_again(paths) and time.monotonic() < deadline:
        if not waiting:
            waiting = True
            on_wait("the launcher of this stack was killed: waiting for its guardian to start it again")
        await asyncio.sleep(_CLAIM_POLL_S)


async def _start_supervisor(
    stack: StackConfig, paths: StackPaths, executables: Path, on_progress: Progress
) -> None:
    write_atomically(paths.stack_file, dump_yaml(stack))
    log_path = paths.log_file("launcher")
    log_start = log_path.stat().st_size if log_path.exists() else 0
    reading, writing = os.pipe()
    try:
        supervisor = _spawn(executables / "flotilla-launcher", paths, writing)
    except FlotillaError:
        os.close(reading)
        raise
    finally:
        os.close(writing)
    try:
        line = await _report_line(reading, paths, on_progress)
    except asyncio.CancelledError:
        supervisor.terminate()
        await asyncio.to_thread(supervisor.wait)
        raise
    failure = read_report(line) if line else _died_silently(log_path, log_start)
    if failure is not None:
        await asyncio.to_thread(supervisor.wait)
        raise failure


def _spawn(executable: Path, paths: StackPaths, report: int) -> subprocess.Popen[bytes]:
    """A session of its own: the supervisor outlives this command and its terminal."""
    command = [str(executable), "--stack", str(paths.stack_file), "--report-fd", str(report)]
    try:
        with paths.log_file("launcher").open("ab") as log_file:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=log_file,
                pass_fds=[report],
                start_new_session=True,
            )
    except OSError as error:
        raise FailedPrecondition(
            "the supervisor cannot be started",
            where=str(executable),
            why=str(error),
            next_step="install the packages into this environment: make setup",
        ) from error


def _died_silently(log_path: Path, log_start: int) -> FlotillaError:
    error_line, last = failure_excerpt(log_path, start=log_start)
    return FailedPrecondition(
        "the supervisor died while it started the stack",
        where=str(log_path),
        why="\n".join([error_line, *(f"  {text}" for text in last), ""]),
        next_step="run: flotilla doctor",
    )


async def _report_line(reading: int, paths: StackPaths, on_progress: Progress) -> bytes:
    """Return the supervisor's report, empty when it died without one; progress is shown meanwhile."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(reading, "rb")
    )
    line = asyncio.create_task(reader.readline(), name="report of the supervisor")
    try:
        while not (await asyncio.wait({line}, timeout=_PROGRESS_EVERY_S))[0]:
            file = find(paths)
            if file is not None:
                with contextlib.suppress(FlotillaError):
                    async with LauncherClient.open(file) as launcher:
                        on_progress(list((await launcher.state()).processes))
        return line.result()
    finally:
        line.cancel()
        transport.close()


@contextlib.asynccontextmanager
async def one_at_a_time(
    paths: StackPaths, timeout_s: float, on_wait: Callable[[str], None]
) -> AsyncIterator[None]:
    deadline = time.monotonic() + timeout_s
    waiting = False
    while True:
        # Polled from here and not in a thread, which a Ctrl-C could not interrupt.
        with hold_lock(paths.up_lock_file, timeout_s=0) as held:
            if held:
                yield
                return
        if not waiting:
            waiting = True
            on_wait("another flotilla up or down works on this stack: waiting for it to end")
        if time.monotonic() > deadline:
            raise DeadlineExceeded(
                "another flotilla up or down still works on this stack",
                where=str(paths.up_lock_file),
                why=f"it did not end within {timeout_s:.0f} s",
                next_step="see who holds the lock: fuser -v " + str(paths.up_lock_file),
            )
        await asyncio.sleep(_CLAIM_POLL_S)


async def _answered(call: Awaitable[Result], file: LauncherFile) -> Result:
    try:
        return await call
    except Unavailable as error:
        raise Unavailable(
            "the supervisor of the stack does not answer",
            where=f"pid {file.pid}, {file.socket}",
            why=error.why or error.what,
            next_step=f"kill -9 {file.pid}, then run the command again: another launcher continues with what is there",
        ) from error
    except DeadlineExceeded as error:
        if error.next_step:
            raise  # The supervisor's own answer, about a service that was not ready in time.
        raise DeadlineExceeded(
            "the supervisor of the stack has not answered in time",
            where=f"pid {file.pid}, {file.socket}",
            why=error.what,
            next_step="see what it is doing: flotilla ps, flotilla logs launcher; if it hangs, "
            f"kill -9 {file.pid} and run the command again: another launcher continues with what is there",
        ) from error


async def _died(identity: ProcessIdentity, within_s: float = _DYING_LIMIT_S) -> bool:
    """Return whether it is dead: one that was killed closes its connections shortly before it is gone."""
    deadline = time.monotonic() + within_s
    while identity.alive() and time.monotonic() < deadline:  # noqa: ASYNC110 (another process: nothing tells)
        await asyncio.sleep(0.02)
    return not identity.alive()


async def _ended(identity: ProcessIdentity, timeout_s: float) -> None:
    if not await _died(identity, timeout_s):
        raise DeadlineExceeded(
            "the supervisor is still there",
            where=f"pid {identity.pid}",
            why=f"it did not end within {timeout_s:.0f} s after it had stopped everything",
            next_step=f"kill -9 {identity.pid}, then run `flotilla down` again: it cleans up what is left",
        )

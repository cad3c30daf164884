"""Starts the launcher of a stack again when it dies: `python -m flotilla_launch.guardian DIRECTORY LAUNCHER`.

Launcher and guardian hold a lock file each and look at the other's, so each knows when the other one is dead, and
starts it again. Invariants: a stack has one guardian at most; nothing is begun while a `flotilla up` or `flotilla
down` is at work; a launcher that dies again and again, or before its stack was up, is not started again: then
everything is ended in order. The guardian ends when its stack was taken down.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import deque
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from flotilla_core.disk import lacks_room
from flotilla_core.process_identity import ProcessIdentity
from flotilla_launch.cleanup import CLEANUP_LIMIT_S, clean_up, say
from flotilla_launch.lease import LEASE_S
from flotilla_launch.paths import StackPaths
from flotilla_launch.records import Phase, StackRecord
from flotilla_launch.stack_lock import hold_lock, is_held
from flotilla_launch.state import LauncherFile, read_json, write_json

MOST_DEATHS = 5
DEATHS_WINDOW_S = 60.0
_POLL_S = 0.2
_LOOK_FOR_ROOM_EVERY_S = 1.0
_LAUNCHER_LIMIT_S = 30.0
"""The time for a launcher to say where it is, after it was started."""


class GuardianKeeper:
    """The launcher's end: sees to it that the stack has a guardian."""

    def __init__(self, paths: StackPaths, launcher: Path) -> None:
        self._paths = paths
        self._launcher = launcher
        self._started: subprocess.Popen[bytes] | None = None

    def keep(self) -> bool:
        """Start one where there is none; returns whether that was so. To be called again and again."""
        if self._started is not None and self._started.poll() is None:
            return False  # It lives, or is about to take its lock.
        if is_held(self._paths.guardian_lock_file):
            return False
        with self._paths.log_file("launcher").open("ab") as log_file:
            self._started = subprocess.Popen(
                [
                    *(sys.executable, "-m", "flotilla_launch.guardian"),
                    *(str(self._paths.directory), str(self._launcher)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=log_file,
                start_new_session=True,
            )
        return True

    def wait_ended(self) -> None:
        """Wait until the guardian has seen that there is nothing left to guard."""
        end_guardian(self._paths)
        if self._started is not None:
            self._started.wait()


def end_guardian(paths: StackPaths, *, within_s: float = 5.0) -> None:
    """Wait for the guardian of a stack that is down to end; one that hangs is killed."""
    deadline = time.monotonic() + within_s
    identity = _guardian_of(paths)
    while identity is not None and identity.alive():
        if time.monotonic() > deadline:
            os.kill(identity.pid, signal.SIGKILL)
        time.sleep(_POLL_S / 10)
    paths.guardian_file.unlink(missing_ok=True)


def starts_launcher_again(paths: StackPaths) -> bool:
    """Return whether a guardian is about to do so."""
    record = StackRecord.read(paths.processes_file)
    return record is not None and record.phase is Phase.UP and is_held(paths.guardian_lock_file)


def why_it_ended(paths: StackPaths) -> str:
    """Return what the guardian wrote when it gave the stack up; empty if it did not."""
    values = read_json(paths.ended_file) or {}
    return f"{values['why']} ({values['time']})" if {"why", "time"} <= values.keys() else ""


class Guardian:
    """Watches the launcher of one stack."""

    def __init__(self, paths: StackPaths, launcher: Path) -> None:
        self._paths = paths
        self._command = [str(launcher), "--stack", str(paths.stack_file), "--take-over"]
        self._deaths: deque[float] = deque()
        self._child: subprocess.Popen[bytes] | None = None

    def watch(self) -> None:
        """Return when the stack was taken down."""
        while True:
            time.sleep(_POLL_S)
            if self._child is not None:
                self._child.poll()  # No other process can take its exit status.
            if is_held(self._paths.launcher_lock_file):
                continue
            if not self._paths.processes_file.exists():
                return
            if lacks_room(self._paths.directory):
                # A launcher could not write down what it does; the stack continues without one for as long.
                time.sleep(_LOOK_FOR_ROOM_EVERY_S)
                continue
            with hold_lock(self._paths.up_lock_file, timeout_s=0) as alone:
                if alone and not is_held(self._paths.launcher_lock_file):
                    self._launcher_died()

    def _launcher_died(self) -> None:
        record = StackRecord.read(self._paths.processes_file) or StackRecord()
        now = time.monotonic()
        self._deaths.append(now)
        while now - self._deaths[0] > DEATHS_WINDOW_S:
            self._deaths.popleft()
        if record.phase is not Phase.UP:
            why = f"the launcher died while the stack was {record.phase}"
            self._end_stack(why, runs_go_on=record.phase is not Phase.STOPPING)
        elif len(self._deaths) > MOST_DEATHS:
            why = f"the launcher died {len(self._deaths)} times within {DEATHS_WINDOW_S:.0f} s"
            self._end_stack(why, tell=True)
        else:
            say("the launcher died: starting it again")
            try:
                self._start_launcher()
            except OSError as error:
                self._end_stack(f"the launcher died and cannot be started again: {error}", tell=True)

    def _start_launcher(self) -> None:
        """Return when it has said where it is, so that the next command finds it."""
        self._child = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, start_new_session=True)
        deadline = time.monotonic() + _LAUNCHER_LIMIT_S
        while self._child.poll() is None and time.monotonic() < deadline:
            file = LauncherFile.read(self._paths.launcher_file)
            if file is not None and file.pid == self._child.pid:
                return
            time.sleep(_POLL_S / 10)

    def _end_stack(self, why: str, *, tell: bool = False, runs_go_on: bool = True) -> None:
        with hold_lock(self._paths.launcher_lock_file, timeout_s=CLEANUP_LIMIT_S) as held:
            if not held:
                return
            if tell:
                values = {"time": datetime.now(UTC).isoformat(timespec="seconds"), "why": why}
                write_json(self._paths.ended_file, values)
            ended = ", ".join(clean_up(self._paths, runs_go_on=runs_go_on)) or "nothing was left"
        say(f"{why}; the guardian ended the stack: {ended}")


def main() -> None:
    """Guard the stack, unless another process does."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    paths = StackPaths(Path(sys.argv[1]))
    # A moment, for the one that was killed may be on its way out.
    with hold_lock(paths.guardian_lock_file, timeout_s=LEASE_S / 10) as held:
        if held:
            identity = ProcessIdentity.of(os.getpid())
            assert identity is not None
            write_json(paths.guardian_file, asdict(identity))
            Guardian(paths, Path(sys.argv[2])).watch()


def _guardian_of(paths: StackPaths) -> ProcessIdentity | None:
    values = read_json(paths.guardian_file)
    return ProcessIdentity(**values) if values is not None else None


if __name__ == "__main__":
    main()

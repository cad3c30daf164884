"""One service process with its log file, started by this launcher or by one before it.

Invariants: it leads a session of its own and lives as long as the lease of its stack, whatever happens to the launcher
that started it; it and all that descends from it carry a mark in their environment that belongs to this start alone. It
is started again a number of times within ten minutes, each after a longer wait.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path

from flotilla_core.errors import FailedPrecondition
from flotilla_core.log_files import HEADER
from flotilla_core.process_identity import ProcessIdentity, boot_id, stat_fields
from flotilla_core.subprocess_group import ProcessGroup
from flotilla_launch import lease
from flotilla_launch.process_tree import MARK

WINDOW_S = 600.0
_BACKOFF_S = (0.2, 1.0, 3.0, 10.0)
"""The waits before a restart, the first one after one death."""


def new_mark(prefix: Path) -> str:
    """Return a new mark for one start of one process."""
    return f"{prefix}#{secrets.token_hex(8)}"


def under_lease(directory: Path) -> list[str]:
    """Return the wrapper of a command that ends when no process looks after the stack in `directory`."""
    script = [sys.executable, "-I", "-S", lease.__file__]
    return [*script, str(os.getpid()), str(directory), str(lease.LEASE_S)]


class Child:
    """A process that runs."""

    def __init__(self, group: ProcessGroup, identity: ProcessIdentity) -> None:
        self.identity = identity
        self._group = group

    @classmethod
    def adopt(cls, identity: ProcessIdentity) -> Child | None:
        """Return the process that a launcher before this one started; None when it has ended."""
        try:
            group = ProcessGroup.adopt(identity.pid)
        except ProcessLookupError:
            return None
        # Only now: from here on the id stands for the process that was looked at.
        return cls(group, identity) if identity.alive() else None

    @classmethod
    async def start(
        cls,
        command: list[str],
        log_path: Path,
        *,
        wrapper: list[str],
        mark: str,
        variables: Mapping[str, str],
    ) -> Child:
        """Start `command` with `variables` added to our environment; its output goes below a header in `log_path`."""
        if not os.access(command[0], os.X_OK):
            raise FailedPrecondition(
                f"{Path(command[0]).name} cannot be run",
                where=command[0],
                why="there is no such program",
                next_step="install the packages into this environment: make setup",
            )
        with log_path.open("ab") as log_file:
            log_file.write(f"{HEADER} {datetime.now(UTC).isoformat()} start: {' '.join(command)}\n".encode())
            log_file.flush()
            environment = {**os.environ, **variables, MARK: mark}
            group = await ProcessGroup.start(
                command, environment=environment, stdout=log_file, stderr=log_file, wrapper=wrapper
            )
        fields = stat_fields(group.pid)
        # One that died at once may be reaped already; then only its descendants, by the mark, can be left.
        start_ticks = fields.start_ticks if fields is not None else 0
        return cls(group, ProcessIdentity(group.pid, start_ticks, boot_id()))

    @property
    def returncode(self) -> int | None:
        return self._group.returncode

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the service alone, which ends its own children in order."""
        self._group.signal_leader(number)

    async def wait(self) -> int:
        return await self._group.wait()


class RestartBudget:
    """Counts the restarts of one process; the next launcher continues with the count."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._spent: deque[float] = deque()

    @property
    def spent(self) -> list[float]:
        """When, on the monotonic clock, which all processes of one boot share."""
        return list(self._spent)

    def refill(self, spent: Iterable[float] = ()) -> None:
        """Begin with a full budget, or with what a former launcher had left."""
        self._spent = deque(spent)

    def spend(self) -> float | None:
        """Seconds to wait before the restart that this call counts; None when nothing is left for one."""
        now = time.monotonic()
        while self._spent and now - self._spent[0] > WINDOW_S:
            self._spent.popleft()
        if len(self._spent) >= self._most:
            return None
        self._spent.append(now)
        return _BACKOFF_S[min(len(self._spent), len(_BACKOFF_S)) - 1]

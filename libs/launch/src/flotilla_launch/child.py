"""A child of the supervisor: one service process with its log file.

Invariant: it leads a session of its own and dies with the supervisor (both by `ProcessGroup`), and it and all that
descends from it carry a mark in their environment that belongs to this start alone.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from flotilla_core.errors import FailedPrecondition
from flotilla_core.subprocess_group import ProcessGroup
from flotilla_launch.kin import MARK
from flotilla_launch.logs import HEADER
from flotilla_launch.state import ProcessIdentity, boot_id, stat_fields


class Child:
    """A started process."""

    def __init__(self, group: ProcessGroup, identity: ProcessIdentity, mark: str) -> None:
        self.identity = identity
        self.mark = mark
        self._group = group

    @classmethod
    async def start(
        cls, command: list[str], log_path: Path, *, mark_prefix: str, variables: Mapping[str, str]
    ) -> Child:
        """Start `command` with `variables` beside our environment; its output goes below a header in `log_path`."""
        if not os.access(command[0], os.X_OK):
            raise FailedPrecondition(
                f"{Path(command[0]).name} cannot be run",
                where=command[0],
                why="there is no such program",
                next_step="install the packages into this environment: make setup",
            )
        mark = f"{mark_prefix}#{secrets.token_hex(8)}"
        with log_path.open("ab") as log_file:
            log_file.write(f"{HEADER} {datetime.now(UTC).isoformat()} start: {' '.join(command)}\n".encode())
            log_file.flush()
            environment = {**os.environ, **variables, MARK: mark}
            group = await ProcessGroup.start(
                command, environment=environment, stdout=log_file, stderr=log_file
            )
        fields = stat_fields(group.pid)
        # One that died at once may be reaped already; then only its descendants, by the mark, can be left.
        start_ticks = fields.start_ticks if fields is not None else 0
        return cls(group, ProcessIdentity(group.pid, start_ticks, boot_id()), mark)

    @property
    def returncode(self) -> int | None:
        return self._group.returncode

    def signal(self, number: int) -> None:
        """To the service alone: how its own children end in order is its business."""
        with contextlib.suppress(ProcessLookupError):
            self._group.process.send_signal(number)

    async def wait(self) -> int:
        return await self._group.wait()

"""The report of a detached supervisor to the command that started it: whether the stack came up.

One JSON line on an inherited pipe, then the pipe is closed. Invariant: a pipe that ends without a line
means that the supervisor died; an error arrives with all its parts, uncut.
"""

from __future__ import annotations

import json
import os

from flotilla.common.v1.finding_pb2 import Finding
from flotilla_core.errors import FlotillaError, error_of
from flotilla_core.findings import parts_of


class Report:
    """The writing end; without a descriptor it does nothing."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor
        if descriptor is not None:
            os.set_inheritable(descriptor, False)

    def up(self) -> None:
        self._send({})

    def failed(self, error: FlotillaError) -> None:
        self._send(parts_of(error.finding()))

    def _send(self, values: dict[str, str | int]) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            return
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as pipe:
                pipe.write(json.dumps(values) + "\n")
        except BrokenPipeError:
            # The process that started us is gone; the stack lives on without it. Closing the pipe may say so as well.
            return


def read_report(line: bytes) -> FlotillaError | None:
    """Return the error that a report line holds, or None when the stack is up."""
    values = json.loads(line)
    return error_of(Finding(**values)) if values else None

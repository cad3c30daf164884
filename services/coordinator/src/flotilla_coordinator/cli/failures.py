"""Turns the failure of a command into a message and an exit code."""

from __future__ import annotations

import sqlite3
import sys
import traceback
from pathlib import Path
from typing import NoReturn

from flotilla_coordinator.cli.options import (
    INTERRUPTED,
    PREFLIGHT,
    RUN_FAILED,
    UNAUTHENTICATED,
    UNREACHABLE,
    USAGE,
)
from flotilla_coordinator.cli.output import print_error, say
from flotilla_core import errors
from flotilla_core.disk import disk_full
from flotilla_core.errors import FailedPrecondition, FlotillaError


def code_of(error: FlotillaError) -> int:
    """Return the exit code of a command that ends with this error."""
    codes: dict[tuple[type[FlotillaError], ...], int] = {
        (errors.InvalidConfig, errors.InvalidRequest, errors.NotFound, errors.AlreadyExists): USAGE,
        (errors.Unavailable, errors.DeadlineExceeded): UNREACHABLE,
        (errors.Unauthenticated, errors.PermissionDenied): UNAUTHENTICATED,
        (
            errors.FailedPrecondition,
            errors.PortInUse,
            errors.Mismatch,
            errors.Exhausted,
            errors.DiskFull,
        ): PREFLIGHT,
        (errors.Cancelled,): INTERRUPTED,
    }
    return next((code for kinds, code in codes.items() if isinstance(error, kinds)), RUN_FAILED)


def fail(error: BaseException) -> NoReturn:
    """Print what is wrong, and end the command; a defect with its traceback."""
    if isinstance(error, KeyboardInterrupt):
        sys.exit(INTERRUPTED)
    failure = _named(error)
    if failure is None:
        say("".join(traceback.format_exception(error)).rstrip())
        sys.exit(RUN_FAILED)
    print_error(failure, as_json="--json" in sys.argv)
    sys.exit(code_of(failure))


def _named(error: BaseException) -> FlotillaError | None:
    """Return a Flotilla error as is, an error of the file system or SQLite as one of ours, and None for a defect."""
    if isinstance(error, FlotillaError):
        return error
    if isinstance(error, OSError) and error.filename is not None:
        where = Path(str(error.filename))
        return disk_full(error, "a file cannot be written", where) or FailedPrecondition(
            "a file cannot be used",
            where=str(where),
            why=error.strerror or str(error),
            next_step="see whether state_dir in the stack file is a directory that you may read and write",
        )
    if isinstance(error, sqlite3.Error):
        return FailedPrecondition(
            "the records of the stack cannot be read",
            why=str(error),
            next_step="see whether state_dir in the stack file is on a disk that works: flotilla doctor",
        )
    return None

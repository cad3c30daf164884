"""Turns the failure of a command into a message and an exit code."""

from __future__ import annotations

import sqlite3
import sys
import traceback
from pathlib import Path
from typing import NoReturn

from flotilla_cli.options import (
    INTERRUPTED,
    PREFLIGHT,
    RUN_FAILED,
    UNAUTHENTICATED,
    UNREACHABLE,
    USAGE,
)
from flotilla_cli.output import print_error, say
from flotilla_core import errors
from flotilla_core.disk import disk_full
from flotilla_core.errors import FailedPrecondition, FlotillaError, Unavailable

COORDINATOR = "flotilla_coordinator"
"""The package that commands import for what needs more than a running coordinator."""
INSTALL = (
    "install that package in the release of this command: "
    "pip install --find-links dist -c dist/constraints.txt flotilla-coordinator"
)


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
    """Return a Flotilla error as is, one of the file system, SQLite or imports as one of ours, None for a defect."""
    if isinstance(error, FlotillaError):
        return error
    if isinstance(error, ModuleNotFoundError) and error.name == COORDINATOR:
        return _not_installed(error.__context__)
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


def _not_installed(asked: BaseException | None) -> FlotillaError:
    """Return the error of a command that needs the code of the coordinator; `asked` is that of one that was asked."""
    what, where = "the package flotilla-coordinator is not installed here", sys.prefix
    if isinstance(asked, Unavailable):
        why = f"no coordinator answers, and the files of a stack are read by its code: {asked.what}"
        next_step = f"{asked.next_step}; or {INSTALL}" if asked.next_step else INSTALL
        return Unavailable(what, where=where, why=why, next_step=next_step)
    why = "this command works by the code of the coordinator: it reads files of a stack, plans or checks"
    return FailedPrecondition(what, where=where, why=why, next_step=INSTALL)

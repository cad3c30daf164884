"""What the exit code of `flotilla` says."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flotilla_core.errors import FlotillaError

OK = 0
RUN_FAILED = 1
USAGE = 2
UNREACHABLE = 3
UNAUTHENTICATED = 4
PREFLIGHT = 5
INTERRUPTED = 130


def code_of(error: FlotillaError) -> int:
    """Of a command that ends with this error."""
    from flotilla_core import errors

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

"""Errors on the wire: `FlotillaError` to `google.rpc.Status` and back.

Invariants: an error that crosses a call arrives as the same class with the same four parts; an error from
anything else (a proxy, a dead peer, gRPC itself) becomes the nearest class. What travels always fits into the
metadata limit of `flotilla_core.rpc.channel`.
"""

from __future__ import annotations

import grpc
from google.protobuf import any_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2  # type: ignore[import-untyped]

from flotilla.common.v1 import error_pb2
from flotilla_core import errors

DOMAIN = "flotilla"
DETAILS_KEY = "grpc-status-details-bin"
# Headers are small by nature: longer parts are cut, the log of the service has all of it.
_PART_LIMIT = 3000
_TRACEBACK_LIMIT = 6000

_CODES: dict[int, int] = {
    error_pb2.ERROR_REASON_INVALID_CONFIG: code_pb2.INVALID_ARGUMENT,
    error_pb2.ERROR_REASON_INVALID_REQUEST: code_pb2.INVALID_ARGUMENT,
    error_pb2.ERROR_REASON_NOT_FOUND: code_pb2.NOT_FOUND,
    error_pb2.ERROR_REASON_ALREADY_EXISTS: code_pb2.ALREADY_EXISTS,
    error_pb2.ERROR_REASON_FAILED_PRECONDITION: code_pb2.FAILED_PRECONDITION,
    error_pb2.ERROR_REASON_STALE_VERSION: code_pb2.FAILED_PRECONDITION,
    error_pb2.ERROR_REASON_WEIGHTS_MISMATCH: code_pb2.DATA_LOSS,
    error_pb2.ERROR_REASON_WEIGHT_GROUP_FAILED: code_pb2.ABORTED,
    error_pb2.ERROR_REASON_UNAVAILABLE: code_pb2.UNAVAILABLE,
    error_pb2.ERROR_REASON_DEADLINE: code_pb2.DEADLINE_EXCEEDED,
    error_pb2.ERROR_REASON_EXHAUSTED: code_pb2.RESOURCE_EXHAUSTED,
    error_pb2.ERROR_REASON_RANK_FAILED: code_pb2.ABORTED,
    error_pb2.ERROR_REASON_NOT_FINITE: code_pb2.OUT_OF_RANGE,
    error_pb2.ERROR_REASON_MISMATCH: code_pb2.FAILED_PRECONDITION,
    error_pb2.ERROR_REASON_USER_CODE: code_pb2.UNKNOWN,
    error_pb2.ERROR_REASON_PORT_IN_USE: code_pb2.ALREADY_EXISTS,
    error_pb2.ERROR_REASON_CANCELLED: code_pb2.CANCELLED,
    error_pb2.ERROR_REASON_UNAUTHENTICATED: code_pb2.UNAUTHENTICATED,
    error_pb2.ERROR_REASON_PERMISSION_DENIED: code_pb2.PERMISSION_DENIED,
    error_pb2.ERROR_REASON_INTERNAL: code_pb2.INTERNAL,
    error_pb2.ERROR_REASON_UNIMPLEMENTED: code_pb2.UNIMPLEMENTED,
    error_pb2.ERROR_REASON_DAMAGED: code_pb2.DATA_LOSS,
    error_pb2.ERROR_REASON_DISK_FULL: code_pb2.RESOURCE_EXHAUSTED,
}

# Codes that come from gRPC itself, or from a peer that is not ours, so without an ErrorInfo.
_FOREIGN: dict[grpc.StatusCode, type[errors.FlotillaError]] = {
    grpc.StatusCode.UNAVAILABLE: errors.Unavailable,
    # We did not cancel: the peer went away with the call accepted but not handled.
    grpc.StatusCode.CANCELLED: errors.Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineExceeded,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.Exhausted,
    grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidRequest,
    grpc.StatusCode.NOT_FOUND: errors.NotFound,
    grpc.StatusCode.ALREADY_EXISTS: errors.AlreadyExists,
    grpc.StatusCode.FAILED_PRECONDITION: errors.FailedPrecondition,
    grpc.StatusCode.UNAUTHENTICATED: errors.Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: errors.PermissionDenied,
    grpc.StatusCode.UNIMPLEMENTED: errors.Unimplemented,
}


def encode(error: errors.FlotillaError, *, traceback: str = "") -> status_pb2.Status:
    """Return the status that carries `error`, with the end of `traceback` if one is given."""
    info = error_details_pb2.ErrorInfo(
        domain=DOMAIN,
        reason=error_pb2.ErrorReason.Name(error.reason),
        metadata={
            "what": error.what[:_PART_LIMIT],
            "where": error.where[:_PART_LIMIT],
            "why": error.why[:_PART_LIMIT],
            "next_step": error.next_step[:_PART_LIMIT],
            "retry": error_pb2.RetryVerdict.Name(error.retry),
        },
    )
    status = status_pb2.Status(code=_CODES[error.reason], message=str(error)[:_PART_LIMIT])
    status.details.append(_packed(info))
    if traceback:
        detail = errors.unicode_text(traceback)[-_TRACEBACK_LIMIT:]
        status.details.append(_packed(error_details_pb2.DebugInfo(detail=detail)))
    return status


def decode(failure: grpc.aio.AioRpcError, where: str) -> errors.FlotillaError:
    """Return the error behind a failed call; `where` names the call for errors that do not name it themselves."""
    details = _details_of(failure)
    error = None if details is None else from_status(details)
    if error is not None:
        return error
    kind = _FOREIGN.get(failure.code(), errors.Internal)
    code = failure.code().name.lower().replace("_", " ")
    return kind(f"the call failed: {code}", where=where, why=failure.details() or "")


def from_status(serialized: bytes) -> errors.FlotillaError | None:
    """Return the error that a serialized status carries; None if it is none of ours."""
    status = status_pb2.Status.FromString(serialized)
    error: errors.FlotillaError | None = None
    for detail in status.details:
        info = error_details_pb2.ErrorInfo()
        debug = error_details_pb2.DebugInfo()
        if detail.Unpack(info) and info.domain == DOMAIN:
            kind = errors.BY_REASON.get(_reason(info.reason), errors.Internal)
            parts = info.metadata
            error = kind(
                parts.get("what", status.message),
                where=parts.get("where", ""),
                why=parts.get("why", ""),
                next_step=parts.get("next_step", ""),
            )
        elif error is not None and detail.Unpack(debug):
            error.add_note(f"Traceback of the service:\n{debug.detail}")
    return error


def is_own_deadline(failure: grpc.aio.AioRpcError) -> bool:
    """Return whether this side's deadline ended the call, not a service that reports one of its own."""
    return failure.code() is grpc.StatusCode.DEADLINE_EXCEEDED and _details_of(failure) is None


def _details_of(failure: grpc.aio.AioRpcError) -> bytes | None:
    for key, value in failure.trailing_metadata() or ():
        if key == DETAILS_KEY and isinstance(value, bytes):
            return value
    return None


def _reason(name: str) -> int:
    # A newer peer may send a reason that this build does not know.
    return dict(error_pb2.ErrorReason.items()).get(name, error_pb2.ERROR_REASON_INTERNAL)


def _packed(message: error_details_pb2.ErrorInfo | error_details_pb2.DebugInfo) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed

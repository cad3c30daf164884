"""Errors as the clients of the vendors read them: a status, and a body in the form of the vendor.

Invariant: the status decides which exception a client raises, and the body says the same. Clients ask again by
themselves after 408, 409, 429 and all statuses from 500 on, so only what may pass has one of these.
"""

from __future__ import annotations

from typing import Any

from flotilla_core import errors

STATUS: dict[type[errors.FlotillaError], int] = {
    errors.InvalidRequest: 400,
    errors.InvalidConfig: 400,
    errors.FailedPrecondition: 400,
    errors.Unauthenticated: 401,
    errors.PermissionDenied: 403,
    errors.NotFound: 404,
    errors.Unimplemented: 404,
    errors.Exhausted: 429,
    errors.Unavailable: 503,
    errors.DeadlineExceeded: 504,
}
OF_OPENAI = {
    401: ("authentication_error", "invalid_api_key"),
    403: ("permission_error", "permission_denied"),
    404: ("invalid_request_error", "not_found"),
    429: ("rate_limit_error", "rate_limit_exceeded"),
    500: ("server_error", "server_error"),
    503: ("server_error", "service_unavailable"),
    504: ("server_error", "timeout"),
}
OF_ANTHROPIC = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}
INVALID = "invalid_request_error"


def status_of(error: errors.FlotillaError) -> int:
    """Return the status of the answer."""
    return STATUS.get(type(error), 500)


def openai(error: errors.FlotillaError) -> dict[str, Any]:
    """Return the body for both dialects of OpenAI's; `param` is the field that is wrong, and `code` says what is."""
    kind, code = OF_OPENAI.get(status_of(error), (INVALID, error.finding().code))
    field = error.where if isinstance(error, errors.InvalidRequest) else ""
    return {"error": {"message": _text(error), "type": kind, "param": field or None, "code": code}}


def anthropic(error: errors.FlotillaError) -> dict[str, Any]:
    """Return the body for Anthropic's dialect."""
    kind = OF_ANTHROPIC.get(status_of(error), INVALID)
    return {"type": "error", "error": {"type": kind, "message": _text(error)}}


def _text(error: errors.FlotillaError) -> str:
    """Return it on one line: clients put it into the text of their exception."""
    return ". ".join(part.rstrip(". ") for part in (error.what, error.why, error.next_step) if part)

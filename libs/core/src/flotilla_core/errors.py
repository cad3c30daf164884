"""Every failure that Flotilla reports on purpose, as one class a reason.

Invariants: an error says what failed, where, why and what to do next, and it keeps all four when it travels
over gRPC (`flotilla_core.rpc.status`) or as a finding, whoever wrote its text. There is exactly one class for every
`ErrorReason` of the contract.
"""

from __future__ import annotations

from typing import ClassVar, Self

from flotilla.common.v1 import error_pb2 as pb
from flotilla.common.v1.finding_pb2 import SEVERITY_ERROR, Finding, Severity
from flotilla_core.findings import text_of


def unicode_text(text: str) -> str:
    """Return text of others as every wire can carry it: halves of surrogate pairs become escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


class FlotillaError(Exception):
    """A failure with a reason that a caller can act on."""

    reason: ClassVar[pb.ErrorReason.ValueType] = pb.ERROR_REASON_INTERNAL
    retry: ClassVar[pb.RetryVerdict.ValueType] = pb.RETRY_VERDICT_NEVER

    def __init__(self, what: str, *, where: str = "", why: str = "", next_step: str = "") -> None:
        super().__init__(what)
        self.what = unicode_text(what)
        self.where = unicode_text(where)
        self.why = unicode_text(why)
        self.next_step = unicode_text(next_step)

    def again(self) -> Self:
        """Return the same error, to be raised by one more call.

        An error object that is raised again and again collects the frames of all calls that raised it, and with them
        their requests.
        """
        return type(self)(self.what, where=self.where, why=self.why, next_step=self.next_step)

    def finding(self, before: str = "", severity: Severity.ValueType = SEVERITY_ERROR) -> Finding:
        """Return what a user should know of it; `before` says what follows from it."""
        return Finding(
            severity=severity,
            code=pb.ErrorReason.Name(self.reason).removeprefix("ERROR_REASON_").lower(),
            what=f"{before}: {self.what}" if before else self.what,
            where=self.where,
            why=self.why,
            next_step=self.next_step,
        )

    def __str__(self) -> str:
        """Return all of it as one text, which may be shown on a terminal as it is."""
        return text_of(self.finding())


class InvalidConfig(FlotillaError):
    """A configuration file or option is wrong; the message names the key."""

    reason = pb.ERROR_REASON_INVALID_CONFIG


class InvalidRequest(FlotillaError):
    """A request is wrong; the message names the field."""

    reason = pb.ERROR_REASON_INVALID_REQUEST


class NotFound(FlotillaError):
    """Something named does not exist."""

    reason = pb.ERROR_REASON_NOT_FOUND


class AlreadyExists(FlotillaError):
    """Something named exists already."""

    reason = pb.ERROR_REASON_ALREADY_EXISTS


class FailedPrecondition(FlotillaError):
    """The service is not in a state that allows the call."""

    reason = pb.ERROR_REASON_FAILED_PRECONDITION


class StaleVersion(FlotillaError):
    """The caller's policy version, group epoch or lease is older than the service's."""

    reason = pb.ERROR_REASON_STALE_VERSION


class WeightsMismatch(FlotillaError):
    """Weights that arrived differ from what was sent; the message names the tensor."""

    reason = pb.ERROR_REASON_WEIGHTS_MISMATCH


class WeightGroupFailed(FlotillaError):
    """A member of a weight group failed; a new epoch may succeed."""

    reason = pb.ERROR_REASON_WEIGHT_GROUP_FAILED


class Unavailable(FlotillaError):
    """A service that is needed is not there, or went away."""

    reason = pb.ERROR_REASON_UNAVAILABLE
    retry = pb.RETRY_VERDICT_SAFE


class DeadlineExceeded(FlotillaError):
    """Something did not answer in time; the message says what was waited for, and how long."""

    reason = pb.ERROR_REASON_DEADLINE
    retry = pb.RETRY_VERDICT_AFTER_DELAY


class Exhausted(FlotillaError):
    """A limit is reached: queue, memory or message size."""

    reason = pb.ERROR_REASON_EXHAUSTED
    retry = pb.RETRY_VERDICT_AFTER_DELAY


class RankFailed(FlotillaError):
    """A trainer rank died or is stuck; the message names it."""

    reason = pb.ERROR_REASON_RANK_FAILED
    retry = pb.RETRY_VERDICT_AFTER_DELAY


class NotFinite(FlotillaError):
    """A loss, gradient, reward or logprob is not finite."""

    reason = pb.ERROR_REASON_NOT_FINITE


class Mismatch(FlotillaError):
    """Two services disagree: tokenizer, model shape, protocol or logprobs."""

    reason = pb.ERROR_REASON_MISMATCH


class UserCodeError(FlotillaError):
    """User code raised: a reward function or a plugin."""

    reason = pb.ERROR_REASON_USER_CODE


class PortInUse(FlotillaError):
    """The port to bind belongs to another process."""

    reason = pb.ERROR_REASON_PORT_IN_USE


class Cancelled(FlotillaError):
    """The work was cancelled on request."""

    reason = pb.ERROR_REASON_CANCELLED


class Unauthenticated(FlotillaError):
    """The caller shows no certificate that is good for the call."""

    reason = pb.ERROR_REASON_UNAUTHENTICATED


class PermissionDenied(FlotillaError):
    """The caller is known, but may not do this."""

    reason = pb.ERROR_REASON_PERMISSION_DENIED


class Internal(FlotillaError):
    """A defect of Flotilla; details carry the traceback."""

    reason = pb.ERROR_REASON_INTERNAL


class Unimplemented(FlotillaError):
    """This build of the service does not know the call."""

    reason = pb.ERROR_REASON_UNIMPLEMENTED


class Damaged(FlotillaError):
    """Bytes on disk are not those that were written; the message names the file."""

    reason = pb.ERROR_REASON_DAMAGED


class DiskFull(FlotillaError):
    """A disk takes no more: it is full, over a quota or read-only; the message names it."""

    reason = pb.ERROR_REASON_DISK_FULL
    retry = pb.RETRY_VERDICT_AFTER_DELAY


BY_REASON: dict[int, type[FlotillaError]] = {kind.reason: kind for kind in FlotillaError.__subclasses__()}


def error_of(finding: Finding) -> FlotillaError:
    """Return the error that a finding tells of; a reason that this build does not know is `Internal`."""
    reason = dict(pb.ErrorReason.items()).get(f"ERROR_REASON_{finding.code.upper()}", Internal.reason)
    kind = BY_REASON.get(reason, Internal)
    return kind(finding.what, where=finding.where, why=finding.why, next_step=finding.next_step)

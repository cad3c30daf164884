"""Fences: a caller that was paused must not act after another process has taken its place.

Every beginning of a run has a fence and sends it with each call: the epoch of the coordinator that owns the ledger, the
run, and a number higher than that of any beginning before it. Invariants: a service refuses a call whose epoch is
behind the newest that it has seen of the same ledger, or whose number is behind the newest of the same run; calls of
two runs pass side by side, and calls without a fence (a person's, another stack's) pass. Only a coordinator has a fence
to send: a call of a holder with a role that carries one is refused, whatever the role (`trust.roles`). A call that is
refused for any reason leaves no trace here: the boundary admits a fence after caller and message were accepted. What a
service remembers is bounded, and so is how far one call can move it.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import grpc

from flotilla_core.errors import InvalidRequest, StaleVersion

FENCE_HEADER = "flotilla-fence"

_READABLE = re.compile(r"([0-9]{1,10}) ([0-9]{1,10}) (\S{1,64}) (\S{1,128})")
_LARGEST = 2**31 - 1
# A coordinator adds one to the epoch at each of its starts, and its restart budget allows a few in ten minutes.
_LARGEST_LEAP = 1000
_LEDGERS = 16
_RUNS_PER_LEDGER = 1024


@dataclass(frozen=True)
class Fence:
    """A beginning of a run, under one owner of its ledger."""

    ledger: str
    epoch: int
    run: str
    number: int

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The metadata that a call carries."""
        return ((FENCE_HEADER, f"{self.epoch} {self.number} {self.ledger} {self.run}"),)

    @classmethod
    def of_call(cls, details: grpc.HandlerCallDetails) -> Fence | None:
        """Return the fence that a call carries, or None; raise InvalidRequest for one that cannot be right."""
        for key, value in details.invocation_metadata or ():
            if key != FENCE_HEADER:
                continue
            match = _READABLE.fullmatch(value) if isinstance(value, str) else None
            if match is None or int(match[1]) > _LARGEST or int(match[2]) > _LARGEST:
                raise InvalidRequest(
                    f"the header {FENCE_HEADER} is not a fence",
                    where=details.method,
                    why=f"it has to be 'epoch number ledger run', with numbers up to {_LARGEST}",
                )
            return cls(match[3], int(match[1]), match[4], int(match[2]))
        return None


class _Newest:
    """The newest fences of one ledger."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.numbers: OrderedDict[str, int] = OrderedDict()
        """The numbers of this epoch by run, the latest caller last; a new epoch starts all numbers again."""

    def admit(self, fence: Fence, method: str) -> None:
        """Record `fence` as the newest one, or raise."""
        if fence.epoch - self.epoch > _LARGEST_LEAP:
            raise InvalidRequest(
                f"the epoch of the header {FENCE_HEADER} is {fence.epoch}, but the newest one here is {self.epoch}",
                where=method,
                why=f"an epoch grows by one at each start of a coordinator, not by more than {_LARGEST_LEAP} at once",
                next_step="Restart this service if its coordinator really started so often.",
            )
        if fence.epoch < self.epoch:
            raise _stale(
                f"the caller's coordinator, epoch {fence.epoch}, is behind epoch {self.epoch}", fence, method
            )
        if fence.epoch > self.epoch:
            self.epoch, self.numbers = fence.epoch, OrderedDict()
        newest = self.numbers.get(fence.run, 0)
        if fence.number < newest:
            raise _stale(f"the caller's fence {fence.number} is behind {newest}", fence, method)
        self.numbers[fence.run] = fence.number
        _forget_oldest(self.numbers, fence.run, _RUNS_PER_LEDGER)


class NewestFences:
    """The newest fences that a service has seen, of the ledgers and runs that called last."""

    def __init__(self) -> None:
        self._ledgers: OrderedDict[str, _Newest] = OrderedDict()

    def admit(self, fence: Fence, method: str) -> None:
        """Remember `fence` as the newest one of its run; raise StaleVersion where a newer one was here."""
        newest = self._ledgers.get(fence.ledger) or _Newest(fence.epoch)
        newest.admit(fence, method)
        self._ledgers[fence.ledger] = newest
        _forget_oldest(self._ledgers, fence.ledger, _LEDGERS)


def _forget_oldest(entries: OrderedDict[str, Any], used: str, limit: int) -> None:
    """Move the entry that was `used` to the end, and drop the first one where there are more than `limit`."""
    entries.move_to_end(used)
    if len(entries) > limit:
        entries.popitem(last=False)


def _stale(what: str, fence: Fence, method: str) -> StaleVersion:
    return StaleVersion(
        what,
        where=method,
        why=f"a later beginning of run {fence.run}, or another coordinator, has taken over from it",
        next_step="see `flotilla run list`",
    )

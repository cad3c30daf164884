"""Who has which service, for a coordinator that comes after this one.

Invariant: it is a wish and no more: without the file, or with one that is out of date, runs go on with other services,
and load from their checkpoints what these do not hold. Only the coordinator that works writes it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import structlog

from flotilla_core.files import write_atomically

log = structlog.get_logger(__name__)

GANGS, GENERATORS = "gangs", "generators"
Holders = Mapping[str, Mapping[str, str]]
"""Runs by slots, by what the slots are of."""


class LeaseFile:
    """Written at every change."""

    def __init__(self, path: Path, may_write: Callable[[], bool]) -> None:
        self._path = path
        self._may_write = may_write
        self._before = self._read()
        self._written: Holders | None = None

    def had(self, kind: str, run_id: str) -> list[str]:
        """The slots that a run had under the coordinator before."""
        return [slot for slot, holder in self._before.get(kind, {}).items() if holder == run_id]

    def write(self, holders: Holders) -> None:
        """What is so now."""
        if holders == self._written or not self._may_write():
            return
        self._written = {kind: dict(slots) for kind, slots in holders.items()}
        try:
            write_atomically(self._path, json.dumps(self._written, indent=2) + "\n")
        except OSError as error:  # a full disk costs the next coordinator a checkpoint at worst
            log.warning("who has which service was not written", error=str(error))

    def _read(self) -> Holders:
        try:
            content = json.loads(self._path.read_text("utf-8"))
            return {kind: dict(content[kind]) for kind in (GANGS, GENERATORS)}
        except (OSError, ValueError, TypeError, KeyError):
            return {}

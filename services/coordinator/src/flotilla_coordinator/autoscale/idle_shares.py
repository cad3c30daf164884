"""Shares of a step in which trainer and generators have nothing to do.

Invariant: the trainer is idle while the loop waits for rollouts, a generator while it has no sample of ours; a replica
that came within the step is measured from the next one on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from flotilla_core.rpc import Replica

TRAINER, GENERATORS = "idle/trainer", "idle/generators"


class IdleShares:
    """Measures one step after the other."""

    def __init__(self, replicas: Callable[[], list[Replica[Any]]]) -> None:
        self._replicas = replicas
        self._began = 0.0
        self._busy_s: dict[str, float] = {}

    def begin(self) -> None:
        """A step begins."""
        self._began = time.monotonic()
        self._busy_s = {replica.instance_id: replica.busy_s for replica in self._replicas()}

    def metrics(self, waited_s: float) -> dict[str, float]:
        """Of the step so far, in which the loop waited for rollouts for so long."""
        seconds = max(time.monotonic() - self._began, 1e-9)
        shares = {TRAINER: min(1.0, waited_s / seconds)}
        busy = [
            (replica.busy_s - self._busy_s[replica.instance_id]) / seconds
            for replica in self._replicas()
            if replica.instance_id in self._busy_s
        ]
        if busy:
            shares[GENERATORS] = max(0.0, 1.0 - sum(busy) / len(busy))
        return shares

"""The optimizer steps of one update on one rank, one mini-batch after the other.

Invariants: whether the update is given up or its rollouts are refused is decided before a step has changed a weight; a
step that is not finite is left out and named, and the others stand; an error after a step was made ends this process,
for the weights belong to no version then.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from flotilla_core.errors import FlotillaError
from flotilla_trainer.rank.optimizer import PolicyOptimizer
from flotilla_trainer.rank.step_metrics import metrics_of_steps
from flotilla_trainer.rank.update import Update, finish
from flotilla_trainer.wire.frames import Frame


@dataclass
class UpdateSteps:
    """Takes the steps of one update."""

    optimizer: PolicyOptimizer
    device: torch.device
    accumulated: Callable[[Frame, range], Update]
    """Forward and backward over some micro-batches of the command."""
    aborted: Callable[[], bool]
    """Whether somebody wants the update to be given up."""
    _made: list[dict[str, float]] = field(default_factory=list)
    _skipped: list[dict[str, float]] = field(default_factory=list)
    _reasons: list[str] = field(default_factory=list)

    def take(self, command: Frame) -> dict[str, Any]:
        """All of them, or as many as are finite: the answer to the command."""
        first, sizes = 0, command.fields["steps"]
        for number, size in enumerate(sizes, 1):
            place = f"step {number} of {len(sizes)}"
            try:
                aborted = self._one(command, range(first, first + size), place if len(sizes) > 1 else "")
            except FlotillaError as error:
                if self._made:
                    raise RuntimeError(f"{place} failed after others were made") from error
                raise
            if aborted:
                return self._answer(aborted=True)
            first += size
        return self._answer(aborted=False)

    def _one(self, command: Frame, part: range, place: str) -> bool:
        """Take one step or skip it; whether the update was given up instead."""
        started = time.monotonic()
        update = self.accumulated(command, part)
        elapsed = time.monotonic() - started
        untouched = not self._made
        metrics, skipped, aborted = finish(
            update,
            self.optimizer,
            command.fields["learning_rate"],
            untouched and self.aborted(),
            self.device,
            judged=untouched,
        )
        metrics["time/forward_backward_s"] = elapsed
        if skipped or aborted:
            self._skipped.append(metrics)
            self._reasons.append(f"{place}: {skipped}" if place else skipped)
        else:
            self._made.append(metrics)
        return aborted

    def _answer(self, *, aborted: bool) -> dict[str, Any]:
        metrics = metrics_of_steps(self._made or self._skipped)
        return {
            "metrics": metrics | {"optimizer/steps": float(len(self._made))},
            "skipped": "" if self._made else "; ".join(self._reasons),
            "skipped_steps": self._reasons if self._made else [],
            "aborted": aborted,
        }

"""Reads the recorded samples of steps that a run repeats.

Invariants: a sample that was scored is never generated again. A sample that was dropped for a reason of its own stays
dropped, and counts as a failure of its reward where it was one.
"""

from __future__ import annotations

import asyncio
from dataclasses import fields

from flotilla_coordinator.ledger.ledger import Ledger
from flotilla_coordinator.ledger.records import DropReason, FinishedSample, SampleRecord, SampleState
from flotilla_coordinator.rollouts.batch import RolloutSample
from flotilla_coordinator.rollouts.scoring import Outcome

MOST_SAMPLES = 1 << 30
KEPT = tuple(field.name for field in fields(FinishedSample))
"""Fields of a scored sample that the ledger holds under the same names."""
FAILED = (DropReason.REWARD_ERROR, DropReason.REWARD_TIMEOUT)
FINAL = (SampleState.SCORED, SampleState.DROPPED)


class Replay:
    """The recorded samples of one run."""

    def __init__(self, run_id: str, ledger: Ledger) -> None:
        self._run_id = run_id
        self._ledger = ledger
        self._steps: dict[int, asyncio.Task[dict[str, list[SampleRecord]]]] = {}

    async def group(self, step: int, group_id: str) -> list[SampleRecord]:
        """Return the samples of a group that was admitted before."""
        if step not in self._steps:
            self._steps = {known: task for known, task in self._steps.items() if known >= step - 1}
            self._steps[step] = asyncio.create_task(self._read(step), name=f"replay of step {step}")
        return (await asyncio.shield(self._steps[step]))[group_id]

    async def _read(self, step: int) -> dict[str, list[SampleRecord]]:
        groups: dict[str, list[SampleRecord]] = {}
        for record in await self._ledger.samples(self._run_id, step=step, limit=MOST_SAMPLES):
            groups.setdefault(record.group_id, []).append(record)
        return groups


def decided(records: list[SampleRecord]) -> set[str]:
    """Return the samples that need no generator any more."""
    return {record.sample_id for record in records if record.state in FINAL}


def recorded_samples(records: list[SampleRecord]) -> list[RolloutSample]:
    """Return the samples that may be trained, with their tokens, log-probabilities and rewards."""
    return [
        RolloutSample(**{name: getattr(record, name) for name in KEPT})
        for record in records
        if record.state is SampleState.SCORED and record.token_ids is not None
    ]


def recorded_failures(records: list[SampleRecord]) -> list[Outcome]:
    """Return the failures of the rewards; the ledger does not hold their messages."""
    return [
        Outcome(
            None,
            f"the reward of {record.sample_id} failed before the run was continued",
            timed_out=record.drop_reason == DropReason.REWARD_TIMEOUT,
        )
        for record in records
        if record.state is SampleState.DROPPED and record.drop_reason in FAILED
    ]

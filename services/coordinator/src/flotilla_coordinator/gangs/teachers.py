"""What the teachers of a run say of a batch: who is asked about which sample, and what comes of several answers.

Invariants: teachers are asked side by side, each about its own samples alone; the mean of several is made in float64
from what each of them said, and rounded once.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from flotilla_coordinator.gangs.frozen_role import FrozenRole
from flotilla_coordinator.rollouts.batch import Batch
from flotilla_core.config.teachers import AskedTeachers
from flotilla_core.roles import teacher_name
from flotilla_core.tasks import all_of

T = TypeVar("T")


class Teachers:
    """The sessions of a run's teachers, one or several."""

    def __init__(self, asked: AskedTeachers, sessions: Sequence[FrozenRole]) -> None:
        self._asked = asked
        self._sessions = {session.gang.role: session for session in sessions}

    async def score(self, batch: Batch) -> None:
        """Give every sample what its teacher says of each of its tokens, or the weighted mean of what all say."""
        parts, seconds = parts_of(self._asked, batch), batch.metrics
        if self._asked.averages_teachers:
            calls = [self._timed(role, self._sessions[role].logprobs(batch), seconds) for role in parts]
            found = dict(zip(parts, await all_of(calls), strict=True))
            for sample in batch.samples:
                said = {role: logprobs[sample.sample_id] for role, logprobs in found.items()}
                sample.teacher_logprobs = mean_logprobs(said, self._asked.teacher_shares)
            return
        await all_of(
            self._timed(role, self._sessions[role].score(part), seconds) for role, part in parts.items()
        )

    @staticmethod
    async def _timed(role: str, answer: Awaitable[T], seconds: dict[str, float]) -> T:
        """The answer; how long a teacher with a name took is a metric of its own."""
        started = time.monotonic()
        found = await answer
        if name := teacher_name(role):
            seconds[f"time/teacher_{name}_s"] = time.monotonic() - started
        return found


def parts_of(asked: AskedTeachers, batch: Batch) -> dict[str, Batch]:
    """The groups that each teacher is asked about, by its role; a teacher of none has no part."""
    roles = asked.teacher_shares
    if asked.teacher_field is None:
        return dict.fromkeys(roles, batch)
    own = {role: [group for group in batch.groups if group.teacher == role] for role in roles}
    return {role: replace(batch, groups=groups) for role, groups in own.items() if groups}


def mean_logprobs(said: Mapping[str, np.ndarray], shares: Mapping[str, float]) -> np.ndarray:
    """The weighted mean of what they say of each token.

    That is the log-probability under their normalised geometric mean, less a number which is the same for all tokens
    that may stand in a place, so that it changes no gradient on average.
    """
    mean = sum(shares[role] * logprobs.astype(np.float64) for role, logprobs in said.items())
    return np.asarray(mean, np.float32)

"""Teachers with names: each says what the scene has of it, and the coordinator makes the column of a sample of it."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from flotilla.trainer.v1 import session_pb2
from flotilla_coordinator.rollouts.batch import Batch
from flotilla_coordinator.trainers.roles import ScoringSession, Teachers
from flotilla_coordinator.trainers.session import Gang
from flotilla_core.config.training import AskedTeachers
from flotilla_core.roles import teacher_role
from flotilla_testing.exact_update import Rollouts
from flotilla_testing.files import NO_FILES, to_nobody
from option_pairs.scenes import Drawn, whole_groups


class SceneTeacher(ScoringSession):
    """Answers without a gang."""

    def __init__(self, name: str, said: dict[str, np.ndarray]) -> None:
        stub: Any = None
        role = teacher_role(name)
        gang = Gang(role, stub, role, 1.0, role, NO_FILES, None, to_nobody)
        super().__init__("run", session_pb2.SessionSpec(), gang, nobody, 0, 1.0)
        self._said = said

    async def logprobs(self, batch: Batch) -> dict[str, np.ndarray]:
        return {sample.sample_id: self._said[sample.sample_id] for sample in batch.samples}


async def nobody() -> list[str]:
    return []


def taught(asked: AskedTeachers, part: Drawn) -> np.ndarray:
    """What the samples say to the trainer of their teachers, token by token."""
    batch = Batch(0, whole_groups(part), {})
    ids = [sample.sample_id for sample in batch.samples]
    sessions = [SceneTeacher(name, by_sample(part.rollouts, name, ids)) for name in asked.teachers]
    asyncio.run(Teachers(asked, sessions).score(batch))
    columns = [sample.teacher_logprobs for sample in batch.samples]
    return np.concatenate([column for column in columns if column is not None])


def by_sample(rollouts: Rollouts, name: str, ids: list[str]) -> dict[str, np.ndarray]:
    said = rollouts.named_teachers[name].astype(np.float32)
    return {sample_id: said[rollouts.sample_of_token == place] for place, sample_id in enumerate(ids)}

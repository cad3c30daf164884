"""`flotilla record`: what it keeps of the groups of a step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flotilla_cli.record import recordable
from flotilla_coordinator.rollouts.batch import RolloutGroup, RolloutSample
from flotilla_coordinator.rollouts.group import FinishedGroup
from flotilla_core.config import RunConfig
from flotilla_core.errors import FailedPrecondition

TOKENS = np.arange(3, dtype=np.int32)


def finished(samples: int) -> FinishedGroup:
    """A group of two, so many of which have a reward."""
    own = [RolloutSample(f"s{at}", TOKENS, np.zeros(3, np.float32), "text") for at in range(samples)]
    return FinishedGroup(RolloutGroup("run/0/0", "prompt", TOKENS, own), [], dropped=2 - samples, retried=0)


def config(**changes: Any) -> RunConfig:
    described = {"name": "run", "steps": 1, "data": {"train": "/x.jsonl"}, "rewards": [{"reward": "exact"}]}
    return RunConfig.model_validate(described | changes)


def test_a_group_that_is_too_small_to_be_compared_is_not_recorded() -> None:
    groups = [finished(2), finished(1), finished(0)]
    assert [len(one.samples) for one in recordable(groups, config(), 0)] == [2]
    of_batch = config(algorithm={"type": "reinforce_plus_plus"})
    assert [len(one.samples) for one in recordable(groups, of_batch, 0)] == [2, 1]


def test_a_step_without_a_group_is_refused_by_its_number() -> None:
    with pytest.raises(
        FailedPrecondition, match=r"step 3 has no group to record.*none of its 2 groups has 2"
    ):
        recordable([finished(1), finished(0)], config(), 2)

"""A sample that has no reward changes no bit of what its siblings learn, whatever compares them with each other."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from flotilla.reward.v1 import reward_pb2 as pb
from flotilla_algorithms.advantages import group_advantages
from flotilla_coordinator.rollouts.batch import RolloutSample
from flotilla_coordinator.rollouts.scoring import reward_spec, weigh
from flotilla_core.config import RewardTermConfig
from flotilla_reward import scoring
from flotilla_reward.answers import Workers
from flotilla_workers.jail.jail import no_jail

pytestmark = pytest.mark.asyncio(loop_scope="module")

REWARDS = """
import os

def alone(solution_str, ground_truth):
    if solution_str == "ends its worker":
        os._exit(1)
    return len(solution_str) / 7 if solution_str != "breaks it" else 1 / 0

def rank(prompt, responses, answer, info):
    mean = sum(map(len, responses)) / len(responses)
    return [(len(one) - mean) / 3 if one != "cannot be ranked" else None for one in responses]

def trl(completions, **columns):
    return [len(one) / len(max(completions, key=len)) for one in completions]
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool() -> AsyncIterator[Workers]:
    pool = Workers(1, no_jail)
    await pool.start()
    yield pool
    await pool.stop()


async def trained(pool: Workers, terms: list[RewardTermConfig], responses: list[str]) -> list[RolloutSample]:
    """Return the samples of a group that have a reward."""
    items = [
        pb.ScoreItem(sample_id=str(place), response=response, group="g")
        for place, response in enumerate(responses)
    ]
    loaded = scoring.resolve([reward_spec(term) for term in terms])
    async for _ in scoring.load(loaded, pool):
        pass
    outcomes = {
        outcome.sample_id: outcome
        async for response in scoring.score_items(items, loaded, pool)
        for outcome in response.outcomes
    }
    samples = []
    for item in items:
        sample = RolloutSample(item.sample_id, np.empty(0, np.int32), None, item.response)
        outcome = weigh(terms, outcomes[item.sample_id])
        assert outcome.unverifiable is (item.response == "ends its worker")
        sample.take_outcome(outcome)
        if sample.drop_reason is None:
            samples.append(sample)
    return samples


@pytest.mark.parametrize("failed", ["breaks it", "cannot be ranked", "ends its worker"])
@pytest.mark.parametrize("order", [("alone", "rank", "trl"), ("trl", "rank", "alone")])
async def test_a_failed_sample_changes_no_bit_of_the_advantages_of_its_siblings(
    pool: Workers, tmp_path: Path, order: tuple[str, ...], failed: str
) -> None:
    file = tmp_path / "rewards.py"
    file.write_text(REWARDS)
    weights = {"alone": 0.3, "rank": 0.9, "trl": 1.1}
    drops: dict[str, Any] = {"alone": {"blames_response": True, "on_unverifiable": "drop"}}
    terms = [
        RewardTermConfig(reward=f"{file}:{name}", weight=weights[name], **drops.get(name, {}))
        for name in order
    ]
    siblings = ["x" * 11, "xxx", "x" * 40, "xx"]
    found = []
    for responses in (siblings, [failed, *siblings], [*siblings[:2], failed, *siblings[2:], failed]):
        samples = await trained(pool, terms, responses)
        assert [sample.text for sample in samples] == siblings
        rewards = [sample.reward for sample in samples]
        found.append(group_advantages(rewards, [len(rewards)], normalize_std=True).tobytes())
    assert len(set(found)) == 1

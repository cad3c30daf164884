"""Long episodes are trained as often as they are drawn, at any staleness: nothing is dropped because it took long."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import numpy as np
import pytest

from flotilla_coordinator.ledger.checker import check
from flotilla_coordinator.ledger.ledger import Ledger
from flotilla_coordinator.ledger.records import Branch, Episode, RunRecord, RunState, TokenSpan
from flotilla_coordinator.rollouts.batch import RolloutSample
from flotilla_coordinator.rollouts.generation import GenerationRequest
from flotilla_coordinator.rollouts.group import GroupRollout
from flotilla_coordinator.rollouts.scoring import Needs, Outcome
from flotilla_coordinator.rollouts.source import RolloutSource
from flotilla_core.config import RolloutConfig
from flotilla_core.config.advantages import ReinforceAdvantage
from flotilla_core.version import Version
from flotilla_testing.numbered_prompts import NumberedPrompts

RUN = "run-1"
PROMPTS, SAMPLES = 16, 8
STEPS = 40
"""Steps that are trained: 5,120 episodes."""
LONGEST = 200
"""Turns of the longest episode; the shortest has two, so that durations differ by two orders of magnitude."""
LARGEST_DISTANCE = 0.03
LIMIT_S = 600.0


class Player:
    """Plays episodes whose turns, one round of the loop each, lie evenly on a logarithmic scale."""

    def __init__(self) -> None:
        self.live = Version(0, 0)
        self.drawn: dict[str, list[int]] = {}
        """The turns of the episodes of each group, in the order in which groups were begun."""
        self.ended = 0

    async def samples(self, request: GenerationRequest) -> AsyncGenerator[RolloutSample]:
        group = request.sample_ids[0].rpartition("/")[0]
        chance = np.random.default_rng(int(group.rpartition("/")[2]))
        turns = np.exp(chance.uniform(np.log(2), np.log(LONGEST), SAMPLES)).astype(int).tolist()
        self.drawn[group] = turns
        waiting = [
            asyncio.create_task(self._played(sample_id, length, request))
            for sample_id, length in zip(request.sample_ids, turns, strict=True)
        ]
        try:
            for one in asyncio.as_completed(waiting):
                yield await one
        finally:
            for task in waiting:
                task.cancel()

    async def _played(self, sample_id: str, turns: int, request: GenerationRequest) -> RolloutSample:
        for _ in range(turns):
            await asyncio.sleep(0)
        self.ended += 1
        tokens = np.full(turns, 7, np.int32)
        spans = (TokenSpan(request.min_version, 0, 1), TokenSpan(self.live, 1, turns))
        episode = Episode("completed", turns, (), "[]", (Branch(0, np.array([1], np.int32)),))
        played = Outcome(float(turns % 2))
        return RolloutSample(
            sample_id, tokens, np.zeros(turns, np.float32), "7", spans, played=played, episode=episode
        )

    async def needs(self) -> Needs:
        return Needs()

    async def score(self, items: list[Any]) -> dict[str, Outcome]:
        return {item.sample_id: Outcome(0.0) for item in items}


def distance(one: list[int], other: list[int]) -> float:
    """Return the Kolmogorov-Smirnov distance: the largest difference of both distributions."""
    places = np.arange(LONGEST + 1)
    shares = [
        np.searchsorted(np.sort(lengths), places, side="right") / len(lengths) for lengths in (one, other)
    ]
    return float(np.abs(shares[0] - shares[1]).max())


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("staleness", [0, 1, 4])
async def test_trained_episodes_are_as_long_as_those_that_were_drawn(tmp_path: Path, staleness: int) -> None:
    ledger = Ledger.open(tmp_path / "ledger.sqlite")
    written = f"rollout: {{max_staleness: {staleness}}}\n"
    await ledger.save_run(RunRecord(RUN, "run", RunState.RUNNING, written, str(tmp_path), time.time()))
    config = RolloutConfig(prompts_per_step=PROMPTS, samples_per_prompt=SAMPLES, max_staleness=staleness)
    player = Player()
    prompts: Any = NumberedPrompts()
    parts: Any = {"sampler": player, "scorer": player, "ledger": ledger, "advantage": ReinforceAdvantage()}
    groups = GroupRollout(RUN, config, **parts, wait_until_verified=AsyncMock())
    source = RolloutSource(RUN, config, 2 * STEPS, prompts, groups, ledger)
    trained: list[int] = []
    unfinished = 0
    for step in range(STEPS):
        before, after = Version(0, step), Version(0, step + 1)
        source.admit(step, before)
        batch = await source.batch(step, before)
        unfinished = max(unfinished, sum(map(len, player.drawn.values())) - player.ended)
        ids = [sample.sample_id for sample in batch.samples]
        await ledger.consumed(RUN, str(after), ids, before, result=after, step=step + 1, cursor=batch.cursor)
        player.live = after
        trained += [sample.episode.turns for sample in batch.samples if sample.episode is not None]
    await source.close()
    await ledger.drop_in_flight(RUN, "run_ended")
    await ledger.update_run(RUN, state=RunState.SUCCEEDED)
    ledger.close()
    verdict = check(tmp_path / "ledger.sqlite", RUN)
    assert verdict.passed, str(verdict)
    drawn = [turns for group in player.drawn.values() for turns in group]
    first = drawn[: PROMPTS * SAMPLES * STEPS]
    assert len(trained) >= 5000 and max(first) / min(first) > 90
    assert distance(trained, first) <= LARGEST_DISTANCE, "of the groups that were drawn first, all count"
    assert distance(trained, drawn) <= LARGEST_DISTANCE, "those that have not ended, too"
    assert bool(unfinished) is (staleness > 0), "batches were taken while episodes of later steps were played"

"""Groups of episodes: environments' rewards are added to those of the terms, and a failed episode is no reward."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import numpy as np
import pytest

from flotilla_coordinator.data.prompts import Prompt
from flotilla_coordinator.ledger.ledger import Ledger
from flotilla_coordinator.ledger.records import (
    Branch,
    DropReason,
    Episode,
    RunRecord,
    RunState,
    SampleState,
    TokenSpan,
)
from flotilla_coordinator.ledger.verdicts import Said, TermVerdict
from flotilla_coordinator.rollouts.batch import RolloutSample
from flotilla_coordinator.rollouts.generation import GenerationRequest
from flotilla_coordinator.rollouts.group import FinishedGroup, GroupRequest, GroupRollout
from flotilla_coordinator.rollouts.scoring import Needs, Outcome
from flotilla_core.config import RolloutConfig
from flotilla_core.config.advantages import ReinforceAdvantage
from flotilla_core.version import Version

RUN = "play-20260314-0915-7f3a"
GROUP = f"{RUN}/0/0"
PROMPT = Prompt(0, 0, "1+1=", np.array([1], np.int32), "2", {})


class Player:
    """Plays episodes that are worth their numbers, and fails some; each term of the reward is worth a tenth."""

    def __init__(self, *failing: str) -> None:
        self.failing = failing
        self.scored: list[str] = []
        self.requests: list[GenerationRequest] = []

    async def samples(self, request: GenerationRequest) -> AsyncGenerator[RolloutSample]:
        self.requests.append(request)
        for sample_id in request.sample_ids:
            number = sample_id.rpartition("/")[2]
            played = Outcome(
                float(number), verdicts=(TermVerdict("environment", value=float(number), parts={"won": 1.0}),)
            )
            if number in self.failing:
                said = TermVerdict("environment", Said.ERROR, message="division by zero")
                played = Outcome(None, "division by zero", verdicts=(said,))
            yield RolloutSample(
                sample_id,
                np.array([7], np.int32),
                np.zeros(1, np.float32),
                "7",
                (TokenSpan(request.min_version, 0, 1),),
                trained=np.ones(1, np.bool_),
                played=played,
                outcome=played if played.total is None else None,
                verdicts=played.verdicts,
                episode=Episode("completed", 1, (), "[]", (Branch(0, np.array([1], np.int32)),)),
            )

    async def needs(self) -> Needs:
        return Needs()

    async def score(self, items: list[Any]) -> dict[str, Outcome]:
        self.scored += [item.sample_id.rpartition("/")[2] for item in items]
        term = TermVerdict("exact", value=0.1)
        return {item.sample_id: Outcome(0.1, terms=(0.1,), verdicts=(term,)) for item in items}


@pytest.fixture
async def ledger(tmp_path: Path) -> AsyncIterator[Ledger]:
    ledger = Ledger.open(tmp_path / "ledger.sqlite")
    await ledger.save_run(RunRecord(RUN, "play", RunState.RUNNING, "{}\n", "", time.time()))
    yield ledger
    ledger.close()


async def run(ledger: Ledger, player: Player) -> FinishedGroup:
    config = RolloutConfig(prompts_per_step=1, samples_per_prompt=4)
    parts: Any = {"sampler": player, "scorer": player, "ledger": ledger}
    groups = GroupRollout(
        RUN, config, **parts, advantage=ReinforceAdvantage(), wait_until_verified=AsyncMock()
    )
    wanted = GroupRequest(PROMPT, GROUP, 3, Version(0, 3), 30.0, 1)
    return await groups.run(wanted, await ledger.samples(RUN, step=3))


async def test_rewards_of_the_environment_and_of_the_terms_are_added(ledger: Ledger) -> None:
    player = Player()
    finished = await run(ledger, player)
    assert [sample.reward for sample in finished.group.samples] == pytest.approx([0.1, 1.1, 2.1, 3.1])
    records = await ledger.samples(RUN)
    assert [[one.reward for one in record.verdicts] for record in records] == [["environment", "exact"]] * 4
    assert all(record.episode is not None for record in records)
    (request,) = player.requests
    assert request.prompt is PROMPT and request.world == "0/0"


async def test_a_failed_episode_is_not_scored_and_its_siblings_are_as_without_it(ledger: Ledger) -> None:
    player = Player("1")
    finished = await run(ledger, player)
    assert sorted(player.scored) == ["0", "2", "3"]
    assert [sample.reward for sample in finished.group.samples] == pytest.approx([0.1, 2.1, 3.1])
    assert [failure.failure for failure in finished.failures] == ["division by zero"]
    failed = (await ledger.samples(RUN))[1]
    assert (failed.state, failed.drop_reason) == (SampleState.DROPPED, DropReason.ENVIRONMENT_ERROR)
    assert failed.reward is None and failed.episode is not None
    assert failed.verdicts[0].message == "division by zero"


async def test_a_step_that_is_repeated_plays_no_recorded_episode_again(ledger: Ledger) -> None:
    first = await run(ledger, Player("1"))
    player = Player()
    again = await run(ledger, player)
    assert not player.requests and [failure.failure for failure in again.failures] == ["division by zero"]
    assert [one.reward for one in again.group.samples] == [one.reward for one in first.group.samples]
    assert all(one.episode is not None for one in again.group.samples)

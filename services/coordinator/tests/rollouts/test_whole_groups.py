"""Rewards that compare the samples of a group get all of them at once, and only they wait for the last one."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import numpy as np
import pytest

from flotilla_coordinator.data.prompts import Prompt
from flotilla_coordinator.ledger.ledger import Ledger
from flotilla_coordinator.ledger.records import RunRecord, RunState, SampleState, TokenSpan
from flotilla_coordinator.ledger.verdicts import Said, TermVerdict
from flotilla_coordinator.rollouts.batch import RolloutSample
from flotilla_coordinator.rollouts.generation import GenerationRequest
from flotilla_coordinator.rollouts.group import FinishedGroup, GroupRequest, GroupRollout
from flotilla_coordinator.rollouts.scoring import Needs, Outcome
from flotilla_core.config import RolloutConfig
from flotilla_core.config.advantages import AdvantageConfig, ReinforceAdvantage, RemaxAdvantage
from flotilla_core.version import Version

RUN = "rank-20260314-0915-7f3a"
GROUP = f"{RUN}/0/0"
START = Version(0, 0)


class Task:
    """Generates samples one after the other, and ranks those that it is given by their numbers."""

    def __init__(self, *, whole_groups: bool) -> None:
        self.whole_groups = whole_groups
        self.calls: list[list[str]] = []
        self.items: list[Any] = []
        self.void: set[str] = set()
        self.failing: tuple[str, ...] = ()
        self.greedy = Outcome(0.25)

    async def samples(self, request: GenerationRequest) -> AsyncGenerator[RolloutSample]:
        for sample_id in request.sample_ids:
            tokens, logprobs = np.array([7], np.int32), np.zeros(1, np.float32)
            yield RolloutSample(sample_id, tokens, logprobs, "7", (TokenSpan(request.min_version, 0, 1),))
            await asyncio.sleep(0)

    async def needs(self) -> Needs:
        return Needs(self.whole_groups, token_ids=True)

    async def score(self, items: list[Any]) -> dict[str, Outcome]:
        self.items += items
        self.calls.append([item.sample_id.removeprefix(f"{GROUP}/") for item in items])
        return {item.sample_id: self.outcome(item.sample_id, len(items)) for item in items}

    def outcome(self, sample_id: str, beside: int) -> Outcome:
        if sample_id.endswith("greedy"):
            return self.greedy
        if sample_id.endswith(self.failing):
            verdict = TermVerdict("f.py:f", Said.ERROR, message="division by zero", file="/f.py", line=3)
            return Outcome(None, "division by zero", verdicts=(verdict,))
        value = float(sample_id.rpartition("/")[2])
        return Outcome(
            value, terms=(value,), verdicts=(TermVerdict("f.py:f", value=value, parts={"of": beside}),)
        )

    def is_void(self, sample: RolloutSample) -> bool:
        return sample.sample_id in self.void and not self.void.remove(sample.sample_id)


@pytest.fixture
async def ledger(tmp_path: Path) -> AsyncIterator[Ledger]:
    ledger = Ledger.open(tmp_path / "ledger.sqlite")
    await ledger.save_run(RunRecord(RUN, "rank", RunState.RUNNING, "{}\n", "", time.time()))
    yield ledger
    ledger.close()


async def run(
    ledger: Ledger, task: Task, advantage: AdvantageConfig | None = None, lineage: int = 0
) -> FinishedGroup:
    config = RolloutConfig(prompts_per_step=1, samples_per_prompt=4)
    parts: Any = {"sampler": task, "scorer": task, "ledger": ledger, "is_void": task.is_void}
    parts["advantage"] = advantage or ReinforceAdvantage()
    groups = GroupRollout(RUN, config, **parts, wait_until_verified=AsyncMock())
    prompt = Prompt(0, 0, "1+1=", np.array([1], np.int32), "2", {})
    wanted = GroupRequest(prompt, GROUP, 3, Version(lineage, 3), 30.0, 1)
    return await groups.run(wanted, await ledger.samples(RUN, step=3))


async def test_a_group_that_is_compared_is_scored_once_and_whole(ledger: Ledger) -> None:
    task = Task(whole_groups=True)
    finished = await run(ledger, task)
    assert task.calls == [["0", "1", "2", "3"]]
    assert {item.group for item in task.items} == {GROUP} and {item.step for item in task.items} == {3}
    assert all(item.HasField("token_ids") for item in task.items)
    assert [sample.reward for sample in finished.group.samples] == [0, 1, 2, 3]
    records = await ledger.samples(RUN)
    assert [record.verdicts[0].parts for record in records] == [{"of": 4}] * 4


async def test_a_group_that_is_not_compared_is_scored_as_its_samples_end(ledger: Ledger) -> None:
    task = Task(whole_groups=False)
    await run(ledger, task)
    assert len(task.calls) > 1 and sorted(itertools.chain(*task.calls)) == ["0", "1", "2", "3"]


async def test_a_sample_of_wrong_weights_is_drawn_again_before_it_is_compared(ledger: Ledger) -> None:
    task = Task(whole_groups=True)
    task.void = {f"{GROUP}/2"}
    await run(ledger, task)
    assert [sorted(call) for call in task.calls] == [["0", "1", "2", "3"]]


async def test_what_the_ledger_has_is_compared_with_the_rest_and_keeps_its_reward(ledger: Ledger) -> None:
    task = Task(whole_groups=True)
    task.failing = ("/1",)
    finished = await run(ledger, task)
    assert [one.failure for one in finished.failures] == ["division by zero"] and finished.dropped == 1
    (lost,) = await ledger.samples(RUN, state=SampleState.DROPPED)
    assert (lost.verdicts[0].file, lost.verdicts[0].line) == ("/f.py", 3)

    await ledger.fall_back(RUN, Version(1, 0), step=3, cursor=None, retry_rewards=True)
    again = Task(whole_groups=True)
    finished = await run(ledger, again, lineage=1)
    assert again.calls == [["0", "2", "3", "1"]]
    assert [sample.verdicts[0].parts["of"] for sample in finished.group.samples] == [4, 4, 4, 4]
    assert [sample.sample_id[-1] for sample in finished.group.samples] == ["0", "1", "2", "3"]


@pytest.mark.parametrize("failed", [False, True])
async def test_the_greedy_response_is_compared_with_nothing_and_decides_as_before(
    ledger: Ledger, failed: bool
) -> None:
    task = Task(whole_groups=True)
    task.greedy = Outcome(None, "division by zero") if failed else Outcome(0.25)
    finished = await run(ledger, task, RemaxAdvantage())
    assert sorted(map(len, task.calls)) == [1, 4]
    assert {item.group for item in task.items if item.sample_id.endswith("greedy")} == {""}
    assert [sample.greedy_reward for sample in finished.group.samples] == ([] if failed else [0.25] * 4)
    assert len(finished.failures) == (4 if failed else 0)

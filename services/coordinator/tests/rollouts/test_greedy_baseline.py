"""Samples are compared with a greedy response that is no sample, and with one number however often a step is made."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import numpy as np
import pytest

from flotilla.trainer.v1 import trainer_pb2
from flotilla_coordinator.ledger.checker import check
from flotilla_coordinator.ledger.ledger import Ledger
from flotilla_coordinator.ledger.records import RunRecord, RunState, SampleState, TokenSpan
from flotilla_coordinator.ledger.verdicts import Said
from flotilla_coordinator.rollouts.batch import Batch, RolloutSample
from flotilla_coordinator.rollouts.generation import GenerationRequest
from flotilla_coordinator.rollouts.group import GroupRollout
from flotilla_coordinator.rollouts.scoring import Needs, Outcome
from flotilla_coordinator.rollouts.source import RolloutSource
from flotilla_coordinator.trainers.messages import fill
from flotilla_core.config import RolloutConfig, SamplingConfig
from flotilla_core.config.advantages import AdvantageConfig, GrpoAdvantage, RemaxAdvantage
from flotilla_core.errors import Exhausted, UserCodeError
from flotilla_core.version import Version
from flotilla_testing.ledger_counts import counts_of
from flotilla_testing.numbered_prompts import NumberedPrompts

RUN = "run-1"
SAMPLES = 2
QUARTER, MOST = Outcome(0.25), Outcome(0.75)
LIMITS = SamplingConfig(max_response_tokens=9, min_response_tokens=3)


class Task:
    """Generators and a reward: a greedy response is worth what the test says, sample n is worth n."""

    def __init__(self, greedy: Outcome = QUARTER, failing: str = "") -> None:
        self.greedy = greedy
        self.failing = failing
        self.asked: list[GenerationRequest] = []
        self.no_greedy_comes = self.no_sample_comes = False
        self.cut = 0

    async def samples(self, request: GenerationRequest) -> AsyncGenerator[RolloutSample]:
        self.asked.append(request)
        is_greedy = request.sampling.temperature == 0
        if is_greedy and self.no_greedy_comes:
            raise Exhausted("it never came back")
        if not is_greedy and self.no_sample_comes:
            try:
                await asyncio.Event().wait()
            finally:
                self.cut += 1
        for sample_id in request.sample_ids:
            tokens, logprobs = np.array([7], np.int32), np.array([-0.5], np.float32)
            yield RolloutSample(sample_id, tokens, logprobs, "7", (TokenSpan(request.min_version, 0, 1),))

    async def needs(self) -> Needs:
        return Needs()

    async def score(self, items: list[Any]) -> dict[str, Outcome]:
        return {item.sample_id: self.outcome(item.sample_id) for item in items}

    def outcome(self, sample_id: str) -> Outcome:
        if sample_id == self.failing:
            return Outcome(None, "division by zero")
        name = sample_id.rpartition("/")[2]
        return self.greedy if name == "greedy" else Outcome(float(name))

    @property
    def asked_greedily(self) -> list[str]:
        return [one.sample_ids[0] for one in self.asked if one.sampling.temperature == 0]


@pytest.fixture
async def ledger(tmp_path: Path) -> AsyncIterator[Ledger]:
    ledger = Ledger.open(tmp_path / "ledger.sqlite")
    config = "rollout: {max_staleness: 0}\n"
    await ledger.save_run(RunRecord(RUN, "run", RunState.RUNNING, config, "", time.time()))
    yield ledger
    ledger.close()


def source(ledger: Ledger, task: Task, advantage: AdvantageConfig | None = None) -> RolloutSource:
    config = RolloutConfig(
        prompts_per_step=2, samples_per_prompt=SAMPLES, sampling=LIMITS, max_reward_failure_rate=0.5
    )
    prompts: Any = NumberedPrompts()
    parts: Any = {"sampler": task, "scorer": task, "ledger": ledger}
    parts["advantage"] = advantage or RemaxAdvantage()
    groups = GroupRollout(RUN, config, **parts, wait_until_verified=AsyncMock())
    return RolloutSource(RUN, config, 4, prompts, groups, ledger)


async def batch_of(rollouts: RolloutSource, lineage: int = 0) -> Batch:
    rollouts.admit(0, Version(lineage, 0))
    return await asyncio.wait_for(rollouts.batch(0, Version(lineage, 0)), 10)


def greedy_rewards(batch: Batch) -> list[float | None]:
    return [sample.greedy_reward for sample in batch.samples]


async def made_again(ledger: Ledger, task: Task, *, retry_rewards: bool = False) -> Batch:
    """The first step once more, after its run was cut off."""
    await ledger.drop_in_flight(RUN, "run_interrupted")
    await ledger.fall_back(RUN, Version(1, 0), step=0, cursor=None, retry_rewards=retry_rewards)
    rollouts = source(ledger, task)
    await rollouts.restore(0, None)
    batch = await batch_of(rollouts, lineage=1)
    await rollouts.close()
    return batch


async def test_every_sample_carries_what_the_greedy_response_to_its_prompt_earned(ledger: Ledger) -> None:
    task = Task()
    rollouts = source(ledger, task)
    batch = await batch_of(rollouts)
    assert greedy_rewards(batch) == [0.25] * 4
    assert batch.metrics["reward/greedy_mean"] == 0.25 and batch.metrics["reward/mean"] == 0.5
    message = trainer_pb2.TrainGroup()
    fill(message, batch.groups[0])
    assert [(sample.reward, sample.greedy_reward) for sample in message.samples] == [(0.0, 0.25), (1.0, 0.25)]
    await rollouts.close()


async def test_the_greedy_response_is_asked_for_like_the_samples_beside_it(ledger: Ledger) -> None:
    task = Task()
    rollouts = source(ledger, task)
    await batch_of(rollouts)
    assert sorted(task.asked_greedily) == [f"{RUN}/0/0/greedy", f"{RUN}/0/1/greedy"]
    greedy, beside = sorted(
        (request for request in task.asked if request.prompt_token_ids[0] == 0),
        key=lambda request: request.sampling.temperature,
    )
    assert greedy.sampling == LIMITS.model_copy(update={"temperature": 0.0})
    assert beside.sampling == LIMITS
    for shared in ("min_version", "timeout_s", "max_attempts", "resume_partial", "priority", "instance_id"):
        assert getattr(greedy, shared) == getattr(beside, shared)
    await rollouts.close()


async def test_the_greedy_response_is_no_sample(ledger: Ledger) -> None:
    rollouts = source(ledger, Task())
    batch = await batch_of(rollouts)
    records = await ledger.samples(RUN)
    assert [record.sample_id for record in records] == [sample.sample_id for sample in batch.samples]
    assert counts_of(ledger.path, RUN).admitted == 4
    await rollouts.close()
    await ledger.drop_in_flight(RUN, "run_ended")
    await ledger.update_run(RUN, state=RunState.STOPPED)
    assert check(ledger.path, RUN).passed


async def test_other_advantages_ask_for_none(ledger: Ledger) -> None:
    task = Task()
    rollouts = source(ledger, task, GrpoAdvantage())
    batch = await batch_of(rollouts)
    assert task.asked_greedily == [] and greedy_rewards(batch) == [None] * 4
    assert "reward/greedy_mean" not in batch.metrics
    message = trainer_pb2.TrainGroup()
    fill(message, batch.groups[0])
    assert not any(sample.HasField("greedy_reward") for sample in message.samples)
    await rollouts.close()


async def test_a_step_that_is_made_again_compares_with_the_number_that_it_had(ledger: Ledger) -> None:
    rollouts = source(ledger, Task())
    await batch_of(rollouts)
    await rollouts.close()
    another = Task(greedy=MOST)
    assert greedy_rewards(await made_again(ledger, another)) == [0.25] * 4
    assert another.asked == []


async def test_samples_that_a_recorded_group_lacks_take_its_number(ledger: Ledger) -> None:
    rollouts = source(ledger, Task(failing=f"{RUN}/0/1/0"))
    assert len((await batch_of(rollouts)).samples) == 3
    await rollouts.close()
    another = Task(greedy=MOST)
    batch = await made_again(ledger, another, retry_rewards=True)
    assert greedy_rewards(batch) == [0.25] * 4
    assert [request.sample_ids for request in another.asked] == [(f"{RUN}/0/1/0",)]


async def test_a_group_of_which_nothing_is_recorded_gets_a_greedy_response_again(ledger: Ledger) -> None:
    task = Task()
    task.no_sample_comes = True
    rollouts = source(ledger, task)
    rollouts.admit(0, Version(0, 0))
    async with asyncio.timeout(10):
        while len(task.asked) < 4:
            await asyncio.sleep(0)
    await rollouts.close()
    another = Task(greedy=MOST)
    assert greedy_rewards(await made_again(ledger, another)) == [0.75] * 4
    assert len(another.asked_greedily) == 2


@pytest.mark.parametrize(("timed_out", "reason"), [(False, "reward_error"), (True, "reward_timeout")])
async def test_a_lost_greedy_reward_drops_its_group_for_that_reason(
    ledger: Ledger, timed_out: bool, reason: str
) -> None:
    class OneFails(Task):
        def outcome(self, sample_id: str) -> Outcome:
            failed = Outcome(None, "too slow", timed_out=timed_out)
            return failed if sample_id == f"{RUN}/0/1/greedy" else super().outcome(sample_id)

    rollouts = source(ledger, OneFails())
    batch = await batch_of(rollouts)
    assert [group.group_id for group in batch.groups] == [f"{RUN}/0/0"]
    rates = {False: "reward/error_rate", True: "reward/timeout_rate"}
    assert (batch.metrics[rates[timed_out]], batch.metrics[rates[not timed_out]]) == (0.5, 0.0)
    assert batch.metrics["samples/dropped"] == SAMPLES
    dropped = await ledger.samples(RUN, state=SampleState.DROPPED)
    assert {record.sample_id: record.drop_reason for record in dropped} == {
        f"{RUN}/0/1/{index}": reason for index in range(SAMPLES)
    }
    told = [(verdict.outcome, verdict.message) for record in dropped for verdict in record.verdicts]
    kind = Said.TIMEOUT if timed_out else Said.ERROR
    assert told == [(kind, "the greedy response to its prompt: too slow")] * SAMPLES
    assert [record.token_ids is not None and record.token_ids.tolist() for record in dropped] == [
        [7]
    ] * SAMPLES
    await rollouts.close()

    unasked = Task()
    again = await made_again(ledger, unasked)
    assert again.metrics[rates[timed_out]] == 0.5 and unasked.asked == [], "it failed, and stays so"
    mended = await made_again_by_its_user(ledger)
    assert greedy_rewards(mended) == [0.25, 0.25, 0.75, 0.75]


async def test_an_unverifiable_greedy_response_drops_its_group_and_is_counted_of_no_sample(
    ledger: Ledger,
) -> None:
    class OneBreaks(Task):
        def outcome(self, sample_id: str) -> Outcome:
            broken = Outcome(None, "endless", unverifiable=True)
            return broken if sample_id == f"{RUN}/0/1/greedy" else super().outcome(sample_id)

    rollouts = source(ledger, OneBreaks())
    batch = await batch_of(rollouts)
    assert batch.metrics["reward/unverifiable_rate"] == 0 and batch.metrics["reward/error_rate"] == 0
    dropped = await ledger.samples(RUN, state=SampleState.DROPPED)
    assert [record.drop_reason for record in dropped] == ["unverifiable"] * SAMPLES
    assert all("the greedy response" in record.verdicts[-1].message for record in dropped)
    await rollouts.close()


async def made_again_by_its_user(ledger: Ledger) -> Batch:
    """A user who resumes may have fixed the reward: its failed samples are drawn again, with the greedy response."""
    return await made_again(ledger, Task(greedy=MOST), retry_rewards=True)


async def test_greedy_rewards_that_all_fail_end_the_run_with_what_they_failed_on(ledger: Ledger) -> None:
    rollouts = source(ledger, Task(greedy=Outcome(None, "division by zero")))
    with pytest.raises(
        UserCodeError, match=r"4 samples of step 0.*the greedy response to its prompt: division"
    ):
        await batch_of(rollouts)
    await rollouts.close()


async def test_a_greedy_response_that_never_comes_ends_the_step_and_what_waits_beside_it(
    ledger: Ledger,
) -> None:
    task = Task()
    task.no_greedy_comes = task.no_sample_comes = True
    rollouts = source(ledger, task)
    with pytest.raises(Exhausted):
        await batch_of(rollouts)
    # The other group may have been cut off before it was recorded, and then asks for nothing.
    waited = len(task.asked) - len(task.asked_greedily)
    assert task.cut == waited >= 1
    await rollouts.close()

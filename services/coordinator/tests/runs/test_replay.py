"""A run that goes on trains the samples that it had, in their order, and asks for the missing ones alone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import numpy as np
import pytest

from flotilla_coordinator.ledger.checker import check
from flotilla_coordinator.ledger.ledger import Ledger
from flotilla_coordinator.ledger.records import RunRecord, RunState, SampleState, TokenSpan
from flotilla_coordinator.ledger.verdicts import Said, TermVerdict
from flotilla_coordinator.rollouts.batch import Batch, RolloutSample
from flotilla_coordinator.rollouts.generation import GenerationRequest
from flotilla_coordinator.rollouts.group import GroupRollout
from flotilla_coordinator.rollouts.scoring import Needs, Outcome
from flotilla_coordinator.rollouts.source import RolloutSource
from flotilla_coordinator.runs.client.sampling import ClientSource
from flotilla_core.config import RolloutConfig
from flotilla_core.config.advantages import GrpoAdvantage
from flotilla_core.errors import FailedPrecondition, UserCodeError
from flotilla_core.version import Version
from flotilla_testing.ledger_counts import counts_of
from flotilla_testing.numbered_prompts import NumberedPrompts

RUN = "run-1"
STEPS = 6


class Generation:
    """Answers with the sample's number; silent from a prompt on, where a test says so."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.silent_from = 1000

    async def samples(self, request: GenerationRequest) -> AsyncGenerator[RolloutSample]:
        for sample_id in request.sample_ids:
            self.asked.append(sample_id)
            prompt = int(sample_id.split("/")[2])
            if prompt >= self.silent_from and not sample_id.endswith("/0"):
                await asyncio.Event().wait()
            version = request.min_version
            tokens = np.array([prompt, 7 + version.lineage], np.int32)
            logprobs = np.array([-0.5, -0.25], np.float32)
            yield RolloutSample(sample_id, tokens, logprobs, str(tokens), (TokenSpan(version, 0, 2),))


class Scorer:
    """Every sample is worth 1; those that a test names fail."""

    def __init__(self) -> None:
        self.broken_for: tuple[str, ...] = ()

    async def needs(self) -> Needs:
        return Needs()

    async def score(self, items: list[Any]) -> dict[str, Outcome]:
        return {
            item.sample_id: Outcome(None, "division by zero", traceback="line 7, in reward\n")
            if item.sample_id.endswith(self.broken_for)
            else Outcome(1.0)
            for item in items
        }


@pytest.fixture
async def ledger(tmp_path: Path) -> AsyncIterator[Ledger]:
    ledger = Ledger.open(tmp_path / "ledger.sqlite")
    config = "rollout: {max_staleness: 1}\n"
    await ledger.save_run(RunRecord(RUN, "run", RunState.RUNNING, config, str(tmp_path), time.time()))
    yield ledger
    ledger.close()


def settings(max_staleness: int = 1) -> RolloutConfig:
    return RolloutConfig(prompts_per_step=2, samples_per_prompt=3, max_staleness=max_staleness)


def source(
    ledger: Ledger,
    generation: Generation,
    scorer: Scorer | None = None,
    config: RolloutConfig | None = None,
    prompts: Any = None,
) -> RolloutSource:
    config = config or settings()
    prompts = prompts or NumberedPrompts()
    parts: Any = {"sampler": generation, "scorer": scorer or Scorer(), "ledger": ledger}
    groups = GroupRollout(RUN, config, **parts, advantage=GrpoAdvantage(), wait_until_verified=AsyncMock())
    return RolloutSource(RUN, config, STEPS, prompts, groups, ledger)


async def train(rollouts: RolloutSource, ledger: Ledger, step: int, lineage: int) -> Batch:
    before, after = Version(lineage, step), Version(lineage, step + 1)
    rollouts.admit(step, before)
    batch = await asyncio.wait_for(rollouts.batch(step, before), 5)
    ids = [sample.sample_id for sample in batch.samples]
    await ledger.consumed(
        RUN, f"{RUN}/{after}", ids, before, result=after, step=step + 1, cursor=batch.cursor
    )
    return batch


async def scored(ledger: Ledger, step: int) -> None:
    """Wait until all samples of a step that runs ahead are."""
    async with asyncio.timeout(5):
        while len(await ledger.samples(RUN, step=step, state=SampleState.SCORED)) < 6:
            await asyncio.sleep(0.001)


def content(batch: Batch) -> list[tuple[Any, ...]]:
    return [
        (sample.sample_id, sample.token_ids.tolist(), sample.logprobs.tolist(), sample.reward, sample.spans)
        for sample in batch.samples
        if sample.logprobs is not None
    ]


async def test_recorded_samples_train_again_in_their_order_and_missing_ones_are_asked_for(
    ledger: Ledger, tmp_path: Path
) -> None:
    generation = Generation()
    rollouts = source(ledger, generation)
    batches = [await train(rollouts, ledger, step, 0) for step in range(4)]
    await rollouts.close()

    # Of step 4, admitted with step 3, every sample of prompt 8 and none of prompt 9 may be there: cut it in between.
    await ledger.drop_in_flight(RUN, "run_interrupted")
    known = {record.sample_id: record.state.name for record in await ledger.samples(RUN, step=4)}

    again = Generation()
    rollouts = source(ledger, again)
    await ledger.fall_back(RUN, Version(1, 2), step=2, cursor=batches[1].cursor)
    await rollouts.restore(2, batches[1].cursor)
    replayed = [await train(rollouts, ledger, step, 1) for step in (2, 3)]
    assert [content(batch) for batch in replayed] == [content(batch) for batch in batches[2:]]
    assert {batch.cursor["position"] for batch in replayed} == {10}, "behind all that the ledger has"

    last = [await train(rollouts, ledger, step, 1) for step in (4, 5)]
    assert [sample.sample_id for sample in last[0].samples] == sorted(known)
    assert [sample.sample_id.split("/")[2] for sample in last[1].samples] == ["10"] * 3 + ["11"] * 3
    assert not {sample_id for sample_id in again.asked if int(sample_id.split("/")[2]) < 8}
    await rollouts.close()
    await ledger.drop_in_flight(RUN, "run_ended")
    await ledger.update_run(RUN, state=RunState.SUCCEEDED)
    verdict = check(tmp_path / "ledger.sqlite", RUN)
    assert verdict.passed and verdict.trained == STEPS * 6, str(verdict)


async def test_a_group_that_was_cut_in_the_middle_keeps_its_ids(ledger: Ledger, tmp_path: Path) -> None:
    generation = Generation()
    generation.silent_from = 2
    rollouts = source(ledger, generation)
    first = await train(rollouts, ledger, 0, 0)
    async with asyncio.timeout(5):
        while len(generation.asked) < 6 + 4:  # two samples of each silent group
            await asyncio.sleep(0.001)
    await rollouts.close()
    await ledger.drop_in_flight(RUN, "run_ended")

    again = Generation()
    rollouts = source(ledger, again)
    await ledger.fall_back(RUN, Version(1, 0), step=0, cursor=None)
    await rollouts.restore(0, None)
    assert content(await train(rollouts, ledger, 0, 1)) == content(first)
    second = await train(rollouts, ledger, 1, 1)
    assert [sample.sample_id for sample in second.samples] == [
        f"{RUN}/0/{p}/{i}" for p in (2, 3) for i in range(3)
    ]
    assert counts_of(ledger.path, RUN) and counts_of(ledger.path, RUN).admitted == 3 * 6
    await rollouts.close()
    await ledger.drop_in_flight(RUN, "run_ended")
    await ledger.update_run(RUN, state=RunState.STOPPED)
    assert check(tmp_path / "ledger.sqlite", RUN).passed


async def test_step_tells_why_some_of_its_samples_have_no_reward(ledger: Ledger) -> None:
    scorer = Scorer()
    scorer.broken_for = ("/0/0/1",)
    rollouts = source(ledger, Generation(), scorer)
    batch = await train(rollouts, ledger, 0, 0)
    says = "1 of 6 samples of step 0 could not be scored: division by zero\nline 7, in reward\n"
    assert (batch.unscored, len(batch.samples)) == (says, 5)
    assert not (await train(rollouts, ledger, 1, 0)).unscored
    await rollouts.close()


async def test_a_step_that_is_made_again_counts_the_unverifiable_samples_that_it_had(ledger: Ledger) -> None:
    class OneBreaks(Scorer):
        async def score(self, items: list[Any]) -> dict[str, Outcome]:
            outcomes = await super().score(items)
            verdicts = (TermVerdict("math", Said.UNVERIFIABLE, message="endless"),)
            broken = Outcome(None, "endless", unverifiable=True, verdicts=verdicts)
            return outcomes | {one: broken for one in outcomes if one.endswith("/0/0/1")}

    rollouts = source(ledger, Generation(), OneBreaks())
    first = await train(rollouts, ledger, 0, 0)
    await rollouts.close()
    await ledger.drop_in_flight(RUN, "run_interrupted")
    rollouts = source(ledger, Generation())
    await ledger.fall_back(RUN, Version(1, 0), step=0, cursor=None)
    await rollouts.restore(0, None)
    again = await train(rollouts, ledger, 0, 1)
    assert len(again.samples) == len(first.samples) == 5
    rates = [batch.metrics["reward/unverifiable_rate"] for batch in (first, again)]
    assert rates == [pytest.approx(1 / 6)] * 2
    await rollouts.close()


async def test_a_run_whose_reward_was_mended_is_resumed_and_one_that_was_not_fails_again(
    ledger: Ledger,
) -> None:
    scorer = Scorer()
    scorer.broken_for = ("/0", "/1")
    rollouts = source(ledger, Generation(), scorer)
    with pytest.raises(UserCodeError, match="4 samples of step 0 could not be scored") as failed:
        await train(rollouts, ledger, 0, 0)
    assert "division by zero\nline 7, in reward\n" in str(failed.value)
    await rollouts.close()
    await ledger.drop_in_flight(RUN, "run_ended")

    # Nobody asked for another try: what failed is recorded, and is too much as it was before.
    unchanged = Generation()
    rollouts = source(ledger, unchanged, scorer)
    await ledger.fall_back(RUN, Version(1, 0), step=0, cursor=None)
    await rollouts.restore(0, None)
    with pytest.raises(UserCodeError, match="4 samples of step 0 could not be scored"):
        await train(rollouts, ledger, 0, 1)
    await rollouts.close()
    await ledger.drop_in_flight(RUN, "run_ended")
    assert not {f"{RUN}/0/{prompt}/{index}" for prompt in (0, 1) for index in (0, 1)} & set(unchanged.asked)

    rollouts = source(ledger, Generation())
    await ledger.fall_back(RUN, Version(2, 0), step=0, cursor=None, retry_rewards=True)
    await rollouts.restore(0, None)
    batch = await train(rollouts, ledger, 0, 2)
    assert [sample.sample_id for sample in batch.samples] == [
        f"{RUN}/0/{prompt}/{index}" for prompt in (0, 1) for index in range(3)
    ]
    await rollouts.close()


async def test_what_was_admitted_by_a_wider_bound_trains_under_it_once_more(ledger: Ledger) -> None:
    rollouts = source(ledger, Generation())
    batches = [await train(rollouts, ledger, step, 0) for step in range(2)]
    await scored(ledger, step=2)
    await rollouts.close()
    await ledger.drop_in_flight(RUN, "run_ended")

    # The samples of steps 1 and 2 are a version older than their updates; the bound of now is 0.
    again = Generation()
    rollouts = source(ledger, again, config=settings(max_staleness=0))
    await ledger.fall_back(RUN, Version(1, 1), step=1, cursor=batches[0].cursor)
    await rollouts.restore(1, batches[0].cursor)
    replayed = [await train(rollouts, ledger, step, 1) for step in (1, 2)]
    assert content(replayed[0]) == content(batches[1])
    assert [batch.metrics["staleness/max"] for batch in replayed] == [1, 1] and not again.asked
    # What is drawn from now on goes by the new one.
    assert (await train(rollouts, ledger, 3, 1)).metrics["staleness/max"] == 0
    await rollouts.close()


async def test_samples_that_became_too_old_are_asked_for_again(ledger: Ledger) -> None:
    rollouts = source(ledger, Generation())
    rollouts.admit(0, Version(0, 0))
    with pytest.raises(FailedPrecondition, match="every sample of step 1 is older than its bound"):
        await rollouts.batch(1, Version(0, 2))
    await rollouts.close()
    await ledger.drop_in_flight(RUN, "run_ended")

    again = Generation()
    rollouts = source(ledger, again)
    await ledger.fall_back(RUN, Version(1, 2), step=1, cursor=None)
    await rollouts.restore(1, None)
    rollouts.admit(1, Version(1, 2))
    batch = await asyncio.wait_for(rollouts.batch(1, Version(1, 2)), 5)
    assert {sample.sample_id for sample in batch.samples} <= set(again.asked) and len(batch.samples) == 6
    await rollouts.close()


async def test_samples_never_train_as_answers_to_other_prompts(ledger: Ledger) -> None:
    class Edited(NumberedPrompts):
        def known(self, epoch: int, index: int) -> Any:
            prompt = super().known(epoch, index)
            prompt.token_ids = prompt.token_ids + 500
            return prompt

    rollouts = source(ledger, Generation())
    await train(rollouts, ledger, 0, 0)
    await rollouts.close()
    await ledger.drop_in_flight(RUN, "run_ended")

    # Before its first checkpoint a run has no place in the data that would tell them apart.
    await ledger.fall_back(RUN, Version(1, 0), step=0, cursor=None)
    rollouts = source(ledger, Generation(), prompts=Edited())
    with pytest.raises(FailedPrecondition, match="does not fit the data"):
        await rollouts.restore(0, None)
    await rollouts.close()


async def test_a_new_run_replays_nothing(ledger: Ledger) -> None:
    generation = Generation()
    rollouts = source(ledger, generation)
    batch = await train(rollouts, ledger, 0, 0)
    assert {sample.sample_id for sample in batch.samples} <= set(generation.asked)
    await rollouts.close()


async def test_a_client_that_goes_on_draws_what_comes_behind_its_checkpoint() -> None:
    prompts: Any = NumberedPrompts()
    client = ClientSource(prompts)
    await client.restore(0, None)
    assert prompts.next().index == 0
    await client.restore(3, {"position": 7})
    assert prompts.next().index == 7
    await client.close()

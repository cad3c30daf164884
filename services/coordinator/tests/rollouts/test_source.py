"""A batch is made of groups that can be learned from and that end first; a repeated step has the same batch."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flotilla_coordinator.data.prompt_source import PromptSource
from flotilla_coordinator.data.prompts import Prompt, PromptFile
from flotilla_coordinator.ledger.checker import check
from flotilla_coordinator.ledger.ledger import Ledger
from flotilla_coordinator.ledger.records import RunRecord, RunState, SampleState, TokenSpan, TurnRecord
from flotilla_coordinator.rollouts.batch import Batch, RolloutSample
from flotilla_coordinator.rollouts.generation import GenerationRequest
from flotilla_coordinator.rollouts.group import GroupRollout
from flotilla_coordinator.rollouts.scoring import Needs, Outcome
from flotilla_coordinator.rollouts.source import RolloutSource
from flotilla_core.config import DataConfig, DynamicSamplingConfig, RolloutConfig
from flotilla_core.config.advantages import GrpoAdvantage
from flotilla_core.errors import FailedPrecondition
from flotilla_core.ids import prompt_of_group
from flotilla_core.version import Version
from flotilla_testing.numbered_prompts import NumberedPrompts

RUN = "run-1"
SAMPLES = 2
TIMEOUT_S = 30.0


class Task:
    """Generators and a reward: some prompts are slow, and some teach nothing."""

    def __init__(
        self,
        uniform: set[int] | None = None,
        slow: set[int] | None = None,
        turns: int = 0,
        solved: set[int] | None = None,
    ) -> None:
        self.uniform = uniform or set()
        self.solved = solved or set()
        self.slow = slow or set()
        self.turns = random.Random(turns) if turns else None
        self.writer = "a-1"
        self.asked: list[int] = []
        self.resumed: set[int] = set()
        """Prompts whose samples had turns to go on with."""
        self.cut: list[int] = []
        self.free = asyncio.Event()

    async def samples(self, request: GenerationRequest) -> AsyncGenerator[RolloutSample]:
        prompt = int(request.prompt_token_ids[0])
        self.asked.append(prompt)
        self.resumed |= {prompt_of(sample_id) for sample_id in request.turns or ()}
        try:
            if prompt in self.slow:
                await self.free.wait()
            for _ in range(self.turns.randrange(40) if self.turns else 0):
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.cut.append(prompt)
            raise
        for sample_id in request.sample_ids:
            tokens = np.array([prompt, request.min_version.lineage], np.int32)
            logprobs = np.array([-0.5, -0.25], np.float32)
            spans = (TokenSpan(request.min_version, 0, 2),)
            sample = RolloutSample(sample_id, tokens, logprobs, str(tokens), spans)
            sample.instance_ids = frozenset({self.writer})
            yield sample

    async def needs(self) -> Needs:
        return Needs()

    async def score(self, items: list[Any]) -> dict[str, Outcome]:
        outcomes = {}
        for item in items:
            prompt, number = map(int, item.sample_id.split("/")[-2:])
            reward = 0.0 if prompt in self.uniform else 1.0 if prompt in self.solved else float(number)
            outcomes[item.sample_id] = Outcome(reward)
        return outcomes


class Run:
    """A run on a real ledger, which can be cut off and go on."""

    def __init__(self, ledger: Ledger, steps: int, rows: int = 0, **rollout: Any) -> None:
        self.ledger = ledger
        self.steps = steps
        self.rows = rows
        """The epochs of a data set whose solved prompts rest; 0 is a data set without end."""
        self.config = RolloutConfig(samples_per_prompt=SAMPLES, **rollout)
        self.batches: dict[int, Batch] = {}
        self.lineage = 0
        self.passed = asyncio.Event()
        """The live check of every version."""
        self.passed.set()
        self.wrong: set[str] = set()
        """Instances that the check finds to decode with other weights."""

        self.asked: list[Version] = []
        """Versions whose live check a group waited for."""

    async def wait_until_verified(self, version: Version) -> None:
        self.asked.append(version)
        await self.passed.wait()

    async def begin(self, task: Task, at: int | None = None) -> None:
        """Begin at the start of the run, or again after `at` steps."""
        prompts: Any = resting_prompts(self.rows) if self.rows else NumberedPrompts()
        parts: Any = {"sampler": task, "scorer": task}
        groups = GroupRollout(
            RUN,
            self.config,
            **parts,
            ledger=self.ledger,
            advantage=GrpoAdvantage(),
            wait_until_verified=self.wait_until_verified,
            is_void=lambda sample: bool(sample.instance_ids & self.wrong),
        )
        self.source = RolloutSource(RUN, self.config, self.steps, prompts, groups, self.ledger)
        if at is not None:
            self.lineage += 1
            cursor = self.batches[at - 1].cursor if at else None
            await self.ledger.fall_back(RUN, Version(self.lineage, at), step=at, cursor=cursor)
            await self.source.restore(at, cursor)

    async def train(self, step: int) -> Batch:
        before, after = Version(self.lineage, step), Version(self.lineage, step + 1)
        self.source.admit(step, before)
        batch = await asyncio.wait_for(self.source.batch(step, before), TIMEOUT_S)
        await self.ledger.consumed(
            RUN,
            f"{RUN}/{after}",
            [sample.sample_id for sample in batch.samples],
            before,
            result=after,
            step=step + 1,
            cursor=batch.cursor,
        )
        self.batches[step] = batch
        return batch

    async def cut_off(self) -> None:
        await self.source.close()
        await self.ledger.drop_in_flight(RUN, "run_interrupted")

    async def end(self) -> None:
        await self.source.close()
        await self.ledger.drop_in_flight(RUN, "run_ended")
        await self.ledger.update_run(RUN, state=RunState.SUCCEEDED)
        verdict = check(self.ledger.path, RUN)
        assert verdict.passed, str(verdict)

    async def ended(self, prompt: int) -> None:
        """Wait until the ledger has the samples of a prompt."""
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                records = await self.ledger.samples(RUN, state=SampleState.SCORED, limit=1000)
                if sum(prompt_of(record.sample_id) == prompt for record in records) == SAMPLES:
                    return
                await asyncio.sleep(0.001)

    async def dropped(self, reason: str) -> list[int]:
        records = await self.ledger.samples(RUN, state=SampleState.DROPPED, limit=1000)
        return sorted({prompt_of(r.sample_id) for r in records if r.drop_reason == reason})


def resting_prompts(rows: int) -> PromptSource:
    def load(path: Path, config: DataConfig, tokenizer: Any) -> PromptFile:
        tokens = [np.array([index], dtype=np.int32) for index in range(rows)]
        prompts = [Prompt(0, index, "", tokens[index], "", {}) for index in range(rows)]
        return PromptFile(prompts, dropped=0, truncated=0)

    unread: Any = None
    return PromptSource(DataConfig(train=Path("sums.jsonl"), rest_epochs=3), unread, 7, load)


def drawn_of(batch: Batch) -> list[tuple[int, int]]:
    return [prompt_of_group(group.group_id) for group in batch.groups]


def resting(batch: Batch) -> float:
    return batch.metrics["data/resting"]


def prompt_of(sample_id: str) -> int:
    return int(sample_id.split("/")[-2])


def prompts(batch: Batch) -> list[int]:
    return [prompt_of(group.samples[0].sample_id) for group in batch.groups]


def content(batch: Batch) -> list[tuple[Any, ...]]:
    return [
        (sample.sample_id, sample.token_ids.tolist(), sample.reward, sample.spans) for sample in batch.samples
    ]


@pytest.fixture
async def ledger(tmp_path: Path) -> AsyncIterator[Ledger]:
    ledger = Ledger.open(tmp_path / "ledger.sqlite")
    yield ledger
    ledger.close()


async def started(ledger: Ledger, task: Task, steps: int = 6, rows: int = 0, **rollout: Any) -> Run:
    written = f"rollout: {{max_staleness: {rollout.get('max_staleness', 0)}}}\n"
    await ledger.save_run(RunRecord(RUN, "run", RunState.RUNNING, written, "", time.time()))
    run = Run(ledger, steps, rows, **rollout)
    await run.begin(task)
    return run


async def test_groups_of_equal_rewards_are_replaced_by_the_next_prompts(ledger: Ledger) -> None:
    task = Task(uniform={0, 2, 4})
    run = await started(ledger, task, prompts_per_step=3, dynamic_sampling=DynamicSamplingConfig())
    batch = await run.train(0)
    assert prompts(batch) == [1, 3, 5]
    assert batch.metrics["rollout/ended_groups"] == 6 and batch.metrics["rollout/uniform_groups"] == 3
    assert batch.metrics["reward/uniform_groups"] == 0
    assert prompts(await run.train(1)) == [6, 7, 8]
    assert await run.dropped("uniform") == [0, 2, 4]
    await run.end()


async def test_what_ended_before_its_version_passed_the_live_check_is_not_recorded(ledger: Ledger) -> None:
    run = await started(ledger, Task(), prompts_per_step=2)
    run.passed.clear()
    training = asyncio.create_task(run.train(0))
    async with asyncio.timeout(TIMEOUT_S):
        while len(run.asked) < 2:
            await asyncio.sleep(0)
    assert set(run.asked) == {Version(0, 0)}
    assert not await ledger.samples(RUN, state=SampleState.SCORED, limit=1000)
    run.passed.set()
    assert prompts(await training) == [0, 1]
    await run.end()


async def test_samples_of_a_member_with_wrong_weights_are_drawn_again(ledger: Ledger) -> None:
    task = Task()
    run = await started(ledger, task, prompts_per_step=2)
    run.passed.clear()
    task.writer = "b-1"
    training = asyncio.create_task(run.train(0))
    async with asyncio.timeout(TIMEOUT_S):
        while len(run.asked) < 2:
            await asyncio.sleep(0)
    run.wrong.add("b-1")
    task.writer = "a-1"
    run.passed.set()
    batch = await training
    assert prompts(batch) == [0, 1] and sorted(task.asked)[:4] == [0, 0, 1, 1]
    assert {who for sample in batch.samples for who in sample.instance_ids} == {"a-1"}
    await run.end()


async def test_a_step_that_drew_its_limit_trains_what_teaches(ledger: Ledger) -> None:
    task = Task(uniform={0, 1, 2, 4})
    dynamic = DynamicSamplingConfig(max_prompts_per_step=5)
    run = await started(ledger, task, prompts_per_step=3, dynamic_sampling=dynamic)
    assert prompts(await run.train(0)) == [3]
    assert task.asked == [0, 1, 2, 3, 4]
    await run.end()


async def test_a_step_that_teaches_nothing_ends_the_run_with_the_reason(ledger: Ledger) -> None:
    dynamic = DynamicSamplingConfig(max_prompts_per_step=4)
    run = await started(ledger, Task(uniform=set(range(9))), prompts_per_step=2, dynamic_sampling=dynamic)
    with pytest.raises(
        FailedPrecondition, match=r"no group of step 0 teaches anything.*within 4 of the 4 groups"
    ):
        await run.train(0)
    await run.end()


async def test_a_batch_is_made_of_the_groups_that_end_first_and_slow_ones_wait_for_the_next(
    ledger: Ledger,
) -> None:
    task = Task(slow={1})
    run = await started(ledger, task, prompts_per_step=4, over_issue=0.25, max_staleness=1)
    assert prompts(await run.train(0)) == [0, 2, 3, 4]
    task.free.set()
    await run.ended(1)
    batch = await run.train(1)
    assert prompts(batch) == [1, 5, 6, 7], "the one that waited comes first"
    assert task.cut == []
    assert batch.metrics["rollout/tails"] == 0
    await run.end()


@pytest.mark.parametrize(("over_issue", "staleness", "spare"), [(0.5, 2, 2), (1.0, 1, 4), (0.75, 4, 3)])
async def test_so_many_groups_are_left_over_in_every_step_and_never_more(
    ledger: Ledger, over_issue: float, staleness: int, spare: int
) -> None:
    task = Task()
    run = await started(
        ledger, task, steps=9, prompts_per_step=4, over_issue=over_issue, max_staleness=staleness
    )
    for step in range(4):
        await run.train(step)
        assert len(task.asked) == 4 * (step + staleness) + spare
    await run.end()


async def test_on_policy_what_does_not_end_in_time_is_given_up(ledger: Ledger) -> None:
    task = Task(slow={0, 3})
    run = await started(ledger, task, prompts_per_step=2, over_issue=1.0)
    assert prompts(await run.train(0)) == [1, 2]
    assert sorted(task.cut) == [0, 3] == await run.dropped("tail")
    assert prompts(await run.train(1)) == [4, 5]
    assert await run.dropped("tail") == [0, 3, 6, 7]
    await run.end()


async def test_a_group_waits_no_longer_than_its_samples_may_be_old(ledger: Ledger) -> None:
    task = Task(slow={0})
    run = await started(ledger, task, prompts_per_step=2, over_issue=0.5, max_staleness=1)
    await run.train(0)
    assert task.cut == []
    await run.train(1)
    assert task.cut == [0] == await run.dropped("tail"), (
        "it was admitted by the version before the first step"
    )
    await run.end()


@pytest.mark.parametrize("seed", range(8))
async def test_steps_that_are_made_again_have_the_batches_that_they_had(ledger: Ledger, seed: int) -> None:
    chance = random.Random(seed)
    rollout: dict[str, Any] = {
        "prompts_per_step": 3,
        "max_staleness": seed % 3,
        "over_issue": chance.choice([0.0, 0.4, 1.0]),
        "dynamic_sampling": chance.choice([None, DynamicSamplingConfig()]),
    }
    uniform = {prompt for prompt in range(200) if chance.random() < 0.4}
    run = await started(ledger, Task(uniform, turns=seed + 1), steps=8, **rollout)
    done = 0
    for _ in range(3):  # twice cut off and gone on from an earlier step, then to the end
        for step in range(done, min(8, done + chance.randrange(2, 5))):
            await run.train(step)
            done = step + 1
        run.source.admit(done, Version(run.lineage, done)) if done < 8 else None
        await asyncio.sleep(0)
        await run.cut_off()
        trained = {step: content(batch) for step, batch in run.batches.items()}
        fresh = Task(uniform, turns=chance.randrange(1, 1000))
        again = chance.randrange(done + 1)
        await run.begin(fresh, at=again)
        for step in range(again, done):
            assert content(await run.train(step)) == trained[step], f"step {step} with {rollout}"
        recorded = {prompt_of(sample_id) for batch in trained.values() for sample_id, *_ in batch}
        assert not recorded & set(fresh.asked), "what was trained is never asked for again"
    for step in range(done, 8):
        await run.train(step)
    drawn = [prompt for batch in run.batches.values() for prompt in prompts(batch)]
    assert len(set(drawn)) == len(drawn), "no prompt trains twice"
    await run.end()


@pytest.mark.parametrize(
    ("over_issue", "resumed"),
    [(0.0, {0, 1, 3}), (0.5, {1, 3})],
    ids=["to the end of the bound", "no older than the version that a group which may wait counts from"],
)
async def test_turns_go_on_after_a_death_by_their_age_in_versions_which_lag_behind_steps(
    ledger: Ledger, over_issue: float, resumed: set[int]
) -> None:
    rollout: dict[str, Any] = {"prompts_per_step": 2, "max_staleness": 2, "over_issue": over_issue}
    run = await started(ledger, Task(slow=set(range(99))), steps=90, **rollout)
    await run.source.restore(40, None)
    run.source.admit(40, Version(0, 8))  # 32 steps made no version
    await ledger.beat()
    ages = {0: 1, 1: 0, 2: 3, 3: 0}
    for prompt, age in ages.items():
        spans = (TokenSpan(Version(0, 8 - age), 0, 1),)
        tokens, logprobs = np.array([5], np.int32), np.zeros(1, np.float32)
        ledger.turn_written(
            TurnRecord(f"{RUN}/0/{prompt}/0", 0, 7, 0, b"", tokens, logprobs, spans, "", False, "")
        )
    await ledger.beat()
    await run.source.close()
    again = Task(slow=set(range(99)))
    await run.begin(again)
    await run.source.restore(40, None)
    run.source.admit(40, Version(0, 8))
    async with asyncio.timeout(TIMEOUT_S):
        while not set(ages) <= set(again.asked):
            await asyncio.sleep(0)
    assert again.resumed == resumed
    await run.source.close()


async def test_solved_prompts_rest_and_come_back(ledger: Ledger) -> None:
    task = Task(solved={0, 1, 2, 3})
    run = await started(ledger, task, steps=12, rows=6, prompts_per_step=2)
    batches = [await run.train(step) for step in range(12)]
    asked = [place for batch in batches for place in drawn_of(batch)]
    epochs = [sorted(index for of, index in asked if of == epoch) for epoch in range(6)]
    # Solved once they rest for one epoch, solved twice in a row for three, which is the most here.
    assert epochs == [[0, 1, 2, 3, 4, 5], [4, 5], [0, 1, 2, 3, 4, 5], [4, 5], [4, 5], [4, 5]]
    assert batches[2].metrics["data/resting"] == pytest.approx(4 / 6)
    await run.end()


async def test_a_prompt_that_is_missed_again_rests_no_more(ledger: Ledger) -> None:
    task = Task(solved={0, 1})
    run = await started(ledger, task, steps=8, rows=4, prompts_per_step=2)
    for step in range(3):
        await run.train(step)
    task.solved = set()
    drawn = [place for step in range(3, 8) for place in drawn_of(await run.train(step))]
    assert [sum(of == epoch for of, _ in drawn) for epoch in (2, 3)] == [4, 4]
    await run.end()


@pytest.mark.parametrize("seed", range(12))
async def test_a_run_that_goes_on_lets_the_same_prompts_rest(ledger: Ledger, seed: int) -> None:
    chance = random.Random(seed)
    staleness = seed % 3
    rollout: dict[str, Any] = {"prompts_per_step": 3, "max_staleness": staleness}
    rollout["over_issue"] = chance.choice([0.0, 0.4]) if staleness else 0.0
    solved = {prompt for prompt in range(17) if chance.random() < 0.6}
    run = await started(ledger, Task(solved=solved, turns=seed + 1), steps=14, rows=17, **rollout)
    done = 0
    for _ in range(3):
        for step in range(done, min(14, done + chance.randrange(3, 6))):
            await run.train(step)
            done = step + 1
        run.source.admit(done, Version(run.lineage, done)) if done < 14 else None
        await asyncio.sleep(0)
        await run.cut_off()
        trained = {step: (content(batch), resting(batch)) for step, batch in run.batches.items()}
        again = chance.randrange(done + 1)
        await run.begin(Task(solved=solved, turns=chance.randrange(1, 1000)), at=again)
        for step in range(again, done):
            batch = await run.train(step)
            assert (content(batch), resting(batch)) == trained[step], f"step {step} with {rollout}"
    for step in range(done, 14):
        await run.train(step)
    drawn = [place for step in range(14) for place in drawn_of(run.batches[step])]
    assert len(set(drawn)) == len(drawn), "no prompt trains twice in one epoch"
    if not rollout["over_issue"]:
        assert drawn == await uninterrupted(ledger.path.with_name("whole.sqlite"), solved, rollout)
    await run.end()


async def uninterrupted(path: Path, solved: set[int], rollout: dict[str, Any]) -> list[tuple[int, int]]:
    ledger = Ledger.open(path)
    try:
        run = await started(ledger, Task(solved=solved), steps=14, rows=17, **rollout)
        drawn = [place for step in range(14) for place in drawn_of(await run.train(step))]
        await run.end()
        return drawn
    finally:
        ledger.close()

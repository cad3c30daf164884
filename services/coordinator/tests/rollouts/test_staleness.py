"""The bound of asynchrony holds for any staleness, any length of a run and any order in which samples end."""

from __future__ import annotations

import asyncio
import sqlite3
import tempfile
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flotilla_coordinator.ledger.checker import Verdict, check
from flotilla_coordinator.ledger.ledger import Ledger
from flotilla_coordinator.ledger.records import RunRecord, RunState, TokenSpan
from flotilla_coordinator.records.directory import RunDirectory
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
PROMPTS, SAMPLES = 2, 2
TIMEOUT_S = 10.0


class Fleet:
    """Generators that write the first token by the oldest version that they may, and the last whenever they like."""

    def __init__(self, turns: list[int]) -> None:
        self.live = Version(0, 0)
        self.asked: list[GenerationRequest] = []
        self._turns = turns

    async def samples(self, request: GenerationRequest) -> AsyncGenerator[RolloutSample]:
        self.asked.append(request)
        assert self.live >= request.min_version
        for sample_id in request.sample_ids:
            for _ in range(self._turns[len(self.asked) % len(self._turns)]):
                await asyncio.sleep(0)
            tokens, logprobs = np.array([1, 2], np.int32), np.array([-0.5, -0.5], np.float32)
            spans = (TokenSpan(request.min_version, 0, 1), TokenSpan(self.live, 1, 2))
            yield RolloutSample(sample_id, tokens, logprobs, "12", spans)


class Scorer:
    async def needs(self) -> Needs:
        return Needs()

    async def score(self, items: list[Any]) -> dict[str, Outcome]:
        return {item.sample_id: Outcome(1.0) for item in items}


def source(config: RolloutConfig, steps: int, prompts: Any, fleet: Fleet, ledger: Ledger) -> RolloutSource:
    parts: Any = {"sampler": fleet, "scorer": Scorer(), "ledger": ledger, "advantage": ReinforceAdvantage()}
    groups = GroupRollout(RUN, config, **parts, wait_until_verified=AsyncMock())
    return RolloutSource(RUN, config, steps, prompts, groups, ledger)


async def train(folder: Path, staleness: int, steps: int, turns: list[int]) -> Verdict:
    """A whole run, judged after every step and by the checker at its end."""
    ledger = Ledger.open(folder / "ledger.sqlite")
    written = f"rollout: {{max_staleness: {staleness}}}\n"
    await ledger.save_run(RunRecord(RUN, "run", RunState.RUNNING, written, str(folder), time.time()))
    config = RolloutConfig(
        prompts_per_step=PROMPTS,
        samples_per_prompt=SAMPLES,
        max_staleness=staleness,
        sample_timeout_s=TIMEOUT_S,
    )
    prompts, fleet = NumberedPrompts(), Fleet(turns)
    rollouts = source(config, steps, prompts, fleet, ledger)
    for step in range(steps):
        before, after = Version(0, step), Version(0, step + 1)
        rollouts.admit(step, before)
        assert prompts.drawn == PROMPTS * min(step + staleness + 1, steps)
        batch = await asyncio.wait_for(rollouts.batch(step, before), TIMEOUT_S)
        oldest = [sample.oldest_version for sample in batch.samples]
        assert len(oldest) == PROMPTS * SAMPLES and batch.metrics["staleness/max"] <= staleness
        assert all(version is not None and version.step >= step - staleness for version in oldest)
        ids = [sample.sample_id for sample in batch.samples]
        await ledger.consumed(RUN, str(after), ids, before, result=after, step=step + 1, cursor=batch.cursor)
        fleet.live = after
    for request in fleet.asked:
        step = int(request.sample_ids[0].split("/")[2]) // PROMPTS
        admitted = max(0, step - staleness)
        assert request.min_version == Version(0, admitted)
        assert request.timeout_s == TIMEOUT_S * (1 + step - admitted)
    await rollouts.close()
    await ledger.update_run(RUN, state=RunState.SUCCEEDED)
    ledger.close()
    return check(folder / "ledger.sqlite", RUN)


@settings(max_examples=10, deadline=None)
@given(
    staleness=st.integers(0, 64),
    steps=st.integers(1, 5),
    turns=st.lists(st.integers(0, 40), min_size=1, max_size=5),
)
def test_no_token_is_trained_later_than_the_bound_allows(
    staleness: int, steps: int, turns: list[int]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        verdict = asyncio.run(train(Path(folder), staleness, steps, turns))
    assert verdict.passed and verdict.trained == steps * PROMPTS * SAMPLES, str(verdict)


async def train_by_changing_bounds(folder: Path, bounds: list[int], turns: list[int]) -> Verdict:
    """A run whose user sets another bound before each step."""
    ledger, directory = Ledger.open(folder / "ledger.sqlite"), RunDirectory(folder)
    await ledger.save_run(RunRecord(RUN, "run", RunState.RUNNING, "", str(folder), time.time()))
    fleet = Fleet(turns)
    config = RolloutConfig(prompts_per_step=PROMPTS, samples_per_prompt=SAMPLES, max_staleness=0)
    rollouts = source(config, len(bounds), NumberedPrompts(), fleet, ledger)
    for step, bound in enumerate(bounds):
        written = f"rollout: {{max_staleness: {bound}}}\n"
        change = {"rollout.max_staleness": (config.max_staleness, bound)}
        directory.write_change(step, written, change)
        await ledger.update_run(RUN, config_yaml=written)
        config = config.model_copy(update={"max_staleness": bound})
        changed: Any = SimpleNamespace(rollout=config, steps=len(bounds))
        rollouts.reconfigure(changed)
        before, after = Version(0, step), Version(0, step + 1)
        rollouts.admit(step, before)
        batch = await asyncio.wait_for(rollouts.batch(step, before), TIMEOUT_S)
        assert batch.metrics["staleness/max"] <= max(bounds[: step + 1])
        ids = [sample.sample_id for sample in batch.samples]
        await ledger.consumed(RUN, str(after), ids, before, result=after, step=step + 1, cursor=batch.cursor)
        fleet.live = after
    await rollouts.close()
    await ledger.update_run(RUN, state=RunState.SUCCEEDED)
    ledger.close()
    return check(folder / "ledger.sqlite", RUN)


@settings(max_examples=10, deadline=None)
@given(
    bounds=st.lists(st.integers(0, 4), min_size=1, max_size=6),
    turns=st.lists(st.integers(0, 40), min_size=1, max_size=3),
)
def test_a_bound_that_changes_costs_no_sample_that_was_admitted_before(
    bounds: list[int], turns: list[int]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        verdict = asyncio.run(train_by_changing_bounds(Path(folder), bounds, turns))
    assert verdict.passed and verdict.trained == len(bounds) * PROMPTS * SAMPLES, str(verdict)


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_the_checker_finds_what_a_smaller_bound_forbids(staleness: int, tmp_path: Path) -> None:
    """So the bound is reached: one that nothing reaches would prove nothing."""
    assert asyncio.run(train(tmp_path, staleness, 5, [0])).passed
    with sqlite3.connect(tmp_path / "ledger.sqlite") as db:
        db.execute("UPDATE runs SET config_yaml = ?", (f"rollout: {{max_staleness: {staleness - 1}}}",))
    assert check(tmp_path / "ledger.sqlite", RUN).stale == (5 - staleness) * PROMPTS * SAMPLES

"""The watch kills no rank that computes, and reports one that hangs in one line."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any, cast

import pytest

from flotilla_core.config import StackConfig
from flotilla_trainer.gang.plan import GangPlan
from flotilla_trainer.gang.rank_process import RankProcess
from flotilla_trainer.gang.watch import GangWatch

LIMIT_S = 0.3


class Computing:
    """A rank whose main thread says with every beat that it came further."""

    rank, name, phase, waits_for_answer = 0, "rank 0 (pid 7)", "micro-batch 1 of 1", True
    last_beat = float("inf")

    def __init__(self, stacks_file: Path) -> None:
        self._steps = itertools.count()
        self.process = self
        self.stacks_file = str(stacks_file)

    @property
    def progress(self) -> int:
        return next(self._steps)

    def ended(self) -> str:
        return ""

    async def is_stopped(self) -> bool:
        return False

    def judge(self) -> None:
        pass

    async def stacks(self, *, wake: bool) -> str:
        return "Thread 0x1 (most recent call first):\n  somewhere\n" * 20


class Hanging(Computing):
    """A rank whose process lives, and whose main thread does not move."""

    progress = 3


def watch(rank: Computing, folder: Path) -> GangWatch:
    plan = GangPlan.of_stack(StackConfig(model=folder), "trainer-0", "trainer-0-test", folder, folder)
    return GangWatch(plan, [cast(RankProcess, rank)])


async def test_a_micro_batch_may_take_longer_than_the_limit_while_its_layers_go_by(tmp_path: Path) -> None:
    watching = watch(Computing(tmp_path / "stacks"), tmp_path)
    with watching.command("train", LIMIT_S), pytest.raises(TimeoutError):
        await asyncio.wait_for(watching.failure(), 4 * LIMIT_S)


async def test_a_rank_that_hangs_is_reported_in_one_line_that_names_its_stacks(tmp_path: Path) -> None:
    watching = watch(Hanging(tmp_path / "stacks"), tmp_path)
    with watching.command("train", LIMIT_S):
        found: Any = await watching.failure()
    assert "rank 0 (pid 7) made no progress for 0.3 s" in found.what
    assert "last seen micro-batch 1 of 1" in found.where
    assert found.why == f"the stacks of rank 0 (pid 7) are in {tmp_path / 'stacks'}"


def test_threads_of_ranks_give_their_core_away_unless_the_user_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = GangPlan.of_stack(StackConfig(model=tmp_path), "trainer-0", "trainer-0-test", tmp_path, tmp_path)
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    assert plan.environment()["GOMP_SPINCOUNT"] == "1000"
    monkeypatch.setenv("GOMP_SPINCOUNT", "infinite")
    assert plan.environment()["GOMP_SPINCOUNT"] == "infinite"


def test_streams_of_a_rank_share_its_gpu_memory_unless_the_user_says_how_it_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = GangPlan.of_stack(StackConfig(model=tmp_path), "trainer-0", "trainer-0-test", tmp_path, tmp_path)
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    assert plan.environment()["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512")
    assert "PYTORCH_ALLOC_CONF" not in plan.environment()
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:256")
    assert plan.environment()["PYTORCH_ALLOC_CONF"] == "max_split_size_mb:256"

"""Claims about a commit in the vLLM engine, on what its workers answer; the engine itself is not started."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from typing import Any

import pytest

from flotilla_core.config.generators import GeneratorConfig
from flotilla_core.errors import WeightsMismatch
from flotilla_core.version import Version
from flotilla_generator.checkpoint import Checkpoint
from flotilla_generator.engine.base import KvPolicy, Received, Verified, WeightsHalfWritten, WeightsNotLive
from flotilla_generator.engine.vllm.engine import VllmEngine
from flotilla_generator.engine.vllm.parent_watch import SERVICE_PID

DONE = {"error": "", "broken": False, "apply_s": 0.1, "verify_s": 0.1, "check": False}
NOTHING = {"error": "nothing is staged", "broken": False}
WRONG = {"error": "lm_head.weight: live head differs", "broken": True}
VERSION = Version(0, 1)


class Workers:
    """The calls of AsyncLLM that a commit makes, in order."""

    errored = False

    def __init__(self, answers: list[dict[str, Any]] | Exception) -> None:
        self.answers = answers
        self.live: list[dict[str, Any]] = []
        """What a look at the live memory finds, for each worker."""
        self.staged: list[dict[str, Any]] = []
        """What each worker says of a transfer."""
        self.calls: list[str] = []

    async def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[dict[str, Any]]:
        self.calls.append(method)
        if method == "flotilla_stage":
            await asyncio.sleep(TRANSFER_S)
        if method == "flotilla_status" and self.staged:
            return self.staged
        if method == "flotilla_status":
            return [{"error": "", "busy": False, "buckets": 0, "live": one} for one in self.live]
        if isinstance(self.answers, Exception):
            raise self.answers
        return self.answers

    @property
    def engine_core(self) -> Workers:
        return self

    async def pause_scheduler_async(self, *, mode: str, clear_cache: bool) -> None:
        self.calls.append(f"pause {mode}")

    pause_generation = pause_scheduler_async

    async def resume_generation(self) -> None:
        self.calls.append("resume")


def engine_on(workers: Workers, tmp_path: Any) -> VllmEngine:
    engine = VllmEngine(GeneratorConfig(), Checkpoint(tmp_path, {}))
    engine.llm = workers
    return engine


async def test_weights_change_between_pause_and_resume(tmp_path) -> None:
    workers = Workers([DONE, DONE])
    await engine_on(workers, tmp_path).apply(VERSION, KvPolicy.RECOMPUTE)
    assert workers.calls == ["pause keep", "flotilla_apply", "resume"]


async def test_the_cache_is_given_back_within_a_pause_and_taken_before_the_resume(tmp_path) -> None:
    workers = Workers([DONE | {"freed": 7}, DONE | {"freed": 8}])
    engine = engine_on(workers, tmp_path)
    assert await engine.sleep() == 15
    await engine.wake()
    assert workers.calls == ["pause keep", "flotilla_sleep", "flotilla_wake", "resume"]


async def test_broken_weights_decode_nothing_after_a_sleep(tmp_path) -> None:
    workers = Workers([WRONG])
    engine = engine_on(workers, tmp_path)
    with pytest.raises(WeightsNotLive):
        await engine.apply(VERSION, KvPolicy.RECOMPUTE)
    workers.calls, workers.answers = [], [DONE | {"freed": 7}]
    await engine.sleep()
    await engine.wake()
    assert "resume" not in workers.calls


RIGHT = {"tensors": 3, "unchecked": "", "faults": [], "copies_s": 0.5}
STALE = {"tensors": 3, "unchecked": "", "faults": ["norm.weight: live tensor differs"], "copies_s": 0.5}


async def test_copies_are_compared_when_decoding_goes_on(tmp_path) -> None:
    workers = Workers([DONE | {"check": True}] * 2)
    workers.live = [RIGHT, RIGHT]
    engine = engine_on(workers, tmp_path)
    applied = await engine.apply(VERSION, KvPolicy.RECOMPUTE)
    assert workers.calls == ["pause keep", "flotilla_apply", "resume", "flotilla_check", "flotilla_status"]
    assert applied.apply_s == 0.5 and applied.stall_s > 0.4, (
        "copies that were queued at the resume hold the next step"
    )
    assert await engine.verify() == Verified(3)


async def test_a_wrong_copy_on_one_worker_ends_what_decodes_and_is_named(tmp_path) -> None:
    workers = Workers([DONE | {"check": True}] * 2)
    workers.live = [RIGHT, STALE]
    engine = engine_on(workers, tmp_path)
    with pytest.raises(WeightsNotLive, match=r"worker 1: norm\.weight"):
        await engine.apply(VERSION, KvPolicy.RECOMPUTE)
    assert workers.calls[-1] == "pause abort"
    workers.calls.clear()
    workers.live = [RIGHT, RIGHT]
    await engine.apply(VERSION, KvPolicy.DRAIN)
    assert workers.calls[:3] == ["pause keep", "flotilla_apply", "resume"], "nothing runs that could drain"


TRANSFER_S = 0.02
STAGED = {"error": "", "busy": False, "buckets": 3, "proved": True, "digests": [7, 8], "live": {}}


def in_place_on(workers: Workers, tmp_path: Any) -> VllmEngine:
    engine = VllmEngine(GeneratorConfig(apply_weights="direct"), Checkpoint(tmp_path, {}))
    engine.llm = workers
    return engine


async def test_weights_arrive_in_place_between_the_pause_and_the_resume(tmp_path) -> None:
    workers = Workers([DONE])
    workers.staged = [STAGED]
    engine = in_place_on(workers, tmp_path)
    received = await engine.receive(lambda _: None, KvPolicy.DRAIN)
    assert received == Received(((7, 8),), in_place=True)
    assert workers.calls == ["pause wait", "flotilla_stage", "flotilla_status"], (
        "who drains has drained before"
    )
    applied = await engine.apply(VERSION, KvPolicy.DRAIN)
    assert workers.calls[3:] == ["pause wait", "flotilla_apply", "resume"]
    assert applied.stall_s >= TRANSFER_S, "the pause began before the transfer"
    workers.calls.clear()
    await engine.drop()
    assert workers.calls == ["flotilla_drop"], "what was committed goes on"


async def test_a_transfer_in_place_that_breaks_off_leaves_nothing_that_decodes(tmp_path) -> None:
    workers = Workers([DONE])
    workers.staged = [STAGED | {"error": "the sender is gone"}]
    engine = in_place_on(workers, tmp_path)
    with pytest.raises(WeightsHalfWritten, match="the sender is gone"):
        await engine.receive(lambda _: None, KvPolicy.REUSE)
    assert workers.calls[-1] == "pause abort"
    workers.staged, workers.calls = [STAGED], []
    await engine.receive(lambda _: None, KvPolicy.DRAIN)
    await engine.apply(VERSION, KvPolicy.DRAIN)
    assert workers.calls[0] == "pause keep" and workers.calls[-1] == "resume", "a whole version repairs it"


async def test_a_pause_that_is_broken_off_before_the_transfer_loses_nothing(tmp_path) -> None:
    workers = Workers([DONE])
    pausing = asyncio.Event()

    async def waits(**_: Any) -> None:
        pausing.set()
        await asyncio.Event().wait()

    workers.pause_scheduler_async = waits  # type: ignore[method-assign]
    engine = in_place_on(workers, tmp_path)
    receiving = asyncio.create_task(engine.receive(lambda _: None, KvPolicy.DRAIN))
    await asyncio.wait_for(pausing.wait(), 10)
    receiving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await receiving
    assert workers.calls == ["resume"]
    assert not await engine.drop(), "the live weights are what they were"


async def test_an_error_of_the_engine_in_a_transfer_in_place_counts_as_half_written(tmp_path) -> None:
    workers = Workers(ValueError("vLLM has no common base of its errors"))
    engine = in_place_on(workers, tmp_path)
    with pytest.raises(WeightsHalfWritten, match="no common base"):
        await engine.receive(lambda _: None, KvPolicy.REUSE)
    assert workers.calls[-1] == "pause abort"


async def test_weights_in_place_that_nobody_commits_never_decode(tmp_path) -> None:
    workers = Workers([DONE])
    workers.staged = [STAGED]
    engine = in_place_on(workers, tmp_path)
    await engine.receive(lambda _: None, KvPolicy.REUSE)
    assert await engine.drop()
    assert workers.calls[-2:] == ["flotilla_drop", "pause abort"]


async def test_memory_that_cannot_be_compared_is_said_to_be_unchecked(tmp_path) -> None:
    workers = Workers([DONE])
    workers.live = [{"tensors": 0, "unchecked": "packed", "faults": [], "copies_s": 0.0}]
    assert await engine_on(workers, tmp_path).verify() == Verified(0, "packed")


@pytest.mark.parametrize(
    "answers", [[DONE, WRONG], [DONE, NOTHING], [{"error": "it raised"}] * 2, RuntimeError("no answer")]
)
async def test_unless_every_worker_says_otherwise_failed_weights_are_broken(answers, tmp_path) -> None:
    workers = Workers(answers)
    engine = engine_on(workers, tmp_path)
    with pytest.raises(WeightsNotLive):
        await engine.apply(VERSION, KvPolicy.RECOMPUTE)
    assert workers.calls == ["pause keep", "flotilla_apply", "pause abort"]


@pytest.mark.parametrize("policy", [KvPolicy.RECOMPUTE, KvPolicy.DRAIN])
async def test_nothing_decodes_under_broken_weights_until_whole_ones_are_live(policy, tmp_path) -> None:
    workers = Workers([WRONG])
    engine = engine_on(workers, tmp_path)
    with pytest.raises(WeightsNotLive):
        await engine.apply(VERSION, policy)
    workers.answers = [NOTHING]
    with pytest.raises(WeightsMismatch):
        await engine.apply(VERSION, policy)
    assert "resume" not in workers.calls
    workers.calls.clear()
    workers.answers = [DONE]
    await engine.apply(VERSION, policy)
    assert workers.calls == ["pause keep", "flotilla_apply", "resume"], "nothing runs that could drain"


async def test_weights_that_no_worker_touched_stay(tmp_path) -> None:
    workers = Workers([NOTHING, NOTHING])
    with pytest.raises(WeightsMismatch) as caught:
        await engine_on(workers, tmp_path).apply(VERSION, KvPolicy.RECOMPUTE)
    assert not isinstance(caught.value, WeightsNotLive)
    assert workers.calls == ["pause keep", "flotilla_apply", "resume"]


def test_an_engine_process_that_is_its_own_worker_ends_with_the_service() -> None:
    worker = (
        "import time; from flotilla_generator.engine.vllm.parent_watch import end_with_the_service as end; "
        "end(); print('watching', flush=True); time.sleep(60)"
    )
    service = (
        "import os, subprocess, sys; "
        f"os.environ[{SERVICE_PID!r}] = str(os.getpid()); "
        f"subprocess.Popen([sys.executable, '-c', {worker!r}]).wait()"
    )
    with subprocess.Popen([sys.executable, "-c", service], stdout=subprocess.PIPE, env=os.environ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"watching\n"
        process.kill()
        assert process.stdout.read() == b""  # the pipe closes when the last of both is gone

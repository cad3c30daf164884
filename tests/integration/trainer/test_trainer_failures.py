"""Ranks that die or hang are named, the front stays answerable, broken weight groups cost only themselves."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM

from flotilla.common.v1 import weights_pb2
from flotilla.trainer.v1 import trainer_pb2 as pb
from flotilla_core.errors import (
    Exhausted,
    FailedPrecondition,
    FlotillaError,
    RankFailed,
    StaleVersion,
    WeightGroupFailed,
)
from flotilla_core.tensors import to_tensor
from flotilla_core.version import Version
from flotilla_weights.group import Receiver
from flotilla_weights.manifest import Manifest

RANK_TIMEOUT_S = 4.0
IDS = np.arange(1, 4, dtype=np.int32)

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(120)]
MakeGroups = Callable[..., list[pb.TrainGroup]]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pair(start_trainer: Callable[..., Any]) -> AsyncIterator[Any]:
    """Two ranks that may be silent for a short while only."""
    async with start_trainer(nproc=2, rank_timeout_s=RANK_TIMEOUT_S) as started:
        yield started


def join(opened: pb.OpenWeightGroupResponse) -> Receiver:
    receiver = Receiver(opened.group, 1, Manifest.from_proto(opened.manifest))
    receiver.connect()
    return receiver


def receive(receiver: Receiver, into: dict[str, torch.Tensor]) -> list[int]:
    return receiver.receive(into.update)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
async def test_a_weight_group_by_nccl_is_refused_by_ranks_without_gpus_and_costs_them_nothing(
    pair: Any,
) -> None:
    await pair.open()
    with pytest.raises(FailedPrecondition, match="nccl"):
        await pair.open_group(1, backend=weights_pb2.WEIGHT_BACKEND_NCCL)
    assert (await pair.open_group(1)).group.epoch == 1


async def test_published_weights_are_those_of_the_export(
    pair: Any, groups_of: MakeGroups, tmp_path: Any
) -> None:
    await pair.open()
    await pair.train(0, groups_of([3, 3]))
    opened = await pair.open_group(epoch=1)
    receiver = await asyncio.to_thread(join, opened)
    arrived: dict[str, torch.Tensor] = {}
    published, digests = await asyncio.gather(
        pair.publish(epoch=1, step=1), asyncio.to_thread(receive, receiver, arrived)
    )
    assert list(published.digests.tensor_digests) == digests
    assert published.digests.manifest_digest == opened.manifest.digest
    assert published.bytes == sum(tensor.nbytes for tensor in arrived.values())
    model = AutoModelForCausalLM.from_pretrained(await pair.export(tmp_path / "m", 1), dtype=torch.float32)
    expected = dict(model.named_parameters())
    assert arrived.keys() == expected.keys()  # the tied head travels once
    for name, tensor in arrived.items():
        assert torch.equal(tensor, expected[name]), name
    receiver.close()
    await pair.call("CloseWeightGroup", pb.CloseWeightGroupRequest(run_id=pair.run_id, epoch=1))


async def test_a_stuck_publication_is_given_up_and_the_session_lives(
    pair: Any, groups_of: MakeGroups
) -> None:
    await pair.open()
    opened = await pair.open_group(epoch=1)
    receiver = await asyncio.to_thread(join, opened)  # joins, and then never receives
    stuck = asyncio.create_task(pair.publish(epoch=1, step=0))
    # The standstill is longer than a silent rank may take, and no rank is blamed for it.
    done, _ = await asyncio.wait({stuck}, timeout=RANK_TIMEOUT_S + 1)
    if not done:
        await pair.call("CloseWeightGroup", pb.CloseWeightGroupRequest(run_id=pair.run_id, epoch=1))
        with pytest.raises(WeightGroupFailed):
            await stuck
    receiver.abort()
    assert not (await pair.train(0, groups_of([3, 3]))).skipped
    assert pair.lost == []


async def test_members_that_never_come_cost_the_timeout_and_nothing_more(
    pair: Any, groups_of: MakeGroups
) -> None:
    await pair.open()
    await pair.open_group(epoch=1, timeout_s=2)  # does not wait for them
    with pytest.raises(WeightGroupFailed, match="join"):
        await pair.publish(epoch=1, step=0)
    await pair.open_group(epoch=2)
    with pytest.raises(StaleVersion, match="epoch 1"):
        await pair.publish(epoch=1, step=0)
    with pytest.raises(StaleVersion, match="epoch 2"):
        await pair.open_group(epoch=2)
    await pair.call("CloseWeightGroup", pb.CloseWeightGroupRequest(run_id=pair.run_id, epoch=2))
    with pytest.raises(FailedPrecondition, match="epoch 2"):
        await pair.publish(epoch=2, step=0)
    assert not (await pair.train(0, groups_of([3, 3]))).skipped
    assert pair.lost == []


async def test_stacks_of_every_rank_are_told_on_request(pair: Any) -> None:
    stacks = await pair.gang.stacks()
    async with asyncio.timeout(20):  # A rank that has answered is on its way back to its next command.
        while not all("next_command" in process.text for process in stacks):
            stacks = await pair.gang.stacks()
    assert [process.process for process in stacks] == ["rank 0", "rank 1"]


async def test_weights_are_never_labelled_with_the_version_before_a_running_update(
    pair: Any, groups_of: MakeGroups
) -> None:
    await pair.open(tokens_per_microbatch=1)
    running = asyncio.create_task(pair.train(0, groups_of([20, 20])))
    session = pair.manager.session(pair.run_id)
    async with asyncio.timeout(20):
        while not session.updates.running:
            await asyncio.sleep(0.01)
    sequences = [
        pb.ScoredSequence(sequence_id="a", prompt_token_ids=to_tensor(IDS), token_ids=to_tensor(IDS))
    ]
    request = pb.ComputeLogprobsRequest(run_id=pair.run_id, sequences=sequences)
    scoring = asyncio.create_task(pair.call("ComputeLogprobs", request))
    with pytest.raises(StaleVersion):
        await pair.publish(epoch=1, step=0)
    assert not (await running).skipped
    assert Version.from_proto((await scoring).policy_version) == Version(0, 1)


async def failure_of(call: Any) -> FlotillaError:
    with pytest.raises(FlotillaError) as caught:
        await call
    return caught.value


async def stop_rank(pid: int) -> None:
    """Stop a rank by a signal, which takes effect in its own time."""
    os.kill(pid, signal.SIGSTOP)
    async with asyncio.timeout(10):
        while psutil.Process(pid).status() != psutil.STATUS_STOPPED:
            await asyncio.sleep(0.01)


def write_last_line(log: Path, line: str) -> None:
    """End the log of a rank as the error would that ends the rank."""
    with log.open("a") as lines:
        lines.write(line + "\n")


async def test_a_killed_rank_is_named_and_the_gang_comes_back(pair: Any, groups_of: MakeGroups) -> None:
    await pair.open()
    victim = pair.gang.pids()[1]
    await stop_rank(victim)
    running = asyncio.create_task(pair.train(0, groups_of([60, 60])))
    async with asyncio.timeout(10):  # The call reaches the ranks; a stopped one keeps it there.
        while not pair.activities.current():
            await asyncio.sleep(0.01)
    os.kill(victim, signal.SIGKILL)
    error = await failure_of(running)
    assert isinstance(error, RankFailed)
    assert f"rank 1 (pid {victim}) was killed by SIGKILL" in str(error)
    assert "\n" not in error.why and ".rank-1.log" in error.why

    later = await failure_of(pair.train(0, groups_of([2])))
    assert isinstance(later, FailedPrecondition)
    assert f"rank 1 (pid {victim})" in str(later)
    pair.runs += 1
    await pair.open()  # waits for the new gang
    assert victim not in pair.gang.pids()
    assert not (await pair.train(0, groups_of([3, 3]))).skipped


async def test_a_run_that_lost_its_ranks_to_memory_gets_half_the_tokens_and_not_a_third_gang(
    pair: Any, groups_of: MakeGroups
) -> None:
    await pair.open()
    asked = pair.manager.session(pair.run_id).ranks.budget
    for budget in (asked // 2, None):
        pair.lost.clear()
        victim = pair.gang.pids()[1]
        await stop_rank(victim)
        write_last_line(
            pair.plan.log_path(1), "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.45 GiB."
        )
        os.kill(victim, signal.SIGKILL)
        async with asyncio.timeout(10):
            while not pair.lost:
                await asyncio.sleep(0.01)
        pair.runs -= 1  # the same run opens its session again
        if budget is None:
            with pytest.raises(Exhausted, match=r"batching\.tokens_per_microbatch"):
                await pair.open()
        else:
            await pair.open()
            assert pair.manager.session(pair.run_id).ranks.budget == budget
    pair.runs += 1
    await pair.open()  # another run is not held to it
    assert pair.manager.session(pair.run_id).ranks.budget == asked
    assert not (await pair.train(0, groups_of([3, 3]))).skipped


async def test_a_stopped_rank_is_named_within_the_limit_while_the_front_answers(
    pair: Any, groups_of: MakeGroups
) -> None:
    await pair.open()
    pair.lost.clear()
    old = pair.gang.pids()
    await stop_rank(old[1])
    started = time.monotonic()
    running = asyncio.create_task(pair.train(0, groups_of([3, 3])))
    stacks = await pair.gang.stacks()
    assert "stopped by a signal" in stacks[1].text
    assert [activity.what for activity in pair.activities.current()] == ["train: forward, backward and step"]
    error = await failure_of(running)
    assert time.monotonic() - started < RANK_TIMEOUT_S + 6
    assert isinstance(error, RankFailed)
    assert f"rank 1 (pid {old[1]}) does not answer for 4 s" in str(error)
    assert "SIGSTOP" in str(error)
    assert "\n" not in error.why
    _, _, place = error.why.partition(f"the stacks of rank 1 (pid {old[1]}) are in ")
    assert "most recent call first" in Path(place).read_text()
    assert "rank 0" not in error.what
    pair.runs += 1
    await pair.open()
    assert all(not os.path.exists(f"/proc/{pid}") for pid in old)
    assert not (await pair.train(0, groups_of([3, 3]))).skipped

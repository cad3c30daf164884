"""Checkpoints through the real front and real ranks: training continues and resumes, and uses no half-written one."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import resource
import shutil
import signal
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
from transformers import AutoModelForCausalLM

from flotilla.trainer.v1 import trainer_pb2 as pb
from flotilla_core.checkpoint import CheckpointShelf, Manifest
from flotilla_core.errors import (
    AlreadyExists,
    Damaged,
    DiskFull,
    FailedPrecondition,
    FlotillaError,
    InvalidRequest,
    Mismatch,
    StaleVersion,
)
from flotilla_core.version import Version

SIZES = [4, 1, 6, 3]
STATE = b'{"cursor": 3}'
SAVED_AT, STEPS = 2, 5
LIMIT_S = 60.0
# AdamW divides by the root of the second moment: this epsilon keeps the rounding of tiny gradients out of it.
SPEC = {"epsilon": 1e-3, "schedule": "linear", "total_updates": 8}

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(120)]
MakeGroups = Callable[..., list[pb.TrainGroup]]
Stages = AsyncIterator[pb.SaveCheckpointResponse]


async def loss_of(trainer: Any, groups: list[pb.TrainGroup]) -> float:
    return (await trainer.judged(groups))["loss"]


@dataclass(frozen=True)
class Undisturbed:
    """A run of five updates, with a checkpoint after the second."""

    folder: Path
    losses: list[float]
    model: Path


@pytest.fixture
def pair(two_ranks: Any) -> Any:
    two_ranks.lost.clear()
    return two_ranks


@pytest.fixture(params=["one_rank", "three_ranks"], ids=["1-rank", "3-ranks"])
def other_gang(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def undisturbed(
    two_ranks: Any, groups_of: MakeGroups, tmp_path_factory: pytest.TempPathFactory
) -> Undisturbed:
    """Updates after the snapshot run while the checkpoint is written."""
    folder = tmp_path_factory.mktemp("run") / "checkpoints" / CheckpointShelf.name_of(SAVED_AT)
    await two_ranks.open(**SPEC)
    losses = []
    async with contextlib.AsyncExitStack() as stack:
        for step in range(STEPS):
            if step == SAVED_AT:
                stages = await stack.enter_async_context(
                    two_ranks.saving(folder, Version(0, step), coordinator_state=STATE)
                )
                assert (await anext(stages)).WhichOneof("stage") == "snapshot"
            losses.append((await two_ranks.train(step, groups_of(SIZES, seed=step))).metrics["loss"])
        durable = (await anext(stages)).durable
    assert durable.path == str(folder)
    assert durable.bytes == Manifest.verified(folder).nbytes
    return Undisturbed(folder, losses, two_ranks.model)


async def test_a_checkpoint_is_one_sealed_folder(undisturbed: Undisturbed) -> None:
    folder = undisturbed.folder
    assert {"trainer.json", "coordinator.json", "model/config.json", "model/tokenizer.json"} <= set(
        Manifest.read(folder).files
    )
    assert (folder.parent / "latest").read_text() == f"{folder.name}\n"
    assert sorted(entry.name for entry in folder.parent.iterdir()) == ["latest", folder.name]
    facts = json.loads((folder / "trainer.json").read_text())
    assert facts["policy_version"] == [0, SAVED_AT] and facts["ranks"] == 2


async def test_its_model_loads_as_it_is(undisturbed: Undisturbed, pair: Any, groups_of: MakeGroups) -> None:
    model = AutoModelForCausalLM.from_pretrained(undisturbed.folder / "model")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    await pair.open("sft", initial_weights=str(undisturbed.folder / "model"))
    forked = await loss_of(pair, groups_of(SIZES))
    await pair.open("sft", lineage=1)
    await pair.load(undisturbed.folder)
    assert await loss_of(pair, groups_of(SIZES)) == pytest.approx(forked, rel=1e-6)


async def losses_after_the_load(undisturbed: Undisturbed, trainer: Any, groups_of: MakeGroups) -> list[float]:
    await trainer.open(lineage=1, **SPEC)
    reply = await trainer.load(undisturbed.folder)
    assert Version.from_proto(reply.policy_version) == Version(1, SAVED_AT)
    assert reply.coordinator_state == STATE
    return [
        (await trainer.train(step, groups_of(SIZES, seed=step), lineage=1)).metrics["loss"]
        for step in range(SAVED_AT, STEPS)
    ]


async def test_losses_are_the_same_on_another_number_of_ranks(
    undisturbed: Undisturbed, other_gang: Any, groups_of: MakeGroups
) -> None:
    losses = await losses_after_the_load(undisturbed, other_gang, groups_of)
    assert losses == pytest.approx(undisturbed.losses[SAVED_AT:], rel=1e-5)


async def test_losses_are_the_same_after_a_rank_was_killed(
    undisturbed: Undisturbed, pair: Any, groups_of: MakeGroups
) -> None:
    await pair.open(**SPEC)
    await pair.train(0, groups_of(SIZES, seed=99))
    os.kill(pair.gang.pids()[-1], signal.SIGKILL)
    async with asyncio.timeout(LIMIT_S):
        while not pair.lost:
            await asyncio.sleep(0.01)
    pair.lost.clear()
    losses = await losses_after_the_load(undisturbed, pair, groups_of)
    assert losses == pytest.approx(undisturbed.losses[SAVED_AT:], rel=1e-5)


def flip(folder: Path) -> str:
    path = folder / "shards" / "rank-00001-of-00002.safetensors"
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    return path.name


def truncate(folder: Path) -> str:
    path = folder / "shards" / "rank-00000-of-00002.safetensors"
    os.truncate(path, path.stat().st_size - 1)
    return path.name


def remove(folder: Path) -> str:
    (folder / "model" / "model.safetensors").unlink()
    return "model.safetensors"


def garble(folder: Path) -> str:
    (folder / "manifest.json").write_text("{")
    return "manifest.json"


@pytest.mark.parametrize("damage", [flip, truncate, remove, garble])
async def test_a_damaged_checkpoint_is_refused_by_its_file_and_changes_nothing(
    undisturbed: Undisturbed,
    pair: Any,
    groups_of: MakeGroups,
    tmp_path: Path,
    damage: Callable[[Path], str],
) -> None:
    copy = tmp_path / undisturbed.folder.name
    shutil.copytree(undisturbed.folder, copy)
    named = damage(copy)
    await pair.open("sft", lineage=1)
    before = await loss_of(pair, groups_of(SIZES))
    with pytest.raises(Damaged, match=named):
        await pair.load(copy)
    assert await loss_of(pair, groups_of(SIZES)) == before
    assert not (await pair.train(0, groups_of(SIZES), lineage=1)).skipped


async def test_a_checkpoint_of_another_model_is_refused_and_changes_nothing(
    undisturbed: Undisturbed, pair: Any, groups_of: MakeGroups, tmp_path: Path
) -> None:
    await pair.open("sft", lineage=1)
    before = await loss_of(pair, groups_of(SIZES))
    wide = tmp_path / "wide" / "step-000002"
    shutil.copytree(undisturbed.folder, wide)
    facts = json.loads((wide / "trainer.json").read_text())
    facts["model_shape"]["hidden_size"] = 64
    (wide / "trainer.json").write_text(json.dumps(facts))
    Manifest.seal(wide)
    with pytest.raises(Mismatch, match="hidden_size"):
        await pair.load(wide)

    foreign = tmp_path / "foreign" / "step-000002"
    shutil.copytree(undisturbed.folder, foreign)
    for path in (foreign / "shards").iterdir():
        path.write_bytes(path.read_bytes().replace(b"embed_tokens", b"embed_tokenz"))
    Manifest.seal(foreign)
    with pytest.raises(Mismatch, match=r"embed_tokens\.weight is absent"):
        await pair.load(foreign)
    assert await loss_of(pair, groups_of(SIZES)) == before


async def test_a_full_disk_costs_that_checkpoint_alone(
    pair: Any, groups_of: MakeGroups, tmp_path: Path
) -> None:
    await pair.open()
    shelf = CheckpointShelf(tmp_path / "checkpoints")
    await pair.train(0, groups_of(SIZES))
    await pair.save(shelf.path / "step-000001", Version(0, 1))
    ranks = [psutil.Process(pid) for pid in pair.gang.pids()]
    with contextlib.ExitStack() as limits:
        for rank in ranks:
            limits.callback(rank.rlimit, resource.RLIMIT_FSIZE, rank.rlimit(resource.RLIMIT_FSIZE))
            rank.rlimit(resource.RLIMIT_FSIZE, (16384, resource.RLIM_INFINITY))
        async with pair.saving(shelf.path / "step-000002", Version(0, 1)) as stages:
            assert (await anext(stages)).WhichOneof("stage") == "snapshot"
            assert not (await pair.train(1, groups_of(SIZES))).skipped
            with pytest.raises(FailedPrecondition, match=r"cannot be written.*too large"):
                await anext(stages)
    assert shelf.names() == ["step-000001"]
    assert not list(shelf.path.glob(".*"))
    await pair.save(shelf.path / "step-000002", Version(0, 2))
    assert shelf.names() == ["step-000001", "step-000002"]
    assert pair.lost == []


async def test_updates_are_made_while_a_checkpoint_is_written_and_it_holds_the_state_before_them(
    pair: Any, groups_of: MakeGroups, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_seal = threading.Event()
    seal = Manifest.seal

    def late(folder: Path) -> Manifest:
        assert may_seal.wait(LIMIT_S)
        return seal(folder)

    monkeypatch.setattr(Manifest, "seal", late)
    await pair.open("sft")
    before = await loss_of(pair, groups_of(SIZES))
    async with pair.saving(tmp_path / "step-000000", Version(0, 0)) as stages:
        await anext(stages)
        for step in range(3):
            assert not (await pair.train(step, groups_of(SIZES))).skipped
        assert CheckpointShelf(tmp_path).names() == []
        may_seal.set()
        assert (await anext(stages)).durable.bytes
    assert await loss_of(pair, groups_of(SIZES)) < before
    await pair.open("sft", lineage=1)
    await pair.load(tmp_path / "step-000000")
    assert await loss_of(pair, groups_of(SIZES)) == pytest.approx(before, rel=1e-6)


async def test_a_disk_that_fills_up_at_the_seal_leaves_nothing(
    pair: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(folder: Path) -> Manifest:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder / "manifest.json"))

    await pair.open()
    with monkeypatch.context() as patch:
        patch.setattr(Manifest, "seal", full)
        with pytest.raises(DiskFull, match=r"manifest\.json.*the disk is full"):
            await pair.save(tmp_path / "step-000000", Version(0, 0))
    assert list(tmp_path.iterdir()) == []
    await pair.save(tmp_path / "step-000000", Version(0, 0))


async def test_one_at_a_time_and_only_of_the_version_that_is_held(
    pair: Any, groups_of: MakeGroups, tmp_path: Path
) -> None:
    await pair.open()
    with pytest.raises(StaleVersion):
        await pair.save(tmp_path / "step-000001", Version(0, 1))
    with pytest.raises(InvalidRequest, match="not absolute"):
        await pair.save(Path("step-000001"), Version(0, 0))
    with pytest.raises(InvalidRequest, match="not the name of a checkpoint"):
        await pair.save(tmp_path / "mine", Version(0, 0))
    async with pair.saving(tmp_path / "step-000000", Version(0, 0), request_id="once") as stages:
        await anext(stages)
        with pytest.raises(FailedPrecondition, match="step-000000 is still being written"):
            await pair.save(tmp_path / "step-000001", Version(0, 0))
        # The same request joins the save that runs.
        async with pair.saving(tmp_path / "step-000000", Version(0, 0), request_id="once") as again:
            repeated = [stage async for stage in again]
        assert (await anext(stages)) == repeated[-1]
    with pytest.raises(AlreadyExists):
        await pair.save(tmp_path / "step-000000", Version(0, 0))


async def test_a_closed_session_gives_up_what_it_was_writing(pair: Any, tmp_path: Path) -> None:
    await pair.open()
    async with pair.saving(tmp_path / "step-000000", Version(0, 0)) as stages:
        await anext(stages)
        await pair.call("CloseSession", pb.CloseSessionRequest(run_id=pair.run_id))
        # Whichever came first, the folder is whole or not there.
        try:
            await anext(stages)
        except FlotillaError as error:
            assert "cancelled" in str(error)
            assert CheckpointShelf(tmp_path).names() == []
        else:
            Manifest.verified(tmp_path / "step-000000")
    await pair.open()
    await pair.save(tmp_path / "step-000001", Version(0, 0))


async def test_a_rank_that_dies_while_it_writes_leaves_no_folder(
    pair: Any, groups_of: MakeGroups, tmp_path: Path
) -> None:
    await pair.open()
    victim = pair.gang.pids()[1]
    os.kill(victim, signal.SIGSTOP)
    with contextlib.suppress(FlotillaError):
        async with pair.saving(tmp_path / "step-000000", Version(0, 0)) as stages:
            asyncio.get_running_loop().call_soon(os.kill, victim, signal.SIGKILL)
            await anext(stages)
            await anext(stages)
    assert CheckpointShelf(tmp_path).names() == []
    assert not list(tmp_path.glob(".*"))
    pair.runs += 1
    await pair.open()
    assert not (await pair.train(0, groups_of(SIZES))).skipped

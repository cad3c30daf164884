"""A gang whose weights rest in host memory answers every call as one that keeps them where it computes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from flotilla_core.checkpoint import CheckpointShelf
from flotilla_core.tensors import from_tensor
from flotilla_core.version import Version
from flotilla_weights.group import Receiver
from flotilla_weights.manifest import Manifest

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(120)]
SIZES = [4, 1, 6, 3]
SEED = 3
SESSION: dict[str, Any] = {"tokens_per_microbatch": 64, "max_grad_norm": 0.1, "epsilon": 1e-3}
"""Micro-batches are small, so that an update adds up several."""


async def published(trainer: Any, step: int) -> list[int]:
    """Return the digests of a version, as both ends have them."""
    opened = await trainer.open_group(epoch=1)
    receiver = Receiver(opened.group, 1, Manifest.from_proto(opened.manifest))
    await asyncio.to_thread(receiver.connect)
    sent, arrived = await asyncio.gather(
        trainer.publish(1, step), asyncio.to_thread(receiver.receive, lambda tensors: None)
    )
    assert list(sent.digests.tensor_digests) == arrived
    return arrived


async def learned(trainer: Any, groups: Any, folder: Path) -> dict[str, Any]:
    """Make three updates and save, score and publish what came out of them."""
    await trainer.open(**SESSION)
    results = [await trainer.train(step, groups) for step in range(3)]
    assert not any(result.skipped for result in results)
    checkpoint = folder / "checkpoints" / CheckpointShelf.name_of(3)
    await trainer.save(checkpoint, Version(0, 3))
    scores = await trainer.logprobs(groups)
    return {
        "checkpoint": checkpoint,
        "metrics": [(one.metrics["loss"], one.metrics["grad_norm"]) for one in results],
        "scores": [from_tensor(one.logprobs).tolist() for one in scores.sequences],
        "weights": load_file(await trainer.export(folder / "model", 3) / "model.safetensors"),
        "digests": await published(trainer, 3),
    }


@pytest.mark.parametrize("nproc", [1, 2])
async def test_updates_scores_digests_and_checkpoints_are_those_of_a_gang_without(
    start_trainer: Callable[..., Any], groups_of: Callable[..., Any], tmp_path: Path, nproc: int
) -> None:
    groups = groups_of(SIZES)
    async with start_trainer(SEED, nproc=nproc) as trainer:
        right = await learned(trainer, groups, tmp_path / "resident")
    async with start_trainer(SEED, nproc=nproc, cpu_offload=True) as trainer:
        found = await learned(trainer, groups, tmp_path / "host")
        for name in ("metrics", "scores", "digests"):
            assert found[name] == right[name], name
        assert found["weights"].keys() == right["weights"].keys()
        for name, weight in right["weights"].items():
            assert torch.equal(found["weights"][name], weight), name
        # The checkpoint of the one is continued by the other.
        after = await trainer.train(3, groups)
        await trainer.open(lineage=1, **SESSION)
        await trainer.load(right["checkpoint"])
        resumed = await trainer.train(3, groups, lineage=1)
        assert resumed.metrics["loss"] == after.metrics["loss"]
        assert resumed.metrics["grad_norm"] == after.metrics["grad_norm"]

"""One trainer rank without a front, as a program: trains a few updates, compiled or not, and says what they took.

`python compile_rank.py SETUP.json RANK`; rank 0 leaves its figures next to the setup as found.json.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from one_rank import GPU, finish_kernels, long_tailed, sequences, settings

from flotilla_core.config import BatchingConfig
from flotilla_trainer.batch.packing import Layout, MicroBatch, Sequences, pack
from flotilla_trainer.rank.compilation import Compilation
from flotilla_trainer.rank.mesh import RankMesh
from flotilla_trainer.rank.objective import Objective
from flotilla_trainer.rank.optimizer import PolicyOptimizer
from flotilla_trainer.rank.sharded_model import ShardedModel
from flotilla_trainer.rank.update import Update, finish
from flotilla_trainer.wire.frames import Frame

LEARNING_RATE = 1e-5


class Front:
    """Do nothing: a bench has no front to tell how far a rank has come."""

    def progress(self, phase: str) -> None:
        """Heard by no one."""


def main() -> None:
    """Meet the others, compile if asked to, train, write."""
    place, rank = Path(sys.argv[1]), int(sys.argv[2])
    asked = json.loads(place.read_text())
    device = torch.device("cuda", rank) if GPU else torch.device("cpu")
    if GPU:
        torch.cuda.set_device(device)
    store = dist.FileStore(str(place.with_name("rendezvous")), asked["ranks"])
    dist.init_process_group("nccl" if GPU else "gloo", store=store, rank=rank, world_size=asked["ranks"])
    model = ShardedModel(
        Path(asked["model"]), getattr(torch, asked["dtype"]), RankMesh.form(device.type), device
    )
    model.load(Path(asked["model"]))
    compilation = Compilation(asked["compile"], device, Front().progress)
    found: dict[str, Any] = {"broke_off": not compilation.begin(model, packed=GPU)}
    found |= {"refusal": compilation.refusal, "before": compilation.metrics()}
    if not found["broke_off"]:
        found |= _trained(model, compilation, _batches(asked)[rank], asked)
    if rank == 0:
        place.with_name("found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def _trained(
    model: ShardedModel, compilation: Compilation, batches: list[MicroBatch], asked: dict[str, Any]
) -> dict[str, Any]:
    """Loss, seconds and compilations of each update, and the most memory in use."""
    updates = list(_updates(model, compilation, batches, asked))
    return {
        "losses": [loss for loss, _, _ in updates],
        "seconds": [seconds for _, seconds, _ in updates],
        "compiled": [compiled for _, _, compiled in updates],
        "tokens": int(_given(asked).lengths.sum()),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if GPU else 0.0,
    }


def _updates(
    model: ShardedModel, compilation: Compilation, batches: list[MicroBatch], asked: dict[str, Any]
) -> Iterator[tuple[float, float, dict[str, float]]]:
    batching = BatchingConfig(logprob_chunk_tokens=asked["chunk_tokens"])
    session = replace(settings(), batching=batching)
    objective, optimizer = Objective(session.objective), PolicyOptimizer(model, session.optimizer)
    for _ in range(asked["updates"]):
        dist.barrier()
        finish_kernels()
        started = time.perf_counter()
        update = Update(model, session, objective, Front())
        update.accumulate(_command(batches), backward=True)
        metrics, skipped = finish(update, optimizer, LEARNING_RATE)
        finish_kernels()
        assert not skipped, skipped
        yield metrics["loss"], time.perf_counter() - started, compilation.metrics()


def _given(asked: dict[str, Any]) -> Sequences:
    return sequences(long_tailed(asked["sequences"], asked["longest"]), asked["vocabulary"])


def _batches(asked: dict[str, Any]) -> list[list[MicroBatch]]:
    given = _given(asked)
    weights = {"weights": np.full(len(given.scored), 1 / len(given.scored), np.float32)}
    weighted = Sequences(given.tokens, given.lengths, given.scored, weights)
    return pack(weighted, Layout(asked["budget"], asked["ranks"], packed=GPU, crossover_tokens=12_000.0))


def _command(batches: list[MicroBatch]) -> Frame:
    arrays = {
        name: array for index, batch in enumerate(batches) for name, array in batch.arrays(index).items()
    }
    return Frame("work", 0, {"idle": [batch.idle for batch in batches]}, arrays)


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    main()

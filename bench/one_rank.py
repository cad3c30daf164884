"""One trainer rank in this process, without a front: real sharding, model and optimizer on weights drawn at random."""

from __future__ import annotations

import contextlib
import ctypes
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from qwen3_shape import make_model

from flotilla_core.config import BatchingConfig, OptimizerConfig
from flotilla_trainer.batch.packing import Layout, MicroBatch, Sequences, pack
from flotilla_trainer.rank.cut import RankMesh
from flotilla_trainer.rank.optimizer import PolicyOptimizer
from flotilla_trainer.rank.packed_rows import PackedRow
from flotilla_trainer.rank.sharded_model import ShardedModel
from flotilla_trainer.wire.objective import ObjectiveSettings
from flotilla_trainer.wire.settings import SessionSettings

GPU = torch.cuda.is_available()


@contextlib.contextmanager
def one_rank(dtype: torch.dtype, **shape: Any) -> Iterator[tuple[ShardedModel, Path]]:
    """A Qwen3 of the given shape, and its folder."""
    with tempfile.TemporaryDirectory(prefix="flotilla-bench-rank-") as name:
        folder = Path(name)
        make_model(folder, **shape)
        device = torch.device("cuda", 0) if GPU else torch.device("cpu")
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store = dist.FileStore(str(folder / "rendezvous"), 1)
        dist.init_process_group("nccl" if GPU else "gloo", store=store, rank=0, world_size=1)
        try:
            model = ShardedModel(folder, dtype, RankMesh.form(device.type), device)
            model.load(folder)
            yield model, folder
        finally:
            dist.destroy_process_group()


def settings(**optimizer: Any) -> SessionSettings:
    """Return the settings of a session that trains on given answers."""
    return SessionSettings(
        objective=ObjectiveSettings(),
        optimizer=OptimizerConfig(learning_rate=1e-6, **optimizer),
        batching=BatchingConfig(),
        seed=0,
        total_updates=1,
    )


def long_tailed(count: int, longest: int, seed: int = 0) -> np.ndarray:
    """Lengths as rollouts have them: most are short, a few reach the limit."""
    drawn = np.random.default_rng(seed).lognormal(np.log(longest / 12), 1.0, count)
    return drawn.clip(16, longest).astype(np.int64)


def sequences(lengths: np.ndarray, vocabulary: int) -> Sequences:
    """Random tokens, the last three quarters of each sequence scored."""
    starts = np.cumsum(lengths) - lengths
    tokens = np.random.default_rng(1).integers(0, vocabulary, int(lengths.sum())).astype(np.int32)
    scored = [
        np.arange(start + length // 4 + 1, start + length)
        for start, length in zip(starts, lengths, strict=True)
    ]
    return Sequences(tokens, lengths, np.concatenate(scored))


def micro_batches(given: Sequences, budget: int, packed: bool) -> list[MicroBatch]:
    """Return the work of one rank."""
    return pack(given, Layout(budget, ranks=1, packed=packed, crossover_tokens=12_000.0))[0]


def forward(model: ShardedModel, batch: MicroBatch, chunk_tokens: int) -> torch.Tensor:
    """Log-probabilities of the scored tokens."""
    columns = {name.removeprefix("0/"): torch.from_numpy(array) for name, array in batch.arrays(0).items()}
    row = None
    if batch.packed_lengths.size:
        row = PackedRow.of(batch.packed_lengths.tolist(), model.device)
    scores = model.policy(
        columns["tokens"].to(model.device),
        columns["positions"].to(model.device),
        columns["targets"].to(model.device).long(),
        temperature=0.9,
        chunk_tokens=chunk_tokens,
        packed_row=row,
    )
    return scores.logprobs


def update(
    model: ShardedModel, optimizer: PolicyOptimizer, batches: list[MicroBatch], chunk_tokens: int
) -> None:
    """Forward and backward over all micro-batches, and a step."""
    tokens = sum(len(batch.places) for batch in batches)
    for batch in batches:
        (-forward(model, batch, chunk_tokens).sum() / tokens).backward()
    optimizer.step(1e-6, float(optimizer.squared_norm()) ** 0.5)


def seconds(act: Callable[[], None], repeats: int) -> float:
    """Return the fastest of some runs after one that warms up."""
    best = float("inf")
    for number in range(repeats + 1):
        finish_kernels()
        started = time.perf_counter()
        act()
        finish_kernels()
        if number:
            best = min(best, time.perf_counter() - started)
    return best


def peak_bytes(act: Callable[[], None]) -> int:
    """Most memory in use during a call beyond what was in use before; on the CPU of the whole process."""
    finish_kernels()
    if GPU:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        act()
        finish_kernels()
        return torch.cuda.max_memory_allocated() - before
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    act()
    return _status("VmHWM") - before


def give_freed_memory_back() -> None:
    """Let the resident set follow what is in use: what malloc keeps of freed blocks would be used again unseen."""
    block_bytes, option = 1 << 16, -3
    ctypes.CDLL(None).mallopt(
        option, block_bytes
    )  # M_MMAP_THRESHOLD: blocks from this size on come and go alone


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{key}:"))


def finish_kernels() -> None:
    """Wait until a GPU has done what it was told."""
    if GPU:
        torch.cuda.synchronize()

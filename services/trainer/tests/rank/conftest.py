"""A model for ranks, a rank that takes commands, and kernels of GPUs that a CPU has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flotilla_testing.listening_front import ListeningFront
from flotilla_testing.tiny_qwen3 import tiny_qwen3
from flotilla_trainer.rank import row_attention
from flotilla_trainer.rank.meeting import Meeting
from flotilla_trainer.rank.worker import RankWorker
from flotilla_trainer.wire.settings import RankSetup


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 whose embedding is its head, too; nobody writes there."""
    place = tmp_path_factory.mktemp("tied")
    tiny_qwen3(tie_word_embeddings=True).save_pretrained(place)
    return place


@pytest.fixture
def started(tmp_path: Path) -> Callable[[str], RankWorker]:
    """A function for `on_ranks` that starts the worker of this rank, with this head on the model in `tmp_path`."""

    def start(head: str) -> RankWorker:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        dist.destroy_process_group()  # a worker forms its own
        setup = RankSetup(
            rank=rank,
            nproc=ranks,
            head=head,
            rendezvous=str(tmp_path / "rendezvous"),
            meet_host="",
            place=rank,
            ranks_here=ranks,
            backend="gloo",
            dtype="float32",
            replicate=1,
            sequence_parallel=1,
            cpu_offload=False,
            memory_fraction=None,
            compile="off",
            model=str(tmp_path),
            instance_id="trainer",
            otlp=(),
            credential_file=None,
        )
        line: Any = ListeningFront()
        return RankWorker(setup, line, Meeting())

    return start


Tensor = torch.Tensor


@pytest.fixture
def kernels_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put dense kernels for CPUs, which want as many key heads as query heads, in the place of those of GPUs."""
    monkeypatch.setattr(row_attention, "_exact_sizes", set())
    monkeypatch.setattr(row_attention, "grid_of", lambda lengths, device: row_attention.Grid.of(lengths))
    for kernel in (dense_forward, dense_backward, ragged_forward, ragged_backward):
        monkeypatch.setattr(row_attention, kernel.__name__, kernel)


def repeated(query: Tensor, *parts: Tensor) -> list[Tensor]:
    return [part.repeat_interleave(query.shape[1] // part.shape[1], 1) for part in parts]


def seen(length: int, window: int) -> dict[str, Tensor | None]:
    """Return the mask of a window, which keeps causal attention as it is where there is none."""
    if not window:
        return {"attn_mask": None}
    visible = torch.ones(length, length, dtype=torch.bool).triu(1 - window).tril()
    return {"attn_mask": torch.zeros(length, length).masked_fill(~visible, float("-inf"))}


def dense_forward(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int = 0
) -> tuple[Tensor, Tensor]:
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    given = (query, *repeated(query, key, value))
    output, normalizers = kernel(*given, 0.0, not window, scale=scale, **seen(query.shape[2], window))
    return output, normalizers


def dense_backward(
    slope: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    normalizers: Tensor,
    scale: float | None,
    window: int = 0,
) -> tuple[Tensor, ...]:
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    given = (slope, query, *repeated(query, key, value), output, normalizers)
    by_query, *others = kernel(*given, 0.0, not window, scale=scale, **seen(query.shape[2], window))
    return by_query, *(by.unflatten(1, (key.shape[1], -1)).sum(2) for by in others)


def sequences(borders: Tensor, reach: int, *parts: Tensor) -> Iterator[list[Tensor]]:
    """Yield each sequence as [1, heads, length, size]."""
    for start, end in pairwise(borders.tolist()):
        assert end - start <= reach
        yield [part[start:end].transpose(0, 1)[None] for part in parts]


def ragged_forward(
    query: Tensor, key: Tensor, value: Tensor, borders: Tensor, reach: int, scale: float | None, window: int
) -> tuple[Tensor, Tensor]:
    found = [dense_forward(*heads, scale, window) for heads in sequences(borders, reach, query, key, value)]
    outputs, normalizers = zip(*found, strict=True)
    return torch.cat([one[0].transpose(0, 1) for one in outputs]), torch.cat(
        [one[0] for one in normalizers], 1
    )


def ragged_backward(
    slope: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    normalizers: Tensor,
    borders: Tensor,
    reach: int,
    scale: float | None,
    window: int,
) -> tuple[Tensor, ...]:
    given = (slope, query, key, value, output, normalizers.T[..., None])
    found = [
        dense_backward(*heads[:5], heads[5][..., 0].contiguous(), scale, window)
        for heads in sequences(borders, reach, *given)
    ]
    return tuple(
        torch.cat([one[0].transpose(0, 1) for one in gradients]) for gradients in zip(*found, strict=True)
    )

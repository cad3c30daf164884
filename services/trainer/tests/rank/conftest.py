"""A model for ranks, and a rank that takes commands."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from flotilla_testing.listening_front import ListeningFront
from flotilla_testing.tiny_qwen3 import tiny_qwen3
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

"""A rank that ends with an unexpected error writes it to its log."""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
from pathlib import Path

import torch.distributed as dist

from flotilla_trainer.rank.main import end_at_once


def end_by_an_error(store: Path, log: Path) -> None:
    gc.freeze()  # what this process left to collect waits for threads that a fork does not have
    descriptor = os.open(log, os.O_CREAT | os.O_WRONLY)
    os.dup2(descriptor, 2)
    sys.__stderr__ = open(2, "w", closefd=False)  # noqa: SIM115 - as in a rank, whose log this is from its fork on
    sys.excepthook = end_at_once
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=dist.FileStore(str(store), 1), rank=0, world_size=1)
    try:
        raise ValueError("the layers disagree")
    except ValueError:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]


def test_an_unexpected_error_is_in_the_log_of_a_rank_that_has_joined_its_gang(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    rank = multiprocessing.get_context("fork").Process(target=end_by_an_error, args=(tmp_path / "store", log))
    rank.start()
    rank.join(60)
    assert rank.exitcode == 1
    assert "ValueError: the layers disagree" in log.read_text()

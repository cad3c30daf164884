"""Ranks for unit tests: forked from the test, so that nothing is imported again and four of them start quickly."""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.compile_fx  # each rank that compiles would import it, for a second and a half
import torch.distributed as dist

from flotilla_testing.credentials import hand_ours_down

hand_ours_down()
LIMIT_S = 240.0


def _meet_and_act(
    rank: int, ranks: int, rendezvous: Path, act: Callable[[], Any], answers: Connection
) -> None:
    # What the parent left to collect is not collected here: gRPC's engine would wait for a thread that no fork has.
    gc.freeze()
    # A fork has none of its parent's threads, and torch would wait for those of its pool.
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(str(rendezvous), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    # A rank that has met the others and ends breaks the connections of one that still meets them.
    dist.barrier()
    answers.send(act())


@pytest.fixture(scope="session")
def on_ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, Callable[[], Any]], list[Any]]:
    """A function that runs another one on several ranks over gloo, and returns the result of each by rank."""

    def run(ranks: int, act: Callable[[], Any]) -> list[Any]:
        context = multiprocessing.get_context("fork")
        rendezvous = tmp_path_factory.mktemp("ranks") / "rendezvous"
        pipes = [context.Pipe(duplex=False) for _ in range(ranks)]
        processes = [
            context.Process(target=_meet_and_act, args=(rank, ranks, rendezvous, act, pipe[1]))
            for rank, pipe in enumerate(pipes)
        ]
        for process in processes:
            process.start()
        try:
            answers = []
            for rank, ((receiving, _), process) in enumerate(zip(pipes, processes, strict=True)):
                heard = wait([receiving, process.sentinel], LIMIT_S)
                assert heard, f"rank {rank} of {ranks} did not answer within {LIMIT_S:g} s"
                assert receiving.poll(), f"rank {rank} of {ranks} died; its error output says of what"
                answers.append(receiving.recv())
            return answers
        finally:
            for process in processes:
                process.kill()
                process.join()

    return run

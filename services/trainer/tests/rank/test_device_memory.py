"""Ranks agree before a pass whether a micro-batch fits, from what smaller ones took."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flotilla_core.config import BatchingConfig, LoraConfig, OptimizerConfig
from flotilla_core.errors import Exhausted
from flotilla_testing.tiny_qwen3 import tiny_qwen3
from flotilla_trainer.rank import device_memory, worker
from flotilla_trainer.rank.compilation import one_pass
from flotilla_trainer.rank.cut import RankMesh
from flotilla_trainer.rank.device_memory import MicroBatchMemory, Taken
from flotilla_trainer.rank.optimizer import PolicyOptimizer
from flotilla_trainer.rank.sharded_model import ShardedModel
from flotilla_trainer.rank.worker import RankWorker
from flotilla_trainer.wire.frames import Frame
from flotilla_trainer.wire.objective import ObjectiveSettings
from flotilla_trainer.wire.settings import VOCABULARY_HEAD, SessionSettings

GPU = torch.device("cuda", 0)
GIB = 1 << 30
OnRanks = Callable[[int, Callable[[], Any]], list[Any]]


def with_room(free: int, monkeypatch: pytest.MonkeyPatch) -> MicroBatchMemory:
    """Return the memory of a GPU with so much room, on which a token takes a mebibyte, and any pass a gibibyte."""
    taken = [0]

    def probe(tokens: int, again: Callable[[], None]) -> None:
        taken[0] = GIB + (tokens << 20)

    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 5 * GIB)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 5 * GIB + taken[0])
    monkeypatch.setattr(device_memory, "free_bytes", lambda device: free)
    monkeypatch.setattr(device_memory, "agree_on_room", lambda missing, device: agreed(missing))
    monkeypatch.setattr(device_memory, "_took", lambda piece, pieces, device: True)
    return MicroBatchMemory(GPU, probe)


def agreed(missing: float) -> None:
    agree_on_room(missing, torch.device("cpu"))


agree_on_room = device_memory.agree_on_room


def test_what_a_micro_batch_takes_follows_from_two_smaller_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    memory = with_room(0, monkeypatch)
    assert memory.require(8192) == GIB + (8192 << 20)
    assert Taken(1.0, 2.0).by(3) == 7.0


@pytest.mark.parametrize(("limit", "left"), [(1.0, 29), (0.5, 10)])
def test_a_rank_may_take_what_is_free_up_to_its_limit(
    limit: float, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (20 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: limit)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 39 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 30 * GIB)
    assert device_memory.free_bytes(GPU) == left * GIB, "20 GiB are free, and torch holds 9 GiB unused"


@pytest.mark.parametrize(("tokens", "fits"), [(2048, True), (4096, False)])
def test_a_rank_without_room_stops_all_ranks_before_the_pass(
    on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch, tokens: int, fits: bool
) -> None:
    def act() -> str:
        rank = dist.get_rank()
        memory = with_room(100 * GIB if rank == 0 else 4 * GIB, monkeypatch)
        try:
            memory.require(tokens)
        except Exhausted as error:
            return str(error)
        return ""

    for said in on_ranks(2, act):
        assert (said == "") == fits
        assert fits or "batching.tokens_per_microbatch" in said
        assert fits or "a rank lacks 1.0 GiB" in said


class SimulatedGpu:
    """The counters of a GPU on which the gradients of a pass take 8 GiB and stay, and a token takes a mebibyte."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gradients = self.peak = 0
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: self.gradients)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: self.reset())
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: self.peak)

    def reset(self) -> None:
        self.peak = self.gradients

    def one_pass(self, tokens: int) -> None:
        """Activations are at their largest before the gradients of this pass are there."""
        self.peak = max(self.peak, self.gradients + (tokens << 20))
        self.gradients = 8 * GIB
        self.peak = max(self.peak, self.gradients)

    def probe(self, tokens: int, again: Callable[[], None] | None = None) -> None:
        """Run what it is asked for, which ends without gradients."""
        self.one_pass(tokens)
        if again is not None:
            again()
            self.one_pass(tokens)
        self.gradients = 0


def test_a_micro_batch_is_measured_beside_the_gradients_of_an_earlier_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    gpu = SimulatedGpu(monkeypatch)
    needed = MicroBatchMemory(GPU, gpu.probe).require(8192)
    assert needed >= 8 * GIB + (8192 << 20)


@pytest.mark.parametrize(("piece", "fits"), [(0.6, True), (0.1, False)])
def test_ranks_take_the_memory_of_a_pass_before_it_begins(
    on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch, piece: float, fits: bool
) -> None:
    def act() -> tuple[str, list[int]]:
        memory = with_room(100 * GIB, monkeypatch)
        asked: list[int] = []
        # Rank 1 has the memory in pieces of so many gibibytes alone.
        largest = 100 * GIB if dist.get_rank() == 0 else piece * GIB

        def took(size: float, pieces: int, device: torch.device) -> bool:
            asked.append(pieces)
            return size <= largest

        monkeypatch.setattr(device_memory, "_took", took)
        try:
            memory.require(1024)
        except Exhausted as error:
            return str(error), asked
        return "", asked

    (said, whole), (_, in_pieces) = on_ranks(2, act)
    assert whole == [1]
    assert in_pieces == ([1, 2, 4] if fits else [1, 2, 4, 8])
    assert (said == "") == fits
    assert fits or "in small pieces only" in said


def test_a_session_begins_with_micro_batches_that_fit(
    on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    def act() -> int:
        return with_room(100 * GIB if dist.get_rank() == 0 else 4 * GIB, monkeypatch).fitting(8192)

    assert on_ranks(2, act) == [2048, 2048]


def test_a_cpu_measures_nothing() -> None:
    def never(tokens: int, again: Callable[[], None]) -> None:
        raise AssertionError(tokens)

    assert MicroBatchMemory(torch.device("cpu"), never).require(1 << 40) == 0.0


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2, alpha=4.0)], ids=["all weights", "adapters"])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_a_measuring_pass_leaves_no_gradient(
    tmp_path: Path, on_ranks: OnRanks, lora: LoraConfig | None, packed: bool
) -> None:
    tiny_qwen3().save_pretrained(tmp_path)

    def act() -> list[str]:
        cpu = torch.device("cpu")
        model = ShardedModel(tmp_path, torch.float32, RankMesh.form("cpu"), cpu, frozen=lora is not None)
        model.load(tmp_path)
        model.adapt(lora, 0)
        one_pass(model, [8, 8, 8], packed, lambda: None)
        return [name for name, parameter in model.trainable().items() if parameter.grad is not None]

    assert on_ranks(1, act) == [[]]


def test_the_optimizer_of_a_session_is_gone_before_that_of_the_next_is_built(
    tmp_path: Path, on_ranks: OnRanks, started: Callable[[str], RankWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_qwen3().save_pretrained(tmp_path)
    session = SessionSettings(ObjectiveSettings(), OptimizerConfig(), BatchingConfig(), 0, total_updates=1)

    def act() -> list[int]:
        rank = started(VOCABULARY_HEAD)
        optimizers: list[weakref.ref[PolicyOptimizer]] = []
        alive: list[int] = []

        def built(model: ShardedModel, settings: OptimizerConfig) -> PolicyOptimizer:
            alive.append(sum(one() is not None for one in optimizers))
            optimizer = PolicyOptimizer(model, settings)
            optimizers.append(weakref.ref(optimizer))
            return optimizer

        monkeypatch.setattr(worker, "PolicyOptimizer", built)
        for _ in range(2):
            rank.run(Frame("open_session", 0, session.fields()))
        return alive

    assert on_ranks(1, act) == [[0, 0]]

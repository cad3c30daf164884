"""Ranks agree before a pass whether a micro-batch fits, from what smaller ones took."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import Qwen3Config, Qwen3ForCausalLM

from flotilla_core.config import LoraConfig
from flotilla_core.errors import Exhausted
from flotilla_trainer.rank import device_memory
from flotilla_trainer.rank.compilation import one_pass
from flotilla_trainer.rank.device_memory import MicroBatchMemory, Taken
from flotilla_trainer.rank.mesh import RankMesh
from flotilla_trainer.rank.sharded_model import ShardedModel

GPU = torch.device("cuda", 0)
GIB = 1 << 30
OnRanks = Callable[[int, Callable[[], Any]], list[Any]]


def with_room(free: int, monkeypatch: pytest.MonkeyPatch) -> MicroBatchMemory:
    """Return the memory of a GPU with so much room, on which a token takes a mebibyte, and any pass a gibibyte."""
    taken = [0]

    def probe(tokens: int) -> None:
        taken[0] = GIB + (tokens << 20)

    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 5 * GIB)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 5 * GIB + taken[0])
    monkeypatch.setattr(device_memory, "free_bytes", lambda device: free)
    monkeypatch.setattr(device_memory, "agree_on_room", lambda missing, device: agreed(missing))
    return MicroBatchMemory(GPU, probe)


def agreed(missing: float) -> None:
    agree_on_room(missing, torch.device("cpu"))


agree_on_room = device_memory.agree_on_room


def test_what_a_micro_batch_takes_follows_from_two_smaller_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    memory = with_room(0, monkeypatch)
    assert memory.require(8192) == GIB + (8192 << 20)
    assert Taken(1.0, 2.0).by(3) == 7.0


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


def test_a_cpu_measures_nothing() -> None:
    def never(tokens: int) -> None:
        raise AssertionError(tokens)

    assert MicroBatchMemory(torch.device("cpu"), never).require(1 << 40) == 0.0


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2, alpha=4.0)], ids=["all weights", "adapters"])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_a_measuring_pass_leaves_no_gradient(
    tmp_path: Path, on_ranks: OnRanks, lora: LoraConfig | None, packed: bool
) -> None:
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = Qwen3Config(vocab_size=31, num_hidden_layers=2, head_dim=8, **shape)
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)

    def act() -> list[str]:
        cpu = torch.device("cpu")
        model = ShardedModel(tmp_path, torch.float32, RankMesh.form("cpu"), cpu, frozen=lora is not None)
        model.load(tmp_path)
        model.adapt(lora, 0)
        one_pass(model, [8, 8, 8], packed)
        return [name for name, parameter in model.trainable().items() if parameter.grad is not None]

    assert on_ranks(1, act) == [[]]

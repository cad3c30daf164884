"""The KV cache's memory: which pieces are unmapped, and what is there when they are mapped again."""

from __future__ import annotations

import sys
from dataclasses import fields
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from flotilla_core.errors import Exhausted, Internal
from flotilla_generator.engine.vllm.kv_memory import KvMemory, pieces_of, tensors_in

TAIL = 0x9000


def block(address: int, state: str = "active_allocated") -> dict[str, Any]:
    return {"address": address, "state": state}


def test_only_pieces_with_nothing_but_the_cache_are_found() -> None:
    segments = [
        {"address": 1, "blocks": [block(1), block(2, "inactive")]},
        {"address": 10, "blocks": [block(10), block(11)]},
        {"address": 20, "blocks": [block(20), block(21, "active_awaiting_free")]},
        {"address": 30, "blocks": [block(30)]},
        {"address": 40, "blocks": [block(40, "inactive")]},
    ]
    assert pieces_of(segments, {1, 10, 20, 40}) == [1]
    assert pieces_of(segments, {1, 10, 11}) == [1, 10]


def test_layers_with_several_tensors_are_seen_whole() -> None:
    one, two, three = (torch.zeros(1) for _ in range(3))
    assert list(tensors_in([one, [two, (three,)]])) == [one, two, three]


class Gpu:
    """vLLM's allocator as far as it is used, over the memory of two layers on the host."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.layers = [torch.ones(8), torch.ones(8)]
        storages = [layer.untyped_storage() for layer in self.layers]
        pieces = {
            at.data_ptr(): SimpleNamespace(handle=(0, at.nbytes(), at.data_ptr(), 0), is_asleep=False)
            for at in storages
        }
        self.known = {**pieces, TAIL: SimpleNamespace(handle=(0, 1 << 30, TAIL, 0), is_asleep=False)}
        self.others = 0
        """Pieces for which another process has left no room."""
        self.mapped = list(self.known)
        segments = [{"address": at, "blocks": [block(at)]} for at in self.known]
        module: Any = ModuleType("vllm.device_allocator.cumem")
        module.CuMemAllocator = SimpleNamespace(
            get_instance=lambda: SimpleNamespace(pointer_to_data=self.known)
        )
        module.unmap_and_release = lambda handle: self.mapped.remove(handle[2])
        module.create_and_map = self._map
        parent: Any = ModuleType("vllm.device_allocator")
        parent.cumem = module
        monkeypatch.setitem(sys.modules, "vllm.device_allocator", parent)
        monkeypatch.setitem(sys.modules, "vllm.device_allocator.cumem", module)
        for name, answer in {
            "synchronize": None,
            "empty_cache": None,
            "memory_snapshot": segments,
            "mem_get_info": (1, 2),
        }.items():
            monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
        self.runner = SimpleNamespace(kv_caches=[layer.view(2, 4).t() for layer in self.layers])
        self.memory = KvMemory(SimpleNamespace(device=SimpleNamespace(type="cuda"), model_runner=self.runner))

    def _map(self, handle: tuple[int, int, int, int]) -> None:
        if self.others and len(self.mapped) > 1:
            raise RuntimeError("CUDA Error: out of memory")
        self.mapped.append(handle[2])


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch)


def test_the_cache_alone_is_unmapped_once_and_comes_back_as_zeros(gpu: Gpu) -> None:
    assert [gpu.memory.give_back(), gpu.memory.give_back()] == [2 * 32, 0]
    assert gpu.mapped == [TAIL]
    gpu.memory.take_again()
    assert len(gpu.mapped) == 3
    assert not any(layer.any() for layer in gpu.layers)


def test_a_gpu_without_room_is_named_and_what_was_mapped_is_not_mapped_twice(gpu: Gpu) -> None:
    gpu.memory.give_back()
    gpu.others = 1
    with pytest.raises(Exhausted, match=r"no room for the 64 bytes.*out of memory.*kv_cache_gib"):
        gpu.memory.take_again()
    gpu.others = 0
    gpu.memory.take_again()
    assert sorted(gpu.mapped) == sorted(gpu.known)


def test_a_cache_outside_of_the_allocator_is_an_error_and_not_a_sleep_for_nothing(gpu: Gpu) -> None:
    gpu.known.clear()
    with pytest.raises(Internal, match="cannot be given back"):
        gpu.memory.give_back()


def test_a_cpu_has_nothing_to_give() -> None:
    memory = KvMemory(SimpleNamespace(device=torch.device("cpu")))
    assert memory.give_back() == 0
    memory.take_again()


def test_the_installed_vllm_has_the_names_that_are_used() -> None:
    from vllm.device_allocator import AllocationData, cumem

    assert callable(cumem.create_and_map) and callable(cumem.unmap_and_release)
    assert {"handle", "is_asleep"} <= {field.name for field in fields(AllocationData)}
    assert vars(cumem.CuMemAllocator())["pointer_to_data"] == {}

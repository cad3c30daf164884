"""Claims about the experts that vLLM keeps in two parameters of a layer, on layers with its attributes."""

from __future__ import annotations

from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from flotilla_generator.engine.vllm.fused_experts import packing_again, proving_experts
from flotilla_generator.engine.vllm.live_regions import LiveRegions, NoRegionsError
from flotilla_generator.engine.vllm.standby import Standby
from flotilla_generator.engine.vllm.weight_check import proving
from flotilla_weights.digest import tensor_digests
from flotilla_weights.inbox import StagedModel

EXPERTS, WIDTH, INNER = 4, 6, 2
Backend = Enum("Backend", ["TRITON", "CPU", "FLASHINFER_CUTLASS"])


class Packing:
    """Turns the numbers of each expert around, as a CPU's kernels might want them."""

    def process_weights_after_loading(self, layer: Any) -> None:
        for name in ("w13_weight", "w2_weight"):
            packed = getattr(layer, name).data.flip(-1).clone()
            setattr(layer, name, nn.Parameter(packed, requires_grad=False))


class UnquantizedFusedMoEMethod(nn.Module):
    """Packs at the first load only, as vLLM's does."""

    def __init__(self, backend: Backend) -> None:
        super().__init__()
        self.unquantized_backend = backend
        self.moe_kernel: Any = None
        self.moe_quant_config: Any = None

    def process_weights_after_loading(self, layer: Any) -> None:
        if self.moe_kernel is None:
            self.moe_kernel = SimpleNamespace(fused_experts=Packing())
            if self.unquantized_backend is Backend.CPU:
                self.moe_kernel.fused_experts.process_weights_after_loading(layer)


class Fp8MoEMethod(UnquantizedFusedMoEMethod):
    """Multiplies by other numbers than the checkpoint's."""


class Experts(nn.Module):
    """One worker's part of the experts of a layer."""

    ckpt_gate_proj_name, ckpt_up_proj_name, ckpt_down_proj_name = "gate_proj", "up_proj", "down_proj"
    global_num_experts = EXPERTS

    def __init__(self, method: UnquantizedFusedMoEMethod, rank: int = 0, ranks: int = 1) -> None:
        super().__init__()
        self.quant_method = method
        parallel = SimpleNamespace(tp_rank=rank, tp_size=ranks)
        self.moe_config = SimpleNamespace(moe_parallel_config=parallel)
        self._inner = INNER // ranks
        self.unpack()

    def unpack(self) -> None:
        for name, shape in {"w13": (2 * self._inner, WIDTH), "w2": (WIDTH, self._inner)}.items():
            empty = nn.Parameter(torch.zeros(EXPERTS, *shape), requires_grad=False)
            setattr(self, f"{name}_weight", empty)

    def _map_global_expert_id_to_local_expert_id(self, expert: int) -> int:
        return expert

    def load(self, expert: int, part: str, given: torch.Tensor) -> None:
        parallel = self.moe_config.moe_parallel_config
        mine = given.chunk(parallel.tp_size, int(part == "down_proj"))[parallel.tp_rank]
        first = self._inner if part == "up_proj" else 0
        target = self.w2_weight if part == "down_proj" else self.w13_weight[:, first : first + self._inner]
        target.data[expert].copy_(mine)


class Model(nn.Module):
    def __init__(self, method: UnquantizedFusedMoEMethod, rank: int = 0, ranks: int = 1) -> None:
        super().__init__()
        self.experts = nn.Module()
        self.experts.routed_experts = Experts(method, rank, ranks)

    def load_weights(self, weights: Any) -> None:
        for name, tensor in weights:
            _, expert, part, _ = name.split(".")
            self.experts.routed_experts.load(int(expert), part, tensor)

    def reload(self, staged: StagedModel) -> None:
        layer = self.experts.routed_experts
        layer.unpack()
        self.load_weights(staged.weights)
        layer.quant_method.process_weights_after_loading(layer)


def staged(seed: int = 0, without: str = "") -> StagedModel:
    random = torch.Generator().manual_seed(seed)
    shapes = {"gate_proj": (INNER, WIDTH), "up_proj": (INNER, WIDTH), "down_proj": (WIDTH, INNER)}
    named = [
        (f"experts.{expert}.{part}.weight", torch.randn(shape, generator=random))
        for expert in range(EXPERTS)
        for part, shape in shapes.items()
    ]
    named = [(name, tensor) for name, tensor in named if name != without]
    return StagedModel(named, tensor_digests(tensor for _, tensor in named), {}, 0.0)


def loaded(backend: Backend, **where: int) -> Model:
    model = Model(UnquantizedFusedMoEMethod(backend), **where)
    model.reload(staged())
    return model


def faults(model: Model, brought: StagedModel) -> list[str]:
    return [fault for fault in proving(model, brought, {}) if fault is not None]


@pytest.mark.parametrize("backend", [Backend.TRITON, Backend.CPU])
@pytest.mark.parametrize("rank", [0, 1])
def test_experts_that_are_what_was_staged_are_proved(backend: Backend, rank: int) -> None:
    assert faults(loaded(backend, rank=rank, ranks=2), staged()) == []


@pytest.mark.parametrize("backend", [Backend.TRITON, Backend.CPU])
def test_a_stale_expert_and_swapped_ones_are_found_and_named(backend: Backend) -> None:
    model = loaded(backend)
    layer = model.experts.routed_experts
    layer.w2_weight.data[3, 0, 0] += 1e-6
    layer.w13_weight.data[[0, 1]] = layer.w13_weight.data[[1, 0]]
    found = faults(model, staged())
    assert {int(fault.split(".")[1]) for fault in found} == {0, 1, 3}
    assert [fault for fault in found if fault.startswith("experts.3.down_proj.weight: live expert differs")]


@pytest.mark.parametrize("backend", [Backend.TRITON, Backend.CPU])
def test_an_expert_that_did_not_come_is_named(backend: Backend) -> None:
    missing = "experts.2.up_proj.weight"
    assert any(fault.startswith(missing) for fault in faults(loaded(backend), staged(without=missing)))


def test_a_reload_that_packs_nothing_is_found_and_one_that_packs_again_is_proved() -> None:
    model = loaded(Backend.CPU)
    model.reload(staged(1))
    assert len(faults(model, staged(1))) == 2 * EXPERTS
    kernel = model.experts.routed_experts.quant_method.moe_kernel
    with packing_again(model):
        model.reload(staged(2))
    assert faults(model, staged(2)) == []
    assert model.experts.routed_experts.quant_method.moe_kernel is kernel


@pytest.mark.parametrize(
    "method", [UnquantizedFusedMoEMethod(Backend.FLASHINFER_CUTLASS), Fp8MoEMethod(Backend.TRITON)]
)
def test_experts_in_another_form_are_not_taken_for_proved(method: UnquantizedFusedMoEMethod) -> None:
    method.moe_kernel = SimpleNamespace(fused_experts=Packing())
    model = Model(method).to("meta")
    (fault,) = list(proving_experts(model, staged()))
    assert fault is not None and "cannot be proved" in fault


def test_plain_experts_are_copied_to_where_a_load_once_put_them() -> None:
    model = loaded(Backend.TRITON)
    regions = LiveRegions.learned(model, staged(1))
    assert faults(model, staged()) == [], "a rehearsal writes nothing"
    standby = Standby.beside(regions)
    filling = standby.begin()
    filling.put(staged(2).weights)
    expected = filling.settle(staged(2).digests)
    standby.commit()
    assert faults(model, staged(2)) == [] and regions.differing(expected) == []
    model.experts.routed_experts.w2_weight.data[1, 0, 0] += 1e-6
    assert [fault.split(":")[0] for fault in regions.differing(expected)] == ["experts.1.down_proj.weight"]


def test_packed_experts_are_not_copied() -> None:
    with pytest.raises(NoRegionsError, match="UnquantizedFusedMoEMethod"):
        LiveRegions.learned(loaded(Backend.CPU), staged())

"""The experts of a layer, which vLLM keeps in two parameters: packed again after a reload, and proved.

Invariants: nothing is found wrong with a layer only when every expert of this worker equals, bit for bit, what was
staged under its names in the checkpoint: the parameters themselves where the kernels read them as they are (on GPUs),
and what vLLM's own packing makes of the staged tensors otherwise (on CPUs). Experts that are kept in another form are
refused by name; a commit that could not be proved is none.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from flotilla_weights.inbox import StagedModel

METHOD = "UnquantizedFusedMoEMethod"
"""The one of vLLM's methods that multiplies by the numbers of the checkpoint."""
PLAIN_BACKENDS = ("TRITON", "BATCHED_TRITON")
"""The kernels of this method that read the parameters as they were loaded."""
CONTAINER = ".routed_experts"
"""The module inside a checkpoint's `experts` in which vLLM keeps them."""


def expert_layers(model: nn.Module) -> list[tuple[str, Any]]:
    """Return the layers with fused experts, by the name of the experts in the checkpoint."""
    return [
        (name.removesuffix(CONTAINER), layer)
        for name, layer in model.named_modules()
        if isinstance(getattr(layer, "w13_weight", None), torch.Tensor) and hasattr(layer, "quant_method")
    ]


def are_plain(layer: Any) -> bool:
    """Return whether the kernels of this layer multiply by its parameters as they were loaded."""
    method = layer.quant_method
    backend = getattr(method, "unquantized_backend", None)
    return type(method).__name__ == METHOD and getattr(backend, "name", "") in PLAIN_BACKENDS


@contextmanager
def packing_again(model: nn.Module) -> Iterator[None]:
    """Have a reload pack experts for the kernels of CPUs, which vLLM does at the first load only."""
    methods = {
        id(layer.quant_method): layer.quant_method for _, layer in expert_layers(model) if _packer(layer)
    }

    def packing(method: Any, original: Any) -> Any:
        def process(layer: Any) -> None:
            # Without a kernel vLLM takes this load for the first one. The kernel holds no weight and stays as it was.
            kernel, config = method.moe_kernel, method.moe_quant_config
            method.moe_kernel = None
            try:
                original(layer)
            finally:
                method.moe_kernel, method.moe_quant_config = kernel, config

        return process

    for method in methods.values():
        method.process_weights_after_loading = packing(method, method.process_weights_after_loading)
    try:
        yield
    finally:
        for method in methods.values():
            del method.process_weights_after_loading


def proving_experts(model: nn.Module, staged: StagedModel) -> Iterator[str | None]:
    """Compare all experts with what was staged, some at a time: for each step what is wrong, or nothing."""
    layers = expert_layers(model)
    tensors = dict(staged.as_sent()) if layers else {}
    for name, layer in layers:
        if hasattr(layer, "w13_bias"):
            yield f"{name}: its experts cannot be proved: they have biases"
        elif are_plain(layer):
            yield from _proving_plain(_Experts(name, layer, tensors))
        elif (packer := _packer(layer)) is not None:
            yield from _proving_packed(_Experts(name, layer, tensors), packer)
        else:
            yield (
                f"{name}: its experts cannot be proved: {type(layer.quant_method).__name__} keeps them in another form "
                "than the checkpoint; on GPUs set moe_backend: triton in generator.engine_options"
            )


class _Experts:
    """The experts of one layer as they were staged; of each, the part that this worker holds."""

    def __init__(self, name: str, layer: Any, tensors: dict[str, torch.Tensor]) -> None:
        self.name = name
        self.layer = layer
        self.count: int = layer.global_num_experts
        self._tensors = tensors
        parallel = layer.moe_config.moe_parallel_config
        self._rank: int = parallel.tp_rank
        self._ranks: int = parallel.tp_size

    def place(self, expert: int) -> int:
        """Return where in its parameters this worker keeps an expert; -1 if another one has it."""
        return int(self.layer._map_global_expert_id_to_local_expert_id(expert))

    def named(self, expert: int) -> list[tuple[str, torch.Tensor | None]]:
        """Return gate, up and down of an expert, by their names in the checkpoint."""
        layer = self.layer
        parts = (layer.ckpt_gate_proj_name, 0), (layer.ckpt_up_proj_name, 0), (layer.ckpt_down_proj_name, 1)
        found: list[tuple[str, torch.Tensor | None]] = []
        for part, dimension in parts:
            name = f"{self.name}.{expert}.{part}.weight"
            tensor = self._tensors.get(name)
            if tensor is not None:
                tensor = tensor.to(layer.w13_weight).chunk(self._ranks, dimension)[self._rank]
            found.append((name, tensor))
        return found


def _proving_plain(experts: _Experts) -> Iterator[str | None]:
    """Compare the tensors of a layer one by one; a GPU answers once for all of them."""
    layer = experts.layer
    half = layer.w13_weight.shape[1] // 2
    names: list[str] = []
    wrong: list[torch.Tensor] = []
    for expert in range(experts.count):
        place = experts.place(expert)
        if place < 0:
            continue
        both, down = layer.w13_weight[place], layer.w2_weight[place]
        for (name, tensor), live in zip(experts.named(expert), (both[:half], both[half:], down), strict=True):
            if tensor is None or tensor.shape != live.shape:
                yield _unlike(name)
                continue
            names.append(name)
            wrong.append((live != tensor).any())
    flags = torch.stack(wrong).tolist() if wrong else []
    yield from (_unlike(name) if flag else None for name, flag in zip(names, flags, strict=True))


def _proving_packed(experts: _Experts, packer: Any) -> Iterator[str | None]:
    """Pack what was staged, expert by expert, and compare it with what lies in the layer."""
    layer = experts.layer
    for expert in range(experts.count):
        place = experts.place(expert)
        if place < 0:
            continue
        (gate_name, gate), (up_name, up), (down_name, down) = experts.named(expert)
        if gate is None or up is None or down is None:
            lacking = {gate_name: gate, up_name: up, down_name: down}
            yield _unlike(next(name for name, tensor in lacking.items() if tensor is None))
            continue
        packed = nn.Module()
        packed.w13_weight = nn.Parameter(torch.cat([gate, up])[None], requires_grad=False)
        packed.w2_weight = nn.Parameter(down[None].contiguous(), requires_grad=False)
        packer.process_weights_after_loading(packed)
        both = torch.equal(packed.w13_weight[0], layer.w13_weight[place])
        yield (
            None
            if both
            else f"{gate_name} or {up_name.rpartition('.')[0]}: live experts differ from what was staged"
        )
        yield None if torch.equal(packed.w2_weight[0], layer.w2_weight[place]) else _unlike(down_name)


def _packer(layer: Any) -> Any | None:
    """Return what packs the experts of a CPU's kernels, with no tie to the layer."""
    method = layer.quant_method
    kernel = getattr(method, "moe_kernel", None)
    if type(method).__name__ != METHOD or kernel is None or layer.w13_weight.device.type != "cpu":
        return None
    return copy.copy(kernel.fused_experts)


def _unlike(name: str) -> str:
    return f"{name}: live expert differs from what was staged"

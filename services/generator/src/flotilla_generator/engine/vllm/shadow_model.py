"""A second body for the live model: it is loaded while the live one decodes, and then they exchange their weights.

Invariants: a twin has the modules of its model and tensors of its own, so loading it changes nothing that decodes; an
exchange moves references only, so it takes no longer for a large model; afterwards the twin holds what was live. A
model whose layers keep weights in other places than parameters and packed CPU kernels has no twin that can be trusted.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch

KERNEL = "cpu_linear"
"""The attribute in which vLLM keeps the packed copy of a matrix on CPUs."""
HARMLESS = (bool, int, float, str, type(None))


class ShadowModel:
    """One twin, for one exchange."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._live = model
        self._twins: dict[int, torch.nn.Module] = {}
        self._tensors: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._layers: list[tuple[torch.nn.Module, torch.nn.Module]] = []
        self.model = self._of(model)

    def forget_how_to_load(self) -> None:
        """After loading: drop what ties its tensors to its layers in circles, so that it is freed once it is let go."""
        for _, mine in self._tensors.values():
            mine.__dict__.clear()
        for _, twin in self._layers:
            _forget_reload(twin)

    def keeps_weights_elsewhere(self) -> str:
        """After loading: the first place where a layer keeps what an exchange would not move, or nothing."""
        for live, twin in self._layers:
            if twin is self.model:
                continue
            before = vars(live)
            for name, value in vars(twin).items():
                known = name in _CONTAINERS or name == KERNEL or isinstance(value, HARMLESS)
                if not known and not _same(before.get(name), value):
                    return f"{type(twin).__name__}.{name}"
        return ""

    def exchange(self) -> None:
        """Exchange the weights of the live model and the twin."""
        for live, twin in self._tensors.values():
            live.data, twin.data = twin.data, live.data
        for layer, other in self._layers:
            if KERNEL in vars(layer):
                kernel = layer.cpu_linear
                layer.cpu_linear, other.cpu_linear = other.cpu_linear, kernel

    def _of(self, module: torch.nn.Module) -> torch.nn.Module:
        known = self._twins.get(id(module))
        if known is not None:
            return known
        twin: torch.nn.Module = object.__new__(type(module))
        self._twins[id(module)] = twin
        self._layers.append((module, twin))
        own: dict[str, Any] = {
            "_parameters": {
                name: self._own(tensor, module, twin) for name, tensor in module._parameters.items()
            },
            "_buffers": {
                name: tensor
                if name in module._non_persistent_buffers_set
                else self._own(tensor, module, twin)
                for name, tensor in module._buffers.items()
            },
            "_non_persistent_buffers_set": set(module._non_persistent_buffers_set),
            "_modules": {
                name: None if child is None else self._of(child) for name, child in module._modules.items()
            },
        }
        vars(twin).update(vars(module) | own)
        _reload_like(module, twin)
        return twin

    def _own(
        self, tensor: torch.Tensor | None, live: torch.nn.Module, twin: torch.nn.Module
    ) -> torch.Tensor | None:
        """A tensor of its own with the attributes by which vLLM loads it; tensors that are shared stay shared."""
        if tensor is None:
            return None
        if id(tensor) not in self._tensors:
            self._tensors[id(tensor)] = (tensor, _like(tensor, tensor.data.clone(), live, twin))
        return self._tensors[id(tensor)][1]


def _same(before: Any, value: Any) -> bool:
    tensors = isinstance(before, torch.Tensor) and isinstance(value, torch.Tensor)
    return before is value or (tensors and torch.equal(before, value))


_CONTAINERS = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


def _reload_like(live: torch.nn.Module, twin: torch.nn.Module) -> None:
    """Give the twin the layout of each layer before packing, which vLLM recorded at boot for the live model."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    def copied(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: _like(tensor, tensor.data.clone(), live, twin) for name, tensor in tensors.items()}

    recorded, mine = get_layerwise_info(live), get_layerwise_info(twin)
    parameters, buffers = recorded.restore_metadata
    mine.restore_metadata, mine.restore_device = (
        (copied(parameters), copied(buffers)),
        recorded.restore_device,
    )


def _forget_reload(twin: torch.nn.Module) -> None:
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    get_layerwise_info(twin).restore_metadata = ({}, {})


def _like(
    tensor: torch.Tensor, data: torch.Tensor, live: torch.nn.Module, twin: torch.nn.Module
) -> torch.Tensor:
    """`data` with the class and the attributes of `tensor`; what loads into the layer loads into its twin."""

    def turned(value: Any) -> Any:
        while getattr(value, "__name__", "") == "online_process_loader":  # left by a reload in place
            value = value.__wrapped__
        if isinstance(value, MethodType) and value.__self__ is live:
            return MethodType(value.__func__, twin)
        return value

    data.__class__ = tensor.__class__
    data.__dict__ = {name: turned(value) for name, value in tensor.__dict__.items()}
    return data

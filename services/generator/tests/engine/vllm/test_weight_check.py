"""A quantized matrix is proved to be made of what was loaded, and anything else is found."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from flotilla_generator.engine.vllm.weight_check import QuantizedMatrix, recording


class ByChannel:
    """What vLLM does with a matrix: 8-bit floats, and one scale for each output and each token."""

    def process_weights_after_loading(self, layer: Any) -> None:
        scale = layer.weight.float().abs().amax(1, keepdim=True) / 448
        made = (layer.weight.float() / scale).to(torch.float8_e4m3fn)
        layer.weight = nn.Parameter(made.t(), requires_grad=False)
        layer.weight_scale = nn.Parameter(scale, requires_grad=False)

    def apply(self, layer: Any, rows: torch.Tensor) -> torch.Tensor:
        scale = rows.float().abs().amax(1, keepdim=True) / 448
        quantized = (rows.float() / scale).to(torch.float8_e4m3fn).float()
        return ((quantized @ layer.weight.float()) * scale * layer.weight_scale.T).to(rows.dtype)


class Layer(nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.input_size_per_partition = weight.shape[1]
        self.quant_method = ByChannel()
        self.weight = nn.Parameter(weight, requires_grad=False)


def weights(seed: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return (torch.randn(48, 32, generator=random) * 0.02).to(torch.bfloat16)


def loaded(weight: torch.Tensor) -> tuple[Layer, QuantizedMatrix]:
    """Load a layer as vLLM does, under the recorder."""
    layer = Layer(weight)
    model = SimpleNamespace(named_modules=lambda: [("layer", layer)])
    random = torch.Generator().manual_seed(5)
    with recording(model, random) as recorded:  # type: ignore[arg-type]
        layer.quant_method.process_weights_after_loading(layer)
    (made,) = recorded.values()
    assert isinstance(made, QuantizedMatrix)
    return layer, made


@pytest.mark.parametrize("seed", range(8))
def test_what_the_quantizer_made_of_the_loaded_matrix_agrees(seed: int) -> None:
    layer, made = loaded(weights(seed))
    assert made.agree_with(layer)


def test_a_matrix_of_an_older_version_is_found_however_close_it_is() -> None:
    stale, _ = loaded(weights(0))
    changed = weights(0)
    changed[7, 3] *= 1.25
    layer, made = loaded(changed)
    assert not made.agree_with(stale) and made.agree_with(layer)
    layer.weight.data.copy_(stale.weight.data)  # the scales are new, the numbers are not
    assert not made.agree_with(layer)


def test_a_quantizer_that_makes_something_else_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def transposed(self: ByChannel, layer: Any) -> None:
        other = Layer(layer.weight.flip(1))
        ByChannel.process(self, other)
        layer.weight, layer.weight_scale = other.weight, other.weight_scale

    monkeypatch.setattr(ByChannel, "process", ByChannel.process_weights_after_loading, raising=False)
    monkeypatch.setattr(ByChannel, "process_weights_after_loading", transposed)
    layer, made = loaded(weights(1))
    assert not made.agree_with(layer)


def test_a_kernel_that_takes_another_scale_is_found() -> None:
    layer, made = loaded(weights(2))
    method = layer.quant_method
    layer.quant_method = SimpleNamespace(apply=lambda layer, rows: method.apply(layer, rows) * 1.1)
    assert not made.agree_with(layer)

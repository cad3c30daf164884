"""A twin is loaded beside the live model, and then they exchange their weights and nothing else."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from flotilla_generator.engine.vllm import shadow_model as twins
from flotilla_generator.engine.vllm.shadow_model import ShadowModel


class Layer(nn.Module):
    """A matrix, and the packed copy that multiplies."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("table", torch.ones(2), persistent=False)
        self.pack()

    def load(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        parameter.data.copy_(value)

    def pack(self) -> None:
        packed = self.weight.detach().clone()
        self.cpu_linear = lambda x: x @ packed.T


class Model(nn.Module):
    """A tied head over an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = Layer(nn.Parameter(torch.zeros(2, 2), requires_grad=False))
        self.embedding.weight.weight_loader = self.embedding.load
        self.head = Layer(self.embedding.weight)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Model:
    # What vLLM recorded at boot is vLLM's; the tests with a real engine load twins through it.
    monkeypatch.setattr(twins, "_reload_like", lambda live, twin: None)
    monkeypatch.setattr(twins, "_forget_reload", lambda twin: None)
    return Model()


def load(model: Model, value: float) -> None:
    model.embedding.weight.data.fill_(value)
    model.head.scale.fill_(value)
    for layer in (model.embedding, model.head):
        layer.pack()


def held(model: Model) -> list[float]:
    row = torch.tensor([1.0, 0.0])
    packed = [float(layer.cpu_linear(row)[0]) for layer in (model.embedding, model.head)]
    return [
        float(model.embedding.weight[0, 0]),
        float(model.head.weight[0, 0]),
        *packed,
        float(model.head.scale[0]),
    ]


def test_what_is_loaded_into_a_twin_is_live_after_the_exchange_and_not_before(model: Model) -> None:
    weight, layers = model.head.weight, list(model.modules())
    load(model, 1.0)
    twin = ShadowModel(model)
    load(twin.model, 2.0)
    assert held(model) == [1.0] * 5 and not twin.keeps_weights_elsewhere()
    twin.exchange()
    assert held(model) == [2.0] * 5 and held(twin.model) == [1.0] * 5
    assert (
        model.head.weight is weight and model.embedding.weight is weight and list(model.modules()) == layers
    )


def test_buffers_that_no_checkpoint_holds_are_shared(model: Model) -> None:
    twin = ShadowModel(model)
    assert twin.model.head.table is model.head.table
    assert twin.model.head.scale is not model.head.scale


def test_a_twin_is_freed_as_soon_as_it_is_let_go(model: Model) -> None:
    gc.disable()
    try:
        twin = ShadowModel(model)
        assert twin.model.head.weight.weight_loader.__self__ is twin.model.embedding
        body = weakref.ref(twin.model.embedding)
        twin.forget_how_to_load()
        del twin
        assert body() is None
        assert model.head.weight.weight_loader.__self__ is model.embedding
    finally:
        gc.enable()


def test_a_layer_that_keeps_weights_in_another_place_is_named(model: Model) -> None:
    model.head.scales_on_the_host = torch.ones(1)
    twin = ShadowModel(model)
    twin.model.head.scales_on_the_host = torch.ones(1)
    assert not twin.keeps_weights_elsewhere(), "they are equal"
    twin.model.head.absorbed = torch.ones(1)
    assert twin.keeps_weights_elsewhere() == "Layer.absorbed"

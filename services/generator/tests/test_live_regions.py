"""Claims about commits that copy a checkpoint's tensors to where vLLM's loaders once put them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from flotilla_generator.engine.vllm import live_regions
from flotilla_generator.engine.vllm.live_regions import LiveRegions, NoRegionsError
from flotilla_generator.engine.vllm.live_weights import LiveModel, Unloaded
from flotilla_weights.digest import tensor_digests
from flotilla_weights.inbox import StagedModel

WIDTH = 8
Named = Iterable[tuple[str, torch.Tensor]]
Loader = Callable[[nn.Parameter, torch.Tensor, str], None]


class UnquantizedLinearMethod:
    """Multiplies by the parameter itself."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Nothing is left to do."""

    def apply(self, layer: Any, inputs: torch.Tensor) -> torch.Tensor:
        return inputs @ layer.weight.T


class PackingMethod(UnquantizedLinearMethod):
    """Multiplies by something made of it."""


class Matrix(nn.Module):
    def __init__(self, rows: int, width: int = WIDTH, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows, width, dtype=dtype), requires_grad=False)
        self.quant_method = UnquantizedLinearMethod()
        self.input_size = width


class Model(nn.Module):
    """What vLLM does to weights: some share a parameter, one is padded, one is a slice, and the head is tied."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = Matrix(12, dtype=dtype)
        self.qkv = Matrix(9, dtype=dtype)
        self.down = Matrix(WIDTH, WIDTH // 2, dtype=dtype)
        self.norm = nn.Linear(WIDTH, 1, bias=False).requires_grad_(False)
        self.norm.weight = nn.Parameter(torch.zeros(WIDTH, dtype=dtype), requires_grad=False)
        self.lm_head = Matrix(12, dtype=dtype)
        self.lm_head.weight = self.embed.weight
        self.loaders: dict[str, Callable[[torch.Tensor], None]] = {
            "embed.weight": self.load_embed,
            "q.weight": lambda given: self.load_rows(given, 0),
            "k.weight": lambda given: self.load_rows(given, 4),
            "down.weight": self.load_slice,
            "norm.weight": self.load_norm,
        }

    def load_embed(self, given: torch.Tensor) -> None:
        self.embed.weight[: len(given)].data.copy_(given)
        self.embed.weight[len(given) :].data.fill_(0)

    def load_rows(self, given: torch.Tensor, start: int) -> None:
        self.qkv.weight.data.narrow(0, start, len(given)).copy_(given)

    def load_norm(self, given: torch.Tensor) -> None:
        self.norm.weight.data.copy_(given)

    def load_slice(self, given: torch.Tensor) -> None:
        self.down.weight.data.copy_(given.narrow(1, WIDTH // 2, WIDTH // 2))

    def load_weights(self, weights: Named) -> None:
        for name, tensor in weights:
            self.loaders[name](tensor)


SHAPES = {
    "embed.weight": (10, WIDTH),
    "q.weight": (4, WIDTH),
    "k.weight": (5, WIDTH),
    "down.weight": (WIDTH, WIDTH),
    "norm.weight": (WIDTH,),
}


def staged(seed: int, dtype: torch.dtype = torch.float32) -> StagedModel:
    """Tensors in one bucket, as they arrive."""
    random = torch.Generator().manual_seed(seed)
    sizes = [int(torch.Size(shape).numel()) for shape in SHAPES.values()]
    bucket = torch.randn(sum(sizes), generator=random).to(dtype)
    parts = bucket.split(sizes)
    named = [(name, part.view(shape)) for (name, shape), part in zip(SHAPES.items(), parts, strict=True)]
    return StagedModel(named, tensor_digests(tensor for _, tensor in named), {}, 0.0)


def loaded(model: Model, seed: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """What a load of these weights makes of the model."""
    with torch.no_grad():
        model.load_weights(staged(seed, dtype).weights)
    return {name: parameter.clone() for name, parameter in model.named_parameters()}


def learned(model: Model, seed: int = 1, dtype: torch.dtype = torch.float32) -> LiveRegions:
    regions = LiveRegions.learned(model, staged(seed, dtype))
    loaded(model, seed, dtype)
    regions.require_agreement(staged(seed, dtype))
    return regions


def faults(regions: LiveRegions, brought: StagedModel) -> list[str]:
    return [fault for fault in regions.fill(brought) if fault is not None]


def test_a_rehearsal_writes_nothing() -> None:
    model = Model()
    before = loaded(model, 1)
    LiveRegions.learned(model, staged(2))
    assert all(torch.equal(model.get_parameter(name), tensor) for name, tensor in before.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copies_make_the_model_that_a_load_makes(dtype: torch.dtype) -> None:
    model = Model(dtype)
    regions = learned(model)
    assert faults(regions, staged(3)) == []
    copied = {name: parameter.clone() for name, parameter in model.named_parameters()}
    for name, tensor in loaded(model, 3).items():
        assert torch.equal(copied[name], tensor), name


def test_sums_with_adapters_are_copied_as_they_are_loaded() -> None:
    model = Model()
    regions = learned(model)
    base = staged(1)
    random = torch.Generator().manual_seed(5)
    a, b = torch.randn(2, WIDTH, generator=random), torch.randn(4, 2, generator=random)
    pair = {"q.lora_A.weight": a, "q.lora_B.weight": b}
    adapted = StagedModel(base.weights, list(base.digests.values()), pair, 0.5)
    assert faults(regions, adapted) == []
    assert torch.allclose(model.qkv.weight[:4], dict(base.weights)["q.weight"] + 0.5 * b @ a)
    assert torch.equal(model.qkv.weight[4:], dict(base.weights)["k.weight"])


@pytest.mark.parametrize("stale", ["embed.weight", "k.weight", "down.weight", "norm.weight"])
def test_a_tensor_that_is_not_live_is_named(stale: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    regions = learned(model)
    copy = live_regions._copy

    def forgetful(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        kept = [region.live.data_ptr() for region in regions._regions[stale]]
        copy([(live, part) for live, part in pairs if live.data_ptr() not in kept])

    monkeypatch.setattr(live_regions, "_copy", forgetful)
    assert faults(regions, staged(3)) == [f"{stale}: live tensor differs from what was staged"]


def packed(model: Model) -> None:
    model.qkv.quant_method = PackingMethod()


def kept_beside(model: Model) -> None:
    model.down.transposed = model.down.weight.T.contiguous()


def computed(model: Model) -> None:
    model.loaders["q.weight"] = lambda given: model.load_rows(given + 1, 0)


def scaled_in_place(model: Model) -> None:
    model.loaders["norm.weight"] = lambda given: model.norm.weight.data.mul_(2).copy_(given)


def filled_in_part(model: Model) -> None:
    model.loaders["k.weight"] = lambda given: model.load_rows(given[:4], 4)


def filled_twice(model: Model) -> None:
    model.loaders["k.weight"] = lambda given: model.load_rows(given, 3)


def spread(model: Model) -> None:
    model.loaders["norm.weight"] = lambda given: model.norm.weight.data.copy_(given[0])


def not_taken(model: Model) -> None:
    model.loaders["norm.weight"] = lambda given: model.norm.weight.data.fill_(0)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (packed, "qkv has a PackingMethod"),
        (kept_beside, "down keeps transposed beside its parameters"),
        (computed, "in no tensor of the checkpoint"),
        (scaled_in_place, r"a loader calls aten\.mul_"),
        (filled_in_part, r"qkv\.weight is not filled by copies alone"),
        (filled_twice, r"qkv\.weight is not filled by copies alone"),
        (spread, r"spreads \[\] over \[8\]"),
        (not_taken, r"no parameter takes norm\.weight"),
    ],
)
def test_a_model_that_makes_more_than_copies_of_its_weights_has_no_regions(
    change: Callable[[Model], None], reason: str
) -> None:
    model = Model()
    before = loaded(model, 1)
    change(model)
    with pytest.raises(NoRegionsError, match=reason):
        LiveRegions.learned(model, staged(2))
    assert all(torch.equal(model.get_parameter(name), tensor) for name, tensor in before.items())


def test_regions_that_disagree_with_a_whole_load_are_refused() -> None:
    model = Model()
    regions = LiveRegions.learned(model, staged(1))
    loaded(model, 1)
    model.down.weight.data = model.down.weight.data.flip(0).contiguous()
    with pytest.raises(NoRegionsError, match="moves the parameters"):
        regions.require_agreement(staged(1))
    again = LiveRegions.learned(model, staged(1))
    with pytest.raises(NoRegionsError, match=r"down\.weight is loaded in another way"):
        again.require_agreement(staged(1))


class Worker:
    """A vLLM worker whose model loads as the tests say, and the loads that it made."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.model = Model()
        self.model_runner = SimpleNamespace(get_model=lambda: self.model)
        self.loads = 0


@pytest.fixture
def worker() -> Worker:
    return Worker()


@pytest.fixture
def live(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveModel]:
    model = LiveModel(worker)
    monkeypatch.setattr(model, "_has_twins", False)
    monkeypatch.setattr(model, "_configured", nullcontext)

    def load(module: Model, brought: StagedModel) -> None:
        worker.loads += 1
        module.load_weights(brought.tensors(worker.device))
        for layer in (module.embed, module.qkv, module.down):
            layer.quant_method.process_weights_after_loading(layer)

    monkeypatch.setattr(model, "load", load)
    monkeypatch.setattr(model, "repair_tied_layers", lambda _model, _recorded: None)
    yield model


def commit(live: LiveModel, seed: int) -> dict[str, Any]:
    prepared = live.prepare(staged(seed), seed)
    assert isinstance(prepared, Unloaded)
    return live.replace(prepared)


def test_the_first_commit_loads_and_the_next_ones_copy(live: LiveModel, worker: Worker) -> None:
    for seed, loads in ((1, 1), (2, 1), (3, 1)):
        answer = commit(live, seed)
        assert (answer["error"], answer["broken"], worker.loads) == ("", False, loads)
        assert torch.equal(worker.model.qkv.weight[:4], dict(staged(seed).weights)["q.weight"])


def test_parameters_that_moved_are_loaded_again(live: LiveModel, worker: Worker) -> None:
    commit(live, 1)
    worker.model.down.weight.data = worker.model.down.weight.data.clone()
    assert commit(live, 2)["error"] == "" and worker.loads == 2
    assert torch.equal(worker.model.down.weight, dict(staged(2).weights)["down.weight"][:, WIDTH // 2 :])


def test_a_wrong_copy_breaks_the_replica_until_a_whole_load(
    live: LiveModel, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(live, 1)
    with monkeypatch.context() as patched:
        patched.setattr(live_regions, "_copy", lambda _pairs: None)
        answer = commit(live, 2)
    assert answer["broken"] and "live tensor differs" in answer["error"] and worker.loads == 1
    assert commit(live, 3)["error"] == "" and worker.loads == 2
    assert commit(live, 4)["error"] == "" and worker.loads == 3


def test_a_model_without_regions_is_loaded_every_time(live: LiveModel, worker: Worker) -> None:
    kept_beside(worker.model)
    assert [commit(live, seed)["error"] for seed in (1, 2)] == ["", ""] and worker.loads == 2

"""Claims about commits that copy a checkpoint's tensors to where vLLM's loaders once put them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from flotilla_generator.engine.vllm.live_regions import Digests, LiveRegions, NoRegionsError
from flotilla_generator.engine.vllm.live_weights import LiveModel, Loader
from flotilla_generator.engine.vllm.standby import Standby
from flotilla_weights.digest import tensor_digests
from flotilla_weights.inbox import StagedModel

WIDTH = 8
Named = Iterable[tuple[str, torch.Tensor]]


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


def fill(standby: Standby, brought: StagedModel, buckets: int = 1) -> Digests:
    """As the tensors arrive: in buckets whose memory is written again at once."""
    filling = standby.begin()
    for bucket in range(buckets):
        lent = [(name, tensor.clone()) for name, tensor in brought.weights[bucket::buckets]]
        filling.put(lent)
        for _, tensor in lent:
            tensor.fill_(7)
    return filling.settle(brought.digests)


def test_a_rehearsal_writes_nothing() -> None:
    model = Model()
    before = loaded(model, 1)
    LiveRegions.learned(model, staged(2))
    assert all(torch.equal(model.get_parameter(name), tensor) for name, tensor in before.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("buckets", [1, 3])
def test_a_standby_becomes_the_model_that_a_load_makes(dtype: torch.dtype, buckets: int) -> None:
    model = Model(dtype)
    regions = learned(model, dtype=dtype)
    standby = Standby.beside(regions)
    expected = fill(standby, staged(3, dtype), buckets)
    assert len(regions.differing(expected)) == len(SHAPES), "nothing is live yet"
    standby.commit()
    assert regions.differing(expected) == []
    copied = {name: parameter.clone() for name, parameter in model.named_parameters()}
    for name, tensor in loaded(model, 3, dtype).items():
        assert torch.equal(copied[name], tensor), name


@pytest.mark.parametrize("buckets", [1, 3])
def test_weights_that_arrive_in_place_are_live_before_the_commit_and_take_no_memory(buckets: int) -> None:
    model = Model()
    regions = learned(model)
    standby = Standby(regions, None)
    standby.stand_still()
    expected = fill(standby, staged(3), buckets)
    assert regions.differing(expected) == [] and standby.nbytes == 0
    standby.commit()
    arrived = {name: parameter.clone() for name, parameter in model.named_parameters()}
    for name, tensor in loaded(model, 3).items():
        assert torch.equal(arrived[name], tensor), name


def test_buckets_that_are_lent_again_bring_what_is_in_them_then() -> None:
    """A ring lends the same tensors to every publication; one of another group lends others."""
    model = Model()
    regions = learned(model)
    standby = Standby.beside(regions)
    rings = [staged(1).weights, staged(2).weights]
    first, second = (weakref.ref(ring[0][1]) for ring in rings)
    while rings:
        ring = rings.pop(0)
        for seed in (3, 4, 5):
            brought = staged(seed)
            for (_, lent), (_, tensor) in zip(ring, brought.weights, strict=True):
                lent.copy_(tensor)
            filling = standby.begin()
            filling.put(ring)
            expected = filling.settle(brought.digests)
            standby.commit()
            assert regions.differing(expected) == []
            assert torch.equal(model.qkv.weight[:4], dict(brought.weights)["q.weight"])
    del ring
    assert first() is None and second() is not None, "what is lent no more is kept no longer"


def test_buckets_of_a_group_that_is_no_more_are_let_go_before_the_next_one_has_its_own() -> None:
    standby = Standby.beside(learned(Model()))
    ring = staged(2).weights
    lent = weakref.ref(ring[0][1])
    filling = standby.begin()
    filling.put(ring)
    del ring, filling
    assert lent() is not None, "the same tensors may come again"
    standby.forget_lent()
    assert lent() is None


def test_weights_of_another_type_are_rounded_as_they_are_loaded() -> None:
    model = Model(torch.bfloat16)
    regions = learned(model)
    standby = Standby.beside(regions)
    expected = fill(standby, staged(3))
    standby.commit()
    assert regions.differing(expected) == []
    assert torch.equal(model.norm.weight, dict(staged(3).weights)["norm.weight"].bfloat16())


def test_a_worker_keeps_its_own_part_alone() -> None:
    regions = learned(Model())
    own = sum(piece.nbytes for piece in regions.memory())
    standby = Standby.beside(regions)
    assert own <= standby.nbytes < own + 256 * len(regions.memory())


def test_sums_with_adapters_are_copied_as_they_are_loaded() -> None:
    model = Model()
    regions = learned(model)
    base = staged(1)
    random = torch.Generator().manual_seed(5)
    a, b = torch.randn(2, WIDTH, generator=random), torch.randn(4, 2, generator=random)
    pair = {"q.lora_A.weight": a, "q.lora_B.weight": b}
    adapted = StagedModel(base.weights, list(base.digests.values()), pair, 0.5)
    standby = Standby.beside(regions)
    filling = standby.begin()
    filling.put_sums(adapted, torch.device("cpu"))
    expected = filling.settle(adapted.digests)
    standby.commit()
    assert regions.differing(expected) == []
    assert torch.allclose(model.qkv.weight[:4], dict(base.weights)["q.weight"] + 0.5 * b @ a)
    assert torch.equal(model.qkv.weight[4:], dict(base.weights)["k.weight"])


def test_a_publication_that_was_given_up_fills_nothing_any_more() -> None:
    standby = Standby.beside(learned(Model()))
    late = standby.begin()
    late.put(staged(2).weights[:1])
    expected = fill(standby, staged(3))
    with pytest.raises(RuntimeError, match="given up"):
        late.put(staged(2).weights[1:])
    standby.commit()
    assert standby.regions.differing(expected) == []


def test_a_publication_that_did_not_fill_all_is_not_committed() -> None:
    filling = Standby.beside(learned(Model())).begin()
    filling.put(staged(2).weights[1:])
    with pytest.raises(RuntimeError, match=r"embed\.weight did not arrive"):
        filling.settle(staged(2).digests)


@pytest.mark.parametrize("stale", ["embed.weight", "k.weight", "down.weight", "norm.weight"])
def test_a_tensor_that_is_not_live_is_named(stale: str) -> None:
    regions = learned(Model())
    standby = Standby.beside(regions)
    expected = fill(standby, staged(3))
    kept = [region.live.clone() for region in regions.by_name[stale]]
    standby.commit()
    for region, old in zip(regions.by_name[stale], kept, strict=True):
        region.live.copy_(old)
    assert regions.differing(expected) == [f"{stale}: live tensor differs from what was committed"]


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


class PlainLoader(Loader):
    """Loads without vLLM, and packs nothing, as on a GPU."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self.worker = worker
        self.packs = False

    def configured(self) -> Any:
        return nullcontext()

    def load(self, model: Model, staged: StagedModel) -> None:
        self.worker.loads += 1
        model.load_weights(staged.tensors(self.device))
        for layer in (model.embed, model.qkv, model.down):
            layer.quant_method.process_weights_after_loading(layer)


@pytest.fixture
def live(worker: Worker) -> LiveModel:
    return LiveModel(PlainLoader(worker))


def commit(live: LiveModel, seed: int) -> dict[str, Any]:
    """A whole publication as a worker takes it; `check` has the faults that were found after it, if it was made."""
    filling, brought = live.begin(), staged(seed)
    if filling is None:
        answer = live.prepare(brought, seed).replace()
    else:
        filling.put(brought.weights)
        answer = live.fill(filling, None, brought.digests).replace()
    return answer | {"check": live.check()["faults"] if answer["check"] else None}


def test_the_first_commit_loads_and_the_next_ones_copy(live: LiveModel, worker: Worker) -> None:
    for seed in (1, 2, 3):
        answer = commit(live, seed)
        assert (answer["error"], answer["broken"], answer["check"], worker.loads) == ("", False, [], 1)
        assert torch.equal(worker.model.qkv.weight[:4], dict(staged(seed).weights)["q.weight"])


def test_versions_that_arrive_in_place_are_compared_and_one_that_has_no_place_breaks_the_model(
    live: LiveModel, worker: Worker
) -> None:
    for seed in (1, 2, 3):
        live.expect_in_place(True)
        answer = commit(live, seed)
        assert (answer["error"], answer["broken"], answer["check"], worker.loads) == ("", False, [], 1)
        assert torch.equal(worker.model.qkv.weight[:4], dict(staged(seed).weights)["q.weight"])
    live.expect_in_place(True)
    filling, brought = live.begin(), staged(4)
    assert filling is not None and filling.standby.nbytes == 0
    filling.put(brought.weights)
    filled = live.fill(filling, None, brought.digests)
    worker.model.down.weight.data = worker.model.down.weight.data.clone()
    answer = filled.replace()
    assert "moved" in answer["error"] and answer["broken"]
    assert commit(live, 5)["error"] == "" and worker.loads == 2


def test_parameters_that_moved_are_loaded_again(live: LiveModel, worker: Worker) -> None:
    commit(live, 1)
    worker.model.down.weight.data = worker.model.down.weight.data.clone()
    assert commit(live, 2)["error"] == "" and worker.loads == 2
    assert torch.equal(worker.model.down.weight, dict(staged(2).weights)["down.weight"][:, WIDTH // 2 :])


def test_a_wrong_copy_is_found_and_later_versions_are_loaded(
    live: LiveModel, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(live, 1)
    with monkeypatch.context() as patched:
        patched.setattr(Standby, "commit", lambda _standby: None)
        answer = commit(live, 2)
    assert any("live tensor differs" in fault for fault in answer["check"]) and worker.loads == 1
    assert commit(live, 3)["error"] == "" and worker.loads == 2
    assert commit(live, 4)["error"] == "" and worker.loads == 3


def test_a_model_that_moves_after_a_version_arrived_keeps_its_weights(
    live: LiveModel, worker: Worker
) -> None:
    commit(live, 1)
    filling, brought = live.begin(), staged(2)
    assert filling is not None
    filling.put(brought.weights)
    filled = live.fill(filling, None, brought.digests)
    worker.model.down.weight.data = worker.model.down.weight.data.clone()
    answer = filled.replace()
    assert "moved" in answer["error"] and not answer["broken"]
    assert commit(live, 3)["error"] == "" and worker.loads == 2


def scaled(model: Model) -> None:
    model.down.weight.data.mul_(1.01)


def rows_swapped(model: Model) -> None:
    rows = model.qkv.weight.data
    rows[[0, 5]] = rows[[5, 0]]


def padding_written(model: Model) -> None:
    model.embed.weight.data[11, 3] = 1e-3


@pytest.mark.parametrize(
    ("change", "named"),
    [(scaled, "down.weight: live"), (rows_swapped, "q.weight: live"), (padding_written, "the padding")],
)
@pytest.mark.parametrize("commits", [1, 2])
def test_live_memory_that_changes_after_a_commit_is_found(
    change: Callable[[Model], None], named: str, commits: int, live: LiveModel, worker: Worker
) -> None:
    for seed in range(commits):
        commit(live, seed)
    assert live.check() == {"tensors": len(SHAPES), "unchecked": "", "faults": [], "copies_s": 0.0}
    change(worker.model)
    assert any(fault.startswith(named) for fault in live.check()["faults"])
    assert commit(live, 8)["error"] == "" and worker.loads == 2, "a whole load repairs it"
    assert commit(live, 9)["check"] == [] and worker.loads == 2, "and copies go on"
    change(worker.model)
    assert any(fault.startswith(named) for fault in live.check()["faults"]), (
        "what changes again is found again"
    )


def test_a_worker_without_memory_for_a_standby_loads_every_version(
    live: LiveModel, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise MemoryError("full")

    monkeypatch.setattr(Standby, "__init__", full)
    assert [commit(live, seed)["error"] for seed in (1, 2)] == ["", ""] and worker.loads == 2
    assert "no memory for a second copy" in live.check()["unchecked"]


def test_a_model_without_regions_says_why_its_memory_is_not_compared(live: LiveModel, worker: Worker) -> None:
    assert live.check()["unchecked"] == "nothing was committed yet"
    kept_beside(worker.model)
    commit(live, 1)
    assert "keeps transposed" in live.check()["unchecked"]


def test_a_model_without_regions_is_loaded_every_time(live: LiveModel, worker: Worker) -> None:
    kept_beside(worker.model)
    assert [commit(live, seed)["error"] for seed in (1, 2)] == ["", ""] and worker.loads == 2

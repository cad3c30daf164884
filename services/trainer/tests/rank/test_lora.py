"""Adapters on one rank, against the model with dense weights W0 + s B A in float64; only they are trained."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.func import functional_call
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from flotilla_core.config import LoraConfig, OptimizerConfig
from flotilla_core.errors import InvalidRequest
from flotilla_testing.tiny_qwen3 import tiny_qwen3
from flotilla_trainer.rank.cut import RankMesh
from flotilla_trainer.rank.lora import Adapters
from flotilla_trainer.rank.optimizer import PolicyOptimizer
from flotilla_trainer.rank.sharded_model import ShardedModel
from flotilla_weights.adapters import AdapterNames

LORA = LoraConfig(rank=4, alpha=6.0)
CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("model")
    tiny_qwen3().save_pretrained(place)
    return place


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path_factory.mktemp("rank") / "rendezvous"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def frozen(folder: Path, dtype: torch.dtype) -> ShardedModel:
    model = ShardedModel(folder, dtype, RankMesh.form("cpu"), CPU, frozen=True)
    model.load(folder)
    model.adapt(LORA, seed=3)
    assert model.adapters is not None
    model.adapters.set(moved(model.adapters.tensors()))
    return model


def moved(adapters: Tensors) -> Tensors:
    """Return adapters as after some training, with no matrix of zeros."""
    random = torch.Generator().manual_seed(1)
    return {name: torch.randn(tensor.shape, generator=random) * 0.2 for name, tensor in adapters.items()}


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens = torch.randint(31, (2, 12), generator=torch.Generator().manual_seed(2))
    return tokens, torch.arange(10), tokens.flatten()[1:11]


def loss(model: ShardedModel) -> torch.Tensor:
    tokens, places, targets = batch()
    return -model.policy(tokens, places, targets, temperature=0.7, chunk_tokens=4).logprobs.sum()


def dense(folder: Path, adapters: Tensors) -> tuple[torch.Tensor, Tensors]:
    """Return the loss and its gradients by A and B, through merged weights."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    exact = {name: tensor.double().requires_grad_() for name, tensor in adapters.items()}
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for name, weight in weights.items():
        a, b = (exact.get(adapter) for adapter in AdapterNames.of(name))
        if a is not None and b is not None:
            weights[name] = weight + LORA.alpha / LORA.rank * b @ a
    tokens, places, targets = batch()
    logits = functional_call(model, weights, kwargs={"input_ids": tokens}, tie_weights=True).logits
    logprobs = torch.log_softmax(logits.flatten(0, 1)[places] / 0.7, -1)
    total = -logprobs.gather(-1, targets[:, None]).sum()
    total.backward()
    return total.detach(), {name: tensor.grad for name, tensor in exact.items()}


def test_loss_and_gradients_are_those_of_the_dense_sum_in_float64(folder: Path) -> None:
    model = frozen(folder, torch.float32)
    parameters = model.trainable()
    expected, gradients = dense(folder, {name: p.detach() for name, p in parameters.items()})
    ours = loss(model)
    torch.testing.assert_close(ours.double(), expected, atol=1e-5, rtol=1e-5)
    ours.backward()
    assert parameters.keys() == gradients.keys() and len(gradients) == 2 * 7 * 2
    for name, gradient in gradients.items():
        scale = max(1.0, float(gradient.abs().max()))
        torch.testing.assert_close(parameters[name].grad.double(), gradient, atol=1e-5 * scale, rtol=1e-5)


def test_nothing_but_the_adapters_has_gradients_moments_or_a_step(folder: Path) -> None:
    model = frozen(folder, torch.float32)
    base = [parameter.detach().clone() for parameter in model.parameters()]
    before = {name: parameter.detach().clone() for name, parameter in model.trainable().items()}
    optimizer = PolicyOptimizer(model, OptimizerConfig(max_grad_norm=0))
    loss(model).backward()
    optimizer.complete_gradients()
    optimizer.step(learning_rate=1e-2, norm=0.0)
    assert all(parameter.grad is None for parameter in model.parameters())
    for parameter, earlier in zip(model.parameters(), base, strict=True):
        assert torch.equal(parameter, earlier)
    for name, parameter in model.trainable().items():
        assert not torch.equal(parameter, before[name])
    parameters = [*model.parameters(), *model.trainable().values()]
    kept = sum(moment.numel() for one in parameters for moment in optimizer.moments(one).values())
    assert kept == 2 * sum(tensor.numel() for tensor in before.values())


def test_a_base_in_bfloat16_is_kept_in_it_and_its_adapters_in_float32(folder: Path) -> None:
    model = frozen(folder, torch.bfloat16)
    loss(model).backward()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    for parameter in model.trainable().values():
        assert parameter.dtype == parameter.grad.dtype == torch.float32
        assert bool(parameter.grad.isfinite().all()) and float(parameter.grad.abs().max()) > 0


def test_bases_that_differ_in_one_number_anywhere_are_told_apart(folder: Path, tmp_path: Path) -> None:
    model = ShardedModel(folder, torch.bfloat16, RankMesh.form("cpu"), CPU, frozen=True)
    model.load(folder)
    first = model.base
    other = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        other.model.layers[1].mlp.down_proj.weight[-1, -1] += 1e-6
    other.save_pretrained(tmp_path)
    model.load(tmp_path)
    assert model.base not in (0, first)
    model.load(folder)
    assert model.base == first


def test_the_first_a_is_the_seed_s_and_its_layer_s_alone(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)

    def first(targets: str | tuple[str, ...], seed: int) -> Tensors:
        adapters = Adapters(model, LORA.model_copy(update={"targets": targets}), seed, CPU)
        adapters.remove()
        return adapters.tensors()

    everywhere, one, other = first("all-linear", 1), first(("k_proj",), 1), first(("k_proj",), 2)
    assert one and all(torch.equal(tensor, everywhere[name]) for name, tensor in one.items())
    for name, tensor in one.items():
        assert bool(tensor.any()) == ("lora_A" in name)
        assert torch.equal(tensor, other[name]) == ("lora_B" in name)


@pytest.mark.parametrize("tied", [False, True])
def test_a_head_of_its_own_can_have_adapters_and_a_tied_one_cannot(folder: Path, tied: bool) -> None:
    config = Qwen3Config.from_pretrained(folder, tie_word_embeddings=tied)
    wanted = LORA.model_copy(update={"targets": ("lm_head",)})
    if tied:
        with pytest.raises(InvalidRequest, match="head cannot have adapters"):
            Adapters(Qwen3ForCausalLM(config), wanted, 1, CPU)
    else:
        adapters = Adapters(Qwen3ForCausalLM(config), wanted, 1, CPU)
        assert set(adapters.tensors()) == {"lm_head.lora_A.weight", "lm_head.lora_B.weight"}

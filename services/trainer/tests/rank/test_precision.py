"""One rank in this process: bfloat16 in layers, float32 where numbers add up, and everywhere in a float32 pass."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from flotilla_core.config import OptimizerConfig
from flotilla_testing.tiny_qwen3 import tiny_qwen3
from flotilla_trainer.rank.cut import RankMesh, local
from flotilla_trainer.rank.optimizer import MOMENTS, PolicyOptimizer
from flotilla_trainer.rank.packed_rows import PackedRow
from flotilla_trainer.rank.policy_model import PolicyModel, TokenScores
from flotilla_trainer.rank.scoring import Float32Policy
from flotilla_trainer.rank.sharded_model import ShardedModel

STEP = 1e-4
"""Far below the distance between neighbours of 1 in bfloat16, 2**-8."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ShardedModel]:
    place = tmp_path_factory.mktemp("rank")
    tiny_qwen3().save_pretrained(place / "model")
    store = dist.FileStore(str(place / "rendezvous"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = RankMesh.form("cpu")
        sharded = ShardedModel(place / "model", torch.bfloat16, mesh, torch.device("cpu"))
        sharded.load(Path(place / "model"))
        yield sharded
    finally:
        dist.destroy_process_group()


def backward(model: ShardedModel, seed: int) -> None:
    tokens = torch.randint(31, (2, 12), generator=torch.Generator().manual_seed(seed))
    scores = model.policy(tokens, torch.arange(10), tokens.flatten()[1:11], temperature=1.0, chunk_tokens=4)
    (-scores.logprobs.sum()).backward()


def test_layers_compute_in_bfloat16_and_everything_that_adds_up_is_float32(model: ShardedModel) -> None:
    computed = []
    hook = model.causal_lm.model.layers[0].mlp.down_proj.register_forward_hook(
        lambda module, inputs, output: computed.append((module.weight.dtype, output.dtype))
    )
    optimizer = PolicyOptimizer(model, OptimizerConfig(max_grad_norm=0))
    try:
        backward(model, 0)
    finally:
        hook.remove()
    assert computed == [(torch.bfloat16, torch.bfloat16)]
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}
    before = local(model.causal_lm.model.norm.weight.detach()).clone()
    optimizer.step(STEP, 1.0)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    for parameter in model.parameters():
        assert {optimizer.moments(parameter)[name].dtype for name in MOMENTS} == {torch.float32}
    # Steps that bfloat16 weights would swallow.
    moved = (local(model.causal_lm.model.norm.weight.detach()) - before).abs()
    torch.testing.assert_close(moved, torch.full_like(moved, STEP), rtol=0.05, atol=0)


def test_gradients_of_micro_batches_add_up_in_float32(model: ShardedModel) -> None:
    optimizer = PolicyOptimizer(model, OptimizerConfig(max_grad_norm=0))
    single = []
    for seed in (1, 2):
        backward(model, seed)
        single.append([local(parameter.grad).clone() for parameter in model.parameters()])
        optimizer.discard_gradients()
    for seed in (1, 2):
        backward(model, seed)
    together = [local(parameter.grad) for parameter in model.parameters()]
    for first, second, both in zip(*single, together, strict=True):
        assert torch.equal(first + second, both)
    assert any(not torch.equal(both, both.bfloat16().float()) for both in together)
    optimizer.discard_gradients()


@pytest.mark.parametrize("on", [False, True])
def test_layers_compute_again_for_the_backward_pass_exactly_where_it_is_asked_for(
    model: ShardedModel, on: bool
) -> None:
    calls: list[int] = []
    hooks = [
        layer.mlp.register_forward_pre_hook(lambda *_, number=number: calls.append(number))
        for number, layer in enumerate(model.causal_lm.model.layers)
    ]
    model.recomputed_layers.on = on
    try:
        with torch.no_grad():
            tokens = torch.zeros(1, 4, dtype=torch.long)
            model.policy(tokens, torch.arange(2), tokens[0, :2], temperature=1.0, chunk_tokens=4)
        assert calls == [0, 1]
        calls.clear()
        backward(model, 3)
        assert calls == ([0, 1, 1, 0] if on else [0, 1])
    finally:
        model.recomputed_layers.on = False
        for hook in hooks:
            hook.remove()
        model.policy.zero_grad()


def test_inputs_that_rest_on_the_host_change_no_gradient(model: ShardedModel) -> None:
    found = []
    for rest in (False, True):
        model.recomputed_layers.on, model.recomputed_layers.inputs_rest_on_host = True, rest
        try:
            backward(model, 4)
        finally:
            model.recomputed_layers.on = model.recomputed_layers.inputs_rest_on_host = False
        found.append([local(parameter.grad).clone() for parameter in model.parameters()])
        model.policy.zero_grad()
    for kept, rested in zip(*found, strict=True):
        assert torch.equal(kept, rested)


def packed_scores(policy: PolicyModel | Float32Policy) -> TokenScores:
    """Score a row of two sequences."""
    tokens = torch.randint(31, (1, 12), generator=torch.Generator().manual_seed(7))
    row = PackedRow.of([5, 7], torch.device("cpu"))
    given = torch.arange(10), tokens.flatten()[1:11]
    scores: TokenScores = policy(tokens, *given, temperature=0.7, chunk_tokens=4, packed_row=row)
    return scores


def test_a_float32_pass_is_what_float32_makes_of_the_rounded_weights(model: ShardedModel) -> None:
    passed = []
    found = packed_scores(Float32Policy(model, lambda: passed.append(1))).logprobs
    assert passed, "a long pass must not look like one that hangs"
    own = model.policy
    assert isinstance(own, PolicyModel)
    wide = PolicyModel(PolicyModel.skeleton(model.causal_lm.config, torch.float32))
    rounded = dict(
        model.whole_tensors([name for name, _ in model.causal_lm.named_parameters()], torch.bfloat16)
    )
    with torch.no_grad():
        for name, parameter in wide.causal_lm.named_parameters():
            parameter.copy_(rounded[name])
        expected = packed_scores(wide).logprobs
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
        assert (packed_scores(own).logprobs - expected).abs().max() > 1e-3, "bfloat16 rounds"
    assert local(next(iter(own.parameters()))).device.type == "cpu", "the model is as it was"

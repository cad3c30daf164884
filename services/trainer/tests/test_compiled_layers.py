"""Compiled layers give the numbers of plain ones, for every length and every layer from few graphs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import Qwen3Config, Qwen3ForCausalLM

from flotilla_core.config import LoraConfig
from flotilla_trainer.rank import compiled_layers
from flotilla_trainer.rank.activation_offload import RecomputedLayers
from flotilla_trainer.rank.compilation import COMPILING, CompilerWatch
from flotilla_trainer.rank.compiled_layers import CompiledLayers
from flotilla_trainer.rank.lora import Adapters
from flotilla_trainer.rank.packed_rows import PackedRow
from flotilla_trainer.rank.policy_model import PolicyModel

pytestmark = pytest.mark.timeout(600)
TOLERANCE = 1e-5
VOCABULARY = 31
CPU = torch.device("cpu")
SHAPES = [(2, 17), (3, 23), (2, 7), (4, 32)]


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Iterator[CompileCounterWithBackend]:
    """Traces and differentiates as for any compiler, without the minutes that one takes."""
    torch._dynamo.reset()
    backend = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(compiled_layers, "BACKEND", backend)
    yield backend
    torch._dynamo.reset()


def model(layers: int) -> PolicyModel:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes = {"vocab_size": VOCABULARY, "num_hidden_layers": layers, "head_dim": 8}
    return PolicyModel(Qwen3ForCausalLM(Qwen3Config(**sizes, **shape, initializer_range=0.2)))


def numbers(
    policy: PolicyModel, rows: int, length: int, packed: bool, adapters: Adapters | None = None
) -> list[torch.Tensor]:
    """Return log-probabilities with and without gradient, and the gradient."""
    tokens = torch.randint(VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(length))
    row = PackedRow.of((length - 2, 2) * rows, CPU) if packed else None
    given = tokens.reshape(1, -1) if packed else tokens
    learning = list(adapters.named_parameters().values() if adapters else policy.parameters())

    def logprobs() -> torch.Tensor:
        targets = tokens.flatten()[1:]
        positions = torch.arange(len(targets))
        scores = policy(given, positions, targets, temperature=1.0, chunk_tokens=16, packed_row=row)
        return scores.logprobs

    with torch.no_grad():
        frozen = logprobs()
    live = logprobs()
    return [frozen, live.detach(), *torch.autograd.grad(live.sum(), learning)]


def same(found: list[torch.Tensor], right: list[torch.Tensor]) -> None:
    for ours, theirs in zip(found, right, strict=True):
        torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize(
    ("recompute", "packed"), [(False, False), (True, True)], ids=["padded", "packed-and-recomputed"]
)
def test_one_graph_serves_every_layer_and_every_length(
    counter: CompileCounterWithBackend, recompute: bool, packed: bool
) -> None:
    policy = model(layers=4)
    layers = policy.causal_lm.model.layers
    compiled, recomputed = CompiledLayers(layers), RecomputedLayers(layers)
    phases: list[str] = []
    watch = CompilerWatch(phases.append)
    recomputed.on = recomputed.inputs_rest_on_host = recompute
    expected = [numbers(policy, *each, packed) for each in SHAPES]
    assert counter.frame_count == 0 and watch.taken() == {}
    compiled.on = True
    frames, costs = [], []
    for each, right in zip(SHAPES, expected, strict=True):
        same(numbers(policy, *each, packed), right)
        frames.append(counter.frame_count)
        costs.append(watch.taken())
    # The second shape may still teach the compiler something; no further one does.
    assert 0 < frames[0] <= 8
    assert frames[1:] == [frames[1]] * (len(SHAPES) - 1)
    assert frames[1] <= 2 * frames[0]
    assert costs[0]["compilations"] > 0 and costs[0]["time/compile_s"] > 0
    assert costs[2:] == [{}] * (len(SHAPES) - 2)
    assert COMPILING in phases


def test_adapters_take_part_from_few_graphs_and_go_again(counter: CompileCounterWithBackend) -> None:
    policy = model(layers=5)
    policy.requires_grad_(False)
    compiled = CompiledLayers(policy.causal_lm.model.layers)
    frames = []
    for session in range(2):
        adapters = Adapters(
            policy.causal_lm, LoraConfig(rank=2, alpha=4.0, targets=("q_proj", "down_proj")), session, CPU
        )
        for name, parameter in adapters.named_parameters().items():
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(len(name) + session))
        compiled.on = False
        expected = [numbers(policy, *each, False, adapters) for each in SHAPES[:2]]
        compiled.on = True
        for each, right in zip(SHAPES[:2], expected, strict=True):
            same(numbers(policy, *each, False, adapters), right)
        adapters.remove()
        frames.append(counter.frame_count)
    # Not one a layer: the first layer alone differs, because nothing before it learns.
    assert frames[0] <= 4
    assert frames[1] <= 2 * frames[0]


def test_what_hooks_onto_a_compiled_layer_takes_part_and_goes_again(
    counter: CompileCounterWithBackend,
) -> None:
    torch.manual_seed(0)
    layer = torch.nn.Sequential(torch.nn.Linear(4, 4))
    given = torch.ones(2, 4)
    before = layer(given)
    CompiledLayers([layer]).on = True
    torch.testing.assert_close(layer(given), before)
    hook = layer[0].register_forward_hook(lambda module, inputs, output: output + 1)
    torch.testing.assert_close(layer(given), before + 1)
    hook.remove()
    torch.testing.assert_close(layer(given), before)

"""Compiled layers with adapters, with hooks and around a kernel give the numbers of plain ones from few graphs.

Every layer and every length has the graphs of the load: test_compilation.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from flotilla_core.config import LoraConfig
from flotilla_testing.tiny_qwen3 import tiny_qwen3
from flotilla_trainer.rank import compiled_layers, packed_rows
from flotilla_trainer.rank.compiled_layers import CompiledLayers
from flotilla_trainer.rank.lora import Adapters
from flotilla_trainer.rank.packed_rows import PackedRow
from flotilla_trainer.rank.policy_model import PolicyModel

pytestmark = pytest.mark.timeout(600)
TOLERANCE = 1e-5
VOCABULARY = 31
CPU = torch.device("cpu")
SHAPES = [(2, 17), (3, 23)]
Tensor = torch.Tensor


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Iterator[CompileCounterWithBackend]:
    """Traces and differentiates as for any compiler, without the minutes that one takes."""
    torch._dynamo.reset()
    backend = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(compiled_layers, "BACKEND", backend)
    yield backend
    torch._dynamo.reset()


def model(layers: int) -> PolicyModel:
    return PolicyModel(tiny_qwen3(vocab_size=VOCABULARY, num_hidden_layers=layers))


def numbers(
    policy: PolicyModel, rows: int, length: int, learning: list[Tensor], row: PackedRow | None = None
) -> list[Tensor]:
    """Return log-probabilities with and without gradient, and the gradient of what learns."""
    tokens = torch.randint(VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(length))
    targets = tokens.flatten()[1:]
    score = partial(policy, tokens, torch.arange(len(targets)), targets, temperature=1.0, chunk_tokens=16)
    with torch.no_grad():
        frozen = score(packed_row=row).logprobs
    live = score(packed_row=row).logprobs
    return [frozen, live.detach(), *torch.autograd.grad(live.sum(), learning)]


def same(found: list[Tensor], right: list[Tensor], tolerance: float = TOLERANCE) -> None:
    for ours, theirs in zip(found, right, strict=True):
        torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)


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
        learning = list(adapters.named_parameters().values())
        expected = [numbers(policy, *each, learning) for each in SHAPES]
        compiled.on = True
        for each, right in zip(SHAPES, expected, strict=True):
            same(numbers(policy, *each, learning), right)
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


def test_layers_that_run_plain_do_not_wait_for_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda *_, **__: pytest.fail("the compiler was imported"))
    layer = torch.nn.Linear(4, 4)
    compiled = CompiledLayers([layer])
    assert layer(torch.ones(2, 4)).shape == (2, 4) and not compiled.on


ROWS = [(37, 29), (13, 11, 9), (40, 3), (64, 64), (31, 31, 31), (60, 63, 61, 64), (2, 2, 2, 33)]
"""Without a grid, on one that they fill, and on one that is filled up; of reaches from 16 to 64."""


def test_one_graph_serves_rows_of_every_kind(
    counter: CompileCounterWithBackend, kernels_of_the_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = model(layers=3)
    compiled = CompiledLayers(policy.causal_lm.model.layers)
    expected = [packed_numbers(policy, lengths) for lengths in ROWS]
    monkeypatch.setattr(packed_rows, "takes_rows", lambda query: True)
    compiled.on = True
    for lengths, right in zip(ROWS, expected, strict=True):
        # Another kernel adds in another order.
        same(packed_numbers(policy, lengths), right, 5 * TOLERANCE)
        # One without gradient, one with it.
        assert counter.frame_count == 2, lengths


def packed_numbers(policy: PolicyModel, lengths: tuple[int, ...]) -> list[Tensor]:
    """Return the numbers of a packed row."""
    return numbers(policy, 1, sum(lengths), list(policy.parameters()), PackedRow.of(lengths, CPU))

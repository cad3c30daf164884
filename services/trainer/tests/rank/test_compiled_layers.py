"""Compiled layers with adapters, with hooks and around a kernel give the numbers of plain ones from few graphs.

Every layer and every length has the graphs of the load: test_compilation.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

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


def same(found: list[Tensor], right: list[Tensor]) -> None:
    for ours, theirs in zip(found, right, strict=True):
        torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=TOLERANCE)


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


GIVEN = "Tensor query, Tensor key, Tensor value, Tensor borders, SymInt reach, float scale"


@torch.library.custom_op("flotilla_test::variable_length", mutates_args=(), schema=f"({GIVEN}) -> Tensor")
def variable_length(
    query: Tensor, key: Tensor, value: Tensor, borders: Tensor, reach: int, scale: float
) -> Tensor:
    """Attend within each sequence, as torch's kernel does on a GPU."""
    parts = []
    for start, end in itertools.pairwise(borders.tolist()):
        assert end - start <= reach
        heads = [tensor[start:end].transpose(0, 1)[None] for tensor in (query, key, value)]
        parts.append(
            torch.nn.functional.scaled_dot_product_attention(
                *heads, is_causal=True, scale=scale, enable_gqa=True
            )[0].transpose(0, 1)
        )
    return torch.cat(parts)


@torch.library.custom_op(
    "flotilla_test::variable_length_backward",
    mutates_args=(),
    schema=f"(Tensor gradient, {GIVEN}) -> (Tensor, Tensor, Tensor)",
)
def variable_length_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, borders: Tensor, reach: int, scale: float
) -> tuple[Tensor, ...]:
    """Compute the gradients by hand, because nothing inside such an operation is differentiated."""
    found = [torch.zeros(tensor.shape) for tensor in (query, key, value)]
    group = query.shape[1] // key.shape[1]
    for start, end in itertools.pairwise(borders.tolist()):
        part = slice(start, end)
        q, k, v, g = (
            tensor[part].repeat_interleave(times, 1).transpose(0, 1)
            for tensor, times in ((query, 1), (key, group), (value, group), (gradient, 1))
        )
        later = torch.ones(end - start, end - start, dtype=torch.bool).triu(1)
        shares = (scale * q @ k.mT).masked_fill(later, float("-inf")).softmax(-1)
        by_share = g @ v.mT
        by_logit = scale * shares * (by_share - (by_share * shares).sum(-1, keepdim=True))
        for whole, rows in zip(found, (by_logit @ k, by_logit.mT @ q, shares.mT @ g), strict=True):
            whole[part] = rows.transpose(0, 1).unflatten(1, (whole.shape[1], -1)).sum(2)
    return tuple(found)


def like(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


variable_length.register_fake(lambda query, *_: like(query))
variable_length_backward.register_fake(lambda _, *given: tuple(map(like, given[:3])))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.rest = inputs[4:]


def _gradients(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    return (*variable_length_backward(gradient.contiguous(), *ctx.saved_tensors, *ctx.rest), None, None, None)


variable_length.register_autograd(_gradients, setup_context=_keep)


def kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    borders: Tensor,
    same_borders: Tensor,
    reach: int,
    same_reach: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool = True,
) -> Tensor:
    """Take what torch's kernel takes."""
    assert window_size == (-1, 0)
    return variable_length(query, key, value, borders, reach, scale)


ROWS = [(15, 2), (13, 11, 9), (40, 3), (5, 2, 70, 4), (2, 2, 2, 33)]
"""Their longest sequences have limits of 16, 16, 64, 128 and 64 tokens."""


def test_attention_is_part_of_the_one_graph_where_a_kernel_takes_packed_rows(
    counter: CompileCounterWithBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = model(layers=3)
    compiled = CompiledLayers(policy.causal_lm.model.layers)
    expected = [packed_numbers(policy, lengths) for lengths in ROWS]
    monkeypatch.setattr(packed_rows, "VARIABLE_LENGTH", kernel)
    monkeypatch.setattr(packed_rows, "takes_variable_lengths", lambda query: True)
    compiled.on = True
    frames = []
    for lengths, right in zip(ROWS, expected, strict=True):
        same(packed_numbers(policy, lengths), right)
        frames.append(counter.frame_count)
    # One graph without and one with gradient; a second limit teaches the compiler that limits vary.
    assert frames[0] == 2
    assert frames[-1] <= 4 and frames[2:] == [frames[2]] * (len(ROWS) - 2)


def packed_numbers(policy: PolicyModel, lengths: tuple[int, ...]) -> list[Tensor]:
    """Return the numbers of a packed row."""
    return numbers(policy, 1, sum(lengths), list(policy.parameters()), PackedRow.of(lengths, CPU))

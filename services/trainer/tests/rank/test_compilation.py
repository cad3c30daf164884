"""Layers are compiled when the model is loaded; a rank that cannot compile reports why and trains uncompiled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._inductor.config as inductor
from torch._dynamo.testing import CompileCounterWithBackend

from flotilla_testing.tiny_qwen3 import tiny_qwen3
from flotilla_trainer.rank import compiled_layers
from flotilla_trainer.rank.compilation import COMPILING, Compilation
from flotilla_trainer.rank.cut import RankMesh, gathered
from flotilla_trainer.rank.packed_rows import PackedRow
from flotilla_trainer.rank.sharded_model import ShardedModel

pytestmark = pytest.mark.timeout(300)
CPU = torch.device("cpu")
TOLERANCE = 1e-5
VOCABULARY = 31
LENGTHS = [
    (15, 2, 15, 2),
    (21, 2, 21, 2, 21, 2),
    (5, 2, 5, 2),
    (30, 2, 30, 2, 30, 2, 30, 2),
    (11, 7, 30, 2),
    (3, 5),
]
NO_COMPILER = {"cpp.cxx": ("no-such-compiler",), "force_disable_caches": True}
OnRanks = Callable[[int, Callable[[], Any]], list[Any]]
Numbers = list[list[np.ndarray]]
Costs = dict[str, float]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("model")
    tiny_qwen3(vocab_size=VOCABULARY, intermediate_size=40, num_hidden_layers=4).save_pretrained(place)
    return place


def loaded(folder: Path) -> ShardedModel:
    model = ShardedModel(folder, torch.float32, RankMesh.form("cpu"), CPU)
    model.load(folder)
    return model


def nothing(phase: str) -> None:
    """Ignore the progress of this rank."""


@dataclass(frozen=True)
class Outcome:
    """What one rank saw of plain layers, of a load that compiles them, and of the passes after it."""

    plain: Numbers
    refusal: str
    phases: list[str]
    uncompiled: tuple[int, Costs]
    """Frames compiled before the load, and the cost."""
    at_load: tuple[int, Costs]
    later: tuple[int, Costs]
    compiled: Numbers
    recomputed: tuple[list[int], Numbers]
    """Frames compiled after each pass of layers that compute all or wide parts again, and what they gave."""


def numbers(model: ShardedModel, lengths: tuple[int, ...], packed: bool) -> list[np.ndarray]:
    """Return log-probabilities with and without gradient, and the gradient."""
    row = PackedRow.of(lengths, CPU) if packed else None
    count = sum(lengths) if packed else max(lengths) * len(lengths)
    tokens = torch.randint(VOCABULARY, (count,), generator=torch.Generator().manual_seed(count))
    given = tokens.reshape(1 if packed else len(lengths), -1)

    def logprobs() -> torch.Tensor:
        asked = given, torch.arange(count - 1), tokens[1:]
        return model.policy(*asked, temperature=1.0, chunk_tokens=16, packed_row=row).logprobs

    with torch.no_grad():
        frozen = logprobs()
    live = logprobs()
    live.sum().backward()
    gradients = [gathered(parameter.grad) for parameter in model.parameters()]
    found = [tensor.detach().numpy().copy() for tensor in (frozen, live, *gradients)]
    model.policy.zero_grad(set_to_none=True)
    return found


def same(found: Numbers, right: Numbers) -> None:
    for ours, theirs in zip(chain(*found), chain(*right), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("packed", [False, True], ids=["padded-and-selective", "packed-and-recomputed"])
def test_one_graph_serves_every_layer_and_every_length_and_a_load_compiles_it(
    folder: Path, on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch, packed: bool
) -> None:
    # Traced and differentiated as for any compiler, without the minutes that one takes.
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(compiled_layers, "BACKEND", counter)
    monkeypatch.setattr("flotilla_trainer.rank.compilation.compiler_refusal", lambda device: "")

    def outcome() -> Outcome:
        model, phases = loaded(folder), list[str]()
        compilation = Compilation("on", CPU, phases.append)

        def cost() -> tuple[int, Costs]:
            return counter.frame_count, compilation.metrics()

        plain = [numbers(model, lengths, packed) for lengths in LENGTHS]
        uncompiled = cost()
        assert compilation.begin(model, packed=packed)
        assert all(parameter.grad is None for parameter in model.parameters())
        at_load = cost()
        compiled = [numbers(model, lengths, packed) for lengths in LENGTHS]
        later = cost()
        model.recomputed_layers.on = model.recomputed_layers.inputs_rest_on_host = packed
        model.selective_layers.on = not packed
        recomputed, frames = [], []
        for lengths in LENGTHS:
            recomputed.append(numbers(model, lengths, packed))
            frames.append(counter.frame_count)
        outcomes = compiled, (frames, recomputed)
        return Outcome(plain, compilation.refusal, phases, uncompiled, at_load, later, *outcomes)

    (found,) = on_ranks(1, outcome)
    assert not found.refusal
    assert found.uncompiled == (0, {})
    frames, costs = found.at_load
    # One graph without and one with gradient; packed rows break both at each call of their attention.
    assert 0 < frames <= (16 if packed else 2)
    assert costs["compilations"] > 0 and costs["time/compile_s"] > 0
    assert COMPILING in found.phases
    assert found.later == (frames, {})
    same(found.compiled, found.plain)
    after, numbers_after = found.recomputed
    # The graph without gradient stays, and the second length may still teach the compiler something.
    assert after[1:] == [after[1]] * (len(LENGTHS) - 1) and after[1] <= (16 if packed else 3)
    same(numbers_after, found.plain)


def test_without_a_compiler_the_reason_is_told_and_layers_run_as_they_are(
    folder: Path, on_ranks: OnRanks
) -> None:
    def began(wanted: str) -> tuple[bool, str, bool]:
        model = loaded(folder)
        compilation = Compilation(wanted, CPU, nothing)
        with inductor.patch(NO_COMPILER):
            fit = compilation.begin(model, packed=False)
        model.check_head()
        return fit, compilation.refusal, model.compiled_layers.on

    (answers,) = on_ranks(1, lambda: [began(wanted) for wanted in ("on", "auto", "off")])
    fit, refusal, on = answers[0]
    assert fit and not on
    assert "no-such-compiler" in refusal
    # On the CPU layers are only compiled where the configuration asks for it.
    assert answers[1:] == [(True, "", False)] * 2


def test_ranks_compile_all_or_none(folder: Path, on_ranks: OnRanks) -> None:
    def refusals() -> tuple[bool, str, bool]:
        model = loaded(folder)
        compilation = Compilation("on", CPU, nothing)
        healthy = torch.distributed.get_rank() == 0
        with pytest.MonkeyPatch.context() as patched, inductor.patch(NO_COMPILER):
            if healthy:
                patched.setattr("flotilla_trainer.rank.compilation.compiler_refusal", lambda device: "")
            return compilation.begin(model, packed=False), compilation.refusal, model.compiled_layers.on

    healthy, broken = on_ranks(2, refusals)
    assert (healthy[0], healthy[2], broken[0], broken[2]) == (True, False, True, False)
    assert "another rank" in healthy[1] and "no-such-compiler" in broken[1]


def test_a_model_that_the_compiler_fails_on_is_built_anew_and_not_tried_again(
    folder: Path, on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        raise ValueError("this graph is too much")

    monkeypatch.setattr(compiled_layers, "BACKEND", failing)
    monkeypatch.setattr("flotilla_trainer.rank.compilation.compiler_refusal", lambda device: "")

    def began() -> tuple[bool, str, bool, bool]:
        compilation = Compilation("on", CPU, nothing)
        first = compilation.begin(loaded(folder), packed=False)
        anew = loaded(folder)
        second = compilation.begin(anew, packed=False)
        anew.check_head()
        return first, compilation.refusal, second, anew.compiled_layers.on

    ((first, refusal, second, on),) = on_ranks(1, began)
    assert not first and second and not on
    assert "this graph is too much" in refusal


def test_a_compiler_that_is_switched_off_is_a_reason_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    assert "TORCHDYNAMO_DISABLE" in compiled_layers.compiler_refusal(CPU)

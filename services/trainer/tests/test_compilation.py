"""Layers are compiled when the model is loaded; a rank that cannot compile reports why and trains uncompiled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor
from transformers import Qwen3Config, Qwen3ForCausalLM

from flotilla_trainer.rank import compiled_layers
from flotilla_trainer.rank.compilation import Compilation, one_pass
from flotilla_trainer.rank.mesh import RankMesh
from flotilla_trainer.rank.sharded_model import ShardedModel

pytestmark = pytest.mark.timeout(300)
CPU = torch.device("cpu")
NO_COMPILER = {"cpp.cxx": ("no-such-compiler",), "force_disable_caches": True}
OnRanks = Callable[[int, Callable[[], Any]], list[Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("model")
    shape = {"hidden_size": 32, "intermediate_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes = {"vocab_size": 31, "num_hidden_layers": 1, "head_dim": 8}
    Qwen3ForCausalLM(Qwen3Config(**sizes, **shape)).save_pretrained(place)
    return place


def loaded(folder: Path) -> ShardedModel:
    model = ShardedModel(folder, torch.float32, RankMesh.form("cpu"), CPU)
    model.load(folder)
    return model


def nothing(phase: str) -> None:
    """Ignore the progress of this rank."""


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_an_update_finds_all_compiled_that_it_needs(
    folder: Path, on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch, packed: bool
) -> None:
    # Traced and differentiated as for any compiler, without the minutes that one takes.
    monkeypatch.setattr(compiled_layers, "BACKEND", "aot_eager")
    monkeypatch.setattr("flotilla_trainer.rank.compilation.compiler_refusal", lambda device: "")

    def costs() -> tuple[bool, str, dict[str, float], dict[str, float]]:
        model = loaded(folder)
        compilation = Compilation("on", CPU, nothing)
        fit = compilation.begin(model, packed=packed)
        at_load = compilation.metrics()
        assert all(parameter.grad is None for parameter in model.parameters())
        for lengths in ((11, 7, 30, 2), (3, 5)):
            one_pass(model, lengths, packed)
        return fit, compilation.refusal, at_load, compilation.metrics()

    ((fit, refusal, at_load, later),) = on_ranks(1, costs)
    assert fit and not refusal
    assert at_load["compilations"] > 0
    assert later == {}


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

"""What is published of a model has the names, shapes and numbers of its saved checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, MixtralConfig, Qwen2MoeConfig, Qwen3Config, Qwen3MoeConfig
from transformers.core_model_loading import Transpose, WeightConverter

from flotilla_core.errors import FailedPrecondition
from flotilla_trainer.rank.checkpoint_layout import CheckpointLayout
from flotilla_trainer.rank.cut import RankMesh
from flotilla_trainer.rank.sharded_model import ShardedModel

SHAPE = {
    "vocab_size": 31,
    "hidden_size": 24,
    "intermediate_size": 20,
    "moe_intermediate_size": 10,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "tie_word_embeddings": True,
}
EXPERTS = 3
"""An odd number: two ranks hold parts of different sizes."""
CONFIGS: dict[str, Callable[[], Any]] = {
    "dense": lambda: Qwen3Config(**SHAPE, head_dim=12),
    "experts": lambda: Qwen3MoeConfig(**SHAPE, head_dim=12, num_experts=EXPERTS, num_experts_per_tok=2),
    "renamed experts": lambda: MixtralConfig(**SHAPE, num_local_experts=EXPERTS, num_experts_per_tok=2),
    "shared experts": lambda: Qwen2MoeConfig(
        **SHAPE, num_experts=EXPERTS, num_experts_per_tok=2, shared_expert_intermediate_size=20
    ),
}


def model_of(kind: str) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[kind](), dtype=torch.float32)


def layout_of(model: Any) -> tuple[CheckpointLayout, list[tuple[str, torch.dtype, torch.Size]]]:
    specs = [(name, parameter.dtype, parameter.shape) for name, parameter in model.named_parameters()]
    return CheckpointLayout.of(model, specs), specs


def published(model: Any) -> dict[str, torch.Tensor]:
    """Return the tensors that would be sent of a model on one rank, in groups of two."""
    layout, specs = layout_of(model)
    parameters = dict(model.named_parameters())
    gathered: list[str] = []

    def gather(groups: Iterable[list[str]]) -> Iterator[tuple[str, list[torch.Tensor]]]:
        for name in chain.from_iterable(groups):
            gathered.append(name)
            yield name, [parameters[name]]

    order = [name for name, _, _ in layout.specs(specs)]
    groups = [order[start : start + 2] for start in range(0, len(order), 2)]
    sent = {name: rows for name, (rows,) in layout.rows(groups, gather)}
    assert list(sent) == order and gathered == list(parameters)
    return sent


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_checkpoint_is_published_as_it_is_saved(kind: str, tmp_path: Path) -> None:
    model = model_of(kind)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    layout, specs = layout_of(model)
    assert {name: shape for name, _, shape in layout.specs(specs)} == {n: t.shape for n, t in saved.items()}
    for name, tensor in published(model).items():
        assert torch.equal(tensor, saved[name]), name


def test_experts_are_views_of_the_parameters() -> None:
    model = model_of("experts")
    storages = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    for tensor in published(model).values():
        assert tensor.untyped_storage().data_ptr() in storages and tensor.is_contiguous()


def test_other_conversions_are_refused_by_the_name_of_the_tensor() -> None:
    model = model_of("dense")
    names = {"source_patterns": "self_attn.q_proj.weight", "target_patterns": "self_attn.q_proj.weight"}
    model._weight_conversions = [WeightConverter(**names, operations=[Transpose(0, 1)])]
    with pytest.raises(FailedPrecondition, match=r"layers\.0\.self_attn\.q_proj\.weight"):
        layout_of(model)


def sent_by_a_rank(folder: Path) -> dict[str, Any]:
    """Return what this rank would send, out of a model that all ranks share."""
    model = ShardedModel(folder, torch.float32, RankMesh.form("cpu"), torch.device("cpu"))
    model.load(folder)
    causal_lm: Any = model.causal_lm
    specs = model.specs(torch.float32)
    layout = CheckpointLayout.of(causal_lm, specs)
    order = [name for name, _, _ in layout.specs(specs)]
    rows = layout.rows([order[:5], order[5:]], partial(model.rows_to_round, dtype=torch.float32))
    return {name: torch.cat(parts).numpy().copy() for name, parts in rows}


def test_experts_that_two_ranks_share_are_published_whole(
    tmp_path: Path, on_ranks: Callable[[int, Callable[[], Any]], list[Any]]
) -> None:
    model_of("experts").save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    for sent in on_ranks(2, lambda: sent_by_a_rank(tmp_path)):
        assert sent.keys() == saved.keys()
        assert all(np.array_equal(array, saved[name].numpy()) for name, array in sent.items())

"""What a model folder says about itself, without a weight read."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from flotilla_coordinator.plan.data_lines import model_line
from flotilla_coordinator.plan.model_facts import ModelFacts, SequenceLimit
from flotilla_testing.model_folders import write_header

CONFIG = {
    "model_type": "qwen3_moe",
    "hidden_size": 8,
    "intermediate_size": 32,
    "moe_intermediate_size": 10,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_experts_per_tok": 1,
    "vocab_size": 20,
    "max_position_embeddings": 64,
}
DENSE = {"model.embed_tokens.weight": [20, 8], "model.layers.0.mlp.gate.weight": [4, 8]}
EXPERTS = {f"model.layers.0.mlp.experts.{index}.up_proj.weight": [10, 8] for index in range(4)}


@pytest.fixture
def mixture(tmp_path: Path) -> ModelFacts:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    write_header(tmp_path, DENSE | EXPERTS, "F32")
    return ModelFacts.read(tmp_path)


def test_a_mixture_counts_all_experts_and_those_that_a_token_meets(mixture: ModelFacts) -> None:
    outside, one = sum(map(math.prod, DENSE.values())), 10 * 8
    assert (mixture.experts, mixture.visited_experts) == (4, 1)
    assert (mixture.parameters, mixture.active_parameters) == (outside + 4 * one, outside + one)
    assert f" {outside + one} " in model_line(mixture, SequenceLimit(64, None)).explanation

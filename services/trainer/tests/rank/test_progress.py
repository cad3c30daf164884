"""A rank that computes makes progress within one micro-batch: with every layer and every chunk, in both directions."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from flotilla_trainer.rank.activation_offload import RecomputedLayers
from flotilla_trainer.rank.policy_model import PolicyModel
from flotilla_trainer.rank.value_model import ValueModel

LAYERS, CHUNKS = 3, 4
SHAPE = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}
CONFIG = Qwen3Config(vocab_size=31, num_hidden_layers=LAYERS, head_dim=8, **SHAPE)
TOKENS = torch.arange(20)[None]


@pytest.mark.parametrize("recompute", [False, True])
def test_every_layer_and_chunk_counts_forward_and_backward(recompute: bool) -> None:
    steps: list[None] = []
    policy = PolicyModel(Qwen3ForCausalLM(CONFIG))
    layers = policy.causal_lm.model.layers
    RecomputedLayers(layers).on = recompute
    policy.report_progress(layers, lambda: steps.append(None))
    scores = policy(TOKENS, torch.arange(20), TOKENS[0], temperature=1.0, chunk_tokens=5)
    assert len(steps) == LAYERS + CHUNKS
    scores.logprobs.sum().backward()
    assert len(steps) == 2 * (LAYERS + CHUNKS)


def test_the_layers_of_a_critic_count_too() -> None:
    steps: list[None] = []
    critic = ValueModel(ValueModel.skeleton(CONFIG, torch.float32))
    critic.report_progress(critic.causal_lm.base_model.layers, lambda: steps.append(None))
    critic(TOKENS, torch.arange(20)).sum().backward()
    assert len(steps) == 2 * LAYERS

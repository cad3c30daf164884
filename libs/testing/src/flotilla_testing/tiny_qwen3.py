"""A Qwen3 of few random weights, large enough that every layer matters; a test says only what is special of its own."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

VOCABULARY = 31
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}


def tiny_qwen3(seed: int = 0, **changes: Any) -> Any:
    """Return the model that a seed makes, with changes in its shape."""
    torch.manual_seed(seed)
    build: Any = Qwen3ForCausalLM
    return build(Qwen3Config(**SHAPE | changes))

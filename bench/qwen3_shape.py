"""Shapes of Qwen3 and models of such shapes with weights drawn at random: figures without a download."""

from __future__ import annotations

from pathlib import Path
from typing import Any

QWEN3_0_6B = {
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
QWEN3_8B = {
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": False,
}
SMALL = {
    "vocab_size": 503,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
"""For tries of a bench on a CPU."""


def make_model(folder: Path, *, dtype: str = "float32", **shape: Any) -> None:
    """Write a Qwen3 of this shape."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(**{"max_position_embeddings": 40_960, "tie_word_embeddings": True} | shape)
    Qwen3ForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(folder)

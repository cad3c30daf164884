"""The gradients of a batch cover the whole model, whatever part of it the batch reaches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from transformers import AutoModel, BertConfig

from flotilla_core.config import BatchingConfig, CriticConfig, OptimizerConfig, PolicyConfig
from flotilla_trainer.batch.packing import Layout, Sequences, pack
from flotilla_trainer.rank.worker import RankWorker
from flotilla_trainer.wire.frames import Array, Frame
from flotilla_trainer.wire.objective import VALUE, ObjectiveSettings
from flotilla_trainer.wire.settings import VALUE_HEAD, SessionSettings

Started = Callable[[str], RankWorker]
RANKS = 2
VOCABULARY = 31
UNREACHED = "bert.pooler."
"""A layer for classifiers of whole texts; a critic judges tokens and never runs it."""
BERT = BertConfig(
    vocab_size=VOCABULARY,
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    max_position_embeddings=32,
    initializer_range=0.2,
    is_decoder=True,
)


def asked(kind: str, fields: dict[str, Any], arrays: dict[str, Array] | None = None) -> Frame:
    return Frame(kind, 0, fields, arrays or {})


def sequences() -> Sequences:
    """Two sequences, of which every token but the first is learned."""
    lengths = np.array([7, 5])
    scored = np.delete(np.arange(12), [0, 7])
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, 12).astype(np.int32)
    columns = {"weights": 0.1, "returns": 1.0, "old_values": 0.0}
    return Sequences(
        tokens,
        lengths,
        scored,
        {name: np.full(len(scored), value, np.float32) for name, value in columns.items()},
    )


def gradients(folder: Path, started: Started) -> dict[str, Array]:
    """Return the gradients that this rank answers."""
    worker = started(VALUE_HEAD)
    worker.run(asked("load", {"model": str(folder), "head": VALUE_HEAD, "frozen": False}))
    objective = ObjectiveSettings(VALUE, PolicyConfig(type="ppo", critic=CriticConfig()))
    settings = SessionSettings(objective, OptimizerConfig(), BatchingConfig(), 0, total_updates=1)
    worker.run(asked("open_session", settings.fields()))
    batches = pack(sequences(), Layout(16, ranks=RANKS, packed=False))[dist.get_rank()]
    arrays = {name: array for index, one in enumerate(batches) for name, array in one.arrays(index).items()}
    return worker.run(asked("gradients", {"idle": [one.idle for one in batches]}, arrays))[1]


def test_gradients_are_zeros_where_no_sample_reaches_a_parameter(
    tmp_path: Path, on_ranks: Callable[[int, Callable[[], Any]], list[Any]], started: Started
) -> None:
    torch.manual_seed(0)
    body = AutoModel.from_config(BERT, dtype=torch.float32)
    body.save_pretrained(tmp_path)
    # A head of zeros would leave the body with gradients of zero.
    save_file({"score.weight": torch.full((1, 16), 0.1)}, tmp_path / "head.safetensors")
    whole, nothing = on_ranks(RANKS, lambda: gradients(tmp_path, started))
    assert not nothing
    shapes = {f"bert.{name}": tuple(parameter.shape) for name, parameter in body.named_parameters()}
    shapes |= {"score.weight": (1, 16), "score.bias": (1,)}
    assert {name: gradient.shape for name, gradient in whole.items()} == shapes
    unreached = {name for name in shapes if name.startswith(UNREACHED)}
    assert unreached and not any(whole[name].any() for name in unreached)
    assert all(whole[name].any() for name in shapes if name not in unreached and name.endswith("weight"))

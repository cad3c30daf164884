"""The gradients of a batch cover the whole model, whatever part of it the batch reaches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoModel, BertConfig

from flotilla_core.config import BatchingConfig, CriticConfig, OptimizerConfig, PolicyConfig
from flotilla_trainer.batch.packing import Layout, Sequences, pack
from flotilla_trainer.rank.cut import local
from flotilla_trainer.rank.meeting import Meeting
from flotilla_trainer.rank.worker import RankWorker
from flotilla_trainer.wire.frames import Array, Frame
from flotilla_trainer.wire.objective import VALUE, ObjectiveSettings
from flotilla_trainer.wire.settings import VALUE_HEAD, RankSetup, SessionSettings

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


class Line:
    """A front that only listens."""

    def progress(self, phase: str) -> None:
        pass

    def moved(self) -> None:
        pass

    def urgent(self, kind: str, act: Callable[[Frame], None]) -> None:
        pass


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


def gradients(folder: Path) -> dict[str, Array]:
    """Return the gradients that this rank answers."""
    rank = dist.get_rank()
    dist.destroy_process_group()  # a rank forms its own
    setup = RankSetup(
        rank=rank,
        nproc=RANKS,
        head=VALUE_HEAD,
        rendezvous=str(folder / "rendezvous"),
        meet_host="",
        place=rank,
        ranks_here=RANKS,
        backend="gloo",
        dtype="float32",
        replicate=1,
        sequence_parallel=1,
        cpu_offload=False,
        memory_fraction=None,
        compile="off",
        model=str(folder),
        instance_id="trainer",
        otlp=(),
        credential_file=None,
    )
    line: Any = Line()
    worker = RankWorker(setup, line, Meeting())
    worker._load(asked("load", {"model": str(folder), "head": VALUE_HEAD, "frozen": False}))
    with torch.no_grad():
        # A head of zeros would leave the body with gradients of zero.
        local(worker._model.trainable()["score.weight"]).fill_(0.1)
    objective = ObjectiveSettings(VALUE, PolicyConfig(type="ppo", critic=CriticConfig()))
    settings = SessionSettings(objective, OptimizerConfig(), BatchingConfig(), 0, total_updates=1)
    worker._open_session(asked("open_session", settings.fields()))
    batches = pack(sequences(), Layout(16, ranks=RANKS, packed=False))[rank]
    arrays = {name: array for index, one in enumerate(batches) for name, array in one.arrays(index).items()}
    return worker._gradients(asked("gradients", {"idle": [one.idle for one in batches]}, arrays))[1]


def test_gradients_are_zeros_where_no_sample_reaches_a_parameter(
    tmp_path: Path, on_ranks: Callable[[int, Callable[[], Any]], list[Any]]
) -> None:
    torch.manual_seed(0)
    body = AutoModel.from_config(BERT, dtype=torch.float32)
    body.save_pretrained(tmp_path)
    whole, nothing = on_ranks(RANKS, lambda: gradients(tmp_path))
    assert not nothing
    shapes = {f"bert.{name}": tuple(parameter.shape) for name, parameter in body.named_parameters()}
    shapes |= {"score.weight": (1, 16), "score.bias": (1,)}
    assert {name: gradient.shape for name, gradient in whole.items()} == shapes
    unreached = {name for name in shapes if name.startswith(UNREACHED)}
    assert unreached and not any(whole[name].any() for name in unreached)
    assert all(whole[name].any() for name in shapes if name not in unreached and name.endswith("weight"))

"""The reward model as training sees it: transformers' own sequence classification with one label.

Invariants: the reward of a sequence is the value after its last token, as that class gives it; the head has no offset,
which no comparison could teach it; a folder of a language model starts it with a head of zeros.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForSequenceClassification, PretrainedConfig, PreTrainedModel

from flotilla_core.errors import FailedPrecondition
from flotilla_trainer.rank.body_model import ROW_ATTENTION
from flotilla_trainer.rank.value_model import ValueModel

HEAD = "score.weight"


class RewardModel(ValueModel):
    """A value model whose values count after the last token alone."""

    @staticmethod
    def skeleton(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
        """What is inside, without numbers."""
        config.num_labels = 1
        config.pad_token_id = _padding(config)
        try:
            model: PreTrainedModel = AutoModelForSequenceClassification.from_config(
                config, dtype=dtype, attn_implementation=ROW_ATTENTION
            )
        except ValueError as error:
            raise _cannot(config, str(error).partition("\n")[0]) from error
        if not isinstance(getattr(model, "score", None), nn.Linear):
            raise _cannot(config, f"{type(model).__name__} has no linear head named score")
        return model

    @staticmethod
    def read(folder: Path) -> tuple[PreTrainedModel, set[str]]:
        """What a folder has of it, in float32 on the host, and the names of what it lacks but the head."""
        model, report = AutoModelForSequenceClassification.from_pretrained(
            folder,
            num_labels=1,
            dtype=torch.float32,
            attn_implementation=ROW_ATTENTION,
            output_loading_info=True,
        )
        lacking = set(report["missing_keys"])
        if HEAD in lacking:
            with torch.no_grad():
                model.score.weight.zero_()
        return model, lacking - {HEAD}


def _padding(config: PretrainedConfig) -> int | None:
    """The token that classification leaves out at the end; never one that ends answers, whose value is the reward."""
    ends: Any = config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    return None if config.pad_token_id in ends else config.pad_token_id


def _cannot(config: PretrainedConfig, why: str) -> FailedPrecondition:
    return FailedPrecondition(
        f"a model of type {config.model_type} cannot become a reward model",
        why=why,
        next_step="use a model that transformers knows as AutoModelForSequenceClassification",
    )

"""Models with a head of one number, as training uses them: critics give values, reward models give rewards.

Invariants: a value is float32 and comes from the hidden state before the token that it belongs to, so it does not
depend on that token; the head is kept and applied in float32 whatever the body computes in. A reward model is
transformers' own sequence classification with one label: the reward of a sequence is the value after its last token;
the head has no bias, which no comparison could teach it; a folder of a language model starts it with a head of zeros.
A model that gives rewards and does not learn has a number for each of its labels, by the head of its folder. It may be
an encoder, which sees a whole row: its own class pools it, told where the padding begins, and it is never packed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForSequenceClassification, PretrainedConfig, PreTrainedModel

from flotilla_core.errors import FailedPrecondition
from flotilla_core.model_folder import SCORE_HEADS, score_head
from flotilla_trainer.rank.body_model import ROW_ATTENTION, BodyModel, ValueBody
from flotilla_trainer.rank.packed_rows import PackedRow

HEAD = "score.weight"


class ValueModel(BodyModel):
    """A language model's body with a head that gives one number for each token."""

    @staticmethod
    def skeleton(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel | ValueBody:
        """Build the model inside, without weights."""
        return ValueBody.skeleton(config, dtype)

    @staticmethod
    def read(folder: Path) -> tuple[PreTrainedModel | ValueBody, set[str]]:
        """Read the model of a folder, and the names of the tensors that it lacks; a missing head is zero."""
        return ValueBody.read(folder)

    def in_float32(self) -> list[nn.Module]:
        """Return the parts that stay in float32 whatever the rest computes in."""
        return [self._head]

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, *, packed_row: PackedRow | None = None
    ) -> torch.Tensor:
        """Return one value, or one for each label, of each of the flattened `positions`."""
        if self._lane is None:
            return self._values(self._hidden(tokens, packed_row).index_select(0, positions))
        part = self._lane.part(tokens, packed_row)
        own = part.own(positions)
        mine = self._values(self._hidden_part(part).index_select(0, positions[own] - part.first))
        return self._lane.joined(mine, own, len(positions))

    def _values(self, hidden: torch.Tensor) -> torch.Tensor:
        # A view of the module's output would lose FSDP's hook at the first in-place operation.
        values: torch.Tensor = self._head(hidden.float())
        return values.squeeze(-1).clone()

    @property
    def _head(self) -> nn.Linear:
        head = self.causal_lm.score
        assert isinstance(head, nn.Linear), "skeletons without one are refused"
        return head


class RewardModel(ValueModel):
    """A value model of which only the value after the last token counts.

    It is transformers' own sequence classification with one label.
    """

    @staticmethod
    def skeleton(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
        """Build the model inside, without weights."""
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
        """Read the model of a folder in float32 on the host, and the names of the missing tensors except the head."""
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


class ScoreModel(ValueModel):
    """A value model with a number for each label of its folder's head, which has to be there."""

    @staticmethod
    def skeleton(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel | ValueBody:
        """Build the model inside, without weights."""
        head, labels = score_head(Path(str(config.name_or_path)))
        if not labels:
            raise FailedPrecondition(
                f"a model of type {config.model_type} gives no rewards",
                where=str(config.name_or_path),
                why=f"its weights have no head of scores: {' or '.join(f'{head}.weight' for head in SCORE_HEADS)}",
                next_step="use a model for sequence classification, no sequence-to-sequence model",
            )
        if head:
            return ValueBody.skeleton(config, dtype, labels)
        encoder: PreTrainedModel = AutoModelForSequenceClassification.from_config(config, dtype=dtype)
        return encoder

    @staticmethod
    def read(folder: Path) -> tuple[PreTrainedModel | ValueBody, set[str]]:
        """Read the model of a folder, and the names of the tensors that it lacks."""
        head, labels = score_head(folder)
        if head:
            return ValueBody.read(folder, head, labels)
        encoder, report = AutoModelForSequenceClassification.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True
        )
        return encoder, set(report["missing_keys"])

    def in_float32(self) -> list[nn.Module]:
        """Return the parts that stay in float32 whatever the rest computes in."""
        return super().in_float32() if isinstance(self.causal_lm, ValueBody) else []

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, *, packed_row: PackedRow | None = None
    ) -> torch.Tensor:
        """Return the scores at the flattened `positions`, of an encoder those of their rows up to the last one."""
        if isinstance(self.causal_lm, ValueBody):
            return super().forward(tokens, positions, packed_row=packed_row)
        return self._encoded(tokens, positions)

    def packing_errors(self, first: torch.Tensor, other: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        """Measure how packing changes hidden states; an encoder sees its neighbours, whatever they are."""
        if isinstance(self.causal_lm, ValueBody):
            return super().packing_errors(first, other, last)
        return torch.full((2,), torch.inf)

    def head_error(self, tokens: torch.Tensor) -> torch.Tensor:
        """Measure how far padding changes the scores of an encoder."""
        if isinstance(self.causal_lm, ValueBody):
            return torch.zeros(())
        last = torch.ones(1, dtype=torch.long, device=tokens.device)
        return (self._encoded(tokens, last) - self._encoded(tokens[:, :2], last)).abs().max()

    def _encoded(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        rows, places = positions // tokens.shape[1], positions % tokens.shape[1]
        lasts = torch.zeros(len(tokens), dtype=places.dtype, device=places.device)
        lasts.scatter_reduce_(0, rows, places, "amax")
        seen = torch.arange(tokens.shape[1], device=tokens.device) <= lasts[:, None]
        assert not isinstance(self.causal_lm, ValueBody), "bodies with values are asked for hidden states"
        logits: torch.Tensor = self.causal_lm(input_ids=tokens.long(), attention_mask=seen.long()).logits
        return logits.float().index_select(0, rows).squeeze(-1)


def _padding(config: PretrainedConfig) -> int | None:
    """Return the padding token that classification skips; never one that ends answers: its value is the reward."""
    ends: Any = config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    return None if config.pad_token_id in ends else config.pad_token_id


def _cannot(config: PretrainedConfig, why: str) -> FailedPrecondition:
    return FailedPrecondition(
        f"a model of type {config.model_type} cannot become a reward model",
        why=why,
        next_step="use a model that transformers can load as AutoModelForSequenceClassification",
    )

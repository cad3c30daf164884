"""A transformer up to its last hidden states, and a body whose head is a few numbers in place of the vocabulary's.

Invariants: tokens come as rows padded on the right, where a causal model cannot see the padding, or as one packed row
with its borders; either way no mask is built; there is no dropout, because rollouts and training must agree. Ranks that
share a row get the same micro-batch and return the same answers, each having computed a part of them. Subclasses use
the hidden states within their own forward, so that sharded parameters are whole when they are needed.

The tensor names of a body with values are those of Hugging Face's token classification (the body under its own prefix,
`score.weight` and `score.bias`). It can start from a folder of either kind of classification with as many labels, or
from a language model, with a head of zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModel, PretrainedConfig, PreTrainedModel

from flotilla_core.errors import FailedPrecondition, Mismatch
from flotilla_trainer.rank.packed_rows import PACKED_ATTENTION, PackedRow
from flotilla_trainer.rank.sequence_parallel import SEQUENCE_PARALLEL_ATTENTION, RowPart, SequenceParallel

ROW_ATTENTION = "sdpa"

HEAD = ("score.weight", "score.bias")
WEIGHTS_FILE = "model.safetensors"


class ValueBody(nn.Module):
    """The body of a language model with a head of one number, or one for each label, in place of the vocabulary's.

    It has the part of the interface of transformers' models that sharding, saving and scoring use.
    """

    def __init__(self, body: Any, labels: int = 1) -> None:
        super().__init__()
        self._prefix = body.base_model_prefix or "model"
        setattr(self, self._prefix, body)
        self.score = nn.Linear(body.config.get_text_config().hidden_size, labels, dtype=body.dtype)
        self.config = body.config
        self._no_split_modules = body._no_split_modules

    @classmethod
    def skeleton(cls, config: PretrainedConfig, dtype: torch.dtype, labels: int = 1) -> ValueBody:
        """Build a model without weights."""
        return cls(AutoModel.from_config(config, dtype=dtype, attn_implementation="sdpa"), labels)

    @classmethod
    def read(cls, folder: Path, head: str = "score", labels: int = 1) -> tuple[ValueBody, set[str]]:
        """Read the model of a folder in float32 on the host, and the names of the tensors that the folder lacks.

        `head` is the name that its head has in the folder.
        """
        body, report = AutoModel.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa", output_loading_info=True
        )
        model = cls(body, labels)
        with torch.no_grad():
            for name in HEAD:
                parameter, stored = model.get_parameter(name), _stored(folder, name.replace("score", head))
                if stored is not None and stored.shape != parameter.shape:
                    raise Mismatch(
                        "the folder's head gives more than one number",
                        where=str(folder),
                        why=f"{name} is {list(stored.shape)}, not {list(parameter.shape)}",
                        next_step="start the critic from a model with one label, or from a language model",
                    )
                parameter.copy_(torch.zeros_like(parameter) if stored is None else stored)
        return model, {f"{model._prefix}.{name}" for name in report["missing_keys"]}

    @property
    def base_model(self) -> Any:
        """The body without the head."""
        return getattr(self, self._prefix)

    def set_attn_implementation(self, name: str) -> None:
        """Set the attention of the body."""
        self.base_model.set_attn_implementation(name)

    def _can_set_attn_implementation(self) -> bool:
        return bool(self.base_model._can_set_attn_implementation())

    def save_pretrained(self, folder: Path, state_dict: dict[str, torch.Tensor]) -> None:
        """Write the folder as transformers would for token classification."""
        save_file(
            {name: tensor.contiguous() for name, tensor in state_dict.items()},
            folder / WEIGHTS_FILE,
            {"format": "pt"},
        )
        family = type(self.base_model).__name__.removesuffix("Model")
        config = type(self.config).from_dict(self.config.to_dict())
        config.architectures = [f"{family}ForTokenClassification"]
        config.num_labels = 1
        config.dtype = str(next(iter(state_dict.values())).dtype).removeprefix("torch.")
        config.save_pretrained(folder)


def _stored(folder: Path, name: str) -> torch.Tensor | None:
    """Read a tensor of the folder's weights; None where they lack it."""
    try:
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                if name in file.keys():  # noqa: SIM118 - it is no dictionary
                    stored: torch.Tensor = file.get_tensor(name)
                    return stored.float()
    except SafetensorError as error:
        raise FailedPrecondition("the model cannot be loaded", where=str(folder), why=str(error)) from error
    return None


def _report(output: Any, moved: Callable[[], None]) -> None:
    """Report that a layer gave this output, and later that the gradient of the output arrived."""
    moved()
    hidden = output[0] if isinstance(output, tuple) else output
    if isinstance(hidden, torch.Tensor) and hidden.requires_grad:
        hidden.register_hook(lambda gradient: moved())


def _nothing() -> None:
    """Take no notice of progress."""


class BodyModel(nn.Module):
    """The part that models of all roles share: the way to the hidden states."""

    causal_lm: PreTrainedModel | ValueBody

    def __init__(self, causal_lm: PreTrainedModel | ValueBody, lane: SequenceParallel | None = None) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        self._lane = lane
        self._moved: Callable[[], None] = _nothing
        self.eval()

    def report_progress(self, layers: Iterable[nn.Module], moved: Callable[[], None]) -> None:
        """Call `moved` after every part of a pass, forward and backward: a layer, or a chunk of a head."""
        self._moved = moved
        for layer in layers:
            layer.register_forward_hook(lambda module, inputs, output: _report(output, moved))

    def packing_errors(self, first: torch.Tensor, other: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        """Measure how packing changes `last`, as shares of its largest hidden state.

        The first number is its difference from `last` alone in a row, the second its dependence on the sequence before.
        """
        row = PackedRow.of((len(first), len(last)), last.device)
        alone = self._hidden(last[None])
        after = [
            self._hidden(torch.cat([before, last])[None], row)[len(first) :] for before in (first, other)
        ]
        differences = torch.stack([(after[0] - alone).abs().max(), (after[0] - after[1]).abs().max()])
        return differences.float() / alone.abs().max()

    def lane_error(self, tokens: torch.Tensor) -> torch.Tensor:
        """Measure how feeding a row of two sequences in parts changes it, as a share of its largest hidden state."""
        assert self._lane is not None
        row = PackedRow.of((len(tokens) // 3, len(tokens) - len(tokens) // 3), tokens.device)
        whole = self._hidden(tokens[None], row)
        part = self._lane.part(tokens[None], row)
        own = whole[part.first : part.first + part.tokens.shape[1]]
        difference = (self._hidden_part(part)[: len(own)] - own).abs().max()
        return difference.float() / whole.abs().max()

    def _hidden(self, tokens: torch.Tensor, packed_row: PackedRow | None = None) -> torch.Tensor:
        attention, borders = ROW_ATTENTION, dict[str, Any]()
        if packed_row is not None:
            attention = PACKED_ATTENTION
            borders = {"position_ids": packed_row.position_ids, "packed_row": packed_row}
        return self._run(attention, tokens, borders)

    def _hidden_part(self, part: RowPart) -> torch.Tensor:
        given = {"position_ids": part.position_ids, "packed_row": part.row, "lane": self._lane}
        return self._run(SEQUENCE_PARALLEL_ATTENTION, part.tokens, given)

    def _run(self, attention: str, tokens: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
        if self.causal_lm.config._attn_implementation != attention:
            self.causal_lm.set_attn_implementation(attention)
        output = self.causal_lm.base_model(input_ids=tokens, use_cache=False, **given)
        hidden: torch.Tensor = output.last_hidden_state
        return hidden.flatten(0, 1)

"""The properties of the model in the boot checkpoint: tensors, vocabulary, limits, end of sequence.

Invariant: reads configuration and safetensors headers only, never a weight.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from flotilla_core.errors import InvalidConfig, NotFound
from flotilla_core.json_text import read_json_object
from flotilla_core.model_folder import (
    end_tokens,
    inner_config,
    model_folder,
    stored_shapes,
    weight_files,
    whole_number,
)

HEAD = "lm_head.weight"
REQUIRED = ("vocab_size", "max_position_embeddings")


@dataclass(frozen=True)
class Checkpoint:
    """A Hugging Face model folder."""

    folder: Path
    config: dict[str, Any]

    @classmethod
    def read(cls, model: Path | str) -> Checkpoint:
        """Open a folder or the local snapshot of a hub model."""
        folder = model_folder(model)
        checkpoint = cls(folder, _json(folder, "config.json"))
        missing = [name for name in REQUIRED if name not in checkpoint._text_config]
        if missing:
            raise InvalidConfig(
                "config.json does not describe a language model",
                where=str(folder),
                why=f"{' and '.join(missing)} not found (model_type {checkpoint.config.get('model_type')!r})",
                next_step="set `model` in stack.yaml to the folder of a causal language model",
            )
        return checkpoint

    @cached_property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor that a whole sync moves; a tied head is not one of them."""
        tensors: dict[str, tuple[int, ...]] = {}
        for file in weight_files(self.folder):
            tensors.update(stored_shapes(file))
        if not tensors:
            raise NotFound(
                "the model folder holds no safetensors",
                where=str(self.folder),
                next_step="save the model there with `save_pretrained`",
            )
        if self._text_config.get("tie_word_embeddings", False):
            tensors.pop(HEAD, None)
        return tensors

    @property
    def shape_digest(self) -> str:
        """SHA-256 over names and shapes of all tensors."""
        lines = [f"{name}\t{','.join(map(str, shape))}" for name, shape in sorted(self.tensors.items())]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    @property
    def vocabulary_size(self) -> int:
        """Rows of the embedding."""
        return whole_number(self._text_config, "vocab_size", str(self.folder))

    @property
    def longest_sequence(self) -> int:
        """Prompt plus response that the model was built for."""
        return whole_number(self._text_config, "max_position_embeddings", str(self.folder))

    @cached_property
    def end_of_sequence(self) -> tuple[int, ...]:
        """Tokens that end a response."""
        sources = [self._text_config]
        if (self.folder / "generation_config.json").exists():
            sources.append(_json(self.folder, "generation_config.json"))
        found = [end for source in sources for end in end_tokens(source, str(self.folder))]
        return tuple(dict.fromkeys(found))

    @property
    def _text_config(self) -> dict[str, Any]:
        return self.config | inner_config(self.config, str(self.folder))


def _json(folder: Path, name: str) -> dict[str, Any]:
    try:
        return read_json_object(folder / name)
    except FileNotFoundError:
        raise NotFound(f"the model folder has no {name}", where=str(folder)) from None

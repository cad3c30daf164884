"""Read the shape of a model from its configuration, without loading it.

Invariant: two folders have the same shape exactly when a model built from one can hold the weights of the other, with
every token id at the same place.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from flotilla_core.errors import Mismatch, NotFound
from flotilla_core.json_text import read_json_object
from flotilla_core.model_folder import weight_files

COSMETIC = {"_name_or_path", "dtype", "torch_dtype", "transformers_version", "use_cache", "initializer_range"}
"""The keys that change neither a tensor nor a number that a forward pass computes."""


OF_THE_HEAD = {
    "architectures",
    "id2label",
    "label2id",
    "num_labels",
    "pad_token_id",
    "problem_type",
    "tie_word_embeddings",
}
"""The keys that describe the head of a model, and shape no tensor of its body."""


def model_shape(folder: Path) -> dict[str, Any]:
    """Return the keys of config.json that shape the model; refuse weights that no rank could read."""
    path = folder / "config.json"
    try:
        content = read_json_object(path)
    except FileNotFoundError:
        raise NotFound(
            "the model folder has no config.json",
            where=str(folder),
            next_step="give a folder in Hugging Face layout (config.json, *.safetensors, tokenizer.json)",
        ) from None
    weight_files(folder)  # A rank would wait for the writer of a named pipe.
    return {key: value for key, value in content.items() if key not in COSMETIC}


def model_digest(folder: Path) -> str:
    """Return the SHA-256 of the shape, in hex."""
    return hashlib.sha256(json.dumps(model_shape(folder), sort_keys=True).encode()).hexdigest()


def check_same_shape(folder: Path, booted: Path, *, with_head: bool = True) -> None:
    """Raise Mismatch, naming the first key that differs, when `folder` does not fit the booted model."""
    check_shape(model_shape(folder), folder, booted, with_head=with_head)


def check_shape(theirs: dict[str, Any], folder: Path, booted: Path, *, with_head: bool = True) -> None:
    """Raise Mismatch when the shape `theirs` of `folder` does not fit; without its head, only the body has to fit."""
    ours = model_shape(booted)
    ignored = set() if with_head else OF_THE_HEAD
    for key in sorted((theirs.keys() | ours.keys()) - ignored):
        if theirs.get(key) != ours.get(key):
            raise Mismatch(
                "the weights are for another model than the trainer holds",
                where=str(folder),
                why=f"{key} is {theirs.get(key)!r} there and {ours.get(key)!r} in {booted}",
                next_step="set `model` in stack.yaml to a model of this shape and start the stack again",
            )

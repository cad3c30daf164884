"""Parts of model folders that are read without torch: a tokenizer of few words, and a file of weights without data."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers


def write_tokenizer(
    folder: Path, words: Iterable[str], *, special: Sequence[str] = (), template: str = "", **settings: Any
) -> Path:
    """Write a tokenizer of these words, of which the first stands for all others; each character is a token."""
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=next(iter(vocabulary))))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(special))
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    if settings:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if template:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def write_header(folder: Path, shapes: Mapping[str, Sequence[int]], dtype: str = "BF16") -> None:
    """Write a file of weights that names these tensors and holds none of their numbers."""
    entries = {
        name: {"dtype": dtype, "shape": shape, "data_offsets": [0, 0]} for name, shape in shapes.items()
    }
    header = json.dumps(entries).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)

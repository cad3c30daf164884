"""One number for a tokenizer, so that services can tell whether they mean the same tokens.

Invariants: computed from the bytes of `tokenizer.json` alone, so every service gets the same one without
loading it.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from flotilla_core.errors import NotFound

TOKENIZER_FILE = "tokenizer.json"


def tokenizer_digest(folder: Path) -> str:
    """SHA-256 of the tokenizer of a model folder, in hex."""
    if not folder.is_dir():
        raise NotFound(
            "the model folder does not exist",
            where=str(folder),
            next_step="set `model` in stack.yaml, or initial_weights in run.yaml, to a Hugging Face folder",
        )
    try:
        content = (folder / TOKENIZER_FILE).read_bytes()
    except FileNotFoundError:
        raise NotFound(
            f"the model folder has no {TOKENIZER_FILE}",
            where=str(folder),
            why="only fast tokenizers are supported",
            next_step="save one there with `AutoTokenizer.from_pretrained(...).save_pretrained(...)`",
        ) from None
    return hashlib.sha256(content).hexdigest()

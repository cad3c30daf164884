"""The folder of a model on this host, the shapes in its files, and one digest for its tokenizer.

Invariants: a folder is used as it is; a hub name becomes the local snapshot of that model, downloaded once; nothing
is downloaded while HF_HUB_OFFLINE is set. A path that is too long, or that this user may not look at, counts as
missing. The digest of a tokenizer is that of the bytes of `tokenizer.json` alone. So every service gets the same one
without loading it, and can tell whether it means the same tokens as another.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from flotilla_core.errors import InvalidConfig, NotFound
from flotilla_core.json_text import json_object

LONGEST_HEADER = 100 << 20
"""Bytes; the limit of the format."""
FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt"]

TOKENIZER_FILE = "tokenizer.json"


def model_folder(model: Path | str) -> Path:
    """Return the Hugging Face folder of a model given as a folder or as a hub name."""
    folder = Path(model)
    # Path.is_dir raises for a path that is too long, or below a closed folder.
    if os.path.isdir(folder):
        return folder.resolve()
    if "://" in str(model):
        raise NotFound(
            "the model lies in object storage, and this command uses no copy of it",
            where=str(model),
            next_step="start the stack (flotilla up), or name a folder",
        )
    if str(model).count("/") != 1 or str(model).startswith((".", "/", "~")):
        raise NotFound(
            "the model folder does not exist",
            where=str(model),
            next_step="set `model` in stack.yaml to a Hugging Face folder or a hub name (organisation/model)",
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(str(model), allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.txt"])
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise NotFound(
            f"there is no folder {model}, and the hub did not give the model",
            where="model in stack.yaml",
            why=str(error).splitlines()[0],
            next_step="check the name, log in with `hf auth login`, or give a local folder",
        ) from error


def stored_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor of a safetensors file, from its header alone."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            content = file.read(length) if length <= LONGEST_HEADER else b""
    except OSError as error:
        raise InvalidConfig(
            "the file of weights cannot be read", where=str(path), why=error.strerror or str(error)
        ) from None
    try:
        header = json_object(content, str(path))
        return {
            name: tuple(map(int, entry["shape"])) for name, entry in header.items() if name != "__metadata__"
        }
    except (InvalidConfig, KeyError, TypeError, ValueError):
        raise InvalidConfig(
            "the file of weights is damaged",
            where=str(path),
            why=f"its header is not the JSON of at most {LONGEST_HEADER} bytes that names tensors and shapes",
        ) from None


def tokenizer_digest(folder: Path) -> str:
    """Return the SHA-256 of the tokenizer of a model folder, in hex."""
    if not os.path.isdir(folder):
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
    except OSError as error:
        raise InvalidConfig(
            f"{TOKENIZER_FILE} cannot be read", where=str(folder), why=error.strerror or str(error)
        ) from None
    return hashlib.sha256(content).hexdigest()

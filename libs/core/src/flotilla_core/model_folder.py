"""The folder of a model on this host, the shapes in its files, and one digest for its tokenizer.

Invariants: a folder is used as it is; a hub name becomes the local snapshot of that model, downloaded once; nothing
is downloaded while HF_HUB_OFFLINE is set. A path that is too long, or that this user may not look at, counts as
missing. The digest of a tokenizer is that of the bytes of `tokenizer.json` alone. So every service gets the same one
without loading it, and can tell whether it means the same tokens as another.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flotilla_core.errors import InvalidConfig, NotFound
from flotilla_core.files import open_regular, require_regular
from flotilla_core.json_text import json_object, read_bounded, read_json_object

LONGEST_HEADER = 100 << 20
"""The most bytes of a header, which is the limit of the format."""
MOST_DIMENSIONS = 16
FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt"]

TOKENIZER_FILE = "tokenizer.json"
SCORE_HEADS = ("score", "v_head.summary")
"""Linear heads that give scores: those of transformers' classification of sequences or tokens, and TRL's value head."""
_CLASSIFIER = "ForSequenceClassification"
_UNSAID_LABELS = 2
"""The labels of a classifier whose configuration names none, in transformers."""


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
        return Path(snapshot_download(str(model), allow_patterns=FILES))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise NotFound(
            f"there is no folder {model}, and the hub did not give the model",
            where="model in stack.yaml",
            why=str(error).splitlines()[0],
            next_step="check the name, log in with `hf auth login`, or give a local folder",
        ) from error


def weight_files(folder: Path) -> list[Path]:
    """Return the files of weights in the order of their names; there may be none."""
    found = sorted(folder.glob("*.safetensors"))
    for path in found:
        try:
            require_regular(path.stat(), path)
        except OSError as error:
            raise _unreadable(path, error) from None
    return found


def _unreadable(path: Path, error: OSError) -> InvalidConfig:
    why = error.strerror or str(error)
    return InvalidConfig("the file of weights cannot be read", where=str(path), why=why)


def score_head(folder: Path) -> tuple[str, int]:
    """Return the name of a model's linear head of scores, and the number of its labels; 0 where it gives no scores.

    An encoder for sequence classification has labels too, and a head of another kind, which has no name here.
    """
    for file in weight_files(folder):
        shapes = stored_shapes(file)
        for head in SCORE_HEADS:
            if len(shape := shapes.get(f"{head}.weight", ())) == 2:
                return head, shape[0]
    config = read_json_object(folder / "config.json")
    kinds = config.get("architectures") or []
    if config.get("is_encoder_decoder") or not any(str(kind).endswith(_CLASSIFIER) for kind in kinds):
        return "", 0
    labels = config.get("id2label")
    return "", len(labels) if isinstance(labels, dict) else _UNSAID_LABELS


def whole_number(config: Mapping[str, Any], key: str, where: str, default: int | None = None) -> int:
    """Return a positive number of a model's configuration; `default` where it has none, or 0."""
    value = config.get(key)
    if value in (None, 0) and default is not None:
        return default
    if type(value) is not int or not 0 < value < 2**53:
        problem = f"has no {key}" if value is None else f"has a {key} that is no whole number above 0"
        raise InvalidConfig(
            f"config.json {problem}",
            where=where,
            why="not a causal language model?" if value is None else f"it is {_shown(value)}",
        )
    return value


def inner_config(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the part of the language model, which multimodal models keep inside; empty where there is none."""
    inner = config.get("text_config", {})
    if not isinstance(inner, dict):
        raise InvalidConfig(
            "text_config of config.json is no mapping", where=where, why=f"it is {_shown(inner)}"
        )
    return inner


def end_tokens(config: Mapping[str, Any], where: str) -> list[int]:
    """Return the tokens that end a response, as a configuration names them: one, several or none."""
    value = config.get("eos_token_id")
    ends = value if isinstance(value, list) else [] if value is None else [value]
    for end in ends:
        if type(end) is not int or not 0 <= end < 2**31:
            raise InvalidConfig(
                "eos_token_id is no id of a token",
                where=where,
                why=f"it has {_shown(end)}",
                next_step="write the number of the token that ends a response, or a list of numbers",
            )
    return ends


def _shown(value: object) -> str:
    return json.dumps(value)[:100]


def stored_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor of a safetensors file, from its header alone."""
    try:
        with open_regular(path) as file:
            length = int.from_bytes(file.read(8), "little")
            content = file.read(length) if length <= LONGEST_HEADER else b""
            content = content if len(content) == length else b""
    except OSError as error:
        raise _unreadable(path, error) from None
    try:
        header = json_object(content, str(path))
        return {name: _shape(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    except (InvalidConfig, KeyError, TypeError, ValueError):
        raise InvalidConfig(
            "the file of weights is damaged",
            where=str(path),
            why=f"its header is not the JSON of at most {LONGEST_HEADER} bytes that names tensors and shapes",
        ) from None


def _shape(sizes: list[int]) -> tuple[int, ...]:
    if len(sizes) > MOST_DIMENSIONS or any(type(size) is not int or not 0 <= size < 2**53 for size in sizes):
        raise ValueError("no shape of a tensor")
    return tuple(sizes)


def tokenizer_digest(folder: Path) -> str:
    """Return the SHA-256 of the tokenizer of a model folder, in hex."""
    if not os.path.isdir(folder):
        raise NotFound(
            "the model folder does not exist",
            where=str(folder),
            next_step="set `model` in stack.yaml, or initial_weights in run.yaml, to a Hugging Face folder",
        )
    try:
        content = read_bounded(folder / TOKENIZER_FILE, TOKENIZER_FILE, str(folder))
    except FileNotFoundError:
        raise NotFound(
            f"the model folder has no {TOKENIZER_FILE}",
            where=str(folder),
            why="only fast tokenizers are supported",
            next_step="save one there with `AutoTokenizer.from_pretrained(...).save_pretrained(...)`",
        ) from None
    return hashlib.sha256(content).hexdigest()

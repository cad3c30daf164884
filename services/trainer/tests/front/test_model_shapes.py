"""Model folders are told apart by what shapes them, without loading them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from flotilla_core.errors import InvalidConfig, Mismatch, NotFound
from flotilla_trainer.front.model_shape import check_same_shape, model_digest

CONFIG = {"architectures": ["Qwen3ForCausalLM"], "hidden_size": 32, "vocab_size": 31, "dtype": "float32"}


def folder(path: Path, **changes: object) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG | changes), "utf-8")
    return path


def test_cosmetics_do_not_make_another_model(tmp_path: Path) -> None:
    ours = folder(tmp_path / "a")
    theirs = folder(tmp_path / "b", dtype="bfloat16", transformers_version="9", _name_or_path="x")
    check_same_shape(theirs, ours)
    assert model_digest(theirs) == model_digest(ours)


@pytest.mark.parametrize(
    ("key", "value"), [("hidden_size", 64), ("architectures", ["LlamaForCausalLM"]), ("rope_theta", 5e5)]
)
def test_the_first_key_that_differs_is_named(tmp_path: Path, key: str, value: object) -> None:
    ours, theirs = folder(tmp_path / "a"), folder(tmp_path / "b", **{key: value})
    with pytest.raises(Mismatch, match=key):
        check_same_shape(theirs, ours)
    assert model_digest(theirs) != model_digest(ours)


def test_a_folder_that_is_no_model_says_what_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"config\.json"):
        model_digest(tmp_path)
    ours = folder(tmp_path / "ours")
    os.mkfifo(ours / "model.safetensors")
    with pytest.raises(InvalidConfig, match=r"weights cannot be read.*named pipe"):
        model_digest(ours)
    (tmp_path / "config.json").write_text("{", "utf-8")
    with pytest.raises(InvalidConfig, match=r"config\.json is not JSON"):
        model_digest(tmp_path)

"""Model folders of strangers: each is read right, or refused by one clear error, in bounded memory."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flotilla_coordinator.plan.model_facts import ModelFacts
from flotilla_core.errors import FlotillaError, Internal
from flotilla_data.tokenizer import Tokenizer
from flotilla_testing.model_folders import write_tokenizer
from flotilla_testing.peak_memory import forget_most_memory, most_memory_kib

CONFIG = {
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 3,
    "max_position_embeddings": 16,
    "eos_token_id": 1,
}
MESSAGES = [{"role": "user", "content": "1"}]


def weights(header: object, length: int | None = None) -> bytes:
    content = json.dumps(header).encode() if not isinstance(header, bytes) else header
    return (len(content) if length is None else length).to_bytes(8, "little") + content


def tensor(shape: object, start: int = 0, end: int = 96) -> dict[str, object]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}


def write_model(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "model.safetensors").write_bytes(
        weights({"model.embed_tokens.weight": tensor([3, 8])}) + bytes(96)
    )
    words = ["<pad>", "<eos>", "1"]
    write_tokenizer(folder, words, template="{{ messages[0].content }}", eos_token="<eos>")


Change = Callable[[Path], object]


def write(name: str, content: bytes | str) -> Change:
    return lambda folder: (folder / name).write_bytes(
        content if isinstance(content, bytes) else content.encode()
    )


def config(**changes: Any) -> Change:
    return write("config.json", json.dumps(CONFIG | changes))


def settings(**changes: Any) -> Change:
    def change(folder: Path) -> None:
        (folder / "chat_template.jinja").unlink()
        (folder / "tokenizer_config.json").write_text(json.dumps(changes))

    return change


def instead(name: str, make: Change) -> Change:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return change


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 30)


def circle(path: Path) -> None:
    path.symlink_to(path.name)


def index_of(place: str) -> Change:
    return write("model.safetensors.index.json", json.dumps({"weight_map": {"a": place}}))


WEIGHTS = "model.safetensors"
READ = "read"
FOLDERS: dict[str, tuple[Change, str]] = {
    "config is a list": (write("config.json", "[]"), "not a JSON object"),
    "config is no JSON": (write("config.json", "{"), "not JSON"),
    "config is empty": (write("config.json", ""), "not JSON"),
    "config is deep": (write("config.json", "[" * 100_000), "nested too deeply"),
    "config of bytes": (write("config.json", b'{"a": "\xff"}'), "not JSON"),
    "config of many values": (write("config.json", b'{"a": [' + b"[]," * (5 << 20) + b"0]}"), "too many values"),
    "long number": (write("config.json", '{"hidden_size": 1' + "0" * 9000 + "}"), "not JSON"),
    "large number": (config(hidden_size=10**400), "hidden_size that is no whole number"),
    "NaN": (config(vocab_size=float("nan")), "vocab_size that is no whole number"),
    "text for a number": (config(num_hidden_layers="x"), "num_hidden_layers that is no whole number"),
    "list for a number": (config(num_attention_heads=[2]), "num_attention_heads that is no whole number"),
    "truth value for a number": (config(hidden_size=True), "hidden_size that is no whole number"),
    "no heads": (config(num_attention_heads=0), "num_attention_heads that is no whole number"),
    "negative": (config(max_position_embeddings=-1), "max_position_embeddings that is no whole number"),
    "null": (config(hidden_size=None), "has no hidden_size"),
    "inner config is a list": (config(text_config=[]), "text_config of config.json is no mapping"),
    "head of text": (config(head_dim="x"), "head_dim that is no whole number"),
    "end is a text": (config(eos_token_id=["x"]), "eos_token_id is no id of a token"),
    "end is negative": (config(eos_token_id=-1), "eos_token_id is no id"),
    "end is large": (config(eos_token_id=2**80), "eos_token_id is no id"),
    "end is a truth value": (config(eos_token_id=True), "eos_token_id is no id"),
    "end is a list of lists": (config(eos_token_id=[[1]]), "eos_token_id is no id"),
    "end is a mapping": (write("generation_config.json", '{"eos_token_id": {"a": 1}}'), "eos_token_id is no id"),
    "ends": (config(eos_token_id=[1, 2]), READ),
    "pipe for a config": (instead("config.json", os.mkfifo), "it is a named pipe"),
    "config never written": (instead("config.json", sparse), "more than 67108864 bytes"),
    "config in circles": (instead("config.json", circle), "cannot be read"),
    "folder for a config": (instead("config.json", Path.mkdir), "it is a folder"),
    "pipe for generation": (lambda folder: os.mkfifo(folder / "generation_config.json"), "it is a named pipe"),
    "tokenizer is a list": (write("tokenizer.json", "[]"), "tokenizer.json cannot be read"),
    "tokenizer is deep": (write("tokenizer.json", "[" * 100_000), "tokenizer.json cannot be read"),
    "tokenizer never written": (instead("tokenizer.json", sparse), "tokenizer.json is too large"),
    "pipe for a tokenizer": (instead("tokenizer.json", os.mkfifo), "it is a named pipe"),
    "device for a tokenizer": (instead("tokenizer.json", lambda path: path.symlink_to("/dev/zero")), "a device"),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "has no tokenizer.json"),
    "settings are a list": (write("tokenizer_config.json", "[]"), "not a JSON object"),
    "settings of wrong types": (settings(eos_token=[1], pad_token={"content": 7}, chat_template="1"), READ),
    "template is a number": (settings(chat_template=7), "no chat template"),
    "template is a mapping": (settings(chat_template={"default": "1"}), "no chat template"),
    "templates without names": (settings(chat_template=[{}, 7, {"name": "default"}]), "no chat template"),
    "template of bytes": (write("chat_template.jinja", b"\xff\xfe"), "template cannot be read"),
    "template never written": (instead("chat_template.jinja", sparse), "template is too large"),
    "pipe for a template": (instead("chat_template.jinja", os.mkfifo), "template cannot be read.*named pipe"),
    "long header": (write(WEIGHTS, weights({}, 2**63)), "weights is damaged"),
    "header longer than the file": (write(WEIGHTS, weights({}, 1000)), "weights is damaged"),
    "short file": (write(WEIGHTS, b"\1\2"), "weights is damaged"),
    "empty file": (write(WEIGHTS, b""), "weights is damaged"),
    "header is a list": (write(WEIGHTS, weights([])), "weights is damaged"),
    "header is deep": (write(WEIGHTS, weights(b"[" * 100_000)), "weights is damaged"),
    "header of many values": (write(WEIGHTS, weights(b'{"a": [' + b"[]," * (5 << 20) + b"0]}")), "damaged"),
    "tensor is a number": (write(WEIGHTS, weights({"a": 7})), "weights is damaged"),
    "tensor without shape": (write(WEIGHTS, weights({"a": {}})), "weights is damaged"),
    "shape is a text": (write(WEIGHTS, weights({"a": tensor("33")})), "weights is damaged"),
    "shape is negative": (write(WEIGHTS, weights({"a": tensor([-1])})), "weights is damaged"),
    "shape is large": (write(WEIGHTS, weights({"a": tensor([2**63])})), "weights is damaged"),
    "shape of fractions": (write(WEIGHTS, weights({"a": tensor([1.5])})), "weights is damaged"),
    "shape of many dimensions": (write(WEIGHTS, weights({"a": tensor([2] * 10_000)})), "weights is damaged"),
    "overlapping tensors": (write(WEIGHTS, weights({"a": tensor([3]), "b": tensor([3])})), READ),
    "pipe for weights": (instead(WEIGHTS, os.mkfifo), "weights cannot be read.*named pipe"),
    "folder for weights": (instead(WEIGHTS, Path.mkdir), "weights cannot be read.*a folder"),
    "weights in circles": (instead(WEIGHTS, circle), "weights cannot be read"),
    "weights never written": (instead(WEIGHTS, sparse), "weights is damaged"),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), "no \\*.safetensors"),
    "index outside of the folder": (index_of("../../../etc/passwd"), READ),
    "index of a missing part": (index_of("model-00001-of-00002.safetensors"), READ),
}  # fmt: skip


@pytest.mark.timeout(30)
@pytest.mark.parametrize(("change", "told"), FOLDERS.values(), ids=FOLDERS.keys())
def test_model_folder(tmp_path: Path, change: Change, told: str) -> None:
    write_model(tmp_path)
    change(tmp_path)
    forget_most_memory()
    before = most_memory_kib()
    try:
        ModelFacts.read(tmp_path)
        tokenizer = Tokenizer.load(tmp_path)
        assert tokenizer.eos_ids and tokenizer.render_chat(MESSAGES) == "1"
        answer = READ
    except FlotillaError as error:
        assert not isinstance(error, Internal)
        answer = str(error)
    assert re.search(told, answer), answer[:2000]
    assert answer == READ or (str(tmp_path) in answer and len(answer) < 1000)
    assert most_memory_kib() - before < 512 << 10

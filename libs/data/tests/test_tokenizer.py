"""The tokenizer of a model folder."""

from __future__ import annotations

import hashlib
from pathlib import Path

import psutil
import pytest
import tokenizers

from flotilla_core.errors import InvalidConfig, NotFound
from flotilla_core.model_folder import tokenizer_digest
from flotilla_data.tokenizer import Tokenizer
from flotilla_testing import chat_templates
from flotilla_testing.model_folders import write_tokenizer


def make(folder: Path, **settings: object) -> Path:
    special = ["<pad>", "<eos>", "<end>"]
    return write_tokenizer(folder, [*special, *"12+="], special=special, **{"eos_token": "<eos>", **settings})


def test_text_survives_the_way_there_and_back(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(make(tmp_path))
    ids = tokenizer.encode("1+2=")
    assert ids == [3, 5, 4, 6]
    assert tokenizer.encode_many(["1", "1+2="]) == [[3], ids]
    assert tokenizer.decode([*ids, 1]) == "1+2="
    assert tokenizer.decode([3, 1], skip_special=False) == "1<eos>"
    assert tokenizer.decode_many([[*ids, 1], [3, 1]]) == ["1+2=", "1"]
    assert tokenizer.vocabulary_size == 7


def test_ends_are_the_tokenizers_own_then_the_models(tmp_path: Path) -> None:
    make(tmp_path, pad_token={"content": "<pad>"})
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 1]}')
    (tmp_path / "config.json").write_text('{"eos_token_id": 2}')
    tokenizer = Tokenizer.load(tmp_path)
    assert (tokenizer.eos_id, tokenizer.eos_ids, tokenizer.pad_id) == (1, (1, 2), 0)


def test_no_end_is_said_when_it_is_needed(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(make(tmp_path, eos_token=None))
    with pytest.raises(InvalidConfig, match="no end-of-sequence token"):
        _ = tokenizer.eos_id


def test_the_digest_is_that_of_the_file(tmp_path: Path) -> None:
    make(tmp_path)
    digest = hashlib.sha256((tmp_path / "tokenizer.json").read_bytes()).hexdigest()
    assert Tokenizer.load(tmp_path).digest == tokenizer_digest(tmp_path) == digest


def test_what_is_missing_or_broken_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"folder does not exist \(.*nowhere\)"):
        Tokenizer.load(tmp_path / "nowhere")
    with pytest.raises(NotFound, match=r"no tokenizer.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InvalidConfig, match=r"tokenizer.json cannot be read"):
        Tokenizer.load(tmp_path)
    make(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(InvalidConfig, match=r"tokenizer_config.json is not JSON"):
        Tokenizer.load(tmp_path)


def test_no_chat_template_is_said_when_it_is_needed(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no chat template"):
        Tokenizer.load(make(tmp_path)).render_chat([{"role": "user", "content": "1"}])
    named = [
        {"name": "tools", "template": "no"},
        {"name": "default", "template": "{{ messages[0].content }}{{ eos_token }}"},
    ]
    tokenizer = Tokenizer.load(make(tmp_path, chat_template=named))
    assert tokenizer.render_chat([{"role": "user", "content": "1"}]) == "1<eos>"
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidConfig, match="chat template cannot be read"):
        Tokenizer.load(tmp_path).render_chat([{"role": "user", "content": "1"}])


def test_runs_that_read_the_same_tokenizer_do_not_each_keep_what_it_has_cached(tmp_path: Path) -> None:
    vocabulary = {text: index for index, text in enumerate("0123456789+=")}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    backend.save(str(tmp_path / "tokenizer.json"))
    texts = [f"{number}+{number}=" for number in range(10_000)]
    for _ in range(10):  # until each thread of the library has its buffers
        Tokenizer.load(tmp_path).encode_many(texts)
    before = psutil.Process().memory_info().rss
    for _ in range(20):
        Tokenizer.load(tmp_path).encode_many(texts)
    assert psutil.Process().memory_info().rss - before < 40 * 2**20  # 88 MiB where each keeps its own


def test_a_tokenizer_that_was_written_again_is_read_again(tmp_path: Path) -> None:
    first = Tokenizer.load(make(tmp_path))
    file = tmp_path / "tokenizer.json"
    file.write_text(file.read_text().replace('"="', '"-"'))
    second = Tokenizer.load(tmp_path)
    assert (first.encode("="), second.encode("-")) == ([6], [6])
    assert first.digest != second.digest


TEXTS = ("The sky is blue.", "\N{SNOWMAN} \N{PILE OF POO} na\u00efve \u4e2d\u6587\n\t ", "<|im_end|>", "")


@pytest.mark.parametrize("text", TEXTS)
def test_the_bytes_of_tokens_are_together_the_text(tmp_path: Path, text: str) -> None:
    tokenizer = Tokenizer.load(chat_templates.write_tokenizer(tmp_path, chat_templates.CHATML))
    ids = tokenizer.encode(text)
    parts = tokenizer.bytes_of(ids)
    assert b"".join(parts) == text.encode() == tokenizer.decode(ids, skip_special=False).encode()
    assert len(parts) == len(ids)


def test_a_token_of_a_half_character_has_its_bytes_and_a_number_that_is_no_token_has_none(
    tmp_path: Path,
) -> None:
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE({"<unk>": 0, "\u2581sky": 1, "<0xE2>": 2, "<0x98>": 3, "<0x83>": 4}, [])
    )
    parts = [tokenizers.decoders.Replace("\u2581", " "), tokenizers.decoders.ByteFallback()]
    backend.decoder = tokenizers.decoders.Sequence([*parts, tokenizers.decoders.Fuse()])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.bytes_of([1, 2, 3, 4, 99]) == [b" sky", b"\xe2", b"\x98", b"\x83", b""]
    assert tokenizer.decode([1, 2, 3, 4]) == " sky\N{SNOWMAN}"

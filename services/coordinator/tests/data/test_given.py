"""Pairs of answers: text and chat messages become the same tokens, and every mistake in a line is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flotilla_coordinator.data.given import load_given
from flotilla_coordinator.data.prompt_source import PromptSource
from flotilla_coordinator.data.prompts import Answer, PromptFile
from flotilla_core.config import DataConfig
from flotilla_core.errors import InvalidConfig
from flotilla_data.columns import Reads
from flotilla_data.tokenizer import Tokenizer
from flotilla_testing.model_folders import write_tokenizer

CHARACTERS = "0123456789+= abcdefghijklmnopqrstuvwxyz|\n"
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% if message.role == 'assistant' %}<end>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
END = 1


def make_tokenizer(folder: Path, template: str) -> Tokenizer:
    special = ["<pad>", "<end>", "<user>", "<assistant>"]
    words = [*special, *CHARACTERS]
    return Tokenizer.load(
        write_tokenizer(folder, words, special=special, template=template, eos_token="<end>")
    )


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("model"), TEMPLATE)


def config(tmp_path: Path, *lines: object, **options: Any) -> DataConfig:
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return DataConfig(train=path, **options)


def load_pairs(source: Path, config: DataConfig, tokenizer: Tokenizer) -> PromptFile:
    return load_given(source, config, tokenizer, reads=Reads.pairs)


def loaded(config: DataConfig, tokenizer: Tokenizer) -> list[tuple[Answer, Answer]]:
    pairs = []
    for prompt in load_pairs(config.train, config, tokenizer).prompts:
        chosen, rejected = prompt.given
        pairs.append((chosen, rejected))
    return pairs


def says(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def test_texts_end_with_the_end_of_sequence_and_leave_the_other_columns(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    line = {"prompt": "1+1=", "chosen": "2", "rejected": "33", "level": 4}
    data = config(tmp_path, line)
    (prompt,) = load_pairs(data.train, data, tokenizer).prompts
    chosen, rejected = prompt.given
    assert chosen.token_ids.tolist() == [*tokenizer.encode("2"), END]
    assert rejected.token_ids.tolist() == [*tokenizer.encode("33"), END]
    assert rejected.text == "33"
    assert prompt.info == {"level": 4}


@pytest.mark.parametrize("with_prompt", [False, True], ids=["answer alone", "whole conversation"])
@pytest.mark.parametrize("as_text", [False, True], ids=["messages", "text"])
def test_chat_answers_are_what_the_template_writes_after_the_prompt(
    tmp_path: Path, tokenizer: Tokenizer, with_prompt: bool, as_text: bool
) -> None:
    asked = [says("user", "1+1=")]
    answers = [[*(asked if with_prompt else []), says("assistant", text)] for text in ("2", "33")]
    prompt: Any = "1+1=" if as_text else asked
    line = {"prompt": prompt, "chosen": answers[0], "rejected": answers[1]}
    data = config(tmp_path, line, apply_chat_template=as_text)
    ((chosen, rejected),) = loaded(data, tokenizer)
    # The line break after the end of the turn is the template's, and no model says it.
    assert chosen.token_ids.tolist() == [*tokenizer.encode("2"), END]
    assert rejected.token_ids.tolist() == [*tokenizer.encode("33"), END]


def test_other_columns_can_hold_the_answers(tmp_path: Path, tokenizer: Tokenizer) -> None:
    line = {"prompt": "1+1=", "good": "2", "bad": "3"}
    data = config(tmp_path, line, chosen_field="good", rejected_field="bad")
    assert [chosen.text for chosen, _ in loaded(data, tokenizer)] == ["2"]


def test_long_prompts_go_or_lose_their_beginning_with_their_pairs(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    lines = [{"prompt": f"{'1+' * n}1=", "chosen": f"{n + 1}", "rejected": "0"} for n in range(4)]
    dropped = config(tmp_path, *lines, max_prompt_tokens=4)
    file = load_pairs(dropped.train, dropped, tokenizer)
    assert [prompt.index for prompt in file.prompts] == [0, 1]
    assert file.dropped == 2
    cut = config(tmp_path, *lines, max_prompt_tokens=4, overlong_prompts="truncate")
    assert [chosen.text for chosen, _ in loaded(cut, tokenizer)] == ["1", "2", "3", "4"]


def test_a_source_of_pairs_keeps_them_over_the_epochs(tmp_path: Path, tokenizer: Tokenizer) -> None:
    lines = [{"prompt": f"{n}=", "chosen": f"{n}", "rejected": "x"} for n in range(5)]
    source = PromptSource(config(tmp_path, *lines), tokenizer, seed=1, load=load_pairs)
    drawn = [source.next() for _ in range(10)]
    assert [prompt.epoch for prompt in drawn] == [0] * 5 + [1] * 5
    assert all(prompt.given[0].text == str(prompt.index) for prompt in drawn)


GOOD = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}
CHAT = [says("user", "1+1=")]
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no rejected answer": ({"rejected": None}, r"column 'rejected' is missing.*data\.rejected_field"),
    "no chosen answer": ({"chosen": None}, r"column 'chosen' is missing.*data\.chosen_field"),
    "equal answers": ({"rejected": "2"}, "both answers are the same"),
    "empty answer": ({"chosen": " "}, "column 'chosen' is an empty answer"),
    "a list of texts": ({"rejected": ["3"]}, "neither text nor a list of chat messages.*list"),
    "a mapping": ({"rejected": {"text": "3"}}, "neither text nor a list of chat messages.*dict"),
    "messages after bare text": ({"chosen": [says("assistant", "2")]}, r"data\.apply_chat_template"),
    "an image": (
        {
            "prompt": CHAT,
            "chosen": [{"role": "assistant", "content": [{"type": "image"}]}],
            "rejected": [says("assistant", "3")],
        },
        "a part that is not text.*it is 'image'",
    ),
    "an empty message": (
        {"prompt": CHAT, "chosen": [says("assistant", "")], "rejected": [says("assistant", "3")]},
        "column 'chosen' is an empty answer",
    ),
    "two messages": (
        {"prompt": CHAT, "chosen": [says("assistant", "2"), says("user", "why")]},
        "does not begin and end with an answer.*assistant, user",
    ),
    "the prompt alone": (
        {"prompt": CHAT, "chosen": CHAT},
        "does not begin and end with an answer of the assistant.*no role",
    ),
    "no message": ({"prompt": CHAT, "chosen": ["2"]}, "neither text nor a list of chat messages"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_pair_is_refused_by_its_line(case: str, tmp_path: Path, tokenizer: Tokenizer) -> None:
    changes, said = WRONG[case]
    line = {name: value for name, value in (GOOD | changes).items() if value is not None}
    data = config(tmp_path, GOOD, line)
    with pytest.raises(InvalidConfig, match=said) as caught:
        load_pairs(data.train, data, tokenizer)
    assert "pairs.jsonl, line 2" in str(caught.value)


def test_a_template_that_rewrites_the_prompt_is_refused(tmp_path: Path) -> None:
    counting = make_tokenizer(tmp_path / "model", "{{ messages | length }}{{ messages[0].content }}")
    line = {"prompt": CHAT, "chosen": [says("assistant", "2")], "rejected": [says("assistant", "3")]}
    data = config(tmp_path, line)
    with pytest.raises(InvalidConfig, match="does not write column 'chosen' after the prompt"):
        load_pairs(data.train, data, counting)

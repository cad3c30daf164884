"""What runs that learn from rewards make of rows with chats."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flotilla_coordinator.data.chat_turns import ChatText
from flotilla_coordinator.data.given import chat_parts
from flotilla_coordinator.data.training_sets import training_data
from flotilla_core.config import RunConfig
from flotilla_core.errors import InvalidConfig
from flotilla_data.tokenizer import Tokenizer
from flotilla_testing import chat_templates as templates
from flotilla_testing.chat_templates import CALLING, TOOL, assistant, user

Row = dict[str, Any]
Models = Callable[[str], Tokenizer]
ASKED = (
    "<|im_start|>system\nYou are a helpful AI assistant.<|im_end|>\n"
    "<|im_start|>user\nSky?<|im_end|>\n<|im_start|>assistant\n"
)


@pytest.fixture
def model(tmp_path: Path) -> Models:
    """Return the tokenizer of a model with a template."""

    def one(template: str) -> Tokenizer:
        folder = tmp_path / f"model-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        return Tokenizer.load(templates.write_tokenizer(folder, template))

    return one


def test_no_token_holds_letters_of_two_parts(model: Models) -> None:
    tokenizer = model(templates.CHATML)
    text = "The sky is blue."
    assert len(tokenizer.encode(" sky")) < len(tokenizer.encode(" s")) + len(tokenizer.encode("ky"))
    ((before, learned),) = chat_parts([ChatText(text, ((6, len(text)),))], tokenizer)
    assert [tokenizer.decode(part) for part, _ in (before, learned)] == ["The sk", "y is blue."]
    assert (before[1], learned[1]) == (False, True)


def prompts(row: Row, tokenizer: Tokenizer, source: Path) -> list[tuple[str, str]]:
    """Return the prompts and answers of a run that learns from rewards."""
    source.write_text(json.dumps(row) + "\n")
    values = {"name": "r", "steps": 1, "rewards": [{"reward": "exact"}], "data": {"train": source}}
    config = RunConfig.model_validate(values)
    made = training_data(config)(source, config.data, tokenizer).prompts
    return [(prompt.prompt_text, prompt.answer) for prompt in made]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [user("Sky?"), assistant("Blue.")]},
        {"prompt": [user("Sky?")], "completion": [assistant("Blue.")]},
        {"conversations": [{"from": "human", "value": "Sky?"}, {"from": "gpt", "value": "Blue."}]},
        {"prompt": [user("Sky?")], "answer": "Blue."},
    ],
)
def test_rewards_compare_with_the_last_answer_of_a_chat(row: Row, tmp_path: Path, model: Models) -> None:
    found = prompts(row, model(templates.CHATML), tmp_path / "rows.jsonl")
    assert found == [(ASKED, "Blue.")]


def test_prompts_lose_no_calls_and_no_tools(tmp_path: Path, model: Models) -> None:
    row = {"prompt": CALLING, "tools": [TOOL]}
    ((text, _),) = prompts(row, model(templates.QWEN25), tmp_path / "rows.jsonl")
    assert '{"name": "weather", "arguments": {"city": "Paris"}}' in text and '"description"' in text
    for lost, said in ((row, "the tool 'weather'"), ({"prompt": CALLING}, "a call of a tool")):
        with pytest.raises(InvalidConfig, match=f"leaves out .*{said}"):
            prompts(lost, model(templates.CHATML), tmp_path / "rows.jsonl")

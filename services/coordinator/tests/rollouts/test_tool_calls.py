"""Calls of tools are read whole in the form of the template, or stay text with a reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flotilla_coordinator.rollouts.tool_calls import DEEPEST, ToolFormat, read_answer

TEMPLATES = Path(__file__).parent / "templates"
PARIS = {"name": "weather", "arguments": {"city": "Paris"}}
TEXT = '{"name": "weather", "arguments": {"city": "Paris"}}'
TAGS, OBJECT, LIST = ToolFormat.TAGS, ToolFormat.OBJECT, ToolFormat.LIST


@pytest.mark.parametrize(
    ("template", "form"), [("qwen3", TAGS), ("hermes", TAGS), ("llama3", OBJECT), ("mistral", LIST)]
)
def test_a_template_with_tools_tells_its_form(template: str, form: ToolFormat) -> None:
    assert ToolFormat.of_template((TEMPLATES / f"{template}.jinja").read_text()) is form


def test_a_template_without_tools_has_no_calls() -> None:
    assert ToolFormat.of_template("{{ messages[0].content }} <tool_call>") is ToolFormat.NONE
    assert read_answer(f"<tool_call>{TEXT}</tool_call>", ToolFormat.NONE).calls == ()


@pytest.mark.parametrize(
    ("form", "text", "content"),
    [
        (TAGS, f"Wait.\n<tool_call>\n{TEXT}\n</tool_call>", "Wait."),
        (TAGS, f"<tool_call>{TEXT}</tool_call>", ""),
        (TAGS, f"<think>\nno <tool_call> yet\n</think>\n\n<tool_call>{TEXT}</tool_call>",
         "<think>\nno <tool_call> yet\n</think>"),
        (LIST, f"[TOOL_CALLS] [{TEXT}]", ""),
        (OBJECT, TEXT.replace("arguments", "parameters"), ""),
        (OBJECT, "<|python_tag|>" + TEXT, ""),
    ],
)  # fmt: skip
def test_a_call_is_read_with_the_text_before_it(form: ToolFormat, text: str, content: str) -> None:
    answer = read_answer(text, form)
    assert (answer.content, answer.calls, answer.unparsed) == (content, (PARIS,), "")
    (call,) = answer.message(7)["tool_calls"]
    assert call["function"] == PARIS and len(call["id"]) == 9 and call["id"].isalnum()


def test_several_calls_have_ids_of_their_own() -> None:
    answer = read_answer(f"<tool_call>{TEXT}</tool_call>\n" * 2, TAGS)
    ids = [call["id"] for number in (1, 2) for call in answer.message(number)["tool_calls"]]
    assert len(set(ids)) == 4


@pytest.mark.parametrize(
    ("form", "text", "why"),
    [
        (TAGS, "<tool_call>{", "not ended"),
        (TAGS, f"<tool_call>{TEXT}</tool_call><tool_call>", "not ended"),
        (TAGS, "<tool_call>{'name': 1}</tool_call>", "not JSON"),
        (TAGS, "<tool_call>[]</tool_call>", "not an object"),
        (TAGS, '<tool_call>{"arguments": {}}</tool_call>', "names no tool"),
        (TAGS, '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', "arguments of 'f'"),
        (TAGS, '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>', "NaN"),
        (TAGS, '<tool_call>{"name": "f", "arguments": {"x": 1e999}}</tool_call>', "too large for a number"),
        (TAGS, '<tool_call>{"name": "f", "arguments": {"x": "\\ud800"}}</tool_call>', "surrogate"),
        (
            TAGS,
            f'<tool_call>{{"name": "f", "arguments": {{"x": {"[" * 40}{"]" * 40}}}}}</tool_call>',
            "levels",
        ),
        (TAGS, f"<tool_call>{'[' * 100_000}</tool_call>", "levels"),
        (LIST, "[TOOL_CALLS] {}", "not a list"),
        (LIST, "[TOOL_CALLS] [", "not JSON"),
        (OBJECT, '{"name": "f"', "not JSON"),
        (OBJECT, TEXT + "; " + TEXT, "not JSON"),
        (OBJECT, '{"name": "f"}', "arguments"),
    ],
)
def test_what_cannot_be_read_is_whole_and_has_a_reason(form: ToolFormat, text: str, why: str) -> None:
    answer = read_answer(text, form)
    assert (answer.content, answer.calls) == (text, ()) and why in answer.unparsed
    assert answer.message(1) == {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    ("form", "text"), [(OBJECT, "{1, 2} is a set"), (TAGS, "tool_call"), (LIST, "[INST]")]
)
def test_a_text_without_a_call_needs_no_reason(form: ToolFormat, text: str) -> None:
    answer = read_answer(text, form)
    assert (answer.content, answer.calls, answer.unparsed) == (text, (), "")


def test_arguments_of_the_most_levels_are_read() -> None:
    deep: object = 1
    for _ in range(DEEPEST - 1):
        deep = [deep]
    text = json.dumps({"name": "f", "arguments": {"x": deep}})
    assert read_answer(f"<tool_call>{text}</tool_call>", TAGS).calls

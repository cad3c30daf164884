"""Streams have the events of the vendor, in its order, and each is one whole event of ASCII."""

from __future__ import annotations

import json
from typing import Any

from flotilla_environment.gateway.anthropic_messages import AnthropicMessages
from flotilla_environment.gateway.dialect import Completed, Completion, Dialect
from flotilla_environment.gateway.openai_chat import OpenAIChat
from flotilla_environment.gateway.openai_responses import OpenAIResponses

CALL = {"id": "1", "name": "add", "arguments": '{"a": "é"}'}
ASKED = Completion(({"role": "user", "content": "hi"},), stream=True)
TURN = Completed("t1", "policy", 1, "I add.\n\u2028é", (CALL, CALL | {"id": "2"}), completion_tokens=4)


def events(dialect: Dialect, done: Completed = TURN) -> list[tuple[str, Any]]:
    """Return name and data of each event."""
    found = []
    for event in dialect.events(ASKED, done):
        text = event.decode("ascii")
        assert text.endswith("\n\n")
        *name, data = text.removesuffix("\n\n").split("\n")
        said = data.removeprefix("data: ")
        found.append(("".join(name).removeprefix("event: "), said if said == "[DONE]" else json.loads(said)))
    return found


def test_chat_completions_tell_the_role_the_text_each_call_the_reason_and_the_usage() -> None:
    said = events(OpenAIChat())
    assert {name for name, _ in said} == {""} and said.pop()[1] == "[DONE]"
    usage = said.pop()[1]
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 4
    choices = [data["choices"][0] for _, data in said]
    assert [sorted(choice["delta"]) for choice in choices] == [
        ["content", "role"],
        ["content"],
        *[["tool_calls"]] * 4,
        [],
    ]
    assert [choice["finish_reason"] for choice in choices] == [None] * 6 + ["tool_calls"]
    calls = [call for choice in choices for call in choice["delta"].get("tool_calls", ())]
    assert [(call["index"], call.get("id"), call["function"]) for call in calls] == [
        (0, "1", {"name": "add", "arguments": ""}),
        (0, None, {"arguments": CALL["arguments"]}),
        (1, "2", {"name": "add", "arguments": ""}),
        (1, None, {"arguments": CALL["arguments"]}),
    ]


def test_responses_tell_each_item_from_its_beginning_to_its_end_and_then_the_whole() -> None:
    said = events(OpenAIResponses())
    called = [
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
    ]
    assert [name.removeprefix("response.") for name, _ in said] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        *called,
        *called,
        "completed",
    ]
    assert [data["type"] for _, data in said] == [name for name, _ in said]
    assert [data["sequence_number"] for _, data in said] == [*range(len(said))]
    items = [data["item"] for name, data in said if name == "response.output_item.done"]
    assert items == said[-1][1]["response"]["output"]
    cut = events(OpenAIResponses(), Completed("t1", "policy", 1, "I a", cut=True))
    assert cut[-1][0] == "response.incomplete"


def test_messages_tell_each_block_from_its_beginning_to_its_end_and_then_the_reason() -> None:
    said = events(AnthropicMessages())
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert [name for name, _ in said] == ["message_start", *block * 3, "message_delta", "message_stop"]
    assert [data["type"] for _, data in said] == [name for name, _ in said]
    deltas = [data["delta"] for name, data in said if name == "content_block_delta"]
    assert [delta["type"] for delta in deltas] == ["text_delta", "input_json_delta", "input_json_delta"]
    assert said[-2][1]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}

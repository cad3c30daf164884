"""Every field of each dialect is read, or changes nothing, or is refused by its name."""

from __future__ import annotations

from typing import Any

import pytest
from anthropic.types.message_create_params import MessageCreateParamsBase
from openai.types.chat.completion_create_params import CompletionCreateParamsBase
from openai.types.responses.response_create_params import ResponseCreateParamsBase

from flotilla_core.errors import InvalidRequest
from flotilla_environment.gateway import anthropic_messages, openai_chat, openai_responses
from flotilla_environment.gateway.anthropic_messages import AnthropicMessages
from flotilla_environment.gateway.openai_chat import OpenAIChat
from flotilla_environment.gateway.openai_responses import OpenAIResponses

USER = {"role": "user", "content": "hi"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}
ADD = {"name": "add", "parameters": {"type": "object"}}
BODIES: dict[str, dict[str, Any]] = {
    "chat": {"model": "m", "messages": [USER]},
    "responses": {"model": "m", "input": "hi"},
    "messages": {"model": "m", "max_tokens": 9, "messages": [USER]},
}
DIALECTS = {"chat": OpenAIChat(), "responses": OpenAIResponses(), "messages": AnthropicMessages()}
MODULES = {"chat": openai_chat, "responses": openai_responses, "messages": anthropic_messages}
PARAMETERS = {
    "chat": CompletionCreateParamsBase,
    "responses": ResponseCreateParamsBase,
    "messages": MessageCreateParamsBase,
}
UNKNOWN = {
    "chat": {"audio", "function_call", "functions", "logit_bias", "moderation", "web_search_options"},
    "responses": {"access_programs", "context_management", "conversation", "image", "moderation", "prompt"},
    "messages": {"container"},
}
"""Fields of the vendors that are refused whatever they hold."""


def chat_tool(**more: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": ADD | more}]}


def answered(*calls: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [*calls], **more}, USER]}


def called(arguments: Any, **more: Any) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}} | more


def said(*blocks: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [USER, {"role": role, "content": [*blocks]}, USER]}


def items(*some: Any) -> dict[str, Any]:
    return {"input": [*some]}


REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "chat": [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [1]}, "messages[0]"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "tool", "content": "3"}]}, "messages[0].tool_call_id"),
        (answered(audio={"id": "1"}), "messages[1].audio"),
        (answered(function_call={"name": "add"}), "messages[1].function_call"),
        (answered(called("{")), "messages[1].tool_calls[0].function.arguments"),
        (answered(called("[1]")), "messages[1].tool_calls[0].function.arguments"),
        (answered(called('{"a": NaN}')), "messages[1].tool_calls[0].function.arguments"),
        (answered(called('{"a": 1e999}')), "messages[1].tool_calls[0].function.arguments"),
        (answered(called('{"a": "\\ud800"}')), "messages[1].tool_calls[0].function.arguments"),
        (answered(called("[" * 5_000)), "messages[1].tool_calls[0].function.arguments"),
        (answered(called("{}", id="")), "messages[1].tool_calls[0].id"),
        (answered(called("{}", type="custom")), "messages[1].tool_calls[0].type"),
        (answered(called("{}", function={"arguments": "{}"})), "messages[1].tool_calls[0].function.name"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        (chat_tool(name=""), "tools[0].function.name"),
        (chat_tool(parameters="{}"), "tools[0].function.parameters"),
        (chat_tool() | {"tool_choice": "required"}, "tool_choice"),
        (chat_tool() | {"tool_choice": {"type": "function", "function": {"name": "add"}}}, "tool_choice"),
        (chat_tool() | {"parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"n": 2}, "n"),
        ({"top_logprobs": 5}, "top_logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": "9"}, "max_completion_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"stop": ""}, "stop"),
        ({"stop": 3}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"chunks": 1}}, "stream_options.chunks"),
        ({"guided_json": {}}, "guided_json"),
        ({"min_tokens": 4}, "min_tokens"),
    ],
    "responses": [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 3}, "input"),
        (items({"role": "tool", "content": "x"}), "input[0].role"),
        (items({"role": ["user"], "content": "x"}), "input[0].role"),
        (items({"role": "user", "content": [{"type": "input_image"}]}), "input[0].content[0].type"),
        (items({"role": "user", "content": [{"type": "input_file"}]}), "input[0].content[0].type"),
        (items(USER, {"type": "item_reference", "id": "1"}), "input[1].type"),
        (items(USER, {"type": "web_search_call", "id": "1"}), "input[1].type"),
        (items(USER, {"type": "function_call", "name": "add", "arguments": "{}"}), "input[1].call_id"),
        (items(USER, {"type": "function_call", "call_id": "1", "arguments": "{}"}), "input[1].name"),
        (
            items(USER, {"type": "function_call", "call_id": "1", "name": "add", "arguments": "3"}),
            "input[1].arguments",
        ),
        (items({"type": "function_call_output", "output": "3"}), "input[0].call_id"),
        (
            items({"type": "function_call_output", "call_id": "1", "output": [{"type": "input_image"}]}),
            "input[0].output[0].type",
        ),
        ({"instructions": 3}, "instructions"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {}}}}, "text.format"),
        ({"text": {"other": 1}}, "text.other"),
        ({"include": ["web_search_call.results"]}, "include[0]"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"max_output_tokens": -1}, "max_output_tokens"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [ADD]}, "tools[0].type"),
        ({"tools": [{"type": "function", **ADD}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "function", **ADD}], "parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"stop": ["x"]}, "stop"),
    ],
    "messages": [
        ({"messages": []}, "messages"),
        ({"messages": [USER, {"role": "assistant", "content": "The"}]}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        (said({"type": "image", "source": {}}), "messages[1].content[0].type"),
        (said({"type": "document", "source": {}}), "messages[1].content[0].type"),
        (said({"type": "thinking", "thinking": "x"}), "messages[1].content[0].type"),
        (said({"type": "tool_use", "id": "1", "name": "add", "input": {}}), "messages[1].content[0].type"),
        (
            said({"type": "tool_result", "tool_use_id": "1", "content": [{"type": "image", "source": {}}]}),
            "messages[1].content[0].content[0].type",
        ),
        (said({"type": "tool_result", "content": "3"}), "messages[1].content[0].tool_use_id"),
        (said({"type": "server_tool_use"}, role="assistant"), "messages[1].content[0].type"),
        (
            said({"type": "tool_use", "id": "1", "name": "add", "input": "{}"}, role="assistant"),
            "messages[1].content[0].input",
        ),
        (
            said({"type": "tool_use", "name": "add", "input": {}}, role="assistant"),
            "messages[1].content[0].id",
        ),
        ({"system": 3}, "system"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "add", "input_schema": []}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "add"}], "tool_choice": {"type": "any"}}, "tool_choice.type"),
        ({"tools": [{"name": "add"}], "tool_choice": {"type": "tool", "name": "add"}}, "tool_choice.type"),
        (
            {"tools": [{"name": "add"}], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
            "tool_choice.disable_parallel_tool_use",
        ),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
        (
            {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
            "context_management.edits[0].type",
        ),
        ({"context_management": {"other": 1}}, "context_management.other"),
        ({"mcp_servers": []}, "mcp_servers"),
        ({"stop_sequences": ["x", ""]}, "stop_sequences[1]"),
    ],
}
CASES = [(name, body, field) for name, cases in REFUSED.items() for body, field in cases] + [
    (name, {field: {"x": 1}}, field) for name, some in UNKNOWN.items() for field in sorted(some)
]


@pytest.mark.parametrize(
    ("name", "body", "field"), CASES, ids=lambda one: one if isinstance(one, str) else ""
)
def test_what_cannot_be_done_is_refused_by_the_name_of_its_field(
    name: str, body: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        DIALECTS[name].read(BODIES[name] | body)
    assert refused.value.where == field
    assert refused.value.what.startswith(f"{field}: ")


@pytest.mark.parametrize("name", DIALECTS)
def test_every_field_of_the_vendors_package_is_read_or_ignored_or_refused(name: str) -> None:
    known = set(PARAMETERS[name].__annotations__)
    module = MODULES[name]
    assert known - module.READ - module.IGNORED == UNKNOWN[name]
    assert not module.READ & module.IGNORED


@pytest.mark.parametrize("name", DIALECTS)
def test_ignored_fields_and_null_ones_change_nothing(name: str) -> None:
    read = DIALECTS[name].read(BODIES[name])
    ignored = {key: {"x": 1} for key in MODULES[name].IGNORED}
    null = dict.fromkeys({*MODULES[name].READ, *UNKNOWN[name]} - BODIES[name].keys())
    assert DIALECTS[name].read(BODIES[name] | ignored | null) == read


def test_texts_as_parts_and_instructions_are_messages_of_one_text() -> None:
    parts = [
        {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "b"},
    ]
    typed = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    expected = ({"role": "system", "content": "a\nb"}, {"role": "user", "content": "a\nb"})
    chat = {"messages": [{"role": "developer", "content": parts}, {"role": "user", "content": parts}]}
    assert DIALECTS["chat"].read(chat).messages == expected
    assert (
        DIALECTS["responses"]
        .read({"input": [{"role": "developer", "content": typed}, {"role": "user", "content": typed}]})
        .messages
        == expected
    )
    assert DIALECTS["responses"].read({"instructions": "a\nb", "input": "a\nb"}).messages == expected
    user = {"role": "user", "content": parts}
    assert (
        DIALECTS["messages"].read({"system": parts, "messages": [user], "max_tokens": 1}).messages == expected
    )


def test_limits_stops_tools_and_streams_are_read() -> None:
    chat = DIALECTS["chat"].read(
        BODIES["chat"]
        | chat_tool(strict=True)
        | {"max_tokens": 5, "max_completion_tokens": 7, "stop": "x", "stream": True}
    )
    assert (chat.max_tokens, chat.stop, chat.stream, chat.stream_usage) == (7, ("x",), True, False)
    assert chat.tools == (ADD,)
    told = DIALECTS["chat"].read(BODIES["chat"] | {"stream": True, "stream_options": {"include_usage": True}})
    assert told.stream_usage
    responses = DIALECTS["responses"].read(
        BODIES["responses"]
        | {"max_output_tokens": 5, "tools": [{"type": "function", "strict": True, **ADD}], "stream": True}
    )
    assert (responses.max_tokens, responses.tools, responses.stream) == (5, (ADD,), True)
    schema = {"name": "add", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}}
    messages = DIALECTS["messages"].read(BODIES["messages"] | {"stop_sequences": ["x"], "tools": [schema]})
    assert (messages.max_tokens, messages.stop, messages.tools) == (9, ("x",), (ADD,))


def test_the_choice_of_no_tool_hides_the_tools() -> None:
    assert DIALECTS["chat"].read(BODIES["chat"] | chat_tool() | {"tool_choice": "none"}).tools == ()
    some = {"tools": [{"type": "function", **ADD}], "tool_choice": "none"}
    assert DIALECTS["responses"].read(BODIES["responses"] | some).tools == ()
    some = {"tools": [{"name": "add", "input_schema": {}}], "tool_choice": {"type": "none"}}
    assert DIALECTS["messages"].read(BODIES["messages"] | some).tools == ()


def test_a_list_of_tools_does_not_forbid_what_only_tools_could_do() -> None:
    assert DIALECTS["chat"].read(BODIES["chat"] | {"parallel_tool_calls": False, "tools": []}).tools == ()


def test_items_of_one_turn_are_one_message_and_those_of_two_are_two() -> None:
    call = {"type": "function_call", "name": "add", "arguments": "{}"}
    read = DIALECTS["responses"].read(
        items(
            USER,
            {"type": "reasoning", "id": "r", "summary": []},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I add."}]},
            {"type": "reasoning", "id": "s", "summary": []},
            call | {"call_id": "1"},
            call | {"call_id": "2"},
            {"type": "function_call_output", "call_id": "1", "output": "3"},
            {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "4"}]},
            call | {"call_id": "3"},
            {"role": "assistant", "content": "a"},
            {"role": "assistant", "content": "b"},
        )
    )

    def calls(*ids: str) -> list[dict[str, str]]:
        return [{"id": one, "name": "add", "arguments": "{}"} for one in ids]

    assert read.messages == (
        USER,
        {"role": "assistant", "content": "I add.", "tool_calls": calls("1", "2")},
        {"role": "tool", "content": "3", "tool_call_id": "1"},
        {"role": "tool", "content": "4", "tool_call_id": "2"},
        {"role": "assistant", "content": "", "tool_calls": calls("3")},
        {"role": "assistant", "content": "a"},
        {"role": "assistant", "content": "b"},
    )


def test_blocks_become_messages_and_neighbours_of_one_role_become_one() -> None:
    use = {"type": "tool_use", "id": "1", "name": "add", "input": {"a": 1.0}}
    read = DIALECTS["messages"].read(
        BODIES["messages"]
        | {
            "system": [
                {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=2"},
                {"type": "text", "text": "Add."},
            ],
            "messages": [
                USER,
                USER,
                {
                    "role": "assistant",
                    "content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "I"}],
                },
                {"role": "assistant", "content": [use]},
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "1", "is_error": True, "content": "no"},
                        {"type": "tool_result", "tool_use_id": "2"},
                        {"type": "text", "text": "again"},
                    ],
                },
                {"role": "user", "content": []},
            ],
        }
    )
    assert read.messages == (
        {"role": "system", "content": "Add."},
        {"role": "user", "content": "hi\nhi"},
        {
            "role": "assistant",
            "content": "I",
            "tool_calls": [{"id": "1", "name": "add", "arguments": '{"a": 1}'}],
        },
        {"role": "tool", "content": "Error: no", "tool_call_id": "1"},
        {"role": "tool", "content": "", "tool_call_id": "2"},
        {"role": "user", "content": "again"},
    )

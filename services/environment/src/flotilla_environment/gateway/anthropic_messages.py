"""The dialect of Anthropic's Messages.

What it does beyond the vendor's: `return_token_ids` asks for `token_ids` and `token_logprobs` of the message, in a
stream those of the event `message_delta`. All of a turn's tokens are there.

Ignored, for the run decides or nothing depends on it: the fields of sampling (`fields.SAMPLING`), and IGNORED. So is
`cache_control` wherever it stands, and `thinking`: what the policy thinks is in its text. Blocks of thoughts are left
out of a history. `tool_choice` of type `none` hides the tools from the policy; what would force a call, or forbid a
second one, is refused, and so are all other fields. Messages of one role that follow each other are one, as with the
vendor.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from flotilla_core.errors import FlotillaError
from flotilla_environment.gateway import fields, refusals
from flotilla_environment.gateway.dialect import Completed, Completion
from flotilla_environment.gateway.told import Told, event, tokens, told

READ = frozenset(
    {
        "context_management",
        "max_tokens",
        "messages",
        "model",
        "output_config",
        "return_token_ids",
        "stop_sequences",
        "stream",
        "system",
        "tool_choice",
        "tools",
    }
)
IGNORED = fields.SAMPLING | {
    "cache_control",
    "diagnostics",
    "inference_geo",
    "metadata",
    "service_tier",
    "speed",
    "thinking",
    "user_profile_id",
    "workspace_id",
}
THOUGHTS = ("thinking", "redacted_thinking")
BILLING = "x-anthropic-billing-header"
"""Begins a block of the system that Claude Code writes anew with each request: it is nothing that a model reads."""
FAILED = "Error: "
"""Stands before the result of a call with `is_error`, for a policy reads text alone."""


class AnthropicMessages:
    """Messages."""

    path = "/v1/messages"

    def read(self, body: dict[str, Any]) -> Completion:
        """Return what a request asks for."""
        fields.check_names(body, read=READ, ignored=IGNORED)
        _check_options(body)
        given = fields.a_list(body.get("messages"), "messages")
        messages = _system(body.get("system"))
        for at, one in enumerate(given):
            for message in _messages(one, f"messages[{at}]"):
                _add(messages, message)
        if not given or messages[-1]["role"] == "assistant":
            raise fields.refused(
                "messages", "the last one must be of the user", "No answer is begun for the policy."
            )
        if body.get("max_tokens") is None:
            raise fields.refused("max_tokens", "it must be there")
        asked = body.get("tools") or []
        tools = tuple(_tool(one, f"tools[{at}]") for at, one in enumerate(fields.a_list(asked, "tools")))
        return Completion(
            messages=tuple(messages),
            tools=_may_call(body, tools),
            max_tokens=fields.a_limit(body, "max_tokens"),
            stop=fields.stops(body.get("stop_sequences"), "stop_sequences"),
            stream=fields.a_switch(body, "stream"),
            logprobs=fields.a_switch(body, "return_token_ids"),
        )

    def answer(self, asked: Completion, done: Completed) -> dict[str, Any]:
        """Return the body of an answer."""
        said = told(asked, done)
        return {
            **_head(done),
            "content": _blocks(said),
            "stop_reason": _reason(said, done),
            "stop_sequence": said.stop or None,
            "usage": _usage(done, done.completion_tokens),
            **tokens(asked, done),
        }

    def events(self, asked: Completion, done: Completed) -> Iterator[bytes]:
        """Yield the events of a streamed answer: the message without its blocks, each block, and why the turn ended."""
        said = told(asked, done)
        begun = {
            **_head(done),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(done, 0),
        }
        yield _event({"type": "message_start", "message": begun})
        for index, block in enumerate(_blocks(said)):
            yield from _block_events(index, block)
        delta = {"stop_reason": _reason(said, done), "stop_sequence": said.stop or None}
        usage = {"output_tokens": done.completion_tokens}
        yield _event({"type": "message_delta", "delta": delta, "usage": usage, **tokens(asked, done)})
        yield _event({"type": "message_stop"})

    def refusal(self, error: FlotillaError) -> dict[str, Any]:
        """Return the body of an error."""
        return refusals.anthropic(error)


def _check_options(body: dict[str, Any]) -> None:
    """Refuse options that would change what the policy writes or reads."""
    output = fields.an_object(body.get("output_config") or {}, "output_config")
    fields.check_names(output, read=(), ignored=("effort",), before="output_config.")
    managed = fields.an_object(body.get("context_management") or {}, "context_management")
    fields.check_names(managed, read=("edits",), ignored=(), before="context_management.")
    field = "context_management.edits"
    for at, one in enumerate(fields.a_list(managed.get("edits") or [], field)):
        kind = fields.an_object(one, f"{field}[{at}]").get("type")
        if not str(kind).startswith("clear_thinking"):  # thoughts of earlier turns are left out as it is
            raise fields.refused(f"{field}[{at}].type", f"the gateway edits no history, as by {kind!r:.80}")


def _system(given: Any) -> list[dict[str, Any]]:
    """Return the message with the instructions, if there are any."""
    if given is None:
        return []
    if isinstance(given, list):
        given = [one for one in given if not _is_billing(one)]
    text = fields.text_of(given, "system")
    return [{"role": "system", "content": text}] if text else []


def _is_billing(block: Any) -> bool:
    return isinstance(block, dict) and str(block.get("text")).startswith(BILLING)


def _messages(given: Any, field: str) -> Iterator[dict[str, Any]]:
    """Yield the messages in one of the vendor's: results of calls are messages of their own."""
    message = fields.an_object(given, field)
    role, content = message.get("role"), message.get("content")
    if role not in ("system", "user", "assistant"):
        raise fields.refused(f"{field}.role", f"{role!r:.80} is none of system, user, assistant")
    if not isinstance(content, list):
        yield {"role": role, "content": fields.text_of(content, f"{field}.content")}
        return
    texts: list[str] = []
    calls: list[dict[str, str]] = []
    for at, one in enumerate(content):
        where = f"{field}.content[{at}]"
        block = fields.an_object(one, where)
        kind = block.get("type")
        if kind == "tool_result" and role == "user":
            if texts:
                yield {"role": role, "content": "\n".join(texts)}
                texts = []
            yield _result(block, where)
        elif kind == "tool_use" and role == "assistant":
            places = (f"{where}.id", f"{where}.name", f"{where}.input")
            called = fields.an_object(block.get("input"), places[2])
            calls.append(fields.call(block.get("id"), block.get("name"), called, places))
        elif kind not in THOUGHTS or role != "assistant":
            texts.append(fields.part_text(block, where))
    if role == "assistant":
        yield fields.assistant("\n".join(texts), calls)
    elif texts or not content:
        yield {"role": role, "content": "\n".join(texts)}


def _result(block: dict[str, Any], where: str) -> dict[str, Any]:
    text = fields.text_of(block.get("content"), f"{where}.content")
    failed = block.get("is_error") is True
    return fields.result(
        block.get("tool_use_id"), f"{FAILED}{text}" if failed else text, f"{where}.tool_use_id"
    )


def _add(messages: list[dict[str, Any]], message: dict[str, Any]) -> None:
    """Add a message; of two of the user's, or of the assistant's, that follow each other it makes one."""
    last = messages[-1] if messages else {"role": ""}
    if message["role"] not in ("user", "assistant") or last["role"] != message["role"]:
        messages.append(message)
        return
    content = "\n".join(text for text in (last["content"], message["content"]) if text)
    calls = [*last.get("tool_calls", ()), *message.get("tool_calls", ())]
    messages[-1] = {"role": last["role"], "content": content} | ({"tool_calls": calls} if calls else {})


def _tool(given: Any, field: str) -> dict[str, Any]:
    one = fields.an_object(given, field)
    fields.check_value(one, "type", "custom", field=f"{field}.type")
    return fields.function(one, field, schema="input_schema")


def _may_call(body: dict[str, Any], tools: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
    """Return the tools that the policy is told of."""
    choice = fields.an_object(body.get("tool_choice") or {}, "tool_choice")
    fields.check_value(choice, "type", "auto", "none", field="tool_choice.type")
    if tools:
        one_alone = "disable_parallel_tool_use"
        fields.check_value(choice, one_alone, False, field=f"tool_choice.{one_alone}")
    return () if choice.get("type") == "none" else tools


def _head(done: Completed) -> dict[str, Any]:
    return {"id": f"msg_{done.id}", "type": "message", "role": "assistant", "model": done.model}


def _blocks(said: Told) -> list[dict[str, Any]]:
    """Return the blocks of a turn. One that says nothing has an empty text: clients read the first block."""
    calls = [
        {"type": "tool_use", "id": one["id"], "name": one["name"], "input": json.loads(one["arguments"])}
        for one in said.calls
    ]
    return [{"type": "text", "text": said.content}, *calls] if said.content or not calls else calls


def _block_events(index: int, block: dict[str, Any]) -> Iterator[bytes]:
    if block["type"] == "text":
        begun, delta = block | {"text": ""}, {"type": "text_delta", "text": block["text"]}
    else:
        written = json.dumps(block["input"], ensure_ascii=False)
        begun, delta = block | {"input": {}}, {"type": "input_json_delta", "partial_json": written}
    yield _event({"type": "content_block_start", "index": index, "content_block": begun})
    yield _event({"type": "content_block_delta", "index": index, "delta": delta})
    yield _event({"type": "content_block_stop", "index": index})


def _reason(said: Told, done: Completed) -> str:
    if said.stop:
        return "stop_sequence"
    if done.cut:
        return "max_tokens"
    return "tool_use" if said.calls else "end_turn"


def _usage(done: Completed, written: int) -> dict[str, int]:
    return {"input_tokens": done.prompt_tokens, "output_tokens": written}


def _event(data: dict[str, Any]) -> bytes:
    return event(data, data["type"])

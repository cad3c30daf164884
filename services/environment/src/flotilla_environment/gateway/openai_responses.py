"""The dialect of OpenAI's Responses.

What it does beyond the vendor's: `return_token_ids` asks for `token_ids` and `token_logprobs` of the response, and so
does `message.output_text.logprobs` in `include`. All of a turn's tokens are there.

Ignored, for the run decides or nothing depends on it: the fields of sampling (`fields.SAMPLING`), those of serving
(`fields.OF_SERVING`), and IGNORED. `strict` of a function is a hint, too. Items of reasoning are left out of a
history. `tool_choice: none` hides the tools from the policy; what would force a call, or forbid a second one, is
refused, and so are all other fields.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from flotilla_core.errors import FlotillaError
from flotilla_environment.gateway import fields, refusals
from flotilla_environment.gateway.dialect import Completed, Completion
from flotilla_environment.gateway.told import Told, event, logprobs, tokens, told

READ = frozenset(
    {
        "background",
        "include",
        "input",
        "instructions",
        "max_output_tokens",
        "model",
        "parallel_tool_calls",
        "previous_response_id",
        "return_token_ids",
        "stream",
        "text",
        "tool_choice",
        "tools",
        "top_logprobs",
        "truncation",
    }
)
IGNORED = fields.SAMPLING | fields.OF_SERVING | {"max_tool_calls", "reasoning", "stream_options"}
LOGPROBS = "message.output_text.logprobs"
INCLUDABLE = (LOGPROBS, "reasoning.encrypted_content")
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
TEXTS = ("input_text", "output_text", "text")


class OpenAIResponses:
    """Responses."""

    path = "/v1/responses"

    def read(self, body: dict[str, Any]) -> Completion:
        """Return what a request asks for."""
        fields.check_names(body, read=READ, ignored=IGNORED)
        fields.check_value(body, "background", False)
        fields.check_value(body, "top_logprobs", 0)
        fields.check_value(body, "truncation", "disabled")
        if body.get("previous_response_id") is not None:
            raise fields.refused(
                "previous_response_id", "no response is kept", "Send the whole history as input."
            )
        text = fields.an_object(body.get("text") or {}, "text")
        fields.check_names(text, read=("format",), ignored=("verbosity",), before="text.")
        fields.check_value(text, "format", {"type": "text"}, field="text.format")
        included = fields.a_list(body.get("include") or [], "include")
        for at, one in enumerate(included):
            fields.check_value({"": one}, "", *INCLUDABLE, field=f"include[{at}]")
        asked = fields.a_list(body.get("tools") or [], "tools")
        return Completion(
            messages=tuple(_history(body)),
            tools=fields.may_call(body, tuple(_tool(one, f"tools[{at}]") for at, one in enumerate(asked))),
            max_tokens=fields.a_limit(body, "max_output_tokens"),
            stream=fields.a_switch(body, "stream"),
            logprobs=LOGPROBS in included or fields.a_switch(body, "return_token_ids"),
        )

    def answer(self, asked: Completion, done: Completed) -> dict[str, Any]:
        """Return the body of an answer."""
        return _response(asked, done, told(asked, done))

    def events(self, asked: Completion, done: Completed) -> Iterator[bytes]:
        """Yield the events of a streamed answer: the response without its items, each item, and the whole response."""
        said = told(asked, done)
        whole = _response(asked, done, said)
        begun = whole | {"status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
        parts: list[dict[str, Any]] = [
            {"type": "response.created", "response": begun},
            {"type": "response.in_progress", "response": begun},
        ]
        for index, item in enumerate(whole["output"]):
            parts += _message_events(index, item) if item["type"] == "message" else _call_events(index, item)
        parts.append({"type": f"response.{whole['status']}", "response": whole})
        for number, part in enumerate(parts):
            yield event(part | {"sequence_number": number}, part["type"])

    def refusal(self, error: FlotillaError) -> dict[str, Any]:
        """Return the body of an error."""
        return refusals.openai(error)


def _history(body: dict[str, Any]) -> list[dict[str, Any]]:
    instructions, given = fields.text_of(body.get("instructions"), "instructions"), body.get("input")
    if given is None or given == []:
        raise fields.refused("input", "it must not be empty")
    said = [{"role": "user", "content": given}] if isinstance(given, str) else _messages(given)
    return [{"role": "system", "content": instructions}, *said] if instructions else said


def _messages(given: Any) -> list[dict[str, Any]]:
    """Return the messages that items are: calls belong to the text of the assistant right before them."""
    messages: list[dict[str, Any]] = []
    joins = False
    for at, one in enumerate(fields.a_list(given, "input")):
        field = f"input[{at}]"
        item = fields.an_object(one, field)
        kind = item.get("type") or "message"
        if kind == "reasoning":
            continue
        if kind == "function_call":
            where = (f"{field}.call_id", f"{field}.name", f"{field}.arguments")
            called = fields.call(item.get("call_id"), item.get("name"), item.get("arguments") or "", where)
            if not joins:
                messages.append(fields.assistant("", []))
            messages[-1].setdefault("tool_calls", []).append(called)
        elif kind == "function_call_output":
            text = fields.text_of(item.get("output"), f"{field}.output", TEXTS)
            messages.append(fields.result(item.get("call_id"), text, f"{field}.call_id"))
        elif kind == "message":
            role = fields.a_text(item.get("role"), f"{field}.role")
            text = fields.text_of(item.get("content"), f"{field}.content", TEXTS)
            if role not in ROLES:
                raise fields.refused(f"{field}.role", f"{role!r:.80} is none of {', '.join(ROLES)}")
            messages.append({"role": ROLES[role], "content": text})
        else:
            what = f"the policy neither reads nor writes {kind!r:.80}"
            itself = (
                "Send the items themselves: store=False in most clients." if kind == "item_reference" else ""
            )
            raise fields.refused(f"{field}.type", what, itself)
        joins = messages[-1]["role"] == "assistant"
    return messages


def _tool(given: Any, field: str) -> dict[str, Any]:
    one = fields.an_object(given, field)
    fields.check_value(one | {"type": one.get("type", "")}, "type", "function", field=f"{field}.type")
    return fields.function(one, field)


def _response(asked: Completion, done: Completed, said: Told) -> dict[str, Any]:
    cut = done.cut and not said.stop
    return {
        "id": f"resp_{done.id}",
        "object": "response",
        "created_at": done.created,
        "status": "incomplete" if cut else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "instructions": None,
        "max_output_tokens": asked.max_tokens or None,
        "metadata": {},
        "model": done.model,
        "output": _items(asked, done, said, "incomplete" if cut else "completed"),
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "store": False,
        "temperature": None,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [
            {"type": "function", "description": None, "parameters": None, "strict": False, **tool}
            for tool in asked.tools
        ],
        "top_p": None,
        "truncation": "disabled",
        "usage": {
            "input_tokens": done.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": done.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": done.prompt_tokens + done.completion_tokens,
        },
        **tokens(asked, done),
    }


def _items(asked: Completion, done: Completed, said: Told, status: str) -> list[dict[str, Any]]:
    """Return the items of a turn. One that says nothing has a message with an empty text."""
    calls = [
        {
            "id": f"fc_{done.id}_{place}",
            "type": "function_call",
            "status": status,
            "call_id": one["id"],
            "name": one["name"],
            "arguments": one["arguments"],
        }
        for place, one in enumerate(said.calls)
    ]
    if not said.content and calls:
        return calls
    text = {
        "type": "output_text",
        "text": said.content,
        "annotations": [],
        "logprobs": logprobs(done) if asked.logprobs else [],
    }
    message = {
        "id": f"msg_{done.id}",
        "type": "message",
        "status": status,
        "role": "assistant",
        "content": [text],
    }
    return [message, *calls]


def _message_events(index: int, item: dict[str, Any]) -> list[dict[str, Any]]:
    (part,) = item["content"]
    at = {"item_id": item["id"], "output_index": index, "content_index": 0}
    known = {"logprobs": part["logprobs"]}
    deltas = [{"type": "response.output_text.delta", **at, "delta": part["text"], **known}]
    return [
        _added(index, item | {"status": "in_progress", "content": []}),
        {"type": "response.content_part.added", **at, "part": part | {"text": "", "logprobs": []}},
        *(deltas if part["text"] else ()),
        {"type": "response.output_text.done", **at, "text": part["text"], **known},
        {"type": "response.content_part.done", **at, "part": part},
        _done(index, item),
    ]


def _call_events(index: int, item: dict[str, Any]) -> list[dict[str, Any]]:
    at = {"item_id": item["id"], "output_index": index}
    of_arguments = "response.function_call_arguments"
    return [
        _added(index, item | {"status": "in_progress", "arguments": ""}),
        {"type": f"{of_arguments}.delta", **at, "delta": item["arguments"]},
        {"type": f"{of_arguments}.done", **at, "name": item["name"], "arguments": item["arguments"]},
        _done(index, item),
    ]


def _added(index: int, item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "response.output_item.added", "output_index": index, "item": item}


def _done(index: int, item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "response.output_item.done", "output_index": index, "item": item}

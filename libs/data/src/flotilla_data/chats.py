"""Brings the chat messages of several programs into one form: a role, a text, and the calls of tools.

Invariants: a message of this form has no key without a value, its content is one text, and the arguments of its calls
are objects, as chat templates expect them. What has no place in this form is refused, never left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from flotilla_core.errors import InvalidConfig

Messages = list[dict[str, Any]]

ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
"""The role of a message by its `from`, as ShareGPT's files write it."""
OTHER_NAMES = {"developer": "system", "function": "tool"}
"""Names of roles in OpenAI's files that templates know by another one."""
CALL = "function_call"
WEIGHT = "weight"
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Keys of what an assistant thought before it answered."""


def chat_of(value: Any, where: str) -> Messages | None:
    """Return a chat in its one form; None where the value is no message and no list of messages."""
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, list) or not all(_is_message(one) for one in value):
        return None
    return [_message(one, where) for one in value]


def trains(message: Mapping[str, Any]) -> bool:
    """Return whether a message is a turn of the assistant that its row does not exclude."""
    return message["role"] == "assistant" and message.get(WEIGHT) != 0


def is_empty(message: Mapping[str, Any]) -> bool:
    """Return whether a message says nothing and calls no tool."""
    thought = any(str(message.get(key, "")).strip() for key in THOUGHTS)
    return not (message["content"].strip() or message.get("tool_calls") or thought)


def tools_of(value: Any, where: str) -> list[dict[str, Any]] | None:
    """Return the descriptions of functions that a model may call; None where the value holds none."""
    value = loaded(value)
    if isinstance(value, str) and value.strip():
        raise InvalidConfig(
            "the tools are a text that is not JSON",
            where=where,
            why=f"it is {value!r:.100}",
            next_step="write them as a list, or as its JSON text; rename the column where it means another thing",
        )
    value = [value] if isinstance(value, Mapping) else value
    if not isinstance(value, list) or not value:
        return None
    tools = [_tool(one) for one in value]
    if all(tool is None for tool in tools):
        return None
    if None in tools:
        raise InvalidConfig(
            "a tool has no name",
            where=where,
            why=f"tool {tools.index(None) + 1} is no description of a function",
            next_step='write it as {"type": "function", "function": {"name": ..., "parameters": ...}}',
        )
    return [tool for tool in tools if tool is not None]


def _tool(value: Any) -> dict[str, Any] | None:
    if not isinstance(value, Mapping):
        return None
    described = value.get("function") if isinstance(value.get("function"), Mapping) else value
    if not isinstance(described, Mapping) or not isinstance(described.get("name"), str):
        return None
    function: dict[str, Any] = _without_nothing(described)
    return {"type": "function", "function": function}


def _is_message(value: Any) -> bool:
    if not isinstance(value, Mapping):
        return False
    if value.get("role") is not None:
        return isinstance(value["role"], str)
    return isinstance(value.get("from"), str) and "value" in value


def _message(raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    message = {name: value for name, value in raw.items() if value is not None}
    if "role" not in message:
        message = _of_sharegpt(message, where)
    message["role"] = OTHER_NAMES.get(message["role"], message["role"])
    message["content"] = _text_of(raw.get("content", message.get("content")), where)
    weight = message.get(WEIGHT)
    if weight not in (None, 0, 1):
        raise InvalidConfig(
            f"the weight of a message is {weight!r}",
            where=where,
            why="a message of the assistant is trained or it is not",
            next_step="write 1, or 0 for one that is not trained",
        )
    calls = message.pop("tool_calls", None)
    calls = loaded(message.pop(CALL, calls))
    if calls:
        several = calls if isinstance(calls, list) else [calls]
        message["tool_calls"] = [_call(call, where) for call in several]
    return message


def _of_sharegpt(raw: dict[str, Any], where: str) -> dict[str, Any]:
    """Translate a message with `from` and `value`."""
    speaker, value = raw.pop("from"), raw.pop("value", None)
    if speaker not in ROLES:
        raise InvalidConfig(
            f"a chat message is from {speaker!r}",
            where=where,
            why=f"roles are known by {', '.join(ROLES)}",
            next_step="write one of these, or role and content in place of from and value",
        )
    if speaker == CALL:
        return raw | {"role": "assistant", "content": "", CALL: value}
    return raw | {"role": ROLES[speaker], "content": value}


def _text_of(content: Any, where: str) -> str:
    """Return the text of a message, of all its parts; raise where a part is something else, such as an image."""
    for kind in _kinds_of(content):
        if kind != "text":
            raise InvalidConfig(
                "a chat message has a part that is not text",
                where=where,
                why=f"it is {kind!r}, and models read text alone",
                next_step="leave such rows out",
            )
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part if isinstance(part, str) else str(part.get("text") or "") for part in content)


def _kinds_of(content: Any) -> list[str]:
    """Return the types of the parts of a message, or the Python type of what is neither text nor a list of parts."""
    if content is None or isinstance(content, str):
        return ["text"]
    if not isinstance(content, list):
        return [type(content).__name__]
    return [_kind_of(part) for part in content]


def _kind_of(part: Any) -> str:
    """Return the type of a part: by its own word, else by the key that it has in place of text."""
    if isinstance(part, str):
        return "text"
    if not isinstance(part, dict):
        return type(part).__name__
    others = (key for key, value in part.items() if key != "text" and value is not None)
    return str(part.get("type") or next(others, "text"))


def _call(raw: Any, where: str) -> dict[str, Any]:
    """Return a call of a tool with its arguments as an object, where they are the text of one."""
    call = loaded(raw)
    described = call.get("function", call) if isinstance(call, Mapping) else None
    name = described.get("name") if isinstance(described, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(described, Mapping) or not isinstance(name, str):
        raise InvalidConfig(
            "a call of a tool names no function",
            where=where,
            why=f"it is {raw!r:.200}",
            next_step='write it as {"type": "function", "function": {"name": ..., "arguments": ...}}',
        )
    arguments = _without_nothing(loaded(described.get("arguments", {})))
    others = {key: value for key, value in call.items() if key in ("id", "index") and value is not None}
    return others | {"type": "function", "function": {"name": name, "arguments": arguments}}


def loaded(value: Any) -> Any:
    """Return what a text of JSON holds; any other value, and a text that is none, as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _without_nothing(value: Any) -> Any:
    """Leave out keys without a value: columns of nested rows have every key that any row has."""
    if isinstance(value, Mapping):
        return {key: _without_nothing(one) for key, one in value.items() if one is not None}
    if isinstance(value, list):
        return [_without_nothing(one) for one in value]
    return value

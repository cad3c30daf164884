"""Reads the calls of tools in what a model wrote, in the form that its chat template teaches.

Invariants: a call is read whole, with a name and an object of arguments, or not at all. What cannot be read stays text
and has a reason, whatever the text is; nothing here raises. A call within the thoughts of a model is no call.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from flotilla_core.json_text import finite_json

OPEN, CLOSE = "<tool_call>", "</tool_call>"
LIST = "[TOOL_CALLS]"
PYTHON_TAG = "<|python_tag|>"
THOUGHT = "</think>"
DEEPEST = 32
"""The most levels of the arguments: what reads and writes JSON calls itself for each."""
_OBJECT = re.compile(r'\{\s*"(name|type|function|parameters|arguments)"')


class ToolFormat(StrEnum):
    """The form in which a model calls tools, by what its template writes."""

    NONE = "none"
    TAGS = "tags"
    """`<tool_call>{...}</tool_call>`, as Hermes and Qwen write it."""
    OBJECT = "object"
    """The whole answer is one object, as Llama 3 writes it."""
    LIST = "list"
    """`[TOOL_CALLS][{...}]`, as Mistral writes it."""

    @classmethod
    def of_template(cls, source: str) -> ToolFormat:
        """Return the form that a chat template teaches."""
        if "tools" not in source:
            return cls.NONE
        if LIST in source:
            return cls.LIST
        if OPEN in source:
            return cls.TAGS
        return cls.OBJECT if "ipython" in source or PYTHON_TAG in source else cls.NONE


@dataclass(frozen=True)
class Answer:
    """A text that a model wrote, and the calls in it."""

    content: str
    calls: tuple[dict[str, Any], ...] = ()
    """Each has `name` and `arguments`."""
    unparsed: str = ""
    """The reason why a call could not be read; the text is whole then."""

    @property
    def bare(self) -> tuple[str, tuple[dict[str, Any], ...]]:
        """Return what it says, however it is spaced."""
        return "".join(self.content.split()), self.calls

    def message(self, number: int) -> dict[str, Any]:
        """Return the message, as chat templates take it; `number` makes the ids of its calls."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.calls:
            # Nine letters or digits: the template of Mistral takes no other ids.
            message["tool_calls"] = [
                {"id": f"{number:06d}{place:03d}", "type": "function", "function": call}
                for place, call in enumerate(self.calls)
            ]
        return message


class _Unreadable(Exception):
    """A call cannot be read; the text says why."""


def read_answer(text: str, form: ToolFormat) -> Answer:
    """Return what a model wrote with its calls, or with the reason why they cannot be read."""
    try:
        if form is ToolFormat.TAGS:
            return _of_tags(text)
        if form is ToolFormat.LIST:
            return _of_list(text)
        if form is ToolFormat.OBJECT:
            return _of_object(text)
    except _Unreadable as why:
        return Answer(text, unparsed=str(why))
    return Answer(text)


def _of_tags(text: str) -> Answer:
    thought = max(text.rfind(THOUGHT), 0)
    begin = text.find(OPEN, thought)
    if begin < 0:
        return Answer(text)
    calls = []
    place = begin
    while place >= 0:
        end = text.find(CLOSE, place)
        if end < 0:
            raise _Unreadable(f"a call is not ended by {CLOSE}")
        calls.append(_call(_json(text[place + len(OPEN) : end])))
        place = text.find(OPEN, end)
    return Answer(text[:begin].rstrip(), tuple(calls))


def _of_list(text: str) -> Answer:
    before, mark, after = text.partition(LIST)
    if not mark:
        return Answer(text)
    calls = _json(after)
    if not isinstance(calls, list) or not calls:
        raise _Unreadable(f"what follows {LIST} is not a list of calls")
    return Answer(before.rstrip(), tuple(_call(one) for one in calls))


def _of_object(text: str) -> Answer:
    own = text.strip()
    marked = own.startswith(PYTHON_TAG)
    own = own.removeprefix(PYTHON_TAG).strip()
    if not marked and not _OBJECT.match(own):
        return Answer(text)
    return Answer("", (_call(_json(own)),))


def _json(text: str) -> Any:
    try:
        value = finite_json(text)
        json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise _Unreadable(f"a call has more than {DEEPEST} levels") from None
    except UnicodeEncodeError:
        raise _Unreadable("a call holds half of a surrogate pair") from None
    except ValueError as error:
        raise _Unreadable(f"a call is not JSON: {error}"[:200]) from None
    return value


def _call(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _Unreadable("a call is not an object")
    name = value.get("name")
    arguments = value.get("arguments", value.get("parameters"))
    if not isinstance(name, str) or not name:
        raise _Unreadable("a call names no tool")
    if not isinstance(arguments, dict):
        raise _Unreadable(f"the arguments of {name[:100]!r} are not an object")
    if is_deeper(arguments, DEEPEST):
        raise _Unreadable(f"a call has more than {DEEPEST} levels")
    return {"name": name, "arguments": arguments}


def is_deeper(value: Any, levels: int) -> bool:
    """Return whether a value has more than so many levels of lists and objects."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels == 0 or any(is_deeper(part, levels - 1) for part in parts if isinstance(part, dict | list))

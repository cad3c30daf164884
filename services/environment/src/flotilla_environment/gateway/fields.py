"""Reads the fields of requests, as all dialects have them.

Invariants: every field of a request is read, is one of a fixed list that changes nothing, or is refused by its name.
What messages and tools hold beside the fields that are read, such as ids and marks for a cache, changes nothing.
Arguments of calls have one text, however a client spaces it and writes its numbers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from typing import Any, NoReturn

from flotilla_core.errors import InvalidRequest

SAMPLING = frozenset(
    {
        "frequency_penalty",
        "min_p",
        "presence_penalty",
        "repetition_penalty",
        "seed",
        "temperature",
        "top_k",
        "top_p",
    }
)
"""Ignored in every dialect: the sampling of the run decides what the policy writes."""
OF_SERVING = frozenset(
    {
        "metadata",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
"""Ignored where OpenAI's dialects have them: they say how a vendor serves, bills and keeps."""
LARGEST_EXACT = 2**53
"""A whole number below it is the same in every language."""
LARGEST_LIMIT = 2**32 - 1
"""The largest limit of tokens that the contract holds; a client that sends a larger one has no limit in mind."""


def refused(field: str, why: str, next_step: str = "") -> InvalidRequest:
    """Return the refusal of a field."""
    return InvalidRequest(f"{field}: {why}", where=field, next_step=next_step)


def check_names(
    body: Mapping[str, Any], *, read: Collection[str], ignored: Collection[str], before: str = ""
) -> None:
    """Refuse a field that is neither read nor one of those that change nothing. What is null is not there."""
    for name, value in body.items():
        if value is not None and name not in read and name not in ignored:
            raise refused(
                f"{before}{name}", "this gateway does not know it, or cannot do it", "Leave it out."
            )


def check_value(body: Mapping[str, Any], name: str, *allowed: Any, field: str = "") -> None:
    """Refuse a field that has another value than those that change nothing."""
    value = body.get(name)
    if value is not None and value not in allowed:
        can = " or ".join(json.dumps(one) for one in allowed)
        raise refused(field or name, f"only {can} is possible here", f"Leave it out, or send {can}.")


def an_object(value: Any, field: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise refused(field, "it must be an object")
    return value


def a_list(value: Any, field: str) -> list[Any]:
    if not isinstance(value, list):
        raise refused(field, "it must be a list")
    return value


def a_text(value: Any, field: str) -> str:
    if not isinstance(value, str):
        raise refused(field, "it must be a text")
    return value


def a_name(value: Any, field: str) -> str:
    if not a_text(value, field):
        raise refused(field, "it must not be empty")
    return str(value)


def a_switch(body: Mapping[str, Any], name: str) -> bool:
    """Return a field that is true or false; it is false where it is not there."""
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise refused(name, "it must be true or false")
    return bool(value)


def a_limit(body: Mapping[str, Any], name: str) -> int:
    """Return a limit of tokens; 0 where it is not there."""
    value = body.get(name)
    if value is None:
        return 0
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise refused(name, "it must be a whole number of at least 1")
    return min(value, LARGEST_LIMIT)


def stops(value: Any, field: str) -> tuple[str, ...]:
    """Return the texts that end a turn: one, or a list."""
    if value is None:
        return ()
    if isinstance(value, str):
        return (a_name(value, field),)
    return tuple(a_name(one, f"{field}[{place}]") for place, one in enumerate(a_list(value, field)))


def text_of(content: Any, field: str, kinds: Collection[str] = ("text",)) -> str:
    """Return a content as one text: a text, or parts of these types, with a new line between two."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = enumerate(a_list(content, field))
    return "\n".join(part_text(part, f"{field}[{place}]", kinds) for place, part in parts)


def part_text(given: Any, field: str, kinds: Collection[str] = ("text",)) -> str:
    """Return the text of one part of a content."""
    part = an_object(given, field)
    if part.get("type") not in kinds:
        raise refused(f"{field}.type", f"the policy reads text alone, not {part.get('type')!r:.80}")
    return a_text(part.get("text"), f"{field}.text")


def may_call(body: Mapping[str, Any], tools: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
    """Return the tools that the policy is told of, by the choice of a client of OpenAI's; `none` hides them."""
    check_value(body, "tool_choice", "auto", "none")
    if tools:
        check_value(body, "parallel_tool_calls", True)
    return () if body.get("tool_choice") == "none" else tools


def function(given: Mapping[str, Any], field: str, *, schema: str = "parameters") -> dict[str, Any]:
    """Return a function that the policy may call; `schema` is the field with that of its arguments."""
    tool: dict[str, Any] = {"name": a_name(given.get("name"), f"{field}.name")}
    if given.get("description") is not None:
        tool["description"] = a_text(given["description"], f"{field}.description")
    if given.get(schema) is not None:
        tool["parameters"] = an_object(given[schema], f"{field}.{schema}")
    return tool


def arguments(value: Any, field: str) -> str:
    """Return the one text of an object of arguments, given as a text or as the object.

    A number without a fraction is a whole one: clients in other languages send 1 for 1.0.
    """
    try:
        text = value if isinstance(value, str) else json.dumps(value)
        read = _DECODER.decode(text or "{}")
        if isinstance(read, dict):
            written = json.dumps(read, ensure_ascii=False)
            written.encode()
            return written
    except RecursionError:
        raise refused(field, "it has too many levels") from None
    except UnicodeEncodeError:
        raise refused(field, "it holds half of a surrogate pair") from None
    except ValueError as error:
        raise refused(field, f"it is not JSON: {error}"[:300]) from None
    raise refused(field, "it must be a JSON object")


def call(call_id: Any, name: Any, given: Any, fields: tuple[str, str, str]) -> dict[str, str]:
    """Return a call of a tool by an assistant; `fields` are those of its id, its name and its arguments."""
    own_id, own_name, own_arguments = fields
    return {
        "id": a_name(call_id, own_id),
        "name": a_name(name, own_name),
        "arguments": arguments(given, own_arguments),
    }


def assistant(content: str, calls: list[dict[str, str]]) -> dict[str, Any]:
    """Return a message of an assistant."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = calls
    return message


def result(call_id: Any, content: str, field: str) -> dict[str, Any]:
    """Return a message with the result of a call."""
    return {"role": "tool", "content": content, "tool_call_id": a_name(call_id, field)}


def _number(text: str) -> float | int:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:40]} is too large for a number")
    return int(number) if number.is_integer() and abs(number) < LARGEST_EXACT else number


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_number)

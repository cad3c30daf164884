"""A turn between the dialects and the episode: what is asked for is checked, and what was written becomes an answer.

Invariant: nothing leaves for the coordinator that exceeds its limits; the client is told the field that does.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from flotilla.common.v1.chat_pb2 import Message, Tool, ToolCall
from flotilla.environment.v1 import environment_pb2 as pb
from flotilla_core.errors import InvalidRequest, unicode_text
from flotilla_core.tensors import from_tensor
from flotilla_core.terminal import is_one_line
from flotilla_environment.gateway.dialect import Completed, Completion, Token
from flotilla_environment.gateway.histories import Place
from flotilla_environment.worker import (
    DEEPEST,
    LONGEST_NAME,
    MOST_BYTES,
    MOST_CALLS,
    MOST_MESSAGES,
    ROLES,
    is_deeper,
)

MOST_STOPS = 16
LONGEST_STOP = 200


def check(completion: Completion) -> None:
    """Raise InvalidRequest, with the field, where a turn is asked for with more than an episode may say."""
    if len(completion.stop) > MOST_STOPS or not all(0 < len(one) <= LONGEST_STOP for one in completion.stop):
        raise _refused("stop", f"there are at most {MOST_STOPS} texts, of 1 to {LONGEST_STOP} characters")
    for place, message in enumerate(completion.messages):
        _check_message(f"messages[{place}]", message)
    for place, tool in enumerate(completion.tools):
        if is_deeper(tool, DEEPEST):
            raise _refused(f"tools[{place}]", f"it has more than {DEEPEST} levels")
    if len(completion.tools) > MOST_MESSAGES:
        raise _refused("tools", f"they are {len(completion.tools):,}, of {MOST_MESSAGES:,} at most")
    size = sum(len(json.dumps(tool)) for tool in completion.tools)
    if size > MOST_BYTES // 4:
        raise _refused("tools", f"they have {size:,} bytes as JSON, of {MOST_BYTES // 4:,} at most")


def _check_message(field: str, message: Mapping[str, Any]) -> None:
    calls = message.get("tool_calls", ())
    if message["role"] not in ROLES:
        raise _refused(field, f"its role is none of {', '.join(ROLES)}")
    if len(calls) > MOST_CALLS:
        raise _refused(field, f"it has {len(calls):,} calls, of {MOST_CALLS:,} at most")
    names = [
        message.get("tool_call_id", ""),
        *(text for call in calls for text in (call["id"], call["name"])),
    ]
    if not all(len(name) <= LONGEST_NAME and is_one_line(name) for name in names):
        raise _refused(field, f"a name or an id has more than {LONGEST_NAME} characters, or several lines")
    if any(is_deeper(json.loads(call["arguments"]), DEEPEST) for call in calls):
        raise _refused(field, f"the arguments of a call have more than {DEEPEST} levels")


def asked_of(completion: Completion, place: Place) -> pb.TurnAsked:
    """Return what the coordinator is asked for."""
    asked = pb.TurnAsked(
        thread=place.thread,
        messages=[_message(one) for one in place.messages],
        afresh=place.afresh,
        tools=[Tool(function=unicode_text(json.dumps(tool))) for tool in completion.tools],
        max_tokens=completion.max_tokens,
        stop=[unicode_text(text) for text in completion.stop],
        tokens=completion.logprobs,
    )
    if len(asked.messages) > MOST_MESSAGES:
        raise _refused("messages", f"{len(asked.messages):,} are new, of {MOST_MESSAGES:,} at most")
    if (size := asked.ByteSize()) > MOST_BYTES:
        raise _refused("messages", f"{size:,} bytes are new, of {MOST_BYTES:,} at most")
    return asked


def digest_of(asked: pb.TurnAsked) -> bytes:
    """Return what is equal for equal questions."""
    return hashlib.blake2b(asked.SerializeToString(deterministic=True), digest_size=16).digest()


def _message(given: Mapping[str, Any]) -> Message:
    return Message(
        role=given["role"],
        content=unicode_text(given["content"]),
        tool_calls=[
            ToolCall(id=call["id"], name=call["name"], arguments=unicode_text(call["arguments"]))
            for call in given.get("tool_calls", ())
        ],
        tool_call_id=given.get("tool_call_id", ""),
    )


def completed_of(written: pb.TurnWritten, name: str, model: str) -> Completed:
    """Return the answer that a turn is; `name` is its id."""
    return Completed(
        id=name,
        model=model,
        created=int(time.time()),
        content=written.message.content,
        calls=tuple(
            {"id": call.id, "name": call.name, "arguments": call.arguments or "{}"}
            for call in written.message.tool_calls
        ),
        cut=written.finish == pb.TURN_FINISH_LENGTH,
        prompt_tokens=written.prompt_tokens,
        completion_tokens=written.tokens,
        tokens=tuple(_tokens(written)),
    )


def _tokens(written: pb.TurnWritten) -> Iterator[Token]:
    if not written.HasField("token_ids"):
        return
    columns: Sequence[np.ndarray] = from_tensor(written.token_ids), from_tensor(written.logprobs)
    for token, logprob, raw in zip(
        *(column.tolist() for column in columns), written.token_bytes, strict=True
    ):
        yield Token(token, raw.decode(errors="replace"), raw, logprob)


def _refused(field: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"{field}: {why}", where=field)

"""Holds what an environment and the policy tell each other in an episode, and reads and writes it on the wire.

Invariants: nothing of an environment is taken before its limits are checked. Equal digests are equal questions, and
equal keys are equal states.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flotilla.common.v1.chat_pb2 import Message, ToolCall
from flotilla.environment.v1 import environment_pb2 as pb
from flotilla_coordinator.rollouts.environment_limits import (
    LONGEST_FAILURE,
    LONGEST_NEXT_STEP,
    LONGEST_TRACEBACK,
    check_asked,
    check_ended,
)
from flotilla_coordinator.rollouts.tool_calls import DEEPEST, is_deeper
from flotilla_core.errors import unicode_text
from flotilla_core.json_text import finite_json

Chat = Sequence[Mapping[str, Any]]
"""Messages as chat templates know them."""


@dataclass(frozen=True)
class Asked:
    """A turn that the environment asks for."""

    messages: list[dict[str, Any]]
    """Messages since the last turn of this thread; the whole history where it is afresh."""
    tools: list[dict[str, Any]]
    thread: str = ""
    afresh: bool = False
    max_tokens: int = 0
    """Most tokens of the turn, where the environment wants fewer than the run allows."""
    stop: tuple[str, ...] = ()
    tokens: bool = False
    """True where the environment wants the tokens of the turn, one by one."""
    state: int = 0
    """Equal where the environment names the same state for the turn; 0 where it names none."""
    digest: bytes = field(default=b"", compare=False)
    """Equal where all of it is."""


@dataclass(frozen=True)
class WrittenTokens:
    """The tokens of a turn, one by one."""

    token_ids: np.ndarray
    logprobs: np.ndarray
    texts: list[bytes]
    """The bytes of each, which may be a part of a character."""


@dataclass(frozen=True)
class Ended:
    """The end of an episode."""

    ending: str
    """`completed`, `max_turns`, `no_room`, `timeout` or `error`."""
    rewards: dict[str, float]
    """Empty after an error, and where the environment took too long."""
    turn_rewards: tuple[float, ...]
    metrics: dict[str, float]
    failure: str = ""
    """The failure, with the line of the user's file; empty where nothing failed."""
    traceback: str = ""


def asked_of(asked: pb.TurnAsked) -> Asked:
    """Return what is asked for; raise ValueError where it is nothing that a template could write."""
    check_asked(asked)
    return Asked(
        messages=[_chat_message(message) for message in asked.messages],
        tools=[{"type": "function", "function": _tool(tool.function)} for tool in asked.tools],
        thread=asked.thread,
        afresh=asked.afresh,
        max_tokens=asked.max_tokens,
        stop=tuple(asked.stop),
        tokens=asked.tokens,
        state=_key(asked.state),
        digest=hashlib.blake2b(asked.SerializeToString(deterministic=True), digest_size=16).digest(),
    )


def _key(state: str) -> int:
    """Return 64 bits that stand for a state; 0 for none."""
    digest = hashlib.blake2b(state.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True) if state else 0


def _tool(text: str) -> dict[str, Any]:
    tool = _object(text)
    if not isinstance(tool.get("name"), str) or not tool["name"]:
        raise ValueError("a tool has no name")
    return tool


def _object(text: str) -> dict[str, Any]:
    value = finite_json(text)
    if not isinstance(value, dict) or is_deeper(value, DEEPEST):
        raise ValueError(f"{text[:80]!r} is no JSON object of at most {DEEPEST} levels")
    return value


def ended_of(ended: pb.EpisodeEnded) -> Ended:
    check_ended(ended)
    finding = ended.failure
    failure = (f"{finding.where}: {finding.what}" if finding.where else finding.what)[:LONGEST_FAILURE]
    if finding.next_step:
        failure += f"; {finding.next_step[:LONGEST_NEXT_STEP]}"
    return Ended(
        ending=pb.Ending.Name(ended.ending).removeprefix("ENDING_").lower(),
        rewards=dict(ended.rewards),
        turn_rewards=tuple(ended.turn_rewards),
        metrics=dict(ended.metrics),
        failure=failure,
        traceback=finding.why[-LONGEST_TRACEBACK:],
    )


def message_of(given: Mapping[str, Any]) -> Message:
    calls = [
        ToolCall(
            id=call.get("id") or "",
            name=unicode_text(call["function"]["name"]),
            arguments=_json(call["function"].get("arguments", {})),
        )
        for call in given.get("tool_calls") or ()
    ]
    content, answers = unicode_text(given.get("content") or ""), given.get("tool_call_id") or ""
    return Message(role=given["role"], content=content, tool_calls=calls, tool_call_id=answers)


def _chat_message(message: Message) -> dict[str, Any]:
    """Return a message as chat templates know it."""
    chat: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        chat["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": _object(call.arguments or "{}")},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        chat["tool_call_id"] = message.tool_call_id
    return chat


def _json(value: Any) -> str:
    return unicode_text(value if isinstance(value, str) else json.dumps(value))

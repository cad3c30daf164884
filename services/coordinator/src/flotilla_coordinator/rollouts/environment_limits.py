"""The limits of what an environment server may say, whoever wrote it.

Invariant: the environment service keeps them itself, and names the line of the user's method. A server of somebody
else's may not, so the coordinator checks them again, before anything of it is kept or reaches a template.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from flotilla.environment.v1 import environment_pb2 as pb
from flotilla_core.config import LARGEST_REWARD
from flotilla_core.terminal import is_one_line

MOST_MESSAGES = 1_000
MOST_TOOLS = 1_000
MOST_BYTES = 960 * 1024
MOST_BYTES_OF_TOOLS = MOST_BYTES // 4
MOST_REWARDS = 100
MOST_METRICS = 102
"""100 of the environment's own, and two that the service counts: programs, and those that failed."""
MOST_TURN_REWARDS = 100_000
MOST_STOPS = 16
LONGEST_NAME = 200
LONGEST_FAILURE = 2_000
LONGEST_NEXT_STEP = 300
LONGEST_TRACEBACK = 16_000
ROLES = ("system", "user", "assistant", "tool")


def check_asked(asked: pb.TurnAsked) -> None:
    """Raise ValueError where a turn is asked for with more than an environment may say."""
    _count("messages", len(asked.messages), MOST_MESSAGES)
    _count("tools", len(asked.tools), MOST_TOOLS)
    _count("bytes", asked.ByteSize(), MOST_BYTES)
    _count("bytes of tools", sum(len(tool.function.encode()) for tool in asked.tools), MOST_BYTES_OF_TOOLS)
    _count("texts that end a turn", len(asked.stop), MOST_STOPS)
    _names("a thread", [asked.thread])
    if not all(0 < len(text) <= LONGEST_NAME for text in asked.stop):
        raise ValueError(f"a text that ends a turn is empty or longer than {LONGEST_NAME} characters")
    for message in asked.messages:
        if message.role not in ROLES:
            raise ValueError(f"{message.role[:80]!r} is no role among {', '.join(ROLES)}")
        calls = message.tool_calls
        _count("calls in one message", len(calls), MOST_TOOLS)
        _names("a call", [message.tool_call_id, *(text for call in calls for text in (call.id, call.name))])
        if not all(call.name for call in calls):
            raise ValueError("a call has no name")


def check_ended(ended: pb.EpisodeEnded) -> None:
    """Raise ValueError where an end has more numbers than it may, or such that are none."""
    _count("rewards", len(ended.rewards), MOST_REWARDS)
    _count("metrics", len(ended.metrics), MOST_METRICS)
    for what, numbers in {"rewards": ended.rewards, "metrics": ended.metrics}.items():
        _names(f"one of the {what}", numbers)
        _numbers(what, numbers.values())
    _count("rewards of turns", len(ended.turn_rewards), MOST_TURN_REWARDS)
    _numbers("rewards of turns", ended.turn_rewards)


def _count(what: str, count: int, most: int) -> None:
    if count > most:
        raise ValueError(f"it has {count:,} {what}, of {most:,} at most")


def _names(what: str, names: Iterable[str]) -> None:
    if not all(map(is_name, names)):
        raise ValueError(f"the name of {what} is longer than {LONGEST_NAME} characters, or not of one line")


def is_name(text: str) -> bool:
    """Return whether a text may be a name."""
    return len(text) <= LONGEST_NAME and is_one_line(text)


def _numbers(what: str, numbers: Iterable[float]) -> None:
    if not all(math.isfinite(number) and abs(number) <= LARGEST_REWARD for number in numbers):
        raise ValueError(f"one of the {what} is not finite, or above {LARGEST_REWARD:g}")

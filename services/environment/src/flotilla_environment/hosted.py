"""Environments that the service plays itself, because they wait for others: servers, and rooms.

Invariants: they are code of this service alone, and run nothing of a run or of the policy but in rooms. Nothing heavy
is imported here: workers know these environments by name.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from flotilla_environment.environment import Call, Environment, Message, Reply, Turn

if TYPE_CHECKING:
    from flotilla_environment.servers import Place

MOST_CALLS_OF_A_TURN = 16


class HostedEnvironment(Environment):
    """An environment of this service that waits for others; its methods are `async`."""

    place: Place
    """The place in which it plays, known from `begin` on."""


class HostedTools(HostedEnvironment):
    """Calls tools of others for the policy; a turn without a call is the answer, and ends the episode."""

    def __init__(self, *, limit_s: float) -> None:
        """`limit_s` bounds the calls of one turn, all together."""
        if limit_s <= 0:
            raise ValueError("limit_s is above 0")
        self.limit_s = limit_s
        self.count = {"tool_calls": 0.0, "tool_errors": 0.0}

    async def call(self, call: Call, limit_s: float) -> tuple[str, bool]:
        """Return what a call gave, and whether it succeeded."""
        raise NotImplementedError

    async def answered(self, answer: str) -> Reply:
        """Return the end of the episode."""
        raise NotImplementedError

    async def reply(self, turn: Turn) -> Reply:  # type: ignore[override] # a method may be async
        messages: list[Message] = []
        if turn.unparsed:
            self.count["tool_errors"] += 1
            messages.append({"role": "user", "content": f"error: {turn.unparsed}"})
        now = asyncio.get_running_loop().time
        until = now() + self.limit_s
        for number, call in enumerate(turn.calls):
            text, succeeded = f"error: at most {MOST_CALLS_OF_A_TURN} calls are made in one turn", False
            if number < MOST_CALLS_OF_A_TURN:
                text, succeeded = f"error: the calls of this turn took longer than {self.limit_s:g} s", False
                if (left := until - now()) > 0:
                    text, succeeded = await self.call(call, left)
            self.count["tool_calls"] += 1
            self.count["tool_errors"] += not succeeded
            messages.append({"role": "tool", "content": text, "tool_call_id": call.id})
        return Reply(messages) if messages else await self.answered(turn.content)

    async def stop(self, ending: str) -> Reply:  # type: ignore[override]
        return await self.answered("")

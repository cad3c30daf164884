"""Environment servers of others that break the contract: an episode ends with what was wrong, and no client waits."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from flotilla.common.v1.chat_pb2 import Message, Tool, ToolCall
from flotilla.environment.v1 import environment_pb2 as pb
from flotilla.environment.v1.environment_pb2_grpc import (
    EnvironmentServiceServicer,
    add_EnvironmentServiceServicer_to_server,
)
from flotilla_coordinator.rollouts.environments import Environments, EpisodeStart
from flotilla_core.errors import Unavailable
from flotilla_testing.environment_process import pool_of

LIMIT_S = 30.0
HELLO = Message(role="user", content="hello")
DEEP = '{"a":' * 200 + "1" + "}" * 200

UNREADABLE = {
    "escapes as a thread": pb.TurnAsked(thread="\x1b]0;owned\x07", messages=[HELLO]),
    "a long thread": pb.TurnAsked(thread="x" * 100_000, messages=[HELLO]),
    "a tool that is no object": pb.TurnAsked(messages=[HELLO], tools=[Tool(function="[]")]),
    "a tool without a name": pb.TurnAsked(messages=[HELLO], tools=[Tool(function='{"description": "x"}')]),
    "a tool that is no JSON": pb.TurnAsked(messages=[HELLO], tools=[Tool(function="\x00")]),
    "arguments that are a list": pb.TurnAsked(
        messages=[Message(role="assistant", tool_calls=[ToolCall(name="f", arguments="[1]")])]
    ),
    "deep arguments": pb.TurnAsked(
        messages=[Message(role="assistant", tool_calls=[ToolCall(name="f", arguments=DEEP)])]
    ),
    "an ending that is not known": pb.EpisodeEnded(ending=77),  # type: ignore[arg-type]
}


class Server(EnvironmentServiceServicer):
    """Says the same in every episode."""

    def __init__(self, *said: pb.TurnAsked | pb.EpisodeEnded) -> None:
        self._said = said

    async def RunEpisode(
        self, requests: AsyncIterator[pb.RunEpisodeRequest], context: Any
    ) -> AsyncIterator[pb.RunEpisodeResponse]:
        await anext(requests)
        for one in self._said:
            if isinstance(one, pb.TurnAsked):
                yield pb.RunEpisodeResponse(asked=one)
            else:
                yield pb.RunEpisodeResponse(ended=one)


@asynccontextmanager
async def served(*said: pb.TurnAsked | pb.EpisodeEnded) -> AsyncIterator[Environments]:
    server = grpc.aio.server()
    add_EnvironmentServiceServicer_to_server(Server(*said), server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        address = f"127.0.0.1:{port}"
        async with grpc.aio.insecure_channel(address) as channel, asyncio.timeout(LIMIT_S):
            yield Environments("run", "theirs", {}, await pool_of(address, lambda _: channel), LIMIT_S)
    finally:
        await server.stop(None)


@pytest.mark.parametrize("kind", UNREADABLE)
async def test_what_cannot_be_read_is_an_error_of_the_episode_and_never_a_reward(kind: str) -> None:
    async with served(UNREADABLE[kind]) as run, run.begin(EpisodeStart("a")) as call:
        assert await call.asked() is None
        assert call.ended is not None and not call.ended.rewards
        assert call.ended.ending == "error" and "cannot be read" in call.ended.failure
        assert call.ended.failure.isprintable() and len(call.ended.failure) < 1_000


async def test_a_server_that_closes_in_the_middle_of_a_turn_has_lost_the_episode() -> None:
    async with served(pb.TurnAsked(messages=[HELLO])) as run, run.begin(EpisodeStart("a")) as call:
        assert await call.asked()
        await call.written({"role": "assistant", "content": "late"})
        with pytest.raises(Unavailable, match="left the episode without an end"):
            await call.asked()


async def test_a_reward_that_is_no_number_arrives_as_it_was_said() -> None:
    """The loop refuses it: see `_outcome`."""
    said = pb.EpisodeEnded(ending=pb.ENDING_COMPLETED, rewards={"r": math.nan})
    async with served(said) as run, run.begin(EpisodeStart("a")) as call:
        assert await call.asked() is None and call.ended is not None
        assert math.isnan(call.ended.rewards["r"])

"""Environment servers of others that break the contract: an episode ends with what was wrong, and no client waits."""

from __future__ import annotations

import asyncio
import math
import traceback
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from flotilla.common.v1.chat_pb2 import Message, Tool, ToolCall
from flotilla.common.v1.finding_pb2 import Finding
from flotilla.environment.v1 import environment_pb2 as pb
from flotilla.environment.v1.environment_pb2_grpc import (
    EnvironmentServiceServicer,
    add_EnvironmentServiceServicer_to_server,
)
from flotilla_coordinator.rollouts import environments
from flotilla_coordinator.rollouts.environments import Environments, EpisodeStart
from flotilla_core.errors import Unavailable
from flotilla_testing.environment_process import pool_of

LIMIT_S = 30.0
HELLO = Message(role="user", content="hello")
DEEP = '{"a":' * 200 + "1" + "}" * 200


def completed(**numbers: Any) -> pb.EpisodeEnded:
    return pb.EpisodeEnded(ending=pb.ENDING_COMPLETED, **numbers)


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
    "a tool with a number that is none": pb.TurnAsked(
        messages=[HELLO], tools=[Tool(function='{"name": "f", "parameters": NaN}')]
    ),
    "a tool with a number without end": pb.TurnAsked(
        messages=[HELLO], tools=[Tool(function='{"name": "f", "parameters": 1e999}')]
    ),
    "too many messages": pb.TurnAsked(messages=[HELLO] * 1_001),
    "too many tools": pb.TurnAsked(messages=[HELLO], tools=[Tool(function='{"name": "f"}')] * 1_001),
    "a tool that is too long": pb.TurnAsked(
        messages=[HELLO], tools=[Tool(function=f'{{"name": "f", "description": "{"x" * 300_000}"}}')]
    ),
    "a tool that is too deep": pb.TurnAsked(
        messages=[HELLO], tools=[Tool(function=f'{{"name": "f", "parameters": {DEEP}}}')]
    ),
    "a message that is too long": pb.TurnAsked(messages=[Message(role="user", content="x" * 1_000_000)]),
    "a forged role": pb.TurnAsked(messages=[Message(role="policy", content="x")]),
    "escapes as the name of a call": pb.TurnAsked(
        messages=[Message(role="assistant", tool_calls=[ToolCall(name="\x1b[2J", arguments="{}")])]
    ),
    "a call without a name": pb.TurnAsked(
        messages=[Message(role="assistant", tool_calls=[ToolCall(arguments="{}")])]
    ),
    "a long name of an answered call": pb.TurnAsked(
        messages=[Message(role="tool", content="x", tool_call_id="x" * 201)]
    ),
    "too many calls": pb.TurnAsked(
        messages=[Message(role="assistant", tool_calls=[ToolCall(name="f", arguments="{}")] * 1_001)]
    ),
    "too many texts that end a turn": pb.TurnAsked(messages=[HELLO], stop=["x"] * 17),
    "an empty text that ends a turn": pb.TurnAsked(messages=[HELLO], stop=[""]),
    "an ending that is not known": pb.EpisodeEnded(ending=77),  # type: ignore[arg-type]
    "a reward that is no number": completed(rewards={"r": math.nan}),
    "an endless reward": completed(rewards={"r": math.inf}),
    "a reward beyond all": completed(rewards={"r": 1e300}),
    "too many rewards": completed(rewards={str(number): 1.0 for number in range(101)}),
    "a long name of a reward": completed(rewards={"x" * 201: 1.0}),
    "escapes as the name of a reward": completed(rewards={"\x1b[2J": 1.0}),
    "a reward of a turn that is no number": completed(turn_rewards=[math.nan]),
    "rewards of turns that cancel each other": completed(turn_rewards=[1e300, -1e300]),
    "too many rewards of turns": completed(turn_rewards=[1.0] * 100_001),
    "a metric that is no number": completed(metrics={"m": math.nan}),
    "too many metrics": completed(metrics={str(number): 1.0 for number in range(103)}),
    "escapes as the name of a metric": completed(metrics={"\x1b[2J": 1.0}),
}


SaidByServer = pb.TurnAsked | pb.EpisodeEnded | pb.Beat | pb.RunEpisodeResponse | None
"""A part, a response after a while, or None where it says nothing any more and does not end."""
WHILE_S = 0.1


class Server(EnvironmentServiceServicer):
    """Says the same in every episode; a beat is said for ever."""

    def __init__(self, *said: SaidByServer) -> None:
        self._said = said

    async def RunEpisode(
        self, requests: AsyncIterator[pb.RunEpisodeRequest], context: Any
    ) -> AsyncIterator[pb.RunEpisodeResponse]:
        await anext(requests)
        for one in self._said:
            if one is None:
                await asyncio.Event().wait()
            while isinstance(one, pb.Beat):
                yield pb.RunEpisodeResponse(beat=one)
                await asyncio.sleep(0)
            if isinstance(one, pb.RunEpisodeResponse):
                await asyncio.sleep(WHILE_S)
                yield one
            elif isinstance(one, pb.TurnAsked):
                yield pb.RunEpisodeResponse(asked=one)
            else:
                yield pb.RunEpisodeResponse(ended=one)


@asynccontextmanager
async def served(*said: SaidByServer, episode_limit_s: float = math.inf) -> AsyncIterator[Environments]:
    server = grpc.aio.server()
    add_EnvironmentServiceServicer_to_server(Server(*said), server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        address = f"127.0.0.1:{port}"
        async with grpc.aio.insecure_channel(address) as channel, asyncio.timeout(LIMIT_S):
            pool = await pool_of(address, lambda _: channel)
            yield Environments("run", "theirs", {}, pool, LIMIT_S, episode_limit_s=episode_limit_s)
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


@pytest.mark.parametrize("name", ["خانه\u200cها", "\U0001f469\u200d\U0001f680"])
async def test_names_in_every_script_are_taken(name: str) -> None:
    async with served(completed(rewards={name: 1.0})) as run, run.begin(EpisodeStart("a")) as call:
        assert await call.asked() is None
        assert call.ended is not None and call.ended.rewards == {name: 1.0}


async def test_an_end_ends_an_episode_whatever_is_asked_for_behind_it() -> None:
    said = completed(rewards={"r": 1.0}), pb.TurnAsked(messages=[HELLO])
    async with served(*said) as run, run.begin(EpisodeStart("a")) as call:
        assert await call.asked() is None and await call.asked() is None
        assert call.ended is not None and call.ended.rewards == {"r": 1.0}


async def test_the_end_of_a_call_costs_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    monkeypatch.setattr(traceback, "format_exc", lambda: written.append("a traceback") or "")
    async with served(pb.TurnAsked(messages=[HELLO]), None) as run:
        async with run.begin(EpisodeStart("a")) as call:
            assert await call.asked()
            (sends,) = (task for task in asyncio.all_tasks() if "_consume_request_iterator" in repr(task))
        await asyncio.wait([sends], timeout=LIMIT_S)
    assert sends.done() and not written


async def test_a_server_that_asks_on_after_a_stop_gives_no_reward() -> None:
    asked = pb.TurnAsked(messages=[HELLO])
    said = asked, asked, completed(rewards={"r": 1.0})
    async with served(*said) as run, run.begin(EpisodeStart("a")) as call:
        assert await call.asked()
        ended = await call.stop("max_turns")
        assert ended.ending == "error" and "after its stop" in ended.failure and not ended.rewards


async def test_a_failure_is_told_at_its_most_length() -> None:
    failure = Finding(where="x" * 10_000, what="y" * 10_000, why="z" * 100_000)
    said = pb.EpisodeEnded(ending=pb.ENDING_ERROR, failure=failure)
    async with served(said) as run, run.begin(EpisodeStart("a")) as call:
        assert await call.asked() is None and call.ended is not None
        assert len(call.ended.failure) == 2_000 and len(call.ended.traceback) == 16_000


async def test_a_server_without_a_sign_of_life_has_lost_the_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "SILENT_S", 0.3)
    async with served(None) as run, run.begin(EpisodeStart("a")) as call:
        with pytest.raises(Unavailable, match="the environment replica is lost"):
            await call.asked()


async def test_an_episode_of_a_server_that_gives_signs_of_life_for_ever_ends_at_its_limit() -> None:
    async with served(pb.Beat(), episode_limit_s=0.3) as run, run.begin(EpisodeStart("a")) as call:
        assert await call.asked() is None and call.ended is not None
        assert call.ended.ending == "timeout" and "longer than 0.3 s over one episode" in call.ended.failure


async def test_an_episode_of_a_silent_server_ends_at_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "LATE_S", 0.1)
    async with served(None, episode_limit_s=0.3) as run, run.begin(EpisodeStart("a")) as call:
        assert await call.asked() is None and call.ended is not None and call.ended.ending == "timeout"


@pytest.mark.parametrize("waits", [True, False])
async def test_waits_on_the_replica_are_no_time_of_an_environment(waits: bool) -> None:
    beats = [pb.RunEpisodeResponse(beat=pb.Beat()) for _ in range(6)]
    for number, beat in enumerate(beats, 1):
        beat.waited.FromNanoseconds(int(waits * number * WHILE_S * 1e9))
    said = *beats, pb.TurnAsked(messages=[HELLO])
    async with served(*said, episode_limit_s=3 * WHILE_S) as run, run.begin(EpisodeStart("a")) as call:
        asked = await call.asked()
        assert (asked is not None) is waits and (call.ended is None) is waits


async def test_a_server_that_says_for_ever_that_it_waits_is_not_waited_for_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(environments, "WAITS_S", 5 * WHILE_S)
    beats = [pb.RunEpisodeResponse(beat=pb.Beat()) for _ in range(20)]
    for number, beat in enumerate(beats, 1):
        beat.waited.FromSeconds(3600 * number)
    said = *beats, pb.TurnAsked(messages=[HELLO])
    async with served(*said, episode_limit_s=WHILE_S) as run, run.begin(EpisodeStart("a")) as call:
        assert await call.asked() is None and call.ended is not None and call.ended.ending == "timeout"

"""Episodes that a test plays to their end by answers of its own, as the environment service does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from flotilla.common.v1.chat_pb2 import Message, ToolCall
from flotilla.environment.v1 import environment_pb2 as pb
from flotilla_environment.episode import play
from flotilla_environment.stage import Stage

Answer = str | dict[str, Any] | list[dict[str, Any]]


@dataclass
class Played:
    """What was said in an episode."""

    heard: list[list[str]] = field(default_factory=list)
    """The texts before each turn."""
    tools: list[dict[str, Any]] = field(default_factory=list)
    ended: pb.EpisodeEnded = field(default_factory=pb.EpisodeEnded)
    waited_s: float = 0.0


async def play_episode(
    stage: Stage,
    name: str,
    parameters: dict[str, Any],
    answers: Sequence[Answer] = (),
    *,
    prompt: str = "prompt",
    answer: str = "",
    info: dict[str, Any] | None = None,
    call_limit_s: float = 30.0,
) -> Played:
    """Play an episode by answers, each a text or calls; after the last one it is stopped."""
    start = pb.EpisodeStart(run_id="run", episode_id="one", attempt=1, seed=7, answer=answer)
    start.environment.environment = name
    start.environment.parameters.update(parameters)
    start.messages.append(Message(role="user", content=prompt))
    start.info.update(info or {})
    start.call_limit.FromNanoseconds(int(call_limit_s * 1e9))
    said, parts = Played(), asyncio.Queue[pb.RunEpisodeRequest]()
    left = [*answers]

    async def requests() -> AsyncIterator[pb.RunEpisodeRequest]:
        while True:
            yield await parts.get()

    episode = stage.episode(start)
    try:
        async with aclosing(play(episode, requests())) as responses:
            async for response in responses:
                if response.HasField("ended"):
                    said.ended, said.waited_s = response.ended, response.waited.ToNanoseconds() / 1e9
                if not response.HasField("asked"):
                    continue
                said.heard.append([message.content for message in response.asked.messages])
                said.tools = [json.loads(tool.function) for tool in response.asked.tools]
                parts.put_nowait(_part(left.pop(0)) if left else _STOP)
    finally:
        await episode.close()
    return said


_STOP = pb.RunEpisodeRequest(stop=pb.EpisodeStop(ending=pb.ENDING_MAX_TURNS))


def _part(answer: Answer) -> pb.RunEpisodeRequest:
    if isinstance(answer, str):
        message = Message(role="assistant", content=answer)
    else:
        calls = answer if isinstance(answer, list) else [answer]
        message = Message(role="assistant")
        for number, call in enumerate(calls):
            (name, arguments), *_ = call.items()
            message.tool_calls.append(ToolCall(id=str(number), name=name, arguments=json.dumps(arguments)))
    return pb.RunEpisodeRequest(written=pb.TurnWritten(message=message))

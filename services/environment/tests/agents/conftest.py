"""A stage of real processes and a real HTTP server, and a caller that answers turns as a coordinator does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from flotilla.common.v1.chat_pb2 import Message
from flotilla.environment.v1 import environment_pb2 as pb
from flotilla_core.config import EnvironmentServiceConfig
from flotilla_core.tensors import to_tensor
from flotilla_environment.episode import play
from flotilla_environment.stage import Stage

LIMIT_S = 60.0
Policy = Callable[[pb.TurnAsked], str | pb.TurnWritten]


def written(text: str) -> pb.TurnWritten:
    """Return a turn with one token for each character."""
    token_ids = np.array([*map(ord, text)], np.int32)
    return pb.TurnWritten(
        message=Message(role="assistant", content=text),
        finish=pb.TURN_FINISH_STOP,
        tokens=len(text),
        tokens_left=1000,
        prompt_tokens=7,
        token_ids=to_tensor(token_ids),
        logprobs=to_tensor(np.full(len(text), -0.5, np.float32)),
        token_bytes=[sign.encode() for sign in text],
    )


@dataclass
class Played:
    """An episode as its caller saw it."""

    asked: list[pb.TurnAsked] = field(default_factory=list)
    ended: pb.EpisodeEnded = field(default_factory=pb.EpisodeEnded)

    @property
    def said(self) -> list[list[str]]:
        return [[message.content for message in one.messages] for one in self.asked]

    @property
    def ending(self) -> str:
        return pb.Ending.Name(self.ended.ending).removeprefix("ENDING_").lower()


@dataclass
class Caller:
    """Plays episodes on a stage."""

    stage: Stage
    folder: Path

    async def plays(
        self,
        policy: Policy,
        *,
        turns: int = 100,
        prompt: str = "What is 6 x 7?",
        answer: str = "42",
        limit_s: float = 30.0,
        trusted: bool = True,
        run_id: str = "run",
        **parameters: Any,
    ) -> Played:
        start = pb.EpisodeStart(run_id=run_id, episode_id="episode", attempt=1, answer=answer, seed=3)
        start.environment.environment = "agent"
        start.environment.trusted = trusted
        start.environment.parameters.update({"folder": str(self.folder), **parameters})
        start.messages.add(role="user", content=prompt)
        start.info.update({"level": 2})
        start.call_limit.FromMilliseconds(int(limit_s * 1000))
        parts: asyncio.Queue[pb.RunEpisodeRequest | None] = asyncio.Queue()
        played, episode = Played(), self.stage.episode(start)
        try:
            async with asyncio.timeout(LIMIT_S), aclosing(play(episode, _all_of(parts))) as responses:
                async for response in responses:
                    if response.HasField("asked"):
                        parts.put_nowait(await _answered(policy, response.asked, len(played.asked) < turns))
                        played.asked.append(response.asked)
                    if response.HasField("ended"):
                        played.ended = response.ended
        finally:
            await episode.close()
        return played


async def _answered(policy: Policy, asked: pb.TurnAsked, goes_on: bool) -> pb.RunEpisodeRequest:
    if not goes_on:
        return pb.RunEpisodeRequest(stop=pb.EpisodeStop(ending=pb.ENDING_MAX_TURNS))
    said: Any = policy(asked)
    said = await said if asyncio.iscoroutine(said) else said
    return pb.RunEpisodeRequest(written=written(said) if isinstance(said, str) else said)


async def _all_of(parts: asyncio.Queue[pb.RunEpisodeRequest | None]) -> AsyncIterator[pb.RunEpisodeRequest]:
    while (part := await parts.get()) is not None:
        yield part


@asynccontextmanager
async def _staged(folder: Path, config: Mapping[str, Any] | None = None) -> AsyncIterator[Caller]:
    stage = Stage(EnvironmentServiceConfig.model_validate(config or {"isolation": {"unsafe": True}}))
    await stage.start()
    try:
        yield Caller(stage, folder)
    finally:
        await stage.stop()


@pytest.fixture
def staged() -> Any:
    """Give what makes a stage, by its section of the stack."""
    return _staged


@pytest.fixture
async def caller(tmp_path: Path) -> AsyncIterator[Caller]:
    async with _staged(tmp_path) as made:
        yield made


@pytest.fixture
async def few(tmp_path: Path) -> AsyncIterator[Caller]:
    """Play one episode at a time."""
    async with _staged(tmp_path, {"isolation": {"unsafe": True}, "gateway": {"sessions": 1}}) as made:
        yield made


KEY = "a key of at least sixteen"
Client = Callable[["Own"], Awaitable[None]]


@dataclass
class Own:
    """The session of an agent that is a part of the test."""

    url: str
    key: str
    turns_key: str
    task: dict[str, Any]
    http: aiohttp.ClientSession
    openai: AsyncOpenAI
    anthropic: AsyncAnthropic

    async def raw(
        self, body: Mapping[str, Any], path: str = "/v1/chat/completions", **headers: str
    ) -> tuple[int, dict[str, Any]]:
        """Send a request as no client of a vendor does."""
        shown = {"authorization": f"Bearer {self.key}"} | headers
        async with self.http.post(self.url + path, json=body, headers=shown) as said:
            return said.status, await said.json()

    async def chat(self, *texts: str, **options: Any) -> str:
        """Ask for a turn after these messages, of the user and the policy in turns."""
        roles = ("user", "assistant")
        messages: Any = [{"role": roles[at % 2], "content": text} for at, text in enumerate(texts)]
        said = await self.openai.chat.completions.create(model="any", messages=messages, **options)
        return said.choices[0].message.content or ""


@dataclass
class Beside:
    """Plays an episode whose agent is a function of the test."""

    caller: Caller
    leaves: Callable[[], object] = bool
    """Have the caller of the episode leave."""

    async def plays(self, policy: Policy, client: Client, **options: Any) -> Played:
        playing = asyncio.create_task(self.caller.plays(policy, **options))
        self.leaves = playing.cancel
        gateway = await self.caller.stage.agents.gateway.start()
        async with aiohttp.ClientSession() as http:
            key = {"authorization": f"Bearer {KEY}"}
            taken: dict[str, Any] = {}
            while not taken and not playing.done():
                async with http.get(f"{gateway}/tasks/next", headers=key) as said:
                    taken = await said.json() if said.status == 200 else {}
            if taken:
                url, own, turns = taken["session"].values()
                async with (
                    AsyncOpenAI(base_url=f"{url}/v1", api_key=turns, max_retries=0) as openai,
                    AsyncAnthropic(base_url=url, api_key=turns, max_retries=0) as anthropic,
                ):
                    session = Own(url, own, turns, taken["task"], http, openai, anthropic)
                    await client(session)
                    await session.raw({}, "/end")
        return await playing


@pytest.fixture
async def beside(caller: Caller, monkeypatch: pytest.MonkeyPatch) -> Beside:
    monkeypatch.setenv("FLOTILLA_AGENTS_KEY", KEY)
    return Beside(caller)

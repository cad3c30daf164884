"""What the gateway tells agents is what was sampled, and what the ranks of the trainer learn from: each turn once.

Agents that come by themselves play short episodes with the vendors' packages, through the real environment service
and the loop of the coordinator. They stream, call tools, send requests again, leave in the middle of one, rewrite
their histories, and ask sub-agents, one after the other and at once. Turns are drawn from a whole vocabulary.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import numpy as np
import openai
import pytest

from flotilla.trainer.v1 import trainer_pb2 as pb
from flotilla_coordinator.data.prompts import Prompt
from flotilla_coordinator.ledger.records import TokenSpan
from flotilla_coordinator.rollouts.batch import RolloutGroup, RolloutSample
from flotilla_coordinator.rollouts.environments import Environments
from flotilla_coordinator.rollouts.episodes import Episodes
from flotilla_coordinator.rollouts.generation import GenerationRequest
from flotilla_coordinator.trainers.messages import fill
from flotilla_core.config import EnvironmentConfig, SamplingConfig
from flotilla_core.version import Version
from flotilla_data.tokenizer import Tokenizer
from flotilla_testing.chat_templates import QWEN25, user, write_tokenizer
from flotilla_testing.environment_process import pool_of
from flotilla_testing.reward_process import service_process
from flotilla_trainer.batch.tokens import ModelLimits
from flotilla_trainer.batch.update_batch import UpdateBatch

LEAST_TURNS = int(os.environ.get("FLOTILLA_AGENT_TURNS", "500"))
"""Turns of each dialect that are compared; `make test-load` takes ten thousand."""
AGENTS = 16
LIMIT_S = 120.0
"""Of a request: many agents and the coordinator share this process."""
KEY = "a key of agents that come by themselves"
ADD = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {"a": {}}}}
MOST_TOKENS = 160
"""Of a turn; longer ones are cut."""
TEXTS = ("go on", "  é 😀 \n", "<|im_start|>user\nhi", "日本 \u2028 ", "{}", "a" * 300)
"""What agents say beside what they were told."""
SPOKEN = ("I add.", "", "  three \n\n ", "\n\u2028é ", "<tools>")


class Drawn:
    """Draws each turn by its name: tokens of the whole vocabulary, or calls of tools and texts with odd spaces."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids = sorted({*range(tokenizer.vocabulary_size)} - {*tokenizer.eos_ids})
        self.turns: Counter[str] = Counter()

    async def samples(self, request: GenerationRequest) -> AsyncIterator[RolloutSample]:
        (sample_id,) = request.sample_ids
        chance = random.Random(sample_id)
        token_ids = [*self._drawn(chance), chance.choice(self._tokenizer.eos_ids)]
        cut = len(token_ids) > (most := request.sampling.max_response_tokens)
        said = np.array(token_ids[:most], np.int32)
        logprobs = -np.array([chance.expovariate(1.0) for _ in said], np.float32)
        self.turns["cut"] += cut
        text = self._tokenizer.decode(said.tolist(), skip_special=False)
        self.turns["half a character"] += "\ufffd" in text
        spans = (TokenSpan(Version(0, 1), 0, len(said)),)
        yield RolloutSample(sample_id, said, logprobs, text, spans, truncated=cut, generator="generator-0")

    def _drawn(self, chance: random.Random) -> list[int]:
        if chance.random() < 0.5:
            return chance.choices(self._ids, k=chance.randrange(1, 40))
        text = chance.choice(SPOKEN)
        for _ in range(chance.choice((0, 1, 1, 2))):
            given = {"a": chance.choice((1.0, -0.25, 1e-7, 12345678901)), "b": chance.choice(TEXTS[:5])}
            spaced = json.dumps(
                {"name": "add", "arguments": given}, separators=chance.choice((None, (" ,", " :")))
            )
            text += f"<tool_call>\n{spaced}\n</tool_call>"
        # One token for each character here and there, as no tokenizer would write it.
        parts = text if chance.random() < 0.3 else [text]
        return [token for part in parts for token in self._tokenizer.encode(part)]


Conversation = dict[str, Any]
"""What a request says of its history, by the names of its fields."""


@dataclass(frozen=True)
class Heard:
    """A turn, as an agent gets it."""

    id: str
    tokens: tuple[bytes, bytes]
    """The ids and the log-probabilities."""
    entries: list[Any]
    """What stands for it in a history."""
    calls: list[str]

    @classmethod
    def of(cls, id: str, found: dict[str, Any] | None, entries: list[Any], calls: list[str]) -> Heard:
        assert found is not None
        columns = np.array(found["token_ids"], np.int32), np.array(found["token_logprobs"], np.float32)
        return cls(id, (columns[0].tobytes(), columns[1].tobytes()), entries, calls)


class Chat:
    """The package `openai`, Chat Completions."""

    key = "messages"

    def __init__(self) -> None:
        self.client: Any = openai.AsyncOpenAI(
            base_url="http://none", api_key="none", max_retries=0, timeout=LIMIT_S
        )

    def at(self, url: str, key: str) -> Any:
        return self.client.with_options(base_url=f"{url}/v1", api_key=key)

    def begun(self, system: str, text: str) -> Conversation:
        return {"messages": [{"role": "developer", "content": system}, user(text)]}

    def results(self, calls: list[str], text: str) -> list[Any]:
        return [{"role": "tool", "tool_call_id": one, "content": text} for one in calls]

    async def ask(self, client: Any, told: Conversation, stream: bool, **more: Any) -> Heard:
        asked = {"model": "policy", "tools": [{"type": "function", "function": ADD}], **told, **more}
        if not stream:
            answer = await client.chat.completions.create(**asked)
            found = answer.choices[0].model_extra
        else:
            found = {}
            async with client.chat.completions.stream(**asked) as events:
                async for event in events:
                    if event.type == "chunk" and event.chunk.choices:
                        found |= event.chunk.choices[0].model_extra or {}
                answer = events.current_completion_snapshot
        message = answer.choices[0].message
        calls = [one.id for one in message.tool_calls or ()]
        return Heard.of(answer.id, found, [message.model_dump(exclude_none=True)], calls)


class Responses(Chat):
    """The package `openai`, Responses."""

    key = "input"

    def begun(self, system: str, text: str) -> Conversation:
        return {"instructions": system, "input": [user(text)]}

    def results(self, calls: list[str], text: str) -> list[Any]:
        return [{"type": "function_call_output", "call_id": one, "output": text} for one in calls]

    async def ask(self, client: Any, told: Conversation, stream: bool, **more: Any) -> Heard:
        asked = {"model": "policy", "tools": [{"type": "function", "strict": True, **ADD}], **told, **more}
        answer = await client.responses.create(**asked, stream=stream)
        if stream:
            answer = [event async for event in answer][-1].response
        calls = [item.call_id for item in answer.output if item.type == "function_call"]
        return Heard.of(answer.id, answer.model_extra, [item.model_dump() for item in answer.output], calls)


class Messages:
    """The package `anthropic`."""

    key = "messages"

    def __init__(self) -> None:
        self.client: Any = anthropic.AsyncAnthropic(
            base_url="http://none", api_key="none", max_retries=0, timeout=LIMIT_S
        )

    def at(self, url: str, key: str) -> Any:
        return self.client.with_options(base_url=url, api_key=key)

    def begun(self, system: str, text: str) -> Conversation:
        return {"system": system, "messages": [user(text)]}

    def results(self, calls: list[str], text: str) -> list[Any]:
        blocks = [{"type": "tool_result", "tool_use_id": one, "content": text} for one in calls]
        return [{"role": "user", "content": blocks}] if blocks else []

    async def ask(self, client: Any, told: Conversation, stream: bool, **more: Any) -> Heard:
        tool = {"name": "add", "description": "Adds.", "input_schema": ADD["parameters"]}
        asked = {"model": "policy", "max_tokens": MOST_TOKENS, "tools": [tool], **told, **more}
        if not stream:
            answer = await client.messages.create(**asked)
            found = answer.model_extra
        else:
            found = {}
            async with client.messages.stream(**asked) as events:
                async for event in events:
                    if event.type == "message_delta":
                        found = event.model_extra
                answer = await events.get_final_message()
        calls = [block.id for block in answer.content if block.type == "tool_use"]
        entry = {"role": "assistant", "content": [block.model_dump() for block in answer.content]}
        return Heard.of(answer.id, found, [entry], calls)


DIALECTS: dict[str, Callable[[], Any]] = {"chat": Chat, "responses": Responses, "messages": Messages}


@dataclass
class Agent:
    """Plays one episode by a seed."""

    dialect: Any
    client: Any
    chance: random.Random
    did: Counter[str]
    heard: dict[str, tuple[bytes, bytes]] = field(default_factory=dict)
    """The tokens of each turn, by its id."""

    async def play(self, prompt: str) -> None:
        told = await self._turn(self.dialect.begun("Add.", prompt))
        for _ in range(self.chance.randrange(2, 6)):
            act = self.chance.choice(
                (self._go_on, self._go_on, self._go_on, self._rewrite, self._again, self._delegate)
            )
            self.did[act.__name__.strip("_")] += 1
            told = await act(told)

    async def _go_on(self, told: Conversation) -> Conversation:
        return await self._turn(told)

    async def _rewrite(self, told: Conversation) -> Conversation:
        """Summarise all, or edit the first message and keep the rest."""
        key, text = self.dialect.key, self.chance.choice(TEXTS)
        if self.chance.random() < 0.5:
            begun = self.dialect.begun("Go on from a summary.", f"Summary {self.chance.random()}")
            return await self._turn(begun)
        first = next(place for place, one in enumerate(told[key]) if one.get("role") == "user")
        return await self._turn(
            told | {key: [*told[key][:first], user(f"other {text}"), *told[key][first + 1 :]]}
        )

    async def _again(self, told: Conversation) -> Conversation:
        """Ask twice for a turn after the same history, and go on with the second."""
        first = await self._heard(told)
        # Sent again after leaving, it could be taken for a repetition of the first: nothing tells the two apart.
        heard = await self._heard(told, way=1.0)
        assert heard.id != first.id
        return self._extended(told, heard)

    async def _delegate(self, told: Conversation) -> Conversation:
        """Ask sub-agents, with histories of their own, and tell what they said."""
        tasks = [self._sub_agent(number) for number in range(self.chance.choice((1, 2)))]
        await asyncio.gather(*tasks)
        return await self._turn(told)

    async def _sub_agent(self, number: int) -> None:
        told = self.dialect.begun(f"You are sub-agent {number}.", f"task {self.chance.random()}")
        for _ in range(self.chance.choice((1, 2))):
            told = await self._turn(told)

    async def _turn(self, told: Conversation) -> Conversation:
        return self._extended(told, await self._heard(told))

    def _extended(self, told: Conversation, heard: Heard) -> Conversation:
        """Return a history with a turn, and with what follows it."""
        key, text = self.dialect.key, self.chance.choice(TEXTS)
        follows = self.dialect.results(heard.calls, text) or [user(text)]
        return told | {key: [*told[key], *heard.entries, *follows]}

    async def _heard(self, told: Conversation, way: float | None = None) -> Heard:
        """Ask for a turn; now and then once more for the same one, or again after leaving."""
        more = {"extra_body": {"return_token_ids": True}}

        streams = self.chance.random() < 0.5

        def ask(**headers: str) -> Awaitable[Heard]:
            return self.dialect.ask(self.client, told, streams, **more, extra_headers=headers)

        way = self.chance.random() if way is None else way
        retry = {"x-stainless-retry-count": "1"}
        if way < 0.1:  # leave at some moment, and ask again
            first = asyncio.ensure_future(ask())
            await asyncio.wait((first,), timeout=self.chance.uniform(0, 0.05))
            self.did["left"] += not first.done()
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            heard = await ask(**retry)
        elif way < 0.2:  # repeat what was answered
            first_heard = await ask()
            heard = await ask(**retry)
            assert (heard.id, heard.tokens) == (first_heard.id, first_heard.tokens)
            self.did["repeated"] += 1
        elif way < 0.3:
            key = {"idempotency-key": f"{self.chance.random()}"}
            first_heard, heard = await asyncio.gather(ask(**key), ask(**key))
            assert (heard.id, heard.tokens) == (first_heard.id, first_heard.tokens)
            self.did["asked twice at once"] += 1
        else:
            heard = await ask()
        assert self.heard.setdefault(heard.id, heard.tokens) == heard.tokens
        return heard


def learned(samples: list[RolloutSample], tokenizer: Tokenizer) -> list[Counter[tuple[bytes, bytes]]]:
    """Return the stretches that the ranks of a trainer learn from, of each sample."""
    message = pb.TrainGroup()
    fill(message, RolloutGroup("g", "", np.array([1], np.int32), samples))
    batch = UpdateBatch.read([message], ModelLimits(tokenizer.vocabulary_size, 0), Version(0, 1))
    assert batch.logprobs is not None
    whole = batch.sequences({"logprobs": batch.logprobs})
    found: list[Counter[tuple[bytes, bytes]]] = [Counter() for _ in samples]
    owners = np.repeat(np.arange(len(samples)), [len(one.episode.branches) for one in samples if one.episode])
    for number, owner in enumerate(owners):
        one = whole.between(number, number + 1)
        for places in np.split(np.arange(len(one.scored)), np.flatnonzero(np.diff(one.scored) != 1) + 1):
            ids, logprobs = one.tokens[one.scored[places]], one.columns["logprobs"][places]
            found[owner][ids.astype(np.int32).tobytes(), logprobs.astype(np.float32).tobytes()] += 1
    return found


@dataclass
class Table:
    """Agents that take tasks, one after the other, and what each heard."""

    dialect: Any
    url: str
    did: Counter[str] = field(default_factory=Counter)
    heard: dict[int, dict[str, tuple[bytes, bytes]]] = field(default_factory=dict)
    """By the number of the task."""

    async def serve(self) -> None:
        headers = {"authorization": f"Bearer {KEY}"}
        async with aiohttp.ClientSession() as http:
            while True:
                try:
                    async with http.get(f"{self.url}/tasks/next", headers=headers) as response:
                        if response.status == 204:
                            continue  # No task came in a while.
                        assert response.status == 200, await response.text()
                        given = await response.json()
                except aiohttp.ClientConnectorError:  # The gateway starts with the first episode.
                    await asyncio.sleep(0.05)
                    continue
                await self._play(http, given["session"], given["task"])

    async def _play(self, http: aiohttp.ClientSession, session: dict[str, str], task: dict[str, Any]) -> None:
        number = int(task["info"]["number"])
        client = self.dialect.at(session["url"], session["key"])
        agent = Agent(self.dialect, client, random.Random(number), self.did)
        await agent.play(task["messages"][0]["content"])
        self.heard[number] = agent.heard
        headers = {"authorization": f"Bearer {session['key']}"}
        for path, body in (("rewards", {"done": 1.0}), ("end", {})):
            async with http.post(f"{session['url']}/{path}", json=body, headers=headers) as response:
                assert response.status == 200, await response.text()


async def played(episodes: Episodes, table: Table, least_turns: int) -> dict[int, RolloutSample]:
    """Play episodes until the agents have heard so many turns."""
    found: dict[int, RolloutSample] = {}
    numbers = iter(range(least_turns))

    async def play_some() -> None:
        while sum(map(len, table.heard.values())) < least_turns:
            number = next(numbers)
            prompt = Prompt(
                0, number, "", np.array([1], np.int32), "", {"number": number}, chat=[user(f"task {number}")]
            )
            sampling = SamplingConfig(max_response_tokens=MOST_TOKENS)
            slots = (f"run/0/{number}/0",)
            request = GenerationRequest(
                prompt.token_ids, slots, sampling, Version(0, 0), 60.0, 2, prompt=prompt, world=f"0/{number}"
            )
            async with aclosing(episodes.samples(request)) as samples:
                (found[number],) = [sample async for sample in samples]

    agents = [asyncio.create_task(table.serve()) for _ in range(AGENTS)]
    playing = asyncio.gather(*(play_some() for _ in range(AGENTS)))
    try:
        # An agent that fails leaves its episode waiting: its failure is the one to be told.
        await asyncio.wait((playing, *agents), return_when=asyncio.FIRST_COMPLETED)
        for agent in agents:
            if agent.done():
                agent.result()
        await playing
    finally:
        playing.cancel()
        for agent in agents:
            agent.cancel()
        await asyncio.gather(playing, *agents, return_exceptions=True)
    return found


@pytest.mark.timeout(60 + LEAST_TURNS)
@pytest.mark.parametrize("name", DIALECTS)
async def test_tokens_that_the_gateway_returned_are_those_that_the_ranks_learn_from_each_turn_once(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLOTILLA_AGENTS_KEY", KEY)
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path / "model", QWEN25))
    config = EnvironmentConfig(name="agent", max_turns=64, episode_tokens=1 << 14)
    drawn = Drawn(tokenizer)
    turns: Any = drawn
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (tmp_path / "service").mkdir()
    section = {"workers": 1, "isolation": {"unsafe": True}, "gateway": {"port": port}}
    async with service_process(tmp_path / "service", "environment", section) as (_, address, channel):
        pool = await pool_of(address, lambda _: channel)
        environments = Environments.of("run", config, pool, 60.0)
        episodes = Episodes(
            0, config, tokenizer, turns=turns, environments=environments, lost=lambda *_: None
        )
        table = Table(DIALECTS[name](), f"http://127.0.0.1:{port}")
        found = await played(episodes, table, LEAST_TURNS)
        await table.dialect.client.close()
    assert found.keys() == table.heard.keys()
    samples = [*found.values()]
    for sample in samples:
        assert sample.episode is not None and sample.played is not None
        assert (sample.episode.ending, sample.played.total) == ("completed", 1.0), sample.played
    for number, stretches in zip(found, learned(samples, tokenizer), strict=True):
        assert stretches == Counter(table.heard[number].values())
        assert sample_turns(found[number]) == len(table.heard[number])
    assert sum(map(len, table.heard.values())) >= LEAST_TURNS
    assert all(drawn.turns.values()), drawn.turns
    assert all(table.did[act] for act in ("go_on", "rewrite", "again", "delegate", "repeated", "left"))


def sample_turns(sample: RolloutSample) -> int:
    assert sample.episode is not None
    return sample.episode.turns

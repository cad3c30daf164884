"""Agents of users, from the sampler to the sample: their requests are turns, and each token is trained as sampled."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from flotilla_coordinator.data.prompts import Prompt
from flotilla_coordinator.ledger.records import TokenSpan
from flotilla_coordinator.rollouts.batch import RolloutSample
from flotilla_coordinator.rollouts.environments import Environments, EpisodeCall, EpisodeStart
from flotilla_coordinator.rollouts.episode_messages import Asked
from flotilla_coordinator.rollouts.episodes import Episodes
from flotilla_coordinator.rollouts.generation import GenerationRequest
from flotilla_core.config import EnvironmentConfig, SamplingConfig
from flotilla_core.errors import Unavailable
from flotilla_core.version import Version
from flotilla_data.tokenizer import Tokenizer
from flotilla_testing.chat_templates import QWEN25, user, write_tokenizer
from flotilla_testing.environment_process import environment_process

PROMPT = Prompt(0, 0, "", np.array([1], np.int32), "42", {}, chat=[user("What is 6 x 7?")])
AGENT = """
import json
from openai import OpenAI

FUNCTION = {"name": "product", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}

def play(task):
    client = OpenAI(max_retries=0)
    history = list(task["messages"])
    for _ in range(8):
        asked = {"model": "any", "messages": history, "tools": [{"type": "function", "function": FUNCTION}]}
        choice = client.chat.completions.create(**asked, logprobs=True).choices[0]
        history.append(choice.message)
        for call in choice.message.tool_calls or ():
            given = json.loads(call.function.arguments)
            result = str(given["a"] * given["b"])
            history.append({"role": "tool", "content": result, "tool_call_id": call.id})
        if not choice.message.tool_calls:
            break
    short = [{"role": "user", "content": "Say it again: " + choice.message.content}]
    again = client.chat.completions.create(model="any", messages=short).choices[0].message.content
    return {"again": float(again == "It is 42."), "tokens": len(choice.logprobs.content)}
"""
CALL = '<tool_call>{"name": "product", "arguments": {"b": 7, "a": 6}}</tool_call>'


class Policy:
    """Calls the tool in the first turn, and says in the others what it was told."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.prompts: list[str] = []

    async def samples(self, request: GenerationRequest) -> AsyncIterator[RolloutSample]:
        (sample_id,) = request.sample_ids
        prompt = self.tokenizer.decode(request.prompt_token_ids.tolist(), skip_special=False)
        self.prompts.append(prompt)
        text = "It is 42." if "42" in prompt else CALL
        # One token for each character, as no tokenizer would write it.
        tokens = [token for sign in text for token in self.tokenizer.encode(sign)]
        token_ids = np.array([*tokens, self.tokenizer.eos_id], np.int32)
        logprobs = np.full(len(token_ids), -0.5, np.float32)
        spans = (TokenSpan(Version(0, 1), 0, len(token_ids)),)
        yield RolloutSample(sample_id, token_ids, logprobs, text, spans, generator="generator-0")


class Losing:
    """The environments of a run, of which the first episode loses its replica before its third turn."""

    def __init__(self, environments: Environments) -> None:
        self._environments = environments
        self.begun = 0

    @asynccontextmanager
    async def begin(self, start: EpisodeStart) -> AsyncIterator[EpisodeCall]:
        self.begun += 1
        loses = self.begun == 1
        async with self._environments.begin(start) as call:
            asked, turns = call.asked, 0

            async def asked_or_lost() -> Asked | None:
                nonlocal turns
                turns += 1
                if loses and turns == 3:
                    raise Unavailable("the replica is gone")
                return await asked()

            setattr(call, "asked", asked_or_lost)  # noqa: B010 - it is no attribute of its class
            yield call


async def test_an_agent_with_tools_is_trained_on_what_was_sampled_also_where_its_replica_was_lost(
    tmp_path: Path,
) -> None:
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path / "model", QWEN25))
    folder = tmp_path / "service"
    folder.mkdir()
    (folder / "agent.py").write_text(AGENT)
    config = EnvironmentConfig(
        name="agent",
        parameters={"function": "agent.py:play", "folder": str(folder), "correct": "last_number"},
        trusted=True,
    )
    policy: Any = Policy(tokenizer)
    async with environment_process(folder) as process:
        environments: Any = Losing(Environments.of("run", config, process.pool, 60.0))
        episodes = Episodes(
            0, config, tokenizer, turns=policy, environments=environments, lost=lambda *_: None
        )
        sampling = SamplingConfig(max_response_tokens=256)
        request = GenerationRequest(
            PROMPT.token_ids, ("run/0/0/0",), sampling, Version(0, 0), 60.0, 2, prompt=PROMPT, world="0/0"
        )
        async with aclosing(episodes.samples(request)) as samples:
            (sample,) = [sample async for sample in samples]
    assert sample.episode is not None and sample.played is not None and sample.trained is not None
    assert (sample.episode.ending, sample.episode.turns) == ("completed", 3), sample.outcome
    said = "It is 42."
    assert sample.played.verdicts[0].parts == {"again": 1.0, "correct": 1.0, "tokens": len(said) + 1}
    assert tokenizer.decode(sample.token_ids[sample.trained].tolist()) == CALL + said * 2
    assert environments.begun == 2 and len(policy.prompts) == 3, "what was sampled is not sampled again"
    assert '"name": "product"' in policy.prompts[0] and "<tool_response>\n42" in policy.prompts[1]
    assert len(sample.episode.branches) == 2, "the shortened history is one of its own"
    assert "6 x 7" not in policy.prompts[2]
    entries = json.loads(sample.episode.messages)
    assert {"resumed": 2} in entries and sample.attempt == 0

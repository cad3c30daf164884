"""Episodes from the sampler to the sample, with the real environment service, its calculator and its frozen lake."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np

from flotilla.trainer.v1 import trainer_pb2 as pb
from flotilla_algorithms import Outcomes, Step, gigpo
from flotilla_coordinator.data.prompts import Prompt
from flotilla_coordinator.ledger.records import DropReason, TokenSpan
from flotilla_coordinator.rollouts.batch import RolloutGroup, RolloutSample
from flotilla_coordinator.rollouts.environments import Environments
from flotilla_coordinator.rollouts.episodes import Episodes
from flotilla_coordinator.rollouts.generation import GenerationRequest
from flotilla_coordinator.trainers.messages import fill
from flotilla_core.config import EnvironmentConfig, PolicyConfig, SamplingConfig
from flotilla_core.version import Version
from flotilla_data.tokenizer import Tokenizer
from flotilla_testing.chat_templates import QWEN25, user, write_tokenizer
from flotilla_testing.environment_process import environment_process
from flotilla_testing.session_specs import wire_objective
from flotilla_trainer.batch.tokens import ModelLimits
from flotilla_trainer.batch.update_batch import UpdateBatch
from flotilla_trainer.objective.policy import PolicyObjective
from flotilla_trainer.wire.objective import ObjectiveSettings

CALL = '<tool_call>{"name": "calculate", "arguments": {"expression": "12 + 7 * 3"}}</tool_call>'
PROMPT = Prompt(0, 0, "", np.array([1], np.int32), "33", {}, chat=[user("What is 12 + 7 * 3?")])


class Policy:
    """Calls the calculator in the first turn, and says in the second what it was told."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.prompts: list[str] = []

    async def samples(self, request: GenerationRequest) -> AsyncIterator[RolloutSample]:
        (sample_id,) = request.sample_ids
        prompt = self.tokenizer.decode(request.prompt_token_ids.tolist(), skip_special=False)
        self.prompts.append(prompt)
        told = prompt.rpartition("<tool_response>\n")[2].partition("\n")[0]
        text = f"It is {told}." if "<tool_response>" in prompt else CALL
        # One token for each character, as no tokenizer would write it.
        tokens = [token for sign in text for token in self.tokenizer.encode(sign)]
        token_ids = np.array([*tokens, self.tokenizer.eos_id], np.int32)
        logprobs = np.full(len(token_ids), -0.5, np.float32)
        spans = (TokenSpan(Version(0, 1), 0, len(token_ids)),)
        yield RolloutSample(sample_id, token_ids, logprobs, text, spans, generator="generator-0")


async def test_a_policy_that_calls_the_calculator_earns_the_reward_of_its_environment(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path / "model", QWEN25))
    config = EnvironmentConfig(name="calculator")
    policy: Any = Policy(tokenizer)
    (tmp_path / "service").mkdir()
    async with environment_process(tmp_path / "service") as process:
        environments = Environments.of("run", config, process.pool, 60.0)
        episodes = Episodes(
            0, config, tokenizer, turns=policy, environments=environments, lost=lambda *_: None
        )
        slots = tuple(f"run/0/0/{number}" for number in range(8))
        sampling = SamplingConfig(max_response_tokens=256)
        request = GenerationRequest(
            PROMPT.token_ids, slots, sampling, Version(0, 0), 60.0, 2, prompt=PROMPT, world="0/0"
        )
        async with aclosing(episodes.samples(request)) as samples:
            played = [sample async for sample in samples]
    assert {sample.sample_id for sample in played} == set(slots)
    for sample in played:
        assert sample.episode is not None and sample.played is not None and sample.trained is not None
        assert (sample.episode.ending, sample.episode.turns) == ("completed", 2), sample.outcome
        assert sample.played.verdicts[0].parts["correct"] == 1.0 and sample.text == "It is 33."
        written = tokenizer.decode(sample.token_ids[sample.trained].tolist())
        assert written == CALL + "It is 33." and "<tool_response>\n33" not in written
        assert len(sample.episode.branches) == 1
        roles = [entry.get("role") for entry in json.loads(sample.episode.messages)]
        assert [role for role in roles if role] == [
            *roles[1 : len(roles) - 4],
            "assistant",
            "tool",
            "assistant",
        ]
    assert all('"name": "calculate"' in prompt for prompt in policy.prompts)


BESIDE = '''
import secrets, time
from flotilla_environment import Begun, Environment, Reply

class Beside(Environment):
    """Says nothing twice, and blocks where the data says so."""

    def begin(self, task):
        self.task, self.turns = task, 0
        return Begun(secrets.token_hex(8))

    def reply(self, turn):
        self.turns += 1
        if self.turns == 3 and "blocks" in self.task.info:
            time.sleep(3600)
        return Reply(secrets.token_hex(8), done=self.turns == 4, rewards={"end": 1.0} if self.turns == 4 else {})
'''


class InStep:
    """Lets no episode go on to its second turn before all have come there."""

    def __init__(self, tokenizer: Tokenizer, episodes: int) -> None:
        self.token_ids = np.array([*tokenizer.encode("on"), tokenizer.eos_id], np.int32)
        self.all_are_here = asyncio.Barrier(episodes)
        self.begun: set[str] = set()

    async def samples(self, request: GenerationRequest) -> AsyncIterator[RolloutSample]:
        (sample_id,) = request.sample_ids
        if sample_id.endswith("/1") and sample_id not in self.begun:
            self.begun.add(sample_id)
            await self.all_are_here.wait()
        length = len(self.token_ids)
        spans = (TokenSpan(Version(0, 1), 0, length),)
        logprobs = np.full(length, -0.5, np.float32)
        yield RolloutSample(sample_id, self.token_ids, logprobs, "on", spans, generator="generator-0")


async def test_where_an_episode_blocks_its_worker_it_alone_fails_and_the_others_begin_again(
    tmp_path: Path,
) -> None:
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path / "model", QWEN25))
    file = tmp_path / "service" / "beside.py"
    file.parent.mkdir()
    file.write_text(BESIDE)
    config = EnvironmentConfig(name=f"{file}:Beside", call_timeout_s=1.0)
    policy: Any = InStep(tokenizer, 4)
    lost: list[Any] = []
    async with environment_process(file.parent) as process:
        environments = Environments.of("run", config, process.pool, 60.0)
        episodes = Episodes(
            0, config, tokenizer, turns=policy, environments=environments, lost=lambda *one: lost.append(one)
        )

        async def played(number: int) -> RolloutSample:
            row = Prompt(0, number, "go", np.array([1], np.int32), "", {"blocks": True} if number < 2 else {})
            request = GenerationRequest(
                row.token_ids,
                (f"run/0/{number}/0",),
                SamplingConfig(),
                Version(0, 0),
                60.0,
                max_attempts=1,
                prompt=row,
                world=f"0/{number}",
            )
            async with aclosing(episodes.samples(request)) as samples:
                (sample,) = [sample async for sample in samples]
            return sample

        async with asyncio.timeout(60):
            blocking, other, *calm = await asyncio.gather(*map(played, range(4)))
    for one in (blocking, other):
        assert one.drop_reason is DropReason.ENVIRONMENT_TIMEOUT and one.outcome is not None
        assert "longer than 1 s" in one.outcome.failure and "call_timeout_s" in one.outcome.failure
    assert [one.attempt > 0 and one.played and one.played.total for one in calm] == [1.0, 1.0]
    assert not lost, "what is another one's fault costs no attempt"


class Walker:
    """Walks over the lake as the last letter of its sample says: a move a turn."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    async def samples(self, request: GenerationRequest) -> AsyncIterator[RolloutSample]:
        (sample_id,) = request.sample_ids
        slot, _, turn = sample_id.rpartition("/")
        text = WALKS[slot[-1]][int(turn)]
        token_ids = np.array([*self.tokenizer.encode(text), self.tokenizer.eos_id], np.int32)
        logprobs = np.full(len(token_ids), -0.5, np.float32)
        spans = (TokenSpan(Version(0, 1), 0, len(token_ids)),)
        yield RolloutSample(sample_id, token_ids, logprobs, text, spans, generator="generator-0")


AROUND = ["right", "left", "down", "right", "down", "right"]
WALKS = {"a": AROUND[2:], "b": AROUND, "c": ["down", "down", *["up"] * 4]}
"""The second walk comes back to its start and goes on as the first one; the third one finds no goal in its turns."""
STATES = {"a": [0, 3, 4, 7], "b": [0, 1, 0, 3, 4, 7], "c": [0, 3, 6, 3, 0, 0]}
"""The places in which the turns are asked, row by row."""


async def test_turns_on_a_lake_are_compared_with_those_that_were_asked_at_the_same_place(
    tmp_path: Path,
) -> None:
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path / "model", QWEN25))
    config = EnvironmentConfig(name="frozen_lake", parameters={"size": 3, "holes": 0.0}, max_turns=6)
    walker: Any = Walker(tokenizer)
    (tmp_path / "service").mkdir()
    async with environment_process(tmp_path / "service") as process:
        environments = Environments.of("run", config, process.pool, 60.0)
        episodes = Episodes(
            0, config, tokenizer, turns=walker, environments=environments, lost=lambda *_: None
        )
        slots = tuple(f"run/0/0/{name}" for name in WALKS)
        sampling = SamplingConfig(max_response_tokens=64)
        request = GenerationRequest(
            PROMPT.token_ids, slots, sampling, Version(0, 0), 60.0, 2, prompt=PROMPT, world="0/0"
        )
        async with aclosing(episodes.samples(request)) as samples:
            found = {sample.sample_id[-1]: sample async for sample in samples}
    played = {name: found[name] for name in WALKS}
    keys: dict[int, int] = {}
    for name, sample in played.items():
        assert sample.episode is not None and sample.played is not None and sample.played.total is not None
        assert len(sample.episode.turn_states) == sample.episode.turns == len(STATES[name])
        for place, key in zip(STATES[name], sample.episode.turn_states, strict=True):
            assert key and keys.setdefault(place, key) == key
        sample.reward = sample.played.total
    assert len({*keys.values()}) == len(keys) and [one.reward for one in played.values()] == [1.0, 1.0, 0.0]
    message = pb.TrainGroup()
    fill(message, RolloutGroup("g", "", np.array([1], np.int32), [*played.values()]))
    section = PolicyConfig.model_validate({"type": "gigpo", "advantage": {"step_weight": 0.5}})
    front = PolicyObjective(
        ObjectiveSettings.from_wire(wire_objective("policy", section.model_dump(mode="json")))
    )
    batch = UpdateBatch.read([message], ModelLimits(tokenizer.vocabulary_size, 0), Version(0, 1))
    made, _ = front.sequences(batch, 0)
    steps = [
        [
            Step(place, len(tokenizer.encode(move)) + 1, float(name != "c" and turn == len(WALKS[name]) - 1))
            for turn, (place, move) in enumerate(zip(STATES[name], WALKS[name], strict=True))
        ]
        for name in WALKS
    ]
    lengths = [sum(step.tokens for step in walk) for walk in steps]
    expected = gigpo(Outcomes.of([1.0, 1.0, 0.0], [3], lengths), steps, gamma=0.95, step_weight=0.5)
    np.testing.assert_allclose(made.columns["advantages"], expected, rtol=1e-6)

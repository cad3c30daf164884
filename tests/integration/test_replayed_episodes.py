"""A recorded episode is played again by its environment, which says and gives the same, or it is told where not."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flotilla_cli.env_replay import Replayed, _entries, _recorded, _start
from flotilla_cli.env_trial import played
from flotilla_coordinator.data.prompts import Prompt
from flotilla_coordinator.ledger.records import TokenSpan
from flotilla_coordinator.records.rollouts import RolloutRecord
from flotilla_coordinator.rollouts.batch import Batch, RolloutGroup, RolloutSample
from flotilla_coordinator.rollouts.environments import Environments
from flotilla_coordinator.rollouts.episodes import Episodes
from flotilla_coordinator.rollouts.generation import GenerationRequest
from flotilla_core.config import IsolationConfig, RunConfig, SamplingConfig
from flotilla_core.version import Version
from flotilla_data.tokenizer import Tokenizer
from flotilla_testing.chat_templates import QWEN25, user, write_tokenizer
from flotilla_testing.environment_process import environment_process

pytestmark = pytest.mark.timeout(120)
COUNTS = '''
from flotilla_environment import Begun, Environment, Reply

class Counts(Environment):
    """Draws a number by its seed, and counts the turns up to the third."""

    def begin(self, task):
        self.number, self.turns = task.seed % 1000, 0
        return Begun(f"{self.number} {task.answer} {task.info['level']}")

    def reply(self, turn):
        self.turns += 1
        done = self.turns == 3
        rewards = {"end": 1.0} if done else {}
        return Reply(f"{turn.content} {self.number + self.turns}", reward=0.25, done=done, rewards=rewards)
'''
LAST_ROW = Prompt(0, 4, "", np.array([1], np.int32), "33", {"level": 2}, chat=[user("Count.")])
SAMPLE = "run/0/4/0"


class Says:
    """Says the number of its turn."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    async def samples(self, request: GenerationRequest) -> AsyncIterator[RolloutSample]:
        (sample_id,) = request.sample_ids
        text = f"turn {sample_id.rpartition('/')[2]}"
        token_ids = np.array([*self._tokenizer.encode(text), self._tokenizer.eos_id], np.int32)
        spans = (TokenSpan(Version(0, 1), 0, len(token_ids)),)
        logprobs = np.full(len(token_ids), -0.5, np.float32)
        yield RolloutSample(sample_id, token_ids, logprobs, text, spans, generator="generator-0")


def run_with(file: Path, **environment: Any) -> RunConfig:
    described = {
        "name": "run",
        "seed": 11,
        "steps": 1,
        "data": {"train": "/x.jsonl"},
        "environment": {"name": f"{file}:Counts", **environment},
    }
    return RunConfig.model_validate(described)


async def record(folder: Path, config: RunConfig) -> None:
    """Play an episode as a run does, and record it."""
    tokenizer = Tokenizer.load(write_tokenizer(folder / "model", QWEN25))
    policy: Any = Says(tokenizer)
    assert config.environment is not None
    async with environment_process(folder / "service") as process:
        environments = Environments.of("run", config.environment, process.pool, 60.0)
        episodes = Episodes(
            config.seed,
            config.environment,
            tokenizer,
            turns=policy,
            environments=environments,
            lost=lambda *_: None,
        )
        prompt, sampling = LAST_ROW, SamplingConfig()
        request = GenerationRequest(
            prompt.token_ids, (SAMPLE,), sampling, Version(0, 0), 60.0, 2, prompt=prompt, world="0/4"
        )
        async with aclosing(episodes.samples(request)) as samples:
            (one,) = [sample async for sample in samples]
    assert one.played is not None and one.played.total is not None, one.outcome
    one.reward = one.played.total
    group = RolloutGroup(
        "run/0/4", "", LAST_ROW.token_ids, [one], answer="33", info=LAST_ROW.info, chat=LAST_ROW.chat
    )
    RolloutRecord(folder / "run" / "rollouts", "run", 1.0, tokenizer.digest).write(
        Batch(0, [group], {}), Version(0, 1)
    )


def replayed(folder: Path, config: RunConfig) -> Replayed:
    prompt, episode = _recorded(folder / "run", SAMPLE)
    again = Replayed(_entries(episode), quiet=True)
    isolation = IsolationConfig().model_dump_json()
    again.compare_end(played(_start(config, "run", SAMPLE, prompt), isolation, again.reply))
    return again


@pytest.mark.parametrize("limits", [{}, {"max_turns": 2}], ids=["to its end", "to the limit of turns"])
async def test_a_recorded_episode_is_the_same_again(tmp_path: Path, limits: dict[str, int]) -> None:
    file = tmp_path / "service" / "counts.py"
    file.parent.mkdir()
    file.write_text(COUNTS)
    config = run_with(file, **limits)
    await record(tmp_path, config)
    again = replayed(tmp_path, config)
    assert (again.differs, again.turns) == ("", limits.get("max_turns", 3))


async def test_it_is_told_where_an_environment_says_something_else(tmp_path: Path) -> None:
    file = tmp_path / "service" / "counts.py"
    file.parent.mkdir()
    file.write_text(COUNTS)
    config = run_with(file)
    await record(tmp_path, config)
    for changed, said, turns in (
        (("self.turns += 1", "self.turns += 2"), "before turn 2 the environment said", 1),
        (("self.turns == 3", "self.turns == 2"), "it ended after 2 turns (completed)", 2),
        (("self.turns == 3", "self.turns == 4"), "it asks for turn 4, where the recorded episode ended", 3),
        (('"end": 1.0', '"end": 0.5'), "at the end: the rewards was {'end': 1.0}, and is {'end': 0.5}", 3),
    ):
        file.write_text(COUNTS.replace(*changed))
        again = replayed(tmp_path, config)
        assert again.differs.startswith(said) and again.turns == turns, again.differs

"""Evaluation: every held-out prompt gets equally many answers, and pass@k is that of all teams of k."""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flotilla_coordinator.evaluation.evaluate import Evaluation, Evaluator, pass_at
from flotilla_coordinator.rollouts.batch import RolloutSample
from flotilla_coordinator.rollouts.generation import GenerationRequest
from flotilla_coordinator.rollouts.scoring import Outcome
from flotilla_core.config import SamplingConfig
from flotilla_core.errors import UserCodeError
from flotilla_core.version import Version

VERSION = Version(0, 4)


class Generation:
    """Answers with the number of the sample, the last one first."""

    def __init__(self) -> None:
        self.asked: list[GenerationRequest] = []

    async def samples(self, request: GenerationRequest) -> AsyncGenerator[RolloutSample]:
        self.asked.append(request)
        for sample_id in reversed(request.sample_ids):
            number = int(sample_id.rpartition("/")[2])
            yield RolloutSample(sample_id, np.array([number], np.int32), None, str(number))


class Scorer:
    """The first answers to a prompt are right, as many as the prompt's number."""

    failing = False

    async def score(self, items: list[Any]) -> dict[str, Outcome]:
        assert len(items) <= 64
        outcomes = {}
        for item in items:
            prompt, number = map(int, item.sample_id.split("/")[-2:])
            outcomes[item.sample_id] = Outcome(None, "broken") if self.failing else Outcome(number < prompt)
        return outcomes


def evaluator(generation: Generation, scorer: Scorer, prompts: int, drawn: int) -> Evaluator:
    tokens = np.array([1], np.int32)
    held_out: Any = [
        SimpleNamespace(index=i, token_ids=tokens, prompt_text="", answer="", info={}) for i in range(prompts)
    ]
    parts: Any = (generation, scorer)
    return Evaluator("run", held_out, *parts, SamplingConfig(temperature=0.7), drawn, timeout_s=5.0)


async def test_each_prompt_is_answered_so_often_and_counted_by_its_own_answers() -> None:
    generation = Generation()
    found = await evaluator(generation, Scorer(), prompts=5, drawn=4).evaluate(VERSION, step=3)
    assert {len(request.sample_ids) for request in generation.asked} == {4}
    assert {request.sampling.temperature for request in generation.asked} == {0.7}
    assert {request.min_version for request in generation.asked} == {VERSION}
    right = [0, 1, 2, 3, 4]
    assert found.accuracy == found.metrics["eval/mean@4"] == sum(right) / 20
    assert found.metrics["eval/pass@4"] == 4 / 5
    assert set(found.metrics) == {"eval/mean@4", "eval/pass@1", "eval/pass@2", "eval/pass@4"}


async def test_one_answer_to_each_prompt_is_accuracy_alone() -> None:
    found = await evaluator(Generation(), Scorer(), prompts=4, drawn=1).evaluate(VERSION, step=0)
    assert found == Evaluation(3 / 4)


async def test_an_answer_that_cannot_be_scored_is_no_wrong_answer() -> None:
    scorer = Scorer()
    scorer.failing = True
    with pytest.raises(UserCodeError, match="6 of 6 held-out answers could not be scored"):
        await evaluator(Generation(), scorer, prompts=3, drawn=2).evaluate(VERSION, step=0)


@pytest.mark.parametrize("drawn", [2, 5, 6])
def test_pass_at_k_is_the_share_of_all_teams_of_k_with_a_right_answer(drawn: int) -> None:
    for right, k in itertools.product(range(drawn + 1), range(1, drawn + 1)):
        teams = list(itertools.combinations(range(drawn), k))
        passing = sum(any(answer < right for answer in team) for team in teams)
        assert pass_at(k, right, drawn) == pytest.approx(passing / len(teams))


def test_pass_at_1_is_the_mean_and_k_stops_at_the_largest_power_of_two() -> None:
    found = Evaluation.of_answers([0, 3, 6], drawn=6)
    assert found.metrics["eval/pass@1"] == pytest.approx(found.accuracy)
    assert [name for name in found.metrics if "pass" in name] == ["eval/pass@1", "eval/pass@2", "eval/pass@4"]

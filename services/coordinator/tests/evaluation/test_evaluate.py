"""Evaluation: every prompt of a set gets equally many answers, and its figures are those of their rewards."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from flotilla_coordinator.data.prompts import Prompt
from flotilla_coordinator.data.training_sets import held_out_sets
from flotilla_coordinator.evaluation.evaluate import (
    Evaluation,
    Evaluator,
    HeldOutPrompts,
    HeldOutResult,
)
from flotilla_coordinator.evaluation.figures import figures_of, majority_at, pass_at, vote_of
from flotilla_coordinator.ledger.verdicts import TermVerdict
from flotilla_coordinator.rollouts.batch import RolloutSample
from flotilla_coordinator.rollouts.generation import GenerationRequest
from flotilla_coordinator.rollouts.scoring import Needs, Outcome
from flotilla_core.config import RunConfig, SamplingConfig, dump_yaml, load_text
from flotilla_core.errors import UserCodeError
from flotilla_core.evaluations import before, before_and_after, held_out_text
from flotilla_core.version import Version

VERSION = Version(0, 4)
RATES = {"unscored_rate", "unverifiable_rate", "part:exact[acc]"}


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

    def __init__(self, failing: tuple[str, ...] = (), unverifiable: tuple[str, ...] = ()) -> None:
        self.failing = failing
        """The ends of the ids of answers that have no reward."""
        self.unverifiable = unverifiable
        self.groups: list[list[str]] = []
        """The groups of each call."""

    async def needs(self) -> Needs:
        return Needs(token_ids=True)

    async def score(self, items: list[Any]) -> dict[str, Outcome]:
        assert len(items) <= 64
        self.groups.append([item.group for item in items])
        assert all(item.HasField("token_ids") and item.HasField("step") for item in items)
        return {item.sample_id: self.outcome(item.sample_id) for item in items}

    def outcome(self, sample_id: str) -> Outcome:
        if sample_id.endswith(self.failing):
            return Outcome(None, "broken")
        if sample_id.endswith(self.unverifiable):
            return Outcome(None, "endless", unverifiable=True)
        prompt, number = map(int, sample_id.split("/")[-2:])
        read = TermVerdict("exact", value=1.0, parts={"acc": number / 4}, extracted=str(number < prompt))
        return Outcome(
            float(number < prompt), terms=(0.5, 1.0), verdicts=(TermVerdict("short", value=0.5), read)
        )


def held_out(name: str, scorer: Scorer, prompts: int, drawn: int) -> HeldOutPrompts:
    tokens = np.array([1], np.int32)
    rows = [Prompt(0, index, "1+1=", tokens, "2", {"level": index}) for index in range(prompts)]
    judge: Any = scorer
    return HeldOutPrompts(name, rows, judge, SamplingConfig(temperature=0.7), drawn)


def evaluator(generation: Generation, *sets: HeldOutPrompts) -> Evaluator:
    source: Any = generation
    return Evaluator("run", sets, source, timeout_s=5.0, max_failure_rate=0.5)


async def test_each_prompt_is_answered_so_often_and_counted_by_its_own_answers() -> None:
    generation = Generation()
    found = await evaluator(generation, held_out("sums", Scorer(), 5, 4)).evaluate(VERSION, step=3)
    assert {len(request.sample_ids) for request in generation.asked} == {4}
    assert {request.sampling.temperature for request in generation.asked} == {0.7}
    assert {request.min_version for request in generation.asked} == {VERSION}
    assert generation.asked[1].sample_ids[2] == "run/eval/0.4/1/2"
    right = [0, 1, 2, 3, 4]
    assert found.accuracy == found.metrics["eval/mean@4"] == sum(right) / 20
    assert found.metrics["eval/pass@4"] == 4 / 5
    error = statistics.stdev(count / 4 for count in right) / 5**0.5
    assert found.metrics["eval/accuracy_stderr"] == pytest.approx(error)
    assert found.metrics["eval/reward_mean"] == found.accuracy
    figures = {"mean@4", "maj@2", "maj@4", "pass@1", "pass@2", "pass@4"}
    figures |= {f"stderr_{figure}" for figure in figures}
    figures |= {"accuracy_stderr", "reward_mean", "reward_stderr"} | RATES
    assert set(found.metrics) == {f"eval/{figure}" for figure in figures}
    passed = statistics.stdev([0, 1, 1, 1, 1]) / 5**0.5
    assert found.metrics["eval/stderr_pass@4"] == pytest.approx(passed)


async def test_one_answer_to_each_prompt_has_a_mean_and_an_error_alone() -> None:
    found = await evaluator(Generation(), held_out("sums", Scorer(), 4, 1)).evaluate(VERSION, step=0)
    assert found.accuracy == 3 / 4
    figures = {"accuracy_stderr", "reward_mean", "reward_stderr"} | RATES
    assert set(found.metrics) == {f"eval/{figure}" for figure in figures}


async def test_every_answer_is_kept_with_its_row_and_the_parts_of_its_reward() -> None:
    found = await evaluator(Generation(), held_out("sums", Scorer(), 3, 2)).evaluate(VERSION, step=3)
    lines = [answer.record(3, VERSION) for answer in found.answers]
    assert [(line["prompt_index"], line["response"]) for line in lines] == [
        (prompt, str(number)) for prompt in range(3) for number in range(2)
    ]
    last = lines[-1]
    assert (last["step"], last["policy_version"], last["set"]) == (3, "0.4", "sums")
    assert (last["prompt"], last["answer"], last["info"], last["reward"]) == ("1+1=", "2", {"level": 2}, 1.0)
    assert [part["reward"] for part in last["reward_parts"]] == ["short", "exact", "exact[acc]"]
    assert last["verdicts"][0] == {"reward": "short", "outcome": "scored", "value": 0.5}
    assert last["verdicts"][1]["extracted"] == "True" and last["failure"] == ""


async def test_each_set_has_its_figures_and_the_first_one_the_plain_names_too() -> None:
    generation = Generation()
    sets = held_out("easy", Scorer(), 4, 1), held_out("hard", Scorer(), 2, 1)
    found = await evaluator(generation, *sets).evaluate(VERSION, step=0)
    assert (found.accuracy, found.metrics["eval/easy/accuracy"], found.metrics["eval/hard/accuracy"]) == (
        0.75,
        0.75,
        0.5,
    )
    assert found.metrics["eval/hard/reward_mean"] == 0.5 and found.metrics["eval/reward_mean"] == 0.75
    assert [(name, one.prompts) for name, one in found.sets.items()] == [("easy", 4), ("hard", 2)]
    assert found.sets["hard"].metrics["eval/accuracy"] == 0.5
    names = [name for request in generation.asked for name in request.sample_ids]
    assert len(set(names)) == 6, "two sets never share a sample"
    assert [answer.held_out for answer in found.answers] == ["easy"] * 4 + ["hard"] * 2


def test_a_held_out_set_takes_what_it_leaves_out_from_the_evaluation() -> None:
    text = """name: run
steps: 3
data: {train: /x.jsonl}
reward_mode: max
rewards: [{reward: numeric}]
evaluation:
  success_at: 0.5
  max_prompts: 40
  data:
    - path: /a.jsonl
    - {path: /b.jsonl, name: sums, success_at: 0.0, temperature: 0.7, samples_per_prompt: 4, rewards: [{reward: exact}]}
"""
    config = load_text(RunConfig, text)
    plain, own = held_out_sets(config)
    assert (plain.name, plain.success_at, plain.samples_per_prompt, plain.temperature) == ("a", 0.5, 1, 0.0)
    assert (own.name, own.success_at, own.samples_per_prompt, own.temperature) == ("sums", 0.0, 4, 0.7)
    assert (own.max_prompts, own.max_response_tokens) == (40, config.rollout.sampling.max_response_tokens)
    assert (plain.rewards[0].reward, own.rewards[0].reward) == ("numeric", "exact")
    assert (plain.reward_mode, own.reward_mode) == ("max", "weighted")
    assert held_out_sets(load_text(RunConfig, dump_yaml(config))) == [plain, own]


@pytest.mark.parametrize(("failing", "says"), [(("",), "6 of 6"), (("1/0", "1/1", "2/0", "2/1"), "4 of 6")])
async def test_an_evaluation_of_which_too_much_cannot_be_scored_fails(
    failing: tuple[str, ...], says: str
) -> None:
    with pytest.raises(UserCodeError, match=f"{says} held-out answers could not be scored"):
        await evaluator(Generation(), held_out("sums", Scorer(failing), 3, 2)).evaluate(VERSION, step=0)


async def test_an_answer_that_cannot_be_scored_is_counted_and_is_no_wrong_answer() -> None:
    failing = ("/0/0", "/0/1", "/0/2", "/0/3", "/3/3")
    found = await evaluator(Generation(), held_out("sums", Scorer(failing), 5, 4)).evaluate(VERSION, step=0)
    # Prompt 0 has no answer that counts, and prompt 3 has three that are right.
    assert found.accuracy == pytest.approx((1 / 4 + 2 / 4 + 3 / 3 + 1) / 4)
    assert found.metrics["eval/pass@2"] == pytest.approx((0.5 + 5 / 6 + 1 + 1) / 4)
    assert found.metrics["eval/pass@4"] == 1.0
    assert found.metrics["eval/unscored_rate"] == 5 / 20
    assert found.unscored == "5 of 20 held-out answers could not be scored: broken"
    assert held_out_text(found.figures).endswith(", 25.0% not scored")
    lost = [answer.record(0, VERSION) for answer in found.answers if answer.reward is None]
    assert [line["failure"] for line in lost] == ["broken"] * 5
    assert {line["reward"] for line in lost} == {None}


async def test_a_response_that_made_a_verifier_fail_stays_in_the_figures_whatever_training_does_with_it() -> (
    None
):
    sums = held_out("sums", Scorer(unverifiable=("/1/0",)), 2, 2)
    found = await evaluator(Generation(), sums).evaluate(VERSION, step=0)
    assert (found.accuracy, found.metrics["eval/unverifiable_rate"]) == (0.0, 0.25)
    assert found.metrics["eval/unscored_rate"] == 0 and found.unscored == ""
    lenient = await evaluator(Generation(), replace(sums, success_at=0.0)).evaluate(VERSION, step=0)
    assert lenient.accuracy == 0.75, "a response that is dropped is never right"


async def test_the_answers_to_a_prompt_are_scored_together() -> None:
    scorer = Scorer()
    await evaluator(Generation(), held_out("sums", scorer, 20, 6)).evaluate(VERSION, step=2)
    assert [len(groups) for groups in scorer.groups] == [60, 60]
    assert scorer.groups[1][:7] == ["run/eval/0.4/10"] * 6 + ["run/eval/0.4/11"]


async def test_votes_are_what_a_reward_read_unless_the_set_names_a_marker() -> None:
    one = held_out("sums", Scorer(), 5, 4)
    found = await evaluator(Generation(), one).evaluate(VERSION, step=0)
    # The texts of all answers differ; what was read is whether they are right.
    assert found.metrics["eval/maj@4"] == pytest.approx((0 + 0 + 0.5 + 1 + 1) / 5)
    by_text = await evaluator(Generation(), replace(one, answer_after="####")).evaluate(VERSION, step=0)
    assert by_text.metrics["eval/maj@4"] == 0


@pytest.mark.parametrize("drawn", [2, 5, 6])
def test_pass_at_k_is_the_share_of_all_teams_of_k_with_a_right_answer(drawn: int) -> None:
    for right, k in itertools.product(range(drawn + 1), range(1, drawn + 1)):
        teams = list(itertools.combinations(range(drawn), k))
        passing = sum(any(answer < right for answer in team) for team in teams)
        assert pass_at(k, right, drawn) == pytest.approx(passing / len(teams))


def figures(rewards: list[list[float]], success_at: float = 1.0) -> dict[str, float]:
    right = [[reward >= success_at for reward in answers] for answers in rewards]
    return figures_of(rewards, [[str(reward) for reward in answers] for answers in rewards], right)


def test_pass_at_1_is_the_mean_and_k_stops_at_the_largest_power_of_two() -> None:
    found = figures([[float(number < right) for number in range(6)] for right in (0, 3, 6)])
    assert found["eval/pass@1"] == pytest.approx(found["eval/accuracy"])
    assert [name for name in found if name.startswith("eval/pass")] == [
        "eval/pass@1",
        "eval/pass@2",
        "eval/pass@4",
    ]


def test_right_means_the_threshold_of_the_set() -> None:
    rewards = [[0.2], [0.5], [0.8], [-3.0]]
    assert figures(rewards)["eval/accuracy"] == 0
    assert figures(rewards, success_at=0.5)["eval/accuracy"] == 0.5
    assert figures(rewards)["eval/reward_mean"] == pytest.approx(-0.375)


def test_answers_to_one_prompt_do_not_make_the_error_smaller() -> None:
    once = figures([[1.0], [0.0], [1.0], [1.0]])["eval/accuracy_stderr"]
    assert figures([[1.0] * 9, [0.0] * 9, [1.0] * 9, [1.0] * 9])["eval/accuracy_stderr"] == pytest.approx(
        once
    )
    assert once == pytest.approx(statistics.stdev([1, 0, 1, 1]) / 2)
    assert "eval/accuracy_stderr" not in figures([[1.0, 0.0]])


@pytest.mark.parametrize(
    ("votes", "right", "share"),
    [
        (["4", "4", "5"], [True, True, False], 1.0),
        (["4", "5", "5"], [True, False, False], 0.0),
        (["4", "5"], [True, False], 0.5),  # A tie counts as its mean, whatever the order.
        (["5", "4", None, None], [False, True, True, True], 0.5),
        ([None, None], [False, False], 0.0),
        (["4", "4", "5"], [True, False, False], 0.5),  # A reward of more than the answer, such as the length.
    ],
)
def test_the_majority_is_as_right_as_its_voters(votes: list[Any], right: list[bool], share: float) -> None:
    for order in itertools.permutations(range(len(votes))):
        assert majority_at(len(votes), [votes[i] for i in order], [right[i] for i in order]) == share


@pytest.mark.parametrize("votes", ["aabbcd", "abcdef", "aaaaab", "aa---b", "------", "aabbcc"])
def test_maj_at_k_is_the_mean_over_all_teams_of_k(votes: str) -> None:
    cast = [None if vote == "-" else vote for vote in votes]
    right = [True, False, True, True, False, True]
    for k in range(1, len(votes)):
        teams = list(itertools.combinations(range(len(votes)), k))
        shares = [majority_at(k, [cast[i] for i in team], [right[i] for i in team]) for team in teams]
        # Whoever votes alike is as right as all of them are on the mean, whether or not they are drawn together.
        assert majority_at(k, cast, right) == pytest.approx(sum(shares) / len(teams))


@pytest.mark.parametrize(
    ("response", "after", "vote"),
    [
        (" 42\n", "", "42"),
        ("6 * 7 is #### 42 \nDone.", "####", "42"),
        ("#### 1\n#### 2", "####", "2"),
        ("####\n 42", "####", "42"),
        ("42", "####", None),
        ("so ####", "####", ""),
    ],
)
def test_a_response_votes_for_what_follows_its_last_marker(
    response: str, after: str, vote: str | None
) -> None:
    assert vote_of(response, after) == vote


def test_a_graded_reward_is_never_told_as_a_failure() -> None:
    found = figures([[0.25], [0.75]])
    assert held_out_text(found) == "held-out mean reward 0.500 ± 0.250 (no answer reached success_at)"
    both = before(figures([[0.0], [0.5]])) | found | {"eval/step": 20.0}
    assert before_and_after(both) == [
        "held-out mean reward: 0.250 before, 0.500 ± 0.250 after 20 steps (no answer reached success_at)"
    ]


def test_accuracy_is_told_alone_where_it_is_the_mean_reward() -> None:
    assert held_out_text(figures([[1.0], [0.0]])) == "held-out accuracy 0.500 ± 0.500"
    assert held_out_text(figures([[0.0], [0.0]])) == "held-out accuracy 0.000 ± 0.000"
    assert (
        held_out_text(figures([[2.0], [0.0]])) == "held-out accuracy 0.500 ± 0.500, mean reward 1.000 ± 1.000"
    )
    assert held_out_text({"eval/accuracy": 0.5}) == "held-out accuracy 0.500"
    first = {"eval/accuracy": 0.25, "eval/accuracy_before": 0.25, "eval/step": 0.0}
    assert before_and_after(first) == ["held-out accuracy: 0.250 before; not evaluated since"]
    assert before_and_after({}) == []


def test_sets_are_told_one_by_one() -> None:
    easy, hard = HeldOutResult(2, figures([[1.0], [1.0]])), HeldOutResult(2, figures([[0.5], [0.5]]))
    found = Evaluation.of_sets({"easy": easy, "hard": hard})
    told = "easy: accuracy 1.000 ± 0.000; hard: mean reward 0.500 ± 0.000 (no answer reached success_at)"
    assert held_out_text(found.figures) == f"held-out {told}"
    lines = before_and_after(before(found.figures) | found.figures | {"eval/step": 4.0})
    assert lines[0] == "held-out accuracy on easy: 1.000 before, 1.000 ± 0.000 after 4 steps"
    assert lines[1].startswith("held-out mean reward on hard: 0.500 before") and len(lines) == 2

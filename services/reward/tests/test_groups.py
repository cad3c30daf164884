"""Functions that get whole groups: what they see, and that a failure of one response is felt by no other one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from flotilla.reward.v1 import reward_pb2 as pb
from flotilla_core.tensors import to_tensor
from flotilla_reward import scoring
from flotilla_reward.answers import Workers
from flotilla_reward.scoring import Run
from flotilla_reward.worker import Function
from flotilla_workers.functions import Refusal, Target
from flotilla_workers.jail.jail import no_jail

pytestmark = pytest.mark.asyncio(loop_scope="module")

RANKS = """
calls = []

def rank(prompt, responses, answer, info):
    calls.append(len(responses))
    longest = sorted(responses, key=len)
    return [{"score": longest.index(one), "call": len(calls), "of": len(responses)} for one in responses]

def picky(prompt, responses, answer, info):
    return [None if one == "none" else float("nan") if one == "nan" else 1 for one in responses]

def blames(completions, **columns):
    class Unverifiable(Exception):
        pass
    return [Unverifiable("too long") if len(one) > 3 else len(one) for one in completions]

def raises(prompt, responses, answer, info):
    raise KeyError("level")

def state(completions, completion_ids, trainer_state):
    assert completion_ids == [[len(one)] for one in completions]
    return [trainer_state.global_step / trainer_state.max_steps for _ in completions]

def epoch(completions, trainer_state):
    return [trainer_state.epoch]

def alone(prompt, response, answer, info):
    return 1 / 0 if response == "broken" else 0.5
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool() -> AsyncIterator[Workers]:
    pool = Workers(1, no_jail)
    await pool.start()
    yield pool
    await pool.stop()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "ranks.py"
    path.write_text(RANKS)
    return path


def group(name: str, *responses: str) -> list[pb.ScoreItem]:
    return [
        pb.ScoreItem(sample_id=f"{name}/{place}", response=response, group=name)
        for place, response in enumerate(responses)
    ]


async def score(
    pool: Workers,
    file: Path,
    functions: Sequence[str],
    items: Sequence[pb.ScoreItem],
    run: Run = scoring.NO_RUN,
) -> dict[str, pb.ScoreOutcome]:
    terms = scoring.resolve([pb.RewardSpec(reward=f"{file}:{name}") for name in functions])
    async for _ in scoring.load(terms, pool):
        pass
    responses = [response async for response in scoring.score_items(items, terms, pool, run)]
    return {outcome.sample_id: outcome for response in responses for outcome in response.outcomes}


def values(outcomes: dict[str, pb.ScoreOutcome], name: str) -> list[float]:
    return [
        sum(component.value for component in outcome.value.components)
        for sample_id, outcome in outcomes.items()
        if sample_id.startswith(f"{name}/") and outcome.HasField("value")
    ]


def parts(outcome: pb.ScoreOutcome, place: int = 0) -> dict[str, float]:
    return {part.name: part.value for part in outcome.value.components[place].parts}


async def test_each_group_reaches_the_function_whole_in_one_call(pool: Workers, file: Path) -> None:
    one, other = group("a", "xxx", "x", "xx"), group("b", "yy", "y")
    mixed = [item for pair in zip(one, other, strict=False) for item in pair] + one[2:]
    outcomes = await score(pool, file, ["rank"], mixed)
    assert values(outcomes, "a") == [2, 0, 1] and values(outcomes, "b") == [1, 0]
    assert {parts(outcomes[item.sample_id])["of"] for item in one} == {3}
    calls = {parts(outcome)["call"] for outcome in outcomes.values()}
    assert len(calls) == 2


async def test_items_without_a_group_are_compared_with_nothing(pool: Workers, file: Path) -> None:
    items = [pb.ScoreItem(sample_id=name, response="x") for name in ("a", "b")]
    outcomes = await score(pool, file, ["rank"], items)
    assert [parts(outcome)["of"] for outcome in outcomes.values()] == [1, 1]


async def test_what_terms_take_is_known_before_any_item(pool: Workers, file: Path) -> None:
    names = ("alone", "rank", "state")
    terms = scoring.resolve([pb.RewardSpec(reward=f"{file}:{name}") for name in names])
    async for _ in scoring.load(terms, pool):
        pass
    facts = [(one.whole_groups, one.token_ids) for one in scoring.facts_of(terms, pool).terms]
    assert facts == [(False, False), (True, False), (True, True)]


@pytest.mark.parametrize(
    ("functions", "broken"),
    [
        (["alone", "rank"], "broken"),
        (["rank", "alone"], "broken"),
        (["rank", "picky"], "none"),
        (["rank", "picky"], "nan"),
    ],
)
async def test_what_has_failed_is_not_among_those_that_are_compared(
    pool: Workers, file: Path, functions: list[str], broken: str
) -> None:
    siblings = ("x" * 9, "x", "xxx", "xx")
    with_it = await score(pool, file, functions, group("a", *siblings[:2], broken, *siblings[2:]))
    without = await score(pool, file, functions, group("a", *siblings))
    assert with_it["a/2"].WhichOneof("outcome") == "error"
    assert values(with_it, "a") == values(without, "a") and len(values(without, "a")) == 4
    scored = [outcome for outcome in with_it.values() if outcome.HasField("value")]
    assert {parts(outcome, functions.index("rank"))["of"] for outcome in scored} == {4}


async def test_a_function_that_raises_fails_for_all_that_it_compared_and_names_the_line(
    pool: Workers, file: Path
) -> None:
    outcomes = await score(pool, file, ["alone", "raises"], group("a", "x", "broken", "xx"))
    line = RANKS.partition("raise KeyError")[0].count("\n") + 1
    assert [(outcomes[name].error.file, outcomes[name].error.line) for name in ("a/0", "a/2")] == [
        (str(file), line)
    ] * 2
    assert "ZeroDivisionError" in outcomes["a/1"].error.message
    assert [component.value for component in outcomes["a/0"].before] == [0.5]


async def test_of_a_group_the_response_that_is_to_blame_is_told_apart(pool: Workers, file: Path) -> None:
    outcomes = await score(pool, file, ["blames"], group("a", "xx", "xxxx"))
    first, second = (outcomes[name].value.components[0] for name in ("a/0", "a/1"))
    assert (first.value, first.unreadable) == (2.0, False)
    assert (second.value, second.unreadable, second.why) == (0.0, True, "too long")


async def test_trl_gets_the_tokens_and_the_steps_that_there_are_and_no_others(
    pool: Workers, file: Path
) -> None:
    items = group("a", "x", "xx")
    for item in items:
        item.step = 3
        item.token_ids.CopyFrom(to_tensor(np.array([len(item.response)], np.int32)))
    outcomes = await score(pool, file, ["state"], items, Run("r", 12))
    assert values(outcomes, "a") == [0.25, 0.25]
    outcomes = await score(pool, file, ["epoch"], items[:1], Run("r", 12))
    assert "AttributeError: trainer_state has no epoch here, but global_step and max_steps" in (
        outcomes["a/0"].error.message
    )
    outcomes = await score(pool, file, ["state"], group("a", "x"))
    assert (
        "takes completion_ids, which the coordinator of this call does not give"
        in outcomes["a/0"].error.message
    )


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        ("[1]", "returned 1 scores for 2 responses"),
        ("1.0", "returned 1.0 of type float, expected a list of 2 scores"),
        ("{'score': 1}", "of type dict, expected a list of 2 scores"),
        ("'ab'", "of type str, expected a list of 2 scores"),
    ],
)
async def test_a_group_needs_a_score_for_each_response(tmp_path: Path, returned: str, says: str) -> None:
    path = tmp_path / "short.py"
    path.write_text(f"def judge(prompt, responses, answer, info): return {returned}\n")
    question = {"prompt": "", "responses": ["a", "b"], "answer": "", "info": {}}
    with pytest.raises(Refusal, match=says):
        Function(Target("file", str(path), "judge"))(question)


async def test_a_tensor_or_an_array_is_a_list_of_scores(tmp_path: Path) -> None:
    path = tmp_path / "array.py"
    path.write_text("import numpy\ndef judge(prompt, responses, answer, info): return numpy.arange(2) / 2\n")
    question = {"prompt": "", "responses": ["a", "b"], "answer": "", "info": {}}
    assert Function(Target("file", str(path), "judge"))(question) == {"each": [0.0, 0.5]}

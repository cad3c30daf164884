"""Groups that ask for scores together share a call, and nothing else; a reward is weighed from its terms."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import pytest
from google.protobuf.duration_pb2 import Duration
from opentelemetry.trace import SpanContext

from flotilla.reward.v1 import reward_pb2 as pb
from flotilla.reward.v1.reward_pb2 import ScoreItem
from flotilla_coordinator.ledger.records import DropReason
from flotilla_coordinator.ledger.verdicts import Said, TermVerdict, named_parts
from flotilla_coordinator.rollouts.batch import RolloutSample
from flotilla_coordinator.rollouts.scoring import Needs, ScoreGathering, Scorer, weigh
from flotilla_core.config import RewardMode, RewardTermConfig
from flotilla_core.errors import Unavailable

LIMIT_S = 10.0


class Rewards:
    """Answers with the length of the response; what is `slow` only when it is let go."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.begun = asyncio.Event()
        self.let_go = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.gathering: ScoreGathering[int] = ScoreGathering(self.score)

    async def score(
        self, items: list[ScoreItem], askers: list[SpanContext], take: Callable[[str, int], None]
    ) -> None:
        self.calls.append([item.sample_id for item in items])
        assert askers
        self.begun.set()
        try:
            for item in sorted(items, key=lambda item: item.response == "slow"):
                if item.response == "fails":
                    raise Unavailable("no reward replica")
                if item.response == "slow":
                    await self.let_go.wait()
                take(item.sample_id, len(item.response))
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    def ask(self, **responses: str) -> asyncio.Task[dict[str, int]]:
        items = [ScoreItem(sample_id=name, response=text) for name, text in responses.items()]
        return asyncio.create_task(self.gathering.outcomes(items))


async def test_groups_that_ask_together_share_one_call_and_get_their_own_outcomes() -> None:
    rewards = Rewards()
    async with asyncio.timeout(LIMIT_S):
        assert await asyncio.gather(rewards.ask(a="x", b="xx"), rewards.ask(c="xxx")) == [
            {"a": 1, "b": 2},
            {"c": 3},
        ]
    assert rewards.calls == [["a", "b", "c"]]


async def test_a_group_does_not_wait_for_the_slow_sample_of_another() -> None:
    rewards = Rewards()
    async with asyncio.timeout(LIMIT_S):
        slow, quick = rewards.ask(a="slow"), rewards.ask(b="x")
        assert await quick == {"b": 1} and not slow.done()
        rewards.let_go.set()
        assert await slow == {"a": 4}
    assert len(rewards.calls) == 1 and not rewards.cancelled.is_set()


async def test_two_groups_with_the_same_sample_id_are_scored_apart() -> None:
    rewards = Rewards()
    async with asyncio.timeout(LIMIT_S):
        assert await asyncio.gather(rewards.ask(a="x"), rewards.ask(a="xx"), rewards.ask(b="x")) == [
            {"a": 1},
            {"a": 2},
            {"b": 1},
        ]
    assert sorted(map(sorted, rewards.calls)) == [["a"], ["a", "b"]]


async def test_a_call_that_fails_fails_for_everybody_who_still_waits() -> None:
    rewards = Rewards()
    async with asyncio.timeout(LIMIT_S):
        served, failed = rewards.ask(a="x"), rewards.ask(b="fails")
        assert await served == {"a": 1}
        with pytest.raises(Unavailable, match="no reward replica"):
            await failed


async def test_a_call_ends_when_nobody_waits_for_it_any_more_and_not_before() -> None:
    rewards = Rewards()
    async with asyncio.timeout(LIMIT_S):
        first, second = rewards.ask(a="slow"), rewards.ask(b="slow")
        await rewards.begun.wait()
        first.cancel()
        await asyncio.wait({first})
        assert not rewards.cancelled.is_set() and not second.done()
        second.cancel()
        await rewards.cancelled.wait()


@pytest.mark.parametrize("unreadable", [True, False])
def test_a_response_that_broke_a_checker_has_its_reward_and_is_known_for_it(unreadable: bool) -> None:
    outcome = weigh([RewardTermConfig(reward="math")], scored((0.0,), unreadable))
    assert (outcome.total, outcome.unverifiable) == (0.0, unreadable)


def scored(values: tuple[float, ...], unreadable: bool = False) -> pb.ScoreOutcome:
    parts = [pb.RewardComponent(value=value, unreadable=unreadable) for value in values]
    return pb.ScoreOutcome(value=pb.RewardValue(components=parts))


class Terms:
    """Gives every sample the same values, or the same failure."""

    def __init__(self, weights: dict[str, float], outcome: pb.ScoreOutcome) -> None:
        self.terms = tuple(RewardTermConfig(reward=name, weight=one) for name, one in weights.items())
        self._outcome = outcome

    async def needs(self) -> Needs:
        return Needs()

    async def outcomes(self, items: list[ScoreItem]) -> dict[str, pb.ScoreOutcome]:
        return {item.sample_id: self._outcome for item in items}


# Values of `a`, `b` and `c`, whose weights are 2, 0.5 and 0; `a` has to be at least 0.5 where there are gates.
@pytest.mark.parametrize(
    ("mode", "values", "total"),
    [
        ("weighted", (1.0, 3.0, 9.0), 2 + 1.5),
        ("weighted", (0.0, 3.0, 9.0), 1.5),
        ("gated", (1.0, 3.0, 9.0), 2 + 1.5),
        ("gated", (0.5, 3.0, 9.0), 1 + 1.5),
        ("gated", (0.49, 3.0, 9.0), 0),
        ("min", (1.0, 3.0, 9.0), 1.5),
        ("min", (-1.0, 3.0, -9.0), -2),
        ("max", (1.0, 3.0, 9.0), 2),
        ("max", (-1.0, -3.0, 9.0), -1.5),
        ("product", (1.0, 3.0, 9.0), 3),
        ("product", (0.0, 3.0, 9.0), 0),
        ("product", (-1.0, -3.0, 0.0), 3),
        ("first", (1.0, 3.0, 9.0), 2),
        ("first", (0.0, 3.0, 9.0), 1.5),
        ("first", (-1.0, 3.0, 9.0), -2),
        ("first", (0.0, 0.0, 9.0), 0),
    ],
)
async def test_a_mode_makes_one_reward_of_all_terms_and_each_term_keeps_its_value(
    mode: RewardMode, values: tuple[float, ...], total: float
) -> None:
    gate = 0.5 if mode == "gated" else None
    given = Terms({}, scored(values))
    given.terms = (
        RewardTermConfig(reward="a", weight=2, gate_at=gate),
        RewardTermConfig(reward="b", weight=0.5, name="named"),
        RewardTermConfig(reward="c", weight=0),
    )
    outcome = (await Scorer(given, mode).score([ScoreItem(sample_id="s")]))["s"]
    assert (outcome.total, outcome.terms) == (total, values)
    assert named_parts(outcome.verdicts) == [*zip(("a", "named", "c"), values, strict=True)]


def test_a_gate_without_a_weight_only_opens_or_closes() -> None:
    terms = [RewardTermConfig(reward="a", weight=0, gate_at=1), RewardTermConfig(reward="b")]
    assert weigh(terms, scored((1.0, 0.25)), "gated").total == 0.25
    assert weigh(terms, scored((0.0, 0.25)), "gated").total == 0


@pytest.mark.parametrize("mode", get_args(RewardMode))
def test_a_term_that_failed_is_no_reward_by_any_mode(mode: RewardMode) -> None:
    terms = [RewardTermConfig(reward="a"), RewardTermConfig(reward="b")]
    failed = pb.ScoreOutcome(error=pb.RewardError(message="it raised"))
    assert weigh(terms, failed, mode).total is None
    assert weigh(terms, scored((1.0, float("nan"))), mode).total is None
    assert weigh(terms, scored((float("nan"), 1.0)), mode).total is None


def test_what_a_function_returned_beside_its_value_is_named_behind_it_and_weighs_nothing() -> None:
    component = pb.RewardComponent(value=0.5, parts=[pb.NamedPart(name="acc", value=1.0)])
    scores = pb.ScoreOutcome(value=pb.RewardValue(components=[component]))
    outcome = weigh([RewardTermConfig(reward="f.py:f", weight=2.0)], scores)
    assert (outcome.total, outcome.terms) == (1.0, (0.5,))
    assert named_parts(outcome.verdicts) == [("f.py:f", 0.5), ("f.py:f[acc]", 1.0)]


@pytest.mark.parametrize(
    ("outcome", "says"),
    [
        (scored((1e38, 1e38)), "reward b: the weighted sum is 1.5e+38: 1 x 1e+38 (a), 0.5 x 1e+38 (b)"),
        (scored((1.0, float("nan"))), "reward b: the weighted sum is nan: 1 x 1 (a), 0.5 x nan (b)"),
        (scored((1.0,)), "2 rewards gave 1 values"),
        (pb.ScoreOutcome(error=pb.RewardError(message="it raised")), "it raised"),
    ],
)
async def test_what_is_no_finite_sum_of_all_terms_is_a_failure_and_never_a_reward(
    outcome: pb.ScoreOutcome, says: str
) -> None:
    scorer = Scorer(Terms({"a": 1.0, "b": 0.5}, outcome))
    found = (await scorer.score([ScoreItem(sample_id="s")]))["s"]
    assert (found.total, found.failure, found.failed) == (None, says, True)


@pytest.mark.parametrize(("worth", "total"), [(0, 1.0), (-2.0, 0.0), ("drop", None)])
def test_a_run_says_what_an_unverifiable_response_is_worth(worth: Any, total: float | None) -> None:
    terms = [
        RewardTermConfig(reward="exact"),
        RewardTermConfig(reward="math", weight=0.5, on_unverifiable=worth),
    ]
    components = [
        pb.RewardComponent(reward="exact", value=1.0),
        pb.RewardComponent(reward="math", unreadable=True, why="a tower of powers"),
    ]
    outcome = weigh(terms, pb.ScoreOutcome(value=pb.RewardValue(components=components)))
    assert (outcome.total, outcome.unverifiable, outcome.failed) == (total, True, False)
    verdict = outcome.verdicts[1]
    assert (verdict.outcome, verdict.message) == (Said.UNVERIFIABLE, "a tower of powers")
    assert verdict.value == (None if worth == "drop" else worth)
    sample = RolloutSample("s", np.empty(0, np.int32), None, "")
    sample.take_outcome(outcome)
    assert sample.drop_reason == (DropReason.UNVERIFIABLE if worth == "drop" else None)


def test_a_failure_keeps_the_verdicts_before_it_and_its_place() -> None:
    terms = [RewardTermConfig(reward="exact"), RewardTermConfig(reward="f.py:f")]
    before = [pb.RewardComponent(reward="exact", value=1.0, version="flotilla 1, rules 2", extracted="4")]
    error = pb.RewardError(reward="f.py:f", message="it raised", file="/f.py", line=7, version="sha256:0")
    late = pb.RewardTimeout(
        reward="f.py:f", limit=Duration(seconds=2), version="sha256:0", file="f.py", line=7
    )
    said = TermVerdict("exact", value=1.0, version="flotilla 1, rules 2", extracted="4")
    raised = weigh(terms, pb.ScoreOutcome(error=error, before=before))
    assert raised.verdicts == (
        said,
        TermVerdict("f.py:f", Said.ERROR, version="sha256:0", message="it raised", file="/f.py", line=7),
    )
    slow = weigh(terms, pb.ScoreOutcome(timeout=late, before=before))
    assert slow.verdicts[0] == said and slow.timed_out
    assert (slow.verdicts[1].outcome, slow.verdicts[1].seconds) == (Said.TIMEOUT, 2.0)
    assert (slow.verdicts[1].file, slow.verdicts[1].line) == ("f.py", 7)


def test_a_verdict_before_a_failure_is_that_of_the_term_that_said_it() -> None:
    """A term of whole groups fails after those that follow it in the run file have a value."""
    terms = [RewardTermConfig(reward="f.py:ranks"), RewardTermConfig(reward="exact", name="right")]
    before = [pb.RewardComponent(reward="right", value=1.0)]
    outcome = weigh(
        terms,
        pb.ScoreOutcome(error=pb.RewardError(reward="f.py:ranks", message="it raised"), before=before),
    )
    assert outcome.verdicts == (
        TermVerdict("right", value=1.0),
        TermVerdict("f.py:ranks", Said.ERROR, message="it raised"),
    )

"""Replicas that are lost cost no sample: the others generate and score every slot exactly once."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flotilla.common.v1.registration_pb2 import Registration
from flotilla.generator.v1 import generator_pb2 as gen
from flotilla.reward.v1 import reward_pb2 as reward
from flotilla_coordinator.rollouts import generation as generation_module
from flotilla_coordinator.rollouts.batch import RolloutSample
from flotilla_coordinator.rollouts.generation import Generation, GenerationRequest
from flotilla_coordinator.rollouts.scoring import RewardServiceScorer, Scorer
from flotilla_core.config import RewardTermConfig, SamplingConfig
from flotilla_core.errors import (
    DeadlineExceeded,
    Exhausted,
    FailedPrecondition,
    FlotillaError,
    Internal,
    InvalidRequest,
    StaleVersion,
    Unavailable,
)
from flotilla_core.tensors import from_tensor, to_tensor
from flotilla_core.version import Version

pytestmark = pytest.mark.usefixtures("direct_calls")

TOKENIZER: Any = SimpleNamespace(decode_many=lambda sequences: list(map(str, sequences)))
SLOTS = ("run/0/0/0", "run/0/0/1", "run/0/0/2")


@dataclass(eq=False)
class Replica:
    """One of the release before: each request has a call of its own."""

    name: str
    answer: Callable[[Any], AsyncIterator[Any]]
    leases: int = 0
    registration: Registration = field(default_factory=lambda: Registration(protocol_version="3.0"))

    @property
    def instance_id(self) -> str:
        return self.name

    @property
    def stub(self) -> Replica:
        return self

    @property
    def Generate(self) -> Callable[[Any], AsyncIterator[Any]]:
        return self.answer

    Score = Generate


@dataclass
class Pool:
    """Hands out its replicas in order; the ejected ones stay out, unless they are all that is left."""

    replicas: list[Replica]
    ejected: list[str] = field(default_factory=list)

    async def acquire(self, cost: int, **_options: Any) -> Replica:
        chosen = next((r for r in self.replicas if r.name not in self.ejected), self.replicas[-1])
        chosen.leases += 1
        return chosen

    def release(self, replica: Replica, cost: int) -> None:
        replica.leases -= 1

    def heard(self, replica: Replica, waiting: int) -> None:
        pass

    def eject(self, instance_id: str, why: str) -> None:
        self.ejected.append(instance_id)


def delivered(
    sample_id: str,
    step: int = 4,
    logprobs: tuple[float, ...] = (-1.0, -2.0),
    claimed: tuple[tuple[int, int], ...] = ((0, 2),),
) -> gen.GeneratedSample:
    """Two tokens, `claimed` by version 0.`step`."""
    response = gen.GeneratedSample(
        sample_id=sample_id,
        finish_reason=gen.FINISH_REASON_STOP,
        token_ids=to_tensor(np.array([5, 6], np.int32)),
        logprobs=to_tensor(np.array(logprobs, np.float32)),
    )
    for start, end in claimed:
        response.version_spans.add(version=Version(0, step).to_proto(), start=start, end=end)
    return response


def unversioned(sample_id: str) -> gen.GeneratedSample:
    """Return a sample whose second token has an unknown version."""
    response = delivered(sample_id, claimed=((0, 1),))
    response.version_spans.add(start=1, end=2)
    return response


def generator(name: str, gives: int = len(SLOTS), then: FlotillaError | None = None) -> Replica:
    async def answer(request: gen.GenerateRequest) -> AsyncIterator[gen.GenerateResponse]:
        for slot in list(request.samples)[:gives]:
            yield gen.GenerateResponse(samples=[delivered(slot.sample_id)])
        if then is not None:
            raise then

    return Replica(name, answer)


async def generate(*replicas: Replica) -> tuple[list[tuple[str, str, int]], Pool]:
    pool: Any = Pool(list(replicas))
    generation = Generation(
        "run", 0, TOKENIZER, pool=pool, serves=lambda *_: True, wait_limit_s=1.0, lost=lambda *_: None
    )
    prompt = np.arange(3, dtype=np.int32)
    request = GenerationRequest(prompt, SLOTS, SamplingConfig(), Version(0, 0), 5.0, max_attempts=3)
    async with aclosing(generation.samples(request)) as samples:
        got = [(s.sample_id, s.generator, s.attempt) async for s in samples]
    assert all(replica.leases == 0 for replica in replicas)
    return got, pool


@pytest.mark.parametrize("kind", [Unavailable, DeadlineExceeded, Internal, FailedPrecondition])
async def test_what_a_failed_replica_still_owed_comes_from_another_once(kind: type[FlotillaError]) -> None:
    got, pool = await generate(generator("a", 1, kind("its weights are broken")), generator("b"))
    assert got == [(SLOTS[0], "a", 0), (SLOTS[1], "b", 1), (SLOTS[2], "b", 1)]
    assert pool.ejected == ["a"]


async def test_a_replica_that_is_behind_is_asked_again_and_not_ejected() -> None:
    with pytest.raises(Exhausted, match="never came back"):
        await generate(generator("a", 0, StaleVersion("version 0.3 is not served here")))
    _, pool = await generate(generator("a"))
    assert pool.ejected == []


async def test_a_wrong_request_is_not_carried_from_replica_to_replica() -> None:
    with pytest.raises(InvalidRequest, match="too long"):
        await generate(generator("a", 0, InvalidRequest("the prompt is too long")), generator("b"))


def piecewise(name: str, version: int, tokens: list[int], whole: bool, asked: list[Any]) -> Replica:
    """Writes the given tokens of each sample, and gives it up there or ends it."""

    async def answer(request: gen.GenerateRequest) -> AsyncIterator[gen.GenerateResponse]:
        asked.append(request)
        for slot in request.samples:
            response = gen.GeneratedSample(
                sample_id=slot.sample_id,
                token_ids=to_tensor(np.array(tokens, np.int32)),
                logprobs=to_tensor(-np.array(tokens, np.float32)),
                finish_reason=gen.FINISH_REASON_STOP if whole else gen.FINISH_REASON_ABORT,
            )
            response.version_spans.add(version=Version(0, version).to_proto(), start=0, end=len(tokens))
            yield gen.GenerateResponse(samples=[response])
        if not whole:
            raise Unavailable(f"{name} goes")

    return Replica(name, answer)


async def pieces(*replicas: Replica, resume: bool, most: int = 256) -> list[RolloutSample]:
    pool: Any = Pool(list(replicas))
    generation = Generation(
        "run", 0, TOKENIZER, pool=pool, serves=lambda *_: True, wait_limit_s=1.0, lost=lambda *_: None
    )
    request = GenerationRequest(
        np.arange(3, dtype=np.int32),
        SLOTS[:1],
        SamplingConfig(max_response_tokens=most),
        Version(0, 0),
        5.0,
        max_attempts=4,
        resume_partial=resume,
    )
    async with aclosing(generation.samples(request)) as samples:
        return [sample async for sample in samples]


async def test_a_sample_goes_on_elsewhere_with_the_logprobs_and_versions_of_each_piece() -> None:
    asked: list[gen.GenerateRequest] = []
    (whole,) = await pieces(
        piecewise("a", 3, [10, 11], False, asked),
        piecewise("b", 4, [12], False, asked),
        piecewise("c", 5, [13, 14], True, asked),
        resume=True,
    )
    assert whole.token_ids.tolist() == [10, 11, 12, 13, 14]
    assert whole.logprobs is not None and whole.logprobs.tolist() == [-10, -11, -12, -13, -14]
    spans = [(span.version.step, span.start, span.end) for span in whole.spans]
    assert spans == [(3, 0, 2), (4, 2, 3), (5, 3, 5)]
    slots = [request.samples[0] for request in asked]
    assert [slot.HasField("prefix_token_ids") for slot in slots] == [False, True, True]
    assert from_tensor(slots[2].prefix_token_ids).tolist() == [10, 11, 12]
    assert len({slot.seed for slot in slots}) == 3, "the numbers of the first piece are not drawn again"


async def test_without_resuming_a_sample_begins_anew_with_its_own_seed() -> None:
    asked: list[gen.GenerateRequest] = []
    (whole,) = await pieces(
        piecewise("a", 3, [10, 11], False, asked), piecewise("b", 4, [12], True, asked), resume=False
    )
    assert whole.token_ids.tolist() == [12]
    assert asked[0].samples == asked[1].samples


async def test_a_piece_that_fills_the_response_is_drawn_again() -> None:
    asked: list[gen.GenerateRequest] = []
    (whole,) = await pieces(
        piecewise("a", 3, [10, 11], False, asked), piecewise("b", 4, [12], True, asked), resume=True, most=2
    )
    assert whole.token_ids.tolist() == [12] and asked[0].samples == asked[1].samples


@pytest.mark.parametrize("here", [6, 5], ids=["few tokens", "many tokens"])
async def test_the_texts_of_one_message_are_decoded_together_many_tokens_beside_the_event_loop(
    here: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation_module, "DECODED_HERE", here)
    calls: list[tuple[int, threading.Thread]] = []

    def decode_many(sequences: list[list[int]]) -> list[str]:
        calls.append((len(sequences), threading.current_thread()))
        return list(map(str, sequences))

    async def answer(request: gen.GenerateRequest) -> AsyncIterator[gen.GenerateResponse]:
        yield gen.GenerateResponse(samples=[delivered(slot.sample_id) for slot in request.samples])

    pool: Any = Pool([Replica("a", answer)])
    tokenizer: Any = SimpleNamespace(decode_many=decode_many)
    generation = Generation(
        "run", 0, tokenizer, pool=pool, serves=lambda *_: True, wait_limit_s=1.0, lost=lambda *_: None
    )
    request = GenerationRequest(np.arange(3), SLOTS, SamplingConfig(), Version(0, 0), 5.0, max_attempts=1)
    async with aclosing(generation.samples(request)) as samples:
        assert [sample.text async for sample in samples] == ["[5, 6]"] * 3
    ((together, thread),) = calls
    assert together == 3
    assert (thread is threading.current_thread()) is (here == len(SLOTS) * 2), "two tokens a sample"


def rewarder(name: str, then: FlotillaError | None = None) -> Replica:
    async def answer(request: reward.ScoreRequest) -> AsyncIterator[reward.ScoreResponse]:
        if then is not None:
            raise then
        for item in request.items:
            value = reward.RewardValue(components=[reward.RewardComponent(value=1.0)])
            outcome = reward.ScoreOutcome(sample_id=item.sample_id, value=value)
            yield reward.ScoreResponse(outcomes=[outcome])

    return Replica(name, answer)


@pytest.mark.parametrize("kind", [Unavailable, DeadlineExceeded])
async def test_the_loss_of_a_reward_replica_is_never_a_score(kind: type[FlotillaError]) -> None:
    pool: Any = Pool([rewarder("a", kind("it hangs")), rewarder("b")])
    scorer = Scorer(RewardServiceScorer("run", (RewardTermConfig(reward="exact"),), pool, 1.0))
    outcomes = await scorer.score([reward.ScoreItem(sample_id=slot) for slot in SLOTS])
    assert {outcome.total for outcome in outcomes.values()} == {1.0} and pool.ejected == ["a"]


async def test_what_rewards_take_is_asked_of_another_replica_where_one_is_lost() -> None:
    async def tells(_: reward.ScoreRequest) -> AsyncIterator[reward.ScoreResponse]:
        yield reward.ScoreResponse(terms=[reward.TermFacts(whole_groups=True)])

    pool: Any = Pool([rewarder("a", Unavailable("it is gone")), Replica("b", tells)])
    service = RewardServiceScorer("run", (RewardTermConfig(reward="f.py:ranks"),), pool, 1.0)
    assert (await service.needs()).whole_groups and pool.ejected == ["a"]


async def test_without_any_reward_replica_that_answers_the_error_is_raised() -> None:
    pool: Any = Pool([rewarder("a", Unavailable("it is gone"))])
    scorer = Scorer(RewardServiceScorer("run", (RewardTermConfig(reward="exact"),), pool, 1.0))
    with pytest.raises(Unavailable, match="it is gone"):
        await scorer.score([reward.ScoreItem(sample_id=SLOTS[0])])
    assert pool.replicas[0].leases == 0


def delivering(name: str, *responses: gen.GeneratedSample) -> Replica:
    async def answer(request: gen.GenerateRequest) -> AsyncIterator[gen.GenerateResponse]:
        for response in responses:
            yield gen.GenerateResponse(samples=[response])

    return Replica(name, answer)


@pytest.mark.parametrize(
    ("refused", "kind"),
    [
        (delivered("run/0/9/0"), "unasked"),
        (delivered(SLOTS[1]), "unasked"),  # it came before
        (delivered(SLOTS[0], step=3), "stale"),
        (delivered(SLOTS[0], logprobs=(-1.0,)), "unreadable"),
        (delivered(SLOTS[0], logprobs=(-1.0, float("nan"))), "unreadable"),
        (gen.GeneratedSample(sample_id=SLOTS[0]), "unreadable"),
        (delivered(SLOTS[0], claimed=()), "unreadable"),
        (delivered(SLOTS[0], claimed=((0, 1),)), "unreadable"),
        (delivered(SLOTS[0], claimed=((1, 2), (0, 1))), "unreadable"),
        (unversioned(SLOTS[0]), "unreadable"),
    ],
    ids=[
        "unknown",
        "twice",
        "stale",
        "length",
        "nan",
        "empty",
        "unclaimed",
        "partly",
        "disorder",
        "unversioned",
    ],
)
async def test_a_sample_that_is_refused_is_counted_and_drawn_again(
    refused: gen.GeneratedSample, kind: str
) -> None:
    whole = [delivered(slot) for slot in SLOTS[1:]]
    pool: Any = Pool([delivering("a", *whole, refused), delivering("a", delivered(SLOTS[0]))])
    lost: list[str] = []

    def tell(_samples: tuple[str, ...], error: FlotillaError) -> None:
        lost.append(str(error))
        pool.replicas.pop(0)

    generation = Generation(
        "run", 0, TOKENIZER, pool=pool, serves=lambda *_: True, wait_limit_s=1.0, lost=tell
    )
    prompt = np.arange(3, dtype=np.int32)
    request = GenerationRequest(prompt, SLOTS, SamplingConfig(), Version(0, 4), 5.0, max_attempts=2)
    async with aclosing(generation.samples(request)) as samples:
        got = [(s.sample_id, s.attempt) async for s in samples]
    assert got == [(SLOTS[1], 0), (SLOTS[2], 0), (SLOTS[0], 1)]
    assert "a sample of a was refused" in lost[0]
    assert generation.validator.take_metrics() == {"samples/rejected": 1.0, f"samples/rejected_{kind}": 1.0}
    assert generation.validator.take_metrics() == {"samples/rejected": 0.0}

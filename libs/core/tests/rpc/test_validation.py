"""A request that breaks a rule of its contract is refused with the name of the field; a good one passes unchanged."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.message import Message

from flotilla.common.v1 import operate_pb2, tensor_pb2, version_pb2
from flotilla.coordinator.v1 import coordinator_pb2, loop_pb2
from flotilla.generator.v1 import generator_pb2
from flotilla.reward.v1 import reward_pb2
from flotilla.trainer.v1 import session_pb2, trainer_pb2
from flotilla_core.errors import InvalidRequest
from flotilla_core.rpc.validation import validate

TOKENS = tensor_pb2.Tensor(data=b"\1\0\0\0", dtype=tensor_pb2.DATA_TYPE_INT32)


def generate(change: Callable[[Any], object]) -> generator_pb2.GenerateRequest:
    request = generator_pb2.GenerateRequest(
        run_id="run",
        request_id="request",
        prompt_token_ids=TOKENS,
        samples=[generator_pb2.SampleSlot(sample_id=f"sample-{n}", seed=2**64 - 1) for n in range(3)],
        sampling=generator_pb2.SamplingParams(temperature=1, max_tokens=5),
        min_version=version_pb2.PolicyVersion(step=3),
    )
    change(request)
    return request


def score(**parameters: Any) -> reward_pb2.ScoreRequest:
    request = reward_pb2.ScoreRequest(rewards=[reward_pb2.RewardSpec(reward="exact")])
    request.rewards[0].parameters.update(parameters)
    return request


WRONG: list[tuple[Message, str]] = [
    (generate(lambda r: setattr(r.sampling, "temperature", math.nan)), "sampling.temperature is nan"),
    (generate(lambda r: setattr(r.sampling, "top_p", math.inf)), "sampling.top_p is inf"),
    (generate(lambda r: setattr(r.samples[2], "sample_id", "a\0b")), "samples[2].sample_id holds a control"),
    (generate(lambda r: setattr(r, "run_id", "r" * 5000)), "run_id has 5000 characters"),
    (generate(lambda r: setattr(r.prompt_token_ids, "dtype", 77)), "prompt_token_ids.dtype is 77"),
    (generate(lambda r: setattr(r.min_version, "step", 2**64 - 1)), "min_version.step is 18446744073709551615"),
    (generate(lambda r: setattr(r.gather, "seconds", -1)), "gather is -1 s"),
    (generate(lambda r: setattr(r.gather, "seconds", 10**11)), "gather is 100000000000 s"),
    (generate(lambda r: setattr(r.gather, "nanos", 2**31 - 1)), "gather is 0 s and 2147483647 ns"),
    (generator_pb2.CommitWeightsRequest(kv_policy=9), "kv_policy is 9, which is no value of KvPolicy"),  # type: ignore[arg-type]
    (coordinator_pb2.ListSamplesRequest(state=-1), "state is -1"),  # type: ignore[arg-type]
    (operate_pb2.TailLogRequest(lines=2**32 - 1), "lines is 4294967295; it may be at most 100000"),
    (trainer_pb2.TrainChunk(
        groups=[trainer_pb2.TrainGroup(samples=[trainer_pb2.TrainSample(reward_terms=[0, -math.inf])])]
    ), "groups[0].samples[0].reward_terms[1] is -inf"),
    (session_pb2.Objective(temperature=math.nan), "temperature is nan"),
    (score(limit={"of": [1, math.nan]}), "rewards[0].parameters.limit.of[1] is nan"),
    (trainer_pb2.ComputeLogprobsRequest(temperature=-1), "temperature is -1.0; it may be between 0"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("request_", "problem"), WRONG, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_value_that_breaks_a_rule_is_refused_with_its_field(request_: Message, problem: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        validate(request_, "/service/Call")
    assert str(caught.value).startswith(problem)
    assert caught.value.where == "/service/Call"


@pytest.mark.parametrize(
    "request_",
    [
        generate(lambda r: None),
        loop_pb2.LoopPrompt(text="a\0b" + "x" * 10_000),
        coordinator_pb2.StartRunRequest(config_yaml="steps: 1\n" * 5000),
        score(nothing=None, text="x" * 10_000, nested={"list": [True, "a", {}]}),
        session_pb2.SessionSpec(seed=2**64 - 1, objective=session_pb2.Objective(temperature=1e308)),
    ],
    ids=lambda request: request.DESCRIPTOR.name,
)
def test_a_good_request_passes_as_it_is(request_: Message) -> None:
    before = request_.SerializeToString(deterministic=True)
    validate(request_, "/service/Call")
    assert request_.SerializeToString(deterministic=True) == before


def test_the_check_of_a_large_chunk_costs_little_beside_reading_its_arrays() -> None:
    group = trainer_pb2.TrainGroup(group_id="group", prompt_token_ids=TOKENS)
    for number in range(16):
        group.samples.add(sample_id=f"sample-{number}", token_ids=TOKENS, logprobs=TOKENS, reward=1.0)
    chunk = trainer_pb2.TrainRequest(chunk=trainer_pb2.TrainChunk(groups=[group] * 64))
    validate(chunk, "call")
    started = time.process_time()
    validate(chunk, "call")
    # A thousand samples; several times what an idle machine takes.
    assert time.process_time() - started < 0.1

"""What a loop hands to the trainer (losses as in a run file, samples as they are), and how it reads evaluations."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import json_format

from flotilla.coordinator.v1 import loop_pb2 as pb
from flotilla_client import EvaluationResult, Group, HeldOutResult, Prompt, Sample
from flotilla_client.loop import loss_function
from flotilla_core.errors import InvalidRequest
from flotilla_core.tensors import from_tensor, to_tensor
from flotilla_core.version import Version


def sample(**changes: Any) -> Sample:
    return Sample("g/0", np.array([5, 6, 7], np.int32), **changes)


def test_a_loss_is_a_name_or_a_section_of_a_run_file() -> None:
    clipped = loss_function({"type": "ppo", "clip_high": 0.28})
    assert clipped.name == "ppo" == loss_function("ppo").name
    parameters = json_format.MessageToDict(clipped.parameters)
    assert (parameters["clip_low"], parameters["clip_high"]) == (0.2, 0.28)
    assert loss_function("sft").name == "sft"
    mine = loss_function({"type": "mine.py:loss", "parameters": {"beta": 2.0}})
    assert mine.name == f"{Path.cwd()}/mine.py:loss"
    assert json_format.MessageToDict(mine.parameters) == {"beta": 2.0}


@pytest.mark.parametrize(
    "wrong", ["nonsense", "", {"clip_low": 0.1}, {"type": "ppo", "clip": 1}, {"type": "sft", "share": 1}]
)
def test_a_loss_that_is_not_one_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidRequest, match="cannot be used so"):
        loss_function(wrong)


def test_one_advantage_is_that_of_every_token_and_an_array_stays() -> None:
    np.testing.assert_array_equal(from_tensor(sample(advantages=-2).train_sample().advantages), [-2.0] * 3)
    given = np.array([1.0, 0.0, -1.0])
    np.testing.assert_array_equal(from_tensor(sample(advantages=given).train_sample().advantages), given)
    assert not sample().train_sample().HasField("advantages")


def test_a_mask_and_log_probabilities_go_as_they_are() -> None:
    made = sample(mask=[True, False, True], logprobs=[-1.0, -2.0, -3.0]).train_sample()
    assert from_tensor(made.mask).tolist() == [True, False, True]
    assert from_tensor(made.logprobs).tolist() == [-1.0, -2.0, -3.0]


def test_a_group_without_prompt_tokens_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="prompt has no tokens"):
        Group("g", Prompt("text"), [sample()]).train_group()


def test_an_evaluation_has_what_was_measured_on_each_set() -> None:
    metrics = {"eval/accuracy": 0.5, "eval/reward_mean": 0.75, "eval/reward_stderr": 0.1}
    metrics |= {f"eval/pass@{k}": k / 16 for k in (16, 1, 2)} | {"eval/maj@16": 0.25, "eval/mean@16": 0.5}
    metrics |= {"eval/stderr_pass@2": 0.01, "eval/stderr_maj@16": 0.02, "eval/unscored_rate": 0.125}
    found = HeldOutResult.from_proto(pb.HeldOutResult(name="sums", prompts=40, metrics=metrics))
    assert (found.prompts, found.accuracy, found.reward_mean, found.reward_stderr) == (40, 0.5, 0.75, 0.1)
    assert list(found.pass_at.items()) == [(1, 1 / 16), (2, 2 / 16), (16, 1.0)] and found.maj_at == {16: 0.25}
    assert math.isnan(found.accuracy_stderr)
    assert (found.pass_at_stderr, found.maj_at_stderr) == ({2: 0.01}, {16: 0.02})
    assert found.unscored_rate == 0.125
    pairs = HeldOutResult.from_proto(pb.HeldOutResult(prompts=3, metrics={"eval/accuracy": 1.0}))
    assert math.isnan(pairs.reward_mean) and pairs.pass_at == pairs.maj_at == {}
    assert EvaluationResult(Version(0, 1), {"sums": found, "pairs": pairs}).first is found


def test_a_chat_is_a_prompt_and_comes_back_with_its_text_and_tokens() -> None:
    chat = [{"role": "user", "content": "1+1?"}]
    message = Prompt.of(chat).to_proto()
    assert (message.text, message.HasField("token_ids")) == ("", False)
    back = pb.LoopGroup(group_id="g", prompt=message)
    back.prompt.text = "<user>1+1?"
    back.prompt.token_ids.CopyFrom(to_tensor(np.array([7], np.int32)))
    prompt = Group.from_proto(back, Prompt.of(chat)).prompt
    assert prompt.token_ids is not None and prompt.token_ids.tolist() == [7]
    assert (prompt.text, prompt.messages) == ("<user>1+1?", chat)
    assert Prompt.of("text") == Prompt("text") and Prompt.of(prompt := Prompt("x")) is prompt

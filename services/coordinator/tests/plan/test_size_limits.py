"""A plan refuses sequences that are too long, by whose limit it is, and a canary that can decide nothing."""

from __future__ import annotations

from typing import Any

import pytest

from flotilla_coordinator.plan.chapter import Chapter
from flotilla_coordinator.plan.model_facts import SequenceLimit
from flotilla_coordinator.plan.sampling_lines import canary_errors
from flotilla_core.config import RunConfig

KEY = "evaluation.max_response_tokens"


@pytest.mark.parametrize("stack", [None, 64, 128])
def test_a_sequence_that_the_model_cannot_hold_is_refused(stack: int | None) -> None:
    limit = SequenceLimit(64, stack)
    assert not [*limit.responses_beyond(5, 59, KEY)]
    (refused,) = Chapter.of(limit.responses_beyond(5, 60, KEY)).errors
    assert f"need 65 tokens, the model has 64: lower {KEY}" in refused


def test_a_sequence_that_the_stack_does_not_take_is_not_called_too_long_for_the_model() -> None:
    limit = SequenceLimit(64, 16)
    assert limit.tokens == 16 and not [*limit.answers_beyond(16)]
    (refused,) = Chapter.of(limit.responses_beyond(5, 12, KEY)).errors
    assert (
        "need 17 tokens, and generator.max_model_tokens of the stack is 16 (the model has 64): "
        f"raise it to 17, or lower {KEY}" in refused
    )
    (refused,) = Chapter.of(limit.answers_beyond(65)).errors
    assert "raise" not in refused and "(the model has 64): lower data.max_prompt_tokens" in refused


@pytest.mark.parametrize(
    ("canary", "says"),
    [
        ({"prompts": 1, "tokens": 3}, "compares 3 tokens of each generator, too few"),
        ({"prompts": 8, "tokens": 1}, "compares 2 tokens of each generator, too few"),
        ({"fail_at": 1.0}, "weights.canary.fail_at is 1, and no mean difference"),
        ({"prompts": 1, "tokens": 4}, ""),
        ({"prompts": 0, "tokens": 1, "fail_at": 1.0}, ""),
        ({"temperatures": [], "tokens": 1, "prompts": 1}, ""),
        ({"fail_at": 0.5}, ""),
    ],
)
def test_a_canary_that_can_decide_nothing_is_refused(canary: dict[str, Any], says: str) -> None:
    """The data set has two prompts."""
    run = {"name": "r", "steps": 1, "data": {"train": "t.jsonl"}, "rewards": [{"reward": "exact"}]}
    config = RunConfig.model_validate(run | {"weights": {"canary": canary}})
    errors = Chapter.of(canary_errors(config, 2)).errors
    assert [says in error for error in errors] == [True] * bool(says)

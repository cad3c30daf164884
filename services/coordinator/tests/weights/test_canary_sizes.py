"""The canary at every size: right weights pass, however few tokens it has, and wrong ones do not at the usual sizes.

The tokens are drawn to the figures of SmolLM2-135M-Instruct in bfloat16 on a GPU (2,048 tokens): a mean probability of
0.40, a mean difference from float32 of 0.0044 at the trainer and 0.0055 at the generator, and one of 0.0068 between
both, with a deviation of 0.0105 and a maximum of 0.106. Rounding moves a logit, so a token that is almost sure hardly
moves and the differences have a heavy tail.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flotilla.generator.v1 import generator_pb2 as gen
from flotilla_coordinator.weights.canary import Canary
from flotilla_core.agreement import DECIDING_TOKENS, LEAST_TOKENS, SECOND_LOOK, Rounding
from flotilla_core.config import CanaryConfig, StackConfig
from flotilla_core.tensors import to_tensor
from flotilla_core.version import Version

pytestmark = pytest.mark.usefixtures("direct_calls")

V1 = Version(0, 1)
TOKENS = 400_000
RNG = np.random.default_rng(5)
EXACT = np.clip(RNG.beta(0.168, 0.252, TOKENS), 1e-6, 1 - 1e-6)


def moved(by: float) -> np.ndarray:
    """The probabilities of the same tokens, with noise of this deviation on their logits."""
    logits = np.log(EXACT / (1 - EXACT)) + by * RNG.standard_normal(TOKENS)
    return 1 / (1 + np.exp(-logits))


TRAINER, GENERATOR = moved(0.0777), moved(0.097)
STALE = moved(0.42)
"""As weights of some updates ago, 0.024 away on the mean."""
ANOTHER = RNG.permutation(EXACT)
"""As another model, 0.45 away."""


class Policy:
    """A trainer that scores tokens by their number."""

    async def logprobs(
        self, sequences: list[Any], temperature: float, *, in_float32: bool = False
    ) -> tuple[Version, list[np.ndarray]]:
        table = EXACT if in_float32 else TRAINER
        return V1, [np.log(table[numbers]) for _, numbers in sequences]


def member(table: np.ndarray) -> Any:
    """A generator that draws tokens by their number, with these probabilities."""

    async def generate(request: gen.GenerateRequest) -> AsyncIterator[gen.GenerateResponse]:
        for _ in request.samples:
            numbers = RNG.integers(0, TOKENS, request.sampling.max_tokens).astype(np.int32)
            logprobs = np.log(table[numbers]).astype(np.float32)
            sample = gen.GeneratedSample(token_ids=to_tensor(numbers), logprobs=to_tensor(logprobs))
            yield gen.GenerateResponse(samples=[sample])

    return SimpleNamespace(name="a", replica=SimpleNamespace(stub=SimpleNamespace(Generate=generate)))


def canary_of(prompts: int, tokens: int) -> Canary:
    """The canary of a new run."""
    config = CanaryConfig(prompts=prompts, tokens=tokens)
    stack = StackConfig.model_validate({end: {"dtype": "bfloat16"} for end in ("trainer", "generator")})
    asked = [np.arange(3, dtype=np.int32)] * prompts
    return Canary("run", config, stack, Policy(), asked, timeout_s=5)  # type: ignore[arg-type]


def test_the_tokens_are_like_those_that_were_measured() -> None:
    both, trainer, generator = (
        np.abs(one - other) for one, other in ((TRAINER, GENERATOR), (TRAINER, EXACT), (GENERATOR, EXACT))
    )
    assert [float(values.mean()) for values in (both, trainer, generator)] == pytest.approx(
        [0.0068, 0.0044, 0.0055], rel=0.1
    )
    assert float(both.std()) == pytest.approx(0.0105, rel=0.2)
    assert float(np.quantile(both, 1 - 1 / 2048)) == pytest.approx(0.106, rel=0.2)


@pytest.mark.parametrize(("prompts", "tokens", "starts"), [(1, 1, 5), (1, 4, 25), (1, 16, 25), (8, 32, 25)])
async def test_right_weights_pass_whatever_the_size_of_the_check(
    prompts: int, tokens: int, starts: int
) -> None:
    for _ in range(starts):
        canary = canary_of(prompts, tokens)
        for _ in range(4):
            assert not (await canary.check(V1, [member(GENERATOR)])).failures


@pytest.mark.parametrize(
    ("wrong", "prompts", "tokens"),
    [(STALE, 8, 32), (STALE, 2, 32), (ANOTHER, 8, 32), (ANOTHER, 1, LEAST_TOKENS)],
)
async def test_wrong_weights_do_not_pass(wrong: np.ndarray, prompts: int, tokens: int) -> None:
    for _ in range(10):
        canary = canary_of(prompts, tokens)
        assert not (await canary.check(V1, [member(GENERATOR)])).failures
        assert set((await canary.check(V1, [member(wrong)])).failures) == {"a"}


def drawn(table: np.ndarray, count: int, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of tokens for so many checks, and the differences of their probabilities."""
    numbers = RNG.integers(0, TOKENS, (count, tokens))
    return numbers, np.abs(TRAINER[numbers] - table[numbers])


def refused(table: np.ndarray, tokens: int, checks: int) -> int:
    """Count the members that both looks of so many checks refuse, with the limits of the canary."""
    first, _ = drawn(table, 1, DECIDING_TOKENS)
    measured = Rounding.of(np.log(TRAINER[first]), np.log(EXACT[first]))
    _, differences = drawn(table, checks, tokens)
    suspects = differences[differences.mean(axis=1) > (measured.limits(tokens).fail_at or 0)]
    count = 0
    for seen in suspects:
        numbers, more = drawn(table, 1, SECOND_LOOK * DECIDING_TOKENS - tokens)
        again = Rounding.of(np.log(TRAINER[numbers]), np.log(EXACT[numbers]))
        count += np.concatenate([seen, more[0]]).mean() > (again.limits(DECIDING_TOKENS).fail_at or 0)
    return count


@pytest.mark.parametrize("tokens", [1, 2, 4, 8, 16, 32, 64, 128])
def test_of_many_thousand_checks_of_right_weights_none_is_refused(tokens: int) -> None:
    assert refused(GENERATOR, tokens, 20_000) == 0


@pytest.mark.parametrize(
    ("wrong", "tokens", "least"), [(STALE, 256, 1.0), (STALE, 64, 0.99), (ANOTHER, 4, 0.99)]
)
def test_of_many_checks_of_wrong_weights_hardly_any_passes(
    wrong: np.ndarray, tokens: int, least: float
) -> None:
    assert refused(wrong, tokens, 2_000) >= least * 2_000


def test_chance_alone_would_not_refuse_right_weights_in_any_number_of_runs() -> None:
    """In standard errors of the second look, where 7 are a chance of 1e-12."""
    _, both = drawn(GENERATOR, 1, TOKENS)
    measured = Rounding.of(np.log(TRAINER), np.log(EXACT))
    error = both.std() / np.sqrt(SECOND_LOOK * DECIDING_TOKENS)
    assert (measured.limits(DECIDING_TOKENS).fail_at or 0) - both.mean() > 9 * error

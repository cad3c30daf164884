"""The live check: every member answers, or is named as failed; one with other weights by a mismatch."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flotilla.generator.v1 import generator_pb2 as gen
from flotilla_coordinator.weights.canary import Canary, LiveCheck
from flotilla_core.config import CanaryConfig, StackConfig
from flotilla_core.errors import FlotillaError, Mismatch, Unavailable
from flotilla_core.tensors import to_tensor
from flotilla_core.version import Version

pytestmark = pytest.mark.usefixtures("direct_calls")

V1 = Version(0, 1)
TOKENS = np.arange(4, dtype=np.int32)
AGREED = np.full(4, -1.0, dtype=np.float32)


class Policy:
    """A trainer that gives every token the same log-probability, and another one in float32 if it rounds."""

    def __init__(self, rounding: float = 0.0) -> None:
        self.rounding = rounding
        self.measured = 0

    async def logprobs(
        self, sequences: list[Any], temperature: float, *, in_float32: bool = False
    ) -> tuple[Version, list[np.ndarray]]:
        self.measured += in_float32
        exact = moved(self.rounding) if in_float32 else AGREED
        return V1, [exact for _ in sequences]


def moved(by: float) -> np.ndarray:
    """The log-probabilities of tokens whose probabilities are so much larger."""
    return np.log(np.exp(AGREED) + np.float32(by))


def member(
    name: str,
    logprobs: np.ndarray = AGREED,
    error: FlotillaError | None = None,
    finish: int = 0,
    others: np.ndarray | None = None,
) -> Any:
    """A generator whose answers have these log-probabilities; those to the second prompt have the `others`."""

    async def generate(request: gen.GenerateRequest) -> AsyncIterator[gen.GenerateResponse]:
        if error is not None:
            raise error
        for slot in request.samples:
            first = int(slot.sample_id.rpartition("/")[2]) % 2 == 0
            sample = gen.GeneratedSample(
                token_ids=to_tensor(TOKENS),
                logprobs=to_tensor(logprobs if first or others is None else others),
                finish_reason=finish,
            )
            yield gen.GenerateResponse(samples=[sample])

    return SimpleNamespace(name=name, replica=SimpleNamespace(stub=SimpleNamespace(Generate=generate)))


def canary_of(dtype: str, policy: Policy, **settings: Any) -> Canary:
    """A canary of two prompts in a stack that computes in this type."""
    prompts = [np.arange(3, dtype=np.int32)] * 2
    config = CanaryConfig(prompts=2, tokens=4, **settings)
    stack = StackConfig.model_validate({end: {"dtype": dtype} for end in ("trainer", "generator")})
    return Canary("run", config, stack, policy, prompts, timeout_s=5)  # type: ignore[arg-type]


@pytest.fixture
def canary() -> Canary:
    return canary_of("float32", Policy(), temperatures=(1.0, 0.5))


async def test_one_answer_that_is_off_does_not_condemn_a_member(canary: Canary) -> None:
    """A difference of 0.018 in one of two answers is 0.009 over both."""
    outcome = await canary.check(V1, [member("a", moved(0.018), others=AGREED), member("b")])
    assert outcome.report is not None and not outcome.failures
    assert outcome.report.probs_mean == pytest.approx(0.0045, abs=1e-6)


@pytest.mark.parametrize(("rounding", "named"), [(0.02, False), (0.01, True)])
async def test_a_difference_is_judged_by_how_far_the_trainer_is_from_float32(
    rounding: float, named: bool
) -> None:
    """Both ends that round by 0.02 differ by 0.028, by chance and by their kernels a little more."""
    policy = Policy(rounding)
    canary = canary_of("bfloat16", policy)
    outcome = await canary.check(V1, [member("a", moved(0.03))])
    assert bool(outcome.failures) is named and policy.measured == 1 + named
    if named:
        with pytest.raises(Mismatch, match=r"digests match.*rounding explains 0\.0141.*float32 by 0\.0100"):
            raise outcome.failures["a"]


async def test_rounding_is_measured_once_and_again_before_a_member_is_named() -> None:
    """A policy that has moved rounds more than at the start."""
    policy = Policy(0.004)
    canary = canary_of("bfloat16", policy)
    for _ in range(3):
        assert not (await canary.check(V1, [member("a", moved(0.006))])).failures
    assert policy.measured == 1
    policy.rounding = 0.012
    assert not (await canary.check(V1, [member("a", moved(0.018))])).failures
    assert policy.measured == 2 and canary.rounding is not None and canary.rounding.mean > 0.011
    assert (await canary.check(V1, [member("a", moved(0.05))])).failures and policy.measured == 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_limits_that_a_run_sets_are_kept_and_nothing_is_measured(dtype: str) -> None:
    policy = Policy(0.1)
    canary = canary_of(dtype, policy, warn_at=0.01, fail_at=0.02)
    outcome = await canary.check(V1, [member("a", moved(0.03)), member("b", moved(0.015))])
    assert set(outcome.failures) == {"a"} and not policy.measured
    assert outcome.report is not None and outcome.report.warn_at == 0.01


async def test_a_difference_is_warned_of_when_two_checks_in_a_row_find_it() -> None:
    warnings: list[str] = []
    figures: dict[str, float] = {}
    canary = canary_of("float32", Policy(), warn_at=0.01, fail_at=0.5)
    check = LiveCheck(canary, figures, lambda rounding: None, warnings.append)
    for difference, warned in ((0.02, 0), (0.0, 0), (0.02, 0), (0.03, 1), (0.0, 1)):
        report = SimpleNamespace(version=V1, members=[member("a", moved(difference))])
        assert not await check.verify(report)  # type: ignore[arg-type]
        assert figures["canary/mean"] == pytest.approx(difference, abs=1e-6) and len(warnings) == warned
    assert "0.0300 at version 0.1, above 0.0100" in warnings[0]


async def test_members_that_agree_pass_with_figures(canary: Canary) -> None:
    outcome = await canary.check(V1, [member("a"), member("b")])
    assert outcome.report is not None and not outcome.failures
    assert outcome.report.tokens == 2 * 2 * 2 * 4 and outcome.report.probs_mean < 1e-6


async def test_a_member_that_dies_is_named_and_the_others_are_checked(canary: Canary) -> None:
    outcome = await canary.check(V1, [member("a"), member("b", error=Unavailable("it died"))])
    assert set(outcome.failures) == {"b"} and outcome.report is not None
    assert outcome.report.tokens == 2 * 2 * 4


async def test_a_cut_answer_is_a_failure_of_its_member(canary: Canary) -> None:
    outcome = await canary.check(V1, [member("a", finish=gen.FINISH_REASON_ABORT)])
    assert set(outcome.failures) == {"a"} and outcome.report is None


@pytest.mark.parametrize("wrong", [np.full(4, -2.0, dtype=np.float32), np.full(4, np.nan, dtype=np.float32)])
async def test_a_member_that_decodes_otherwise_is_named_by_a_mismatch(
    canary: Canary, wrong: np.ndarray
) -> None:
    outcome = await canary.check(V1, [member("a"), member("b", wrong)])
    assert set(outcome.failures) == {"b"}
    with pytest.raises(
        Mismatch, match=r"b does not decode with the trainer's weights.*digests match.*restart b"
    ):
        raise outcome.failures["b"]

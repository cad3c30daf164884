"""The live check: every member answers, or is named as failed; one with other weights by a mismatch."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flotilla.generator.v1 import generator_pb2 as gen
from flotilla_coordinator.weights.canary import Canary
from flotilla_core import rpc
from flotilla_core.config import CanaryConfig
from flotilla_core.errors import FlotillaError, Mismatch, Unavailable
from flotilla_core.tensors import to_tensor
from flotilla_core.version import Version

V1 = Version(0, 1)
TOKENS = np.arange(4, dtype=np.int32)
AGREED = np.full(4, -1.0, dtype=np.float32)


class Policy:
    """A trainer that gives every token the same log-probability."""

    async def logprobs(self, sequences: list[Any], temperature: float) -> tuple[Version, list[np.ndarray]]:
        return V1, [AGREED for _ in sequences]


def member(
    name: str,
    logprobs: np.ndarray = AGREED,
    error: FlotillaError | None = None,
    finish: int = 0,
    others: np.ndarray | None = None,
) -> Any:
    """A generator whose answers have these log-probabilities; those after the first prompt have the `others`."""

    async def generate(request: gen.GenerateRequest) -> AsyncIterator[gen.GenerateResponse]:
        if error is not None:
            raise error
        first = request.samples[0].sample_id.endswith("/0")
        sample = gen.GeneratedSample(
            token_ids=to_tensor(TOKENS),
            logprobs=to_tensor(logprobs if first or others is None else others),
            finish_reason=finish,
        )
        yield gen.GenerateResponse(samples=[sample])

    return SimpleNamespace(name=name, replica=SimpleNamespace(stub=SimpleNamespace(Generate=generate)))


@pytest.fixture
def canary(monkeypatch: pytest.MonkeyPatch) -> Canary:
    monkeypatch.setattr(rpc, "server_stream", lambda method, request, **_: method(request))
    prompts = [np.arange(3, dtype=np.int32)] * 2
    config = CanaryConfig(prompts=2, tokens=4, temperatures=(1.0, 0.5))
    return Canary("run", config, 0.016, Policy(), prompts, timeout_s=5)  # type: ignore[arg-type]


async def test_one_answer_that_rounding_moved_does_not_condemn_a_member(canary: Canary) -> None:
    """A difference of 0.02 in one of two answers is 0.01 over both, which rounding explains."""
    moved = np.log(np.exp(AGREED) + np.float32(0.02))
    outcome = await canary.check(V1, [member("a", moved, others=AGREED), member("b")])
    assert outcome.report is not None and outcome.report.probs_mean == pytest.approx(0.005, abs=1e-6)


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
    assert set(outcome.failures) == {"b"} and outcome.mismatch is outcome.failures["b"]
    with pytest.raises(Mismatch, match=r"token probabilities of b differ from the trainer.*restart b"):
        raise outcome.failures["b"]

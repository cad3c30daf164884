"""The agreement of generator and trainer under one version of the weights: its limits, and what old KV caches add.

Invariants: a limit that a run does not set is what rounding explains in the dtypes of its stack, and on its model where
that was measured, so equal weights pass. Tokens that were decoded on the KV cache of older weights are never compared
with a limit.

Rounding is measured on the trainer: how far its probabilities are from those that float32 gives the same tokens by the
same weights. Errors add in squares, and a generator of the same type rounds about as much, so both ends differ by
`BOTH_ENDS` times as much on the mean. `KERNELS` is for a generator whose kernels round more often than the trainer's.
The mean over few tokens is off by chance, by its standard error: limits of a check are several of them above what is
explained. The differences have a heavy tail, so a few tokens say neither what rounding is nor how far chance goes.
Nothing is measured on fewer than `DECIDING_TOKENS`, and no generator is named by fewer: one that is above the limit of
its check is looked at again, over so many times more tokens that chance explains no second time.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import numpy as np

from flotilla_core.config import CanaryConfig, StackConfig, WeightSyncConfig
from flotilla_core.config.algorithm import CorrectionConfig


class AgreementLimits(NamedTuple):
    """Mean differences of token probabilities; None is off."""

    warn_at: float | None
    fail_at: float | None


EXPLAINED_BY_ROUNDING = {
    "float32": AgreementLimits(0.005, 0.01),
    # SmolLM2-135M-Instruct, 128 tokens: equal weights differ by 0.0082 in the median and by 0.0118 once in a hundred
    # times, weights of one to eight small steps ago by 0.020.
    "bfloat16": AgreementLimits(0.012, 0.016),
    # The same model, 256 tokens, matrices and tokens rounded as vLLM does (`fp8_per_channel`): 0.033 from bfloat16 of
    # the same weights, 0.027 to 0.040 in answers of 32 tokens. Weights of some small steps ago are within that.
    "fp8": AgreementLimits(0.045, 0.06),
}
"""The limits where nothing was measured."""

BOTH_ENDS = math.sqrt(2)
KERNELS = 1.1
WARN_ERRORS = 2.0
FAIL_ERRORS = 3.0
DECIDING_TOKENS = 256
"""Tokens of a check that measures or decides by itself, as many as the default one has."""
SECOND_LOOK = 8
"""A second look is over so many times the tokens of the first, or of `DECIDING_TOKENS` where that had fewer.

A sound generator is then 9 of its standard errors below the limit that a check of the default size has.
"""
LEAST_TOKENS = 4
"""A first look at fewer passes weights of another model too often: at 1 token once in four checks."""
WARN_OTHER_TOKENS = 1.5
FAIL_OTHER_TOKENS = 2.0
"""The failure limit on the many tokens of an update, as a multiple of what rounding explains on those of a check."""


class Rounding(NamedTuple):
    """The differences of the trainer's probabilities of some tokens from those of float32."""

    mean: float
    deviation: float

    @classmethod
    def of(cls, logprobs: np.ndarray, in_float32: np.ndarray) -> Rounding:
        """Measure it on the log-probabilities of some tokens."""
        difference = np.abs(np.exp(logprobs) - np.exp(in_float32))
        return cls(float(difference.mean()), float(difference.std()))

    @property
    def explained(self) -> float:
        """The mean difference of both ends that rounding explains."""
        return BOTH_ENDS * self.mean

    def limits(self, tokens: int) -> AgreementLimits:
        """Return the limits for the mean over so many tokens like those that it was measured on."""
        error = BOTH_ENDS * self.deviation / math.sqrt(tokens)
        return _at_least(
            EXPLAINED_BY_ROUNDING["float32"],
            KERNELS * self.explained + WARN_ERRORS * error,
            KERNELS * self.explained + FAIL_ERRORS * error,
        )


def agreement_limits(
    stack: StackConfig, section: CanaryConfig | CorrectionConfig, measured: Rounding | None = None
) -> AgreementLimits:
    """Return the limits of a section of a run, with `auto` replaced by what rounding explains on this stack."""
    dtypes = (stack.trainer.dtype, stack.generator.dtype)
    rounded = stack.generator.quantization or ("bfloat16" if "bfloat16" in dtypes else "float32")
    explained = EXPLAINED_BY_ROUNDING[rounded]
    if measured is not None:
        other = measured.explained
        explained = _at_least(explained, WARN_OTHER_TOKENS * other, FAIL_OTHER_TOKENS * other)
    return chosen(section, explained)


def check_limits(
    stack: StackConfig, section: CanaryConfig, measured: Rounding | None, tokens: int
) -> AgreementLimits:
    """Return the limits of a live check of so many tokens."""
    if measured is None:
        return agreement_limits(stack, section)
    auto = measured.limits(tokens)
    if stack.generator.quantization is not None:  # which is not measured: the trainer has no such matrices
        auto = _at_least(
            EXPLAINED_BY_ROUNDING[stack.generator.quantization], auto.warn_at or 0, auto.fail_at or 0
        )
    return chosen(section, auto)


def chosen(section: CanaryConfig | CorrectionConfig, auto: AgreementLimits) -> AgreementLimits:
    """Return the limits of a section, with these for `auto`."""
    return AgreementLimits(
        warn_at=auto.warn_at if section.warn_at == "auto" else section.warn_at,
        fail_at=auto.fail_at if section.fail_at == "auto" else section.fail_at,
    )


def _at_least(floor: AgreementLimits, warn_at: float, fail_at: float) -> AgreementLimits:
    return AgreementLimits(max(floor.warn_at or 0.0, warn_at), max(floor.fail_at or 0.0, fail_at))


def kv_policy(weights: WeightSyncConfig, max_staleness: int) -> Literal["recompute", "reuse", "drain"]:
    """Return what a commit does to the KV cache of running samples in a run with this staleness bound."""
    if weights.update == "between_samples":
        return "drain"
    if weights.kv_policy != "auto":
        return weights.kv_policy
    return "reuse" if max_staleness else "recompute"

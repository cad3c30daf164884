"""The agreement of generator and trainer under one version of the weights: its limits, and what old KV caches add.

Invariants: a limit that a run does not set is what rounding explains in the dtypes of its stack, so equal weights pass.
Tokens that were decoded on the KV cache of older weights are never compared with a limit.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

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
}


def agreement_limits(stack: StackConfig, section: CanaryConfig | CorrectionConfig) -> AgreementLimits:
    """Return the limits of a section of a run, with `auto` replaced by what rounding explains on this stack."""
    dtypes = (stack.trainer.dtype, stack.generator.dtype)
    explained = EXPLAINED_BY_ROUNDING["bfloat16" if "bfloat16" in dtypes else "float32"]
    return AgreementLimits(
        warn_at=explained.warn_at if section.warn_at == "auto" else section.warn_at,
        fail_at=explained.fail_at if section.fail_at == "auto" else section.fail_at,
    )


def kv_policy(weights: WeightSyncConfig, max_staleness: int) -> Literal["recompute", "reuse", "drain"]:
    """Return what a commit does to the KV cache of running samples in a run with this staleness bound."""
    if weights.update == "between_samples":
        return "drain"
    if weights.kv_policy != "auto":
        return weights.kv_policy
    return "reuse" if max_staleness else "recompute"

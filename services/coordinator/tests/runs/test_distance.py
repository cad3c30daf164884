"""Updates tell when generator and trainer are too far from each other."""

from __future__ import annotations

from typing import Any

import pytest

from flotilla_coordinator.runs.warnings import narrow_clip_warning, policy_mismatch_warning
from flotilla_core.agreement import Rounding, agreement_limits
from flotilla_core.config import RunConfig, StackConfig
from flotilla_core.config.algorithm import CorrectionConfig
from flotilla_core.version import Version

FIRST, LATER = Version(0, 0), Version(0, 7)
CLIPPING = {"clip_fraction": 0.16}


def config(**sections: Any) -> RunConfig:
    data = {"train": "train.jsonl"}
    return RunConfig.model_validate(
        {"name": "far", "steps": 9, "data": data, "rewards": [{"reward": "exact"}], **sections}
    )


def test_a_difference_above_the_limit_is_told() -> None:
    limits = agreement_limits(StackConfig(), CorrectionConfig())
    assert "0.006" in policy_mismatch_warning(limits, {"probs_diff/fresh": 0.006})
    assert not policy_mismatch_warning(limits, {"probs_diff/fresh": 0.004})
    assert not policy_mismatch_warning(limits, {})


@pytest.mark.parametrize("end", ["trainer", "generator"])
def test_a_difference_that_bfloat16_explains_is_not_told(end: str) -> None:
    stack = StackConfig.model_validate({end: {"dtype": "bfloat16"}})
    limits = agreement_limits(stack, CorrectionConfig())
    assert not policy_mismatch_warning(limits, {"probs_diff/fresh": 0.0065})
    assert policy_mismatch_warning(limits, {"probs_diff/fresh": 0.02})


def test_a_model_that_rounds_more_may_differ_more() -> None:
    stack = StackConfig.model_validate({"trainer": {"dtype": "bfloat16"}})
    limits = agreement_limits(stack, CorrectionConfig(), Rounding(mean=0.02, deviation=0.03))
    assert not policy_mismatch_warning(limits, {"probs_diff/fresh": 0.03})
    assert limits.fail_at is not None and 0.05 < limits.fail_at < 0.06
    assert agreement_limits(stack, CorrectionConfig(fail_at=0.1), Rounding(0.02, 0.03)).fail_at == 0.1


def test_a_clip_in_the_first_update_is_the_noise_of_the_engine() -> None:
    assert "16%" in narrow_clip_warning(config(), FIRST, CLIPPING)
    assert not narrow_clip_warning(config(), FIRST, {"clip_fraction": 0.001})


@pytest.mark.parametrize(
    ("sections", "version"),
    [
        ({}, LATER),
        ({"optimizer": {"steps_per_update": 2}}, FIRST),
        ({"algorithm": {"loss": {"type": "reinforce"}}}, FIRST),
    ],
    ids=["the policy has moved", "it moves within the update", "nothing is clipped"],
)
def test_a_clip_that_may_be_meant_is_not_told(sections: dict[str, Any], version: Version) -> None:
    assert not narrow_clip_warning(config(**sections), version, CLIPPING)

"""A session and a call refuse the same values as the configuration of a run, and name the same keys."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from flotilla_core.config import PolicyConfig
from flotilla_core.config.training import TeacherConfig
from flotilla_core.errors import InvalidRequest
from flotilla_testing.session_specs import called, wire_objective
from flotilla_trainer.objective.session_objective import call_objective
from flotilla_trainer.wire.objective import ObjectiveSettings

OVERLONG = {"buffer_tokens": 4, "penalty": 1.0}
REWARD_KL = {"placement": "reward", "estimator": "k1", "coefficient": 0.1}
REFUSED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "weights twice": (
        {"loss": {"type": "ppo"}, "correction": {"importance": "token"}},
        ("correction.importance", "ppo", "correction.proximal"),
    ),
    "gdpo without its terms": (
        {"advantage": {"type": "gdpo"}, "kl": REWARD_KL},
        ("gdpo", "kl.placement reward"),
    ),
    "gdpo in a control": (
        {"advantage": {"type": "gdpo"}, "shuffle_rewards": True},
        ("gdpo", "shuffle_rewards"),
    ),
    "gdpo punished": ({"advantage": {"type": "gdpo", "overlong": OVERLONG}}, ("gdpo", "overlong")),
    "gdpo bounded": ({"advantage": {"type": "gdpo", "reward_clip": 1.0}}, ("gdpo", "reward_clip")),
    "remax punished": ({"advantage": {"type": "remax", "overlong": OVERLONG}}, ("remax", "overlong")),
    "a teacher and a reward": (
        {"advantage": {"type": "distill"}, "kl": REWARD_KL},
        ("kl.placement is reward", "distill"),
    ),
    "a constant of no use": (
        {"aggregation": {"type": "token_mean", "constant_tokens": 5}},
        ("aggregation.constant_tokens",),
    ),
    "two adaptive coefficients": (
        {"advantage": {"type": "gae"}, "critic": {}, "kl": REWARD_KL | {"target": 0.1}},
        ("kl.target", "critic"),
    ),
    "distributions from elsewhere": (
        {"kl": {"placement": "loss", "estimator": "full", "reference": "service"}},
        ("reference",),
    ),
}


def checked(algorithm: dict[str, Any]) -> ObjectiveSettings:
    """Return what a session makes of this section, which any client may send."""
    return ObjectiveSettings.from_wire(wire_objective("policy", algorithm, max_response_tokens=8))


@pytest.mark.parametrize("case", REFUSED)
def test_a_session_refuses_what_a_run_refuses(case: str) -> None:
    algorithm, keys = REFUSED[case]
    with pytest.raises(ValidationError):
        PolicyConfig.model_validate(algorithm)
    with pytest.raises(InvalidRequest) as refused:
        checked(algorithm)
    for key in keys:
        assert key in str(refused.value)


def test_a_session_whose_policy_learns_from_a_teacher_reads_as_the_section_of_a_run() -> None:
    policy = checked({"teacher": {"top_k": 4, "tail": False}}).policy
    assert policy is not None and policy.teacher == TeacherConfig(top_k=4, tail=False)


@pytest.mark.parametrize(
    ("section", "place"),
    [
        ({"teacher": {"top_k": 0}}, "teacher.top_k"),
        ({"teacher": {"top_k": 1025}}, "teacher.top_k"),
        ({"teacher": {"top_k": 2.5}}, "teacher.top_k"),
        ({"teacher": {"coefficient": 0.0}}, "teacher.coefficient"),
        ({"teacher": {"coefficient": "1"}}, "teacher.coefficient"),
        ({"teacher": {"divergence": ""}}, "teacher.divergence"),
        ({"teacher": {"divergence": 7}}, "teacher.divergence"),
        ({"correction": {"proximal": 17}}, "correction.proximal"),
        ({"correction": {"rejection": [{"measure": "k4", "low": 1}]}}, "correction.rejection[0].measure"),
        ({"loss": {"type": "ppo", "clip_hihg": 0.2}}, "loss.clip_hihg"),
        ({"entropie": 1}, "entropie"),
    ],
)
def test_a_value_that_cannot_be_is_refused_with_its_place(section: dict[str, Any], place: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        checked(section)
    assert refused.value.where == f"spec.objective.section.{place}"


def test_a_refusal_names_every_reason_and_what_was_probably_meant() -> None:
    with pytest.raises(InvalidRequest) as refused:
        checked({"kl": {"placment": "loss"}, "correction": {"proximal": "trainr"}})
    said = str(refused.value)
    assert "did you mean kl.placement?" in said and "did you mean trainer?" in said


@pytest.mark.parametrize(("kind", "said"), [("", "no objective is given"), ("dpo", "'dpo' is no objective")])
def test_a_kind_that_does_not_exist_is_named(kind: str, said: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"{said} .*spec\.objective\.kind"):
        ObjectiveSettings.from_wire(wire_objective(kind, {}))


@pytest.mark.parametrize(
    "section", [{"advantage": {"overlong": OVERLONG}}, {"aggregation": {"type": "constant"}}]
)
def test_a_length_limit_that_is_needed_has_to_be_said(section: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=r"spec\.objective\.max_response_tokens"):
        ObjectiveSettings.from_wire(wire_objective("policy", section, max_response_tokens=0))


def test_a_session_learns_from_the_teacher_alone_where_a_run_may() -> None:
    nothing = {"advantage": {"type": "distill", "coefficient": 0.0}}
    checked(nothing | {"teacher": {}})
    with pytest.raises(InvalidRequest, match=r"advantage\.coefficient is 0.*`teacher: \{\}`"):
        checked(nothing)


def test_a_call_whose_loss_does_not_go_with_its_session_is_refused() -> None:
    # Weights of the importance belong to a loss without a ratio here.
    section: dict[str, Any] = {"loss": {"type": "reinforce"}, "correction": {"importance": "token"}}
    with pytest.raises(InvalidRequest, match=r"correction\.importance is token, but the ratio of ppo"):
        call_objective(checked(section), called("ppo"))
    section["correction"]["proximal"] = "trainer"
    asked = call_objective(checked(section), called("ppo")).policy
    assert asked is not None and asked.loss.type == "ppo"


def test_a_call_takes_the_defaults_of_its_loss_and_nothing_of_the_preset() -> None:
    asked = call_objective(checked({"type": "dapo"}), called("ppo")).policy
    assert asked is not None and asked.loss.arguments["clip_high"] == 0.2


def test_a_session_reads_a_section_as_a_run_does() -> None:
    section = {
        "advantage": {"type": "reinforce", "overlong": OVERLONG, "clip": 2.0},
        "kl": {"placement": "loss", "estimator": "k2", "coefficient": 0.5},
        "correction": {"proximal": "interpolated", "staleness_decay": 0.5, "sequence_low": 0.9},
    }
    assert checked(section).section == PolicyConfig.model_validate(section)

"""A session and a call refuse the same values as the configuration of a run, and name the same keys."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from flotilla.trainer.v1 import session_pb2 as pb
from flotilla_core.config import PolicyConfig
from flotilla_core.config.roles import TeacherConfig
from flotilla_core.errors import InvalidRequest
from flotilla_trainer.objective.session_objective import call_objective
from flotilla_trainer.objective.settings import check_objective, policy_config

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


def on_the_wire(algorithm: dict[str, Any]) -> pb.Objective:
    """Return the message that a foreign client would send for this section, without a check."""
    policy = pb.PolicyObjective(temperature=1.0, max_response_tokens=8)
    policy.correction.staleness_decay = 1.0
    policy.aggregation.type = pb.AGGREGATION_TYPE_TOKEN_MEAN
    policy.loss.name = algorithm.get("loss", {"type": "ppo"})["type"]
    advantage = {"type": "grpo"} | algorithm.get("advantage", {})
    policy.advantage.function.name = advantage.pop("type")
    policy.advantage.MergeFrom(pb.Advantage(**advantage))
    policy.aggregation.constant_tokens = algorithm.get("aggregation", {}).get("constant_tokens", 0)
    policy.shuffle_rewards = algorithm.get("shuffle_rewards", False)
    kl = dict(algorithm.get("kl", {}))
    if kl:
        policy.kl.MergeFrom(
            pb.Kl(
                placement=f"KL_PLACEMENT_{kl.pop('placement').upper()}",
                estimator=f"KL_ESTIMATOR_{kl.pop('estimator').upper()}",
                reference_is_sent=kl.pop("reference", "frozen") == "service",
                horizon_samples=10_000,
                **kl,
            )
        )
    if "correction" in algorithm:
        policy.correction.importance = pb.IMPORTANCE_TOKEN
        policy.correction.importance_cap = 2.0
    return pb.Objective(policy=policy)


@pytest.mark.parametrize("case", REFUSED)
def test_a_session_refuses_what_a_run_refuses(case: str) -> None:
    algorithm, keys = REFUSED[case]
    with pytest.raises(ValidationError):
        PolicyConfig.model_validate(algorithm)
    with pytest.raises(InvalidRequest) as refused:
        check_objective(on_the_wire(algorithm))
    for key in keys:
        assert key in str(refused.value)


def taught(**section: Any) -> pb.Objective:
    objective = on_the_wire({})
    asked = {"top_k": 4, "coefficient": 1.0, "divergence": pb.TEACHER_DIVERGENCE_FORWARD, "tail": True}
    objective.policy.teacher.CopyFrom(pb.Teacher(**asked | section))
    return objective


def test_a_session_whose_policy_learns_from_a_teacher_reads_as_the_section_of_a_run() -> None:
    assert policy_config(taught(tail=False).policy, "here").teacher == TeacherConfig(top_k=4, tail=False)


@pytest.mark.parametrize(
    ("section", "field"),
    [
        ({"top_k": 0}, "teacher.top_k"),
        ({"top_k": 1025}, "teacher.top_k"),
        ({"coefficient": 0.0}, "teacher.coefficient"),
        ({"coefficient": float("nan")}, "teacher.coefficient"),
        ({"divergence": pb.TEACHER_DIVERGENCE_UNSPECIFIED}, "teacher.divergence"),
        ({"divergence": 7}, "teacher.divergence"),
    ],
)
def test_a_session_that_says_half_of_a_teacher_is_refused_by_the_field(
    section: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidRequest, match=field.replace(".", r"\.")):
        check_objective(taught(**section))


def test_a_session_learns_from_the_teacher_alone_where_a_run_may() -> None:
    alone, nothing = taught(), on_the_wire({})
    for objective in (alone, nothing):
        objective.policy.advantage.function.name = "distill"
        objective.policy.advantage.function.parameters["coefficient"] = 0.0
    check_objective(alone)
    with pytest.raises(InvalidRequest, match=r"advantage\.coefficient is 0.*`teacher: \{\}`"):
        check_objective(nothing)


def test_a_call_whose_loss_does_not_go_with_its_session_is_refused() -> None:
    # Weights of the importance belong to a loss without a ratio here.
    session = on_the_wire({"loss": {"type": "reinforce"}, "correction": {"importance": "token"}})
    check_objective(session)
    with pytest.raises(InvalidRequest, match=r"correction\.importance is token, but the ratio of ppo"):
        call_objective(session, pb.Function(name="ppo"))
    session.policy.correction.proximal = pb.PROXIMAL_TRAINER
    assert call_objective(session, pb.Function(name="ppo")).policy.loss.name == "ppo"


def test_a_choice_that_does_not_exist_is_named() -> None:
    session = on_the_wire({})
    session.policy.correction.proximal = 17  # type: ignore[assignment]
    with pytest.raises(InvalidRequest, match=r"17 is no Proximal .*correction\.proximal"):
        check_objective(session)


def test_an_objective_reads_as_the_section_that_a_run_would_write() -> None:
    objective = on_the_wire({"advantage": {"type": "reinforce", "overlong": OVERLONG, "clip": 2.0}})
    objective.policy.kl.MergeFrom(
        pb.Kl(
            placement=pb.KL_PLACEMENT_LOSS,
            estimator=pb.KL_ESTIMATOR_K2,
            coefficient=0.5,
            horizon_samples=10_000,
        )
    )
    objective.policy.correction.MergeFrom(
        pb.Correction(proximal=pb.PROXIMAL_INTERPOLATED, staleness_decay=0.5, sequence_low=0.9)
    )
    written = {
        "advantage": {"type": "reinforce", "overlong": OVERLONG, "clip": 2.0},
        "kl": {"placement": "loss", "estimator": "k2", "coefficient": 0.5},
        "correction": {
            "proximal": "interpolated",
            "staleness_decay": 0.5,
            "sequence_low": 0.9,
            "warn_at": None,
            "fail_at": None,
        },
    }
    assert policy_config(objective.policy, "here") == PolicyConfig.model_validate(written)

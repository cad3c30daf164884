"""Names and parameters of advantages and losses are the same where they are configured and where they are computed."""

from __future__ import annotations

import inspect
import json
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flotilla.trainer.v1.session_pb2 import Role
from flotilla_algorithms import ADVANTAGES, PAIR_LOSSES
from flotilla_coordinator.trainers.spec import critic_spec, frozen_spec, session_spec
from flotilla_core.config import PolicyConfig, RunConfig
from flotilla_core.config.advantages import AdvantageSection, GdpoAdvantage
from flotilla_core.config.losses import LossSection
from flotilla_core.config.presets import PRESETS
from flotilla_core.roles import CRITIC, REFERENCE, TEACHER
from flotilla_trainer.front.session_settings import scoring_batching, session_settings
from flotilla_trainer.losses.table import LOSSES
from flotilla_trainer.objective.session_objective import session_objective
from flotilla_trainer.objective.value import ValueUpdate
from flotilla_trainer.wire.settings import SessionSettings

DOCUMENTS = [Path(__file__).parents[2] / "docs" / name for name in ("algorithms.md", "preferences.md")]
CHOSEN_BY_THE_FRONT = {"share", "covariance_low", "covariance_high"}


def sections(union: Any) -> dict[str, Any]:
    """The members of a union that name functions of ours, by type."""
    members = [typing.get_args(member)[0] for member in typing.get_args(typing.get_args(union)[0])]
    ours = [member() for member in members if not member.model_fields["type"].is_required()]
    return {section.type: section for section in ours}


def parameters(function: Callable[..., Any]) -> set[str]:
    kinds = inspect.signature(function).parameters.values()
    return {parameter.name for parameter in kinds if parameter.kind is parameter.KEYWORD_ONLY}


@pytest.mark.parametrize(("union", "table"), [(AdvantageSection, ADVANTAGES), (LossSection, LOSSES)])
def test_every_function_is_configured_by_its_own_parameters(
    union: Any, table: dict[str, Callable[..., Any]]
) -> None:
    configured = sections(union)
    assert configured.keys() == table.keys()
    for name, section in configured.items():
        assert section.arguments.keys() - CHOSEN_BY_THE_FRONT == parameters(table[name]), name


ALGORITHMS = [
    *({"type": preset} for preset in PRESETS),
    {"type": "sft"},
    {"type": "dpo", "label_smoothing": 0.1},
    {"type": "dpo", "loss": "ipo", "reference_free": True},
    {"type": "dpo", "loss": "hinge", "beta": 0.5},
    {"type": "reward_model", "center_coefficient": 0.01},
    {
        "sample_weights": {
            "by_reward": "max_random",
            "by_difficulty": {"easiest": 0.0, "hardest": 3.0},
            "by_length": {"shortest": 2.0},
        }
    },
    {
        "advantage": {
            "normalize_std": False,
            "drop_truncated": True,
            "reward_normalization": {"mean": "batch", "std": "running", "clip": 3, "scale": 0.5},
        }
    },
    {
        "advantage": {"overlong": {"buffer_tokens": 4}, "clip": 5, "reward_clip": 2, "keep_mean_above": 0},
        "aggregation": {"type": "constant", "constant_tokens": 7},
        "kl": {"placement": "reward", "estimator": "k1", "target": 0.1},
        "correction": {
            "proximal": "trainer",
            "importance": "sequence",
            "normalize_importance": True,
            "sequence_low": 0.5,
            "fail_at": 0.2,
            "rejection": [
                {"measure": "k1", "low": 0.5, "high": 2},
                {"measure": "difference", "over": "sequence_mean", "low": -0.1},
            ],
        },
        "entropy_coefficient": 0.01,
        "shuffle_rewards": True,
    },
]


def run_of(algorithm: dict[str, Any], tmp_path: Path, **beside: Any) -> RunConfig:
    judges = [] if algorithm.get("type") == "reward_model" else [{"reward": "exact"}]
    return RunConfig.model_validate(
        {
            "name": "contract",
            "steps": 2,
            "data": {"train": tmp_path / "train.jsonl"},
            "rewards": judges,
            "algorithm": algorithm,
            **beside,
        }
    )


def of_the_ranks(settings: SessionSettings) -> SessionSettings:
    """What a rank reads of the command that opens the session."""
    return SessionSettings.from_fields(json.loads(json.dumps(settings.fields())))


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda algorithm: algorithm.get("type", "everything"))
def test_every_key_of_a_run_reaches_the_front_and_the_ranks_by_itself(
    algorithm: dict[str, Any], tmp_path: Path
) -> None:
    acts = {"environment": {"name": "frozen_lake"}} if algorithm.get("type") == "gigpo" else {}
    config = run_of(algorithm, tmp_path, **acts)
    settings = session_settings(session_spec(config, tmp_path))
    session_objective(settings.objective)
    assert of_the_ranks(settings) == settings
    expected = config.algorithm
    if isinstance(expected, PolicyConfig) and isinstance(expected.advantage, GdpoAdvantage):
        # The weights of the rewards are filled in.
        own = expected.advantage.model_copy(update={"weights": (1.0,)})
        expected = expected.model_copy(update={"advantage": own})
    assert settings.objective.section == expected
    assert (settings.optimizer, settings.batching, settings.lora) == (
        config.optimizer,
        config.batching,
        config.lora,
    )


def test_sections_beside_the_algorithm_arrive_as_they_are(tmp_path: Path) -> None:
    beside = {
        "optimizer": {
            "betas": [0.8, 0.95],
            "epochs_per_update": 3,
            "max_skipped_updates": 7,
            "offload": True,
        },
        "batching": {"packing": "on", "activation_checkpointing": True},
        "lora": {"rank": 3, "alpha": 7, "targets": ["q_proj"], "adapter": tmp_path / "adapter"},
        "seed": 2**63 - 1,
    }
    config = run_of({"type": "sft"}, tmp_path, **beside)
    settings = session_settings(session_spec(config, tmp_path))
    assert of_the_ranks(settings) == settings
    assert (settings.optimizer, settings.batching, settings.lora) == (
        config.optimizer,
        config.batching,
        config.lora,
    )
    assert settings.seed == config.seed


@pytest.mark.parametrize("critic", [{}, {"value_clip": None, "optimizer": {"learning_rate": 1.0e-3}}])
def test_what_the_coordinator_sends_a_critic_is_what_it_takes(critic: dict[str, Any], tmp_path: Path) -> None:
    algorithm = {"type": "ppo", "critic": critic, "kl": {"placement": "reward"}, "advantage": {"lam": 0.9}}
    config = run_of(algorithm, tmp_path)
    assert isinstance(config.algorithm, PolicyConfig) and config.algorithm.critic is not None
    sent = critic_spec(config, config.algorithm.critic, tmp_path, has_own_model=False)
    settings = session_settings(sent, CRITIC)
    assert isinstance(session_objective(settings.objective), ValueUpdate)
    assert of_the_ranks(settings) == settings
    assert settings.objective.section == config.algorithm
    assert settings.optimizer.learning_rate == config.algorithm.critic.optimizer.learning_rate
    assert sent.objective.section == session_spec(config, tmp_path).objective.section


def test_a_reference_of_its_own_leaves_the_ranks_without_a_copy(tmp_path: Path) -> None:
    config = run_of({"type": "grpo", "kl": {"placement": "loss", "reference": "service"}}, tmp_path)
    objective = session_settings(session_spec(config, tmp_path)).objective
    assert not objective.keeps_reference
    assert objective.policy is not None and objective.policy.kl.estimator == "k3"


@pytest.mark.parametrize(
    ("role", "name"),
    [
        (Role.ROLE_REFERENCE, REFERENCE),
        (Role.ROLE_TEACHER, TEACHER),
        (Role.ROLE_REWARD_MODEL, "reward_model-helpful"),
    ],
)
def test_what_the_coordinator_sends_a_frozen_gang_is_what_it_takes(
    role: Role.ValueType, name: str, tmp_path: Path
) -> None:
    config = run_of({"type": "distillation"}, tmp_path)
    assert scoring_batching(frozen_spec(config, role, str(tmp_path)), name) == config.batching


@pytest.mark.parametrize(
    "name", sorted({*ADVANTAGES, *LOSSES, *PRESETS, *PAIR_LOSSES, "dpo", "reward_model"})
)
def test_every_name_is_documented(name: str) -> None:
    assert any(f"`{name}`" in document.read_text("utf-8") for document in DOCUMENTS)

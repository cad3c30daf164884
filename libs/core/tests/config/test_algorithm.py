"""`algorithm`: presets, what is laid over them, and what a user reads when a name or a combination is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from flotilla_core.config import PolicyConfig, RunConfig, dump_yaml, load_text
from flotilla_core.config.presets import PRESETS
from flotilla_core.errors import InvalidConfig

RUN = """\
name: arithmetic
steps: 20
data: {train: train.jsonl}
rewards: [{reward: exact}]
"""


def algorithm(text: str, *overrides: str) -> PolicyConfig:
    config = load_text(RunConfig, f"{RUN}algorithm: {text}\n", source="run.yaml", overrides=overrides)
    assert isinstance(config.algorithm, PolicyConfig)
    return config.algorithm


def problem(text: str) -> str:
    with pytest.raises(InvalidConfig) as caught:
        algorithm(text)
    return str(caught.value)


def test_a_run_without_an_algorithm_is_grpo() -> None:
    default = load_text(RunConfig, RUN).algorithm
    assert default == algorithm("{type: grpo}")
    assert isinstance(default, PolicyConfig)
    assert default.advantage.arguments == {"baseline": "group", "normalize_std": True}
    assert default.loss.arguments == {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}
    assert (default.aggregation.type, default.kl.placement) == ("token_mean", "none")


def test_every_preset_has_a_name_in_the_schema_and_the_other_way_round() -> None:
    assert set(get_args(PolicyConfig.model_fields["type"].annotation)) == set(PRESETS)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_written_out_resolved_and_read_back_equal(preset: str) -> None:
    acts = "environment: {name: frozen_lake}\n" if preset == "gigpo" else ""
    config = load_text(RunConfig, f"{RUN}{acts}algorithm: {{type: {preset}}}")
    assert isinstance(config.algorithm, PolicyConfig)
    assert config.algorithm.loss.type == PRESETS[preset]["loss"]["type"]
    assert load_text(RunConfig, dump_yaml(config)) == config


def test_a_key_changes_its_preset_and_leaves_the_rest() -> None:
    changed = algorithm("{type: dapo, loss: {clip_low: 0.1}}", "algorithm.advantage.normalize_std=false")
    assert changed.loss.arguments == {"clip_low": 0.1, "clip_high": 0.28, "dual_clip": None}
    assert changed.advantage.arguments == {"baseline": "group", "normalize_std": False}
    assert changed.advantage.drop_uniform_groups


def test_a_sequence_is_not_clipped_by_what_the_engine_computes_differently() -> None:
    assert algorithm("{type: gspo}").correction.proximal == "trainer"
    assert algorithm("{type: gspo, correction: {proximal: rollout}}").correction.proximal == "rollout"


def test_another_type_starts_from_its_own_defaults() -> None:
    changed = algorithm("{type: dapo, loss: {type: gspo, clip_low: 0.1}}")
    assert changed.loss.arguments == {"clip_low": 0.1, "clip_high": 4e-4, "over": "sequence"}


def test_functions_of_the_user_are_taken_from_the_directory_of_the_command(tmp_path: Path) -> None:
    text = "{loss: {type: 'mine.py:loss', parameters: {power: 2}}, advantage: {type: mine.py:adv, clip: 3}}"
    mine = algorithm(text).with_paths_from(tmp_path)
    assert mine.loss.type == f"{tmp_path}/mine.py:loss"
    assert mine.loss.arguments == {"power": 2}
    assert (mine.advantage.type, mine.advantage.arguments) == (f"{tmp_path}/mine.py:adv", {})
    assert mine.advantage.clip == 3


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{type: gropo}", "did you mean grpo?"),
        ("{loss: {type: gsop}}", "algorithm.loss.type: expected one of ppo, "),
        ("{loss: {type: gsop}}", "path.py:function, got the text 'gsop'; did you mean gspo?"),
        ("{advantage: {type: rlo}}", "did you mean rloo?"),
        ("{clip_high: 0.3}", "unknown key algorithm.clip_high; did you mean algorithm.loss.clip_high?"),
        ("{loss: {type: gspo, dual_clip: 3}}", "another algorithm.loss.type has it, this one does not"),
        ("{advantage: {type: gae}}", "gae needs the values of a critic"),
        ("{type: grpo, critic: {}}", "write `critic: {}` beside gae alone"),
        ("{type: ppo, kl: {placement: reward, target: 0.1}}", "which a critic could not follow"),
        ("{type: distillation, kl: {placement: reward}}", "with a reward_weight above 0 alone"),
        ("{type: sft, loss: {type: ppo}}", "another algorithm.type has it, this one does not"),
        ("{type: dpo, loss: kto}", "algorithm.loss: expected one of sigmoid, ipo, hinge"),
        ("{type: dpo, beta: 0}", "algorithm.beta: expected greater than 0"),
        ("{type: dpo, loss: ipo, label_smoothing: 0.1}", "label_smoothing belongs to loss sigmoid"),
        ("{type: dpo, label_smoothing: 0.5}", "algorithm.label_smoothing: expected less than 0.5"),
        (
            "{type: reward_model, center_coefficient: -1}",
            "center_coefficient: expected greater than or equal to 0",
        ),
        ("{type: reward_model, beta: 0.1}", "another algorithm.type has it, this one does not"),
        ("{aggregation: {type: mean}}", "expected one of token_mean, "),
        ("{aggregation: {constant_tokens: 5}}", "belongs to aggregation.type constant alone"),
        ("{correction: {importance: token}}", "set correction.proximal to trainer"),
        ("{correction: {normalize_importance: true}}", "correction.importance is none"),
        (
            "{loss: {type: reinforce}, correction: {importance: token, normalize_importance: true}}",
            "correction.proximal is rollout: set it to trainer",
        ),
        (
            "{correction: {importance: icepop, proximal: trainer, importance_cap: 0.5}}",
            "importance_floor is not below correction.importance_cap",
        ),
        ("{correction: {rejection: [{measure: k3}]}}", "neither low nor high"),
        ("{correction: {rejection: [{measure: k3, low: 0.1}]}}", "rejection.low is not for measure k3"),
        ("{correction: {rejection: [{measure: k2, high: -1}]}}", "k2 is never negative"),
        ("{correction: {rejection: [{measure: k1, low: 2, high: 1}]}}", "low is not below"),
        ("{kl: {placement: reward, estimator: full}}", "set kl.placement to loss"),
        ("{kl: {placement: loss, estimator: full, reference: service}}", "set kl.reference to frozen"),
        ("{type: pass_at_k, advantage: {k: 16}}", "set it to 16 or more"),
        ("{type: pass_at_k, kl: {placement: reward}}", "pass_at_k judges the rewards as they came"),
        (
            "{type: pass_at_k, advantage: {k: 2, reward_clip: 1}}",
            "reward_normalization change what it does not",
        ),
        (
            "{type: remax, advantage: {reward_normalization: {mean: batch}}}",
            "reward_normalization does not centre",
        ),
        (
            "{type: gdpo, advantage: {reward_normalization: {mean: batch}}}",
            "reward_normalization change their sum",
        ),
        ("{type: grpo, advantage: {reward_normalization: {}}}", "names neither mean, std, clip nor scale"),
        (
            "{advantage: {baseline: running, reward_normalization: {std: running}}}",
            "advantage.baseline is running and advantage.reward_normalization is too",
        ),
        ("{type: ppo, advantage: {reward_normalization: {std: running}}}", "which a critic could not follow"),
        ("{sample_weights: {by_reward: max_min, power: 3}}", "power belongs to sample_weights.by_reward pow"),
        ("{type: distillation, sample_weights: {by_difficulty: {}}}", "by_difficulty look at rewards"),
        ("{type: step_reinforce, advantage: {baseline: none}}", "set normalize_std to false"),
        ("{type: gigpo}", "in a loop of your own (loop: client) with flotilla_algorithms.gigpo"),
        ("{type: gigpo, advantage: {step_weight: 0}}", "greater than 0"),
        ("{advantage: {type: agentic_reinforce}}", "take step_reinforce with baseline none"),
        ("{type: distillation, shuffle_rewards: true}", "shuffle_rewards permutes rewards, which"),
        (
            "{type: distillation, advantage: {reward_clip: 1}}",
            "reward_normalization would change nothing",
        ),
        ("{type: reinforce_plus_plus, advantage: {whiten: true}}", "reinforce_plus_plus is whitened already"),
        ("{type: gdpo, advantage: {whiten: true}}", "gdpo is whitened already"),
        ("{type: grpo_passk, loss: {type: raft_plus_plus}}", "advantage.type grpo_passk has none"),
        ("{type: grpo_passk, loss: {clip_low: 0.1}}", "loss.clip_low acts on negative advantages alone"),
        ("{kl: {coefficient: 0.1}}", "kl.placement is none, and kl.coefficient would change nothing"),
        ("{kl: {reference: service}}", "kl.placement is none, and kl.reference would change nothing"),
        ("{kl: {placement: loss, horizon_samples: 5}}", "moves towards kl.target, which is empty"),
        ("{correction: {importance_cap: 3}}", "is none, which correction.importance_cap does not bound"),
        (
            "{type: tis_grpo, correction: {importance_floor: 0.1}}",
            "is token, which correction.importance_floor does not bound",
        ),
        (
            "{loss: {type: reinforce}, correction: {proximal: trainer}}",
            "loss.type reinforce has no ratio that would compare with it",
        ),
        (
            "{type: distillation, advantage: {whiten: true, coefficient: 2}}",
            "advantage.whiten takes any scale away",
        ),
        (
            "{type: distillation, advantage: {drop_uniform_groups: true}}",
            "advantage.drop_uniform_groups leaves groups out by their rewards, which may be empty",
        ),
        (
            "{type: distillation, advantage: {teacher_field: domain}}",
            "teacher_field chooses among advantage.teachers, which names none",
        ),
        (
            "{type: distillation, advantage: {teacher_field: domain, teachers: {math: 1}}}",
            "teacher_field chooses among advantage.teachers, which names 1",
        ),
        (
            "{type: distillation, advantage: {teacher_field: domain, teachers: {math: 1, code: 2}}}",
            "teacher_field gives each prompt one teacher, and the weights of advantage.teachers differ",
        ),
        (
            "{type: distillation, advantage: {teachers: {math: 0}}}",
            "algorithm.advantage.teachers.math: expected greater than 0, got the number 0",
        ),
        (
            "{type: distillation, advantage: {teachers: {math: true}}}",
            "algorithm.advantage.teachers: expected a valid number, got the truth value true",
        ),
        (
            "{type: distillation, advantage: {teachers: {Math: 1}}}",
            "algorithm.advantage.teachers.Math: expected a string that should match pattern",
        ),
        ("{advantage: {teachers: {math: 1}}}", "another algorithm.advantage.type has it"),
        (
            "{type: distillation, advantage: {coefficient: 0}}",
            "advantage.coefficient is 0, so that advantage.type distill asks a teacher and learns nothing",
        ),
        (
            "{type: distillation, teacher: {}, advantage: {coefficient: 0, clip: 2}}",
            "advantage.clip acts on advantages, and all are 0 while advantage.coefficient and advantage.rew",
        ),
        (
            "{type: distillation, teacher: {}, advantage: {coefficient: 0}, "
            "correction: {sequence_low: 0.5, sequence_high: 2}}",
            "correction.sequence_low and correction.sequence_high acts on advantages, and all are 0",
        ),
        (
            "{type: distillation, teacher: {}, advantage: {teachers: {math: 1, code: 1}}}",
            "advantage.teachers names 2 for every sample: set advantage.teacher_field, or name one teacher",
        ),
        (
            "{teacher: {teachers: {math: 1, code: 1}}}",
            "teacher.teachers names 2 for every sample: set teacher.teacher_field, or name one teacher",
        ),
        (
            "{type: distillation, teacher: {teachers: {math: 1}}}",
            "teacher.teachers and teacher.teacher_field are not for advantage.type distill",
        ),
        ("{teacher: {coefficient: 0}}", "algorithm.teacher.coefficient: expected greater than 0"),
        ("{teacher: {top_k: 1025}}", "algorithm.teacher.top_k: expected less than or equal to 1024"),
        ("{teacher: {divergence: both}}", "algorithm.teacher.divergence: expected forward or reverse"),
        ("{type: sft, teacher: {}}", "another algorithm.type has it, this one does not"),
        ("{type: dpo, teacher: {}}", "another algorithm.type has it, this one does not"),
        ("{loss: {clip_low: 2}}", "algorithm.loss.clip_low: expected less than or equal to 1"),
    ],
)
def test_what_is_wrong_is_said_with_the_way_out(text: str, said: str) -> None:
    message = problem(text)
    assert said in message
    assert message.startswith(("run.yaml:5: ", "rollout."))


def test_a_run_of_pairs_evaluates_pairs_unless_rewards_judge_its_answers() -> None:
    evaluation = "evaluation: {data: heldout.jsonl}\n"
    pairs = load_text(
        RunConfig, RUN.replace("rewards: [{reward: exact}]", "algorithm: {type: dpo}") + evaluation
    )
    assert pairs.learns_from_pairs
    assert pairs.evaluates_pairs
    judged = load_text(RunConfig, f"{RUN}algorithm: {{type: dpo}}\n{evaluation}")
    assert judged.learns_from_pairs
    assert not judged.evaluates_pairs
    with pytest.raises(InvalidConfig, match="evaluation needs at least one reward term"):
        load_text(RunConfig, RUN.replace("rewards: [{reward: exact}]", "algorithm: {type: sft}") + evaluation)


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("rewards: [{reward: exact}]", "rewards is not for algorithm.type reward_model"),
        ("lora: {rank: 4}", "lora is not for algorithm.type reward_model"),
        ("loop: client", "loop: client is not for algorithm.type reward_model"),
        ("optimizer: {epochs_per_update: 2}", "are not for reward_model"),
    ],
)
def test_what_a_reward_model_has_no_use_for_is_refused(written: str, said: str) -> None:
    asked = RUN.replace("rewards: [{reward: exact}]", "algorithm: {type: reward_model}")
    assert load_text(RunConfig, asked).learns_from_pairs
    with pytest.raises(InvalidConfig, match=said):
        load_text(RunConfig, f"{asked}{written}\n")


@pytest.mark.parametrize(
    ("advantage", "shares"),
    [
        ("{}", {"teacher": 1.0}),
        ("{teachers: {math: 5}}", {"teacher-math": 1.0}),
        ("{teachers: {math: 3, code: 1}}", {"teacher-math": 0.75, "teacher-code": 0.25}),
        (
            "{teachers: {math: 2, code: 2}, teacher_field: domain}",
            {"teacher-math": 0.5, "teacher-code": 0.5},
        ),
    ],
)
def test_a_run_needs_the_teachers_that_it_names_with_weights_whose_sum_is_one(
    advantage: str, shares: dict[str, float]
) -> None:
    config = load_text(RunConfig, f"{RUN}algorithm: {{type: distillation, advantage: {advantage}}}")
    assert isinstance(config.algorithm, PolicyConfig)
    asked = config.algorithm.asked_teachers
    assert asked is not None and asked.teacher_shares == shares
    assert config.algorithm.gangs_beside_the_policy == config.algorithm.teachers_needed == [*shares]
    assert config.algorithm.advantage.arguments == {"coefficient": 1.0, "reward_weight": 0.0}
    assert load_text(RunConfig, dump_yaml(config)) == config


def test_a_policy_may_learn_from_its_teachers_likeliest_tokens_alone() -> None:
    text = "algorithm: {type: distillation, advantage: {coefficient: 0}, teacher: {top_k: 8}}"
    config = load_text(RunConfig, RUN + text)
    assert isinstance(config.algorithm, PolicyConfig) and not config.algorithm.needs_rewards
    assert config.algorithm.gangs_beside_the_policy == ["teacher"]


def test_any_advantage_may_have_a_teacher_beside_it_that_is_named_in_the_section_of_the_teacher() -> None:
    config = load_text(
        RunConfig,
        f"{RUN}algorithm: {{teacher: {{teachers: {{math: 1, code: 1}}, teacher_field: domain}}}}\n",
    )
    assert isinstance(config.algorithm, PolicyConfig)
    assert config.algorithm.teachers_needed == ["teacher-math", "teacher-code"]


def test_a_sample_that_no_message_holds_with_its_likeliest_tokens_is_refused() -> None:
    def run_of(top_k: int) -> str:
        return (
            f"{RUN}algorithm: {{teacher: {{top_k: {top_k}}}}}\n"
            "rollout: {sampling: {max_response_tokens: 98304}}\n"
        )

    assert load_text(RunConfig, run_of(64))
    with pytest.raises(InvalidConfig) as caught:
        load_text(RunConfig, run_of(65))
    assert "algorithm.teacher.top_k is 65" in str(caught.value)
    assert "at most 96,791 tokens, but rollout.sampling.max_response_tokens is 98,304" in str(caught.value)

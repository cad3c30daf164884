"""What a run file may say about prompts, samples and evaluations."""

from __future__ import annotations

from pathlib import Path

import pytest

from flotilla_core.config import RunConfig, TrainingSet, dump_yaml, load_text
from flotilla_core.errors import InvalidConfig

RUN = "name: run\nsteps: 3\nrewards: [{reward: exact}]\n"


def load(text: str) -> RunConfig:
    data = "" if "data:" in text.split("evaluation", maxsplit=1)[0] else "data: {train: /x.jsonl}\n"
    return load_text(RunConfig, RUN + data + text, source="run.yaml")


def test_several_answers_to_a_held_out_prompt_need_a_temperature() -> None:
    with pytest.raises(InvalidConfig, match="greedy answers to one prompt are all equal"):
        load("evaluation: {data: e.jsonl, samples_per_prompt: 4}\n")
    evaluation = load("evaluation: {data: e.jsonl, samples_per_prompt: 4, temperature: 0.8}\n").evaluation
    assert evaluation is not None and evaluation.samples_per_prompt == 4


def test_pairs_are_ranked_without_a_temperature() -> None:
    text = "evaluation: {data: e.jsonl, temperature: 1.0}\nalgorithm: {type: dpo}\nrewards: []\n"
    with pytest.raises(InvalidConfig, match="pairs are ranked and nothing is generated"):
        load_text(RunConfig, f"name: run\nsteps: 3\ndata: {{train: /x.jsonl}}\n{text}", source="run.yaml")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("5", r"evaluation\.data: expected a path, or a list of mappings"),
        ("[{path: /a.jsonl}, {path: /b/a.jsonl}]", "several held-out sets are called 'a'"),
        ("[{path: /a.jsonl, success: 1}]", r"success; did you mean evaluation\.data\[0\]\.success_at"),
        ("[{path: /a.jsonl, samples_per_prompt: 4}]", "samples_per_prompt of a is 4, but greedy answers"),
    ],
)
def test_a_mistake_about_held_out_sets_is_named(data: str, message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        load(f"evaluation: {{data: {data}}}\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("reward_mode: gated", "no reward is a gate: give one gate_at"),
        ("reward_mode: mean", "reward_mode: "),
        (
            "rewards: [{reward: exact, gate_at: 1}]",
            "reward_mode is weighted, and reward exact has a gate_at",
        ),
        (
            "reward_mode: min\nrewards: [{reward: exact, weight: 0}]",
            "reward_mode is min, and every weight is 0",
        ),
        ("\nrewards: [{reward: exact, weight: 0}]", "reward_mode is weighted, and every weight is 0"),
        (
            "evaluation: {data: [{path: /a.jsonl, rewards: [{reward: exact, weight: 0}]}]}",
            "reward_mode of a is weighted, and every weight is 0",
        ),
        (
            "reward_mode: max\nrewards: []\nalgorithm: {type: sft}",
            "reward_mode is max, and there are no rewards",
        ),
        ("reward_mode: product\nalgorithm: {type: gdpo}", "gdpo normalises each reward by "),
        (
            "evaluation: {data: [{path: /a.jsonl, reward_mode: min}]}",
            "reward_mode of a is min, and there are no rewards beside it",
        ),
    ],
)
def test_rewards_that_cannot_be_combined_as_the_run_says_are_refused(text: str, message: str) -> None:
    run = "name: run\nsteps: 3\ndata: {train: /x.jsonl}\n"
    rewards = "" if "\nrewards:" in f"\n{text}" else "rewards: [{reward: exact}]\n"
    with pytest.raises(InvalidConfig, match=message):
        load_text(RunConfig, f"{run}{rewards}{text}\n", source="run.yaml")


def test_rewards_without_a_weight_are_taken_where_their_sum_teaches_nothing() -> None:
    run = "name: run\nsteps: 3\ndata: {train: /x.jsonl}\nrewards: [{reward: exact, weight: 0}]\n"
    for algorithm in ("{type: sft}", "{type: gdpo, advantage: {type: gdpo, weights: [1.0]}}"):
        load_text(RunConfig, f"{run}algorithm: {algorithm}\n", source="run.yaml")


def test_every_held_out_set_is_judged_by_rewards_where_one_is() -> None:
    text = "name: run\nsteps: 3\ndata: {train: /x.jsonl}\nalgorithm: {type: dpo}\nevaluation: {data: [%s]}\n"
    judged = "{path: /a.jsonl, rewards: [{reward: exact}]}"
    config = load_text(RunConfig, text % judged, source="run.yaml")
    assert config.evaluates_answers and not config.evaluates_pairs
    with pytest.raises(InvalidConfig, match="evaluation needs at least one reward term"):
        load_text(RunConfig, text % f"{judged}, {{path: /b.jsonl}}", source="run.yaml")


@pytest.mark.parametrize(
    ("evaluation", "best_by", "message"),
    [
        ("{data: /a.jsonl}", "eval/accuracy", r"needs evaluation\.every_steps"),
        (
            "{data: /a.jsonl, every_steps: 2}",
            "eval/accurcy",
            "measure eval/accuracy, eval/reward_mean: name one",
        ),
        ("{data: /a.jsonl, every_steps: 2}", "eval/accuracy_stderr", "name one"),
        ("{data: [{path: /a.jsonl}], every_steps: 2}", "eval/b/accuracy", "eval/a/accuracy"),
    ],
)
def test_the_best_checkpoint_needs_a_metric_that_is_measured(
    evaluation: str, best_by: str, message: str
) -> None:
    with pytest.raises(InvalidConfig, match=message):
        load(f"evaluation: {evaluation}\ncheckpoint: {{best_by: {best_by}}}\n")


def test_the_best_checkpoint_may_be_that_of_any_rising_metric_of_a_set() -> None:
    sets = "[{path: /a.jsonl}, {path: /b.jsonl, samples_per_prompt: 4, temperature: 1.0}]"
    config = load(f"evaluation: {{data: {sets}, every_steps: 2}}\ncheckpoint: {{best_by: eval/b/pass@4}}\n")
    assert config.checkpoint.best_by == "eval/b/pass@4"


def test_data_sets_are_a_path_or_a_list_with_names_and_weights() -> None:
    assert load("data: {train: /a.jsonl}\n").data.train == Path("/a.jsonl")
    several = load("data: {train: [{path: /a.jsonl, weight: 2}, {path: /b.jsonl, name: riddles}]}\n")
    sets = (TrainingSet(path=Path("/a.jsonl"), weight=2), TrainingSet(path=Path("/b.jsonl"), name="riddles"))
    assert several.data.train == sets
    assert load_text(RunConfig, dump_yaml(several), source="again").data.train == sets


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("{train: 5}", r"data\.train: expected a path, or a list of mappings"),
        ("{train: []}", "train is an empty list"),
        ("{train: [{path: /a, weight: 0}]}", r"data\.train\[0\]\.weight: expected greater than 0"),
        ("{train: [{path: /a, wieght: 2}]}", r"wieght; did you mean data\.train\[0\]\.weight"),
        ("{train: /a, order: by_field}", "by_field needs the name of a column"),
        ("{train: /a, difficulty_field: level}", "the other orders look at none"),
    ],
)
def test_a_mistake_about_data_sets_is_named(data: str, message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        load(f"data: {data}\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("algorithm: {type: sft}", "algorithm.type sft generates no answers"),
        ("loop: client\nrewards: [{reward: exact}]", "the client decides what it trains"),
        ("algorithm: {type: distillation}", "rewards is empty"),
    ],
)
def test_prompts_rest_only_where_answers_to_them_are_scored(text: str, message: str) -> None:
    data = "name: run\nsteps: 3\ndata: {train: /a.jsonl, rest_epochs: 3}"
    with pytest.raises(InvalidConfig, match=f"data.rest_epochs.*{message}"):
        load_text(RunConfig, f"{data}\n{text}\n", source="run.yaml")


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        ("{prompts_per_step: 8, dynamic_sampling: {max_prompts_per_step: 7}}", "no batch could be full"),
        ("{samples_per_prompt: 1, dynamic_sampling: {}}", "compares the rewards of a group"),
        ("{over_issue: -0.1}", "over_issue: expected greater than or equal to 0"),
        (
            "{dynamic_sampling: {max_prompts: 7}}",
            "did you mean rollout.dynamic_sampling.max_prompts_per_step",
        ),
    ],
)
def test_a_mistake_about_what_a_step_draws_is_named(rollout: str, message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        load(f"algorithm: {{type: reinforce}}\nrollout: {rollout}\n")


def test_nothing_is_uniform_to_a_run_without_rewards() -> None:
    text = "name: run\nsteps: 3\ndata: {train: /x}\nalgorithm: {type: distillation}\n"
    with pytest.raises(InvalidConfig, match=r"may be empty for algorithm\.advantage\.type distill"):
        load_text(RunConfig, text + "rollout: {dynamic_sampling: {}}\n", source="run.yaml")


@pytest.mark.parametrize("weights", [{"update": "between_samples"}, {"kv_policy": "drain"}])
def test_partial_samples_are_not_resumed_where_a_sample_has_one_version(weights: dict[str, str]) -> None:
    written = {"name": "both", "steps": 1, "data": {"train": "t.jsonl"}, "rewards": [{"reward": "exact"}]}
    both = {"rollout": {"resume_partial": True}, "weights": weights}
    for name, section in both.items():
        RunConfig.model_validate(written | {name: section})
    with pytest.raises(ValueError, match="rule out"):
        RunConfig.model_validate(written | both)


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ("{repetition_penalty: 1.1}", "repetition_penalty is not offered: it changes the distribution"),
        ("{presence_penalty: 0.0}", r"rollout\.sampling: presence_penalty is not offered"),
        ("{frequency_penalty: 0.5}", "frequency_penalty is not offered"),
        ("{stop: [END], min_response_tokens: 4}", "a text of stop may come earlier"),
        ('{stop: [""]}', r"rollout\.sampling\.stop\[0\]"),
    ],
)
def test_sampling_that_the_trainer_could_not_follow_is_refused_by_name(sampling: str, message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        load(f"rollout: {{sampling: {sampling}}}\n")


def test_rewards_get_a_text_up_to_the_end_of_the_first_text_that_ended_it() -> None:
    sampling = load("rollout: {sampling: {stop: [</answer>, END], stop_token_ids: [7]}}\n").rollout.sampling
    assert sampling.stop_token_ids == (7,)
    assert sampling.shown("4</answer>\n") == "4</answer>" and sampling.shown("4 END. 5</answer>") == "4 END"
    assert sampling.shown("cut off at") == "cut off at"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rollout: {max_staleness: 1}", "rollout.max_staleness is about samples that are drawn"),
        ("rollout: {dynamic_sampling: {}}", "rollout.dynamic_sampling is about samples that are drawn"),
        ("rollout: {record: true}", "rollout.record is about samples that are drawn"),
        ("algorithm: {type: sft}", "algorithm.type sft learns from given answers"),
        ("loop: client", "loop: client leaves the samples to the client"),
        ("algorithm: {correction: {staleness_decay: 0.9}}", "staleness_decay counts the updates"),
        ("algorithm: {correction: {proximal: interpolated}}", "proximal interpolated counts the updates"),
        ("algorithm: {type: gdpo}", "algorithm.advantage.weights is empty"),
    ],
)
def test_a_setting_that_recorded_samples_have_no_use_for_is_refused(text: str, message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        load_text(RunConfig, f"{RUN}data: {{train: /x, recorded: true}}\n{text}\n", source="run.yaml")


@pytest.mark.parametrize("text", ["loop: client", "algorithm: {type: sft}"])
def test_only_samples_that_the_coordinator_trains_are_recorded(text: str) -> None:
    with pytest.raises(InvalidConfig, match=r"rollout\.record is true, and"):
        load(f"rollout: {{record: true}}\n{text}\n")


def test_recorded_samples_bring_their_rewards_and_need_no_generator() -> None:
    text = "name: run\nsteps: 3\ndata: {train: /x, recorded: true}\n"
    recorded = load_text(RunConfig, text, source="run.yaml")
    assert not recorded.draws_samples and not recorded.needs_generators and recorded.learns_by_rewards
    assert load_text(
        RunConfig, f"{text}evaluation: {{data: /e.jsonl}}\nrewards: [{{reward: exact}}]\n", source=""
    ).needs_generators
    turns = load_text(RunConfig, f"{text}algorithm: {{type: gigpo}}\n", source="run.yaml")
    assert turns.algorithm.type == "gigpo" and turns.environment is None

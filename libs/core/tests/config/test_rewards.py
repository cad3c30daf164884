"""Terms of a reward: functions, and reward models of the stack."""

from __future__ import annotations

from pathlib import Path

import pytest

from flotilla_core.config import RunConfig, dump_yaml, load_text
from flotilla_core.errors import InvalidConfig

RUN = "name: a\nsteps: 1\ndata: {train: rows.jsonl}\nrewards: "


def test_a_reward_model_is_named_with_its_label_and_kept_so() -> None:
    first = "{reward: {model: helpful, label: 2}, name: kind, too_long: cut}"
    terms = f"[{first}, {{reward: {{model: safe}}}}, {{reward: exact}}]"
    config = load_text(RunConfig, RUN + terms)
    assert [term.shown for term in config.rewards] == ["kind", "safe", "exact"]
    assert [term.model and (term.model.model, term.model.label) for term in config.rewards] == [
        ("helpful", 2),
        ("safe", None),
        None,
    ]
    assert config.gangs_beside_the_policy == ["reward_model-helpful", "reward_model-safe"]
    assert load_text(RunConfig, dump_yaml(config)) == config
    assert config.with_paths_from(Path("/there")).rewards == config.rewards


def test_models_of_held_out_sets_and_of_other_algorithms_need_their_gangs_too() -> None:
    evaluation = "\nevaluation: {data: [{path: a.jsonl, rewards: [{reward: {model: far}}]}, {path: b.jsonl}]}"
    config = load_text(RunConfig, RUN + "[{reward: {model: near}}]\nalgorithm: {type: ppo}" + evaluation)
    assert config.reward_models == ["near", "far"]
    assert config.gangs_beside_the_policy == ["critic", "reward_model-near", "reward_model-far"]
    supervised = load_text(RunConfig, RUN + "[{reward: {model: near}}]\nalgorithm: {type: sft}" + evaluation)
    assert supervised.gangs_beside_the_policy == ["reward_model-near", "reward_model-far"]


@pytest.mark.parametrize(
    ("term", "said"),
    [
        ("{reward: exact, template: '{response}'}", "template is for a reward model, and reward names none"),
        ("{reward: exact, too_long: cut}", "too_long is for a reward model"),
        ("{reward: {model: a}, parameters: {after: x}}", "parameters is for a function"),
        ("{reward: {model: a}, timeout_s: 3}", "timeout_s is for a function"),
        ("{reward: {model: a}, template: '{prompt}'}", "template has no {response}"),
        ("{reward: {model: A-b}}", "should match pattern"),
        ("{reward: {model: a, lable: 1}}", "unknown key rewards[0].reward.lable; did you mean"),
        ("{reward: {label: 1}}", "rewards[0].reward.model"),
        ("{reward: 3}", "rewards[0].reward: expected"),
    ],
)
def test_what_is_wrong_with_a_term_is_said_by_its_key(term: str, said: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        load_text(RunConfig, f"{RUN}[{term}]")
    assert said in str(caught.value)

"""A run that asks a reward model which cannot score is refused, by the keys to change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flotilla_coordinator.plan.chapter import Chapter
from flotilla_coordinator.plan.checks import config_errors, fleet_warnings, role_errors
from flotilla_coordinator.plan.functions import jail_of
from flotilla_coordinator.plan.reward_lines import reward_model_chapter, rewards_chapter
from flotilla_core.config import EnvironmentConfig, RunConfig, StackConfig
from flotilla_testing.model_folders import write_header, write_tokenizer

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 8,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "vocab_size": 20,
    "max_position_embeddings": 64,
}


def make_model(folder: Path, labels: int, template: str = TEMPLATE, **config: Any) -> Path:
    write_tokenizer(folder, "_ab", template=template)
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    head = {"score.weight": [labels, 8]} if labels else {}
    write_header(folder, {"embed": [20, 8], "model.layers.0.mlp.weight": [3, 8, 8]} | head, "F32")
    return folder


def run_with(*rewards: Any) -> RunConfig:
    values = {"name": "r", "steps": 1, "data": {"train": "rows.jsonl"}, "rewards": rewards}
    return RunConfig.model_validate(values)


def chapter(config: RunConfig, stack: StackConfig) -> Chapter:
    return Chapter.of(role_errors(config, stack), reward_model_chapter(config, stack))


@pytest.mark.parametrize(
    ("labels", "template", "term", "said"),
    [
        (1, TEMPLATE, {"reward": {"model": "helpful"}}, ""),
        (3, TEMPLATE, {"reward": {"model": "helpful", "label": 2}}, ""),
        (1, "", {"reward": {"model": "helpful"}, "template": "{prompt}{response}"}, ""),
        (
            0,
            TEMPLATE,
            {"reward": {"model": "helpful"}},
            "rewards[0].reward: the model helpful has no head of scores (score.weight or v_head.summary.weight)",
        ),
        (
            3,
            TEMPLATE,
            {"reward": {"model": "helpful"}},
            "rewards[0].reward: the model helpful has 3 labels: choose one by its number",
        ),
        (
            3,
            TEMPLATE,
            {"reward": {"model": "helpful", "label": 3}},
            "rewards[0].reward.label is 3, but the labels of the model helpful end at 2",
        ),
        (
            1,
            "",
            {"reward": {"model": "helpful"}},
            "rewards[0].template is empty, and the model helpful cannot read a chat (the model has no chat template)",
        ),
    ],
)
def test_a_model_that_cannot_score_is_refused_by_the_key_to_change(
    labels: int, template: str, term: dict[str, Any], said: str, tmp_path: Path
) -> None:
    model = make_model(tmp_path / "model", labels, template)
    stack = StackConfig.model_validate({"reward_models": {"helpful": {"model": model}}})
    found = chapter(run_with(term), stack)
    assert [error.startswith(said) for error in found.errors] == ([True] if said else [])
    (line,) = found.lines
    assert line.name == "memory of a reward_models.helpful rank"
    assert line.explanation.endswith(f"reads up to 64 tokens of its own tokenizer, labels: {labels}")


def test_an_encoder_after_roberta_reads_two_tokens_less_than_it_has_positions(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", 1, model_type="roberta")
    stack = StackConfig.model_validate({"reward_models": {"helpful": {"model": str(folder)}}})
    (line,) = chapter(run_with({"reward": {"model": "helpful"}}), stack).lines
    assert "reads up to 62 tokens" in line.explanation


def test_a_run_whose_reward_model_the_stack_does_not_start_is_refused() -> None:
    stack = StackConfig.model_validate({"reward_models": {"idle": {"model": "/m", "replicas": 0}}})
    found = chapter(run_with({"reward": {"model": "helpful"}}, {"reward": {"model": "idle"}}), stack)
    assert [error.partition(" into its")[0] for error in found.errors] == [
        f"a reward is the model {name}, but the stack has no reward_models.{name}: "
        f"write `reward_models: {{{name}: {{model: FOLDER}}}}`"
        for name in ("helpful", "idle")
    ]


def test_terms_with_one_name_are_refused() -> None:
    config = run_with(*({"reward": reward, "name": "kind"} for reward in ("exact", {"model": "helpful"})))
    assert Chapter.of(config_errors(config)).errors == [
        "rewards: 2 terms have the name kind: give each its own"
    ]


def test_terms_of_a_held_out_set_with_one_name_are_refused_and_its_functions_need_a_service() -> None:
    own = [{"reward": reward, "name": "kind"} for reward in ("exact", "math")]
    config = RunConfig.model_validate(
        {
            "name": "r",
            "steps": 1,
            "data": {"train": "rows.jsonl"},
            "rewards": [{"reward": {"model": "helpful"}}],
            "evaluation": {"data": [{"path": "/a.jsonl", "name": "hard", "rewards": own}]},
        }
    )
    assert Chapter.of(config_errors(config)).errors == [
        "rewards of hard: 2 terms have the name kind: give each its own"
    ]
    stack = StackConfig.model_validate({"reward": {"replicas": 0}})
    assert any("reward.replicas is 0" in told for told in Chapter.of(fleet_warnings(config, stack)).warnings)


def test_a_plan_says_of_each_reward_who_gives_it_where_and_in_which_jail(tmp_path: Path) -> None:
    examples = tmp_path / "labelled.jsonl"
    asks = {"scale": [1, 10], "rubric": "How clear?", "agreement": {"examples": examples, "at_least": 0.7}}
    config = run_with(
        {"reward": "exact", "weight": 0.5},
        {"reward": "mine.py:score", "trusted": True},
        {"reward": "mine.py:shape"},
        {"reward": {"model": "helpful"}},
        {"reward": {"judge": "far"}, **asks},
        {"reward": {"judge": "held"}, **asks},
    )
    judges = {"far": {"url": "https://api.example.com/v1", "model": "big"}, "held": {"model": "/m/judge"}}
    models = {"helpful": {"model": "/m/helpful", "nproc": 2}}
    stack = StackConfig.model_validate({"judges": judges, "reward_models": models})
    level = jail_of(stack.reward.isolation).isolation
    agrees = f"agrees with {examples}, by 0.7 at least"
    assert Chapter.of(rewards_chapter(config, stack)).lines == [
        (
            "rewards[0] exact",
            "built in, or an entry point",
            "weight 0.5; in the reward service; in its jail where it runs code of others",
        ),
        (
            "rewards[1] mine.py:score",
            "a function",
            "weight 1; OUTSIDE OF THE JAIL, as the reward service itself",
        ),
        (
            "rewards[2] mine.py:shape",
            "a function",
            f"weight 1; in the jail, of level landlock at least; the host of this plan has {level}",
        ),
        (
            "rewards[3] helpful",
            "reward model helpful",
            "weight 1; /m/helpful, scored by a gang of its own (1 x 2 ranks)",
        ),
        (
            "rewards[4] judge:far",
            "judge far",
            f"weight 1; big at https://api.example.com/v1; {agrees}",
        ),
        (
            "rewards[5] judge:held",
            "judge held",
            f"weight 1; /m/judge, on 1 generators of the fleet; {agrees}",
        ),
    ]


def test_a_plan_says_of_an_environment_where_and_in_which_jail_it_plays() -> None:
    def line(stack: StackConfig, **environment: Any) -> tuple[str, str, str]:
        own = EnvironmentConfig(max_turns=3, episode_tokens=1200, **environment)
        config = run_with({"reward": "exact"}).model_copy(update={"environment": own})
        return Chapter.of(rewards_chapter(config, stack)).lines[0]

    stack = StackConfig()
    level = jail_of(stack.environment.isolation).isolation
    assert line(stack, name="/m/guess.py:Guess") == (
        "environment /m/guess.py:Guess",
        "a class",
        "up to 3 turns in 1,200 tokens; in the jail, of level landlock at least; the host of this plan has "
        + level,
    )
    assert line(stack, name="/m/guess.py:Guess", trusted=True)[2].endswith(
        "OUTSIDE OF THE JAIL, as the environment service itself"
    )
    agent = line(stack, name="agent")
    assert agent[1] == "an agent of yours" and "; in the jail, of level" in agent[2]
    assert "OUTSIDE OF THE JAIL" in line(stack, name="agent", trusted=True)[2]
    assert line(stack, name="calculator")[1:] == (
        "built in, or an entry point",
        "up to 3 turns in 1,200 tokens; in the environment service; in its jail where it runs code of others",
    )


def test_a_folder_that_is_no_model_is_said_so(tmp_path: Path) -> None:
    stack = StackConfig.model_validate({"reward_models": {"helpful": {"model": tmp_path}}})
    (error,) = chapter(run_with({"reward": {"model": "helpful"}}), stack).errors
    assert "has no config.json" in error and str(tmp_path) in error

"""Configuration files: what is accepted, and what a user reads when it is not."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from flotilla_core.config import (
    EnvironmentConfig,
    RunConfig,
    StackConfig,
    dump_yaml,
    json_schema,
    load,
    load_text,
)
from flotilla_core.config.loading import _all_paths
from flotilla_core.config.other_programs import NOTES, OURS
from flotilla_core.errors import InvalidConfig

RUN = """\
name: arithmetic
steps: 20
data:
  train: train.jsonl
rewards:
  - reward: exact
"""


def problem(text: str, *overrides: str, model: type[RunConfig] | type[StackConfig] = RunConfig) -> str:
    with pytest.raises(InvalidConfig) as caught:
        load_text(model, text, source="run.yaml", overrides=overrides)
    return str(caught.value)


def test_later_files_win_and_overrides_win_over_files(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(RUN + "optimizer: {learning_rate: 1e-6, warmup_updates: 5}\n")
    (tmp_path / "b.yaml").write_text("optimizer: {learning_rate: 2e-5}\nsteps: 30\n")
    files = [tmp_path / "a.yaml", tmp_path / "b.yaml"]
    config = load(RunConfig, files, ["steps=40", "rewards.0.weight=0.5", "evaluation.data=eval.jsonl"])
    assert config.steps == 40
    assert (config.optimizer.learning_rate, config.optimizer.warmup_updates) == (2e-5, 5)
    assert config.rewards[0].weight == 0.5
    assert config.evaluation is not None
    assert config.evaluation.data == Path("eval.jsonl")


def test_unknown_key_names_place_path_and_what_was_meant() -> None:
    message = problem(RUN + "rollout:\n  prompts_per_stpe: 4\n")
    assert (
        message == "run.yaml:8: unknown key rollout.prompts_per_stpe; did you mean rollout.prompts_per_step?"
    )


def test_key_of_another_section_is_found() -> None:
    message = problem(RUN + "learning_rate: 1e-6\n")
    assert message == "run.yaml:7: unknown key learning_rate; did you mean optimizer.learning_rate?"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("num_generations: 8", "unknown key num_generations; here it is rollout.samples_per_prompt"),
        ("rollout: {n: 8}", "unknown key rollout.n; here it is rollout.samples_per_prompt"),
        ("kl_coef: 0.1", "unknown key kl_coef; here it is algorithm.kl.coefficient"),
        (
            "per_device_train_batch_size: 4",
            "unknown key per_device_train_batch_size; here it is rollout.prompts_per_step (counted in prompts of a "
            "whole step, on all devices together)",
        ),
        ("n_gpus_per_node: 8", "unknown key n_gpus_per_node; here it is trainer.nproc of stack.yaml"),
        (
            "actor_rollout_ref: {actor: {ppo_epochs: 2, optim: {lr: 1e-6}}, rollout: {n: 8}}",
            "unknown key actor_rollout_ref; here actor_rollout_ref.actor.ppo_epochs is "
            "optimizer.epochs_per_update, actor_rollout_ref.actor.optim.lr is optimizer.learning_rate, "
            "actor_rollout_ref.rollout.n is rollout.samples_per_prompt",
        ),
    ],
)
def test_key_of_another_program_is_told_by_its_name_here(text: str, says: str) -> None:
    assert problem(RUN + text + "\n") == f"run.yaml:7: {says}"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("critic: {optim: {lr: 1e-5}}", "critic.optim.lr is algorithm.critic.optimizer.learning_rate"),
        ("report_to: wandb", "here it is trackers (a list of mappings"),
        ("epochs: 3", "here it is steps (run plan"),
        ("val_before_train: true", "here it is evaluation (a run that evaluates does so before"),
        ("trainer: {dtype: float32}", "unknown key trainer: trainer is a key of stack.yaml"),
        ("environment: {name: a, maxturns: 3}", "environment.maxturns; did you mean environment.max_turns?"),
        ("environment: {name: a, workers: 3}", "environment.workers is a key of stack.yaml"),
        ("lora: {r: 8}", "unknown key lora.r; here it is lora.rank"),
        ("tools: [search]", "unknown key tools: name an environment"),
        ("rollout: {multi_turn: {enable: true}}", "unknown key rollout.multi_turn: name an environment"),
        ("judge: {model: big}", "unknown key judge: name a judge in judges of stack.yaml"),
        ("algorithm: {type: GRPO}", "did you mean grpo?"),
        ("algorithm: {type: reinforce++}", "did you mean reinforce_plus_plus?"),
        ("algorithm: {type: Dr. GRPO}", "did you mean dr_grpo?"),
    ],
)
def test_keys_and_names_that_users_bring_along_are_told_what_they_are_here(text: str, says: str) -> None:
    assert says in problem(RUN + text + "\n")


def test_an_override_of_a_users_habit_is_told_what_it_is_here() -> None:
    assert "here it is data.overlong_prompts" in problem(RUN, "data.truncation=left")
    assert "algorithm.critic.optimizer.learning_rate" in problem(RUN, "critic.optim.lr=1e-5")


def test_keys_that_stand_for_those_of_other_programs_exist() -> None:
    ours = {*_all_paths(RunConfig), *_all_paths(StackConfig)}
    assert {theirs: key for theirs, key in OURS.items() if key not in ours} == {}
    assert {theirs for theirs in NOTES if theirs not in OURS} == set()


def test_unknown_key_inside_list_and_union() -> None:
    message = problem(RUN + "    wieght: 2\nalgorithm: {type: grpo, loss: {clip_hihg: 0.3}}\n")
    assert "run.yaml:7: unknown key rewards[0].wieght; did you mean rewards[0].weight?" in message
    assert (
        "run.yaml:8: unknown key algorithm.loss.clip_hihg; did you mean algorithm.loss.clip_high?" in message
    )


def test_all_problems_come_at_once() -> None:
    message = problem("name: Bad Name\nsteps: many\nrollout: 7\nseeed: 1\n", "optimizer.betas=[0.9]")
    assert message.startswith("6 problems in the configuration:\n")
    for part in (
        "run.yaml:1: name: expected a string that should match pattern",
        "run.yaml:2: steps: expected a valid integer, got the text 'many'",
        "run.yaml:3: rollout: expected a mapping of keys to values, got the number 7",
        "run.yaml:4: unknown key seeed; did you mean seed?",
        "data is missing",
        "override optimizer.betas=[0.9]: optimizer.betas[1] is missing",
    ):
        assert part in message


def test_rule_over_several_keys_names_the_line_of_the_key_to_change() -> None:
    message = problem(RUN + "rollout:\n  samples_per_prompt: 1\n")
    assert message.startswith("run.yaml:8: rollout.samples_per_prompt is 1, but grpo compares")


def test_override_is_named_as_the_place() -> None:
    assert problem(RUN, "rollout.samples_per_prompt=x").startswith(
        "override rollout.samples_per_prompt=x: rollout.samples_per_prompt: expected a valid integer"
    )


@pytest.mark.parametrize(
    ("text", "override", "message"),
    [
        ("", None, "the configuration is empty (run.yaml)"),
        ("# only a comment\n", None, "the configuration is empty (run.yaml)"),
        ("- a\n", None, "a configuration is a mapping of keys to values (run.yaml): this is a list"),
        ("steps: [1\n", None, "this is not valid YAML (run.yaml:2)"),
        (RUN + "steps: 3\n", None, "steps is set twice (run.yaml:2)"),
        (RUN, "steps", "cannot read the override 'steps'. Write key.path=value, for example steps=20."),
        (RUN, "rewards.3.weight=1", "rewards has no item 3 (override rewards.3.weight=1): it has 1 items"),
    ],
)
def test_unreadable_input(text: str, override: str | None, message: str) -> None:
    assert problem(text, *([override] if override else [])).startswith(message)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        InvalidConfig, match=r"cannot read the configuration file \(.*none\.yaml\): No such file"
    ):
        load(RunConfig, [tmp_path / "none.yaml"])


def test_relative_paths_start_at_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = RUN.replace("exact", "rewards/mine.py:score")
    as_written = load_text(RunConfig, text)
    assert as_written.data.train == Path("train.jsonl")
    resolved = load_text(RunConfig, text, resolve_paths=True)
    assert resolved.data.train == tmp_path / "train.jsonl"
    assert resolved.rewards[0].reward == f"{tmp_path}/rewards/mine.py:score"


@pytest.mark.parametrize(
    ("name", "corpus", "resolved"),
    [
        ("search", "corpus.txt", "/there/corpus.txt"),
        ("search", "/c.txt", "/c.txt"),
        ("search", "~/c.txt", "/home/me/c.txt"),
        ("search", 3, 3),
        ("/mine.py:Search", "corpus.txt", "corpus.txt"),
    ],
)
def test_the_corpus_of_a_search_is_a_path_and_parameters_of_others_are_not(
    name: str, corpus: object, resolved: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    config = EnvironmentConfig(name=name, parameters={"corpus": corpus, "hits": 2})
    assert config.with_paths_from(Path("/there")).parameters == {"corpus": resolved, "hits": 2}


@pytest.mark.parametrize(
    ("name", "spelled", "parameters"),
    [
        ("gymnasium:FrozenLake-v1", "gymnasium", {"id": "FrozenLake-v1"}),
        ("textarena:Sudoku-v0", "textarena", {"id": "Sudoku-v0"}),
        ("openenv:http://127.0.0.1:8000", "openenv", {"url": "http://127.0.0.1:8000"}),
        ("mcp:https://a.b/mcp", "mcp", {"url": "https://a.b/mcp"}),
        ("harbor:tasks/all", "harbor", {"tasks": "/there/tasks/all"}),
        ("search:c.txt", "search", {"corpus": "/there/c.txt"}),
        ("game.py:Game", "/there/game.py:Game", {}),
        ("mine:Game", "mine:Game", {}),
    ],
)
def test_the_name_of_an_environment_may_hold_its_one_parameter(
    name: str, spelled: str, parameters: dict[str, str]
) -> None:
    config = EnvironmentConfig(name=name, parameters={"further": 1}).with_paths_from(Path("/there"))
    assert config.name == spelled and config.parameters == parameters | {"further": 1}
    assert EnvironmentConfig(name=config.name, parameters=config.parameters) == config


def test_a_parameter_in_the_name_and_beside_it_is_refused() -> None:
    with pytest.raises(ValidationError, match="id is named twice: in name and in parameters"):
        EnvironmentConfig(name="gymnasium:FrozenLake-v1", parameters={"id": "Taxi-v3"})


@pytest.mark.parametrize(
    ("given", "resolved"),
    [
        ({}, {"folder": "/there"}),
        ({"folder": "agents/.."}, {"folder": "/there"}),
        ({"folder": "~/agents"}, {"folder": "/home/me/agents"}),
        ({"folder": "/agents", "command": "a"}, {"folder": "/agents", "command": "a"}),
        ({"folder": 3}, {"folder": 3}),
    ],
)
def test_an_agent_runs_in_the_folder_of_the_command_or_in_its_own(
    given: dict[str, object], resolved: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    config = EnvironmentConfig(name="agent", parameters=given)
    assert config.with_paths_from(Path("/there")).parameters == resolved


def test_model_is_a_path_where_the_folder_exists_else_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    assert load_text(StackConfig, "model: model", resolve_paths=True).model == tmp_path / "model"
    assert load_text(StackConfig, "model: org/model", resolve_paths=True).model == "org/model"


def test_what_is_written_reads_back_equal() -> None:
    run = load_text(
        RunConfig, RUN, overrides=["evaluation={data: e.jsonl, every_steps: 5}", "optimizer.epsilon=1e-9"]
    )
    assert load_text(RunConfig, dump_yaml(run)) == run
    stack = load_text(StackConfig, "name: x\nmodel: org/model", resolve_paths=True)
    assert load_text(StackConfig, dump_yaml(stack)) == stack


def test_schema_describes_every_field() -> None:
    for model in (RunConfig, StackConfig):
        schema = json_schema(model)
        sections = [schema, *schema["$defs"].values()]
        undescribed = [
            name
            for section in sections
            for name, field in section["properties"].items()
            if "description" not in field
        ]
        assert set(undescribed) <= {"type"}


@pytest.mark.parametrize("key", ["replicate", "sequence_parallel"])
def test_a_mesh_that_does_not_fill_the_ranks_is_refused_with_the_arithmetic(key: str) -> None:
    message = problem(f"trainer: {{nproc: 7, {key}: 2}}\n", model=StackConfig)
    assert f"{key} is 2, but nproc is 7 = 3 x 2 + 1" in message
    fits = load_text(StackConfig, f"trainer: {{nproc: 6, {key}: 2, compile: on}}\n", source="stack.yaml")
    assert (fits.trainer.nproc, fits.trainer.compile) == (6, "on")


@pytest.mark.parametrize("spelling", ["owner/name", "hub:owner/name"])
def test_models_and_data_sets_on_the_hub_are_named_alike(
    spelling: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stack.yaml").write_text(f"model: {spelling}\n")
    (tmp_path / "run.yaml").write_text(
        f"name: r\nsteps: 1\nalgorithm: {{type: sft}}\ndata: {{train: {spelling}}}\n"
        f"evaluation: {{data: [{{path: {spelling}}}]}}\nrewards: [{{reward: exact}}]\n"
    )
    assert load(StackConfig, [Path("stack.yaml")]).model == "owner/name"
    run = load(RunConfig, [Path("run.yaml")])
    assert run.evaluation is not None
    assert [str(run.data.train), *(str(one.path) for one in run.evaluation.sets_of_data)] == [
        "hub:owner/name"
    ] * 2


@pytest.mark.parametrize(
    "name",
    ["data/train", "there/train", "owner/train.jsonl", "./owner/name", "owner", "a/b/c", "data/part-*"],
)
def test_what_looks_like_a_path_stays_one(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "there").mkdir()
    (tmp_path / "run.yaml").write_text(
        f"name: r\nsteps: 1\nalgorithm: {{type: sft}}\ndata: {{train: {name}}}\n"
    )
    assert load(RunConfig, [Path("run.yaml")]).data.train == Path(name)

"""`flotilla init` writes files that plan without an error, by what model, data and host are."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flotilla_cli.init import TASK_ROWS, _tasks
from flotilla_coordinator.plan import size_limits
from flotilla_core.config import RunConfig, StackConfig, load
from flotilla_core.config.presets import PRESETS
from flotilla_launch import gpus as gpus_module
from flotilla_testing.host_tools import write_nvidia_smi
from flotilla_testing.model_folders import write_header, write_tokenizer

Command = Callable[..., tuple[int, str, str]]
TEMPLATE = "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}"
SUMS = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(10, 90)]
PAIRS = [{"prompt": f"{n}?", "chosen": "yes", "rejected": "no"} for n in range(20)]


def make_model(folder: Path, *, width: int = 8, layers: int = 3, template: bool = True) -> None:
    """A model whose file of weights has a header alone, and a tokenizer of characters."""
    folder.mkdir()
    config: dict[str, Any] = {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "vocab_size": 300,
    }
    config |= {"model_type": "qwen3", "num_key_value_heads": 1, "max_position_embeddings": 8192}
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {"embed.weight": [300, width]}
    shapes |= {f"model.layers.{n}.w.weight": [width, width] for n in range(layers)}
    write_header(folder, shapes)
    settings = {"eos_token": "<eos>"} | ({"chat_template": TEMPLATE} if template else {})
    write_tokenizer(folder, ["\0", "<eos>", *map(chr, range(2, 256))], **settings)


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host without GPUs, whose processor computes in float32 alone, and a model."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(gpus_module.VISIBLE, "")
    monkeypatch.setattr(size_limits, "_GPUS", tmp_path / "none")
    (tmp_path / "cpuinfo").write_text("flags : fpu avx512f\n")
    monkeypatch.setattr(size_limits, "_CPU_FACTS", tmp_path / "cpuinfo")
    make_model(tmp_path / "model")


@pytest.fixture
def eight_gpus(machine: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight GPUs of 24 GiB, as far as nvidia-smi and the driver say."""
    write_nvidia_smi(tmp_path, 8, 24 << 10)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv(gpus_module.VISIBLE)
    monkeypatch.setattr(size_limits, "_GPUS", tmp_path)


def write(name: str, rows: list[Any]) -> str:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return name


def init(flotilla: Command, rows: list[Any], *more: str) -> dict[str, Any]:
    """Write the files, and see that the commands that follow take them."""
    code, out, err = flotilla(
        "init", "--model", "model", "--data", write("train.jsonl", rows), *more, "--json"
    )
    assert code == 0, err
    made: dict[str, Any] = json.loads(out)
    assert flotilla("config", "validate", "run.yaml")[0] == 0
    code, out, _ = flotilla("run", "plan", "run.yaml", "--json")
    assert (code, json.loads(out)["errors"]) == (0, [])
    return made


def run_file(**overrides: str) -> RunConfig:
    return load(RunConfig, ["run.yaml"], [f"{key}={value}" for key, value in overrides.items()])


@pytest.mark.parametrize(
    ("row", "columns", "reward"),
    [
        ({"prompt": "2+1=", "answer": "3"}, ("prompt", "answer"), "numeric"),
        ({"question": "two and one?", "answer": 3.5}, ("question", "answer"), "numeric"),
        ({"problem": "half?", "solution": "\\frac{1}{2}"}, ("problem", "solution"), "math"),
        ({"problem": "half?", "solution": "long " * 20, "answer": "1/2"}, ("problem", "answer"), "math"),
        ({"instruction": "capital of France?", "output": "Paris"}, ("instruction", "output"), "exact"),
        (
            {"messages": [{"role": "user", "content": "hi"}], "answer": "hello"},
            ("messages", "answer"),
            "exact",
        ),
        (
            {"question": "why?", "answer": "Because. " * 9 + "#### 1,200"},
            ("question", "answer"),
            "rewards.py:reward",
        ),
        ({"prompt": "Write.", "answer": "word " * 30}, ("prompt", "answer"), "rewards.py:reward"),
        ({"prompt": "Write."}, ("prompt", None), "rewards.py:reward"),
        (
            {"prompt": [{"role": "user", "content": "1+1"}], "reward_model": {"ground_truth": "2"}, "x": 1},
            ("prompt", "reward_model.ground_truth"),
            "numeric",
        ),
        (
            {"messages": '[{"role": "user", "content": "1+1"}]', "ground_truth": "2"},
            ("messages", "ground_truth"),
            "numeric",
        ),
        ({"question": "1+1", "ground_truth": "2"}, ("question", "ground_truth"), "numeric"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value) if isinstance(value, dict) else "",
)
def test_columns_and_answers_are_recognised(
    flotilla: Command, row: dict[str, Any], columns: tuple[str, str | None], reward: str
) -> None:
    made = init(flotilla, [row] * 20)
    assert (made["prompt_field"], made["answer_field"], made["reward"]) == (*columns, reward)
    assert made["algorithm"] == run_file().algorithm.type == "grpo"
    assert [term.reward for term in run_file().rewards] == [reward]


def test_rewards_that_are_written_score_every_row_and_know_a_right_answer(flotilla: Command) -> None:
    texts = {
        "Because 2+1 is 3.\n#### 1,003": ("so it is 1003.", "so it is 1004", 1.0),
        "a long answer of more than eight words indeed": (
            "a long answer of more than eight words indeed",
            "",
            1.0,
        ),
        "": ("a few words", "", 1.0),
    }
    for answer, (right, wrong, value) in texts.items():
        Path("rewards.py").unlink(missing_ok=True)
        init(flotilla, [{"prompt": "why?", "answer": answer}] * 3, "--force")
        test = ("reward", "test", "run.yaml", "-n", "1", "--response", right, "--response", wrong, "--json")
        code, out, err = flotilla(*test)
        assert code == 0, err
        assert [one["reward"] for one in json.loads(out)["samples"]] == [value, 0.0]


def test_pairs_are_learned_by_dpo_and_need_no_reward(flotilla: Command) -> None:
    made = init(flotilla, PAIRS, "--heldout", write("held.jsonl", PAIRS[:4]))
    assert (made["algorithm"], made["reward"]) == ("dpo", None)
    assert run_file().evaluates_pairs and "rewards" not in Path("run.yaml").read_text()


def test_supervised_training_has_room_for_its_longest_answer_and_a_reward_for_evaluations_alone(
    flotilla: Command,
) -> None:
    rows = [*SUMS[:10], {"prompt": "say", "answer": "x" * 3000}]
    assert init(flotilla, rows, "--algorithm", "sft")["reward"] is None
    stack = load(StackConfig, ["stack.yaml"])
    assert stack.generator.max_model_tokens and stack.generator.max_model_tokens > 3000
    held_out = write("held.jsonl", [{"prompt": "7+1=", "answer": "8"}])
    assert init(flotilla, SUMS, "--algorithm", "sft", "--heldout", held_out, "--force")["reward"] == "numeric"


CHATS = [
    {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"It is {n}."}]}
    for n in range(40)
]


@pytest.mark.parametrize("rows", [SUMS, CHATS, PAIRS * 2], ids=["sums", "chats", "pairs"])
def test_some_rows_are_held_out_where_no_held_out_data_are_named(flotilla: Command, rows: list[Any]) -> None:
    def lines(name: str) -> list[Any]:
        return [json.loads(line) for line in Path(name).read_text().splitlines()]

    init(flotilla, rows)
    train, held_out = lines("split/train.jsonl"), lines("split/heldout.jsonl")
    assert len(train) + len(held_out) == len(rows) and 0 < len(held_out) <= len(rows) // 10
    assert all(row in rows for row in (*train, *held_out))
    assert not any(row in train for row in held_out), "rows of one prompt stay together"
    evaluation = run_file().evaluation
    assert evaluation is not None and str(evaluation.data) == "split/heldout.jsonl"
    assert str(run_file().data.train) == "split/train.jsonl"
    init(flotilla, rows[::-1], "--force")
    assert sorted(map(json.dumps, lines("split/heldout.jsonl"))) == sorted(map(json.dumps, held_out))


def test_held_out_prompts_longer_than_the_trained_ones_are_asked(flotilla: Command) -> None:
    """A chat is trained from its first answer on, and a held-out one asked up to its last."""
    turns = [{"role": "user", "content": "And then? " * 9}, {"role": "assistant", "content": "Then this."}]
    chats = [{"messages": chat["messages"] + turns} for chat in CHATS]
    named = write("held.jsonl", [{"prompt": "1+" * 300 + "1=", "answer": "301"}])
    for rows, more in (
        (chats, ()),
        (chats, ("--heldout", write("long.jsonl", chats))),
        (SUMS, ("--heldout", named)),
    ):
        init(flotilla, rows, *more, "--force")


def test_a_data_set_with_a_split_for_tests_holds_that_out(flotilla: Command) -> None:
    Path("sums").mkdir()
    write("sums/train.jsonl", SUMS[:40])
    write("sums/test.jsonl", SUMS[40:])
    code, _, err = flotilla("init", "--model", "model", "--data", "sums")
    assert code == 0, err
    evaluation = run_file().evaluation
    assert evaluation is not None and str(evaluation.data) == str(run_file().data.train) == "sums"
    assert not Path("split").exists()


@pytest.mark.parametrize("prefix", ["", "hub:"])
def test_a_data_set_of_the_hub_is_split_with_and_without_the_prefix(
    flotilla: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefix: str
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    snapshot = tmp_path / "cache/datasets--owner--sums/snapshots/abc"
    for folder in (snapshot, snapshot.parents[1] / "refs"):
        folder.mkdir(parents=True)
    (snapshot.parents[1] / "refs/main").write_text("abc")
    write(f"{snapshot}/train.jsonl", SUMS)
    asked = ("init", "--model", "model", "--data", f"{prefix}owner/sums", "--force")
    code, _, err = flotilla(*asked)
    assert code == 0 and len(Path("split/heldout.jsonl").read_text().splitlines()) == len(SUMS) // 10, err
    write(f"{snapshot}/test.jsonl", SUMS)
    code, _, err = flotilla(*asked)
    evaluation = run_file().evaluation
    assert (
        code == 0 and evaluation and str(evaluation.data) == str(run_file().data.train) == "hub:owner/sums"
    ), err


def test_times_within_the_messages_of_a_column_survive_the_split(flotilla: Command) -> None:
    said = {"at": datetime(2026, 1, 1, tzinfo=UTC)}
    rows = [{"messages": [message | said for message in chat["messages"]]} for chat in CHATS]
    pq.write_table(pa.Table.from_pylist(rows), "chats.parquet")
    code, _, err = flotilla("init", "--model", "model", "--data", "chats.parquet")
    assert code == 0 and '"2026-01-01 00:00:00+00:00"' in Path("split/train.jsonl").read_text(), err


@pytest.mark.parametrize(
    ("row", "algorithm"),
    [
        (CHATS[0], "sft"),
        ({"text": "a long text"}, "sft"),
        ({"prompt": "a", "completion": "b"}, "sft"),
        ({"prompt": "a", "completion": [{"role": "assistant", "content": "b"}]}, "sft"),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, "sft"),
        ({"instruction": "Translate.", "input": "cat", "output": "word " * 20}, "sft"),
        ({"instruction": "Translate.", "input": "cat", "output": "Katze"}, "grpo"),
        ({"data_source": "x", "extra_info": {"question": "1+1=", "answer": "2"}}, "sft"),
        ({"chosen": CHATS[0]["messages"], "rejected": [*CHATS[0]["messages"][:1], CHATS[1]["messages"][1]]}, "dpo"),
        ({"input": {"messages": CHATS[0]["messages"][:1]}, "preferred_output": CHATS[0]["messages"][1:],
          "non_preferred_output": CHATS[1]["messages"][1:]}, "dpo"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)  # fmt: skip
def test_layouts_are_learned_by_the_algorithm_that_they_are_for(
    flotilla: Command, row: dict[str, Any], algorithm: str
) -> None:
    code, out, err = flotilla("init", "--model", "model", "--data", write("train.jsonl", [row] * 4), "--json")
    assert code == 0, err
    assert json.loads(out)["algorithm"] == algorithm
    plan = json.loads(flotilla("run", "plan", "run.yaml", "--json")[1])
    shown = [line["explanation"] for line in plan["lines"] if line["name"].startswith("first row")]
    assert len(shown) == {"sft": 1, "dpo": 2, "grpo": 0}[algorithm]
    assert all(">>>" in text and text.endswith("<eos><<<") for text in shown)


def test_held_out_data_may_have_columns_of_their_own(flotilla: Command) -> None:
    held_out = write("held.jsonl", [{"question": "5+5", "solution": "10"}])
    init(flotilla, SUMS, "--heldout", held_out)
    evaluation = run_file().evaluation
    assert evaluation and (evaluation.prompt_field, evaluation.answer_field) == ("question", "solution")
    assert 0 < evaluation.every_steps < run_file().steps


def test_a_model_of_few_tokens_leaves_room_for_longer_prompts_than_the_first(flotilla: Command) -> None:
    settings = json.loads(Path("model/config.json").read_text()) | {"max_position_embeddings": 64}
    Path("model/config.json").write_text(json.dumps(settings))
    init(flotilla, SUMS)
    longest = max(len(f"<user>{row['prompt']}") for row in SUMS)
    config = run_file()
    assert config.data.max_prompt_tokens > longest
    assert config.data.max_prompt_tokens + config.rollout.sampling.max_response_tokens == 64


def test_texts_become_chat_messages_only_where_the_model_has_a_template(flotilla: Command) -> None:
    init(flotilla, SUMS)
    assert run_file().data.apply_chat_template
    make_model(Path("base"), template=False)
    init(flotilla, SUMS, "--model", "base", "--force")
    assert not run_file().data.apply_chat_template


@pytest.mark.parametrize(
    ("row", "chat"),
    [
        ({"prompt": "1+1", "ground_truth": "2"}, True),
        ({"prompt": "1+1", "reward_model": {"ground_truth": "2"}}, True),
        ({"messages": '[{"role": "user", "content": "1+1"}]', "ground_truth": "2"}, False),
        ({"prompt": [{"role": "user", "content": "1+1"}], "answer": "2"}, False),
    ],
)
def test_texts_of_any_layout_and_of_held_out_data_become_chat_messages(
    flotilla: Command, row: dict[str, Any], chat: bool
) -> None:
    init(flotilla, [row] * 20)
    assert run_file().data.apply_chat_template is chat
    if "answer" in row:
        init(flotilla, [row] * 20, "--force", "--heldout", write("held.jsonl", SUMS))
        assert run_file().data.apply_chat_template


def test_a_host_with_gpus_gets_a_stack_file_of_three_keys(flotilla: Command, eight_gpus: None) -> None:
    code, _, err = flotilla("init", "--model", "model", "--data", write("train.jsonl", SUMS))
    assert code == 0 and "GPU 7: generator-7 (" in err and "trainer rank 7" in err, err
    stack = load(StackConfig, ["stack.yaml"])
    assert stack.model_fields_set == {"name", "model", "generator"}
    assert stack.generator.model_fields_set == {"max_model_tokens"}
    assert flotilla("run", "plan", "run.yaml")[0] == 0


@pytest.mark.parametrize(("flags", "dtype"), [("avx512f", "float32"), ("avx512_bf16", "bfloat16")])
def test_a_host_without_gpus_gets_the_dtype_that_its_processor_has(
    flotilla: Command, flags: str, dtype: str
) -> None:
    Path("cpuinfo").write_text(f"flags : {flags}\n")
    init(flotilla, SUMS, "--algorithm", "ppo")
    stack = load(StackConfig, ["stack.yaml"])
    assert (stack.trainer.dtype, stack.generator.dtype, stack.critic.dtype) == (dtype,) * 3
    assert (stack.trainer.nproc, stack.generator.replicas, stack.critic.replicas) == (1, 1, 1)
    assert not [*size_limits.bfloat16_warnings(stack)]


def test_adapters_learn_where_all_weights_do_not_fit(flotilla: Command, eight_gpus: None) -> None:
    make_model(Path("large"), width=16_384, layers=40)  # 10.7 billion parameters
    made = init(flotilla, SUMS, "--model", "large")
    assert made["adapters"] and run_file().lora is not None
    small, large = 1e-5, run_file().optimizer.learning_rate
    assert large == pytest.approx(1e-5), "ten times that of its weights"
    assert not init(flotilla, SUMS, "--force")["adapters"]
    assert run_file().lora is None and run_file().optimizer.learning_rate == pytest.approx(small)


def test_every_algorithm_plans_or_says_what_it_needs(flotilla: Command) -> None:
    data = write("train.jsonl", SUMS)
    for name in (*PRESETS, "sft"):
        code, _, err = flotilla("init", "--model", "model", "--data", data, "--algorithm", name, "--force")
        needs = "environment is not set" if name == "gigpo" else "learns from a teacher"
        assert code == 0 or needs in err, (name, err)
    data = write("train.jsonl", PAIRS)
    for name in ("dpo", "reward_model"):
        code, _, err = flotilla("init", "--model", "model", "--data", data, "--algorithm", name, "--force")
        assert code == 0, err


def test_files_in_another_folder_mean_the_same_there(
    flotilla: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write("train.jsonl", [{"prompt": "Write."}] * 9)
    code, _, err = flotilla("init", "--model", "model", "--data", data, "New project: 2")
    assert code == 0 and "cd 'New project: 2' && flotilla reward test run.yaml" in err
    monkeypatch.chdir("New project: 2")
    assert load(StackConfig, ["stack.yaml"]).name == load(RunConfig, ["run.yaml"]).name == "new-project-2"
    assert flotilla("run", "plan", "run.yaml")[0] == 0


def test_files_are_overwritten_by_force_alone(flotilla: Command) -> None:
    Path("run.yaml").write_text("mine")
    asked = ("init", "--model", "model", "--data", write("train.jsonl", SUMS))
    code, _, err = flotilla(*asked)
    assert code == 2 and "run.yaml would be overwritten" in err and "--force" in err
    assert Path("run.yaml").read_text() == "mine" and not Path("stack.yaml").exists()
    assert flotilla(*asked, "--force")[0] == 0 and run_file().steps > 1


def test_a_reward_of_the_user_is_never_overwritten(flotilla: Command) -> None:
    mine = "def reward(prompt, response, answer, info):\n    return 0.5\n"
    Path("rewards.py").write_text(mine)
    asked = ("init", "--model", "model", "--data", write("train.jsonl", [{"prompt": "Write."}]))
    code, _, err = flotilla(*asked)
    assert code == 2 and "rewards.py would be overwritten" in err and not Path("run.yaml").exists()
    code, out, err = flotilla(*asked, "--force")
    assert code == 0 and "kept rewards.py" in out and "wrote run.yaml" in out, err
    assert Path("rewards.py").read_text() == mine


def test_the_commands_that_follow_name_the_new_stack_where_a_variable_names_another(
    flotilla: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLOTILLA_STACK", "other")
    _, out, _ = flotilla("init", "--model", "model", "--data", write("train.jsonl", SUMS), "--json")
    _, up, start = json.loads(out)["next"]
    assert up == "flotilla up --stack stack.yaml" and start.endswith("--wait --stack stack.yaml")


@pytest.mark.parametrize(
    ("rows", "options", "words"),
    [
        (SUMS, {"--model": "nowhere"}, ("the model folder does not exist", "--model nowhere", "by --model")),
        (SUMS, {"--data": "nowhere.jsonl"}, ("the data file does not exist", "by --data")),
        (SUMS, {"--heldout": "nowhere.jsonl"}, ("the data file does not exist", "by --heldout")),
        ([], {}, ("the data set has no rows", "one JSON object a line")),
        ([[1, 2]], {}, ("train.jsonl, line 1",)),
        ([*SUMS, {"answer": "1"}], {}, ("column 'prompt' is missing", "train.jsonl, line 81", "by --data")),
        ([{"text": "a", "label": 1}], {}, ("no column with prompts", "the rows have label, text")),
        (
            [{"question": "Which?", "choices": ["a", "b"], "answer": 0}],
            {},
            ("'question' is only a part", "'choices'"),
        ),
        (
            [*SUMS, {"prompt": "a", "answer": None}, {"prompt": "b"}],
            {},
            ("2 of the first 82 prompts have no answer", "train.jsonl", "column 'answer'"),
        ),
        ([{"prompt": "a" * 9000}], {}, ("longer than", "name rows with prompts of at most 8192 tokens")),
        ([{"prompt": "a", "label": 1}], {"--algorithm": "sft"}, ("sft needs a column", "label, prompt")),
        (SUMS, {"--algorithm": "dpo"}, ("dpo needs columns chosen and rejected", "answer, prompt")),
        (SUMS, {"--algorithm": "distillation"}, ("learns from a teacher",)),
        (SUMS, {"--algorithm": "grop"}, ("grop", "grpo")),
        (
            [
                {"prompt": "a", "completion": "b", "label": True},
                {"prompt": "a", "completion": "c", "label": False},
            ],
            {},
            ("the row calls its answer bad", "train.jsonl, line 2", "keep the good answers"),
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_cannot_be_used_is_refused_and_nothing_is_written(
    flotilla: Command, rows: list[Any], options: Mapping[str, str], words: tuple[str, ...]
) -> None:
    asked = {"--model": "model", "--data": write("train.jsonl", rows), **options}
    code, _, err = flotilla("init", *(word for option in asked.items() for word in option))
    assert code == 2 and all(word in err for word in words), err
    assert not Path("stack.yaml").exists() and not Path("run.yaml").exists()


def test_a_file_in_the_place_of_the_folder_is_named(flotilla: Command) -> None:
    data = write("train.jsonl", SUMS)
    code, _, err = flotilla("init", "--model", "model", "--data", data, data)
    assert code == 2 and "'train.jsonl' is a file" in err


def test_held_out_data_without_answers_are_refused(flotilla: Command) -> None:
    data, held_out = write("train.jsonl", SUMS), write("held.jsonl", [{"prompt": "1+1="}])
    code, _, err = flotilla("init", "--model", "model", "--data", data, "--heldout", held_out)
    assert code == 2 and "the held-out data have no answers" in err


def test_a_size_is_that_of_the_rows_and_no_key_that_ends_like_it() -> None:
    sizes = [one.size for one in _tasks(["a?grid_size=5", "a?size=7", "a?grid_size=5&size=9", "a"])]
    assert sizes == [TASK_ROWS[False], 7, 9, TASK_ROWS[False]]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--data", "x.jsonl", "--tasks", "countdown"), "name --data or --tasks"),
        ((), "name --data or --tasks"),
        (("--tasks", "reasoning_gym:Count"), "followed by the name of a task"),
        (("--tasks", "countdown?levels=0-4"), "names a range of levels, and init writes no data.curriculum"),
        (("--data", "reasoning_gym:countdown", "--heldout", "x.jsonl"), "--heldout is for other data"),
    ],
)
def test_data_or_tasks_are_named_and_well(flotilla: Command, arguments: tuple[str, ...], told: str) -> None:
    code, _, err = flotilla("init", "--model", "model", *arguments)
    assert code != 0 and told in err and not Path("run.yaml").exists()


@pytest.mark.parametrize("algorithm", ["grpo", "gigpo"])
def test_an_environment_of_a_file_that_is_not_there_is_written_and_plays_at_once(
    flotilla: Command, algorithm: str
) -> None:
    made = init(flotilla, SUMS, "--environment", "game.py:Sums", "--algorithm", algorithm)
    assert "game.py" in made["files"] and made["reward"] is None
    run, stack = run_file(), load(StackConfig, ["stack.yaml"])
    assert run.environment is not None and run.environment.name == "game.py:Sums" and not run.rewards
    assert stack.environment.replicas == 1 and stack.reward.replicas == 0
    assert stack.generator.max_model_tokens == run.environment.episode_tokens
    assert made["next"][0] == "flotilla env test game.py:Sums --data split/train.jsonl"
    row = json.loads(Path("split/train.jsonl").read_text().splitlines()[0])
    Path("answers.txt").write_text(f"0\nIt is {row['answer']}.\n")
    code, out, err = flotilla(*made["next"][0].split()[1:], "--answers", "answers.txt")
    assert code == 0 and "Try again." in out and "reward correct: 1" in out, err


def test_an_environment_that_is_there_stays_and_a_name_needs_no_file(flotilla: Command) -> None:
    Path("mine").mkdir()
    init(flotilla, SUMS, "--environment", "mine/game.py:Sums")
    Path("mine/game.py").write_text(text := Path("mine/game.py").read_text() + "# mine\n")
    made = init(flotilla, SUMS, "--environment", "mine/game.py:Sums", "--force")
    assert Path("mine/game.py").read_text() == text and "mine/game.py" not in made["files"]
    for name in ("gymnasium:FrozenLake-v1", "openenv:http://a:80"):
        init(flotilla, SUMS, "--environment", name, "--force")
        assert f'name: "{name}"' in Path("run.yaml").read_text()
        own = run_file().environment
        assert own is not None and own.parameters.popitem()[1] == name.partition(":")[2]
    assert init(flotilla, SUMS, "--environment", "calculator", "--force")["next"][0].startswith(
        "flotilla env test calculator "
    )
    code, _, err = flotilla(
        "init", "--model", "model", "--data", "train.jsonl", "--environment", "mine/game.py:Sums", "there"
    )
    own = load(RunConfig, ["there/run.yaml"]).environment
    assert code == 0 and own is not None and own.name == f"{Path.cwd()}/mine/game.py:Sums", err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--data", "train.jsonl", "--environment", "game.py"), "game.py names no class"),
        (("--data", "train.jsonl", "--environment", "a.py:A", "--algorithm", "sft"), "learns from rewards"),
        (("--tasks", "countdown", "--environment", "a.py:A"), "plays with rows of --data"),
    ],
)
def test_what_no_environment_can_play_is_refused_and_nothing_is_written(
    flotilla: Command, arguments: tuple[str, ...], told: str
) -> None:
    write("train.jsonl", SUMS)
    code, _, err = flotilla("init", "--model", "model", *arguments)
    assert code == 2 and told in err and not Path("run.yaml").exists()

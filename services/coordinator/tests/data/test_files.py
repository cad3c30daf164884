"""Data files: every format has the same rows, and prompts that are streamed are those that are loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest

from flotilla_coordinator.data.prompt_source import PromptSource
from flotilla_coordinator.data.prompts import Prompt, PromptFile, load_prompts
from flotilla_coordinator.data.training_sets import data_remarks, read_held_out, read_sets
from flotilla_coordinator.plan.data_lines import data_lines
from flotilla_core.config import DataConfig, RunConfig, TrainingSet
from flotilla_core.errors import FailedPrecondition, InvalidConfig
from flotilla_data.tokenizer import Tokenizer
from flotilla_testing.model_folders import write_tokenizer

CHARACTERS = "0123456789+= abcdefghijklmnopqrstuvwxyz<>|\n"
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'bot' %}{{ raise_exception('no bots') }}{% endif %}"
    "<{{ message.role }}>{{ message.content }}{% endfor %}<assistant>"
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    words = ["<pad>", "<eos>", *CHARACTERS]
    folder = tmp_path_factory.mktemp("model")
    return Tokenizer.load(write_tokenizer(folder, words, template=TEMPLATE, eos_token="<eos>"))


ROWS = [
    {"prompt": f"{i}+1=", "answer": str(i + 1), "level": i, "tags": ["a", "b"][: i % 3]} for i in range(300)
]


def as_lines(rows: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def shown(prompt: Prompt) -> tuple[Any, ...]:
    return (
        prompt.epoch,
        prompt.index,
        prompt.prompt_text,
        prompt.token_ids.tolist(),
        prompt.answer,
        prompt.info,
    )


def read(source: Path, tokenizer: Tokenizer, folder: Path, **options: Any) -> PromptFile:
    config = DataConfig(train=source, **options)
    return load_prompts(source, config, tokenizer, folder / "copies")


VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "1+1="}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"split": "train", "index": 0, "answer": "so 2", "question": "1+1="},
}
ROLL = {
    "id": "0",
    "source": "gsm8k",
    "prompt": "unused",
    "messages": json.dumps([{"role": "user", "content": "1+1="}]),
    "ground_truth": "2",
    "tag": "gsm8k",
}


@pytest.mark.parametrize(("row", "layout"), [(VERL, "verl"), (ROLL, "ROLL")])
def test_known_layouts_are_read_as_they_are(
    tmp_path: Path, tokenizer: Tokenizer, row: dict[str, Any], layout: str
) -> None:
    source = tmp_path / "train.parquet"
    pq.write_table(pa.Table.from_pylist([row]), source)
    file = read(source, tokenizer, tmp_path)
    (prompt,) = file.prompts
    assert (prompt.prompt_text, prompt.answer) == ("<user>1+1=<assistant>", "2")
    assert file.about.columns is not None and file.about.columns.layout == layout
    kept = {"prompt"} if layout == "verl" else {"messages", "ground_truth"}
    assert prompt.info == {name: value for name, value in row.items() if name not in kept}


def test_a_plan_says_the_layout_and_what_is_streamed(tmp_path: Path, tokenizer: Tokenizer) -> None:
    source = tmp_path / "train.jsonl"
    source.write_bytes(as_lines([VERL]))
    data = {"train": str(source), "streaming": "on", "max_prompt_tokens": 40}
    run = {"name": "r", "steps": 1, "data": data, "rewards": [{"reward": "exact"}]}
    config = RunConfig.model_validate(run)
    sets = read_sets(config.data, tokenizer, load_prompts)
    whole, columns = data_lines(config, sets, sets[0].file.longest_prompt)
    assert whole[1] == "1 prompts" and whole[2].startswith("streamed, at most 40 tokens each")
    assert columns[:2] == ("columns of train", "verl")
    assert "answer from 'reward_model.ground_truth'" in columns[2]


def test_columns_that_are_named_win_over_a_layout(tmp_path: Path, tokenizer: Tokenizer) -> None:
    source = tmp_path / "train.parquet"
    pq.write_table(pa.Table.from_pylist([VERL]), source)
    options = {"prompt_field": "extra_info.question", "answer_field": "extra_info.answer"}
    (prompt,) = read(source, tokenizer, tmp_path, **options).prompts
    assert (prompt.prompt_text, prompt.answer) == ("1+1=", "so 2")
    assert prompt.info == VERL, "the reward gets nested columns whole"


def test_held_out_rows_may_have_columns_of_their_own(tmp_path: Path, tokenizer: Tokenizer) -> None:
    source = tmp_path / "held-out.jsonl"
    source.write_bytes(as_lines([{"question": "1+1=", "solution": "2", "prompt": "unused"}]))
    evaluation = {"data": str(source), "prompt_field": "question", "answer_field": "solution"}
    run = {"name": "r", "steps": 1, "data": {"train": "t.jsonl"}, "rewards": [{"reward": "exact"}]}
    config = RunConfig.model_validate(run | {"evaluation": evaluation})
    ((_, file),) = read_held_out(config, tokenizer)
    (prompt,) = file.prompts
    assert (prompt.prompt_text, prompt.answer) == ("1+1=", "2")


def test_a_system_prompt_comes_before_messages_that_have_none(tmp_path: Path, tokenizer: Tokenizer) -> None:
    own = [{"role": "system", "content": "own"}, {"role": "user", "content": "2"}]
    rows = [{"prompt": "1"}, {"prompt": [{"role": "user", "content": "2"}]}, {"prompt": own}]
    source = tmp_path / "train.jsonl"
    source.write_bytes(as_lines(rows))
    prompts = read(source, tokenizer, tmp_path, system_prompt="be brief").prompts
    assert [prompt.prompt_text for prompt in prompts] == [
        "<system>be brief<user>1<assistant>",
        "<system>be brief<user>2<assistant>",
        "<system>own<user>2<assistant>",
    ]


def mixed(tmp_path: Path) -> tuple[TrainingSet, ...]:
    """Write two sets with prompts that are too long, rows that are bad, and one that the template refuses."""
    rows: list[Any] = [{"prompt": "9" * (i % 7 + 1), "answer": str(i)} for i in range(40)]
    lines = [json.dumps(row) for row in rows]
    lines[3] = "{broken"
    lines[11] = json.dumps({"prompt": ""})
    lines[12] = json.dumps({"prompt": [{"role": "bot", "content": "1"}]})
    (tmp_path / "lines.jsonl").write_text("\n\n".join(lines))
    table = pa.Table.from_pylist(
        [row | {"size": float("nan") if i == 9 else 1.0} for i, row in enumerate(rows)]
    )
    pq.write_table(table, tmp_path / "columns.parquet")
    return (
        TrainingSet(path=tmp_path / "lines.jsonl", weight=2),
        TrainingSet(path=tmp_path / "columns.parquet"),
    )


@pytest.mark.parametrize("overlong", ["drop", "truncate"])
@pytest.mark.parametrize("order", ["shuffled", "as_written"])
def test_streamed_prompts_are_drawn_in_the_same_order(
    tmp_path: Path, tokenizer: Tokenizer, order: str, overlong: str
) -> None:
    options: dict[str, Any] = {"order": order, "overlong_prompts": overlong, "max_prompt_tokens": 5}
    options |= {"max_bad_rows": 0.1, "rest_epochs": 3, "train": mixed(tmp_path)}

    def source(streaming: str) -> PromptSource:
        return PromptSource(DataConfig(streaming=streaming, **options), tokenizer, seed=7)  # type: ignore[arg-type]

    loaded, streamed = source("off"), source("on")
    drawn = []
    for number in range(150):
        one, other = loaded.next(), streamed.next()
        assert shown(one) == shown(other)
        drawn.append(shown(one))
        for each in (loaded, streamed):
            each.note(one.epoch, one.index, solved=number % 3 == 0, reward=0.0)
    assert (loaded.file.kept, loaded.file.rows) == (streamed.file.kept, streamed.file.rows)
    assert loaded.file.kept == (57 if overlong == "drop" else 76)
    assert not {3, 11, 12, 49} & {index for _, index, *_ in drawn}
    cursor = json.loads(json.dumps(streamed.cursor))
    assert cursor == loaded.cursor
    resumed = source("on")
    resumed.restore(cursor)
    solved = [(epoch, index, number % 3 == 0) for number, (epoch, index, *_) in enumerate(drawn)]
    for epoch, index, was_solved in solved:
        resumed.note(epoch, index, solved=was_solved, reward=0.0)
    assert [shown(resumed.next()) for _ in range(60)] == [shown(loaded.next()) for _ in range(60)]
    assert shown(resumed.known(5, drawn[0][1]))[1:] == drawn[0][1:]


@pytest.mark.parametrize("streaming", ["on", "off"])
def test_bad_rows_are_counted_and_named_by_file_and_row(
    tmp_path: Path, tokenizer: Tokenizer, streaming: str
) -> None:
    lines, columns = (one.path for one in mixed(tmp_path))
    file = read(lines, tokenizer, tmp_path, streaming=streaming, max_bad_rows=0.1)
    assert len(file.prompts) == 37
    (remark,) = data_remarks([file])
    assert remark.startswith(f"3 of 40 rows of {lines} are bad and left out (data.max_bad_rows is 0.1): ")
    assert f"the line is not JSON ({lines}, line 7)" in remark
    assert f"the prompt is empty ({lines}, line 23)" in remark and "no bots" in remark
    with pytest.raises(InvalidConfig, match=r"more than 2\.500% of 40 rows are bad .*line 7.*line 23"):
        read(lines, tokenizer, tmp_path, streaming=streaming, max_bad_rows=0.025)
    with pytest.raises(
        InvalidConfig, match=r"cannot be sent to a reward \(.*columns.parquet, row 10\): column size"
    ):
        read(columns, tokenizer, tmp_path, streaming=streaming)


@pytest.mark.parametrize("streaming", ["on", "off"])
def test_a_file_that_changed_since_the_start_is_refused_by_name(
    tmp_path: Path, tokenizer: Tokenizer, streaming: str
) -> None:
    first, second = (one.path for one in mixed(tmp_path))
    config = DataConfig(
        train=(TrainingSet(path=first), TrainingSet(path=second)),
        max_bad_rows=0.1,
        streaming=streaming,  # type: ignore[arg-type]
    )
    source = PromptSource(config, tokenizer, seed=1)
    cursor = source.cursor
    first.write_text(first.read_text().replace("999", "998", 1))
    with pytest.raises(FailedPrecondition, match=rf"{first} changed since then") as caught:
        PromptSource(config, tokenizer, seed=1).restore(cursor)
    assert str(second) not in str(caught.value)
    other = config.model_copy(update={"system_prompt": "be brief"})
    with pytest.raises(FailedPrecondition, match=rf"{first} changed"):
        PromptSource(other, tokenizer, seed=1).restore(cursor)
    again = PromptSource(config, tokenizer, seed=1).cursor
    with pytest.raises(FailedPrecondition, match="its columns, the tokenizer, the chat template"):
        PromptSource(other, tokenizer, seed=1).restore(again)


def test_large_data_sets_are_streamed_by_themselves(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "train.jsonl"
    source.write_bytes(as_lines(ROWS))
    assert not read(source, tokenizer, tmp_path).streamed
    monkeypatch.setattr("flotilla_coordinator.data.prompts.STREAMED_ABOVE_ROWS", 299)
    assert read(source, tokenizer, tmp_path).streamed

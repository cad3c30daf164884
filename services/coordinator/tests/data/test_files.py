"""Data files: every format has the same rows, and prompts that are streamed are those that are loaded."""

from __future__ import annotations

import gzip
import json
import os
import sys
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest
import tokenizers
import zstandard

from flotilla_coordinator.data.prompt_source import PromptSource
from flotilla_coordinator.data.prompts import Prompt, PromptFile, load_prompts
from flotilla_coordinator.data.tokenizer import Tokenizer
from flotilla_coordinator.data.training_sets import data_remarks, read_held_out, read_sets
from flotilla_coordinator.plan.data_lines import data_lines
from flotilla_core.config import DataConfig, RunConfig, TrainingSet
from flotilla_core.errors import FailedPrecondition, InvalidConfig, Unavailable
from flotilla_data.columns import Columns, Reads, all_usable
from flotilla_data.files import data_files
from flotilla_data.layouts import read_example

CHARACTERS = "0123456789+= abcdefghijklmnopqrstuvwxyz<>|\n"
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'bot' %}{{ raise_exception('no bots') }}{% endif %}"
    "<{{ message.role }}>{{ message.content }}{% endfor %}<assistant>"
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("model")
    vocabulary = {character: index for index, character in enumerate(["<pad>", "<eos>", *CHARACTERS])}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<pad>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return Tokenizer.load(folder)


ROWS = [
    {"prompt": f"{i}+1=", "answer": str(i + 1), "level": i, "tags": ["a", "b"][: i % 3]} for i in range(300)
]


def as_lines(rows: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def write_stream(path: Path, rows: list[dict[str, Any]]) -> None:
    table = pa.Table.from_pylist(rows)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=77)


def write_saved(folder: Path, rows: list[dict[str, Any]]) -> None:
    """Write a folder as `datasets` saves it, in two files, beside one that is only a cache."""
    folder.mkdir(parents=True)
    names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    write_stream(folder / names[0], rows[:100])
    write_stream(folder / names[1], rows[100:])
    write_stream(folder / "cache-0123.arrow", rows)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))


def written(kind: str, folder: Path) -> Path:
    """Write `ROWS` in a form, and return what names them in a configuration."""
    path = folder / f"train.{kind}"
    if kind == "jsonl":
        path.write_bytes(as_lines(ROWS))
    elif kind == "json":
        path.write_text(json.dumps(ROWS, indent=1))
    elif kind == "jsonl.gz":
        path.write_bytes(gzip.compress(as_lines(ROWS)))
    elif kind == "jsonl.zst":
        path.write_bytes(zstandard.compress(as_lines(ROWS)))
    elif kind == "parquet":
        pq.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=70)
    elif kind == "saved":
        write_saved(path, ROWS)
    elif kind == "saved with splits":
        write_saved(path / "train", ROWS)
        write_saved(path / "test", ROWS[:200])
        (path / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    elif kind == "folder with splits":
        (path / "data").mkdir(parents=True)
        pq.write_table(pa.Table.from_pylist(ROWS[:120]), path / "data" / "train-00000-of-00002.parquet")
        pq.write_table(pa.Table.from_pylist(ROWS[120:]), path / "data" / "train-00001-of-00002.parquet")
        pq.write_table(pa.Table.from_pylist(ROWS[:5]), path / "data" / "test-00000-of-00001.parquet")
    elif kind == "pattern":
        (folder / "part-b.jsonl").write_bytes(as_lines(ROWS[100:]))
        (folder / "part-a.jsonl").write_bytes(as_lines(ROWS[:100]))
        return folder / "part-*.jsonl"
    return path


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


KINDS = [
    "jsonl",
    "json",
    "jsonl.gz",
    "jsonl.zst",
    "parquet",
    "saved",
    "saved with splits",
    "folder with splits",
]


@pytest.mark.parametrize("streaming", ["on", "off"])
@pytest.mark.parametrize("kind", [*KINDS, "pattern"])
def test_every_format_has_the_same_rows(
    tmp_path: Path, tokenizer: Tokenizer, kind: str, streaming: str
) -> None:
    file = read(written(kind, tmp_path), tokenizer, tmp_path, streaming=streaming)
    prompts = file.prompts
    assert [(p.index, p.prompt_text, p.answer) for p in prompts] == [
        (i, row["prompt"], row["answer"]) for i, row in enumerate(ROWS)
    ]
    assert [p.info for p in prompts] == [{"level": row["level"], "tags": row["tags"]} for row in ROWS]
    assert [p.index for p in file.read([299, 5, 130, 5]) if p is not None] == [299, 5, 130, 5]


def test_where_pyarrow_is_missing_a_parquet_file_says_what_to_install(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = written("parquet", tmp_path)
    for name in ("pyarrow", "pyarrow.ipc", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(InvalidConfig, match=r"need the package pyarrow.*extra `report`"):
        read(source, tokenizer, tmp_path)


def test_a_copy_is_made_once_for_a_content(tmp_path: Path, tokenizer: Tokenizer) -> None:
    source = written("parquet", tmp_path)
    read(source, tokenizer, tmp_path, streaming="on")
    (copy,) = (tmp_path / "copies").iterdir()
    before = copy.stat().st_ino
    for name in (".writing-killed/copy", ".writing-now/copy", "unused.arrow"):
        (tmp_path / "copies" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "copies" / name).touch()
    for name in (".writing-killed", "unused.arrow"):
        os.utime(tmp_path / "copies" / name, (0, 0))
    read(written("json", tmp_path), tokenizer, tmp_path, streaming="on")
    left = {path.name for path in (tmp_path / "copies").iterdir()}
    assert ".writing-now" in left and not left & {".writing-killed", "unused.arrow"}
    moved = source.rename(tmp_path / "other.parquet")
    assert read(moved, tokenizer, tmp_path, streaming="on").kept == 300
    assert before in [path.stat().st_ino for path in (tmp_path / "copies").iterdir()]
    assert len(left) == len([*(tmp_path / "copies").iterdir()])


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ("test", r"no split 'test'.*it has train, validation"),
        ("train", "several configurations.*main, socratic"),
    ],
)
def test_a_folder_without_one_answer_is_refused(tmp_path: Path, split: str, message: str) -> None:
    for name in ("main/train-0.parquet", "socratic/train-0.parquet", "main/validation-0.parquet"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    with pytest.raises(InvalidConfig, match=message):
        data_files(tmp_path, split)
    assert data_files(tmp_path / "main", "train") == [tmp_path / "main" / "train-0.parquet"]


def test_a_hub_name_is_read_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    folder = tmp_path / "datasets--openai--gsm8k"
    snapshot = folder / "snapshots" / ("a" * 40)
    for name in ("main/train-00000-of-00001.parquet", "main/test-00000-of-00001.parquet"):
        (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / name).touch()
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("a" * 40)
    config = RunConfig.model_validate(
        {"name": "r", "steps": 1, "algorithm": {"type": "sft"}, "data": {"train": "hub:openai/gsm8k"}}
    )
    source = config.with_paths_from(Path("/elsewhere")).data.train
    assert isinstance(source, Path)
    assert data_files(source, "test") == [snapshot / "main/test-00000-of-00001.parquet"]
    assert data_files(Path("hub:openai/gsm8k/main"), "train") == [
        snapshot / "main/train-00000-of-00001.parquet"
    ]
    with pytest.raises(Unavailable, match=r"not in the local cache \(hub:openai/other\)"):
        data_files(Path("hub:openai/other"), "train")


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
            each.note(one.epoch, one.index, solved=number % 3 == 0)
    assert (loaded.file.kept, loaded.file.rows) == (streamed.file.kept, streamed.file.rows)
    assert loaded.file.kept == (57 if overlong == "drop" else 76)
    assert not {3, 11, 12, 49} & {index for _, index, *_ in drawn}
    cursor = json.loads(json.dumps(streamed.cursor))
    assert cursor == loaded.cursor
    resumed = source("on")
    resumed.restore(cursor)
    solved = [(epoch, index, number % 3 == 0) for number, (epoch, index, *_) in enumerate(drawn)]
    for epoch, index, was_solved in solved:
        resumed.note(epoch, index, solved=was_solved)
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


def test_a_file_that_is_written_while_a_run_reads_it_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = written("jsonl", tmp_path)
    file = read(path, tokenizer, tmp_path, streaming="on")
    with path.open("ab") as opened:
        opened.write(b"\n")
    with pytest.raises(FailedPrecondition, match=rf"changed while a run reads it \({path}\)"):
        file.read([0])


def test_large_data_sets_are_streamed_by_themselves(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = written("jsonl", tmp_path)
    assert not read(source, tokenizer, tmp_path).streamed
    monkeypatch.setattr("flotilla_coordinator.data.prompts.STREAMED_ABOVE_ROWS", 299)
    assert read(source, tokenizer, tmp_path).streamed


CHAT = [{"role": "user", "content": "1"}]
IMAGE = [{"role": "user", "content": [{"type": "text", "text": "1"}, {"type": "image", "text": None}]}]


@pytest.mark.parametrize(
    ("values", "usable"),
    [
        (["1", "2"], True),
        (["1", ""], False),
        (["1", None], False),
        ([CHAT, CHAT], True),
        ([CHAT, []], False),
        ([CHAT, None], False),
        ([1, 2], False),
        ([["user"], ["bot"]], False),
        ([IMAGE, IMAGE], False),
    ],
)
def test_whole_columns_of_prompts_are_judged_as_their_rows_are(values: list[Any], usable: bool) -> None:
    assert judged([{"prompt": value} for value in values]) == (usable, usable)


@pytest.mark.parametrize(
    ("value", "usable"),
    [
        (1, True),
        (2**53, True),
        (2**53 + 1, False),
        (-(2**60), False),
        (0.5, True),
        (None, True),
        (float("nan"), False),
        (float("inf"), False),
        (b"bytes", False),
        ("text", True),
        ([1, 2**60], False),
        ([1.0, float("nan")], False),
        ([[], [1]], True),
        ({"a": {"b": [2**60]}}, False),
        ({"a": {"b": [1]}, "c": None}, True),
    ],
)
def test_whole_columns_are_judged_as_their_rows_are(value: Any, usable: bool) -> None:
    rows = [{"prompt": "1", "other": None}, {"prompt": "1", "other": value}]
    assert judged(rows) == (usable, usable)


def judged(rows: list[dict[str, Any]]) -> tuple[bool, bool]:
    """Return whether the rows are usable, judged by whole columns and one by one."""
    (batch,) = pa.Table.from_pylist(rows).to_batches()
    columns = Columns("prompt", "answer", "chosen", "rejected")
    try:
        for row in batch.to_pylist():
            read_example(row, columns, Reads.prompts, "here")
    except InvalidConfig:
        return all_usable(batch, columns), False
    return all_usable(batch, columns), True


def test_times_become_text(tmp_path: Path, tokenizer: Tokenizer) -> None:
    source = tmp_path / "train.parquet"
    time = pa.array([0], pa.timestamp("s"))
    pq.write_table(pa.table({"prompt": ["1"], "made": time}), source)
    assert read(source, tokenizer, tmp_path).prompts[0].info == {"made": "1970-01-01 00:00:00"}

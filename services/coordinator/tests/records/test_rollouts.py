"""What a run records of its samples trains as they did: every column that the trainer gets survives the file."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flotilla.trainer.v1 import trainer_pb2 as pb
from flotilla_coordinator.data.prompts import PromptFile
from flotilla_coordinator.data.recorded import load_recorded
from flotilla_coordinator.data.recorded_columns import Doubt, SampleColumns
from flotilla_coordinator.ledger.records import Branch, Episode, TokenSpan
from flotilla_coordinator.records.rollouts import RolloutRecord, schema
from flotilla_coordinator.rollouts.batch import Batch, RolloutGroup, RolloutSample, recorded_group
from flotilla_coordinator.trainers.messages import fill
from flotilla_core.config import DataConfig
from flotilla_core.errors import AlreadyExists, FlotillaError, InvalidConfig
from flotilla_core.version import Version

DIGEST = "of-this-tokenizer"
ANY: Any = SimpleNamespace(digest=DIGEST, vocabulary_size=99)


def sample(name: str, tokens: int, **changes: Any) -> RolloutSample:
    rng = np.random.default_rng(tokens)
    return RolloutSample(
        sample_id=name,
        token_ids=rng.integers(0, 99, tokens).astype(np.int32),
        logprobs=-rng.random(tokens).astype(np.float32),
        text="a text",
        spans=(TokenSpan(Version(1, 4), 0, tokens),),
        **{"reward": 0.25, "reward_terms": (0.5, -0.25), "generator": "generator-0"} | changes,
    )


def group(name: str, samples: list[RolloutSample]) -> RolloutGroup:
    prompt = np.arange(len(name), dtype=np.int32)
    chat, column = [{"role": "user", "content": "7?"}], {"answer": 7}
    rest: dict[str, Any] = {"answer": "7", "info": {"level": 3}, "chat": chat, "answer_column": column}
    return RolloutGroup(name, "the prompt", prompt, samples, **rest)


def episode(tokens: int) -> RolloutSample:
    trained = np.arange(tokens) % 3 != 0
    branches = (Branch(0, np.array([5, 6], np.int32)), Branch(4, np.array([5, 6, 7], np.int32)))
    played = Episode("completed", 2, (0.5, 1.0), '[{"role": "user"}]', branches, (3, tokens), (-9, 1 << 62))
    return sample("e", tokens, trained=trained, episode=played)


BATCH = Batch(
    4,
    [
        group("run/0/11", [sample("a", 5), sample("b", 1, truncated=True, greedy_reward=0.5)]),
        group("run/0/2", [episode(9), sample("c", 3, trained=np.array([True, False, True]))]),
    ],
    {},
)


def read(folder: Path, **conditions: Any) -> PromptFile:
    asked = {"temperature": 1.0, "least_samples": 2, "greedy": False} | conditions
    return load_recorded(folder, DataConfig(train=folder, recorded=True), ANY, None, **asked)


def message(found: RolloutGroup) -> pb.TrainGroup:
    """The group as the trainer gets it, without the names and versions that another run gives it."""
    filled = pb.TrainGroup()
    fill(filled, found)
    filled.group_id = ""
    for one in filled.samples:
        one.sample_id = ""
        del one.version_spans[:]
    return filled


def test_the_trainer_gets_of_a_record_what_it_got_of_the_samples(tmp_path: Path) -> None:
    RolloutRecord(tmp_path, "run", 1.0, DIGEST).write(BATCH, Version(1, 4))
    file = read(tmp_path)
    assert (file.rows, file.kept, file.longest_prompt) == (2, 2, len("run/0/11"))
    groups = [recorded_group("other", prompt) for prompt in file.prompts]
    assert [message(one) for one in groups] == [message(one) for one in BATCH.groups]
    assert not any(one.spans for made in groups for one in made.samples)
    for name in ("prompt_text", "answer", "info", "chat", "answer_column"):
        assert [getattr(one, name) for one in groups] == [getattr(one, name) for one in BATCH.groups]
    first, second = file.prompts
    assert [*first.brought_tokens] == [8 + 5, 8 + 1]
    assert [*second.brought_tokens] == [2 + 4, 3 + 5, 7 + 3]


def test_a_file_has_the_columns_of_the_schema_and_a_row_for_each_sample(tmp_path: Path) -> None:
    record = RolloutRecord(tmp_path, "run", 0.5, DIGEST)
    path = record.write(BATCH, Version(1, 4))
    assert path == tmp_path / "step-000004.parquet" and [*tmp_path.iterdir()] == [path]
    table = pq.read_table(path)
    assert table.schema.equals(schema()) and table.schema.metadata == schema().metadata
    rows = table.to_pylist()
    assert [row["sample_id"] for row in rows] == ["a", "b", "e", "c"]
    assert rows[0]["versions"] == [{"version": "1.4", "start": 0, "end": 5}]
    assert {row["trained_version"] for row in rows} == {"1.4"} and {row["temperature"] for row in rows} == {
        0.5
    }
    assert rows[0]["ending"] is None and rows[2]["ending"] == "completed"


def test_a_repeated_step_replaces_its_file_and_one_without_samples_writes_none(tmp_path: Path) -> None:
    record = RolloutRecord(tmp_path, "run", 1.0, DIGEST)
    record.write(BATCH, Version(1, 4))
    record.write(replace(BATCH, groups=BATCH.groups[:1]), Version(2, 4))
    assert record.write(replace(BATCH, step=5, groups=[]), Version(2, 5)) is None
    (path,) = tmp_path.iterdir()
    assert pq.read_table(path).num_rows == 2
    assert record.write(replace(BATCH, groups=[]), Version(3, 4)) is None
    assert not [*tmp_path.iterdir()]


def test_a_folder_holds_the_samples_of_one_model_and_of_one_way_to_draw_them(tmp_path: Path) -> None:
    record = RolloutRecord(tmp_path, "run", 1.0, DIGEST, "version 1.4 of run")
    record.require_own()
    record.write(BATCH, Version(1, 4))
    record.require_own()
    assert len(read(tmp_path).prompts) == 2
    for drawn_by in ("version 1.5 of run", ""):
        with pytest.raises(AlreadyExists, match=r"step-000004\.parquet.*drawn by version 1\.4 of run"):
            replace(record, drawn_by=drawn_by).require_own()
    record.path_of(4).unlink()
    replace(record, drawn_by="").write(BATCH, Version(1, 4))
    with pytest.raises(AlreadyExists, match="drawn by a run"):
        record.require_own()


def test_every_column_of_a_sample_is_recorded_or_is_made_anew() -> None:
    """A new field of a sample is recorded, unless other gangs fill it before an update."""
    scored_anew = {"values", "value_after", "reference_logprobs"} | {
        one.name for one in fields(RolloutSample) if one.name.startswith("teacher_")
    }
    of_this_attempt = {"instance_ids", "generator_s", "outcome", "played", "greedy"}
    named_otherwise = {
        "text": "response",
        "spans": "versions",
        "verdicts": "reward_parts",
        "episode": "branches",
    }
    columns = set(schema().names)
    for one in fields(RolloutSample):
        if one.name not in scored_anew | of_this_attempt:
            assert named_otherwise.get(one.name, one.name) in columns, one.name


def test_json_lines_with_the_same_columns_are_a_record_too(tmp_path: Path) -> None:
    path = RolloutRecord(tmp_path, "run", 1.0, DIGEST).write(BATCH, Version(1, 4))
    lines = tmp_path / "lines.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in pq.read_table(path).to_pylist()))
    of_lines, of_columns = (
        [recorded_group("x", one) for one in read(each).prompts] for each in (lines, path)
    )
    assert [message(one) for one in of_lines] == [message(one) for one in of_columns]


def without(**changes: Any) -> Callable[[RolloutSample], RolloutSample]:
    return lambda one: replace(one, **changes)


@pytest.mark.parametrize(
    ("spoil", "conditions", "said"),
    [
        (without(), {"temperature": 0.7}, "drawn at temperature 1, and the run computes with 0.7"),
        (without(), {"greedy": True}, "no reward of a greedy response"),
        (without(logprobs=None), {}, "column 'logprobs' is missing"),
        (without(logprobs=np.zeros(2, np.float32)), {}, "5 tokens, and 2 numbers in column 'logprobs'"),
        (without(reward=float("nan")), {}, "column 'reward' is no number"),
        (without(), {"reward_terms": 3}, "the sample has 2 reward_terms, and 3 are weighed"),
        (without(), {"states": True}, "the sample has no turn_states"),
    ],
)
def test_a_sample_that_cannot_be_trained_is_refused_by_its_row(
    tmp_path: Path,
    spoil: Callable[[RolloutSample], RolloutSample],
    conditions: dict[str, Any],
    said: str,
) -> None:
    first = group("run/0/1", [spoil(sample("a", 5)), sample("b", 5)])
    RolloutRecord(tmp_path, "run", 1.0, DIGEST).write(Batch(0, [first], {}), Version(0, 0))
    with pytest.raises(InvalidConfig) as error:
        read(tmp_path, **conditions)
    assert said in str(error.value) and "step-000000.parquet, row 1" in str(error.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"token_ids": [-1, 2, 3, 4, 5]},
        {"token_ids": [1.5, 2, 3, 4, 5]},
        {"token_ids": [2**31, 2, 3, 4, 5]},
        {"token_ids": [[1], [2], [3], [4], [5]]},
        {"token_ids": ["1", "2", "3", "4", "5"]},
        {"token_ids": [None, 2, 3, 4, 5]},
        {"logprobs": "-0.5"},
        {"logprobs": [None] * 5},
        {"trained": [1, 0, 1, 0, 1]},
        {"prompt_token_ids": {"a": 1}},
        {"prompt": 5},
        {"response": 5},
        {"answer": ["7"]},
        {"info": "[" * 10_000},
        {"info": "[1]"},
        {"info": 7},
        {"chat": "{}"},
        {"answer_column": "NaN"},
        {"reward": True},
        {"reward": "1"},
        {"reward_terms": ["x"]},
        {"turns": "many"},
        {"turn_rewards": 3},
        {"turn_ends": [None]},
        {"turn_states": ["s"]},
        {"branches": [{"start": 1, "prompt_token_ids": [1]}]},
        {"branches": [{"start": 0}]},
        {"branches": [{"start": 0, "prompt_token_ids": [1]}, {"start": 9, "prompt_token_ids": [1]}]},
        {"branches": ["x"]},
        {"branches": 4},
        {"greedy_reward": "x"},
    ],
    ids=str,
)
def test_a_row_that_holds_something_else_is_refused_by_its_line(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    path = RolloutRecord(tmp_path, "run", 1.0, DIGEST).write(BATCH, Version(1, 4))
    first, *others = pq.read_table(path).to_pylist()
    lines = tmp_path / "lines.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in (first | changes, *others)))
    with pytest.raises(InvalidConfig, match=r"no recorded sample.*lines\.jsonl, line 1"):
        read(lines)
    try:
        table = pa.Table.from_pylist([first | changes, *others])
    except pa.ArrowException:  # no column can hold both
        return
    pq.write_table(table, path)
    with pytest.raises(InvalidConfig, match=r"no recorded sample.*parquet, row "):
        read(path)


def test_columns_of_a_record_leave_no_doubt_and_tell_what_its_rows_tell(tmp_path: Path) -> None:
    path = RolloutRecord(tmp_path, "run", 1.0, DIGEST).write(BATCH, Version(1, 4))
    assert path is not None
    table = pq.read_table(path)
    (piece,) = table.to_batches()
    columns = SampleColumns(piece)
    assert columns.groups == ["run/0/11"] * 2 + ["run/0/2"] * 2
    lines = tmp_path / "lines.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
    for file in read(path), read(lines):
        assert file.longest_brought == columns.longest == 8 + 5
        assert file.longest_prompt == len("run/0/11")
    for name in ("prompt", "token_ids", "logprobs", "reward"):
        with pytest.raises(Doubt):
            SampleColumns(piece.drop_columns([name]))


def rewritten(folder: Path, rows: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> Path:
    """A record with other rows."""
    path = RolloutRecord(folder, "run", 1.0, DIGEST).write(BATCH, Version(1, 4))
    assert path is not None
    pq.write_table(pa.Table.from_pylist(rows(pq.read_table(path).to_pylist()), schema()), path)
    return path


def test_rows_of_a_group_that_others_part_are_refused(tmp_path: Path) -> None:
    path = rewritten(tmp_path, lambda rows: [rows[place] for place in (0, 2, 1, 3)])
    with pytest.raises(InvalidConfig, match=r"row 3\): rows of group run/0/11 came before"):
        read(path)


def test_rows_of_a_group_have_one_prompt(tmp_path: Path) -> None:
    path = rewritten(tmp_path, lambda rows: [rows[0], rows[1] | {"prompt_token_ids": [1]}, *rows[2:]])
    with pytest.raises(InvalidConfig, match=r"row 2\): its prompt is another one"):
        read(path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tokenizer": None, "token_ids": [98, 99, 1, 2, 3]}, "tokens of another tokenizer"),
        ({"branches": [{"start": 0, "prompt_token_ids": [1]}], "ending": ""}, "branches, .* and no ending"),
    ],
)
def test_tokens_that_would_be_trained_in_another_place_are_refused(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    path = rewritten(tmp_path, lambda rows: [rows[0] | changes, *rows[1:]])
    with pytest.raises(InvalidConfig, match=said):
        read(path)


def test_a_group_that_is_smaller_than_the_advantage_compares_is_left_out_and_counted(tmp_path: Path) -> None:
    path = rewritten(tmp_path, lambda rows: rows[1:])
    file = read(path)
    assert (file.rows, file.kept) == (2, 1)
    small, whole = file.read([0, 1])
    assert small is None and whole is not None and whole.index == 1
    (remark,) = file.remarks
    assert "1 of 2 recorded groups" in remark and "fewer than the 2 samples" in remark
    assert read(path, least_samples=1).kept == 2
    with pytest.raises(InvalidConfig, match="no group has 3 samples or more"):
        read(path, least_samples=3)


def test_samples_of_another_tokenizer_and_rows_of_prompts_are_refused(tmp_path: Path) -> None:
    RolloutRecord(tmp_path, "run", 1.0, "of-another").write(BATCH, Version(0, 0))
    with pytest.raises(InvalidConfig, match="tokens of another tokenizer"):
        read(tmp_path)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    with pytest.raises(FlotillaError, match=r"no recorded sample.*column 'group_id' is missing"):
        read(prompts)

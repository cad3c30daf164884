"""What a row teaches, and what no layout may make of one."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from codecs import BOM_UTF8
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flotilla_core.config import DataConfig
from flotilla_core.errors import InvalidConfig
from flotilla_data.columns import Columns, Reads
from flotilla_data.layouts import Example, read_example
from flotilla_data.rows import open_rows
from flotilla_testing.chat_templates import assistant, user

Row = dict[str, Any]


def test_a_row_that_is_nested_too_deeply_is_refused_by_its_line() -> None:
    arguments: Row = {}
    for _ in range(2000):
        arguments = {"a": arguments}
    row = {"messages": [user("a"), assistant("", tool_calls=[{"name": "f", "arguments": arguments}])]}
    columns = Columns.of(DataConfig(train=Path("rows.jsonl")), row, Reads.answers)
    with pytest.raises(InvalidConfig, match=r"nested too deeply \(line 1\)"):
        read_example(row, columns, Reads.answers, "line 1")


def by_labels(good: Row, bad: Row, *labels: float) -> list[Row]:
    """Return rows of unpaired preferences, the bad one first."""
    return [bad | {"label": labels[0]}, good | {"label": labels[1]}]


KTO = by_labels({"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": "c"}, False, True)
BY_NUMBERS = by_labels({"prompt": "a", "answer": "b"}, {"prompt": "a", "answer": "c"}, 0.0, 1.0)
CHATS_BY_NUMBERS = by_labels(*({"messages": [user("a"), assistant(text)]} for text in "bc"), 0, 1)


@pytest.mark.parametrize(
    ("rows", "name", "pack"),
    [
        (KTO, "my rows.jsonl", b"\n\n".join),
        (KTO, "windows.jsonl", lambda rows: BOM_UTF8 + b"\r\n".join(rows)),
        (KTO, "rows.json", lambda rows: b"[" + b", ".join(rows) + b"]"),
        (KTO, "rows.jsonl.gz", lambda rows: gzip.compress(b"\n".join(rows))),
        (KTO, "rows.parquet", None),
        (BY_NUMBERS, "answers.jsonl", b"\n".join),
        (CHATS_BY_NUMBERS, "chats.jsonl", b"\n".join),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_answers_are_never_learned_and_a_command_keeps_the_good_ones(
    rows: list[Row], name: str, pack: Callable[[list[bytes]], bytes] | None, tmp_path: Path
) -> None:
    if pack is None:
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / name)
    else:
        (tmp_path / name).write_bytes(pack([json.dumps(row).encode() for row in rows]))
    with pytest.raises(InvalidConfig, match="the row calls its answer bad") as caught:
        learned(tmp_path / name)
    _, _, command = caught.value.next_step.partition("by sft: ")
    ours = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "LC_ALL": "C"}
    subprocess.run(["bash", "-c", command], cwd=tmp_path, env=ours, check=True)
    (kept,) = learned(next(tmp_path.glob("good.*")))
    assert kept.answer == "b"


def test_a_label_that_is_no_judgement_leaves_a_row_as_it_is() -> None:
    for label in (3, None, "0", ""):
        row = {"prompt": "a", "answer": "b", "label": label}
        columns = Columns.of(DataConfig(train=Path("rows.jsonl")), row, Reads.answers)
        assert read_example(row, columns, Reads.answers, "line 1").answer == "b"


def learned(source: Path) -> list[Example]:
    """Return what `sft` learns from a file."""
    rows = open_rows(source, "train", None)
    columns = Columns.of(DataConfig(train=source), rows.read([0])[0].values, Reads.answers)
    return [
        read_example(row.values, columns, Reads.answers, row.where) for row in rows.read(range(len(rows)))
    ]

"""Rows of a data set: every format has the same ones, and a file is read as it was when it was opened."""

from __future__ import annotations

import gzip
import json
import os
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest
import zstandard

from flotilla_core.errors import FailedPrecondition, InvalidConfig
from flotilla_data.rows import Rows, open_rows

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


def read(source: Path, folder: Path) -> Rows:
    return open_rows(source, "train", folder / "copies")


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


@pytest.mark.parametrize("kind", [*KINDS, "pattern"])
def test_every_format_has_the_same_rows(tmp_path: Path, kind: str) -> None:
    rows = read(written(kind, tmp_path), tmp_path)
    assert [row.values for row in rows.read(range(len(rows)))] == ROWS
    assert [row.number for row in rows.unproven()] == list(range(300))
    chosen = rows.read([299, 5, 130, 5])
    assert [(row.number, row.values["level"]) for row in chosen] == [(n, n) for n in (299, 5, 130, 5)]


def test_where_pyarrow_is_missing_a_parquet_file_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = written("parquet", tmp_path)
    for name in ("pyarrow", "pyarrow.ipc", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(InvalidConfig, match=r"need the package pyarrow.*extra `report`"):
        read(source, tmp_path)


def test_a_copy_is_made_once_for_a_content(tmp_path: Path) -> None:
    source = written("parquet", tmp_path)
    read(source, tmp_path)
    (copy,) = (tmp_path / "copies").iterdir()
    before = copy.stat().st_ino
    for name in (".writing-killed/copy", ".writing-now/copy", "unused.arrow"):
        (tmp_path / "copies" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "copies" / name).touch()
    for name in (".writing-killed", "unused.arrow"):
        os.utime(tmp_path / "copies" / name, (0, 0))
    read(written("json", tmp_path), tmp_path)
    left = {path.name for path in (tmp_path / "copies").iterdir()}
    assert ".writing-now" in left and not left & {".writing-killed", "unused.arrow"}
    moved = source.rename(tmp_path / "other.parquet")
    assert len(read(moved, tmp_path)) == 300
    assert before in [path.stat().st_ino for path in (tmp_path / "copies").iterdir()]
    assert len(left) == len([*(tmp_path / "copies").iterdir()])


def test_a_file_that_is_written_while_a_run_reads_it_is_refused(tmp_path: Path) -> None:
    path = written("jsonl", tmp_path)
    file = read(path, tmp_path)
    with path.open("ab") as opened:
        opened.write(b"\n")
    with pytest.raises(FailedPrecondition, match=rf"changed while a run reads it \({path}\)"):
        file.read([0])


def test_times_become_text(tmp_path: Path) -> None:
    source = tmp_path / "train.parquet"
    time = pa.array([0], pa.timestamp("s"))
    pq.write_table(pa.table({"prompt": ["1"], "made": time}), source)
    (row,) = read(source, tmp_path).read([0])
    assert row.values == {"prompt": "1", "made": "1970-01-01 00:00:00"}

"""Data files of strangers: each is read right, or refused by one clear error, in bounded memory and time."""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest
import zstandard

from flotilla_testing.model_folders import write_tokenizer
from flotilla_testing.peak_memory import most_memory_kib

MOST_MIB = 1024

READER = """
import contextlib, functools, json, sys
from pathlib import Path
from flotilla_core.bounded_process import BoundedProcess, Bounds
from flotilla_coordinator.data.prompts import load_prompts
from flotilla_data.tokenizer import Tokenizer
from flotilla_core.config import DataConfig
from flotilla_core.errors import FlotillaError
from flotilla_data import copies, formats, rows
@functools.cache
def kept(function, bounds):
    return BoundedProcess(function, bounds)
def child(function, bounds):
    # Bounds grow with the file. Files that get the least of them, within a second of time, share a child.
    if bounds.cpu_s > copies.LEAST_CPU_S + 1 or bounds.file_bytes > copies.LEAST_UNPACKED_BYTES:
        return BoundedProcess(function, bounds)
    least = Bounds(copies.MEMORY_BYTES, copies.LEAST_CPU_S, file_bytes=copies.LEAST_UNPACKED_BYTES)
    return contextlib.nullcontext(kept(function, least))
copies.BoundedProcess = child
tokenizer = Tokenizer.load(Path(sys.argv[1]))
for line in sys.stdin:
    asked = json.loads(line)
    most_rows = formats.MOST_ROWS
    formats.MOST_ROWS = rows.MOST_ROWS = asked.pop("most_rows", most_rows)
    config = DataConfig.model_validate(asked)
    try:
        file = load_prompts(config.train, config, tokenizer, Path(sys.argv[2]))
        told = f"read {len(file.prompts)} prompts"
    except FlotillaError as error:
        told = f"{type(error).__name__}: {error}"
    formats.MOST_ROWS = rows.MOST_ROWS = most_rows
    print(json.dumps(told), flush=True)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    words, template = (
        ["<pad>", "<eos>", *"0123456789+= x"],
        "{% for m in messages %}{{ m.content }}{% endfor %}",
    )
    return write_tokenizer(tmp_path_factory.mktemp("model"), words, template=template, eos_token="<eos>")


Ask = Callable[..., str]


@pytest.fixture(scope="module")
def ask(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    """Ask a process that stands for the coordinator: it reads one data set after the other.

    Small files are decoded by one child, within the bounds of one file, so that none of them spoils it for the next.
    """
    copies = tmp_path_factory.mktemp("copies")
    reader = subprocess.Popen(
        [sys.executable, "-c", READER, str(model), str(copies)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert reader.stdin and reader.stdout

    def asked(source: Path, **options: Any) -> str:
        assert reader.stdin and reader.stdout
        reader.stdin.write(json.dumps({"train": str(source), **options}) + "\n")
        reader.stdin.flush()
        line = reader.stdout.readline()
        assert line, f"the reader died of it: {reader.wait()}"
        assert most_memory_kib(reader.pid) < MOST_MIB << 10
        return str(json.loads(line))

    yield asked
    reader.stdin.close()
    reader.wait(30)


ROW = b'{"prompt": "1+1=", "answer": "2"}\n'
EMPTY_LISTS = b'{"prompt": "1", "x": [' + b"[]," * (20 << 20) + b"[]]}"
MANY_KEYS = b'{"prompt": "1", "x": {' + b",".join(b'"%x":0' % key for key in range(4_300_000)) + b"}}"

LINES: dict[str, tuple[bytes | Callable[[], bytes], str]] = {
    "empty": (b"", "no rows.*one JSON object a line"),
    "blank lines": (b"\n \n\t\n" * 1000, "no rows.*one JSON object a line"),
    "deep lists": (b"[" * 100_000, "nested too deeply"),
    "deep objects": (b'{"prompt":' * 100_000, "nested too deeply"),
    "deep value": (b'{"prompt": "1", "x": ' + b"[" * 900 + b"]" * 900 + b"}", "more than 20 levels"),
    "long number": (b'{"prompt": "1", "x": 1' + b"0" * 5000 + b"}", "not JSON"),
    "large number": (b'{"prompt": "1", "x": 1' + b"0" * 500 + b"}", "beyond 2\\^53"),
    "NaN": (b'{"prompt": "1", "x": NaN}', "NaN is no number"),
    "infinity": (b'{"prompt": "1", "x": -Infinity}', "-Infinity is no number"),
    "exponent": (b'{"prompt": "1", "x": 1e999}', "too large for a number"),
    "surrogate": (b'{"prompt": "\\ud800"}', "half of a surrogate pair"),
    "surrogate in a key": (b'{"prompt": "1", "\\udfff": 1}', "half of a surrogate pair"),
    "bytes": (b'{"prompt": "\xff\xfe"}', "not JSON"),
    "UTF-16": ('{"prompt": "1"}\n'.encode("utf-16"), "not JSON"),
    "byte order mark": (b"\xef\xbb\xbf" + ROW, "read 1 prompts"),
    "NUL": (b'{"prompt": "1\0"}', "not JSON"),
    "only NUL": (b"\0" * 1000, "not JSON"),
    "keys twice": (b'{"prompt": "1", "prompt": "2"}', "read 1 prompts"),
    "no newline at the end": (ROW.strip(), "read 1 prompts"),
    "carriage returns": (ROW.replace(b"\n", b"\r\n") * 3, "read 3 prompts"),
    "row is a list": (b"[]", "it is a list"),
    "row is a number": (b"7", "it is a int"),
    "row is a text": (b'"prompt"', "it is a str"),
    "prompt is a number": (b'{"prompt": 7}', "neither text nor a list"),
    "prompt is null": (b'{"prompt": null}', "column 'prompt' is missing"),
    "prompt is an object": (b'{"prompt": {"content": "1"}}', "neither text nor a list"),
    "message without role": (b'{"prompt": [{"content": "1"}]}', "neither text nor a list"),
    "message with a deep part": (b'{"prompt": [{"role": "user", "content": [[[["1"]]]]}]}', "not text"),
    "message of an image": (b'{"prompt": [{"role": "user", "content": [{"type": "image"}]}]}', "not text"),
    "long line": (b'{"prompt": "' + b"1" * (65 << 20) + b'"}', "the line is too long"),
    "long prompt": (b'{"prompt": "' + b"1" * (10 << 20) + b'"}', "longer than data.max_prompt_tokens"),
    "long message": (
        b'{"prompt": [{"role": "user", "content": "' + b"1" * (10 << 20) + b'"}]}',
        "longer than data.max_prompt_tokens",
    ),
    "empty lists": (EMPTY_LISTS, "too many values"),
    "keys": (MANY_KEYS, "too many values"),
}


@pytest.mark.parametrize(("content", "told"), LINES.values(), ids=LINES.keys())
def test_lines(tmp_path: Path, ask: Ask, content: bytes, told: str) -> None:
    path = tmp_path / "train.jsonl"
    path.write_bytes(content)
    assert_told(ask(path), told, path)


def assert_told(answer: str, told: str, path: Path) -> None:
    assert re.search(told, answer), answer[:2000]
    assert answer.startswith("read ") or str(path) in answer, answer[:2000]
    assert not answer.startswith("Internal") and len(answer) < 5000


def test_rows_beyond_the_limit_are_not_counted_to_their_end(tmp_path: Path, ask: Ask) -> None:
    (tmp_path / "train.jsonl").write_bytes(b"1\n" * 100_000)
    assert "more than 1,000, the limit" in ask(tmp_path / "train.jsonl", most_rows=1000)


def test_long_prompts_keep_their_end_where_they_are_truncated(tmp_path: Path, ask: Ask) -> None:
    (tmp_path / "train.jsonl").write_bytes(b'{"prompt": "' + b"1" * (8 << 20) + b'"}\n' * 1)
    path = tmp_path / "train.jsonl"
    assert ask(path, overlong_prompts="truncate", max_prompt_tokens=5) == "read 1 prompts"
    assert "more than data.max_prompt_tokens" in ask(path, overlong_prompts="error", max_prompt_tokens=5)


def test_prompts_that_are_large_together_are_not_held_in_memory(tmp_path: Path, ask: Ask) -> None:
    row = b'{"prompt": "1", "x": [' + b"[]," * 1_000_000 + b"[]]}\n"
    (tmp_path / "train.jsonl").write_bytes(row * 90)
    assert "data.streaming is off" in ask(tmp_path / "train.jsonl", streaming="off")


ZEROS_GZ = gzip.compress(bytes(8 << 20))
ZEROS_ZST = zstandard.compress(bytes(8 << 20))
PROMPT = b'{"prompt": "' + b"1" * (60 << 20) + b'"}\n'

PACKED: dict[str, tuple[str, Callable[[], bytes], str]] = {
    "bomb.jsonl.gz": (".jsonl.gz", lambda: ZEROS_GZ * 60, "more than 256 MiB then"),
    "bomb.jsonl.zst": (".jsonl.zst", lambda: ZEROS_ZST * 800, "more than 256 MiB then"),
    "bomb.json.zst": (".json.zst", lambda: zstandard.compress(b"[1,") + ZEROS_ZST * 800, "cannot be read"),
    "blank bomb": (".json.gz", lambda: gzip.compress(b" " * (8 << 20)) * 4, "no rows"),
    "long prompt": (".jsonl.zst", lambda: zstandard.compress(PROMPT), "longer than data.max_prompt_tokens"),
    "brackets": (".json.gz", lambda: gzip.compress(b"[" * (80 << 20)), "wrong, or has more than 67108864"),
    "cut gzip": (".jsonl.gz", lambda: gzip.compress(ROW * 1000)[:-20], "cannot be read"),
    "cut Zstandard": (".jsonl.zst", lambda: zstandard.compress(os.urandom(1000))[:500], "no rows|not JSON"),
    "no gzip": (".jsonl.gz", lambda: ROW, "Not a gzipped file"),
    "no Zstandard": (".jsonl.zst", lambda: ROW, "cannot be read"),
    "broken deflate": (".jsonl.gz", lambda: gzip.compress(ROW * 99)[:12] + b"\xff" * 99, "cannot be read"),
    "wide window": (".jsonl.zst", lambda: b"\x28\xb5\x2f\xfd\x00\xb0" + bytes(9), "cannot be read"),
    "packed twice": (".jsonl.gz", lambda: gzip.compress(gzip.compress(ROW)), "not JSON"),
    "empty gzip": (".jsonl.gz", lambda: gzip.compress(b""), "no rows"),
    "empty file": (".jsonl.gz", lambda: b"", "no rows"),
    "list without end": (".json", lambda: b'[{"prompt": "1"}', "'the end' stands where"),
    "list and more": (".json", lambda: b'[{"prompt": "1"}] {}', "text after the list"),
    "list without commas": (".json", lambda: b'[{"prompt": "1"} {"prompt": "1"}]', "stands where"),
    "list of numbers": (".json", lambda: b"[1, 2, 3]", "it is a int"),
    "list of long numbers": (".json", lambda: b"[" + b"9" * 9000 + b"]", "cannot be read"),
    "deep list": (".json", lambda: b"[" * 100_000, "cannot be read"),
    "list of bytes": (".json", lambda: b'["\xff"]', "cannot be read"),
    "indented list": (".json", lambda: json.dumps([json.loads(ROW)] * 9, indent=4).encode(), "read 9 prompts"),
    "empty list": (".json", lambda: b" [ ] ", "no rows"),
    "long list": (".json", lambda: b"[" + ROW * 1 + (b"," + ROW) * 40_000 + b"]", "read 40001 prompts"),
}  # fmt: skip


@pytest.mark.parametrize(("ending", "content", "told"), PACKED.values(), ids=PACKED.keys())
def test_packed_files_and_lists(
    tmp_path: Path, ask: Ask, ending: str, content: Callable[[], bytes], told: str
) -> None:
    path = tmp_path / f"train{ending}"
    path.write_bytes(content())
    assert_told(ask(path), told, path)


def repeated(text: str, count: int) -> pa.Array:
    """Return a column in which a few bytes of file stand for many rows."""
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(count, np.int8)), pa.array([text]))


def unsound_text(text: bytes) -> pa.Array:
    offsets = np.array([0, len(text)], np.int32)
    return pa.Array.from_buffers(pa.string(), 1, [None, pa.py_buffer(offsets), pa.py_buffer(text)])


def nested(levels: int) -> pa.Table:
    value: Any = "1"
    for _ in range(levels):
        value = {"a": value}
    return pa.Table.from_pylist([{"prompt": "1", "x": value}])


ONE = pa.array(["1"])
TABLES: dict[str, tuple[Callable[[], pa.Table], str]] = {
    "million rows": (lambda: pa.table({"prompt": repeated("1" * 600, 1_000_000)}), "256 MiB then"),
    "large rows": (lambda: pa.table({"prompt": repeated("1" * (10 << 20), 4096)}), "within bounds.*memory"),
    "row too large": (lambda: pa.table({"prompt": repeated("1" * (65 << 20), 1)}), "row is too large.*row 1"),
    "list too long": (
        lambda: pa.table({"prompt": ONE, "x": pa.ListArray.from_arrays([0, 1 << 23], np.zeros(1 << 23, np.int8))}),
        "row is too large",
    ),
    "list of nothing": (
        lambda: pa.table({"prompt": ONE, "x": pa.ListArray.from_arrays([0, 1 << 23], pa.nulls(1 << 23))}),
        "row is too large|cannot be read|within bounds",
    ),
    "no rows": (lambda: pa.table({"prompt": pa.array([], pa.string())}), "no rows"),
    "no columns": (lambda: pa.table({}), "no rows"),
    "many columns": (lambda: pa.table({f"c{i}": [1] for i in range(5000)}), "too many columns"),
    "deep": (lambda: nested(60), "nested too deeply|cannot be read"),
    "deeper than rewards": (lambda: nested(30), "more than 20 levels"),
    "columns of one name": (lambda: pa.Table.from_arrays([ONE, ONE], names=["a", "a"]), "one name.*'a'"),
    "bytes": (lambda: pa.table({"prompt": ONE, "x": [b"1"]}), "it is a bytes|is a bytes"),
    "prompt of bytes": (lambda: pa.table({"prompt": [b"1"]}), "neither text nor"),
    "no Unicode": (lambda: pa.table({"prompt": unsound_text(b"\xff\xfe")}), "cannot be read"),
    "late time": (
        lambda: pa.table({"prompt": ONE, "x": pa.array([2**60], pa.timestamp("s"))}),
        "cannot be read|read 1",
    ),
    "NaN": (lambda: pa.table({"prompt": ONE, "x": [float("nan")]}), "not a finite number"),
    "pairs": (lambda: pa.table({"prompt": ONE, "x": pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int8()))}), ".*"),
    "nulls": (lambda: pa.table({"prompt": pa.nulls(3)}), "column 'prompt' is missing"),
}  # fmt: skip


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
@pytest.mark.parametrize(("table", "told"), TABLES.values(), ids=TABLES.keys())
def test_columns(tmp_path: Path, ask: Ask, table: Callable[[], pa.Table], told: str, ending: str) -> None:
    path = tmp_path / f"train.{ending}"
    made = table()
    try:
        if ending == "parquet":
            pq.write_table(made, path, compression="zstd")
        else:
            with pa.ipc.new_file(
                str(path), made.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")
            ) as writer:
                writer.write_table(made, 1 << 20)
    except pa.ArrowException as error:
        pytest.skip(f"pyarrow does not write it: {error}")
    assert_told(ask(path), told, path)


def test_more_rows_than_the_limit_are_not_decoded(tmp_path: Path, ask: Ask) -> None:
    pq.write_table(pa.table({"prompt": repeated("1", 20_000_001)}), tmp_path / "train.parquet")
    assert "more than 20,000,000, the limit" in ask(tmp_path / "train.parquet")


def whole(ending: str, folder: Path) -> bytes:
    table = pa.table({"prompt": ["1+1="] * 500, "x": [[1, 2]] * 500, "y": [{"a": "b"}] * 500})
    if ending == "parquet":
        pq.write_table(table, folder / "whole")
    else:
        with pa.ipc.new_stream(str(folder / "whole"), table.schema) as writer:
            writer.write_table(table, 100)
    return (folder / "whole").read_bytes()


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
@pytest.mark.parametrize("seed", range(6))
def test_damaged_columns(tmp_path: Path, ask: Ask, ending: str, seed: int) -> None:
    content, draw = bytearray(whole(ending, tmp_path)), random.Random(seed)
    if seed < 2:
        del content[len(content) // (2 + seed) :]
    for _ in range(20):
        content[draw.randrange(len(content))] = draw.randrange(256)
    path = tmp_path / f"train.{ending}"
    path.write_bytes(content)
    assert_told(ask(path), ".*", path)


FOOTERS = {
    "nothing": b"",
    "text": b"prompt,answer\n1,2\n",
    "magic alone": b"PAR1",
    "encrypted": b"PARE" + bytes(100) + (50).to_bytes(4, "little") + b"PARE",
    "long footer": b"PAR1" + bytes(100) + (2**31 - 1).to_bytes(4, "little") + b"PAR1",
    "negative footer": b"PAR1" + bytes(100) + (2**32 - 1).to_bytes(4, "little") + b"PAR1",
    "lists in the footer": b"PAR1" + b"\x19\xfc\xff\xff\xff\xff\x0f" * 99 + (693).to_bytes(4, "little") + b"PAR1",
}  # fmt: skip


@pytest.mark.parametrize("content", FOOTERS.values(), ids=FOOTERS.keys())
@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_no_columns_at_all(tmp_path: Path, ask: Ask, ending: str, content: bytes) -> None:
    path = tmp_path / f"train.{ending}"
    path.write_bytes(content)
    assert_told(ask(path), "cannot be read|no rows|cannot be decoded within bounds", path)


def sparse(path: Path, size: int) -> None:
    with path.open("wb") as file:
        file.truncate(size)


def listening(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        place = os.getcwd()
        os.chdir(path.parent)  # The path of a socket is short.
        try:
            one.bind(path.name)
        finally:
            os.chdir(place)


def in_circles(path: Path) -> None:
    path.symlink_to(path.name)


PLACES: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "pipe": ("train.jsonl", os.mkfifo, "it is a named pipe"),
    "pipe of columns": ("train.parquet", os.mkfifo, "it is a named pipe"),
    "socket": ("train.jsonl", listening, "it is a socket"),
    "device": ("train.jsonl", lambda path: path.symlink_to("/dev/zero"), "it is a device"),
    "device of columns": ("train.parquet", lambda path: path.symlink_to("/dev/zero"), "it is a device"),
    "link to itself": ("train.jsonl", in_circles, "cannot be read|does not exist"),
    "link to nothing": ("train.jsonl", lambda path: path.symlink_to("nothing"), "does not exist"),
    "long line never written": ("train.jsonl", lambda path: sparse(path, 1 << 30), "consists of holes"),
    "columns never written": ("train.parquet", lambda path: sparse(path, 1 << 40), "consists of holes"),
    "empty folder": ("train", Path.mkdir, "no data files"),
}


@pytest.mark.parametrize(("name", "make", "told"), PLACES.values(), ids=PLACES.keys())
def test_what_is_no_file(
    tmp_path: Path, ask: Ask, name: str, make: Callable[[Path], None], told: str
) -> None:
    make(tmp_path / name)
    assert_told(ask(tmp_path / name), told, tmp_path)


@pytest.mark.parametrize("source", [".", "**/*.jsonl"])
def test_folders_that_contain_themselves(tmp_path: Path, ask: Ask, source: str) -> None:
    (tmp_path / "part.jsonl").write_bytes(ROW)
    for name in ("a", "b", "c"):
        (tmp_path / name).symlink_to(tmp_path)
    assert ask(tmp_path / source) == "read 1 prompts"


STATES: dict[str, tuple[bytes, str]] = {
    "path upwards": (b'{"_data_files": [{"filename": "../../secret.arrow"}]}', "names no file of its folder"),
    "whole path": (b'{"_data_files": [{"filename": "/etc/passwd"}]}', "names no file of its folder"),
    "parent": (b'{"_data_files": [{"filename": ".."}]}', "names no file of its folder"),
    "NUL": (b'{"_data_files": [{"filename": "a\\u0000b"}]}', "names no file of its folder"),
    "number": (b'{"_data_files": [{"filename": 7}]}', "names no file of its folder"),
    "names alone": (b'{"_data_files": ["data.arrow"]}', "names no file of its folder"),
    "no list": (b'{"_data_files": {"filename": "data.arrow"}}', "names no file of its folder"),
    "nothing": (b"{}", "names no file of its folder"),
    "no files": (b'{"_data_files": []}', "no rows"),
    "missing": (b'{"_data_files": [{"filename": "data-7.arrow"}]}', "cannot be read.*No such file"),
    "pipe": (b'{"_data_files": [{"filename": "pipe.arrow"}]}', "it is a named pipe"),
    "list": (b"[]", "it is a list"),
    "no JSON": (b"{", "not JSON"),
    "deep": (b'{"_data_files":' + b"[" * 100_000, "nested too deeply"),
    "right": (b'{"_data_files": [{"filename": "data.arrow"}]}', "read 1 prompts"),
}


@pytest.mark.parametrize(("state", "told"), STATES.values(), ids=STATES.keys())
def test_saved_folders(tmp_path: Path, ask: Ask, state: bytes, told: str) -> None:
    folder = tmp_path / "saved" / "train"
    folder.mkdir(parents=True)
    table = pa.table({"prompt": ["1"]})
    for path in (tmp_path / "secret.arrow", folder / "data.arrow"):
        with pa.ipc.new_stream(str(path), table.schema) as writer:
            writer.write_table(table)
    os.mkfifo(folder / "pipe.arrow")
    (folder / "state.json").write_bytes(state)
    assert_told(ask(folder), told, folder)

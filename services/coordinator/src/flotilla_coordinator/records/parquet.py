"""Writes metrics, evaluations and samples as Parquet files, one for each kind.

Invariants: a metric that a step lacks is null, never 0. A file appears whole or not at all, in place of an older one,
even when several callers export the same run at the same time.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from flotilla_coordinator.records.directory import RunDirectory

ROWS_AT_ONCE = 8192


def export_parquet(run_dir: Path) -> list[Path]:
    """Write `parquet/*.parquet`; a kind without rows has no file."""
    run = RunDirectory(run_dir)
    target = run_dir / "parquet"
    target.mkdir(exist_ok=True)
    metrics = [{"step": step, **values} for step, values in run.read_metrics()]
    columns = sorted({name for row in metrics for name in row} - {"step"})
    schema = pa.schema([("step", pa.int64()), *((name, pa.float64()) for name in columns)])
    with tempfile.TemporaryDirectory(dir=target, prefix=".writing-") as folder:
        written = [
            _write(Path(folder) / "metrics.parquet", metrics, schema),
            _write(Path(folder) / "evaluations.parquet", run.read_evaluations(), None),
            _write(Path(folder) / "samples.parquet", map(flat, run.read_samples()), SAMPLES),
        ]
        return [path.replace(target / path.name) for path in written if path is not None]


VERDICT = pa.struct(
    [
        ("reward", pa.string()),
        ("outcome", pa.string()),
        ("value", pa.float64()),
        ("parts", pa.list_(pa.struct([("name", pa.string()), ("value", pa.float64())]))),
        ("extracted", pa.string()),
        ("version", pa.string()),
        ("seconds", pa.float64()),
        ("message", pa.string()),
        ("file", pa.string()),
        ("line", pa.int32()),
    ]
)
SAMPLES = pa.schema(
    [
        ("step", pa.int64()),
        ("sample_id", pa.string()),
        ("group_id", pa.string()),
        ("prompt", pa.string()),
        ("response", pa.string()),
        ("answer", pa.string()),
        ("info", pa.string()),
        ("reward", pa.float64()),
        ("reward_parts", pa.list_(pa.struct([("reward", pa.string()), ("value", pa.float64())]))),
        ("verdicts", pa.list_(VERDICT)),
        ("prompt_tokens", pa.int32()),
        ("response_tokens", pa.int32()),
        ("truncated", pa.bool_()),
        ("generator", pa.string()),
        ("attempt", pa.int32()),
        (
            "policy_versions",
            pa.list_(pa.struct([("version", pa.string()), ("start", pa.int32()), ("end", pa.int32())])),
        ),
        ("logprob_mean", pa.float64()),
    ]
)


def write_table(path: Path, samples: Iterable[dict[str, Any]]) -> None:
    """Write samples as a Parquet file, with the columns that any of them has."""
    rows = [flat(sample) for sample in samples]
    names = dict.fromkeys(name for row in rows for name in row)
    known = {name: SAMPLES.field(name).type for name in ("info", "answer", "reward_parts", "verdicts")}
    known["episode"] = pa.string()
    columns = {name: pa.array([row.get(name) for row in rows], known.get(name)) for name in names}
    table = pa.Table.from_pydict(columns)
    partial = path.with_name(f".{path.name}.partial")
    pq.write_table(table, partial, compression="zstd")
    partial.replace(path)


def flat(sample: dict[str, Any]) -> dict[str, Any]:
    """Return a recorded sample for SAMPLES: what has other names from row to row is a list, or one JSON text."""
    info, verdicts, episode = sample.get("info"), sample.get("verdicts"), sample.get("episode")
    if verdicts is not None:
        verdicts = [
            one | {"parts": [{"name": name, "value": value} for name, value in one.get("parts", {}).items()]}
            for one in verdicts
        ]
    return {
        **sample,
        "info": None if info is None else json.dumps(info, ensure_ascii=False),
        "verdicts": verdicts,
        **({} if episode is None else {"episode": json.dumps(episode, ensure_ascii=False)}),
    }


def _write(path: Path, rows: Iterable[dict[str, Any]], schema: pa.Schema | None) -> Path | None:
    writer = None
    for chunk in _chunks(iter(rows)):
        table = pa.Table.from_pylist(chunk, schema=schema)
        if writer is None:
            writer = pq.ParquetWriter(path, table.schema, compression="zstd")
        writer.write_table(table)
    if writer is None:
        return None
    writer.close()
    return path


def _chunks(rows: Iterator[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    while chunk := list(islice(rows, ROWS_AT_ONCE)):
        yield chunk

"""What large data cost at the start of a run: seconds from StartRun to the first issued prompt, and memory.

Parquet files in verl's layout, of the size of GSM8K's rows, on a stack with the simulated engine that runs already.
Each file meets a fresh stack, so that the peak of the coordinator's memory (VmHWM, pyarrow and the copy of the file
included) is its own. Of each file the run starts twice: the second start finds the copy of the first.
"""

from __future__ import annotations

import os
import random
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from table import Row

from flotilla_testing.stack import Stack, example_model, light_stack, wait_until

ROWS = tuple(int(rows) for rows in os.environ.get("FLOTILLA_BENCH_ROWS", "100000,1000000").split(","))
BAR_ROWS = 100_000
BAR_S = 5.0
BAR_MIB = 400.0
STEPS = 10
LIMIT_S = 300.0
RESPONSE_TOKENS = 32
WORDS = [
    f"{first}{last}"
    for first in ("ba", "ke", "lo", "mi", "nu", "ra", "si")
    for last in ("n", "st", "rel", "do")
]
INSTRUCTION = "Let's think step by step and output the final answer after four hash signs."


@dataclass(frozen=True)
class Figures:
    """Two starts with one file."""

    file_mib: float
    first_s: float
    second_s: float
    peak_mib: float


def measure() -> list[Row]:
    """Seconds to the first prompt, and peak memory, for each size."""
    rows: list[Row] = []
    for count in ROWS:
        figures = _figures(count)
        barred = count <= BAR_ROWS
        what = f"data, {count:,} rows of verl's layout ({figures.file_mib:.0f} MiB)"
        rows += [
            Row(
                f"{what}: StartRun to the first prompt",
                f"{figures.first_s:.2f} s",
                f"<= {BAR_S:g} s" if barred else "",
                figures.first_s <= BAR_S if barred else None,
            ),
            Row("  the same, started again", f"{figures.second_s:.2f} s"),
            Row(
                "  peak memory of the coordinator",
                f"{figures.peak_mib:.0f} MiB",
                f"< {BAR_MIB:g} MiB",
                figures.peak_mib < BAR_MIB,
            ),
        ]
    return rows


def _figures(count: int) -> Figures:
    with tempfile.TemporaryDirectory(prefix="flotilla-bench-") as folder:
        directory = Path(folder)
        data = directory / "train.parquet"
        write_verl(data, count)
        model = example_model(directory, positions=2048)
        with light_stack(model, directory, sim={"response_tokens": RESPONSE_TOKENS}) as stack:
            file = _run_file(directory, data)
            first_s, second_s = _seconds_to_first_prompt(stack, file), _seconds_to_first_prompt(stack, file)
            return Figures(data.stat().st_size / 2**20, first_s, second_s, _peak_mib(stack))


def write_verl(path: Path, count: int) -> None:
    """Write a Parquet file in verl's layout, some rows at a time."""
    draw = random.Random(count)
    writer: pq.ParquetWriter | None = None
    for start in range(0, count, 20_000):
        table = pa.Table.from_pylist(list(_rows(draw, start, min(start + 20_000, count))))
        writer = writer or pq.ParquetWriter(path, table.schema)
        writer.write_table(table)
    assert writer is not None
    writer.close()


def _rows(draw: random.Random, start: int, end: int) -> Iterator[dict[str, Any]]:
    for index in range(start, end):
        question = " ".join(draw.choices(WORDS, k=45)) + f" {index}?"
        reasoning = " ".join(draw.choices(WORDS, k=55))
        result = str(draw.randrange(10_000))
        yield {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"{question} {INSTRUCTION}"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": result},
            "extra_info": {
                "split": "train",
                "index": index,
                "answer": f"{reasoning} #### {result}",
                "question": question,
            },
        }


def _run_file(directory: Path, data: Path) -> Path:
    run = {
        "name": "data",
        "steps": STEPS,
        "data": {"train": str(data)},
        "rollout": {
            "prompts_per_step": 64,
            "samples_per_prompt": 4,
            "sampling": {"max_response_tokens": RESPONSE_TOKENS},
        },
        "rewards": [{"reward": "exact"}],
        "weights": {"canary": {"prompts": 0}},
        "export_final": False,
    }
    path = directory / "run.yaml"
    path.write_text(yaml.safe_dump(run))
    return path


def _seconds_to_first_prompt(stack: Stack, file: Path) -> float:
    """Start the run, let it end, and return the seconds until the ledger has the first sample as issued."""
    with stack.client() as client:
        began = time.time()
        run_id = client.start_run(file).run_id
        wait_until("the run's end", lambda: client.get_run(run_id).HasField("ended_at"), LIMIT_S)
    with sqlite3.connect(f"file:{stack.directory / 'ledger.sqlite'}?mode=ro", uri=True) as ledger:
        query = "SELECT min(time) FROM transitions JOIN runs ON run = key WHERE run_id = ?"
        (issued,) = ledger.execute(query, (run_id,)).fetchone()
    return float(issued) - began


def _peak_mib(stack: Stack) -> float:
    """Return VmHWM of the coordinator."""
    status = Path(f"/proc/{stack.process('coordinator').pid}/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024

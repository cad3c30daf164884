"""Reads the files of samples that every run writes: one for each step, and one for each evaluation."""

from __future__ import annotations

import io
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import zstandard

from flotilla_core.json_text import json_lines

ROLLOUTS = "rollouts"
"""The folder of a run's directory where `rollout.record` keeps samples whole."""


def read_samples(run_dir: Path, kind: str, steps: Collection[int] | None = None) -> Iterator[dict[str, Any]]:
    """Yield the samples of all files of a kind, or of those of `steps`; of a repeated step those of the last time."""
    newest: dict[str, tuple[int, Path]] = {}
    for path in (run_dir / "samples").glob(f"{kind}-*.jsonl.zst"):
        step, _, number = path.name.partition(".")[0].removeprefix(f"{kind}-").partition("-")
        if steps is None or int(step) in steps:
            newest[step] = max(newest.get(step, (0, path)), (int(number or 1), path))
    for _, (_, path) in sorted(newest.items()):
        with path.open("rb") as file, zstandard.ZstdDecompressor().stream_reader(file) as reader:
            for _, line in json_lines(io.BufferedReader(reader)):
                yield line

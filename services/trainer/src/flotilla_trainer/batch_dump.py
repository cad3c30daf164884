"""A batch that produced non-finite numbers, on disk for whoever looks into it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from flotilla_trainer.batch.update_batch import UpdateBatch


def dump_batch(
    directory: Path, update_id: str, batch: UpdateBatch, why: str, metrics: dict[str, float]
) -> Path:
    """Write `<update>.npz` with the arrays and `<update>.json` with ids and metrics; returns the former."""
    directory.mkdir(parents=True, exist_ok=True)
    stem = directory / re.sub(r"[^A-Za-z0-9.-]+", "_", update_id)
    arrays: dict[str, Any] = {
        name: value for name, value in vars(batch).items() if isinstance(value, np.ndarray)
    }
    path = Path(f"{stem}.npz")
    np.savez(path, **arrays)
    summary = {"update_id": update_id, "why": why, "metrics": metrics, "sample_ids": batch.sample_ids}
    Path(f"{stem}.json").write_text(json.dumps(summary, indent=1), "utf-8")
    return path

"""Finds in the record of a run what the ledger has forgotten of its samples: conversations of episodes, and tokens.

Invariant: what the ledger still has stays as it is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flotilla_core.config import RunConfig
from flotilla_data.formats import pyarrow_for
from flotilla_data.samples import ROLLOUTS

COLUMNS = ["sample_id", "ending", "turns", "turn_rewards", "branches", "messages"]


def lacks_conversation(sample: Mapping[str, Any], config: RunConfig | None) -> bool:
    """Return whether a sample was an episode, and nothing is left of what was said in it."""
    plays = config is not None and config.environment is not None
    return plays and "state" in sample and sample["episode"] is None and sample["tokens"] > 0


def how_kept(config: RunConfig | None, directory: Path) -> str:
    """Say where conversations are that the ledger has forgotten, or how a run keeps them."""
    if config is not None and config.rollout.record:
        return f"the record of the run has its trained samples alone, and lies in {directory / ROLLOUTS}"
    return (
        "checkpoints end what the ledger keeps of episodes: a run keeps them with rollout.record: true, or "
        "with checkpoint.every_steps: 0"
    )


def recall(samples: Sequence[dict[str, Any]], config: RunConfig | None, directory: Path) -> None:
    """Give samples what the ledger has forgotten of them, where the run recorded it and its directory is here."""
    missing = {
        sample["sample_id"]: sample
        for sample in samples
        if lacks_conversation(sample, config) or sample.get("token_ids", ()) is None
    }
    for step in sorted({sample["step"] for sample in missing.values()}):
        path = directory / ROLLOUTS / f"step-{step:06d}.parquet"
        if path.is_file():
            for row in _rows(path, [*missing]):
                _fill(missing[row["sample_id"]], row)


def _rows(path: Path, wanted: list[str]) -> list[dict[str, Any]]:
    pyarrow_for(path)
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    chosen = pc.field("sample_id").isin(wanted)
    table = pq.read_table(path, columns=[*COLUMNS, "token_ids"], filters=chosen)
    return list(table.to_pylist())


def _fill(sample: dict[str, Any], row: Mapping[str, Any]) -> None:
    if sample.get("token_ids", ()) is None:
        sample["token_ids"] = row["token_ids"]
    if sample["episode"] is None and row["ending"]:
        sample["episode"] = {
            "ending": row["ending"],
            "turns": row["turns"],
            "turn_rewards": row["turn_rewards"] or [],
            "branches": len(row["branches"] or [0]),
            "messages": json.loads(row["messages"] or "[]"),
        }

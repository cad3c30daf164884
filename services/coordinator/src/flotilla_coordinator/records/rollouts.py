"""Writes the samples of each trained batch as Parquet, with all that training needs of them.

Invariants: one row a sample, the samples of a group one after the other, in the order of their training. There is one
file for each step that counts, whole or not there: a repeated step replaces its file, and those of undone steps go.
docs/offline.md describes every column, and SCHEMA is what this release writes. pyarrow is imported with the first file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flotilla_coordinator.ledger.verdicts import named_parts
from flotilla_coordinator.rollouts.batch import Batch, RolloutGroup, RolloutSample
from flotilla_coordinator.rollouts.episodes import ENVIRONMENT
from flotilla_coordinator.rollouts.scoring import Outcome
from flotilla_core.disk import names_full_disk
from flotilla_core.errors import AlreadyExists
from flotilla_core.version import Version

if TYPE_CHECKING:
    import pyarrow as pa

DRAWN_BY = b"flotilla_drawn_by"
ROWS_AT_ONCE = 2048


@dataclass(frozen=True)
class RolloutRecord:
    """The recorded rollouts of one run."""

    folder: Path
    run_id: str
    temperature: float
    """The temperature of all samples."""
    tokenizer: str
    """The digest of the tokenizer whose tokens they are."""
    drawn_by: str = ""
    """What samples depend on that are drawn without a run; each file names it."""

    def require_own(self) -> None:
        """Raise where a file of the folder has samples that were drawn by something else."""
        import pyarrow.parquet as pq

        for path in sorted(self.folder.glob("step-*.parquet")):
            drawn_by = (pq.read_schema(path).metadata or {}).get(DRAWN_BY, b"").decode()
            if drawn_by != self.drawn_by:
                raise AlreadyExists(
                    "the folder has samples of another model, or that were drawn otherwise",
                    where=str(path),
                    why=f"they were drawn by {drawn_by or 'a run'}, and now it is {self.drawn_by}",
                    next_step="name another folder by -o",
                )

    def path_of(self, step: int) -> Path:
        """Return the file of a step."""
        return self.folder / f"step-{step:06d}.parquet"

    def write(self, batch: Batch, version: Version) -> Path | None:
        """Write the samples of a batch that trains `version`; None where it has none."""
        path = self.path_of(batch.step)
        rows = [row for group in batch.groups for row in self._rows(batch.step, group, version)]
        if not rows:
            path.unlink(missing_ok=True)
            return None
        import pyarrow as pa
        import pyarrow.parquet as pq

        own = schema()
        if self.drawn_by:
            own = own.with_metadata({**own.metadata, DRAWN_BY: self.drawn_by})
        with _whole(path) as partial:
            pq.write_table(pa.Table.from_pylist(rows, own), partial, compression="zstd")
        return path

    def fall_back(self, steps_done: int) -> None:
        """Remove the files of steps that are undone."""
        for path in self.folder.glob("step-*.parquet"):
            step = path.stem.removeprefix("step-")
            if step.isdecimal() and int(step) >= steps_done:
                path.unlink()

    def _rows(self, step: int, group: RolloutGroup, version: Version) -> Iterator[dict[str, Any]]:
        of_group = {
            "run_id": self.run_id,
            "step": step,
            "group_id": group.group_id,
            "data_set": group.data_set,
            "prompt": group.prompt_text,
            "prompt_token_ids": group.prompt_token_ids,
            "answer": group.answer,
            **{
                name: json.dumps(getattr(group, name), ensure_ascii=False)
                for name in ("info", "chat", "answer_column")
            },
            "trained_version": str(version),
            "temperature": self.temperature,
            "tokenizer": self.tokenizer,
        }
        for sample in group.samples:
            yield of_group | _columns(sample)


def rewarded(row: Mapping[str, Any], outcome: Outcome) -> dict[str, Any] | None:
    """Return a recorded row with the reward of other terms; None where they give none.

    What the environment of an episode gave is added as it was. A greedy response has no reward of these terms.
    """
    if outcome.total is None:
        return None
    own = [part for part in row.get("reward_parts") or () if _is_of_environment(part["reward"])]
    given = sum(part["value"] for part in own if part["reward"] == ENVIRONMENT)
    parts = [{"reward": name, "value": value} for name, value in named_parts(outcome.verdicts)]
    return {
        **row,
        "reward": outcome.total + given,
        "reward_parts": [*own, *parts],
        "reward_terms": outcome.terms,
        "greedy_reward": None,
    }


def _is_of_environment(name: str) -> bool:
    return name == ENVIRONMENT or name.startswith(f"{ENVIRONMENT}[")


def write_rescored(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows of a record, a part of them at a time."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with _whole(path) as partial, pq.ParquetWriter(partial, schema(), compression="zstd") as writer:
        remaining = iter(rows)
        while part := list(islice(remaining, ROWS_AT_ONCE)):
            writer.write_table(pa.Table.from_pylist(part, schema()))


@contextmanager
def _whole(path: Path) -> Iterator[Path]:
    """Give a file to write, which gets its name when all of it is on disk."""
    partial = path.with_name(f".{path.name}.partial")
    with names_full_disk("the rollouts cannot be written", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield partial
            with partial.open("rb") as file:
                os.fsync(file.fileno())
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)


def _columns(sample: RolloutSample) -> dict[str, Any]:
    return {
        "sample_id": sample.sample_id,
        "response": sample.text,
        "token_ids": sample.token_ids,
        "logprobs": sample.logprobs,
        "trained": sample.trained,
        "versions": [
            {"version": str(span.version), "start": span.start, "end": span.end} for span in sample.spans
        ],
        "reward": sample.reward,
        "reward_parts": [{"reward": name, "value": value} for name, value in named_parts(sample.verdicts)],
        "reward_terms": sample.reward_terms,
        "greedy_reward": sample.greedy_reward,
        "truncated": sample.truncated,
        "generator": sample.generator,
        "attempt": sample.attempt,
        **_of_episode(sample),
    }


def _of_episode(sample: RolloutSample) -> dict[str, Any]:
    episode = sample.episode
    if episode is None:
        return {}
    return {
        "ending": episode.ending,
        "turns": episode.turns,
        "turn_rewards": episode.turn_rewards,
        "turn_ends": episode.turn_ends,
        "turn_states": episode.turn_states,
        "messages": episode.messages,
        "branches": [
            {"start": one.start, "prompt_token_ids": one.prompt_token_ids} for one in episode.branches
        ],
    }


def schema() -> pa.Schema:
    """Return the columns of a file; those of an episode are null for a single response."""
    import pyarrow as pa

    tokens = pa.list_(pa.int32())
    return pa.schema(
        [
            ("run_id", pa.string()),
            ("step", pa.int64()),
            ("group_id", pa.string()),
            ("sample_id", pa.string()),
            ("data_set", pa.string()),
            ("prompt", pa.string()),
            ("prompt_token_ids", tokens),
            ("response", pa.string()),
            ("token_ids", tokens),
            ("logprobs", pa.list_(pa.float32())),
            ("trained", pa.list_(pa.bool_())),
            (
                "versions",
                pa.list_(pa.struct([("version", pa.string()), ("start", pa.int32()), ("end", pa.int32())])),
            ),
            ("trained_version", pa.string()),
            ("reward", pa.float64()),
            ("reward_parts", pa.list_(pa.struct([("reward", pa.string()), ("value", pa.float64())]))),
            ("reward_terms", pa.list_(pa.float64())),
            ("greedy_reward", pa.float64()),
            ("truncated", pa.bool_()),
            ("answer", pa.string()),
            ("info", pa.string()),
            ("chat", pa.string()),
            ("answer_column", pa.string()),
            ("ending", pa.string()),
            ("turns", pa.int32()),
            ("turn_rewards", pa.list_(pa.float64())),
            ("turn_ends", tokens),
            ("turn_states", pa.list_(pa.int64())),
            ("messages", pa.string()),
            ("branches", pa.list_(pa.struct([("start", pa.int32()), ("prompt_token_ids", tokens)]))),
            ("generator", pa.string()),
            ("attempt", pa.int32()),
            ("temperature", pa.float64()),
            ("tokenizer", pa.string()),
        ],
        {"flotilla_rollouts": "1"},
    )

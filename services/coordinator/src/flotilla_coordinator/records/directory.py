"""Writes and reads the files of one run, for people and for scripts.

Invariants: files of an earlier attempt are never overwritten; a second file of a name gets a number. JSON Lines files
grow by whole lines, flushed one by one, and half a line is removed before the next one is written. Lines that do not
fit on a full disk wait for the next one. Everything can be read by ordinary tools (jq, zstdcat) while the run is
active.
"""

from __future__ import annotations

import errno
import json
import math
import os
import threading
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import UTC
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import zstandard
from google.protobuf import json_format

from flotilla.coordinator.v1 import run_pb2
from flotilla_coordinator.ledger.verdicts import named_parts
from flotilla_core.disk import names_full_disk, why_full
from flotilla_core.errors import AlreadyExists
from flotilla_core.files import write_atomically
from flotilla_core.json_text import json_lines
from flotilla_core.log_files import copy_last
from flotilla_data.samples import read_samples

if TYPE_CHECKING:
    import numpy as np

    from flotilla_coordinator.rollouts.batch import Batch, RolloutGroup, RolloutSample

OUTCOME = "outcome.json"
MOST_LOG_BYTES = 4 << 20
"""The most that a run keeps of the log of one process."""
_BLOCK = 64 << 10
MOST_WAITING = 10_000
"""The most lines of one file that wait while its disk is full; the oldest are dropped first."""


class RunDirectory:
    """The directory `<state_dir>/<stack>/runs/<run_id>/`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._waiting: dict[str, deque[bytes]] = {}
        """Lines that were not written because the disk was full, by file."""
        self._writing = threading.Lock()

    @classmethod
    def create(cls, path: Path) -> RunDirectory:
        """Make a new directory; one that exists belongs to another run."""
        with names_full_disk("the run directory cannot be made", path):
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                path.mkdir()
            except FileExistsError:
                raise AlreadyExists("the run directory exists already", where=str(path)) from None
        return cls(path.absolute())

    @property
    def model_path(self) -> Path:
        """The folder of the exported policy."""
        return self.path / "model"

    @property
    def checkpoints_path(self) -> Path:
        """The folder of checkpoints, from which this run or a later one can continue."""
        return self.path / "checkpoints"

    def reopen(self, versions: Mapping[str, Any]) -> None:
        """Continue the run: set its last outcome aside, and note the versions of the services that take part now."""
        with names_full_disk("the run directory cannot be written", self.path):
            outcome = self.path / OUTCOME
            if outcome.exists():
                outcome.rename(_free(outcome))
            if versions:
                write_atomically(_free(self.path / "versions.json"), _pretty(versions))

    def write_configuration(self, config_yaml: str, versions: Mapping[str, Any]) -> None:
        """Write the resolved configuration, and the versions and digests of the services that take part."""
        with names_full_disk("the run directory cannot be written", self.path):
            write_atomically(_free(self.path / "run.yaml"), config_yaml)
            write_atomically(_free(self.path / "versions.json"), _pretty(versions))

    def write_change(self, step: int, config_yaml: str, changes: Mapping[str, tuple[Any, Any]]) -> None:
        """Write a change of settings from a step on: one line with the changes, and the configuration as it is now."""
        with names_full_disk("the run directory cannot be written", self.path):
            write_atomically(_free(self.path / "run.yaml"), config_yaml)
        values = {key: {"from": before, "to": after} for key, (before, after) in changes.items()}
        self._append("changes.jsonl", {"step": step, "time": round(time.time(), 3), "changes": values})

    def write_metrics(self, step: int, metrics: Mapping[str, float], *, lineage: int = 0) -> None:
        """Write one line for a step; a value that is not finite is null, because JSON cannot express it."""
        values = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._append(
            "metrics.jsonl", {"step": step, "lineage": lineage, "time": round(time.time(), 3), **values}
        )

    def write_event(self, event: run_pb2.RunEvent) -> None:
        """Write one line for an event."""
        self._append("events.jsonl", json_format.MessageToDict(event, preserving_proto_field_name=True))

    def write_evaluation(
        self, step: int, version: str, accuracy: float, metrics: Mapping[str, float] | None = None
    ) -> None:
        """Write one line for an evaluation after `step` steps."""
        line = {"step": step, "time": round(time.time(), 3), "policy_version": version, "accuracy": accuracy}
        self._append("evaluations.jsonl", line | dict(metrics or {}))

    def write_samples(self, batch: Batch, rewards: Sequence[str] = ()) -> Path:
        """Write the samples of one step, compressed; the file is complete or does not exist.

        `rewards` are the names of the run's rewards, in their order.
        """
        path = _free(self.path / "samples" / f"step-{batch.step:06d}.jsonl.zst")
        lines = (
            _line(_sample(batch.step, group, sample, rewards))
            for group in batch.groups
            for sample in group.samples
        )
        return _written_whole(path, lines)

    def write_answers(self, step: int, answers: Iterable[Mapping[str, Any]]) -> Path:
        """Write the answers of the evaluation after `step` steps, in the same way."""
        return _written_whole(
            _free(self.path / "samples" / f"eval-{step:06d}.jsonl.zst"), map(_line, answers)
        )

    def finish(self, run: run_pb2.Run) -> None:
        """Write the outcome of a run that has ended; a second call adds only what is missing."""
        outcome = json_format.MessageToDict(run, preserving_proto_field_name=True)
        with names_full_disk("the outcome cannot be written", self.path):
            for name in list(self._waiting):
                self._append_waiting(name)
            if not (self.path / OUTCOME).exists():
                write_atomically(self.path / OUTCOME, _pretty(outcome))

    def keep_logs(self, run: run_pb2.Run) -> None:
        """Copy what the logs of the stack say since the run was created, of each the last MOST_LOG_BYTES."""
        since = run.created_at.ToDatetime(UTC) if run.HasField("created_at") else None
        with names_full_disk("the logs cannot be copied", self.path):
            (self.path / "logs").mkdir(exist_ok=True)
            for log in sorted((self.path.parent.parent / "logs").glob("*.log")):
                target = _free(self.path / "logs" / log.name)
                if log.exists():
                    copy_last(log, target, since=since, most_bytes=MOST_LOG_BYTES)

    def read_outcome(self) -> run_pb2.Run | None:
        """Return the run as it ended; None while it is active, and where its coordinator was killed."""
        path = self.path / OUTCOME
        if not path.is_file():
            return None
        try:
            return json_format.Parse(path.read_text("utf-8"), run_pb2.Run())
        except (
            json_format.ParseError,
            UnicodeDecodeError,
        ):  # it is damaged; the ledger holds the end as well
            return None

    def read_metrics(self) -> Iterator[tuple[int, dict[str, float]]]:
        """Return the metrics of the steps so far, without steps that a fall-back undid."""
        for line in _surviving(_read_lines(self.path / "metrics.jsonl")):
            step = int(line.pop("step"))
            values = {name: value for name, value in line.items() if name not in ("time", "lineage")}
            yield step, {name: value for name, value in values.items() if value is not None}

    def last_step(self) -> tuple[int, int]:
        """Return the lineage and the number of the step whose metrics were written last; its number is -1 before."""
        lines = _read_lines(self.path / "metrics.jsonl")
        return max(((int(line.get("lineage", 0)), int(line["step"])) for line in lines), default=(0, -1))

    def read_events(self) -> Iterator[dict[str, Any]]:
        """Return all events so far."""
        return _read_lines(self.path / "events.jsonl")

    def last_sequence(self) -> int:
        """Return the number of the last event; 0 before the first."""
        return max((int(event["sequence"]) for event in self.read_events()), default=0)

    def last_written(self) -> float | None:
        """Return when the last event was written, in seconds since the epoch."""
        events = self.path / "events.jsonl"
        return events.stat().st_mtime if events.is_file() else None

    def read_evaluations(self) -> Iterator[dict[str, Any]]:
        """Return all evaluations so far, without those that a fall-back undid."""
        return _surviving(_read_lines(self.path / "evaluations.jsonl"))

    def evaluated(self, metric: str) -> dict[int, float]:
        """Return a metric of the evaluations so far, by the steps done before each."""
        name = "accuracy" if metric == "eval/accuracy" else metric
        return {int(line["step"]): float(line[name]) for line in self.read_evaluations() if name in line}

    def read_samples(self, steps: Collection[int] | None = None) -> Iterator[dict[str, Any]]:
        """Return all samples, or those of `steps`, step by step; where a step was repeated, those of the last time."""
        return read_samples(self.path, "step", steps)

    def _append(self, name: str, record: Mapping[str, Any]) -> None:
        """Add a line now, or with the next one where the disk is full."""
        lines = self._waiting.setdefault(name, deque(maxlen=MOST_WAITING))
        lines.append(_line(record).encode())
        try:
            self._append_waiting(name)
        except OSError as error:
            if not why_full(error):
                lines.pop()
                raise

    def _append_waiting(self, name: str) -> None:
        with self._writing:
            lines = self._waiting.get(name)
            if not lines:
                return
            with (self.path / name).open("a+b", buffering=0) as file:
                _cut_unfinished_line(file)
                end = file.seek(0, os.SEEK_END)
                whole = b"".join(lines)
                try:
                    written = file.write(whole)
                except OSError:
                    file.truncate(end)
                    raise
                if written < len(whole):
                    file.truncate(end)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path / name))
            lines.clear()


def _sample(step: int, group: RolloutGroup, sample: RolloutSample, rewards: Sequence[str]) -> dict[str, Any]:
    return {
        "step": step,
        "sample_id": sample.sample_id,
        "group_id": group.group_id,
        "prompt": group.prompt_text,
        "response": sample.text,
        "answer": group.answer,
        "info": group.info,
        "reward": sample.reward,
        "reward_parts": [
            {"reward": name, "value": value}
            for name, value in (
                named_parts(sample.verdicts) or zip(rewards, sample.reward_terms, strict=False)
            )
        ],
        "verdicts": [verdict.record() for verdict in sample.verdicts],
        "prompt_tokens": len(group.prompt_token_ids),
        "response_tokens": len(sample.token_ids),
        "truncated": sample.truncated,
        "generator": sample.generator,
        "attempt": sample.attempt,
        "policy_versions": [
            {"version": str(span.version), "start": span.start, "end": span.end} for span in sample.spans
        ],
        "logprob_mean": _mean(sample.logprobs),
    }


def _written_whole(path: Path, lines: Iterable[str]) -> Path:
    """Write a compressed file that is complete or does not exist."""
    partial = path.with_name(f".{path.name}.partial")
    content = zstandard.ZstdCompressor().compress("".join(lines).encode())
    with names_full_disk("the samples cannot be written", path):
        path.parent.mkdir(exist_ok=True)
        try:
            partial.write_bytes(content)
            partial.rename(path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise
    return path


def _mean(values: np.ndarray | None) -> float | None:
    return None if values is None or not len(values) else float(values.mean())


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False) + "\n"


def _cut_unfinished_line(file: IO[bytes]) -> None:
    """Remove half a line, which a killed process or a full disk left; no reader has taken it."""
    if file.tell() == 0:
        return
    file.seek(-1, os.SEEK_END)
    if file.read(1) != b"\n":
        end = file.tell()
        while end > 0:
            begin = file.seek(max(0, end - _BLOCK))
            if newline := file.read(end - begin).rfind(b"\n") + 1:
                end = begin + newline
                break
            end = begin
        file.truncate(end)


def _pretty(value: Mapping[str, Any]) -> str:
    return json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def _free(path: Path) -> Path:
    """Return `path`, or the first of its numbered siblings that does not exist: run.yaml, run-2.yaml, ..."""
    stem, dot, suffixes = path.name.partition(".")
    number, candidate = 1, path
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{stem}-{number}{dot}{suffixes}")
    return candidate


def _surviving(lines: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Drop each line that a later line of its step or an earlier one replaces: the run fell back in between."""
    kept: list[dict[str, Any]] = []
    for line in lines:
        while kept and kept[-1]["step"] >= line["step"]:
            kept.pop()
        kept.append(line)
    return iter(kept)


def _read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Return whole lines; the last one may be incomplete while it is written, or because its writer was killed."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for _, line in json_lines(file):
            yield line

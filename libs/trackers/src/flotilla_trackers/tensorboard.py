"""Writes TensorBoard event files.

Invariants: a process writes a file of its own, so the line of a run is the files of one folder in the order of their
names. A step that is made again removes what came after it: TensorBoard reads a session start of step N as the end of
all earlier events from N on.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from flotilla_core.config import TensorBoardConfig
from flotilla_trackers.tracker import COLUMNS, RunFacts, Tracker


class TensorBoardTracker(Tracker):
    """One run as event files."""

    def __init__(self, config: TensorBoardConfig) -> None:
        self._config = config
        self._writer: Any = None

    def start(self, facts: RunFacts) -> str:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder = facts.own_folder / "tensorboard"
        if self._config.directory is not None:
            folder = self._config.directory / facts.run_id
        self._writer = EventFileWriter(str(folder))
        if not facts.continued:
            text = json.dumps(facts.config, indent=2, ensure_ascii=False)
            self._text("configuration", 0, "\n".join(f"    {line}" for line in text.splitlines()))
        return f"tensorboard --logdir {folder}"

    def log(self, step: int, moment: float, metrics: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._add(step, moment, summary=Summary(value=values))
        self._writer.flush()

    def samples(self, step: int, rows: Sequence[Sequence[Any]]) -> None:
        lines = [COLUMNS, ["---"] * len(COLUMNS), *rows]
        self._text("samples", step, "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines))

    def rewind(self, step: int) -> bool:
        from tensorboard.compat.proto.event_pb2 import SessionLog

        self._add(step, time.time(), session_log=SessionLog(status=SessionLog.START))
        return True

    def finish(self, outcome: str) -> None:
        self._writer.close()

    def _text(self, tag: str, step: int, markdown: str) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING
        from tensorboard.plugins.text.metadata import create_summary_metadata

        tensor = TensorProto(
            dtype=DT_STRING,
            string_val=[markdown.encode()],
            tensor_shape=TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)]),
        )
        metadata = create_summary_metadata(display_name=tag, description="")
        value = Summary.Value(tag=tag, metadata=metadata, tensor=tensor)
        self._add(step, time.time(), summary=Summary(value=[value]))

    def _add(self, step: int, moment: float, **what: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._writer.add_event(Event(step=step, wall_time=moment, **what))


def _cell(value: Any) -> str:
    """Return the value as a cell of a Markdown table, which is one line."""
    text = "" if value is None else str(value)
    return text.replace("|", "\\|").replace("\r", "").replace("\n", "<br>")

"""Each tracker: the real client writes what a run wrote, and the real reader reads the same numbers back.

`make test-trackers` installs the clients into an environment of their own; without one, its tests are skipped.
"""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import json
import sqlite3
import struct
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zstandard

from flotilla_coordinator.records import directory as records
from flotilla_coordinator.records.directory import RunDirectory
from flotilla_core.config import RunConfig, load_text
from flotilla_trackers.environment import tracker_errors
from flotilla_trackers.follow import TrackerProcess

pytestmark = pytest.mark.timeout(300)

Lines = dict[str, dict[int, float]]
"""The last value of each metric at each step."""
RUN_ID = "real-20261125-1"
STEPS = 4


def run_config(tracker: dict[str, Any]) -> RunConfig:
    text = "name: real\nsteps: 4\ndata: {train: /x.jsonl}\nrewards: [{reward: exact}]\n"
    return load_text(RunConfig, text, overrides=[f"trackers=[{json.dumps(tracker)}]"])


def loss(step: int, lineage: int) -> float:
    return 1.0 / step + lineage / 3  # no round number, so that rounding would show


@pytest.fixture(autouse=True)
def ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    """No two lines are written in the same millisecond, as in a run."""
    seconds = itertools.count(1_760_000_000.0)
    monkeypatch.setattr(records, "time", SimpleNamespace(time=lambda: next(seconds)))


def write_steps(directory: RunDirectory, first: int, last: int, lineage: int) -> None:
    """Write what a run writes for steps `first` to `last`, as they are counted when done."""
    for step in range(first, last + 1):
        rows = [
            {"step": step - 1, "prompt": f"{step}+{index}=", "response": str(index), "reward": index / 3}
            for index in range(3)
        ]
        samples = directory.path / "samples"
        samples.mkdir(exist_ok=True)
        content = "".join(json.dumps(row) + "\n" for row in rows).encode()
        name = f"step-{step - 1:06d}" + (f"-{lineage + 1}" if lineage else "")
        (samples / f"{name}.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(content))
        if step % 2 == 0:
            directory.write_evaluation(step, f"{lineage}.{step}", step / 7, {"eval/pass@4": step / 9})
        directory.write_metrics(step - 1, {"loss": loss(step, lineage), "time/step_s": 0.1}, lineage=lineage)


def send(directory: RunDirectory, tracker: dict[str, Any], outcome: str) -> None:
    config = run_config(tracker)
    (section,) = config.trackers
    process = TrackerProcess(RUN_ID, directory.path, config, section, section.type)
    process.end(outcome)
    asyncio.run(process.run(lambda warning, text: None))
    log = directory.path / "trackers" / f"{section.type}.log"
    assert process.behind() == 0, f"{process.reason}\n{log.read_text()}"


def expected() -> Lines:
    """What a reader finds at the end: the repeated steps as they were made the last time."""
    return {
        "loss": {1: loss(1, 0), 2: loss(2, 0), 3: loss(3, 1), 4: loss(4, 1)},
        "eval/accuracy": {0: 0.125, 2: 2 / 7, 4: 4 / 7},
    }


def tensorboard_events(directory: RunDirectory) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory.path / "trackers" / "tensorboard"))
    events.Reload()
    return events


def tensorboard_scalars(directory: RunDirectory) -> Lines:
    events = tensorboard_events(directory)
    return {
        tag: {event.step: event.value for event in events.Scalars(tag)} for tag in events.Tags()["scalars"]
    }


def read_tensorboard(directory: RunDirectory) -> tuple[Lines, list[list[Any]]]:
    lines, events = tensorboard_scalars(directory), tensorboard_events(directory)
    tables = {event.step: event.tensor_proto.string_val[0].decode() for event in events.Tensors("samples")}
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in tables[4].splitlines()[2:]]
    return lines, [[row[0], row[1], float(row[3])] for row in rows]


def log_records(content: bytes) -> Iterator[bytes]:
    """The records of a log in the format of LevelDB, behind the 7 bytes by which W&B names its own."""
    position, record = 7, b""
    while position + 7 <= len(content):
        room = 32768 - position % 32768
        if room < 7:  # no header fits into the rest of the block
            position += room
            continue
        _, length, kind = struct.unpack_from("<IHB", content, position)
        record += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def read_wandb(directory: RunDirectory) -> tuple[Lines, list[list[Any]]]:
    from wandb.proto.wandb_internal_pb2 import Record

    lines: Lines = defaultdict(dict)
    rows: list[list[Any]] = []
    for file in sorted((directory.path / "trackers").glob(f"wandb/offline-run-*-{RUN_ID}/*.wandb")):
        for data in log_records(file.read_bytes()):
            record = Record.FromString(data)
            values = {
                item.key or "/".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
            step = values.get("step")
            for name, value in values.items():
                if isinstance(value, int | float) and step is not None:
                    lines[name][int(step)] = float(value)
        for table in file.parent.glob("files/media/table/samples_*.table.json"):
            found = json.loads(table.read_text())
            if found["data"][0][0].startswith("4+"):
                rows = [[row[0], row[1], row[3]] for row in found["data"]]
    return dict(lines), rows


def read_mlflow(directory: RunDirectory) -> tuple[Lines, list[list[Any]]]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=(directory.path.parent.parent / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("flotilla")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED" and run.data.params["rewards.0.reward"] == "exact"
    lines: Lines = {
        name: {metric.step: metric.value for metric in client.get_metric_history(run.info.run_id, name)}
        for name in run.data.metrics
    }
    table = Path(client.download_artifacts(run.info.run_id, "samples/step-000004.json"))
    return lines, [[row[0], row[1], row[3]] for row in json.loads(table.read_text())["data"]]


def read_trackio(directory: RunDirectory) -> tuple[Lines, list[list[Any]]]:
    lines: Lines = defaultdict(dict)
    rows: list[list[Any]] = []
    database = sqlite3.connect(directory.path.parent.parent / "trackio" / "flotilla.db")
    for step, text in database.execute(
        "SELECT step, metrics FROM metrics WHERE run_name = ? ORDER BY id", (RUN_ID,)
    ):
        for name, value in json.loads(text).items():
            if isinstance(value, int | float):
                lines[name][step] = float(value)
            elif name == "samples" and step == 4:
                rows = [[row["prompt"], row["response"], row["reward"]] for row in value["_value"]]
    return dict(lines), rows


READERS: dict[str, Callable[[RunDirectory], tuple[Lines, list[list[Any]]]]] = {
    "tensorboard": read_tensorboard,
    "wandb": read_wandb,
    "mlflow": read_mlflow,
    "trackio": read_trackio,
}


@pytest.mark.parametrize("name", READERS)
def test_a_reader_finds_the_numbers_of_the_run_also_over_a_resume(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed: make test-trackers")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # the reader asks for it too
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    for variable in ("WANDB_API_KEY", "MLFLOW_TRACKING_URI", "TRACKIO_DIR"):
        monkeypatch.delenv(variable, raising=False)
    options: dict[str, dict[str, Any]] = {
        "wandb": {"mode": "offline"},
        "trackio": {"directory": str(tmp_path / "trackio")},
    }
    tracker = {"type": name, "samples_every_steps": 2, **options.get(name, {})}
    assert tracker_errors(run_config(tracker)) == []
    directory = RunDirectory.create(tmp_path / "runs" / RUN_ID)
    directory.write_evaluation(0, "0.0", 0.125)
    write_steps(directory, 1, 3, lineage=0)
    send(directory, tracker, "stopped")
    # It is resumed from a checkpoint after two steps.
    write_steps(directory, 3, STEPS, lineage=1)
    send(directory, tracker, "succeeded")

    lines, rows = READERS[name](directory)
    single = name == "tensorboard"  # its event files hold 32 bits
    for metric, values in expected().items():
        assert lines[metric] == pytest.approx(values, rel=1e-7 if single else 0, abs=0), metric
    assert lines["lineage"][4] == 1.0
    reward = pytest.approx([2 / 3, 1 / 3, 0.0])
    assert [row[:2] for row in rows] == [["4+2=", "2"], ["4+1=", "1"], ["4+0=", "0"]]
    assert [row[2] for row in rows] == reward


def test_a_line_in_tensorboard_that_was_undone_is_gone(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    directory = RunDirectory.create(tmp_path / "runs" / RUN_ID)
    write_steps(directory, 1, 4, lineage=0)
    send(directory, {"type": "tensorboard"}, "stopped")
    write_steps(directory, 2, 2, lineage=1)
    send(directory, {"type": "tensorboard"}, "stopped")
    assert list(tensorboard_scalars(directory)["loss"]) == [1, 2]

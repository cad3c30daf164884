"""The process of one tracker: reads the files of a run from where it stopped, and gives them to the client.

Invariants: the files of the run are the queue, so nothing is kept in memory that a tracker has not taken. The position
is saved after each line that was taken: a process that is killed in between tells one line again, and none is left out.
A call that raises or hangs ends this process; the coordinator starts another one. Its own output is what it tells the
coordinator; everything that a client prints goes to the log. What it tells has no secret in it.

The coordinator writes one line to it at the start, and one at the end of the run. When the coordinator is gone, so is
this process.
"""

from __future__ import annotations

import fcntl
import heapq
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from flotilla_core.config import (
    MlflowConfig,
    TensorBoardConfig,
    TrackerConfig,
    TrackioConfig,
    WandbConfig,
)
from flotilla_core.files import write_atomically
from flotilla_core.json_text import json_lines
from flotilla_data.samples import read_samples
from flotilla_trackers.mlflow import MlflowTracker
from flotilla_trackers.tensorboard import TensorBoardTracker
from flotilla_trackers.tracker import RunFacts, Tracker, rows_of, without_secrets
from flotilla_trackers.trackio import TrackioTracker
from flotilla_trackers.wandb import WandbTracker

LOOK_EVERY_S = 1.0
LONGEST_CALL_S = 120.0
"""A call of a client that takes longer counts as hanging."""
NICE = 10
_BLOCK = 64 << 10
FAILED = 1
LONGEST_REASON = 300
METRICS, EVALUATIONS = "metrics", "evaluations"
NO_METRICS = ("step", "time", "policy_version")
ADAPTERS: dict[str, tuple[type[TrackerConfig], Callable[[Any], Tracker]]] = {
    "tensorboard": (TensorBoardConfig, TensorBoardTracker),
    "wandb": (WandbConfig, WandbTracker),
    "mlflow": (MlflowConfig, MlflowTracker),
    "trackio": (TrackioConfig, TrackioTracker),
}


@dataclass
class Progress:
    """The part of a run that a tracker has taken, as its file has it."""

    positions: dict[str, int] = field(default_factory=dict)
    """Bytes of each file of records that were taken."""
    newest: dict[str, int] = field(default_factory=dict)
    """The last step of each file."""
    points: int = 0
    link: str = ""
    started: bool = False

    @classmethod
    def read(cls, path: Path) -> Progress:
        """Return what the file holds; nothing where there is none."""
        try:
            return cls(**json.loads(path.read_text("utf-8")))
        except FileNotFoundError:
            return cls()

    def behind(self, run_dir: Path) -> int:
        """Return how many lines of the run were not taken."""
        left = 0
        for name in (METRICS, EVALUATIONS):
            path = run_dir / f"{name}.jsonl"
            if path.is_file():
                with path.open("rb") as file:
                    file.seek(self.positions.get(name, 0))
                    while block := file.read(_BLOCK):
                        left += block.count(b"\n")
        return left


@dataclass(frozen=True)
class Record:
    """One line of metrics or of an evaluation."""

    file: str
    end: int
    """The position behind it."""
    step: int
    """Steps done."""
    moment: float
    metrics: dict[str, float]


class Feed:
    """Gives the records of one run to one tracker."""

    def __init__(
        self, tracker: Tracker, facts: RunFacts, config: TrackerConfig, name: str, tell: Callable[..., None]
    ) -> None:
        self._tracker = tracker
        self._facts = facts
        self._config = config
        self._tell = tell
        self._path = progress_path(facts.directory, name)
        self._progress = Progress.read(self._path)

    def run(self, outcome: Callable[[float], str]) -> None:
        """Follow the files until `outcome`, which waits for so many seconds, names the end of the run."""
        self._start()
        while True:
            ended = outcome(0)  # before the files are read, so that the last lines are among what is read
            before = self._progress.points
            for record in read_records(self._facts.directory, dict(self._progress.positions)):
                self._give(record)
            if self._progress.points > before:
                self._tell(taken=self._progress.points)
            elif ended:
                break
            else:
                outcome(LOOK_EVERY_S)
        with in_time():
            self._tracker.finish(ended)

    def _start(self) -> None:
        with in_time():
            link = self._tracker.start(replace(self._facts, continued=self._progress.started))
        self._progress.started, self._progress.link = True, link
        self._save()
        self._tell(link=link)

    def _give(self, record: Record) -> None:
        progress, tracker = self._progress, self._tracker
        with in_time():
            if record.step <= progress.newest.get(record.file, -1):
                tracker.rewind(record.step)
                for file, newest in progress.newest.items():
                    progress.newest[file] = min(newest, record.step - 1)
            tracker.log(record.step, record.moment, record.metrics)
            if rows := self._rows(record):
                tracker.samples(record.step, rows)
        progress.newest[record.file] = record.step
        progress.positions[record.file] = record.end
        progress.points += 1
        self._save()

    def _rows(self, record: Record) -> list[list[Any]]:
        config = self._config
        if record.file != METRICS or not config.samples or record.step % config.samples_every_steps:
            return []
        samples = read_samples(self._facts.directory, "step", {record.step - 1})
        return rows_of(list(samples), config.samples)

    def _save(self) -> None:
        write_atomically(self._path, json.dumps(asdict(self._progress), indent=1))


def progress_path(run_dir: Path, name: str) -> Path:
    """Return the file in which a tracker of a run keeps what it has taken."""
    return run_dir / "trackers" / f"{name}.json"


def read_records(run_dir: Path, positions: Mapping[str, int]) -> Iterator[Record]:
    """Yield the next records in the order in which they were written, one at a time."""
    # Within one moment the evaluation comes first, as it does within a step.
    files = (_records(run_dir, name, positions.get(name, 0)) for name in (EVALUATIONS, METRICS))
    return heapq.merge(*files, key=lambda record: record.moment)


def _record(name: str, end: int, line: dict[str, Any]) -> Record:
    step = int(line["step"])
    if name == METRICS:
        # Evaluations have a file of their own, with the step of the version that was evaluated.
        metrics = {key: value for key, value in line.items() if not key.startswith("eval/")}
        step += 1
    else:
        metrics = {key if key.startswith("eval/") else f"eval/{key}": value for key, value in line.items()}
    numbers = {
        key: float(value)
        for key, value in metrics.items()
        if key.removeprefix("eval/") not in NO_METRICS
        and isinstance(value, int | float)
        and not isinstance(value, bool)
    }
    return Record(name, end, step, float(line.get("time", 0.0)), numbers)


def _records(run_dir: Path, name: str, position: int) -> Iterator[Record]:
    """Yield the records of the whole lines behind a position; a damaged line is skipped."""
    path = run_dir / f"{name}.jsonl"
    if not path.is_file():
        return
    with path.open("rb") as file:
        file.seek(position)
        for end, line in json_lines(file, position):
            yield _record(name, end, line)


@contextmanager
def in_time() -> Iterator[None]:
    """End this process when what is inside takes too long, whatever it hangs in."""
    signal.setitimer(signal.ITIMER_REAL, LONGEST_CALL_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def main() -> int:
    """Feed the tracker that the first line of the input describes."""
    told = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # clients print
    os.nice(NICE)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)

    def tell(**what: Any) -> None:
        told.write(json.dumps(what) + "\n")
        told.flush()

    order = json.loads(sys.stdin.readline())
    secrets = [os.environ[name] for name in order["secrets"]]
    try:
        made_config, made_tracker = ADAPTERS[order["type"]]
        config = made_config.model_validate(order["tracker"])
        facts = RunFacts(order["run_id"], order["name"], Path(order["directory"]), order["config"])
        alone = progress_path(facts.directory, order["type"]).with_suffix(".lock").open("w")
        fcntl.flock(alone, fcntl.LOCK_EX | fcntl.LOCK_NB)  # two of them would tell each line twice
        Feed(made_tracker(config), facts, config, order["type"], tell).run(_end_of_input())
    # Clients raise whatever they like, some of them SystemExit; the coordinator is told and tries again.
    except (Exception, SystemExit) as error:  # noqa: BLE001 - see above
        sys.stderr.write(without_secrets(traceback.format_exc(), os.environ, secrets))
        reason = without_secrets(f"{type(error).__name__}: {error}", os.environ, secrets)
        tell(failed=" ".join(reason.split())[:LONGEST_REASON])
        return FAILED
    tell(finished=True)
    return 0


def _end_of_input() -> Callable[[float], str]:
    """Return a function that waits for the outcome of the run, the second line of the input."""
    ended = threading.Event()
    outcomes: list[str] = []

    def listen() -> None:
        line = sys.stdin.readline()
        if not line:
            os._exit(FAILED)  # the coordinator is gone
        outcomes.append(json.loads(line)["end"])
        ended.set()

    threading.Thread(target=listen, name="end of the run", daemon=True).start()

    def outcome(wait_s: float) -> str:
        return outcomes[0] if ended.wait(wait_s) else ""

    return outcome


if __name__ == "__main__":
    sys.exit(main())

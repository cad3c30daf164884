"""Answers what the metrics of a run are, and how two runs compare: settings that differ, metrics, and curves as text.

Invariants: a value that a run lacks is None, never 0. Steps count when they are done, so the first is 1; an evaluation
before any step is at 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flotilla.coordinator.v1 import run_pb2
from flotilla_coordinator.records.directory import RunDirectory
from flotilla_core.errors import NotFound
from flotilla_core.evaluations import ACCURACY, before
from flotilla_core.telemetry.metrics import higher_is_better, in_groups

WIDTH, HEIGHT = 64, 12
MARKS = ("a", "b", "*")
"""The first run, the second one, and both at one place."""
DEFAULT_CURVES = (
    "reward/mean",
    "eval/accuracy",
    "preference/accuracy",
    "loss",
    "entropy",
    "tokens/response_mean",
)

Series = dict[int, float]


def add_metrics(run: run_pb2.Run, directory: RunDirectory) -> None:
    """Add the last value of each metric, and the number of steps done."""
    for step, metrics in directory.read_metrics():
        run.step = max(run.step, step + 1)
        for name, value in metrics.items():
            run.metrics[name] = value
    for evaluation in directory.read_evaluations():
        figures = {name: float(value) for name, value in evaluation.items() if name.startswith("eval/")}
        add_evaluation(run, evaluation["step"], {ACCURACY: float(evaluation["accuracy"]), **figures})


def add_evaluation(run: run_pb2.Run, step: int, figures: Mapping[str, float]) -> None:
    """Add the figures of an evaluation, and those of the first one under their own names."""
    for name, value in before(figures).items():
        if name not in run.metrics:
            run.metrics[name] = value
    for name, value in figures.items():
        run.metrics[name] = value
    run.metrics["eval/step"] = step


@dataclass(frozen=True)
class Reached:
    """Holds what a run reached by one metric."""

    last: float
    best: float | None
    """The best value; None where neither more nor less is better."""
    best_step: int | None


@dataclass(frozen=True)
class Comparison:
    """Two runs side by side; the first of each pair is of the first run."""

    settings: list[tuple[str, Any, Any]]
    figures: dict[str, tuple[Reached | None, Reached | None]]
    """The values that both reached, by metric, those first that tell whether a run learns."""
    curves: tuple[dict[str, Series], dict[str, Series]]
    drawn: list[str]
    """Metrics whose curves are shown."""

    @classmethod
    def of(
        cls,
        a: tuple[Path, Mapping[str, Any]],
        b: tuple[Path, Mapping[str, Any]],
        metrics: Sequence[str] = (),
    ) -> Comparison:
        """Compare two runs by their directories and configurations; `metrics` are drawn, or else the usual ones."""
        curves = (series_of(a[0]), series_of(b[0]))
        known = dict.fromkeys([*curves[0], *curves[1]])
        if unknown := [name for name in metrics if name not in known]:
            raise NotFound(
                f"neither run has the metric {unknown[0]}",
                next_step="see `flotilla run show` for its metrics",
            )
        figures = {
            name: (reached(name, curves[0].get(name, {})), reached(name, curves[1].get(name, {})))
            for _, names in in_groups(known)
            for name in names
        }
        drawn = list(metrics) or [name for name in DEFAULT_CURVES if name in known]
        return cls(settings_that_differ(a[1], b[1]), figures, curves, drawn)

    def to_json(self) -> dict[str, Any]:
        """Return settings and figures as `run compare --json` prints them."""
        return {
            "settings": [{"key": key, "a": left, "b": right} for key, left, right in self.settings],
            "metrics": [
                {"name": name, "a": left and vars(left), "b": right and vars(right)}
                for name, (left, right) in self.figures.items()
            ],
        }


def settings_that_differ(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return each key whose value differs, with both values; a missing one is None."""
    left, right = dict(_flat(a)), dict(_flat(b))
    keys = dict.fromkeys([*left, *right])
    return [(key, left.get(key), right.get(key)) for key in keys if left.get(key) != right.get(key)]


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _flat(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and any(isinstance(item, Mapping | list) for item in value):
        for index, item in enumerate(value):
            yield from _flat(item, f"{path}[{index}]")
    else:
        yield path, value


def series_of(run_dir: Path) -> dict[str, Series]:
    """Return every metric of a run by step; those of evaluations have the steps after which they were made."""
    directory = RunDirectory(run_dir)
    found: dict[str, Series] = {}
    evaluations = list(directory.read_evaluations())
    # A step's own line repeats the figures of the evaluation after it.
    of_evaluations = {
        "eval/accuracy" if name == "accuracy" else name
        for line in evaluations
        for name in line
        if name == "accuracy" or name.startswith("eval/")
    }
    for step, metrics in directory.read_metrics():
        for name, value in metrics.items():
            if name not in of_evaluations:
                found.setdefault(name, {})[step + 1] = value
    for line in evaluations:
        for name, value in line.items():
            known = "eval/accuracy" if name == "accuracy" else name
            if known in of_evaluations and isinstance(value, int | float):
                found.setdefault(known, {})[int(line["step"])] = float(value)
    return found


def reached(name: str, series: Series) -> Reached | None:
    """Return the last and the best value of a metric; None where the run has none."""
    if not series:
        return None
    last, higher = series[max(series)], higher_is_better(name)
    if higher is None:
        return Reached(last, None, None)
    step = (max if higher else min)(series, key=lambda one: series[one])
    return Reached(last, series[step], step)


def text_curves(a: Series, b: Series) -> list[str]:
    """Return the lines of a chart with both series, marked by MARKS, on common axes."""
    values = [value for series in (a, b) for value in series.values()]
    steps = [step for series in (a, b) for step in series]
    low, high = min(values), max(values)
    first, last = min(steps), max(steps)
    grid = [[" "] * WIDTH for _ in range(HEIGHT)]
    for mark, series in zip(MARKS, (a, b), strict=False):
        for step, value in series.items():
            column = round((step - first) / max(last - first, 1) * (WIDTH - 1))
            row = HEIGHT - 1 - round((value - low) / ((high - low) or 1.0) * (HEIGHT - 1))
            grid[row][column] = mark if grid[row][column] in (" ", mark) else MARKS[2]
    shown = {0: f"{high:.4g}", HEIGHT - 1: f"{low:.4g}"}
    margin = max(map(len, shown.values()))
    lines = [f"{shown.get(row, ''):>{margin}} |{''.join(cells).rstrip()}" for row, cells in enumerate(grid)]
    ends = f"{first}{str(last).rjust(WIDTH - len(str(first)))}"
    return [*lines, f"{'':{margin}} +{'-' * WIDTH}", f"{'':{margin}}  {ends}"]


def finite(series: Series) -> Series:
    """Return the points that a chart can show."""
    return {step: value for step, value in series.items() if math.isfinite(value)}

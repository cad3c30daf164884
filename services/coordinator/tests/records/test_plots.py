"""How plots look: nothing covers anything else, and what is compared has one axis."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.transforms import Bbox

from flotilla_coordinator.records import plots

NAME = "a-run-with-a-rather-long-name-20261126-225519-ab12"


def said(figure: Any) -> list[Bbox]:
    """Where the title, the run, the legends and the notes of a figure are, once it is drawn."""
    canvas: Any = FigureCanvasAgg(figure)
    canvas.draw()
    texts = [*figure.texts, *(text for axes in figure.axes for text in axes.texts)]
    legends = [legend for axes in figure.axes if (legend := axes.get_legend()) is not None]
    drawn = [*legends, *(text for text in texts if text.get_text())]
    return [artist.get_window_extent(canvas.get_renderer()) for artist in drawn]


def run_of(folder: Path) -> plots.RunFiles:
    directory = folder / NAME
    directory.mkdir()
    steps = [
        {
            "step": step,
            "lineage": 0,
            "reward/mean": step / 50,
            "canary/mean": 0.01,
            "canary/max": 0.2,
            "probs_diff/mean": 0.01,
            "probs_diff/max": 0.3,
            "learning_rate": 1.234e-4,
            "loss": -123456.0 - step,
            "time/step_s": 1.0,
        }
        for step in range(50)
    ]
    evaluations = [{"step": s, "accuracy": s / 50, "eval/reward_mean": s / 60} for s in (0, 25, 50)]
    for name, rows in (("metrics", steps), ("evaluations", evaluations)):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return plots.RunFiles(directory)


def test_no_legend_covers_a_name_or_a_figure(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    for figure in (plots.reward_figure(run), plots.agreement_figure(run), plots.time_figure(run)):
        assert figure is not None
        boxes = said(figure)
        assert len(boxes) >= 3
        assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))
        assert all(box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1 for box in boxes)


def test_the_longest_numbers_and_the_names_of_axes_lie_within_the_figure(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    for figure in (plots.training_figure(run), plots.agreement_figure(run)):
        assert figure is not None
        canvas: Any = FigureCanvasAgg(figure)
        canvas.draw()
        drawn = [axes.get_tightbbox(canvas.get_renderer()) for axes in figure.axes]
        assert all(box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.x1 for box in drawn)


def test_runs_are_compared_over_the_same_steps_and_named_once() -> None:
    curves = [
        {"reward/mean": {step: step / 90 for step in range(1, 91)}, "eval/accuracy": {0: 0.1, 40: 0.5}},
        {"reward/mean": {step: step / 20 for step in range(1, 21)}, "eval/accuracy": {0: 0.1, 20: 0.6}},
    ]
    figure = plots.comparison_figure(["reward/mean", "eval/accuracy"], curves, [NAME, f"{NAME}-2"])
    boxes = said(figure)
    first, second = figure.axes
    assert first.get_xlim() == second.get_xlim()
    assert len(boxes) == 2, "the title and one legend"
    assert all(box.x1 <= figure.bbox.x1 for box in boxes)

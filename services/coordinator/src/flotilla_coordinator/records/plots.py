"""Draws the plots of a run: what it learned, whether the mathematics is sound, where the time went.

Invariants: drawn from the run directory alone, without a display; a plot without data is not written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter, MaxNLocator

from flotilla_coordinator.records.directory import RunDirectory

BLUE, ORANGE, GREEN, RED, GREY = "#2f6db5", "#e07b39", "#3c9a5f", "#c0413b", "#8a8f98"
TIMES = (
    ("time/rollout_s", "rollout", BLUE),
    ("time/train_s", "train", ORANGE),
    ("time/sync_s", "sync", GREEN),
    ("time/evaluate_s", "evaluate", GREY),
)

LONGEST_NAME = 60
"""Characters of the name of a run that fit beside the title."""

WIDTH, PANEL, LEFT, RIGHT, TOP, BOTTOM, BETWEEN = 9.0, 2.2, 1.1, 0.1, 0.65, 0.55, 0.15
"""Inches: `LEFT` holds the longest number beside a panel, and `TOP` the title above its legend.

To work margins out from what is drawn would take as long as to draw it.
"""

Series = tuple[list[int], list[float]]


class RunFiles:
    """The series of one run directory."""

    def __init__(self, path: Path) -> None:
        directory = RunDirectory(path)
        self.name = path.name
        self._steps = list(directory.read_metrics())
        self.evaluations: Series = ([], [])
        self.held_out_rewards: Series = ([], [])
        """Absent where they say the same as the accuracy."""
        for evaluation in directory.read_evaluations():
            step, accuracy = int(evaluation["step"]), float(evaluation["accuracy"])
            self.evaluations[0].append(step)
            self.evaluations[1].append(accuracy)
            reward = evaluation.get("eval/reward_mean", accuracy)
            self.held_out_rewards[0].append(step)
            self.held_out_rewards[1].append(reward)
        if self.held_out_rewards == self.evaluations:
            self.held_out_rewards = ([], [])

    def series(self, name: str) -> Series:
        """Return the steps that have a metric, and its values; a step counts when done, so the first is 1."""
        found = [(step + 1, metrics[name]) for step, metrics in self._steps if name in metrics]
        return [step for step, _ in found], [value for _, value in found]

    def filled(self, name: str) -> list[float]:
        """Return a value for every step, 0 where a phase did not happen."""
        return [metrics.get(name, 0.0) for _, metrics in self._steps]

    @property
    def steps(self) -> list[int]:
        """Return every step that is done."""
        return [step + 1 for step, _ in self._steps]


def write_plots(run_dir: Path) -> list[Path]:
    """Write `plots/*.png`."""
    run = RunFiles(run_dir)
    figures = {
        "reward": reward_figure(run),
        "training": training_figure(run),
        "agreement": agreement_figure(run),
        "time": time_figure(run),
    }
    target = run_dir / "plots"
    target.mkdir(exist_ok=True)
    written = []
    for name, figure in figures.items():
        if figure is None:
            continue
        path = target / f"{name}.png"
        figure.savefig(path)
        written.append(path)
    return written


def write_comparison(
    names: Sequence[str], curves: Sequence[Mapping[str, Mapping[int, float]]], runs: Sequence[str], path: Path
) -> None:
    """Write one PNG with a panel for each metric, in which every run has a curve."""
    comparison_figure(names, curves, runs).savefig(path)


def comparison_figure(
    names: Sequence[str], curves: Sequence[Mapping[str, Mapping[int, float]]], runs: Sequence[str]
) -> Figure:
    """Draw metrics of two runs over the same steps."""
    figure, panels = _figure("Runs compared", "", len(names))
    for axes, name in zip(panels, names, strict=True):
        for run, color, series in zip(runs, (BLUE, ORANGE), curves, strict=True):
            points = sorted(series.get(name, {}).items())
            label = run if name == names[0] else None
            _line(axes, ([step for step, _ in points], [value for _, value in points]), label, color)
        axes.set_ylabel(name)
        _finish(axes, last=name == names[-1])
    return figure


def reward_figure(run: RunFiles) -> Figure | None:
    """Draw rewards and held-out accuracy by step; None where there are none, as of every figure."""
    reward = run.series("reward/mean")
    if not reward[0] and not run.evaluations[0]:
        return None
    figure, (axes,) = _figure("Reward and held-out accuracy", run.name, 1)
    _line(axes, reward, "mean reward of the step's samples", BLUE)
    if run.evaluations[0]:
        axes.plot(*run.evaluations, "o-", color=ORANGE, linewidth=2, markersize=6, label="held-out accuracy")
        for index in {0, len(run.evaluations[0]) - 1}:
            step, accuracy = run.evaluations[0][index], run.evaluations[1][index]
            axes.annotate(
                f"{accuracy:.1%}",
                (step, accuracy),
                (0, 9),
                textcoords="offset points",
                ha="center",
                color=ORANGE,
            )
    if run.held_out_rewards[0]:
        axes.plot(*run.held_out_rewards, "s--", color=GREEN, markersize=5, label="held-out mean reward")
    axes.set_ylabel("reward, accuracy")
    _finish(axes)
    return figure


def training_figure(run: RunFiles) -> Figure | None:
    """Draw what the optimizer saw."""
    panels = [("loss", BLUE), ("grad_norm", ORANGE), ("entropy", GREEN), ("learning_rate", GREY)]
    return _stacked(run, "Training", panels)


def agreement_figure(run: RunFiles) -> Figure | None:
    """Draw how far trainer and generators were apart."""
    names = [
        ("probs_diff/mean", BLUE),
        ("probs_diff/max", ORANGE),
        ("canary/mean", GREEN),
        ("canary/max", RED),
    ]
    present = [(name, color) for name, color in names if run.series(name)[0]]
    if not present:
        return None
    figure, (axes,) = _figure("Trainer against generator", run.name, 1)
    for name, color in present:
        _line(axes, run.series(name), name, color)
    if any(value > 0 for name, _ in present for value in run.series(name)[1]):
        axes.set_yscale("log")
        # The default would load the typesetting of formulas for powers of ten.
        axes.yaxis.set_major_formatter(LogFormatter())
        axes.yaxis.set_minor_formatter(LogFormatter(labelOnlyBase=False))
    axes.set_ylabel("difference of probabilities")
    _finish(axes)
    return figure


def time_figure(run: RunFiles) -> Figure | None:
    """Draw where the seconds of each step went."""
    if not run.steps:
        return None
    figure, (axes,) = _figure("Where a step's time goes", run.name, 1)
    phases = [(label, color, run.filled(name)) for name, label, color in TIMES]
    axes.stackplot(
        run.steps,
        [values for _, _, values in phases],
        labels=[label for label, _, _ in phases],
        colors=[color for _, color, _ in phases],
        alpha=0.85,
    )
    _line(axes, run.series("time/step_s"), "whole step", "black")
    axes.set_ylabel("seconds")
    axes.set_ylim(bottom=0)
    _finish(axes)
    return figure


def _stacked(run: RunFiles, title: str, panels: list[tuple[str, str]]) -> Figure | None:
    present = [(name, color) for name, color in panels if run.series(name)[0]]
    if not present:
        return None
    figure, axes = _figure(title, run.name, len(present))
    for panel, (name, color) in zip(axes, present, strict=True):
        _line(panel, run.series(name), None, color)
        panel.set_ylabel(name.replace("_", " "))
        _finish(panel, last=panel is axes[-1])
    return figure


def _figure(title: str, run: str, panels: int) -> tuple[Figure, list[Axes]]:
    """Make panels below each other, with the title and the run above them, where the legend does not come."""
    height = PANEL * (panels + 1)
    figure = Figure(figsize=(WIDTH, height), dpi=120)
    margins = {
        "left": LEFT / WIDTH,
        "right": 1 - RIGHT / WIDTH,
        "top": 1 - TOP / height,
        "bottom": BOTTOM / height,
        "hspace": BETWEEN / PANEL,
    }
    grid = figure.subplots(panels, 1, sharex=True, squeeze=False, gridspec_kw=margins)
    above = 1 - 0.1 / height
    figure.suptitle(title, x=0.01, y=above, ha="left", va="top", fontsize=13, fontweight="bold")
    name = run if len(run) <= LONGEST_NAME else f"{run[: LONGEST_NAME // 2]}...{run[-LONGEST_NAME // 2 :]}"
    figure.text(0.99, above, name, ha="right", va="top", fontsize=9, color=GREY)
    return figure, list(grid[:, 0])


def _line(axes: Axes, series: Series, label: str | None, color: str) -> None:
    if series[0]:
        marker = "o" if len(series[0]) == 1 else ""
        axes.plot(*series, marker=marker, color=color, linewidth=1.5, label=label)


def _finish(axes: Axes, *, last: bool = True) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, color="#e4e6ea", linewidth=0.8)
    axes.set_axisbelow(True)
    if axes.get_yscale() == "linear":
        axes.margins(y=0.12)  # for the figures beside the first and the last point
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if last:
        axes.set_xlabel("step")
    if axes.get_legend_handles_labels()[0]:
        below_title = (-LEFT / (WIDTH - LEFT - RIGHT), 1.0)
        axes.legend(frameon=False, fontsize=9, loc="lower left", bbox_to_anchor=below_title, ncols=5)

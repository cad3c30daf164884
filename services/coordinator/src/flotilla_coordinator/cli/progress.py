"""How a run is followed: one live line on a terminal, plain lines anywhere else. All of it on stderr.

Invariants: a log gets every notice (evaluations among them), the first and the last step, and between them one line
in STEP_LINE_S at most, so that a run of thousands of quick steps stays a page; nothing is ever said twice.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from flotilla_coordinator.cli.output import duration, say, state_name, wants_colour

if TYPE_CHECKING:
    from rich.table import Table

    from flotilla.coordinator.v1.run_pb2 import Notice, Run, RunEvent, StepMetrics

Show = Callable[["RunEvent"], None]
STEP_LINE_S = 5.0
ACCURACY = "eval/accuracy"
_SHOWN = (
    ("reward/mean", "reward {:.3f}"),
    (ACCURACY, "accuracy {:.3f}"),
    ("loss", "loss {:.4g}"),
    ("tokens_per_s", "{:,.0f} tok/s"),
    ("time/step_s", "{:.2f} s"),
)
_SHOWN_LIVE = 2


@contextmanager
def progress(run: Run) -> Iterator[Show]:
    """Gives the function to call with every event."""
    if not sys.stderr.isatty():
        yield _Lines(run).show
        return
    from rich.console import Console
    from rich.live import Live

    console = Console(stderr=True, no_color=not wants_colour(sys.stderr), highlight=False)
    screen = _Screen(run)
    with Live(screen, console=console, refresh_per_second=4, transient=True):

        def show(event: RunEvent) -> None:
            screen.update(event)
            if event.WhichOneof("event") == "notice":
                console.print(notice_line(event.notice), markup=False)

        yield show


def notice_line(notice: Notice) -> str:
    """What happened; how bad it is, where it is."""
    from flotilla.coordinator.v1.run_pb2 import NoticeLevel

    level = NoticeLevel.Name(notice.level).removeprefix("NOTICE_LEVEL_").lower()
    return notice.text if level == "info" else f"{level}: {notice.text}"


class _Screen:
    """What the live line shows now."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.metrics: dict[str, float] = dict(run.metrics)

    def update(self, event: RunEvent) -> None:
        kind = event.WhichOneof("event")
        if kind == "run":
            self.run = event.run
        elif kind == "step":
            self.metrics.update(event.step.metrics)

    def __rich__(self) -> Table:
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        run = self.run
        line = Table.grid(padding=(0, 2))
        for _ in range(5):
            line.add_column(no_wrap=True)
        bar = ProgressBar(total=max(run.total_steps, 1), completed=run.step, width=12)
        figures = "  ".join(_figures(self.metrics)[:_SHOWN_LIVE])
        line.add_row(bar, f"{run.step}/{run.total_steps}", figures, run.phase, _time_left(run.eta_seconds))
        return line


class _Lines:
    """A line for a step now and then, an evaluation, a notice, a change of state on the way."""

    def __init__(self, run: Run) -> None:
        self._state = ""
        self._total = run.total_steps
        self._time_left = run.eta_seconds
        self._next_step_line = 0.0

    def show(self, event: RunEvent) -> None:
        kind = event.WhichOneof("event")
        if kind == "step":
            self._step(event.step)
        elif kind == "notice":
            say(notice_line(event.notice))
        elif kind == "run":
            self._run(event.run)

    def _step(self, step: StepMetrics) -> None:
        now = time.monotonic()
        if now < self._next_step_line and step.step < self._total:
            return
        self._next_step_line = now + STEP_LINE_S
        # An evaluation has a line of its own.
        figures = _figures({name: value for name, value in step.metrics.items() if name != ACCURACY})
        left = _time_left(self._time_left) if step.step < self._total else ""
        say("  ".join(part for part in (f"step {step.step}/{self._total}", *figures, left) if part))

    def _run(self, run: Run) -> None:
        self._total, self._time_left = run.total_steps, run.eta_seconds
        # That it runs shows in its steps, and the end is told by the command, with its reason.
        name = state_name(run)
        if name not in (self._state, "running") and not run.HasField("ended_at"):
            say(name if run.phase in ("", name) else f"{name}: {run.phase}")
        self._state = name


def _figures(metrics: Mapping[str, float]) -> list[str]:
    return [shape.format(metrics[name]) for name, shape in _SHOWN if name in metrics]


def _time_left(seconds: float) -> str:
    return f"{duration(seconds)} left" if seconds > 0 else ""

"""How a run is followed: one live line on a terminal, plain lines anywhere else. All of it on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from flotilla_coordinator.cli.output import duration, say, wants_colour

if TYPE_CHECKING:
    from rich.table import Table

    from flotilla.coordinator.v1.run_pb2 import Notice, Run, RunEvent, StepMetrics

Show = Callable[["RunEvent"], None]
_SHOWN = (
    ("reward/mean", "reward {:.3f}"),
    ("eval/accuracy", "accuracy {:.3f}"),
    ("loss", "loss {:.4g}"),
    ("tokens_per_s", "{:,.0f} tok/s"),
    ("time/step_s", "{:.2f} s"),
)


@contextmanager
def progress(run: Run) -> Iterator[Show]:
    """Gives the function to call with every event."""
    if not sys.stderr.isatty():
        yield _plain(run)
        return
    from rich.console import Console
    from rich.live import Live

    console = Console(stderr=True, no_color=not wants_colour(sys.stderr), highlight=False)
    screen = _Screen(run)
    with Live(screen, console=console, refresh_per_second=4, transient=True):

        def show(event: RunEvent) -> None:
            screen.update(event)
            kind = event.WhichOneof("event")
            if kind == "notice":
                console.print(_notice_line(event.notice), markup=False)
            elif kind == "step" and "eval/accuracy" in event.step.metrics:
                console.print(_step_line(event.step, screen.run.total_steps), markup=False)

        yield show


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
        for _ in range(6):
            line.add_column(no_wrap=True)
        bar = ProgressBar(total=max(run.total_steps, 1), completed=run.step, width=24)
        eta = f"ETA {duration(run.eta_seconds)}" if run.eta_seconds > 0 else ""
        line.add_row(run.run_id, bar, f"{run.step}/{run.total_steps}", _figures(self.metrics), run.phase, eta)
        return line


def _plain(run: Run) -> Show:
    """One line a step, an evaluation, a notice and a change of state."""
    seen = {"state": run.state, "total": run.total_steps}

    def show(event: RunEvent) -> None:
        kind = event.WhichOneof("event")
        if kind == "step":
            say(_step_line(event.step, seen["total"]))
        elif kind == "notice":
            say(_notice_line(event.notice))
        elif kind == "run":
            seen["total"] = event.run.total_steps
            if event.run.state != seen["state"]:
                seen["state"] = event.run.state
                say(_state_line(event.run))

    return show


def _step_line(step: StepMetrics, total: int) -> str:
    return f"step {step.step}/{total}  {_figures(dict(step.metrics))}"


def _figures(metrics: dict[str, float]) -> str:
    return "  ".join(shape.format(metrics[name]) for name, shape in _SHOWN if name in metrics)


def _notice_line(notice: Notice) -> str:
    from flotilla.coordinator.v1.run_pb2 import NoticeLevel

    return f"{NoticeLevel.Name(notice.level).removeprefix('NOTICE_LEVEL_').lower()}: {notice.text}"


def _state_line(run: Run) -> str:
    from flotilla_coordinator.cli.run import state_name

    return f"{state_name(run)}: {run.phase}" if run.phase else state_name(run)

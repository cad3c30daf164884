"""Shows the progress of a run until it ends, and prints runs and plans for `flotilla run`.

Invariants: progress goes to stderr, as one live line on a terminal and as plain lines elsewhere. The remaining time is
an estimate and called so. A log gets every
notice (evaluations among them), the first and the last step, and between them at most one line in STEP_LINE_S. So a
run of thousands of quick steps takes one page. Nothing is repeated.
"""

from __future__ import annotations

import gc
import json
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from typing import TYPE_CHECKING, Any

import typer

from flotilla.coordinator.v1.run_pb2 import (
    NOTICE_LEVEL_ERROR,
    NOTICE_LEVEL_WARNING,
    RUN_STATE_FAILED,
    Notice,
    NoticeLevel,
    Plan,
    Run,
    RunEvent,
    StepMetrics,
)
from flotilla_cli.options import RUN_FAILED, wait
from flotilla_cli.output import (
    console_on,
    duration,
    finding_json,
    print_json,
    print_line,
    print_table,
    say,
    state_name,
    version_text,
)
from flotilla_cli.stack import client_of
from flotilla_core.evaluations import ACCURACY, WORDS, before_and_after, told
from flotilla_trackers import SHOWS

if TYPE_CHECKING:
    from rich.table import Table

    from flotilla_client import Client
    from flotilla_coordinator.views.metrics import Comparison, Reached

Show = Callable[["RunEvent"], None]
STEP_LINE_S = 5.0
MOST_SHOWN_AGAIN = 3
LONGEST_AGAIN = 200
_SHOWN = (
    ("reward/mean", "reward {:.3f}"),
    ("loss", "loss {:.4g}"),
    ("tokens_per_s", "{:,.0f} tok/s"),
    ("time/step_s", "{:.2f} s"),
)


def stay_with(run_id: str, stack: str | None, coordinator: str | None, *, as_json: bool) -> None:
    """Show progress on stderr until the run ends, then the run; exit with code 1 when it failed."""
    told = Told()
    gc.set_threshold(50_000)  # Whoever follows a run for days must not keep the garbage of days.

    async def stay() -> Run:
        async with client_of(stack, coordinator) as client:
            started = await client.get_run(run_id)
            with progress(started) as show:
                async for event in client.watch_run(started.run_id, tell=say):
                    told.note(event)
                    show(event)
            return await client.get_run(started.run_id)

    detached = f"detached; the run continues. Follow it again: flotilla run watch {run_id}"
    ended = wait(stay(), interrupted=detached)
    if as_json:
        print_json(run_json(ended))
    say(f"run {ended.run_id} {state_name(ended)}" + (f": {ended.reason}" if ended.reason else ""))
    for line in (*before_and_after(ended.metrics), *told.lines()):
        say(line)
    if ended.advice:
        say(f"advice: {ended.advice}")
    say(f"files: {ended.directory}")
    if ended.state == RUN_STATE_FAILED:
        raise typer.Exit(RUN_FAILED)


class Told:
    """Collects the notices of a run that are worth a look once it has ended."""

    def __init__(self) -> None:
        self._warnings: dict[str, int] = {}
        self._errors: dict[str, int] = {}
        self._shown: dict[str, None] = {}
        """The notices that say where trackers show the run."""

    def note(self, event: RunEvent) -> None:
        """Keep a notice that matters at the end."""
        if event.WhichOneof("event") != "notice":
            return
        level, text = event.notice.level, event.notice.text
        if level in (NOTICE_LEVEL_WARNING, NOTICE_LEVEL_ERROR):
            kept = self._errors if level == NOTICE_LEVEL_ERROR else self._warnings
            kept[text] = kept.pop(text, 0) + 1
        elif SHOWS in text:
            self._shown[text] = None

    def lines(self) -> list[str]:
        """Return the last errors and warnings, each once, and where trackers show the run."""
        made = []
        for name, kept in (("error", self._errors), ("warning", self._warnings)):
            if not kept:
                continue
            made.append(f"{sum(kept.values())} {name}{'s' if sum(kept.values()) > 1 else ''}; the last:")
            for text in list(kept)[-MOST_SHOWN_AGAIN:]:
                times = f" ({kept[text]} times)" if kept[text] > 1 else ""
                made.append(f"  {textwrap.shorten(text, LONGEST_AGAIN, placeholder=' ...')}{times}")
        return [*made, *self._shown]


async def remarks(client: Client, run_id: str) -> list[str]:
    """Return the coordinator's notices at the start, up to the first activity of the run."""
    said = []
    async with aclosing(client.watch_run(run_id)) as events:
        async for event in events:
            if event.WhichOneof("event") != "notice":
                break
            said.append(notice_line(event.notice))
    return said


@contextmanager
def progress(run: Run) -> Iterator[Show]:
    """Yield the function to call with every event."""
    if not sys.stderr.isatty():
        yield _Lines(run).show
        return
    from rich.live import Live

    console = console_on(sys.stderr)
    screen = _Screen(run)
    with Live(screen, console=console, refresh_per_second=4, transient=True):

        def show(event: RunEvent) -> None:
            screen.update(event)
            if event.WhichOneof("event") == "notice":
                console.print(notice_line(event.notice))

        yield show


def notice_line(notice: Notice) -> str:
    """Return the text of a notice, with its level where that is not info."""
    level = NoticeLevel.Name(notice.level).removeprefix("NOTICE_LEVEL_").lower()
    return notice.text if level == "info" else f"{level}: {notice.text}"


class _Screen:
    """The live line on a terminal."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.metrics: dict[str, float] = dict(run.metrics)
        self._estimated_at = time.monotonic()

    def update(self, event: RunEvent) -> None:
        kind = event.WhichOneof("event")
        if kind == "run":
            if event.run.eta_seconds != self.run.eta_seconds:
                self._estimated_at = time.monotonic()
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
        # On a terminal the newest evaluation stays in sight; a log has a line for each.
        figures = "  ".join([*_figures(self.metrics)[:1], *self._held_out()])
        left = _time_left(run.eta_seconds - (time.monotonic() - self._estimated_at))
        line.add_row(bar, f"{run.step}/{run.total_steps}", figures, run.phase, left)
        return line

    def _held_out(self) -> list[str]:
        if ACCURACY not in self.metrics:
            return []
        name = told(self.metrics)[0]
        return [f"held-out {WORDS[name]} {self.metrics[name]:.3f}"]


class _Lines:
    """Prints lines for steps at intervals, and for every evaluation, notice and change of state."""

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
        figures = _figures(step.metrics)
        left = _time_left(self._time_left) if step.step < self._total else ""
        say("  ".join(part for part in (f"step {step.step}/{self._total}", *figures, left) if part))

    def _run(self, run: Run) -> None:
        self._total, self._time_left = run.total_steps, run.eta_seconds
        # The steps show that it runs, and the command prints its end, with the reason.
        name = state_name(run)
        if name not in (self._state, "running") and not run.HasField("ended_at"):
            say(name if run.phase in ("", name) else f"{name}: {run.phase}")
        self._state = name


def _figures(metrics: Mapping[str, float]) -> list[str]:
    return [shape.format(metrics[name]) for name, shape in _SHOWN if name in metrics]


def _time_left(seconds: float) -> str:
    return f"about {duration(seconds)} left" if seconds > 0 else ""


def run_json(run: Run) -> dict[str, Any]:
    """Describe a run in the output of all `run` commands."""
    return {
        "run_id": run.run_id,
        "name": run.name,
        "state": state_name(run),
        "phase": run.phase,
        "step": run.step,
        "total_steps": run.total_steps,
        "policy_version": version_text(run.policy_version) if run.HasField("policy_version") else None,
        "created_at": run.created_at.ToJsonString() if run.HasField("created_at") else None,
        "ended_at": run.ended_at.ToJsonString() if run.HasField("ended_at") else None,
        "reason": run.reason,
        "finding": finding_json(run.finding) if run.HasField("finding") else None,
        "advice": run.advice,
        "directory": run.directory,
        "metrics": dict(sorted(run.metrics.items())),
    }


def print_comparison(runs: Sequence[Run], compared: Comparison) -> None:
    """Print two runs side by side: what differs, what they reached, and curves."""
    from flotilla_coordinator.views.metrics import finite, text_curves

    rows = [
        (mark, run.run_id, state_name(run), f"{run.step}/{run.total_steps}", run.directory)
        for mark, run in zip("ab", runs, strict=True)
    ]
    print_table(("", "RUN", "STATE", "STEP", "DIRECTORY"), rows)
    print_line("" if compared.settings else "\nno setting differs")
    if compared.settings:
        settings = [(key, json.dumps(left), json.dumps(right)) for key, left, right in compared.settings]
        print_table(("SETTING", "A", "B"), settings)
    print_line("")

    def best(one: Reached | None) -> str:
        return "" if one is None or one.best is None else f"{one.best:.4g} at {one.best_step}"

    print_table(
        ("METRIC", "A LAST", "B LAST", "A BEST", "B BEST"),
        [
            (name, *("" if one is None else f"{one.last:.4g}" for one in both), *map(best, both))
            for name, both in compared.figures.items()
        ],
    )
    for name in compared.drawn:
        series = [finite(one.get(name, {})) for one in compared.curves]
        if any(series):
            print_line(f"\n{name}, a and b by step (* is both)")
            print_line("\n".join(text_curves(*series)))


def print_plan(plan: Plan, *, as_json: bool) -> None:
    """Print the lines of a plan as a table, then its warnings, and last the reasons against the run."""
    if as_json:
        lines = [{"name": n.name, "value": n.value, "explanation": n.explanation} for n in plan.lines]
        texts = {"warnings": list(plan.warnings), "errors": list(plan.errors)}
        print_json({"lines": lines, **texts, "findings": [finding_json(one) for one in plan.findings]})
        return
    if plan.lines:
        print_table(("WHAT", "VALUE", "HOW"), [(n.name, n.value, n.explanation) for n in plan.lines])
    for warning in plan.warnings:
        say(f"warning: {warning}")
    for error in plan.errors:
        say(f"error: {error}")

"""The state of one run as users see it, while it is active and after its end.

Invariants: every change is an event in the log, and the end is in the ledger as well. The estimate of the remaining
time uses medians, so that one slow step does not distort it, and counts evaluations and checkpoints by themselves.
While a disk is full, an active run is shown as PAUSED, with the disk as its phase and reason; its own state is kept
underneath.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path

from flotilla.common.v1.finding_pb2 import SEVERITY_WARNING, Finding
from flotilla.coordinator.v1 import run_pb2
from flotilla_coordinator.evaluation.evaluate import Evaluation
from flotilla_coordinator.ledger.records import RunRecord
from flotilla_coordinator.records.directory import RunDirectory
from flotilla_coordinator.records.report import conclude
from flotilla_coordinator.runs.events import EventLog
from flotilla_coordinator.runs.warnings import LearningSignal
from flotilla_coordinator.views.metrics import add_evaluation
from flotilla_coordinator.views.runs import TERMINAL, give_reason, interrupted_run
from flotilla_core.errors import DiskFull
from flotilla_core.evaluations import held_out_text
from flotilla_core.findings import info, text_of, warning
from flotilla_core.logger import get_logger
from flotilla_core.version import Version

RECENT_STEPS = 20
PROGRESS_EVENT_S = 10.0
PROGRESS_NOTICE_S = 60.0
"""The time between notices of how far the service is that a run waits for. Those who follow the run read them, and each
is an event that is kept."""
OCCASIONS = ("evaluate", "checkpoint")
"""The phases that come at some steps only, and may take longer than a step."""
WAITS_FOR_DISK = "wait for disk space"
GOES_ON = (run_pb2.RUN_STATE_PENDING, run_pb2.RUN_STATE_RUNNING, run_pb2.RUN_STATE_PAUSED)

log = get_logger(__name__)


class RemainingTime:
    """Estimates how long the remaining steps, evaluations and checkpoints take, from those that were made here."""

    def __init__(self) -> None:
        self._steps: deque[float] = deque(maxlen=RECENT_STEPS)
        self._occasions: dict[str, deque[float]] = {name: deque(maxlen=RECENT_STEPS) for name in OCCASIONS}
        self._warm = False

    def took(self, phase: str, seconds: float) -> None:
        """Note the duration of a phase."""
        if phase in self._occasions:
            self._occasions[phase].append(seconds)

    def step_took(self, metrics: Mapping[str, float]) -> None:
        """Note the duration of a step; the first one here counts until there is another, for it may compile."""
        if len(self._steps) == 1 and not self._warm:
            self._steps.clear()
            self._warm = True
        apart = sum(metrics.get(f"time/{name}_s", 0.0) for name in OCCASIONS)
        self._steps.append(max(0.0, metrics["time/step_s"] - apart))

    def estimate(self, steps: int, occasions: Mapping[str, int]) -> float:
        """Return the seconds of so many steps and occasions."""
        if not self._steps:
            return 0.0
        times = ((self._occasions[name], count) for name, count in occasions.items())
        return statistics.median(self._steps) * steps + sum(
            statistics.median(took) * count for took, count in times if took
        )


class RunStatus:
    """Holds the `Run` message and announces its changes."""

    def __init__(self, run: run_pb2.Run, events: EventLog, *, learns_by_rewards: bool = True) -> None:
        self.run = run
        self._events = events
        self.remaining = RemainingTime()
        self._signal = LearningSignal() if learns_by_rewards else None
        self._state, self._reason, self._phase = run.state, Finding(), run.phase
        self._progress: dict[str, str] = {}
        """The work of the services that the run waits for in its present phase, by their names."""
        self._told_at = self._noticed_at = 0.0
        self._shown = (self._state, self._phase)
        self._full: dict[str, DiskFull] = {}
        """The writes for which a disk has no room, and the error of each."""

    def enter(self, phase: str) -> None:
        """Begin a phase of the loop."""
        self._phase = phase
        self._show()
        # Thousands of phases are kept as events, and the steps' own events have the metrics.
        self._announce(metrics=False)

    def progress(self, who: str, what: str) -> None:
        """Show what a service does while the run waits for it; nothing where the wait is over."""
        now = time.monotonic()
        if not what:
            self._progress.pop(who, None)
            self._show()
            return
        if not self._progress:
            self._told_at = self._noticed_at = now
        self._progress[who] = what
        self._show()
        if now - self._told_at >= PROGRESS_EVENT_S:
            self._told_at = now
            self._announce(metrics=False)
        if now - self._noticed_at >= PROGRESS_NOTICE_S:
            self._noticed_at = now
            self.notice(info(self.run.phase))

    def set_state(self, state: run_pb2.RunState.ValueType, reason: Finding | None = None) -> None:
        """Change the state of the run."""
        self._state, self._reason = state, reason or Finding()
        if state in TERMINAL:
            self._phase = ""
            self.run.eta_seconds = 0
            if self._signal is not None and (verdict := self._signal.verdict(self.run.step)):
                self.run.advice = verdict
            self.run.ended_at.FromNanoseconds(time.time_ns())
        self._show()
        self._announce()

    def wait_for_disk(self, what: str, full: DiskFull) -> None:
        """Show that the run cannot continue before the disk has room for `what`."""
        is_news = not self._full
        self._full[what] = full
        if is_news and self._state in GOES_ON:
            before = "the run is paused and continues by itself when the disk has room"
            self.notice(full.finding(before, SEVERITY_WARNING))
        if is_news:
            self._show()
            self._announce(metrics=False)

    def disk_has_room(self, what: str) -> None:
        """Note that `what` was written; the run then waits for the next thing that was not, and says so."""
        shown = next(iter(self._full), None)
        if self._full.pop(what, None) is None or shown != what:
            return
        self._show()
        if not self._full and self._state in GOES_ON:
            self.notice(info("the disk has room again, and the run continues"))
        self._announce(metrics=False)

    @property
    def waits_for_disk(self) -> bool:
        """Return whether the run would continue if a disk had room."""
        return bool(self._full) and self._state in GOES_ON

    @property
    def ended(self) -> bool:
        """Return whether the run has ended."""
        return self.run.state in TERMINAL

    def step_done(
        self,
        steps_done: int,
        version: Version,
        metrics: dict[str, float],
        occasions: Mapping[str, int] | None = None,
    ) -> None:
        """Add one more step, with its metrics; `occasions` says how many evaluations and checkpoints are to come."""
        if "time/step_s" in metrics:  # one that a dead coordinator did not end has none
            self.remaining.step_took(metrics)
        self.run.step = steps_done
        self.run.policy_version.CopyFrom(version.to_proto())
        left = max(0, self.run.total_steps - steps_done)
        self.run.eta_seconds = self.remaining.estimate(left, occasions or {})
        for name, value in metrics.items():
            self.run.metrics[name] = value
        self._events.append(
            run_pb2.RunEvent(step=run_pb2.StepMetrics(step=steps_done, metrics=dict(metrics)))
        )
        if self._signal is not None and (found := self._signal.step_done(steps_done, metrics)):
            self.notice(warning(found))

    def reconfigured(self, total_steps: int, changes: str) -> None:
        """Announce that the run continues with other settings."""
        self.run.total_steps = total_steps
        self.notice(info(f"from step {self.run.step} on: {changes}"))
        self._announce(metrics=False)

    def advise(self, advice: str) -> None:
        """Show advice that would help the run; empty removes it."""
        if advice != self.run.advice:
            self.run.advice = advice
            self._announce(metrics=False)

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        """Add one more evaluation."""
        if self._signal is not None:
            self._signal.evaluated(evaluation.accuracy)
        add_evaluation(self.run, step, evaluation.figures)
        self.notice(info(f"{held_out_text(evaluation.figures)} after {step} steps"))

    def notice(self, finding: Finding) -> None:
        """Announce something that a user should read."""
        level = run_pb2.NoticeLevel.ValueType(finding.severity)
        notice = run_pb2.Notice(level=level, text=text_of(finding), finding=finding)
        self._events.append(run_pb2.RunEvent(notice=notice))

    def _show(self) -> None:
        """Set the shown state, phase and reason, with a full disk above the run's own."""
        state, reason, phase = self._state, self._reason, self._phase
        if self.waits_for_disk:
            full = next(iter(self._full.values()))
            state, reason, phase = run_pb2.RUN_STATE_PAUSED, full.finding(), WAITS_FOR_DISK
        if (state, phase) != self._shown:
            self.run.phase_since.FromNanoseconds(time.time_ns())
            self._shown = state, phase
        if self._progress and not self.waits_for_disk:
            phase = f"{phase}: " + "; ".join(f"{who} is {what}" for who, what in self._progress.items())
        self.run.state, self.run.phase = state, phase
        give_reason(self.run, reason)

    def _announce(self, *, metrics: bool = True) -> None:
        snapshot = run_pb2.Run()
        snapshot.CopyFrom(self.run)
        if not metrics:
            snapshot.ClearField("metrics")
        self._events.append(run_pb2.RunEvent(run=snapshot))


def continued_run(record: RunRecord) -> run_pb2.Run:
    """Return a run that is about to continue, with its metrics so far and without an end."""
    run = interrupted_run(record)
    run.state = run_pb2.RUN_STATE_PENDING
    give_reason(run, Finding())
    run.ClearField("ended_at")
    return run


def record_end(run: run_pb2.Run) -> None:
    """Complete the directory of an interrupted run like any other: the last event, the outcome, logs and plots."""
    directory = RunDirectory(Path(run.directory))
    event = run_pb2.RunEvent(sequence=directory.last_sequence() + 1, run=run)
    event.time.GetCurrentTime()
    try:
        directory.write_event(event)
        conclude(directory, run)
    # A full disk or a missing directory is no reason for the coordinator not to start.
    except OSError as error:
        log.warning("the end of a run was not recorded whole", run_id=run.run_id, error=str(error))

"""The state of one run as users see it.

Invariants: every change is an event in the feed, and the end is in the ledger as well; the estimate of the
remaining time uses the median of recent steps, so that one slow step does not frighten anybody.
"""

from __future__ import annotations

import statistics
import time
from collections import deque

from flotilla.coordinator.v1 import run_pb2
from flotilla_coordinator.evaluation.evaluation import Evaluation
from flotilla_coordinator.runs.feed import RunFeed
from flotilla_coordinator.runs.learning_signal import LearningSignal
from flotilla_core.version import Version

RECENT_STEPS = 20
TERMINAL = (run_pb2.RUN_STATE_SUCCEEDED, run_pb2.RUN_STATE_STOPPED, run_pb2.RUN_STATE_FAILED)


class RunStatus:
    """Holds the `Run` message and announces its changes."""

    def __init__(self, run: run_pb2.Run, feed: RunFeed, *, learns_by_rewards: bool = True) -> None:
        self.run = run
        self._feed = feed
        self._durations: deque[float] = deque(maxlen=RECENT_STEPS)
        self._signal = LearningSignal() if learns_by_rewards else None

    def enter(self, phase: str) -> None:
        """The loop begins a phase."""
        self.run.phase = phase
        self.run.phase_since.FromNanoseconds(time.time_ns())
        # Thousands of phases are kept as events, and the steps' own events carry the metrics.
        self._announce(metrics=False)

    def set_state(self, state: run_pb2.RunState.ValueType, reason: str = "") -> None:
        """Begin, stop, end."""
        self.run.state = state
        self.run.reason = reason
        if state in TERMINAL:
            self.run.phase = ""
            self.run.eta_seconds = 0
            self.run.ended_at.FromNanoseconds(time.time_ns())
        self._announce()

    @property
    def ended(self) -> bool:
        """Whether the run is over."""
        return self.run.state in TERMINAL

    def step_done(self, steps_done: int, version: Version, metrics: dict[str, float]) -> None:
        """One more step, with its metrics."""
        self._durations.append(metrics["time/step_s"])
        self.run.step = steps_done
        self.run.policy_version.CopyFrom(version.to_proto())
        self.run.eta_seconds = statistics.median(self._durations) * max(0, self.run.total_steps - steps_done)
        for name, value in metrics.items():
            self.run.metrics[name] = value
        self._feed.append(run_pb2.RunEvent(step=run_pb2.StepMetrics(step=steps_done, metrics=dict(metrics))))
        if self._signal is not None and (warning := self._signal.step_done(steps_done, metrics)):
            self.notice(run_pb2.NOTICE_LEVEL_WARNING, warning)

    def reconfigured(self, total_steps: int, changes: str) -> None:
        """The run goes on by other settings."""
        self.run.total_steps = total_steps
        self.notice(run_pb2.NOTICE_LEVEL_INFO, f"from step {self.run.step} on: {changes}")
        self._announce(metrics=False)

    def advise(self, advice: str) -> None:
        """What would help the run; empty where nothing would."""
        if advice != self.run.advice:
            self.run.advice = advice
            self._announce(metrics=False)

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        """One more evaluation."""
        accuracy = evaluation.accuracy
        if self._signal is not None:
            self._signal.evaluated(accuracy)
        if "eval/accuracy_before" not in self.run.metrics:
            self.run.metrics["eval/accuracy_before"] = accuracy
        self.run.metrics["eval/accuracy"], self.run.metrics["eval/step"] = accuracy, step
        for name, value in evaluation.metrics.items():
            self.run.metrics[name] = value
        self.notice(run_pb2.NOTICE_LEVEL_INFO, f"held-out accuracy {accuracy:.3f} after {step} steps")

    def notice(self, level: run_pb2.NoticeLevel.ValueType, text: str) -> None:
        """Something that a user should read."""
        self._feed.append(run_pb2.RunEvent(notice=run_pb2.Notice(level=level, text=text)))

    def _announce(self, *, metrics: bool = True) -> None:
        snapshot = run_pb2.Run()
        snapshot.CopyFrom(self.run)
        if not metrics:
            snapshot.ClearField("metrics")
        self._feed.append(run_pb2.RunEvent(run=snapshot))

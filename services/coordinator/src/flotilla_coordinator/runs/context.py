"""Holds what the loop of a run works with: its parts, its progress, and their records.

Invariants: phases never overlap, and their seconds are part of the step's metrics; everything that a user sees of a run
(status, events, metrics file, ledger row) is written here and nowhere else.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from flotilla.coordinator.v1 import run_pb2
from flotilla_coordinator.evaluation.evaluate import Evaluation, Evaluator, PairEvaluator
from flotilla_coordinator.evaluation.pinned_evaluation import PinnedEvaluation
from flotilla_coordinator.fleet.autoscale import Autoscaler, IdleShares
from flotilla_coordinator.fleet.run_fleet import SleepingGenerators
from flotilla_coordinator.ledger.ledger import Ledger
from flotilla_coordinator.ledger.records import DropReason
from flotilla_coordinator.records.directory import RunDirectory
from flotilla_coordinator.records.rollouts import RolloutRecord
from flotilla_coordinator.rollouts.batch import Batch, BatchSource
from flotilla_coordinator.rollouts.episodes import EpisodeFigures
from flotilla_coordinator.rollouts.judges import JudgeTally
from flotilla_coordinator.rollouts.reward_models import RewardModel
from flotilla_coordinator.rollouts.samples import SampleValidator
from flotilla_coordinator.runs.checkpoints import Progress, RunCheckpoints
from flotilla_coordinator.runs.control import RunControl, described, differences
from flotilla_coordinator.runs.disk_waits import DiskWaits
from flotilla_coordinator.runs.status import RunStatus
from flotilla_coordinator.runs.warnings import narrow_clip_warning, policy_mismatch_warning
from flotilla_coordinator.trainers.learners import Learners, StepUpdates
from flotilla_coordinator.trainers.roles import PolicyTrainer
from flotilla_coordinator.weights.sync import WeightSync
from flotilla_core import telemetry
from flotilla_core.config import RunConfig, StackConfig
from flotilla_core.findings import warning
from flotilla_core.service import Activities
from flotilla_core.telemetry import names
from flotilla_core.version import Version

ASK_EVERY_S = 0.02
MOST_UNSCORED_NOTICES = 3
"""A reward that fails now and then fails for the same few reasons."""


class LoopLag:
    """Measures the delay of the event loop, which every call and every timer shares.

    It schedules a timer again and again, until `close`.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._late_s: list[float] = []
        self._ask()

    def take_metrics(self) -> dict[str, float]:
        """Return the 99th percentile and the maximum since the last call."""
        late_s, self._late_s = sorted(self._late_s), []
        if not late_s:
            return {}
        return {
            "coordinator/loop_lag_p99_s": late_s[len(late_s) * 99 // 100],
            "coordinator/loop_lag_max_s": late_s[-1],
        }

    async def close(self) -> None:
        """Stop measuring."""
        self._timer.cancel()

    def _ask(self) -> None:
        self._due = self._loop.time() + ASK_EVERY_S
        self._timer = self._loop.call_at(self._due, self._answered)

    def _answered(self) -> None:
        self._late_s.append(max(0.0, self._loop.time() - self._due))
        self._ask()


@dataclass
class RunContext:
    """One run and all its parts."""

    run_id: str
    config: RunConfig
    """The configuration of the present step."""
    stack: StackConfig
    control: RunControl
    learners: Learners
    source: BatchSource
    sync: WeightSync
    evaluator: Evaluator | PairEvaluator | None
    checkpoints: RunCheckpoints
    ledger: Ledger
    directory: RunDirectory
    status: RunStatus
    activities: Activities
    idle: IdleShares
    validator: SampleValidator = field(default_factory=SampleValidator)
    episodes: EpisodeFigures | None = None
    """What became of episodes; None where samples are single responses."""
    reward_models: Mapping[str, RewardModel] = field(default_factory=dict)
    """The models that give rewards, by their names."""
    judges: JudgeTally = field(default_factory=JudgeTally)
    rollouts: RolloutRecord | None = None
    """The record of all that training needs of its samples, where the run keeps one."""
    autoscaler: Autoscaler | None = None
    pinned: PinnedEvaluation | None = None
    """The evaluation on a pinned generator, where the run has one."""
    sleeping_generators: SleepingGenerators | None = None
    """The generators that leave memory to the trainer during updates; None where none do."""
    begun: bool = False
    """True once the run has reached its start point."""
    owes_evaluation: bool = False
    """True where the steps done call for an evaluation that has not been made."""
    update_unrecorded: bool = False
    """True where the gangs made an update that the ledger does not have: that step comes first."""
    steps_done: int = 0
    steps_recorded: int = 0
    """The steps done that this coordinator has recorded in the ledger; the last one may not have ended."""
    last_accuracy: float | None = None
    cursor: dict[str, Any] | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    canary_figures: dict[str, float] = field(default_factory=dict)
    """The figures of the last live check."""
    lag: LoopLag = field(default_factory=LoopLag)
    disk: DiskWaits = field(init=False)
    """Repeats a write until the disk has room for it."""
    _evaluated_version: Version | None = None
    _told_unscored: set[str] = field(default_factory=set)
    """Reasons for which samples had no reward, as notices told them; each is told once."""

    def __post_init__(self) -> None:
        self.disk = DiskWaits(self.status, self.control)

    @property
    def policy(self) -> PolicyTrainer:
        """Return the session of the model that the run trains."""
        return self.learners.policy

    @property
    def stop_requested(self) -> bool:
        """Return whether the run was told to make no further step."""
        return self.control.stop_requested

    async def wait_for_next_step(self) -> bool:
        """Apply the user's changes between two steps, and wait out a pause; return whether a step follows."""
        self.control.over = False
        self._take_configuration()
        if self.control.waits:
            with self.phase("paused"):
                self.status.set_state(run_pb2.RUN_STATE_PAUSED)
                await self.sync.keep_serving(self._pause())
            if not self.stop_requested:
                self.status.set_state(run_pb2.RUN_STATE_RUNNING)
        return not self.stop_requested and self.steps_done < self.config.steps

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name the loop's present phase, and add its seconds to the step's metrics."""
        started = time.monotonic()
        self.status.enter(name)
        try:
            with self.activities.doing(name, run_id=self.run_id):
                yield
        finally:
            key, took_s = f"time/{name.replace(' ', '_')}_s", time.monotonic() - started
            self.metrics[key] = self.metrics.get(key, 0.0) + took_s
            self.status.remaining.took(name, took_s)

    @asynccontextmanager
    async def generators_asleep(self) -> AsyncIterator[None]:
        """Have the generators sleep inside the block, where the stack says so.

        Where the block fails, they wake when they join a weight group again.
        """
        if self.sleeping_generators is None:
            yield
            return
        with self.phase("sleep"):
            await self.sleeping_generators.put_to_sleep()
        yield
        with self.phase("wake"):
            await self.sleeping_generators.wake()

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Measure one step of the built-in loop, in a span."""
        self.metrics.clear()
        self.idle.begin()
        started = time.monotonic()
        try:
            with telemetry.span(names.RL_STEP, attributes={names.RUN_ID: self.run_id, names.STEP: step}):
                yield
        finally:
            # A step of the ledger is in every record, whatever ended it: a failed evaluation, a lost gang, a stop.
            if self.steps_recorded > step and not self.ledger.lost:
                if self.source.samples_from_policy:
                    self.metrics.update(self.idle.metrics(self.metrics["time/rollout_s"]))
                self.end_step(step, time.monotonic() - started)
        if self.autoscaler is not None:
            self.autoscaler.step_done(self.metrics)

    def end_step(self, step: int, seconds: float) -> None:
        """Complete the metrics of a step, and write them to every record."""
        self.metrics["time/step_s"] = seconds
        self.metrics["ledger/backlog"] = float(self.ledger.backlog)
        tokens = self.metrics.get("tokens/response_total", self.metrics.get("tokens/trained", 0.0))
        self.metrics["tokens_per_s"] = tokens / self.metrics["time/step_s"]
        self.metrics |= self.canary_figures | self.metrics
        self.metrics.update(self.lag.take_metrics())
        self.metrics.update(self.checkpoints.take_metrics())
        self.metrics.update(self.validator.take_metrics())
        if self.episodes is not None:
            self.metrics.update(self.episodes.take())
        self.metrics |= {f"reward/cut/{name}": one.take_cut() for name, one in self.reward_models.items()}
        self.metrics.update(self.judges.take_metrics())
        self.steps_done = step + 1
        self.directory.write_metrics(step, self.metrics, lineage=self.policy.version.lineage)
        self.status.step_done(self.steps_done, self.policy.version, self.metrics, self.occasions())

    def occasions(self) -> dict[str, int]:
        """Return how many evaluations and checkpoints are to come, those at the end of the run among them."""

        def to_come(every: int) -> int:
            last = self.config.steps // every + (self.config.steps % every > 0) if every else 1
            return last - (self.steps_done // every if every else 0)

        evaluation, save_every = self.config.evaluation, self.config.checkpoint.every_steps
        return {
            "evaluate": 0 if evaluation is None or evaluation.pinned else to_come(evaluation.every_steps),
            "checkpoint": to_come(save_every) if save_every else 0,
        }

    async def wait_for_canary(self) -> None:
        """Wait until the version that the generators serve has passed its live check; raise where it does not."""
        if self.sync.checking:
            with self.phase("wait for the canary"):
                await self.sync.settled()
        await self.sync.settled()
        # The first ones of a step stay: those of the version that its update begins from.
        self.metrics |= self.canary_figures | self.metrics

    async def record_update(self, step: int, version: Version, batch: Batch, updates: StepUpdates) -> None:
        """Record the update: its samples are consumed, or dropped where the policy did not learn from them."""
        self.metrics.update(batch.metrics)
        self.metrics.update(updates.metrics)
        mismatch = policy_mismatch_warning(self.policy.agreement, updates.metrics)
        for text in filter(None, (mismatch, narrow_clip_warning(self.config, version, updates.metrics))):
            self.status.notice(warning(text))
        for update, why in updates.skipped.items():
            self.status.notice(warning(f"{update} skipped: {why}"))
        for skipped in updates.skipped_steps:
            self.status.notice(warning(f"optimizer step skipped: {skipped}"))
        self._tell_unscored(batch.unscored)
        self.cursor, result = batch.cursor, self.policy.version
        recorded = self._record_of(batch, updates, version)
        if self.source.samples_from_policy:
            # The samples are written before the ledger, which never repeats a step that it has; and only by the run's
            # owner.
            await self.ledger.check_owner()
            rewards = [term.shown for term in self.config.rewards]
            await self.disk.until_taken(
                "samples", lambda: asyncio.to_thread(self.directory.write_samples, batch, rewards)
            )
            await self._write_rollouts(batch, version)
        # A coordinator that dies before the end of the step leaves its metrics here, as they are by now.
        await recorded(result=result, step=step + 1, cursor=self.cursor, metrics=dict(self.metrics))
        self.steps_recorded = step + 1

    async def _write_rollouts(self, batch: Batch, version: Version) -> None:
        record = self.rollouts
        if record is not None:
            await self.disk.until_taken("rollouts", lambda: asyncio.to_thread(record.write, batch, version))

    def _record_of(
        self, batch: Batch, updates: StepUpdates, version: Version
    ) -> Callable[..., Awaitable[None]]:
        """Return how the ledger records a step: with its samples, where it has them."""
        if not self.source.samples_from_policy:
            return partial(self.ledger.went_on, self.run_id)
        sample_ids, policy = [sample.sample_id for sample in batch.samples], updates.policy
        if policy is None or policy.skipped:
            reason = DropReason.CRITIC_ONLY if policy is None else DropReason.UPDATE_SKIPPED
            return partial(self.ledger.passed_by, self.run_id, sample_ids, reason)
        return partial(self.ledger.consumed, self.run_id, policy.update_id, sample_ids, version)

    async def export(self) -> None:
        """Export the policy as a folder, as soon as the disk has room."""
        with self.phase("export"):
            path, dtype = self.directory.model_path, self.config.export_dtype
            await self.disk.until_taken("export", lambda: self.policy.export(path, dtype))

    def progress(self, steps_done: int) -> Progress:
        """Return the progress of the run after so many steps."""
        return Progress(self.run_id, steps_done, self.policy.version, self.cursor, self.last_accuracy)

    def restore(self, progress: Progress) -> None:
        """Take the progress of an earlier part of the run."""
        self.steps_done = self.checkpoints.newest = progress.steps_done
        self.cursor, self.last_accuracy = progress.cursor, progress.last_accuracy
        self.status.run.step = progress.steps_done
        self.status.run.policy_version.CopyFrom(self.policy.version.to_proto())

    @property
    def evaluates_generated(self) -> bool:
        """Return whether evaluations need the generators."""
        return self.evaluator is not None and self.evaluator.needs_generators

    def take_no_changes(self) -> None:
        """Accept no further changes, because the last step is made."""
        self.control.over = True

    async def _pause(self) -> None:
        while self.control.waits:
            await self.control.changed()
            self._take_configuration()

    def _take_configuration(self) -> None:
        """Apply the newest configuration."""
        changes = differences(self.config, self.control.config)
        self.config = self.control.config
        if not changes:
            return
        self.learners.reconfigure(self.config)
        self.source.reconfigure(self.config)
        self.checkpoints.reconfigure(self.config.checkpoint)
        self.status.reconfigured(self.config.steps, described(changes))

    def evaluation_due(self, steps_done: int) -> bool:
        """Return whether an evaluation is scheduled after so many steps."""
        evaluation = self.config.evaluation
        return (
            evaluation is not None and evaluation.every_steps > 0 and steps_done % evaluation.every_steps == 0
        )

    def evaluated(self, version: Version) -> bool:
        """Return whether this version has been evaluated."""
        return self._evaluated_version == version

    async def record_evaluation(self, step: int, version: Version, evaluation: Evaluation) -> None:
        """Write one evaluation to every record, its answers first."""
        answers = [answer.record(step, version) for answer in evaluation.answers]
        if answers:
            await self.disk.until_taken(
                "answers", lambda: asyncio.to_thread(self.directory.write_answers, step, answers)
            )
        self._tell_unscored(evaluation.unscored)
        self.last_accuracy = evaluation.accuracy
        self._evaluated_version = version
        self.metrics.update(evaluation.figures)
        self.directory.write_evaluation(step, str(version), evaluation.accuracy, evaluation.metrics)
        self.status.evaluated(step, evaluation)

    def _tell_unscored(self, unscored: str) -> None:
        """Warn of samples or answers that have no reward, once for each reason."""
        why = unscored.partition(": ")[2]
        if why and why not in self._told_unscored and len(self._told_unscored) < MOST_UNSCORED_NOTICES:
            self._told_unscored.add(why)
            self.status.notice(warning(unscored))

    def evaluation_lost(self, step: int) -> None:
        """Warn that a pinned evaluation has no result; the caller evaluates the present version instead."""
        text = (
            f"the evaluation after {step} steps lost its generator; a newer version is evaluated in its place"
        )
        self.status.notice(warning(text))

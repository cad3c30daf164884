"""Makes batches: of rollouts, whose groups are taken as they end until the batch is full, or of given answers.

Invariants: every admitted sample ends in exactly one of trained, dropped(reason) or in flight, and the ledger has that
state before the loop continues. A batch has its groups in the order of admission. The ledger keeps for a step only the
groups that were in its batch or left out permanently, so a repeated step has the same batch. No sample older than the
staleness bound leaves this module.

The bound holds for every `max_staleness` k. While step t is made, the batches of the steps up to t + k are admitted,
each with the version of t as the oldest that may generate its samples. So the versions from s - k on generate a batch
of step s. The update of step s begins from the version of s, and trains no token that is more than k updates old.
With `over_issue`, steps up to t + k - 1 are admitted: the last step of the bound is for groups left over from a full
batch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from flotilla_coordinator.data.prompt_source import PromptSource
from flotilla_coordinator.data.prompts import Prompt
from flotilla_coordinator.ledger.ledger import Ledger
from flotilla_coordinator.ledger.records import DropReason
from flotilla_coordinator.rollouts.batch import (
    Batch,
    RolloutGroup,
    batch_metrics,
    given_group,
    recorded_group,
)
from flotilla_coordinator.rollouts.group import FinishedGroup, GroupRequest, GroupRollout
from flotilla_coordinator.rollouts.prompt_queue import GroupTask, PromptQueue
from flotilla_coordinator.rollouts.samples import Replay
from flotilla_coordinator.rollouts.scoring import RIGHT_AT, Outcome
from flotilla_core import ids
from flotilla_core.config import RolloutConfig, RunConfig
from flotilla_core.errors import FailedPrecondition, UserCodeError
from flotilla_core.version import Version


class RolloutSource:
    """Samples groups from the policy, bounded by staleness."""

    samples_from_policy = True

    def __init__(
        self,
        run_id: str,
        config: RolloutConfig,
        total_steps: int,
        prompts: PromptSource,
        groups: GroupRollout,
        ledger: Ledger,
    ) -> None:
        self._run_id = run_id
        self._config = config
        self._prompts = prompts
        self._ledger = ledger
        self._replay = Replay(run_id, ledger)
        self._groups = groups
        self._queue = PromptQueue(run_id, config, total_steps, prompts, ledger, self._start)

    async def restore(self, steps_done: int, cursor: dict[str, Any] | None) -> None:
        """Begin after so many steps; the ledger's samples of later steps come before any new sample."""
        await self._queue.restore(steps_done, cursor)
        await self._note_outcomes(0, steps_done)

    def reconfigure(self, config: RunConfig) -> None:
        """Admit by another bound, up to another last step; admitted groups keep the bound of their admission."""
        self._config = config.rollout
        self._queue.reconfigure(config.rollout, config.steps)

    def admit(self, step: int, version: Version) -> None:
        """Issue every step that may begin during `step` and has not been issued yet."""
        self._queue.admit(step, version)

    async def batch(self, step: int, version: Version) -> Batch:
        """Return the groups of `step` that end first, as many as it needs; fail as soon as one of them fails."""
        try:
            ended = await self._enough(step, version)
            chosen = [item for item in ended if item.usable][: self._config.prompts_per_step]
        except BaseException:
            # This also happens on cancellation: no group of a failed step continues.
            await _cancel(self._queue.groups(step))
            self._queue.end(step)
            raise
        # A group that is left over is reported in the step that it counts for.
        in_batch = set(chosen)
        finished = [item.task.result() for item in ended if item in in_batch or not item.usable]
        refuse_failing_rewards(self._run_id, step, finished, self._config)
        self._refuse_a_step_without_lessons(step, finished)
        left_over = await self._pass_on(step, in_batch, version)
        await self._note_outcomes(step, step + 1)
        groups = [await self._within_staleness(item, version) for item in chosen]
        batch = Batch(step, [group for group in groups if group.samples], self._queue.cursor)
        self._refuse_a_step_too_old(batch)
        batch.metrics.update(batch_metrics(batch, version))
        batch.metrics.update(self._metrics(finished) | left_over)
        batch.unscored = unscored(step, finished, self._config)
        return batch

    async def close(self) -> None:
        """Cancel what is under way."""
        await _cancel(self._queue.close())

    async def _note_outcomes(self, first_step: int, end_step: int) -> None:
        """Tell the data what came of prompts, from the ledger, so that a resumed run has the same order and levels."""
        if self._prompts.learns_outcomes:
            outcomes = await self._ledger.outcomes(self._run_id, first_step, end_step, right_at=RIGHT_AT)
            for outcome in outcomes:
                place = ids.prompt_of_group(outcome.group_id)
                self._prompts.note(*place, solved=outcome.solved, reward=outcome.reward)

    def _start(self, request: GroupRequest) -> asyncio.Task[FinishedGroup]:
        return asyncio.create_task(self._run(request))

    async def _run(self, request: GroupRequest) -> FinishedGroup:
        # A new group is recorded without waiting for anything, which keeps the order of the draws.
        records = await self._replay.group(request.step, request.group_id) if request.recorded else []
        return await self._groups.run(request, records)

    async def _enough(self, step: int, version: Version) -> list[GroupTask]:
        """Return ended groups of the step, in the order of admission; `dynamic_sampling` draws replacements."""
        news: asyncio.Queue[asyncio.Task[FinishedGroup]] = asyncio.Queue()

        def watch(items: list[GroupTask]) -> int:
            for item in items:
                item.task.add_done_callback(news.put_nowait)
            return len(items)

        wanted, usable, running = self._config.prompts_per_step, 0, watch(self._queue.groups(step))
        while usable < wanted:
            if self._config.dynamic_sampling is not None:
                running += watch(self._queue.draw(step, wanted - usable - running, version))
            if not running:
                break
            usable += bool((await news.get()).result().group.samples)
            running -= 1
        ended = [item for item in self._queue.groups(step) if item.task.done()]
        return sorted(ended, key=lambda item: item.place)

    async def _pass_on(self, step: int, in_batch: set[GroupTask], version: Version) -> dict[str, float]:
        """Keep groups without a place in the batch for the next step, or end them where they would be too old."""
        groups = self._queue.groups(step)
        spare = [item for item in groups if item not in in_batch and (item.usable or not item.task.done())]
        self._queue.end(step)
        last = self._queue.is_last(step)
        kept = [item for item in spare if not last and self._may_wait(item, version)]
        waiting = set(kept)
        tails = [item for item in spare if item not in waiting]
        if kept:
            self._queue.carry_over(kept, step + 1)
            await self._ledger.carry_over(self._run_id, [item.request.group_id for item in kept], step + 1)
        if tails:
            await self._give_up(tails)
        if not self._config.over_issue:
            return {}
        return {"rollout/carried": float(len(kept)), "rollout/tails": float(len(tails))}

    def _may_wait(self, item: GroupTask, version: Version) -> bool:
        """Return whether the group is still young enough for the update after the one of `version`."""
        samples = item.task.result().group.samples if item.task.done() else []
        steps = [oldest.step for sample in samples if (oldest := sample.oldest_version) is not None]
        return version.step + 1 - min(steps, default=item.request.version.step) <= item.request.max_staleness

    async def _give_up(self, tails: list[GroupTask]) -> None:
        """Stop groups, and drop those of their samples that were not dropped for a reason of their own."""
        await _cancel(tails)
        for item in tails:
            lost = self._groups.sample_ids(item.request.group_id)
            if not item.task.cancelled() and item.task.exception() is None:
                lost = tuple(sample.sample_id for sample in item.task.result().group.samples)
            await self._ledger.dropped(self._run_id, lost, DropReason.TAIL)

    def _refuse_a_step_without_lessons(self, step: int, finished: list[FinishedGroup]) -> None:
        if any(item.group.samples for item in finished):
            return
        uniform = sum(item.uniform for item in finished)
        others = f", and of the other {rest} no sample is left" if (rest := len(finished) - uniform) else ""
        raise FailedPrecondition(
            f"no group of step {step} teaches anything",
            where=f"run {self._run_id}",
            why=f"all rewards are equal within {uniform} of the {len(finished)} groups that were drawn{others}",
            next_step="take prompts that are neither too hard nor too easy for the policy, end the run earlier (stop), "
            "or raise rollout.dynamic_sampling.max_prompts_per_step",
        )

    def _refuse_a_step_too_old(self, batch: Batch) -> None:
        if batch.groups:
            return
        raise FailedPrecondition(
            f"every sample of step {batch.step} is older than its bound",
            where=f"run {self._run_id}",
            why="they were written further before this update than the max_staleness that they were admitted by",
            next_step=f"flotilla run resume {self._run_id}: it asks for them again",
        )

    def _metrics(self, finished: list[FinishedGroup]) -> dict[str, float]:
        size = self._config.samples_per_prompt
        metrics = {
            "reward/error_rate": failure_rate(finished, size, timed_out=False),
            "reward/timeout_rate": failure_rate(finished, size, timed_out=True),
            "reward/unverifiable_rate": sum(one.unverifiable for one in finished) / (len(finished) * size),
            "samples/dropped": float(sum(item.dropped for item in finished)),
            "samples/retried": float(sum(item.retried for item in finished)),
        }
        if self._config.dynamic_sampling is not None:
            metrics["rollout/ended_groups"] = float(len(finished))
            metrics["rollout/uniform_groups"] = float(sum(item.uniform for item in finished))
        if self._prompts.rest_epochs:
            metrics["data/resting"] = self._prompts.resting_share
        if (left_out := self._prompts.left_out) is not None:
            metrics["data/left_out"] = float(left_out)
        return metrics

    async def _within_staleness(self, item: GroupTask, version: Version) -> RolloutGroup:
        """Drop samples that a version older than the bound generated; by construction there are none."""
        group, bound = item.task.result().group, item.request.max_staleness
        stale = [sample.sample_id for sample in group.samples if sample.steps_old(version) > bound]
        if stale:
            await self._ledger.dropped(self._run_id, stale, DropReason.STALE)
            group.samples = [sample for sample in group.samples if sample.sample_id not in stale]
        return group


async def _cancel(groups: list[GroupTask]) -> None:
    for item in groups:
        item.task.cancel()
    await asyncio.gather(*(item.task for item in groups), return_exceptions=True)


def failure_rate(finished: Sequence[FinishedGroup], samples_per_prompt: int, *, timed_out: bool) -> float:
    """Return the share of all samples whose reward timed out, or failed in another way."""
    failed = sum(failure.timed_out == timed_out for item in finished for failure in item.failures)
    return failed / (len(finished) * samples_per_prompt)


def unscored(step: int, finished: Sequence[FinishedGroup], config: RolloutConfig) -> str:
    """Say how many samples of a step have no reward, and why the first of them has none; empty where all have one."""
    failures = [failure for item in finished for failure in item.failures]
    if not failures:
        return ""
    samples = len(finished) * config.samples_per_prompt
    return (
        f"{len(failures)} of {samples} samples of step {step} could not be scored: {_first(failures).report}"
    )


def _first(failures: Sequence[Outcome]) -> Outcome:
    """Return the first failure that shows code, or else the first one."""
    return next((failure for failure in failures if failure.traceback), failures[0])


def refuse_failing_rewards(
    run_id: str, step: int, finished: Sequence[FinishedGroup], config: RolloutConfig
) -> None:
    """Refuse a step in which the reward failed for most samples: a broken reward is no hard task."""
    failures = [failure for item in finished for failure in item.failures]
    rate = len(failures) / (len(finished) * config.samples_per_prompt)
    trainable = any(item.group.samples for item in finished)
    if failures and (rate > config.max_reward_failure_rate or not trainable):
        raise UserCodeError(
            f"{len(failures)} samples of step {step} could not be scored ({rate:.0%})",
            where=f"run {run_id}, rewards",
            why=_first(failures).report,
            next_step="fix the reward, or the environment of episodes; errors and timeouts are never scores "
            "(limit: rollout.max_reward_failure_rate)",
        )


class CursorAlone:
    """A source whose state is its place in the data set: no work of it is ever under way."""

    def __init__(self, prompts: PromptSource) -> None:
        self._prompts = prompts

    async def restore(self, steps_done: int, cursor: dict[str, Any] | None) -> None:
        """Continue from the cursor."""
        if cursor is not None:
            self._prompts.restore(cursor)

    def reconfigure(self, config: RunConfig) -> None:
        """Do nothing: no setting that can change concerns it."""

    def admit(self, step: int, version: Version) -> None:
        """Do nothing: what it gives needs no preparation."""

    async def close(self) -> None:
        """Do nothing: there is no work to end."""


class SupervisedSource(CursorAlone):
    """Makes batches of prompts with their given answers: one, or a pair of which one is preferred.

    A batch is `prompts_per_step` prompts in the source's order. Nothing is generated, so nothing enters the ledger.
    """

    samples_from_policy = False

    def __init__(self, run_id: str, prompts: PromptSource, prompts_per_step: int) -> None:
        super().__init__(prompts)
        self._run_id = run_id
        self._prompts_per_step = prompts_per_step

    async def batch(self, step: int, version: Version) -> Batch:
        """Return the next prompts and their answers."""
        prompts = [self._prompts.next(step) for _ in range(self._prompts_per_step)]
        groups = [self._group(prompt) for prompt in prompts]
        return Batch(step=step, groups=groups, cursor=self._prompts.cursor)

    def _group(self, prompt: Prompt) -> RolloutGroup:
        return given_group(self._run_id, prompt)


class RecordedSource(SupervisedSource):
    """Makes batches of groups that a run recorded, in the source's order; nothing of it enters the ledger again."""

    async def batch(self, step: int, version: Version) -> Batch:
        """Return the next groups."""
        batch = await super().batch(step, version)
        batch.metrics.update(batch_metrics(batch, version))
        return batch

    def _group(self, prompt: Prompt) -> RolloutGroup:
        return recorded_group(self._run_id, prompt)

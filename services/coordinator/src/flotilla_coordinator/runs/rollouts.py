"""Rollout batches: prompts out to the generators, scored groups back, in order.

Invariants: every admitted sample ends in exactly one of trained, dropped(reason) or in flight, and the ledger
knows which before the loop goes on; batches are taken in the order of admission; a group is queued the moment
it is complete and a sample is scored as soon as it ends, together with those that end right after it;
no sample older than the staleness bound leaves here.

The bound, for every `max_staleness` k: while step t is made the batches of the steps up to t + k are admitted, each
with the version of t as the oldest that may write it. So a batch of step s is written by the versions from s - k on,
and the update of step s, which begins from the version of s, trains no token that is more than k updates old.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from flotilla_coordinator.data.prompts import Prompt, PromptSource
from flotilla_coordinator.data.tokenizer import Tokenizer
from flotilla_coordinator.ledger.ledger import Ledger
from flotilla_coordinator.ledger.records import GroupIssue
from flotilla_coordinator.ledger.rewind import GROUP_TOO_SMALL, REWARD_ERROR, REWARD_TIMEOUT
from flotilla_coordinator.runs.batch import Batch, RolloutGroup, RolloutSample
from flotilla_coordinator.runs.batch_metrics import batch_metrics
from flotilla_coordinator.runs.generation import Generation, GenerationRequest
from flotilla_coordinator.runs.replay import Replay, decided, recorded_failures, recorded_samples
from flotilla_coordinator.runs.samples import ledger_sample, rollout_sample
from flotilla_coordinator.runs.score_item import score_item
from flotilla_coordinator.runs.scoring import Outcome, Scorer
from flotilla_core import ids, telemetry
from flotilla_core.config import RolloutConfig
from flotilla_core.errors import UserCodeError
from flotilla_core.telemetry import names
from flotilla_core.version import Version

# Samples that end at about the same time share one call, which costs more than most scores; the last ones never wait.
SCORE_TOGETHER_S = 0.25


@dataclass
class _Admitted:
    """One step's groups under way, and where the data set stood after drawing them."""

    groups: list[asyncio.Task[_Finished]]
    cursor: dict[str, int]


@dataclass(frozen=True)
class _Scored:
    """A sample and what the reward service made of it."""

    sample: RolloutSample
    outcome: Outcome


@dataclass(frozen=True)
class _Finished:
    """One group's end: the samples that may train and what happened to the others."""

    group: RolloutGroup
    failures: list[Outcome]
    dropped: int
    retried: int


class RolloutSource:
    """Samples groups from the policy, bounded by staleness."""

    samples_from_policy = True

    def __init__(
        self,
        run_id: str,
        config: RolloutConfig,
        total_steps: int,
        prompts: PromptSource,
        tokenizer: Tokenizer,
        generation: Generation,
        scorer: Scorer,
        ledger: Ledger,
        min_group_samples: int,
    ) -> None:
        self._run_id = run_id
        self._config = config
        self._total_steps = total_steps
        self._prompts = prompts
        self._tokenizer = tokenizer
        self._generation = generation
        self._scorer = scorer
        self._ledger = ledger
        self._min_group_samples = min_group_samples
        self._replay = Replay(run_id, ledger)
        self._admitted: dict[int, _Admitted] = {}
        self._next_step = 0

    async def go_on(self, steps_done: int, cursor: dict[str, Any] | None) -> None:
        """Begin after so many steps; the ledger's samples of later ones come before any new sample."""
        if cursor is not None:
            self._prompts.restore(cursor)
        self._next_step = steps_done
        await self._replay.begin()

    def admit(self, step: int, version: Version) -> None:
        """Issue every step up to `step + max_staleness` that has not been issued yet."""
        last = min(step + self._config.max_staleness, self._total_steps - 1)
        while self._next_step <= last:
            prompts = [self._prompts.next() for _ in range(self._config.prompts_per_step)]
            # What runs ahead also waits in the generators behind the steps before it.
            limit_s = self._config.sample_timeout_s * (1 + self._next_step - step)
            groups = [
                asyncio.create_task(self._run_group(prompt, self._next_step, version, limit_s))
                for prompt in prompts
            ]
            self._admitted[self._next_step] = _Admitted(groups, self._prompts.cursor)
            self._next_step += 1

    async def batch(self, step: int, version: Version) -> Batch:
        """All groups of `step`; fails as soon as one of them cannot be had."""
        admitted = self._admitted.pop(step)
        try:
            finished = await asyncio.gather(*admitted.groups)
        except BaseException:
            # Also when cancelled: no group of a step that failed goes on.
            await self._cancel(admitted.groups)
            raise
        groups = await self._within_staleness([item.group for item in finished], version)
        self._refuse_failing_rewards(step, finished)
        batch = Batch(step, [group for group in groups if group.samples], admitted.cursor)
        batch.metrics.update(batch_metrics(batch, version))
        batch.metrics["reward/error_rate"] = self._rate(finished, timed_out=False)
        batch.metrics["reward/timeout_rate"] = self._rate(finished, timed_out=True)
        batch.metrics["samples/dropped"] = float(sum(item.dropped for item in finished))
        batch.metrics["samples/retried"] = float(sum(item.retried for item in finished))
        return batch

    async def close(self) -> None:
        """Cancel what is under way."""
        groups = [group for admitted in self._admitted.values() for group in admitted.groups]
        self._admitted.clear()
        await self._cancel(groups)

    @staticmethod
    async def _cancel(groups: list[asyncio.Task[_Finished]]) -> None:
        for group in groups:
            group.cancel()
        await asyncio.gather(*groups, return_exceptions=True)

    async def _run_group(self, prompt: Prompt, step: int, version: Version, limit_s: float) -> _Finished:
        """Generate, score and record one group, or what the ledger does not hold of it."""
        group_id = ids.group_id(self._run_id, prompt.epoch, prompt.index)
        sample_ids = tuple(ids.sample_id(group_id, i) for i in range(self._config.samples_per_prompt))
        attributes: dict[str, str | int] = {
            names.RUN_ID: self._run_id,
            names.STEP: step,
            names.GROUP_ID: group_id,
        }
        with telemetry.span(names.RL_SAMPLE, attributes=attributes) as span:
            records = await self._replay.group(step, group_id)
            if not records:
                await self._ledger.group_issued(
                    GroupIssue(
                        self._run_id, group_id, sample_ids, step, 0, prompt.prompt_text, prompt.token_ids
                    )
                )
            have = decided(records)
            request = GenerationRequest(
                prompt_token_ids=prompt.token_ids,
                sample_ids=tuple(sample_id for sample_id in sample_ids if sample_id not in have),
                sampling=self._config.sampling,
                min_version=version,
                timeout_s=limit_s,
                max_attempts=self._config.max_attempts,
            )
            scored = await self._generate_and_score(request, prompt) if request.sample_ids else []
            group = await self._record(group_id, prompt, recorded_samples(records), scored, sample_ids)
            group.span = span.get_span_context() if span.is_recording() else None
        return _Finished(
            group,
            failures=[
                *(item.outcome for item in scored if item.outcome.total is None),
                *recorded_failures(records),
            ],
            dropped=len(sample_ids) - len(group.samples),
            retried=sum(item.sample.attempt > 0 for item in scored),
        )

    async def _generate_and_score(self, request: GenerationRequest, prompt: Prompt) -> list[_Scored]:
        """Score whatever has ended while the rest still decodes."""
        arrived: asyncio.Queue[RolloutSample | None] = asyncio.Queue()

        async def generate() -> None:
            try:
                async with aclosing(self._generation.samples(request)) as samples:
                    async for generated in samples:
                        arrived.put_nowait(rollout_sample(generated, self._tokenizer))
            finally:
                arrived.put_nowait(None)

        producer = asyncio.create_task(generate())
        scored: list[_Scored] = []
        try:
            ended = False
            while not ended:
                ready = [await arrived.get()]
                await asyncio.wait([producer], timeout=SCORE_TOGETHER_S)
                while not arrived.empty():
                    ready.append(arrived.get_nowait())
                ended = ready[-1] is None
                samples = [sample for sample in ready if sample is not None]
                if samples:
                    scored += await self._score(samples, prompt)
            await producer
        finally:
            producer.cancel()
            await asyncio.gather(producer, return_exceptions=True)
        return scored

    async def _score(self, samples: list[RolloutSample], prompt: Prompt) -> list[_Scored]:
        items = [score_item(s.sample_id, prompt, s.text, s.token_ids) for s in samples]
        outcomes = await self._scorer.score(items)
        return [_Scored(sample, outcomes[sample.sample_id]) for sample in samples]

    async def _record(
        self,
        group_id: str,
        prompt: Prompt,
        recorded: list[RolloutSample],
        scored: list[_Scored],
        sample_ids: tuple[str, ...],
    ) -> RolloutGroup:
        """Write what is new of a group to the ledger, then hand on what may train, in the order of the slots."""
        trainable = [item for item in scored if item.outcome.total is not None]
        too_few = len(recorded) + len(trainable) < self._min_group_samples
        dropped: dict[str, list[str]] = {}
        if too_few and recorded:
            dropped[GROUP_TOO_SMALL] = [sample.sample_id for sample in recorded]
        for item in scored:
            reason = _drop_reason(item.outcome) or (GROUP_TOO_SMALL if too_few else "")
            if reason:
                dropped.setdefault(reason, []).append(item.sample.sample_id)
        for reason, lost in dropped.items():
            await self._ledger.dropped(self._run_id, lost, reason)
        if too_few:
            return RolloutGroup(group_id, prompt.prompt_text, prompt.token_ids, [])
        for item in trainable:
            item.sample.reward = item.outcome.total or 0.0
        await self._ledger.group_scored([ledger_sample(item.sample) for item in trainable])
        samples = [*recorded, *(item.sample for item in trainable)]
        samples.sort(key=lambda sample: sample_ids.index(sample.sample_id))
        return RolloutGroup(group_id, prompt.prompt_text, prompt.token_ids, samples)

    async def _within_staleness(self, groups: list[RolloutGroup], version: Version) -> list[RolloutGroup]:
        """Drop samples that any version older than the bound wrote; by construction there are none."""
        for group in groups:
            stale = [s for s in group.samples if self._too_old(s, version)]
            if stale:
                await self._ledger.dropped(self._run_id, [s.sample_id for s in stale], "stale")
                group.samples = [s for s in group.samples if s not in stale]
        return groups

    def _too_old(self, sample: RolloutSample, version: Version) -> bool:
        """By steps: a sample of an earlier lineage is as old as the step that it was drawn for."""
        oldest = sample.oldest_version()
        return oldest is not None and version.step - oldest.step > self._config.max_staleness

    def _refuse_failing_rewards(self, step: int, finished: list[_Finished]) -> None:
        """A reward that fails for most samples is a broken reward, not a hard task."""
        failures = [failure for item in finished for failure in item.failures]
        rate = self._rate(finished, timed_out=False) + self._rate(finished, timed_out=True)
        trainable = any(item.group.samples for item in finished)
        if failures and (rate > self._config.max_reward_failure_rate or not trainable):
            raise UserCodeError(
                f"{len(failures)} samples of step {step} could not be scored ({rate:.0%})",
                where=f"run {self._run_id}, rewards",
                why=failures[0].failure,
                next_step="fix the reward; errors and timeouts are never scores "
                "(limit: rollout.max_reward_failure_rate)",
            )

    def _rate(self, finished: list[_Finished], *, timed_out: bool) -> float:
        total = len(finished) * self._config.samples_per_prompt
        return sum(f.timed_out == timed_out for item in finished for f in item.failures) / total


def _drop_reason(outcome: Outcome) -> str:
    """Why a sample cannot train; empty where it has a value."""
    if outcome.total is not None:
        return ""
    return REWARD_TIMEOUT if outcome.timed_out else REWARD_ERROR

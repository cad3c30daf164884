"""Takes one group from its prompt, through generation and scoring, to the ledger.

Invariants: a sample is scored as soon as it ends, except for a short time in which the generator holds it back for
others. Where a reward compares the samples of a group, all of them are scored together, after the live checks of their
versions. A group is passed on once it is complete and the ledger has the outcome of each of its samples. Every version
that generated a part of it has passed its live check by then. Samples of the group that the ledger has from before
are neither generated nor scored again; those that a reward compares with them see them.

The greedy response that samples may be compared with has the same limits, oldest version and priority as these samples,
and the same rewards score it. It is not a sample, so neither the ledger nor an update ever holds it. A group with some
recorded samples is compared with the reward that is recorded with them, never with a new response.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from flotilla.reward.v1.reward_pb2 import ScoreItem
from flotilla_coordinator.data.prompts import Prompt
from flotilla_coordinator.ledger.ledger import Ledger
from flotilla_coordinator.ledger.records import DropReason, GroupIssue, SampleRecord
from flotilla_coordinator.ledger.verdicts import is_unverifiable
from flotilla_coordinator.rollouts.batch import RolloutGroup, RolloutSample
from flotilla_coordinator.rollouts.generation import GenerationRequest, Sampler
from flotilla_coordinator.rollouts.played_turns import may_go_on
from flotilla_coordinator.rollouts.samples import decided, recorded_failures, recorded_samples
from flotilla_coordinator.rollouts.scoring import Needs, Outcome, Scorer, score_item
from flotilla_core import ids, telemetry
from flotilla_core.config import RolloutConfig
from flotilla_core.config.advantages import AdvantageConfig
from flotilla_core.tasks import both
from flotilla_core.telemetry import names
from flotilla_core.version import Version

GATHER_S = 0.25
"""The wait for more samples: those that end at about the same time share a message and a call of the reward, which both
cost more than most samples and scores do."""


class GreedyBaseline:
    """Generates the greedy response to a prompt, with whose reward the samples of its group are compared."""

    def __init__(
        self,
        sampler: Sampler,
        scorer: Scorer,
        wait_until_verified: Callable[[Version], Awaitable[None]],
        is_void: Callable[[RolloutSample], bool],
    ) -> None:
        self._sampler = sampler
        self._scorer = scorer
        self._wait_until_verified = wait_until_verified
        self._is_void = is_void

    async def outcome(
        self, wanted: GroupRequest, beside: GenerationRequest, recorded: Sequence[RolloutSample]
    ) -> Outcome:
        """Return the outcome of a greedy response drawn with the samples of `beside`, or recorded with samples."""
        if recorded:
            return Outcome(recorded[0].greedy_reward)
        request = replace(
            beside,
            sample_ids=(f"{wanted.group_id}/greedy",),
            turns=None,
            sampling=beside.sampling.model_copy(update={"temperature": 0.0}),
        )
        response = await self._response(request)
        while self._is_void(response):
            response = await self._response(request)
        if response.outcome is None:
            item = _item(response, wanted, await self._scorer.needs())
            response.take_outcome((await self._scorer.score([item]))[response.sample_id])
        assert response.outcome is not None
        return response.outcome

    async def _response(self, request: GenerationRequest) -> RolloutSample:
        async with aclosing(self._sampler.samples(request)) as samples:
            (response,) = [sample async for sample in samples]
        for span in response.spans:
            await self._wait_until_verified(span.version)
        return response


@dataclass(frozen=True)
class GroupRequest:
    """A prompt that was admitted for a step, and the limits of its samples."""

    prompt: Prompt
    group_id: str
    step: int
    version: Version
    """The oldest version that may generate its samples."""
    limit_s: float
    """The time limit of all its samples together, on one generator."""
    max_staleness: int
    """The staleness bound by which it was admitted."""
    recorded: bool = False
    """True where the ledger has it from before."""
    oldest_turn: int = 0
    """The oldest step of the versions of recorded turns that are young enough for its update."""


@dataclass(frozen=True)
class FinishedGroup:
    """A finished group: the samples that may be trained, and the outcomes of the others."""

    group: RolloutGroup
    failures: list[Outcome]
    dropped: int
    retried: int
    uniform: bool = False
    """True where it was left out because all its rewards were equal."""
    unverifiable: int = 0
    """The number of samples that made a verifier fail."""


def _item(sample: RolloutSample, wanted: GroupRequest, needs: Needs, group: str = "") -> ScoreItem:
    """Return a sample as the rewards take it; without a group it is compared with no other one."""
    token_ids = sample.token_ids if needs.token_ids else None
    return score_item(
        sample.sample_id, wanted.prompt, sample.text, group=group, token_ids=token_ids, step=wanted.step
    )


class GroupRollout:
    """Generates, scores and records the groups of one run."""

    def __init__(
        self,
        run_id: str,
        config: RolloutConfig,
        *,
        sampler: Sampler,
        scorer: Scorer,
        ledger: Ledger,
        advantage: AdvantageConfig,
        wait_until_verified: Callable[[Version], Awaitable[None]],
        is_void: Callable[[RolloutSample], bool] = lambda _sample: False,
    ) -> None:
        """`is_void` tells of a sample whose versions were verified whether a generator with wrong weights wrote it."""
        self._run_id = run_id
        self._config = config
        self._sampler = sampler
        self._scorer = scorer
        self._ledger = ledger
        self._wait_until_verified = wait_until_verified
        self._is_void = is_void
        self._min_group_samples = advantage.needed_group_samples
        self._baseline = (
            GreedyBaseline(sampler, scorer, wait_until_verified, is_void)
            if advantage.needs_greedy_reward
            else None
        )

    def sample_ids(self, group_id: str) -> tuple[str, ...]:
        """Return the sample ids of a whole group, in the order of its slots."""
        return tuple(ids.sample_id(group_id, i) for i in range(self._config.samples_per_prompt))

    async def run(self, wanted: GroupRequest, records: list[SampleRecord]) -> FinishedGroup:
        """Generate, score and record one group, or the part of it that `records` lack."""
        sample_ids = self.sample_ids(wanted.group_id)
        attributes: dict[str, str | int] = {
            names.RUN_ID: self._run_id,
            names.STEP: wanted.step,
            names.GROUP_ID: wanted.group_id,
        }
        with telemetry.span(names.RL_SAMPLE, attributes=attributes) as span:
            if not records:
                await self._ledger.group_issued(self._issue(wanted, sample_ids))
            have = decided(records)
            request = GenerationRequest(
                prompt_token_ids=wanted.prompt.token_ids,
                sample_ids=tuple(sample_id for sample_id in sample_ids if sample_id not in have),
                sampling=self._config.sampling,
                min_version=wanted.version,
                timeout_s=wanted.limit_s,
                max_attempts=self._config.max_attempts,
                resume_partial=self._config.resume_partial,
                gather_s=GATHER_S,
                priority=wanted.step,
                prompt=wanted.prompt,
                turns={
                    record.sample_id: record.turns
                    for record in records
                    if record.turns and may_go_on(record.turns, wanted.version, wanted.oldest_turn)
                },
                world=wanted.group_id.partition("/")[2],
            )
            recorded = recorded_samples(records)
            scored = await self._scored_samples(request, wanted, recorded) if request.sample_ids else []
            scored = await self._verified(scored, request, wanted, recorded)
            if any(sample.outcome is None for sample in scored):
                await self._score(scored, wanted, recorded)
            group = await self._record(wanted, recorded, scored)
            group.span = span.get_span_context() if span.is_recording() else None
        uniform = self._config.dynamic_sampling is not None and group.uniform
        if uniform:
            await self._ledger.dropped(self._run_id, [s.sample_id for s in group.samples], DropReason.UNIFORM)
            group.samples = []
        return FinishedGroup(
            group,
            failures=[
                *(sample.outcome for sample in scored if sample.outcome and sample.outcome.failed),
                *recorded_failures(records),
            ],
            unverifiable=sum(is_unverifiable(sample.verdicts) for sample in scored)
            + sum(is_unverifiable(record.verdicts) for record in records if record.sample_id in have),
            dropped=len(sample_ids) - len(group.samples),
            retried=sum(sample.attempt > 0 for sample in scored),
            uniform=uniform or any(record.drop_reason == DropReason.UNIFORM for record in records),
        )

    def _issue(self, wanted: GroupRequest, sample_ids: tuple[str, ...]) -> GroupIssue:
        prompt = wanted.prompt
        return GroupIssue(
            self._run_id,
            wanted.group_id,
            sample_ids,
            wanted.step,
            0,
            prompt.prompt_text,
            prompt.token_ids,
            wanted.max_staleness,
        )

    async def _verified(
        self,
        scored: list[RolloutSample],
        request: GenerationRequest,
        wanted: GroupRequest,
        recorded: list[RolloutSample],
    ) -> list[RolloutSample]:
        """Return the samples when their versions were checked; those that wrong weights wrote are drawn again.

        A sample that ends while its version is still being checked may be of weights that are not the trainer's.
        """
        while newest := max((span.version for sample in scored for span in sample.spans), default=None):
            await self._wait_until_verified(newest)
            void = tuple(sample.sample_id for sample in scored if self._is_void(sample))
            if not void:
                break
            again = await self._scored_samples(replace(request, sample_ids=void, turns={}), wanted, recorded)
            scored = [sample for sample in scored if sample.sample_id not in void] + again
        return scored

    async def _scored_samples(
        self, request: GenerationRequest, wanted: GroupRequest, recorded: list[RolloutSample]
    ) -> list[RolloutSample]:
        """Generate and score the samples of the request, and the greedy response where the run compares with it.

        What is compared with the others of its group is not scored yet.
        """
        samples = self._generate_and_score(request, wanted)
        if self._baseline is None:
            return await samples
        greedy = self._baseline.outcome(wanted, request, recorded)
        scored, outcome = await both(samples, greedy)
        for sample in scored:
            sample.compare_with_greedy(outcome)
        return scored

    async def _generate_and_score(
        self, request: GenerationRequest, wanted: GroupRequest
    ) -> list[RolloutSample]:
        """Score finished samples while the rest is still being generated."""
        arrived: asyncio.Queue[RolloutSample | None] = asyncio.Queue()

        async def generate() -> None:
            try:
                async with aclosing(self._sampler.samples(request)) as samples:
                    async for sample in samples:
                        arrived.put_nowait(sample)
            finally:
                arrived.put_nowait(None)

        producer = asyncio.create_task(generate())
        scored: list[RolloutSample] = []
        try:
            ended = False
            while not ended:
                ready = [await arrived.get()]
                while not arrived.empty():
                    ready.append(arrived.get_nowait())
                ended = ready[-1] is None
                samples = [sample for sample in ready if sample is not None]
                if samples and not (await self._scorer.needs()).whole_groups:
                    await self._score(samples, wanted)
                scored += samples
            await producer
        finally:
            producer.cancel()
            await asyncio.gather(producer, return_exceptions=True)
        return scored

    async def _score(
        self, samples: list[RolloutSample], wanted: GroupRequest, beside: Sequence[RolloutSample] = ()
    ) -> None:
        """Score samples, beside others of their group that have their rewards; not those that failed as episodes."""
        samples = [sample for sample in samples if sample.outcome is None]
        needs = await self._scorer.needs()
        items = [_item(sample, wanted, needs, wanted.group_id) for sample in (*beside, *samples)]
        outcomes = await self._scorer.score(items)
        for sample in samples:
            sample.take_outcome(outcomes[sample.sample_id])

    async def _record(
        self, wanted: GroupRequest, recorded: list[RolloutSample], scored: list[RolloutSample]
    ) -> RolloutGroup:
        """Record the new samples of a group, then return those that may be trained, in the order of the slots."""
        prompt = wanted.prompt
        group = RolloutGroup(
            wanted.group_id,
            prompt.prompt_text,
            prompt.token_ids,
            [],
            data_set=prompt.data_set,
            teacher=prompt.teacher,
            answer=prompt.answer,
            info=prompt.info,
            chat=prompt.chat,
            answer_column=prompt.answer_column,
        )
        trainable = [sample for sample in scored if sample.drop_reason is None]
        too_few = len(recorded) + len(trainable) < self._min_group_samples
        dropped: dict[DropReason, list[str]] = {}
        if too_few and recorded:
            dropped[DropReason.GROUP_TOO_SMALL] = [sample.sample_id for sample in recorded]
        for sample in scored:
            if sample.drop_reason or too_few:
                reason = sample.drop_reason or DropReason.GROUP_TOO_SMALL
                dropped.setdefault(reason, []).append(sample.sample_id)
        for reason, lost in dropped.items():
            judged = [sample for sample in scored if sample.sample_id in lost]
            await self._ledger.dropped(self._run_id, lost, reason, judged)
        if too_few:
            return group
        await self._ledger.group_scored(trainable)
        order = self.sample_ids(wanted.group_id).index
        group.samples = sorted([*recorded, *trainable], key=lambda sample: order(sample.sample_id))
        return group
